"""The executor: any schedule computes what a plain loop over the microbatches does, bit by bit."""

import functools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabit.config import Config, load_config
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages, build_stages
from megabit.pipeline.actions import (
    Backward,
    Compute,
    Forward,
    InputGradient,
    Schedule,
    WeightGradient,
)
from megabit.pipeline.catalog import make_forward_schedule
from megabit.pipeline.execute import PipelineResult, run_schedule
from megabit.pipeline.layout import StageLayout, stage_layouts
from megabit.pipeline.mailbox import Mailbox
from megabit.pipeline.placement import Placement
from megabit.pipeline.plan import plan_stages
from megabit.tensor_parallel import ForwardPass, Noise, sharded_parameters
from tests.pipeline.schedules import (
    SCHEDULES,
    Look,
    Products,
    any_schedule,
    counts,
    spread,
    watched,
)

# No weight has as many rows as a microbatch has tokens: products tell themselves apart by it.
B, S, H, LAYERS, VOCAB = 2, 10, 32, 5, 64
GRADIENT = 0.125
"""Of the objective with respect to the loss sums."""
FIRST = 40
"""Number of the first microbatch in the global batch."""

T = TypeVar("T")
Shapes: TypeAlias = tuple[tuple[int, int], ...]
"""``[B, S]`` of each microbatch."""


def config(*settings: str) -> Config:
    # Untied: the two copies of a tied embedding would each have a part of its gradient.
    return load_config(
        [
            *(f"model.hidden_size={H}", "model.intermediate_size=48", f"model.vocab_size={VOCAB}"),
            *(f"model.num_hidden_layers={LAYERS}", "model.num_key_value_heads=2"),
            *("model.tie_word_embeddings=false", f"data.seq_length={S}"),
            *settings,
        ]
    )


class Microbatch(NamedTuple):
    """``[B, S]`` each, with an uneven mask."""

    inputs: Tensor
    targets: Tensor
    mask: Tensor


def microbatches(shapes: Shapes) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(len(shapes))
    found = []
    for shape in shapes:
        inputs, targets = torch.randint(VOCAB, (2, *shape), generator=generator)
        found.append(Microbatch(inputs, targets, torch.rand(shape, generator=generator) < 0.7))
    return found


def alike(count: int) -> Shapes:
    return ((B, S),) * count


@dataclass
class Ran:
    """A run of a schedule on one rank."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    """By name of the parameter."""
    result: PipelineResult
    sent: dict[str, float]
    """Bytes by purpose."""
    noises: list[tuple[Compute, Noise | None]]
    """In each forward pass."""
    given: dict[str, list[Compute]]
    """By name of the parameter: when it was given its gradients."""
    graphs: list[bool]
    """Whether each forward pass kept one."""


@dataclass
class Rank:
    """The calling rank of a job that is a pipeline, and what it computes at the moment."""

    config: Config
    mesh: ParallelMesh
    products: Products = field(default_factory=lambda: Products(B * S))
    now: Compute = field(default_factory=lambda: Forward(-1))

    @staticmethod
    def join(config: Config) -> "Rank":
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        tp = config.parallel.tp
        device = torch.device("cpu")
        mesh = ParallelMesh.create(tp, ranks // tp, device) if ranks > 1 else ParallelMesh()
        return Rank(config, mesh)

    def run(self, schedule: Schedule, batch: Sequence[Microbatch], training: bool = True) -> Ran:
        stages, pp = self.stages(schedule.placement), self.mesh.pp
        noises: list[tuple[Compute, Noise | None]] = []
        gradients: dict[str, Tensor] = {}
        given: dict[str, list[Compute]] = {}
        graphs: list[bool] = []

        def look(_: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            noises.append((self.now, inputs[2].noise))
            graphs.append(output.requires_grad)

        def collect(name: str, gradient: Tensor) -> None:
            given.setdefault(name, []).append(self.now)
            gradient = gradient.to(stages.context.master_dtype)
            gradients[name] = gradient + gradients[name] if name in gradients else gradient.clone()

        stages.register_forward_hook(look)
        for name, parameter in sharded_parameters(stages).items():
            parameter.collect(functools.partial(collect, name))

        def loss(hidden: Tensor, i: int, forward_pass: ForwardPass) -> Tensor:
            return stages.loss(hidden, batch[i].targets, batch[i].mask, forward_pass)

        pp.sent.clear()
        with watched(before=self.begin, after=self.end), self.products:
            result = run_schedule(
                schedule,
                stages,
                [microbatch.inputs for microbatch in batch],
                loss,
                pp,
                noises=[Noise(0, 0, FIRST + i) for i in range(len(batch))] if training else None,
                output_gradient=self.gradient() if training else None,
            )
        assert all(parameter.grad is None for parameter in stages.parameters())
        return Ran(result.outputs, gradients, result, dict(pp.sent), noises, given, graphs)

    def stages(self, placement: Placement) -> CausalLMStages:
        layouts = stage_layouts(spread(LAYERS, placement.num_stages))
        plan = plan_stages(self.config, dp=1)
        plan = replace(plan, schedule=Schedule(placement, 1, []), layouts=layouts)
        return build_stages(self.config, self.mesh, plan)

    def gradient(self) -> Tensor:
        compute = getattr(torch, self.config.precision.compute)
        return torch.tensor(GRADIENT, dtype=torch.promote_types(compute, torch.float32))

    def begin(self, action: Compute) -> None:
        self.now = self.products.now = action

    def end(self, action: Compute) -> None:
        assert self.now == action
        self.products.now = None


@functools.cache
def plain_loop(shapes: Shapes, *settings: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and gradients of ``microbatches`` without any schedule."""
    rank = Rank(config(*settings), ParallelMesh())
    stages = rank.stages(Placement.loop(1))
    losses = []
    for tokens, targets, mask in microbatches(shapes):
        loss = stages.loss(stages(tokens), targets, mask)
        loss.backward(rank.gradient())
        losses.append(loss.detach())
    gradients = {n: p.grad for n, p in stages.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(stages.parameters()))
    return losses, gradients


def assert_equals_plain_loop(
    ranks: Sequence[Ran], schedule: Schedule, shapes: Shapes, *settings: str
) -> None:
    losses, expected = plain_loop(shapes, *settings)
    last = schedule.placement.rank_of(schedule.placement.num_stages - 1)
    for rank, ran in enumerate(ranks):
        assert len(ran.losses) == (len(losses) if rank == last else 0)
    assert all(map(torch.equal, ranks[last].losses, losses))
    gradients = {name: grad for ran in ranks for name, grad in ran.gradients.items()}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        # Stages compute what one process does, in the same order: no bit may change.
        assert gradients[name].dtype == gradient.dtype
        assert torch.equal(gradients[name], gradient), name


def run_each(
    schedules: Sequence[Schedule], delay: Callable[[int], Look] = lambda rank: lambda compute: None
) -> list[list[Ran]]:
    """Of each schedule, what each rank did.

    Args:
        delay: gives each rank what to do at the begin of each compute.
    """

    def run() -> list[Ran]:
        rank = Rank.join(config())
        with watched(before=delay(rank.mesh.pp.rank)):
            return [rank.run(s, microbatches(alike(s.microbatches))) for s in schedules]

    return by_schedule(run_ranks(run, schedules[0].placement.ranks))


def by_schedule(by_rank: Sequence[Sequence[T]]) -> list[list[T]]:
    return [list(of_ranks) for of_ranks in zip(*by_rank, strict=True)]


by_ranks = pytest.mark.parametrize("pp", [1, 2, pytest.param(4, marks=pytest.mark.slow)])


@by_ranks
def test_every_schedule_equals_a_plain_loop(pp: int) -> None:
    schedules = [each.make(pp, count) for each in SCHEDULES for count in counts(pp)]
    for schedule, ranks in zip(schedules, run_each(schedules), strict=True):
        shapes = alike(schedule.microbatches)
        assert_equals_plain_loop(ranks, schedule, shapes)
        for rank, ran in enumerate(ranks):
            check_order(ran, schedule, rank)
            check_spans(ran.result, schedule.computes(rank))
            assert ran.sent == expected_bytes(schedule, rank, shapes, itemsize=4)


@by_ranks
def test_any_order_that_can_be_run_equals_a_plain_loop(pp: int) -> None:
    """On any placement, with backward passes in one piece and in two, mixed."""
    schedules = [any_schedule(seed, pp, 1 + seed % 3, 1 + seed % 5) for seed in range(15)]
    for schedule, ranks in zip(schedules, run_each(schedules), strict=True):
        assert_equals_plain_loop(ranks, schedule, alike(schedule.microbatches))
        for rank, ran in enumerate(ranks):
            check_order(ran, schedule, rank)


def check_order(ran: Ran, schedule: Schedule, rank: int) -> None:
    """Everything happened once, when the schedule has it, with the microbatch's own noise."""
    computes = schedule.computes(rank)
    forwards = [compute for compute in computes if isinstance(compute, Forward)]
    assert ran.noises == [(f, Noise(0, 0, FIRST + f.microbatch)) for f in forwards]
    placement = schedule.placement
    layouts = stage_layouts(spread(LAYERS, placement.num_stages))
    chunks = [layouts[stage] for stage in placement.stages[rank]]
    assert ran.given.keys() == ran.gradients.keys()
    for name, given in ran.given.items():
        # Gains are given theirs with the gradients of activations, at no cost to speak of.
        kinds = Backward | (InputGradient if "norm" in name else WeightGradient)
        (chunk,) = (chunk for chunk, layout in enumerate(chunks) if is_in(name, layout))
        assert given == [c for c in computes if isinstance(c, kinds) and c.chunk == chunk]
        assert [c.microbatch for c in given] == [*range(schedule.microbatches)]


def is_in(name: str, layout: StageLayout) -> bool:
    """Whether the stage has the parameter of that name."""
    if ".layers." in name:
        return int(name.split(".layers.")[1].split(".")[0]) in layout.layers
    return layout.embedding if "embed_tokens" in name else layout.head


def check_spans(result: PipelineResult, computes: Sequence[Compute]) -> None:
    """One for each compute, in order, one after the other, within the run."""
    spans = result.spans
    assert [span.compute for span in spans] == computes
    assert all(span.start <= span.end for span in spans)
    assert all(a.end <= b.start for a, b in pairwise(spans))
    assert spans[-1].end - spans[0].start <= result.seconds
    assert result.wait_s == pytest.approx(result.seconds - sum(s.duration for s in spans))
    assert result.wait_s >= 0


def expected_bytes(
    schedule: Schedule, rank: int, shapes: Shapes, itemsize: int
) -> dict[str, float]:
    """Where the model goes on from a rank to another one, each token's hidden state once forward
    and its gradient once backward."""
    tokens = sum(batch * length for batch, length in shapes)
    owners = [schedule.placement.rank_of(s) for s in range(schedule.placement.num_stages)]
    hops = [(a, b) for a, b in pairwise(owners) if a != b]
    sent = {
        "activations": sum(a == rank for a, _ in hops),
        "activation gradients": sum(b == rank for _, b in hops),
    }
    return {purpose: tokens * H * itemsize * n for purpose, n in sent.items() if n}


# Shapes and formats of what travels


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float64"])
def test_microbatches_may_have_other_shapes(compute: str) -> None:
    """Within a run, and in the next one of the same ranks."""
    setting = f"precision.compute={compute}"
    itemsize = getattr(torch, compute).itemsize
    runs = [((2, 10), (1, 7), (3, 4), (2, 10), (1, 1)), ((1, 3), (3, 4), (4, 5), (1, 10), (2, 1))]
    schedules = [each.make(2, len(shapes)) for shapes in runs for each in SCHEDULES]
    shapes_of = [shapes for shapes in runs for _ in SCHEDULES]

    def run() -> list[Ran]:
        rank = Rank.join(config(setting))
        pairs = zip(schedules, shapes_of, strict=True)
        return [rank.run(schedule, microbatches(shapes)) for schedule, shapes in pairs]

    found = by_schedule(run_ranks(run, 2))
    for schedule, shapes, ranks in zip(schedules, shapes_of, found, strict=True):
        assert_equals_plain_loop(ranks, schedule, shapes, setting)
        for rank, ran in enumerate(ranks):
            assert ran.sent == expected_bytes(schedule, rank, shapes, itemsize)


@pytest.mark.slow
def test_sequence_parallel_stages_send_their_own_tokens_only() -> None:
    laid_out = config("parallel.tp=2", "parallel.sequence_parallel=true")
    schedules = [each.make(2, 3) for each in SCHEDULES]

    def run() -> list[Ran]:
        rank = Rank.join(laid_out)
        return [rank.run(schedule, microbatches(alike(3))) for schedule in schedules]

    for number, found in enumerate(run_ranks(run, 4)):
        for schedule, ran in zip(schedules, found, strict=True):
            whole = expected_bytes(schedule, number // 2, alike(3), itemsize=4)
            assert ran.sent == {purpose: count / 2 for purpose, count in whole.items()}


# Each product once


@pytest.mark.parametrize(
    ("settings", "of_layer"),
    [
        (["precision.ternary_backward=compute"], {"dX": 7, "dW": 7}),
        (["precision.ternary_backward=bfloat16"], {"dX": 7, "dW": 7}),
        # One call for q, k and v, and one for gate and up.
        (["precision.ternary_backward=int8"], {"dX": 7, "dW": 4}),
        (["train.recompute=selective"], {"dX": 7, "dW": 7}),
        (["train.recompute=full"], {"dX": 7, "dW": 7}),
        (["model.linear=dense"], {"dX": 7, "dW": 7}),
    ],
    ids=["compute", "bfloat16", "int8", "selective", "full", "dense"],
)
def test_each_product_is_computed_once_and_in_its_phase(
    settings: list[str], of_layer: dict[str, int]
) -> None:
    """No gradient of weights in B, none of activations in W, and none of either a second time."""
    laid_out, count = config(*settings), 3
    schedules = [each.make(2, count) for each in SCHEDULES]

    def run() -> list[Counter[tuple[str, str]]]:
        rank = Rank.join(laid_out)
        found = []
        for schedule in schedules:
            rank.products = Products(B * S)
            rank.run(schedule, microbatches(alike(count)))
            found.append(rank.products.counts)
        return found

    for rank, found in enumerate(run_ranks(run, 2)):
        for schedule, products in zip(schedules, found, strict=True):
            layouts = stage_layouts(spread(LAYERS, schedule.placement.num_stages))
            own = [layouts[stage] for stage in schedule.placement.stages[rank]]
            layers = sum(len(layout.layers) for layout in own)
            heads = sum(layout.head for layout in own)
            embeddings = sum(layout.embedding for layout in own)
            dx = count * (layers * of_layer["dX"] + heads)
            dw = count * (layers * of_layer["dW"] + heads + embeddings)
            is_split = any(isinstance(c, WeightGradient) for c in schedule.computes(rank))
            expected = {("B", "dX"): dx, ("W", "dW"): dw}
            if not is_split:
                expected = {("BW", "dX"): dx, ("BW", "dW"): dw}
            if "model.linear=dense" in settings:  # forward products look like those of dX
                expected["F", "dX"] = products["F", "dX"]
            assert +products == Counter(expected), schedule


# Time does not matter


@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_late_ranks_change_nothing(pp: int) -> None:
    """Each rank sleeps at random in F, B and W: as long as all, or one much longer than others."""
    schedules = [each.make(pp, 4) for each in SCHEDULES]

    def sleeping(slow: int | None) -> Callable[[int], Look]:
        def delay(rank: int) -> Look:
            draw = random.Random(rank)
            naps = [0, 0, 0.01, 0.02] if slow in (None, rank) else [0, 0, 0, 0.005]
            return lambda _: time.sleep(draw.choice(naps))

        return delay

    for slow in (None, 0, pp - 1):
        found = run_each(schedules, sleeping(slow))
        for schedule, ranks in zip(schedules, found, strict=True):
            assert_equals_plain_loop(ranks, schedule, alike(4))
            for rank, ran in enumerate(ranks):
                check_spans(ran.result, schedule.computes(rank))


def test_to_wait_is_not_to_compute() -> None:
    """No span has anything of the time in which a rank waits for a message or posts some."""
    schedules = [each.make(2, 3) for each in SCHEDULES]

    def run() -> None:
        rank = Rank.join(config())
        waits: list[tuple[float, float]] = []

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def longer(*arguments: Any) -> Any:
                started = time.perf_counter()
                result = function(*arguments)
                time.sleep(0.002)
                waits.append((started, time.perf_counter()))
                return result

            return longer

        with (
            patch.object(Mailbox, "take", timed(Mailbox.take)),
            patch.object(Mailbox, "post", timed(Mailbox.post)),
            patch.object(Mailbox, "finish", timed(Mailbox.finish)),
        ):
            for schedule in schedules:
                waits.clear()
                result = rank.run(schedule, microbatches(alike(3))).result
                assert len(waits) > 1
                for started, ended in waits:
                    assert all(ended <= s.start or s.end <= started for s in result.spans)
                assert result.wait_s >= sum(ended - started for started, ended in waits)

    run_ranks(run, 2)


# Evaluation


@by_ranks
def test_a_forward_schedule_keeps_no_graph(pp: int) -> None:
    placements = [*(Placement.loop(pp, chunks) for chunks in (1, 2, 3)), Placement.v(pp)]
    schedules = [make_forward_schedule(placement, 3) for placement in placements]

    def run() -> list[Ran]:
        rank = Rank.join(config())
        batch = microbatches(alike(3))
        return [rank.run(schedule, batch, training=False) for schedule in schedules]

    losses, _ = plain_loop(alike(3))
    for schedule, ranks in zip(schedules, by_schedule(run_ranks(run, pp)), strict=True):
        last = schedule.placement.rank_of(schedule.placement.num_stages - 1)
        assert all(map(torch.equal, ranks[last].losses, losses))
        for rank, ran in enumerate(ranks):
            computes = schedule.computes(rank)
            assert ran.noises == [(compute, None) for compute in computes]
            assert ran.graphs == [False] * len(computes)
            assert ran.gradients == ran.given == {}
            check_spans(ran.result, computes)
            sent = expected_bytes(schedule, rank, alike(3), itemsize=4)
            sent.pop("activation gradients", None)
            assert ran.sent == sent
