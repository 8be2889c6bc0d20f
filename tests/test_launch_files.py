"""The files of ``examples/launch`` and ``examples/site``: all are run, with real ranks over gloo.

What needs a cluster is run as that would, by stand-ins for the commands of Slurm and MPI, and for
what Kubernetes and SkyPilot do with a file (``tests/launchers``). Only the hosts are one and the
same.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from megabit.config import load_config
from megabit.config.validate_cluster import ENVIRONMENT
from tests import test_examples as examples
from tests.launchers.schema import problems
from tests.test_examples import ROOT, check_run, output_of, running, settings, started

LAUNCH = ROOT / "examples" / "launch"
SITES = sorted((ROOT / "examples" / "site").glob("*.yaml"))
STANDINS = Path(__file__).resolve().parent / "launchers"
SHELL = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
WITH_STANDINS = ("mpi.sh", "slurm.sbatch", "slurm_srun.sbatch", "jobset.yaml", "skypilot.yaml")
TWO_RANKS = {"tp": 1, "pp": 1, "dp": 2}


def dp2(folder: Path, *more: str) -> list[str]:
    """Settings of a small run of any number of ranks, which are all DP."""
    return [*settings(folder), "parallel.tp=1", "parallel.pp=1", *more]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def wait_until(what: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def is_training(folder: Path) -> bool:
    rows = folder / "run" / "metrics.jsonl"
    return rows.exists() and '"loss"' in rows.read_text()


def test_every_file_is_tested_here() -> None:
    names = {path.name for path in LAUNCH.iterdir()}
    assert names == {"one_host.sh", "n_hosts.sh", *WITH_STANDINS}


@pytest.mark.parametrize("name", WITH_STANDINS)
def test_a_file_says_where_it_has_never_run(name: str) -> None:
    (comment,) = re.findall(r"\A(?:#.*\n)+", (LAUNCH / name).read_text())
    assert "tests/test_launch_files.py" in comment
    assert "never on a real" in comment


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_the_syntax_of_shell_scripts(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("file", SITES, ids=lambda path: path.stem)
def test_a_site_is_a_part_of_the_settings(file: Path) -> None:
    config = load_config([str(ROOT / "examples" / "model" / "tiny.yaml"), str(file)])
    assert config.site.environment
    # Those that are only shown obey the same rules.
    for line in re.findall(r"^    # ([A-Z][A-Z_]+: .+)$", file.read_text(), re.MULTILINE):
        ((name, value),) = yaml.safe_load(line).items()
        assert name.startswith(ENVIRONMENT)
        assert isinstance(value, str), f"{name} needs quotes"


@pytest.mark.slow
def test_one_host(tmp_path: Path) -> None:
    with started("launch/one_host.sh", [*settings(tmp_path), "parallel.pp=1"], NPROC="2") as job:
        output = output_of(job)
    assert re.search(r"^step +2  loss \d", output, re.MULTILINE)
    check_run(tmp_path / "run", {"tp": 2, "pp": 1, "dp": 1})


@pytest.mark.slow
@pytest.mark.parametrize("is_static", [True, False], ids=["static", "c10d"])
def test_n_hosts(is_static: bool, tmp_path: Path) -> None:
    hosts = []
    with ExitStack() as stack:
        head = f"localhost:{free_port()}"
        for number in (1, 0):  # HEAD comes last: the others wait for it
            variables = {"HEAD": head, "NPROC": "1", "NNODES": "2"}
            if is_static:
                variables["NODE_RANK"] = str(number)
            script = started("launch/n_hosts.sh", dp2(tmp_path), **variables)
            hosts.append(stack.enter_context(script))
        second, first = (output_of(host) for host in hosts)
    spoke = re.compile(r"^step +2  loss \d", re.MULTILINE)
    assert len(spoke.findall(first)) + len(spoke.findall(second)) == 1  # only rank 0
    if is_static:
        assert spoke.search(first)
    assert "Traceback" not in first + second
    check_run(tmp_path / "run", TWO_RANKS)


def test_n_hosts_says_what_to_set() -> None:
    with started("launch/n_hosts.sh", []) as process:
        output, _ = process.communicate()
    assert process.returncode != 0
    assert "HEAD: set HEAD to" in output


def in_standins(folder: Path) -> dict[str, str]:
    """Variables with which the stand-ins are found, and find each other."""
    path = os.pathsep.join([str(STANDINS / "bin"), examples.ENVIRONMENT["PATH"]])
    return {"PATH": path, "STANDIN": str(folder)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["open_mpi", "mpich"])
def test_mpi(kind: str, tmp_path: Path) -> None:
    variables = {**in_standins(tmp_path), "STANDIN_MPI": kind, "NRANKS": "2"}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    with started("launch/mpi.sh", dp2(tmp_path), **variables) as job:
        output = output_of(job)
    assert re.search(r"^step +2  loss \d", output, re.MULTILINE)
    check_run(tmp_path / "run", TWO_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm_srun.sbatch"])
def test_slurm_stops_in_time_and_goes_on(script: str, tmp_path: Path) -> None:
    """SIGTERM before the time is up → saved, 75 → requeued → resumed → finished."""
    nodes = ["--nodes=2", "--ntasks-per-node=1", f"--output={tmp_path}/%x-%j.log"]
    arguments = dp2(tmp_path, "train.steps=40", "train.eval_interval=0")
    command = ["sbatch", *nodes, f"examples/launch/{script}", *arguments]
    with running(command, ROOT, {**in_standins(tmp_path), "NPROC": "1"}) as job:
        wait_until(lambda: is_training(tmp_path) or job.poll() is not None)
        (tmp_path / "time_is_up").touch()
        code = job.wait(120)
    (log,) = tmp_path.glob("megabit-*.log")
    output = log.read_text()
    assert code == 0, output
    assert not (tmp_path / "time_is_up").exists()
    stopped = re.search(r"Stopped after step (\d+)", output)
    assert stopped, output
    assert f"Resuming after step {stopped[1]}" in output
    assert "Traceback" not in output
    check_run(tmp_path / "run", TWO_RANKS, steps=40)


def schema_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((STANDINS / f"{name}.schema.yaml").read_text())


def launch_file(name: str) -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / f"{name}.yaml").read_text())


@pytest.mark.parametrize("name", ["jobset", "skypilot"])
def test_a_file_follows_its_schema(name: str) -> None:
    assert not list(problems(launch_file(name), schema_of(name)))


@pytest.mark.parametrize(
    ("name", "path", "value", "expected"),
    [
        ("jobset", ("spec", "failurePolicy", "maxRestart"), 1, "maxRestart: is unknown"),
        ("jobset", ("spec", "failurePolicy", "maxRestarts"), "5", "is not of type integer"),
        ("jobset", ("spec", "failurePolicy", "restartStrategy"), "Never", "is not among"),
        ("jobset", ("spec", "replicatedJobs"), [{"name": "x"}], "template: is missing"),
        ("skypilot", ("num_nodes",), True, "is not of type integer"),
        ("skypilot", ("envs", "N"), 1, "is not of type string"),
        ("skypilot", ("resources", "spot"), True, "spot: is unknown"),
    ],
)
def test_a_schema_sees_a_mistake(
    name: str, path: tuple[str, ...], value: Any, expected: str
) -> None:
    document = launch_file(name)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (problem,) = problems(document, schema_of(name))
    assert expected in problem


def replaced(text: str, **changes: str) -> str:
    """Each of them must be there."""
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def pod_commands(folder: Path, more: Sequence[str]) -> list[str]:
    """What a container of jobset.yaml runs, small and with this host as its node."""
    document = launch_file("jobset")
    (job,) = document["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    (port,) = container["ports"]
    name = document["metadata"]["name"]
    first = f"{name}-{job['name']}-0-0.{name}"  # what the headless service calls it
    changes = {
        f"{first}:{port['containerPort']}": f"localhost:{free_port()}",
        f"--nnodes={pods['parallelism']}": "--nnodes=2",
        f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}": (
            "--nproc-per-node=1"
        ),
        f"{container['volumeMounts'][0]['mountPath']}/": f"{folder}/",
    }
    assert pods["completions"] == pods["parallelism"]
    arguments = replaced("\n".join(container["args"]), **changes).split("\n")
    return [*container["command"], *arguments, *more]


@pytest.mark.slow
def test_jobset_restarts_what_has_saved(tmp_path: Path) -> None:
    """One pod is evicted: all save and end with the code that the pods' policy names; new ones go
    on, and finish."""
    more = dp2(tmp_path, "train.steps=40", "train.eval_interval=0")
    first = pods(tmp_path, more)
    with first as both:
        wait_until(lambda: is_training(tmp_path))
        both[1].send_signal(signal.SIGTERM)  # process 1 of its container
        outputs = [pod.communicate(timeout=60)[0] for pod in both]
        policy = launch_file("jobset")["spec"]["replicatedJobs"][0]["template"]["spec"]
        (codes,) = (rule["onExitCodes"] for rule in policy["podFailurePolicy"]["rules"][:1])
        assert [pod.returncode for pod in both] == codes["values"] * 2, outputs
    with pods(tmp_path, more) as both:
        output = "".join(map(output_of, both))
    assert "Resuming after step" in output
    check_run(tmp_path / "run", TWO_RANKS, steps=40)


@contextmanager
def pods(folder: Path, more: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    command = pod_commands(folder, more)
    with ExitStack() as stack:
        yield [
            stack.enter_context(running(command, ROOT, {"JOB_COMPLETION_INDEX": str(number)}))
            for number in range(2)
        ]


@pytest.mark.slow
def test_skypilot(tmp_path: Path) -> None:
    task = launch_file("skypilot")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    (mount,) = task["volumes"]
    changes = {f"{mount}/": f"{tmp_path}/", ":29400": f":{free_port()}"}
    script = tmp_path / "run.sh"
    script.write_text(replaced(task["run"], **changes))
    workdir = tmp_path / "workdir"  # which SkyPilot copies, and setup gives a .venv
    workdir.mkdir()
    (workdir / "examples").symlink_to(ROOT / "examples")
    (workdir / ".venv").symlink_to(sys.prefix)
    variables = {
        **task["envs"],
        "SETTINGS": " ".join(dp2(tmp_path)),
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    }
    with ExitStack() as stack:
        bash = shutil.which("bash") or "bash"
        nodes = [
            stack.enter_context(
                running(
                    [bash, str(script)], workdir, {**variables, "SKYPILOT_NODE_RANK": str(rank)}
                )
            )
            for rank in (1, 0)
        ]
        second, first = (output_of(node) for node in nodes)
    assert re.search(r"^step +2  loss \d", first, re.MULTILINE)
    assert "loss" not in second
    check_run(tmp_path / "run", TWO_RANKS)
