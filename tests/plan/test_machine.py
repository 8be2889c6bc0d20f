"""What is written of a machine is what is read, and nothing else is taken for one."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megabit.errors import UserError
from megabit.plan.catalog import GPUS, INTERCONNECTS, known_machine
from megabit.plan.machine import AlphaBeta, GroupLink, Machine

MEASURED = GroupLink("all_reduce", 2, 2, AlphaBeta(1e-4, 2e9), 0.1)


def machine() -> Machine:
    known = known_machine("cpu", 4, "ib400")
    network = replace(known.network, measured=(MEASURED,))
    return replace(known, network=network, created={"commit": "0" * 40})


@pytest.mark.parametrize("gpu", [*GPUS, "cpu"])
def test_a_machine_survives_its_file(gpu: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for known in (known_machine(gpu, 8, "ib400"), machine()):
        path.write_text(known.to_json())
        assert Machine.read(path) == known


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda file: file.update(schema=2), "schema is 2"),
        (lambda file: file.pop("network"), "network is missing"),
        (lambda file: file.update(more=1), "more is unknown"),
        (lambda file: file["device"].update(cores=None), "device.cores is null"),
        (lambda file: file["device"].update(memory_bytes=1.5), "device.memory_bytes is 1.5"),
        (
            lambda file: file["device"]["rates"]["float32"]["seconds"].update(nap=1),
            "nap is unknown",
        ),
        (lambda file: file["device"]["rates"]["float32"]["seconds"].update(head=-1), "head is -1"),
        (lambda file: file["network"].update(overlap=2), "network.overlap is 2"),
        (lambda file: file["network"]["intra"]["send"].update(bytes_per_s=0), "bytes_per_s is 0"),
        (lambda file: file["network"]["measured"][0].update(kind="shout"), "shout"),
        (lambda file: file.update(is_measured="yes"), "is_measured is 'yes'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    change: Callable[[Any], object], problem: str
) -> None:
    file = json.loads(machine().to_json())
    change(file)
    with pytest.raises(UserError) as refused:
        Machine.from_json(json.dumps(file), "here.json")
    (line,) = str(refused.value).splitlines()
    assert line.startswith("here.json: ")
    assert problem in line


def test_no_file_and_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json"):
        Machine.read(tmp_path / "none.json")
    with pytest.raises(UserError, match=r"x: "):
        Machine.from_json("[1", "x")
    with pytest.raises(UserError, match="the file is no object"):
        Machine.from_json("[1]", "x")


def test_names_that_are_not_known_are_refused() -> None:
    with pytest.raises(UserError, match="--gpu: z9"):
        known_machine("z9", 8, "ib400")
    with pytest.raises(UserError, match="--interconnect: string"):
        known_machine("h100", 8, "string")
    with pytest.raises(UserError, match="--nodes-of"):
        known_machine("h100", 0, "ib400")
    with pytest.raises(UserError, match="float64"):
        known_machine("h100", 8, "ib400").device.rates_of("float64")


def test_no_known_machine_claims_to_be_measured() -> None:
    for gpu in [*GPUS, "cpu"]:
        for interconnect in INTERCONNECTS:
            assert not known_machine(gpu, 8, interconnect).is_measured
