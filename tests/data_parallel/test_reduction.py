"""Gradients over DP in two levels and through codecs: what arrives, what is sent, what is kept."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megabit.checkpoint import CheckpointStore
from megabit.config import Config
from megabit.data_parallel.lost import lost_pieces
from megabit.launch import run_ranks
from megabit.reduce import all_reduce
from megabit.training.more_state import training_parts
from megabit.training.resume import manifest_of, restore
from megabit.training.step import TrainingState, train_step
from megabit.training.traffic import StepKind, step_traffic
from tests.training.tiny import Owned, logical, make_mesh, own_batch, owned, shape_of, tiny

FLAT = "communication.topology=flat"
TWO_LEVELS = "communication.dp_intra=2"
BATCH = ("train.global_batch_size=12", "train.micro_batch_size=1")


def state_of(config: Config) -> TrainingState:
    return TrainingState.create(config, make_mesh(config))


def steps(state: TrainingState, *numbers: int) -> None:
    for step in numbers:
        train_step(state, own_batch(state.config, state.mesh, step), step)


def masters(settings: tuple[str, ...], world_size: int, count: int = 3) -> dict[str, Tensor]:
    """Of a run of ``count`` steps, whole."""
    config = tiny(*BATCH, *settings)

    def run() -> Owned:
        state = state_of(config)
        steps(state, *range(count))
        return owned(state.optimizer)

    return logical(run_ranks(run, world_size))


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_two_levels_of_two_are_the_bits_of_one(zero_stage: int) -> None:
    """Two ranks of a host are neighbours in the tree."""
    stage = f"optim.zero_stage={zero_stage}"
    two, one = masters((stage, TWO_LEVELS), 4), masters((stage, FLAT), 4)
    assert all(torch.equal(two[name], one[name]) for name in two)


def test_two_levels_of_three_agree_to_rounding() -> None:
    """(a+b)+(c+d)+(e+f) against ((a+b)+c)+((d+e)+f): fp32 sums of six terms, some 1e-7 apart, which
    AdamW's first steps make shares of the learning rate where gradients are near 0."""
    two = masters(("communication.dp_intra=3",), 6, count=1)
    one = masters((FLAT,), 6, count=1)
    assert any(not torch.equal(two[name], one[name]) for name in two)
    for name in two:
        torch.testing.assert_close(two[name], one[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("settings", [("parallel.tp=2",), ("parallel.pp=2",)], ids=" ".join)
def test_two_levels_beside_other_axes(settings: tuple[str, ...]) -> None:
    two, one = masters((*settings, TWO_LEVELS), 8), masters((*settings, FLAT), 8)
    assert all(torch.equal(two[name], one[name]) for name in two)


def test_who_looks_at_a_weight_alone_waits_for_nobody() -> None:
    """Weights come in two levels; a rank that reads its codes must not begin the second by itself,
    while the others are somewhere else."""
    config = tiny(*BATCH, TWO_LEVELS)

    def run() -> float:
        state = state_of(config)
        steps(state, 0)
        share = state.stages.zero_fraction()[1] if state.mesh.world.rank == 0 else 0
        value = torch.tensor(float(share), dtype=torch.float64)
        return all_reduce(value, state.mesh.world, "max").item()

    assert all(run_ranks(run, 4, timeout_s=60))


CODECS = {
    "int8": ("precision.gradients=int8",),
    "int4": ("precision.gradients=int4", "communication.block=32"),
    "topk": ("precision.gradients=topk", "communication.topk_ratio=0.2"),
    "ternary": ("precision.gradients=ternary",),
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("levels", [FLAT, TWO_LEVELS])
def test_bytes_are_those_of_the_formula(name: str, levels: str) -> None:
    """Of every rank, axis and purpose, with small tensors left as they are."""
    for extra in ((), ("parallel.tp=2", "communication.min_numel=1500"), ("optim.zero_stage=2",)):
        config = tiny(*BATCH, *CODECS[name], levels, *extra)
        world_size = 4 * config.parallel.tp
        intra = 2 if levels == TWO_LEVELS else None

        def run(config: Config = config) -> dict[tuple[str, str], float]:
            state = state_of(config)
            before = state.mesh.sent()
            steps(state, 0)
            state.optimizer.publisher.settle()
            sent = state.mesh.sent()
            return {k: v - before.get(k, 0) for k, v in sent.items() if v != before.get(k, 0)}

        for rank, sent in enumerate(run_ranks(run, world_size)):
            expected = step_traffic(shape_of(config, world_size, rank, intra), StepKind())
            assert sent == pytest.approx(expected, rel=1e-12), (extra, rank)


def test_what_crosses_hosts_falls_by_dp_intra() -> None:
    """In one level a rank of two on each of two hosts sends half of what it sends elsewhere across:
    to 2 of the 3 others."""
    config = tiny(*BATCH)
    for rank in range(4):
        one = step_traffic(shape_of(config, 4, rank), StepKind())
        two = step_traffic(shape_of(config, 4, rank, 2), StepKind())
        for purpose in ("weight gradients", "weights"):
            across = one["dp", purpose] * 2 / 3
            assert two["dp_inter", purpose] == pytest.approx(across / 2)


@pytest.mark.parametrize("name", CODECS)
def test_the_neutral_setting_is_plain_data_parallelism(name: str) -> None:
    plain = masters((), 2)
    neutral = masters((*CODECS[name], "communication.min_numel=1000000"), 2)
    assert all(torch.equal(plain[name], neutral[name]) for name in plain)
    coded = masters(CODECS[name], 2)
    assert any(not torch.equal(plain[name], coded[name]) for name in plain)


@pytest.mark.parametrize(
    "settings",
    [
        ("precision.gradients=int8", "communication.block=1"),
        ("precision.gradients=int4", "communication.block=1"),
        ("precision.gradients=topk", "communication.topk_ratio=1"),
    ],
    ids=" ".join,
)
def test_settings_at_which_a_codec_loses_nothing(settings: tuple[str, ...]) -> None:
    plain, coded = masters((), 2), masters(settings, 2)
    assert all(torch.equal(plain[name], coded[name]) for name in plain)


def test_a_step_that_is_skipped_leaves_nothing_lost() -> None:
    config = tiny(*BATCH, *CODECS["topk"])

    def run() -> tuple[bool, bool]:
        state = state_of(config)
        steps(state, 0)
        lost = state.optimizer.gradients.reduction.lost
        had = bool(lost)
        state.optimizer.skip()
        return had, bool(lost)

    assert run_ranks(run, 2) == [(True, False)] * 2


def saved(folder: Path, config: Config, world_size: int, more: int) -> dict[str, Tensor]:
    """Two steps are saved; returns the masters after ``more``."""

    def run() -> Owned:
        state = state_of(config)
        steps(state, 0, 1)
        store = CheckpointStore(folder, state.mesh)
        store.save(manifest_of(state, 2, "none"), training_parts(state), {})
        ended = store.finish()
        assert ended is not None
        assert ended.problem is None, ended
        store.close()
        steps(state, *range(2, 2 + more))
        return owned(state.optimizer)

    return logical(run_ranks(run, world_size))


def loaded(
    folder: Path, config: Config, world_size: int, then: Callable[[TrainingState], Owned]
) -> list[Owned]:
    def run() -> Owned:
        state = state_of(config)
        store = CheckpointStore(folder, state.mesh)
        checkpoint = store.find(False, pytest.fail)
        assert checkpoint is not None
        assert restore(state, checkpoint) == 2
        store.close()
        return then(state)

    return run_ranks(run, world_size)


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ((FLAT,), 2),
        ((TWO_LEVELS,), 4),
        (("parallel.tp=4", FLAT), 8),  # ranks share KV heads
        (("parallel.pp=2", FLAT), 4),  # a tied head has messages of its own
        (("parallel.pp=2", "parallel.schedule=zb-v", "model.num_hidden_layers=4", FLAT), 4),
    ],
    ids=str,
)
def test_a_run_that_goes_on_has_what_was_lost(
    settings: tuple[str, ...], world_size: int, tmp_path: Path
) -> None:
    config = tiny(*BATCH, *CODECS["topk"], *settings)
    straight = saved(tmp_path, config, world_size, more=2)

    def go_on(state: TrainingState) -> Owned:
        steps(state, 2, 3)
        return owned(state.optimizer)

    again = logical(loaded(tmp_path, config, world_size, go_on))
    assert all(torch.equal(straight[name], again[name]) for name in straight)


def test_at_another_layout_nothing_lost_is_left_behind(tmp_path: Path) -> None:
    """The sum over senders is the same: of all that ranks have, as of all that the checkpoint
    has. fp32 sums in another order."""

    def lost(state: TrainingState) -> Owned:
        pieces = lost_pieces(state.optimizer)
        return [(p.name, p, v.clone()) for p in pieces for v in p.tensors.values()]

    def total(ranks: list[Owned]) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for name, piece, rows in (item for rank in ranks for item in rank):
            whole = sums.setdefault(name, torch.zeros(piece.shard.shape, dtype=torch.float64))
            whole[piece.index] += rows
        return sums

    config = tiny(*BATCH, *CODECS["topk"], "parallel.pp=2", FLAT)
    saved(tmp_path, config, 6, more=0)
    expected = total(loaded(tmp_path, config, 6, lost))
    assert all(whole.abs().max() > 0 for whole in expected.values())
    for settings, world_size in (
        (("parallel.pp=1", FLAT), 2),
        (("parallel.tp=2", "parallel.pp=1", FLAT), 8),
        (("parallel.pp=1", TWO_LEVELS), 4),
        (("parallel.pp=2", FLAT), 4),
    ):
        other = tiny(*BATCH, *CODECS["topk"], *settings)
        found = total(loaded(tmp_path, other, world_size, lost))
        assert found.keys() == expected.keys()
        for name, whole in expected.items():
            torch.testing.assert_close(found[name], whole, atol=1e-6, rtol=1e-6)
