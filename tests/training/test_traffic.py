"""What a step sends, as the mesh counts it, against the formulas: to the byte, on every rank.

All degrees here are powers of two, so that shares of bytes such as 3/4 are exact in floating point.
"""

import math
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from megabit.config import Config, find_problems
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.pipeline.plan import plan_stages
from megabit.tensor_parallel import row_sums
from megabit.training.step import TrainingState, train_step
from megabit.training.traffic import Sent, StepKind, step_traffic, total_traffic
from tests.training.tiny import own_batch, shape_of, tiny

# Ranks differ in their parts of 52 columns and 301 rows, and DP does not divide those.
SIZES = (
    *("model.intermediate_size=52", "model.vocab_size=301", "data.seq_length=8"),
    *("train.global_batch_size=8", "train.micro_batch_size=2"),
)
SEQUENCE_PARALLEL = "parallel.sequence_parallel=true"
DENSE = "model.linear=dense"

# At every layout, with sequence parallelism and without.
EVERYWHERE = (
    (),
    ("parallel.exact=full", "parallel.row_reduce=exact16", "train.recompute=full"),
    (
        *("precision.compute=bfloat16", "precision.gradients=bfloat16", "optim.zero_stage=2"),
        *("model.tie_word_embeddings=false", "model.num_key_value_heads=1"),
        *("train.recompute=selective", "parallel.schedule=gpipe"),
    ),
    (DENSE, "optim.zero_stage=0", "train.recompute=full", "train.recompute_layers=[1]"),
)
TP_ONLY = (
    ("precision.compute=float64", "parallel.exact=full"),
    ("precision.compute=float64", SEQUENCE_PARALLEL),
    ("precision.compute=bfloat16", "parallel.row_reduce=exact16", SEQUENCE_PARALLEL),
    ("precision.compute=bfloat16", "precision.ternary_backward=int8"),
    ("precision.ternary_backward=bfloat16", "train.hidden_dropout=0.1", SEQUENCE_PARALLEL),
    # 15 tokens are padded to 16.
    ("parallel.row_reduce=exact16", "train.micro_batch_size=1", "data.seq_length=15"),
    ("parallel.exact=full", "model.tie_word_embeddings=false", SEQUENCE_PARALLEL),
    ("train.recompute=full", SEQUENCE_PARALLEL),
    (DENSE, "train.recompute=selective", "precision.compute=bfloat16", SEQUENCE_PARALLEL),
    (DENSE, "model.tie_word_embeddings=false", "precision.compute=float64"),
)
PP_ONLY = (
    ("parallel.layers_per_stage=[2,0]", "precision.compute=bfloat16"),
    ("model.tie_word_embeddings=false", "parallel.exact=full"),
)
UNTIED = "model.tie_word_embeddings=false"
# Several stages on a rank, some of them empty; without a layer on the rank of both ends.
INTERLEAVED = ("parallel.schedule=interleaved", "parallel.vpp=2", "model.num_hidden_layers=5")
BOTH_ENDS = ("parallel.schedule=zb-v", "parallel.vpp=2", "model.num_hidden_layers=4")
SCHEDULES = (
    ("parallel.schedule=zb-h1", "train.recompute=full"),
    ("parallel.schedule=zb-h1", UNTIED, "optim.zero_stage=2"),
    (*INTERLEAVED, "precision.compute=bfloat16", "precision.gradients=bfloat16"),
    (*INTERLEAVED, UNTIED, "parallel.exact=full", "parallel.layers_per_stage=[0,3,0,2]"),
    (*BOTH_ENDS, "optim.zero_stage=0"),
    (*BOTH_ENDS, "parallel.exact=full", "parallel.layers_per_stage=[0,0,4,0]"),
    (*BOTH_ENDS, UNTIED, "optim.zero_stage=2", "model.linear=dense"),
)
DP_ONLY = (
    *(
        (f"optim.zero_stage={stage}", f"model.linear={linear}", *more)
        for stage in (0, 1, 2)
        for linear in ("ternary", "dense")
        for more in ((), ("precision.gradients=bfloat16", "precision.compute=bfloat16"))
    ),
    ("optim.zero_stage=0", "precision.compute=float64"),
    ("parallel.exact=full", "optim.zero_stage=0"),
    ("parallel.bucket_mb=0.01", "optim.zero_stage=2"),
)
NOT_FINITE = StepKind(is_finite=False, is_updated=False)
LAYOUTS = {  # (tp, pp, dp) → more configurations
    (1, 1, 1): (),
    (2, 1, 1): TP_ONLY,
    (4, 1, 1): TP_ONLY[:3],
    (1, 2, 1): PP_ONLY,
    (2, 2, 1): tuple((*chosen, SEQUENCE_PARALLEL) for chosen in SCHEDULES),
    (4, 2, 1): (),
    (1, 4, 1): ((*BOTH_ENDS, "parallel.layers_per_stage=[1,0,0,1,0,1,1,0]"),),
    (1, 1, 2): DP_ONLY,
    (2, 1, 2): (),
    (4, 1, 2): (),
    (1, 2, 2): (*PP_ONLY, *DP_ONLY[:3], *SCHEDULES),
    (2, 2, 2): (),
    (4, 2, 2): (),
    (1, 1, 4): DP_ONLY[:3],
}  # fmt: skip


class Step(NamedTuple):
    """What one rank saw."""

    measured: Sent
    grad_norm: float


def run_steps(
    configs: list[Config], tp: int, pp: int, dp: int, poison: bool = False
) -> list[list[Step]]:
    """For each rank, the first step of each configuration; all in the same ranks.

    Args:
        poison: make all gradients NaN.
    """

    def run() -> list[Step]:
        mesh = ParallelMesh.create(tp, pp, torch.device("cpu"))
        return [run_step(config, mesh) for config in configs]

    def run_step(config: Config, mesh: ParallelMesh) -> Step:
        state = TrainingState.create(config, mesh)
        if poison:
            for master in state.optimizer.masters:
                master.weights.data.fill_(math.nan)
            state.optimizer.publish()
        batch, before = own_batch(config, mesh, 0), mesh.sent()
        report = train_step(state, batch, 0)
        sent = {key: total - before.get(key, 0) for key, total in mesh.sent().items()}
        return Step({key: count for key, count in sent.items() if count}, report.grad_norm)

    for config in configs:
        assert find_problems(config, tp * pp * dp) == []
    return run_ranks(run, tp * pp * dp)


def at(tp: int, pp: int, *settings: str) -> Config:
    return tiny(*SIZES, f"parallel.tp={tp}", f"parallel.pp={pp}", *settings)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
def test_what_is_sent_is_what_the_formulas_say(layout: tuple[int, int, int]) -> None:
    tp, pp, dp = layout
    both = [s for settings in EVERYWHERE for s in (settings, (*settings, SEQUENCE_PARALLEL))]
    everywhere = both if tp > 1 else EVERYWHERE if pp <= 2 else ()  # of models of 2 layers
    settings = [*everywhere, *LAYOUTS[layout]]
    configs = [at(tp, pp, *chosen) for chosen in settings]
    ranks = run_steps(configs, tp, pp, dp)
    for number, config in enumerate(configs):
        total: Sent = {}
        for rank, steps in enumerate(ranks):
            measured = steps[number].measured
            expected = step_traffic(shape_of(config, len(ranks), rank))
            assert measured == expected, (settings[number], rank)
            for key, count in measured.items():
                total[key] = total.get(key, 0) + count
        assert total_traffic(config, len(ranks), plan_stages(config, dp)) == total


def test_a_skipped_step_sends_no_weights() -> None:
    config = at(2, 1)
    for rank, (step,) in enumerate(run_steps([config], 2, 1, 2, poison=True)):
        assert step.grad_norm == math.inf
        assert step.measured == step_traffic(shape_of(config, 4, rank), NOT_FINITE)
        assert not {purpose for _, purpose in step.measured} & {"weights", "scales"}


def test_an_overflow_is_counted_and_not_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sums, "INT16", SimpleNamespace(max=0, min=0))  # nothing fits
    config = at(2, 1, "parallel.row_reduce=exact16")
    rows, tokens, hidden, microbatches = 2 * 2, 16, 32, 4
    for rank, (step,) in enumerate(run_steps([config], 2, 1, 1)):
        expected = step_traffic(shape_of(config, 2, rank))
        expected["tp", "activations"] += microbatches * rows * tokens * hidden * 4 / 2
        assert step.measured == expected


def test_a_ternary_parameter_costs_two_and_a_quarter_bytes() -> None:
    """2.25 · (d − 1)/d with bf16 gradients, against 4 of a bf16 distributed optimizer. Measured as
    what a third layer adds, whose tensors DP divides into multiples of 64."""
    settings = ("model.hidden_size=256", "model.intermediate_size=256", "model.vocab_size=64")
    for dp in (2, 4):
        configs = [
            at(1, 1, *settings, f"model.num_hidden_layers={n}", "precision.gradients=bfloat16")
            for n in (2, 3)
        ]
        for fewer, more in run_steps(configs, 1, 1, dp):
            ternary, gains = 256 * 256 * (2 + 1 + 3), 256 * 4  # q and o, k and v, gate, up and down
            added = sum(
                more.measured["dp", purpose] - fewer.measured["dp", purpose]
                for purpose in ("weight gradients", "weights")
            )
            assert added == (dp - 1) / dp * (2.25 * ternary + (2 + 4) * gains)


def test_one_layout_by_hand() -> None:
    """TP 2 × DP 2 without sequence parallelism, in the numbers of a reader with a pencil."""
    config = at(2, 1, "optim.zero_stage=1", "precision.compute=bfloat16")
    microbatches, tokens, hidden, heads, layers = 2, 16, 32, 4, 2
    sent = step_traffic(shape_of(config, 4, 0))
    assert sent["tp", "activations"] == microbatches * (
        tokens * hidden * 2  # all-reduce of the embedding's output in bf16: 2 · 1/2 · n
        + layers * 2 * tokens * hidden * 4  # o and down in int32
    )
    assert sent["tp", "activation gradients"] == microbatches * (
        tokens * hidden * 2  # dX of the head in bf16
        + layers * 2 * tokens * hidden * 2  # dX of q, k, v and of gate, up
    )
    assert sent["tp", "statistics"] == microbatches * (
        tokens * 4 + tokens * (heads + 2) * 4 / 2  # the loss: a maximum, then blocks and target
        + layers * 2 * 3 * tokens * heads * 4 / 2  # two sub-norms: 2 numbers forward, 1 backward
    )  # fmt: skip
    assert sent["world", "scales"] == 2 * 3 / 4 * (7 * layers) * 16
    assert sent["world", "control"] == 2 * 3 / 4 * 2 * 8
    assert sent["dp", "control"] == 4 * 8


def test_a_rank_alone_sends_nothing() -> None:
    assert step_traffic(shape_of(at(1, 1), 1, 0)) == {}
