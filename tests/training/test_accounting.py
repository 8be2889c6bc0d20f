"""The figures of an interval for all ranks together, as ``megabit train`` prints them."""

import math

import pytest

from megabit.data.corpus import SplitInfo
from megabit.data_parallel import ZeroOptimizer
from megabit.launch import run_ranks
from megabit.telemetry import Accounting
from megabit.training.accounting import take_account
from megabit.training.interval import Interval
from megabit.training.step import TrainingState, train_step
from megabit.units import MIB
from tests.training.tiny import make_mesh, own_batch, tiny

SPLIT = SplitInfo(documents=1, tokens=100, bytes=300)
# On stage 0 the embedding, on stage 1 the whole head: the ranks keep different amounts.
CONFIG = tiny("parallel.pp=2", "model.vocab_size=301", "model.tie_word_embeddings=false")


def account(skip: int | None = None) -> list[tuple[Accounting, int]]:
    """Of three steps, and what the rank keeps; of step ``skip`` the gradient is NaN."""

    def run() -> tuple[Accounting, int]:
        state = TrainingState.create(CONFIG, make_mesh(CONFIG))
        interval = Interval(state)
        for step in range(3):
            batch = own_batch(CONFIG, state.mesh, step)
            interval.begin_step()
            if step == skip and state.mesh.world.rank == 0:
                weight = state.stages.embedding_weight
                assert weight is not None
                weight.ready().data.fill_(math.nan)  # on one rank; all of them skip the step
            interval.end_step(train_step(state, batch, step))
        metrics = interval.metrics(3, SPLIT)
        assert metrics.skipped == (0 if skip is None else 1)
        return take_account(state, metrics, interval.reports), sum(
            state.optimizer.nbytes().values()
        )

    return run_ranks(run, 4)


@pytest.mark.parametrize("skip", [None, 2], ids=["updates", "one-skipped"])
def test_an_interval_is_as_expected(skip: int | None) -> None:
    results = account(skip)
    accounting, _ = results[0]
    assert accounting.agrees
    assert accounting.sent_by_purpose_mb.keys() == accounting.expected_sent_by_purpose_mb.keys()
    assert "dp weights" in accounting.sent_by_purpose_mb
    assert all(other == accounting for other, _ in results)
    kept = [own for _, own in results]
    assert max(kept) > min(kept)
    assert kept[accounting.rank] == max(kept)
    assert sum(accounting.memory_mib.values()) * MIB == pytest.approx(max(kept), rel=1e-12)
    assert accounting.peak_memory_mib * MIB > max(kept)


def test_the_rank_that_keeps_what_it_should_not_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = ZeroOptimizer.nbytes

    def leaky(optimizer: ZeroOptimizer) -> dict[str, int]:
        kept = nbytes(optimizer)
        # It has less than ranks 2 and 3, and still a byte too much.
        return kept | {"gradients": kept["gradients"] + (optimizer.mesh.world.rank == 1)}

    monkeypatch.setattr(ZeroOptimizer, "nbytes", leaky)
    accounting, _ = account()[0]
    assert not accounting.agrees
    assert accounting.rank == 1
    difference = accounting.memory_mib["gradients"] - accounting.expected_memory_mib["gradients"]
    assert difference * MIB == 1
