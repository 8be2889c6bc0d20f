"""The fault matrix: what is broken on purpose, and what must be seen then.

Real jobs of 2 ranks under the launcher, which a drill or a signal breaks:

| fault | must be seen | test |
|---|---|---|
| kill −9 at any moment | restart by itself; same losses, same weights | here |
| two faults, the second during recovery | restarts end | here |
| a rank hangs (SIGSTOP) | T ± 1 s; stacks; rank named; code 71 | here |
| … sleeps for ever; holds the interpreter | the same | ``test_watchdog`` |
| a rank dies | others name it | ``test_watchdog``, ``pipeline/test_mailbox`` |
| SIGTERM at one rank | all save the same step; 75; goes on with the same bits | here |
| SIGTERM at one host's launcher; a host lost; a host back | ``test_elastic`` | |
| kill −9 of the launcher | no rank is left | here |
| wrong world size | one line, from rank 0 | here |
| slow rank | named, no abort | ``test_stragglers`` |
| collective of another shape | both named, before it runs | ``test_collective_check`` |
| a bit of a replica flips | rank named, repaired | ``test_code_check`` |
| NaN on one rank, often | all skip; left out | ``training/test_skips``, ``test_stability`` |
| wrong YAML | refused before anything starts | ``test_cli``, ``test_config`` |
| another TP, PP, DP on resuming | same masters, same data | ``distributed/test_resharding`` |
| corpus damaged or of another dataset | refused | ``test_cli`` |
| kill in a shard, before rename or ``latest`` | the one before loads | ``checkpoint/test_kills`` |
| shard truncated, damaged, deleted | file named; the one before | ``checkpoint/test_fallback`` |
| disk full | alert, training goes on | ``checkpoint/test_failed_saves``, ``test_drills`` |
| kill during an asynchronous save | last durable one | ``checkpoint/test_kills`` |
"""

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.runs import ENVIRONMENT, children, is_alive, run, started, steps_of
from tests.patience import PATIENCE_S, eventually
from tests.training.runs import assert_same_tensors, checkpoint, rows
from tests.training.tiny import SETTINGS, tiny_corpus

STEPS = 16
JOB = (
    *(f"train.steps={STEPS}", "checkpoint.save_interval=5", "--nproc-per-node", "2"),
    "faults.heartbeat_s=0.5",
)
SLOW_STEPS = (
    *("checkpoint.save_interval=5", "faults.heartbeat_s=0.5"),
    # So that a random moment falls into all that a step does, and seldom between two steps.
    *("model.hidden_size=128", "model.intermediate_size=256", "model.num_hidden_layers=4"),
    "data.seq_length=64",
)
KILLED = ((8, 1), (14, 0))
"""The step after which a rank is killed, and its number."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a corpus, and in ``straight`` a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("matrix")
    tiny_corpus(folder)
    code, said = run(folder, *JOB, "run.dir=straight", name="straight")
    assert code == 0, said
    return folder


def drills(*faults: tuple[str, int, int]) -> str:
    """Setting: (fault, rank, step) of each."""
    entries = ", ".join(f"{{fault: {f}, rank: {r}, step: {s}}}" for f, r, s in faults)
    return f"faults.drills=[{entries}]"


def assert_is_as_straight(
    folder: Path, name: str, straight: str = "straight", steps: int = STEPS
) -> None:
    """The same losses, norms and rates, each step once, and the same weights and moments."""
    assert rows(folder / name) == rows(folder / straight)
    assert [row["step"] for row in steps_of(folder / name)] == [*range(1, steps + 1)]
    assert_same_tensors(checkpoint(folder / name, steps), checkpoint(folder / straight, steps))


def test_a_killed_rank_is_started_again(folder: Path) -> None:
    """From outside, in the middle of whatever it does: forward and backward passes, collectives."""
    chance = random.Random(1)
    slow = (*SLOW_STEPS, "train.steps=20", "--nproc-per-node", "2")
    code, said = run(folder, *slow, "run.dir=slow", name="slow")
    assert code == 0, said
    step_s = statistics.median(row["step_s"] for row in steps_of(folder / "slow"))
    with started(folder, *slow, "run.dir=killed", "--max-restarts", str(len(KILLED))) as job:
        for number, (step, rank) in enumerate(KILLED, 1):
            job.wait_for_step(step)
            job.wait_for((job.folder / "checkpoints" / "latest").exists)
            time.sleep(chance.uniform(0, step_s))
            seen = steps_of(job.folder)[-1]["step"]
            os.kill(ranks_of(job.process.pid)[rank], signal.SIGKILL)
            cause = f"rank {rank} was ended by SIGKILL; starting again from the newest checkpoint"
            job.wait_for(lambda cause=cause, n=number: f"{cause} (restart {n} of" in job.output)
            job.wait_for(lambda n=number: job.output.count("Resuming after step") == n)
            job.wait_for_step(seen + 1)
        assert job.wait() == 0, job.output
        said = job.output
    assert "Traceback" not in said
    assert_is_as_straight(folder, "killed", "slow", 20)


def ranks_of(pid: int) -> dict[int, int]:
    """Process id of each rank of a launcher."""
    ranks = {}
    for child in children(pid):
        with suppress(OSError):
            found = re.search(rb"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{child}/environ").read_bytes())
            if found:
                ranks[int(found[1])] = child
    return ranks


def test_restarts_are_bounded(folder: Path) -> None:
    """The other rank dies as soon as the first one is back, at step 5."""
    faults = drills(("kill", 1, 6), ("kill", 0, 7))
    code, said = run(folder, *JOB, faults, "run.dir=twice", "--max-restarts", "1")
    assert code == 128 + signal.SIGKILL
    assert said.count("starting again") == 1
    assert said.splitlines()[-1] == "error: rank 0 was ended by SIGKILL"


def test_a_stopped_rank_is_named(folder: Path) -> None:
    code, said = run(folder, *JOB, drills(("stop", 1, 8)), "faults.hang_s=6", "run.dir=stopped")
    assert code == 71
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert re.match(
        r"error: nothing has moved for \d+ s in step \d+: rank 1 \(\S+, pid \d+\)", line
    )
    assert re.search(r"was last heard \d+ s ago|no sign of life for \d+ s", line)
    stacks = (folder / "stopped" / "faults" / "rank_0_stacks.txt").read_text()
    assert re.search(r"rank 0 \(.*nothing has moved for \d+\.\d s in step", stacks)
    assert "all_reduce" in stacks or "wait" in stacks


def test_a_stop_is_agreed_on_and_goes_on_with_the_same_bits(folder: Path) -> None:
    """One rank of two gets SIGTERM; restarts are left, but a stop is no failure."""
    faults = drills(("term", 1, 8))
    code, said = run(folder, *JOB, faults, "run.dir=asked", "--max-restarts", "2")
    assert code == 75, said
    saved = int(re.findall(r"Stopped after step (\d+)", said)[0])
    assert saved in (8, 9)
    assert "starting again" not in said
    code, said = run(folder, *JOB, faults, "run.dir=asked", "--max-restarts", "2")
    assert code == 0, said
    assert f"Resuming after step {saved}" in said
    assert_is_as_straight(folder, "asked")


def test_ranks_end_with_their_launcher(folder: Path) -> None:
    with started(folder, *JOB, "train.steps=100000", "run.dir=left") as job:
        job.wait_for_step(2)
        ranks = children(job.process.pid)
        assert len(ranks) == 2
        job.process.kill()
        job.process.wait()
        eventually(lambda: not any(map(is_alive, ranks)))
    # The folder is free for another run at once.
    with started(folder, *JOB, "train.steps=100000", "run.dir=left", name="after") as job:
        job.wait_for(lambda: "step" in job.output)
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130, job.output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_world_that_does_not_fit_is_told_once(folder: Path, rank: int) -> None:
    """Rank 1 of another host, started alike, leaves it to rank 0."""
    done = subprocess.run(
        [sys.executable, "-m", "megabit", "train", *SETTINGS, "data.dir=corpus", "run.dir=none"],
        cwd=folder,
        env={**ENVIRONMENT, "RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    told = (
        "error: train.global_batch_size: 8 is not a multiple of dp=3 × train.micro_batch_size=2 = "
        "6; dp may be one of 1, 2, 4\n"
    )
    assert done.stderr == (told if rank == 0 else "")
    assert not (folder / "none").exists()


def test_under_torchrun(folder: Path) -> None:
    """Its agent counts a stop as a failure, and says so; the checkpoint is there all the same."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megabit")
    job = [argument for argument in JOB if argument not in ("--nproc-per-node", "2")]
    faults = drills(("term", 1, 8))
    code, said = run(folder, *job, faults, "run.dir=torchrun", command=torchrun)
    assert code == 1
    assert re.search(r"exitcode +: 75", said)
    code, said = run(folder, *job, faults, "run.dir=torchrun", command=torchrun)
    assert code == 0, said
    assert_is_as_straight(folder, "torchrun")
