"""``megabit inject``: plans of faults, and faults done to runs and checkpoints."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from megabit.config import load_config
from megabit.data.corpus import CorpusInfo
from megabit.faults.damage import damage_file
from megabit.faults.members import Member, gather_members, members_file, write_members
from megabit.faults.plan import ENDING, FAULTS, plan_drills
from megabit.mesh import ParallelMesh
from tests.command import megabit, refused
from tests.faults.runs import state_of
from tests.patience import PATIENCE_S, eventually
from tests.training.runs import assert_same_tensors, checkpoint, config_of, train
from tests.training.tiny import SETTINGS, tiny_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


# Plans.


def test_a_seed_is_a_plan() -> None:
    """On every machine: these numbers must never change."""
    drills = plan_drills(7, ranks=4, steps=200, mean_steps=50)
    assert drills == plan_drills(7, ranks=4, steps=200, mean_steps=50)
    assert [(d.fault, d.rank, d.step) for d in drills[:3]] == [
        ("kill", 2, 19),
        ("exception", 1, 23),
        ("exception", 0, 26),
    ]
    assert drills != plan_drills(8, ranks=4, steps=200, mean_steps=50)


def test_faults_come_as_often_as_is_said() -> None:
    """Distances are exponential: their standard deviation is their mean. Of 2000 of them the mean
    is within 4 / sqrt(2000) = 9 % all but always."""
    drills = plan_drills(0, ranks=3, steps=200_000, mean_steps=100.0)
    steps = [drill.step for drill in drills]
    assert steps == sorted(steps)
    assert steps[-1] < 200_000
    assert 1820 < len(drills) < 2180
    gaps = [after - before for before, after in pairwise(steps)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert 0.9 < spread / mean < 1.1
    assert {*Counter(drill.rank for drill in drills)} == {0, 1, 2}
    assert {drill.fault for drill in drills} == {*ENDING}


def test_a_plan_is_settings(tmp_path: Path) -> None:
    code, out, _ = megabit(
        *("inject", "plan", "--seed", 7, "--ranks", 4, "--steps", 200, "--faults", "kill, slow")
    )
    assert code == 0
    (tmp_path / "drills.yaml").write_text("\n".join(out) + "\n")
    drills = load_config([str(tmp_path / "drills.yaml")]).faults.drills
    assert drills == plan_drills(7, 4, 200, 50.0, ("kill", "slow"))
    code, out, _ = megabit("inject", "plan", "--ranks", 1, "--steps", 1, "--mean-steps", 1e9)
    (tmp_path / "none.yaml").write_text("\n".join(out) + "\n")
    assert load_config([str(tmp_path / "none.yaml")]).faults.drills == []


def test_what_is_wrong_with_a_plan() -> None:
    plan = ("inject", "plan", "--ranks", 1, "--steps", 9)
    problem = refused(*plan, "--faults", "kill,hng")
    assert problem == f"--faults: 'hng' is no fault; there are {', '.join(FAULTS)}"
    assert refused(*plan, "--mean-steps", 0) == "--mean-steps: must be greater than 0, not 0.0"


# Signals.


def own_run(folder: Path, **changes: object) -> Path:
    """A run whose rank 0 would be this process."""
    mesh = ParallelMesh()
    (member,) = gather_members(mesh.world, mesh.device)
    write_members(members_file(folder), [Member(**{**vars(member), **changes})])  # type: ignore[arg-type]
    return folder


def test_who_cannot_be_sent_a_signal(tmp_path: Path) -> None:
    kill = ("kill", "--yes", "--rank")
    path = members_file(tmp_path)
    problem = refused("inject", "signal", tmp_path, *kill, 0)
    assert problem == (
        f"{path}: cannot read it (No such file or directory); a run writes it when it begins"
    )
    problem = refused("inject", "signal", own_run(tmp_path), *kill, 1)
    assert problem == f"--rank: 1 is not among the ranks 0 to 0 of {tmp_path}"
    problem = refused("inject", "signal", own_run(tmp_path, host="elsewhere"), *kill, 0)
    assert problem == (
        f"--rank: 0 is on elsewhere; there, run: megabit inject signal {tmp_path} kill --rank 0"
    )
    # Another process has got the number since.
    problem = refused("inject", "signal", own_run(tmp_path, started=1), *kill, 0)
    assert problem == f"--rank: 0 of {tmp_path} is not running; {path} has its last process"
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    problem = refused("inject", "signal", own_run(tmp_path, pid=ended.pid), *kill, 0)
    assert problem == f"--rank: 0 of {tmp_path} is not running; {path} has its last process"


def test_it_asks_before_it_harms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process, and a file."""
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    problem = refused("inject", "signal", own_run(tmp_path), "kill", "--rank", 0)
    assert problem == "--yes: is needed where nobody can be asked"


@pytest.mark.slow
def test_a_run_is_stopped_goes_on_and_ends(corpus: CorpusInfo, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = [*SETTINGS, f"data.dir={corpus.dir}", f"run.dir={folder}", "train.steps=100000"]
    command = [sys.executable, "-m", "megabit", "train", *settings]
    said = tmp_path / "said"

    def send(name: str) -> str:
        code, (line,), _ = megabit("inject", "signal", folder, name, "--rank", 0, "--yes")
        assert code == 0
        return line

    with (
        said.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as run,
    ):
        try:
            eventually(lambda: members_file(folder).exists() or run.poll() is not None)
            assert run.poll() is None, said.read_text()
            line = send("stop")
            assert line == f"sent SIGSTOP to rank 0 (process {run.pid}) of {folder}"
            eventually(lambda: state_of(run.pid) == "T")
            send("continue")
            send("term")
            assert run.wait(PATIENCE_S) == 75, said.read_text()  # saved, to be started again
        finally:
            run.kill()
    assert (folder / "checkpoints" / "latest").exists()


# Damage.


SAVES = ("checkpoint.save_interval=3", "checkpoint.keep_last=0")


@pytest.fixture(scope="module")
def saved(corpus: CorpusInfo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    train(config_of(corpus, folder, *SAVES), 2)
    return folder


@pytest.mark.parametrize("kind", ["bit_flip", "truncate", "delete_shard"])
def test_a_checkpoint_is_damaged_and_that_is_noticed(
    saved: Path, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    newest = folder / "checkpoints" / "step_00000006"
    before = {path: path.read_bytes() for path in newest.glob("*.safetensors")}
    code, (said,), _ = megabit("inject", "damage", folder, kind, "--seed", 3, "--yes")
    assert code == 0
    after = {path: path.read_bytes() if path.exists() else b"" for path in before}
    (harmed,) = [path for path, content in before.items() if after[path] != content]
    old, new = before[harmed], after[harmed]
    if kind == "delete_shard":
        assert said == f"deleted {harmed}"
        assert not harmed.exists()
    elif kind == "truncate":
        assert said == f"cut {harmed} from {len(old)} to {len(new)} bytes"
        assert old.startswith(new)
    else:
        (place,) = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
        bit = (old[place] ^ new[place]).bit_length() - 1
        assert old[place] ^ new[place] == 1 << bit
        assert said == f"flipped bit {bit} of byte {place} of {harmed}"
    code, _, err = megabit("ckpt", "verify", newest)
    assert code != 0
    assert any(harmed.name in line for line in err)


def test_a_run_goes_on_from_the_checkpoint_before(
    corpus: CorpusInfo, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    megabit("inject", "damage", folder, "bit_flip", "--yes")
    fallback = (*SAVES, "checkpoint.auto_fallback=true")
    finished, said = train(config_of(corpus, folder, *fallback), 2)
    assert finished
    assert "ALERT" in said
    assert_same_tensors(checkpoint(folder, 6), checkpoint(saved, 6))


def test_the_same_seed_does_the_same_damage(tmp_path: Path) -> None:
    said = set()
    for _ in range(2):
        path = tmp_path / "x"
        path.write_bytes(bytes(1000))
        said.add(damage_file(path, "bit_flip", seed=5))
    assert len(said) == 1
    path.write_bytes(bytes(1000))
    assert damage_file(path, "bit_flip", seed=6) not in said


def test_what_cannot_be_damaged(tmp_path: Path) -> None:
    assert "holds no checkpoint" in refused("inject", "damage", tmp_path, "truncate", "--yes")
