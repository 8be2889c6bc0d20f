"""The whole examination on real ranks that were not started alike."""

from dataclasses import replace
from pathlib import Path

import pytest

import megabit
from megabit.config import load_config
from megabit.doctor import Diagnosis, Plan, examine
from megabit.doctor.ranks import Ranks
from tests.doctor.clusters import on_ranks

HUGE = ("model.hidden_size=65536", "model.num_hidden_layers=400")


def plan_of(folder: Path, **changes: str) -> Plan:
    return Plan(load_config([]), False, {"--quick": "True", **changes}, folder, False, True)


def words(found: Diagnosis) -> list[str]:
    return [finding.what for finding in found.findings if finding.severity == "wrong"]


def test_ranks_that_were_started_with_other_options(tmp_path: Path) -> None:
    """They may not even agree on how much to do; the examination still comes to its end."""
    missing = tmp_path / "missing"

    def run(ranks: Ranks) -> Diagnosis:
        place = ranks.cluster.places[ranks.rank]
        plan = plan_of(tmp_path)
        if ranks.rank == 1:
            plan = replace(plan_of(missing, **{"--quick": "False"}), is_quick=False)
            plan = replace(plan, folder_may_be_new=True)
        return examine(ranks.world, place, ranks.device, plan, {})

    first, second = on_ranks(run, 2)
    assert words(first) == words(second)
    assert "rank 1: --quick is False, elsewhere True" in words(first)
    assert f"rank 1: {missing} does not exist" in words(first)
    assert not first.is_fine
    assert len(first.products) == len(first.machines) == 2
    assert first.collectives


def test_other_releases_are_not_examined_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(ranks: Ranks) -> Diagnosis:
        if ranks.rank == 1:
            monkeypatch.setattr(megabit, "__version__", "9.9")
        place = ranks.cluster.places[ranks.rank]
        return examine(ranks.world, place, ranks.device, plan_of(tmp_path), {})

    for found in on_ranks(run, 2):
        assert words(found) == [f"rank 1: megabit is 9.9, elsewhere {megabit.__version__}"]
        assert not found.products


def test_a_model_that_is_too_large(tmp_path: Path) -> None:
    plan = replace(plan_of(tmp_path), config=load_config(HUGE), has_settings=True)

    def run(ranks: Ranks) -> Diagnosis:
        return examine(ranks.world, ranks.cluster.places[0], ranks.device, plan, {})

    (found,) = on_ranks(run, 1)
    memory, room = words(found)
    assert memory.startswith("a: weights and moments of its ranks take 111 TB, but ")
    assert room.startswith(f"{tmp_path}: ")
