"""A gradient that is not finite in one element on one rank: all ranks skip the step together."""

import itertools
import math
from collections import Counter

import pytest

from megabit.launch import run_ranks
from megabit.training.step import TrainingState, train_step
from tests.training.tiny import bits, make_mesh, own_batch, poisoned, tiny

PP2, TP2, TP4 = "parallel.pp=2", "parallel.tp=2", "parallel.tp=4"
SP = "parallel.sequence_parallel=true"
CASES = {
    "dp4-zero0": ("optim.zero_stage=0",),
    "dp4-zero1": ("optim.zero_stage=1", "precision.gradients=bfloat16"),
    "dp4-zero2": ("optim.zero_stage=2",),
    "tp2-dp2": (TP2,),
    "tp2-sp-dp2-zero2": (TP2, SP, "optim.zero_stage=2"),
    "tp4": (TP4,),  # ranks share KV heads
    "pp2-dp2": (PP2,),
    "pp2-tp2-untied": (PP2, TP2, "model.tie_word_embeddings=false"),
    "dp4-exact": ("parallel.exact=full",),
}


def published(state: TrainingState) -> Counter[str]:
    """Bytes so far by what they were sent for, of what follows an update."""
    counts = Counter[str]()
    for (_, purpose), count in state.mesh.sent().items():
        if purpose in ("weights", "scales"):
            counts[purpose] += int(count)
    return counts


def victims(state: TrainingState) -> list[str]:
    """Of each kind of tensor, one whose last element is to be spoilt. Of the key projection that is
    a row which at TP 4 another rank counts."""
    slots = [s.name for b in state.optimizer.gradients.buckets for s in b.layout.slots]
    names = [name for name in slots if "k_proj" in name][:1]
    names += [name for name in slots if "input_layernorm" in name][:1]
    names += [name for name in slots if "embed_tokens" in name or "lm_head" in name][:1]
    return names


def run_case(settings: tuple[str, ...]) -> int:
    """Returns how many steps were skipped, all of them seen by the calling rank."""
    config = tiny(*settings)
    mesh = make_mesh(config)
    state, calm = TrainingState.create(config, mesh), TrainingState.create(config, mesh)
    train_step(state, own_batch(config, mesh, 0), 0)
    train_step(calm, own_batch(config, mesh, 0), 0)
    before, updates, sent = bits(state), state.optimizer.updates, published(state)
    skipped = 0
    for rank, (kind, bad) in itertools.product(
        range(4), enumerate((math.nan, math.inf, -math.inf))
    ):
        names, batch = victims(state), own_batch(config, mesh, 1)
        if mesh.world.rank == rank and kind < len(names):
            with poisoned(state, names[kind], bad):
                report = train_step(state, batch, 1)
        else:
            report = train_step(state, batch, 1)
        assert report.is_skipped
        assert math.isfinite(report.loss)
        assert published(state) == sent
        assert state.optimizer.updates == updates
        after = bits(state)
        assert len(after) == len(before)
        assert all((own == old).all() for own, old in zip(after, before, strict=True))
        skipped += 1
    for step in (2, 3):
        own = train_step(state, own_batch(config, mesh, step), step)
        expected = train_step(calm, own_batch(config, mesh, step), step)
        assert (own.loss, own.grad_norm) == (expected.loss, expected.grad_norm)
        assert math.isfinite(own.grad_norm)
    after, expected_bits = bits(state), bits(calm)
    assert all((own == old).all() for own, old in zip(after, expected_bits, strict=True))
    assert any((own != old).any() for own, old in zip(after, before, strict=True))
    assert published(state) == published(calm)
    return skipped


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(list(CASES)[:3], id="dp"),
        pytest.param(list(CASES)[3:6], id="tp", marks=pytest.mark.slow),
        pytest.param(list(CASES)[6:], id="pp-exact", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_skip_change_nothing_publish_nothing_and_go_on(cases: list[str]) -> None:
    for results in run_ranks(lambda: [run_case(CASES[case]) for case in cases], 4):
        assert results == [12] * len(cases)
