"""All ranks refuse a damaged checkpoint in the same words, or go on from the one before."""

import json
import shutil
from pathlib import Path

import pytest

from megabit.checkpoint import CheckpointStore, DamagedCheckpoint
from megabit.checkpoint.verify import verify
from megabit.errors import UserError
from megabit.launch import run_ranks
from tests.checkpoint.damage import (
    FIRST,
    LAST,
    NAMES,
    STRUCTURE,
    Damage,
    cut_short,
    flip,
    written,
)
from tests.checkpoint.stored import make_mesh, make_store, manifest, save, sign, write_checkpoint


def of_another_version(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 1}))


def step_of_another(folder: Path) -> None:
    """A copy that was put in place of the checkpoint."""
    sign(folder, manifest(1))


FOUND: dict[str, tuple[Damage, str]] = {
    **{
        f"{name} {damage.__name__}": (lambda f, n=name, d=damage: d(f / n), f"/{name}: ")
        for name in NAMES
        for damage in (cut_short, flip, Path.unlink)
    },
    **STRUCTURE,
    "extra file": (lambda folder: (folder / "extra").touch(), "/extra: is not part of the"),
    "another step": (step_of_another, "/manifest.json: is of step 1"),
    "no folder": (shutil.rmtree, "/manifest.json: cannot read it"),
}


def refusal(checkpoints: CheckpointStore, falls_back: bool) -> tuple[type, tuple[str, ...]]:
    with pytest.raises(UserError) as caught:
        checkpoints.find(falls_back, pytest.fail)
    return type(caught.value), caught.value.problems


def test_ranks_refuse_a_damaged_checkpoint_or_take_the_one_before(tmp_path: Path) -> None:
    """All of them, with the same words, whichever of them finds what is wrong."""
    template = tmp_path / "template"
    write_checkpoint(template / "step_00000001", 1, 3)
    written(template / "step_00000002")
    (template / "latest").write_text("step_00000002\n")
    for name, (damage, _) in FOUND.items():
        shutil.copytree(template, tmp_path / name)
        damage(tmp_path / name / "step_00000002")

    def run() -> dict[str, tuple[tuple[type, tuple[str, ...]], list[str], int]]:
        told, mesh = {}, make_mesh()
        for name in FOUND:
            checkpoints = CheckpointStore(tmp_path / name, mesh)
            refused, alerts = refusal(checkpoints, falls_back=False), []
            assert checkpoints.durable_step == -1
            found = checkpoints.find(True, alerts.append)
            assert found is not None
            assert (found.path.name, found.manifest.step) == ("step_00000001", 1)
            told[name] = refused, alerts, checkpoints.durable_step
        return told

    ranks = run_ranks(run, 3)
    assert ranks == [ranks[0]] * 3
    for name, ((kind, problems), alerts, durable_step) in ranks[0].items():
        assert kind is DamagedCheckpoint
        assert all(p.startswith(f"{tmp_path / name}/step_00000002") for p in problems)
        assert any(FOUND[name][1] in problem for problem in problems), (name, problems)
        hint = "; --auto-fallback goes on from the checkpoint before"
        assert problems[-1].endswith(hint)
        assert alerts == [problem.removesuffix(hint) for problem in problems]
        assert durable_step == 1


def test_ranks_fall_back_as_far_as_they_must(tmp_path: Path) -> None:
    """But not beyond what is there, nor from what another version wrote."""
    for step in (1, 2, 3, 4):
        write_checkpoint(tmp_path / f"step_{step:08d}", step, 2)
    (tmp_path / "latest").write_text("step_00000003\n")
    damaged = {step: tmp_path / f"step_{step:08d}" for step in (3, 2)}
    flip(damaged[3] / LAST)
    cut_short(damaged[2] / "manifest.json")

    def run() -> tuple[int, list[str]]:
        checkpoints, alerts = make_store(tmp_path), []
        found = checkpoints.find(True, alerts.append)
        assert found is not None
        return found.manifest.step, alerts

    for step, alerts in run_ranks(run, 2):
        assert step == 1  # not 4, which latest does not name: it is newer than what was asked for
        assert [alert.split(": ")[0] for alert in alerts] == [
            str(damaged[3] / LAST),
            str(damaged[2] / "manifest.json"),
        ]

    (tmp_path / "step_00000001" / FIRST).unlink()

    def run_out() -> tuple[str, int]:
        checkpoints, alerts = make_store(tmp_path), []
        with pytest.raises(DamagedCheckpoint) as caught:
            checkpoints.find(True, alerts.append)
        return str(caught.value), len(alerts)

    expected = f"{tmp_path}: no checkpoint is in order; use another run.dir"
    assert run_ranks(run_out, 2) == [(expected, 3)] * 2


def test_another_version_is_not_stepped_back_from(tmp_path: Path) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path / f"step_{step:08d}", step)
    (tmp_path / "latest").write_text("step_00000002\n")
    of_another_version(tmp_path / "step_00000002")
    kind, problems = refusal(make_store(tmp_path), falls_back=True)
    path = tmp_path / "step_00000002" / "manifest.json"
    assert kind is UserError
    assert problems == (f"{path}: is of version 1; this megabit reads version 2",)


@pytest.mark.parametrize("content", ["", "step_1", "step_" + "9" * 40])
def test_latest_that_is_no_name(content: str, tmp_path: Path) -> None:
    """Refused; who falls back takes the newest there is."""
    write_checkpoint(tmp_path / "step_00000001", 1)
    (tmp_path / "latest").write_text(content)
    expected = f"{tmp_path / 'latest'}: must hold the name of a checkpoint"
    _, (problem,) = refusal(make_store(tmp_path), falls_back=False)
    assert problem.startswith(expected)
    alerts: list[str] = []
    found = make_store(tmp_path).find(True, alerts.append)
    assert found is not None
    assert found.manifest.step == 1
    assert [alert.startswith(expected) for alert in alerts] == [True]


def test_without_latest_the_newest_is_taken(tmp_path: Path) -> None:
    """A run died after its first checkpoint was complete and before it was called the latest."""
    for step in (1, 2):
        write_checkpoint(tmp_path / f"step_{step:08d}", step)
    found = make_store(tmp_path).find(False, pytest.fail)
    assert found is not None
    assert found.manifest.step == 2


def test_a_run_goes_on_from_where_it_fell_back_to(tmp_path: Path) -> None:
    """The damaged one is replaced when its step comes again."""
    checkpoints = make_store(tmp_path)
    for step in (1, 2):
        assert save(checkpoints, step) is None
    flip(tmp_path / "step_00000002" / FIRST)
    checkpoints = make_store(tmp_path)
    found = checkpoints.find(True, lambda problem: None)
    assert found is not None
    assert found.manifest.step == 1
    assert save(checkpoints, 2) is None
    assert [*verify(tmp_path / "step_00000002")]
    found = make_store(tmp_path).find(False, pytest.fail)
    assert found is not None
    assert found.manifest.step == 2
