"""The executor: any schedule computes what a plain loop over the microbatches does, bit by bit."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import pytest
import torch
from torch import Tensor

from megabit.config import Config, load_config
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStage, build_stage
from megabit.pipeline.actions import Backward, Forward
from megabit.pipeline.execute import PipelineResult, run_schedule
from megabit.pipeline.schedules import make_schedule
from megabit.tensor_parallel import Noise

Name: TypeAlias = Literal["1f1b", "gpipe", "forward_only"]

B, S, H = 2, 8, 32
GRADIENT = torch.tensor(0.125)
"""Of the objective with respect to the loss sums."""
FIRST = 40
"""Number of the first microbatch in the global batch."""


def config(*settings: str) -> Config:
    # Untied: the two copies of a tied embedding would each have a part of its gradient.
    return load_config(
        [
            *(f"model.hidden_size={H}", "model.intermediate_size=48", "model.vocab_size=64"),
            *("model.num_hidden_layers=4", "model.tie_word_embeddings=false"),
            *(f"data.seq_length={S}", f"train.micro_batch_size={B}"),
            *settings,
        ]
    )


def microbatches(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and an uneven mask, ``[m, B, S]``."""
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(64, (2, count, B, S), generator=generator)
    return tokens[0], tokens[1], torch.rand((count, B, S), generator=generator) < 0.7


@dataclass
class Ran:
    """A run of a schedule on one rank."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    result: PipelineResult
    sent_bytes: float
    events: list[str]
    """In order: ``F 3`` when the stage computed the microbatch of which the noise says that it is
    number 3, ``gradient`` when the first parameter got one."""


def run(
    config: Config, name: Name, count: int, prepare: Callable[[CausalLMStage], Any] = lambda _: None
) -> Ran:
    """Run a schedule in the calling rank of a job."""
    tp, pp = config.parallel.tp, config.parallel.pp
    mesh = ParallelMesh()
    if tp * pp > 1:
        mesh = ParallelMesh.create(tp, pp, mesh.device)
    stage = build_stage(config, mesh)
    prepare(stage)
    events: list[str] = []
    next(stage.parameters()).register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    stage.register_forward_pre_hook(lambda _, inputs: events.append(f"F {inputs[2].microbatch}"))
    inputs, targets, mask = microbatches(count)
    result = run_schedule(
        make_schedule(name, pp, count)[mesh.pp.rank],
        stage,
        inputs,
        lambda hidden, i: stage.loss(hidden, targets[i], mask[i]),
        mesh.pp,
        noises=[Noise(seed=0, step=0, microbatch=FIRST + i) for i in range(count)],
        output_gradient=GRADIENT,
    )
    gradients = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
    return Ran(result.outputs, gradients, result, mesh.pp.sent_bytes, events)


def plain_loop(count: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and gradients without any schedule."""
    stage = build_stage(config(), ParallelMesh())
    losses = []
    for tokens, targets, mask in zip(*microbatches(count), strict=True):
        loss = stage.loss(stage(tokens), targets, mask)
        loss.backward(GRADIENT)
        losses.append(loss.detach())
    gradients = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(stage.parameters()))
    return losses, gradients


def assert_equals_plain_loop(ranks: list[Ran], count: int) -> None:
    losses, expected = plain_loop(count)
    assert [len(ran.losses) for ran in ranks] == [0] * (len(ranks) - 1) + [count]
    assert all(map(torch.equal, ranks[-1].losses, losses))
    gradients = {name: grad for ran in ranks for name, grad in ran.gradients.items()}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        # Stages compute what one process does, in the same order: no bit may change.
        assert torch.equal(gradients[name], gradient), name


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_equals_a_plain_loop(name: Name, pp: int) -> None:
    laid_out = config(f"parallel.pp={pp}")
    for count in sorted({1, max(pp - 1, 1), pp, 2 * pp + 1}):
        ranks = run_ranks(lambda count=count: run(laid_out, name, count), pp)
        assert_equals_plain_loop(ranks, count)
        for stage, ran in enumerate(ranks):
            # Each microbatch with its own noise, and a gradient handed over in each backward pass,
            # as the schedule has it: data parallelism counts them to know the last one.
            actions = make_schedule(name, pp, count)[stage]
            assert ran.events == [
                f"F {FIRST + action.microbatch}" if isinstance(action, Forward) else "gradient"
                for action in actions
                if isinstance(action, Forward | Backward)
            ]
            assert ran.events.count("gradient") == count
            assert 0 <= ran.result.wait_s <= ran.result.busy_s
            messages = count * ((stage < pp - 1) + (stage > 0))
            assert ran.sent_bytes == messages * B * S * H * 4


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_late_ranks_change_nothing(name: Name) -> None:
    def run_late() -> Ran:
        delays = random.Random(torch.distributed.get_rank())

        def sleep(*_: Any) -> None:
            time.sleep(delays.choice([0, 0, 0.01, 0.02]))

        def prepare(stage: CausalLMStage) -> None:
            stage.register_forward_pre_hook(sleep)
            next(stage.parameters()).register_post_accumulate_grad_hook(sleep)

        return run(config("parallel.pp=4"), name, 6, prepare)

    assert_equals_plain_loop(run_ranks(run_late, 4), 6)


def test_sequence_parallel_stages_send_their_own_tokens_only() -> None:
    laid_out = config("parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true")
    for ran in run_ranks(lambda: run(laid_out, "1f1b", 3), 4):
        assert ran.sent_bytes == 3 * B * S // 2 * H * 4


@pytest.mark.parametrize("pp", [1, 2])
def test_forward_only_keeps_no_graph(pp: int) -> None:
    def run_forward() -> tuple[Ran, list[bool]]:
        graphs: list[bool] = []

        def prepare(stage: CausalLMStage) -> None:
            stage.register_forward_hook(lambda _, __, out: graphs.append(out.requires_grad))

        return run(config(f"parallel.pp={pp}"), "forward_only", 3, prepare), graphs

    ranks = run_ranks(run_forward, pp)
    losses, _ = plain_loop(3)
    assert all(map(torch.equal, ranks[-1][0].losses, losses))
    for ran, graphs in ranks:
        assert graphs == [False] * 3
        assert ran.gradients == {}
        assert ran.events == [f"F {FIRST + i}" for i in range(3)]
