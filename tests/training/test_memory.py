"""What a rank keeps, as the optimizer counts its tensors, against the formulas: to the byte."""

import math
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from megabit.config import Config, find_problems
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.tensor_parallel import ternary_layers
from megabit.training.memory import KINDS, resident_bytes
from megabit.training.step import TrainingState, train_step
from tests.training.tiny import own_batch, shape_of, tiny

CPU = torch.device("cpu")
# 52 columns and 301 rows fill neither tiles of codes nor multiples of 64.
SIZES = (
    *("model.intermediate_size=52", "model.vocab_size=301", "data.seq_length=8"),
    *("train.global_batch_size=4", "train.micro_batch_size=2"),
)
CONFIGS = (
    (),
    ("optim.zero_stage=0", "precision.compute=bfloat16"),
    ("optim.zero_stage=2", "precision.gradients=bfloat16", "model.tie_word_embeddings=false"),
    ("parallel.exact=full",),  # a tied head has a gradient of its own on one stage
    ("parallel.exact=full", "model.tie_word_embeddings=false", "precision.compute=float64"),
    ("model.linear=dense", "precision.compute=bfloat16", "optim.zero_stage=2"),
)
# Several stages on a rank, some of them empty; without a layer on the rank of both ends.
INTERLEAVED = ("parallel.schedule=interleaved", "parallel.vpp=2", "model.num_hidden_layers=5")
BOTH_ENDS = ("parallel.schedule=zb-v", "parallel.vpp=2", "model.num_hidden_layers=4")
SCHEDULES = (
    ("parallel.schedule=zb-h1", "optim.zero_stage=2"),
    (*INTERLEAVED, "optim.zero_stage=0", "parallel.layers_per_stage=[0,3,0,2]"),
    (*INTERLEAVED, "model.tie_word_embeddings=false", "precision.compute=bfloat16"),
    (*BOTH_ENDS, "parallel.layers_per_stage=[0,0,4,0]"),
    (*BOTH_ENDS, "parallel.exact=full"),
    (*BOTH_ENDS, "model.tie_word_embeddings=false", "model.linear=dense", "optim.zero_stage=2"),
)
LAYOUTS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 2))

Kept = dict[str, int]


def run_steps(configs: list[Config], tp: int, pp: int, dp: int) -> list[list[tuple[Kept, Kept]]]:
    """For each rank and configuration, what is kept after one step and after two."""

    def run() -> list[tuple[Kept, Kept]]:
        mesh = ParallelMesh.create(tp, pp, CPU)
        return [run_two(config, mesh) for config in configs]

    def run_two(config: Config, mesh: ParallelMesh) -> tuple[Kept, Kept]:
        state = TrainingState.create(config, mesh)
        kept = []
        for step in range(2):
            train_step(state, own_batch(config, mesh, step), step)
            kept.append(state.optimizer.nbytes())
        return kept[0], kept[1]

    for config in configs:
        assert find_problems(config, tp * pp * dp) == []
    return run_ranks(run, tp * pp * dp)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
def test_what_is_kept_is_what_the_formulas_say(layout: tuple[int, int, int]) -> None:
    tp, pp, dp = layout
    settings = [
        (*chosen, f"parallel.sequence_parallel={'true' if is_split else 'false'}")
        for chosen in (*CONFIGS, *(SCHEDULES if pp > 1 else ()))
        for is_split in ((False, True) if tp == 2 else (False,))
    ]
    configs = [tiny(*SIZES, f"parallel.tp={tp}", f"parallel.pp={pp}", *s) for s in settings]
    for rank, kept in enumerate(run_steps(configs, tp, pp, dp)):
        for number, config in enumerate(configs):
            expected = resident_bytes(shape_of(config, tp * pp * dp, rank), CPU)
            assert kept[number] == (expected, expected), (settings[number], rank)


def test_bytes_of_a_ternary_parameter() -> None:
    """A quarter of a byte to compute with at every DP. Masters, moments and, with zero_stage 2,
    sums of gradients are shared out: 0.25 + 16/d + 4, and 0.25 + 16/d. Measured as what a third
    layer adds, whose tensors fill tiles and DP's parts."""
    sizes = ("model.hidden_size=256", "model.intermediate_size=256")
    ternary, gains = 256 * 256 * (2 + 1 + 3), 256 * 4
    for dp in (2, 4):
        configs = [
            tiny(*sizes, f"model.num_hidden_layers={layers}", f"optim.zero_stage={stage}")
            for stage in (1, 2)
            for layers in (2, 3)
        ]
        for kept in run_steps(configs, 1, 1, dp):
            for stage, fewer, more in ((1, *kept[:2]), (2, *kept[2:])):
                added = {kind: more[0][kind] - fewer[0][kind] for kind in KINDS}
                assert added == {
                    "codes": ternary / 4,
                    "dense weights": gains * 4,
                    # Whole sums, and the part that is updated.
                    "gradients": ((ternary if stage == 1 else 0) + gains) * 4
                    + (ternary + gains) * 4 / dp,
                    "masters": (ternary + gains) * 4 / dp,
                    "moments": (ternary + gains) * 8 / dp,
                }


def test_there_are_no_moments_before_the_first_update() -> None:
    config = tiny(*SIZES)
    state = TrainingState.create(config, ParallelMesh())
    for master in state.optimizer.masters:
        master.weights.data.fill_(math.nan)
    state.optimizer.publish()
    assert train_step(state, own_batch(config, state.mesh, 0), 0).is_skipped
    expected = resident_bytes(shape_of(config, 1, 0), CPU, has_updated=False)
    assert state.optimizer.nbytes() == expected
    assert expected["moments"] == 0


@pytest.mark.parametrize("exact", ["forward", "full"])
def test_every_tensor_that_stays_is_counted_once(exact: str) -> None:
    """``nbytes`` against the storages that a stage and its optimizer lead to."""
    config = tiny(*SIZES, f"parallel.exact={exact}")
    state = TrainingState.create(config, ParallelMesh())
    train_step(state, own_batch(config, state.mesh, 0), 0)
    kept = state.optimizer.nbytes()

    def tensors() -> Iterator[Tensor]:
        yield from state.stages.parameters()
        yield from (layer.ternary().data for layer in ternary_layers(state.stages))
        yield from (b.sums for b in state.optimizer.gradients.buckets if b.sums is not None)
        for weights, values in state.optimizer.adam.state.items():
            assert isinstance(weights, nn.Parameter)
            yield weights
            yield from (values["exp_avg"], values["exp_avg_sq"])

    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in tensors()
        if not x.is_meta
    }
    assert sum(kept.values()) == sum(storages.values())


def test_the_peak_counts_what_was_given_back() -> None:
    """In a fresh process: a fork begins with the peak of its parent."""
    code = """
import torch
from megabit.training.memory import peak_bytes
cpu = torch.device("cpu")
before = peak_bytes(cpu)
torch.ones(2**27, dtype=torch.uint8)
print(peak_bytes(cpu) - before)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Linux counts a few pages late.
    assert int(shown.stdout) == pytest.approx(2**27, rel=0.1)
