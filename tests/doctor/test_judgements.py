"""The words for given measurements: software, machines, GPUs, interfaces, clocks."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from megabit.doctor import Finding, clocks, gpu, interfaces, machine, software, worst_first
from megabit.doctor.clocks import Clock
from megabit.doctor.gpu import Gpu
from megabit.doctor.interfaces import Interfaces, missing, nccl_choice
from megabit.doctor.machine import Machine
from megabit.doctor.software import Software
from tests.doctor.clusters import CPU, cluster_of

GIB = 2**30


def words(findings: Iterable[Finding]) -> list[str]:
    return [f"{finding.severity}: {finding.what}" for finding in findings]


def test_the_worst_comes_first() -> None:
    found = [Finding(severity, "x", severity) for severity in ("note", "wrong", "warning")]
    assert [finding.what for finding in worst_first(found)] == ["wrong", "warning", "note"]


# Software.

SAME = Software("0.1.0", "2.13.0", "3.11.7", {"train.steps": "100", "--quick": "False"})


def test_the_same_software_is_fine() -> None:
    assert not words(software.judge([SAME] * 4, cluster_of(2, 2)))
    assert Software.here({}).python.startswith("3.")


def test_other_releases_are_named_with_their_hosts() -> None:
    old = replace(SAME, torch="2.11.0", python="3.12.1")
    assert words(software.judge([SAME, SAME, SAME, SAME, old, old], cluster_of(2, 2, 2))) == [
        "wrong: c: torch is 2.11.0, elsewhere 2.13.0",
        "warning: c: python is 3.12.1, elsewhere 3.11.7",
    ]


def test_other_settings_are_named_by_their_keys() -> None:
    other = replace(SAME, settings={"train.steps": "200", "--quick": "False"})
    assert words(software.judge([SAME, SAME, other], cluster_of(3))) == [
        "wrong: rank 2: train.steps is 200, elsewhere 100"
    ]


# Machines.

FINE = Machine(
    cores=8,
    allowed=[0, 1, 2, 3, 4, 5, 6, 7],
    quota=None,
    threads=1,
    omp_threads="1",
    isa="avx512vnni",
    memory_bytes=64 * GIB,
    free_bytes=60 * GIB,
    shared_memory_bytes=32 * GIB,
    open_files=65536,
)


def of_machines(*machines: Machine, on_gpu: bool = False, needed: float = 0) -> list[str]:
    return words(machine.judge(machines, cluster_of(len(machines)), on_gpu, needed))


def test_this_machine_can_be_read() -> None:
    here = Machine.here({"OMP_NUM_THREADS": "1"})
    assert here.cores >= len(here.allowed) >= 1
    assert 0 < here.free_bytes <= here.memory_bytes
    assert here.omp_threads == "1"


def test_more_threads_than_cores() -> None:
    assert not of_machines(FINE, FINE)
    (said,) = words(machine.judge([replace(FINE, threads=8)] * 4, cluster_of(4), False))
    assert said == "warning: a: 4 ranks compute with 32 threads in all, on 8 cores"
    (finding,) = machine.judge([replace(FINE, threads=8)] * 4, cluster_of(4), False)
    assert finding.advice == "set OMP_NUM_THREADS=2"


def test_a_container_may_have_fewer_cores_than_its_machine() -> None:
    assert of_machines(*[replace(FINE, quota=2.0)] * 4) == [
        "warning: a: 4 ranks share 2 of 8 cores"
    ]


def test_a_rank_that_is_bound_to_too_few_cores() -> None:
    bound = replace(FINE, threads=4, allowed=[3])
    assert of_machines(FINE, bound) == [
        "warning: a: its rank number 1 has 4 threads, but is bound to 1 of 8 cores"
    ]


def test_memory_that_does_not_suffice() -> None:
    assert not of_machines(FINE, FINE, needed=29 * GIB)
    assert of_machines(FINE, FINE, needed=31 * GIB) == [
        "wrong: a: weights and moments of its ranks take 67 GB, but 64 GB are free"
    ]


def test_limits_of_a_container() -> None:
    small = replace(FINE, shared_memory_bytes=64 * 2**20, open_files=256)
    assert of_machines(small, small) == [
        "wrong: ranks 0–1: a process may have 256 open files, but 2 ranks take about 272"
    ]
    assert any("/dev/shm has 67 MB" in said for said in of_machines(small, small, on_gpu=True))


def test_other_kernels_and_none() -> None:
    assert of_machines(FINE, replace(FINE, isa="")) == [
        "warning: rank 1: no native CPU kernels, so products are several times slower"
    ]
    (said,) = of_machines(FINE, replace(FINE, isa="avx2"))
    assert said.startswith("warning: ranks have kernels for different processors (avx2, avx512vnni")


def test_limits_of_a_cgroup(tmp_path: Path) -> None:
    assert machine._quota(tmp_path) is None
    total, _ = machine._memory(tmp_path)
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2**20}\n")
    (tmp_path / "memory.current").write_text(f"{2**18}\n")
    assert machine._quota(tmp_path) == 2.5
    assert machine._memory(tmp_path) == (2**20, 2**20 - 2**18)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine._quota(tmp_path) is None
    assert machine._memory(tmp_path)[0] == total


# GPUs. There is none here: only the words.

CARD = Gpu(
    installed=2,
    visible=2,
    cuda_of_torch="12.8",
    name="H100",
    total_bytes=80 * GIB,
    free_bytes=79 * GIB,
    nccl="2.27.3",
    driver="570.1",
    cuda_of_driver="12.8",
    ecc_errors=0,
    temperature_c=60.0,
    slowdowns=0x04,  # a power cap
)


def of_gpus(*gpus: Gpu) -> list[str]:
    return words(gpu.judge(gpus, cluster_of(len(gpus))))


def test_no_gpu_is_no_fault() -> None:
    here = Gpu.here(CPU, pytest.fail)
    assert here.name is None
    assert of_gpus(replace(here, installed=0)) == [
        "note: no GPU: devices, driver and NCCL are not checked"
    ]
    assert of_gpus(Gpu(8, 0, None)) == [
        "warning: rank 0: there are 8 NVIDIA GPUs, but torch is a build for CPUs"
    ]


def test_faults_of_a_gpu() -> None:
    assert not of_gpus(CARD, CARD)
    assert of_gpus(CARD) == ["warning: a: 1 of its 2 GPUs have no rank"]
    assert of_gpus(CARD, replace(CARD, ecc_errors=3)) == [
        "wrong: rank 1: 3 uncorrected memory errors since its driver was loaded"
    ]
    assert of_gpus(CARD, replace(CARD, slowdowns=0x44, temperature_c=91.0)) == [
        "warning: rank 1: its clocks are lowered (too hot, says the hardware) at 91 °C"
    ]
    assert of_gpus(CARD, replace(CARD, free_bytes=40 * GIB)) == [
        "warning: rank 1: others use 43 GB of its 86 GB"
    ]


def test_a_model_that_is_too_large_for_a_gpu() -> None:
    (said,) = words(gpu.judge([CARD, CARD], cluster_of(2), 100 * GIB))
    assert said == (
        "wrong: ranks 0–1: weights and moments take 107 GB of a GPU, but 85 GB are free"
    )


def test_drivers_and_nccl_that_do_not_fit() -> None:
    assert of_gpus(CARD, replace(CARD, nccl="2.21.5")) == [
        "wrong: rank 1: NCCL is 2.21.5, elsewhere 2.27.3"
    ]
    old = replace(CARD, driver="470.1", cuda_of_driver="11.4")
    assert of_gpus(old, old)[0] == (
        "wrong: rank 0: driver 470.1 runs CUDA 11.4 at most, torch is built for 12.8"
    )


# Interfaces.

ONE = Interfaces({"eth0": 1500}, ["eth0"], "eth0", {})
TWO = Interfaces({"eth0": 1500, "ib0": 4092}, ["eth0", "ib0"], "eth0", {})


def of_interfaces(*hosts: Interfaces, on_gpu: bool = False) -> list[str]:
    return words(interfaces.judge(hosts, cluster_of(*[1] * len(hosts)), on_gpu))


def test_several_interfaces_and_none_is_named() -> None:
    assert not of_interfaces(ONE, ONE)
    assert not of_interfaces(TWO)  # nothing leaves a single host
    assert of_interfaces(ONE, TWO) == [
        "warning: b: eth0, ib0 all lead somewhere, and nothing says which one ranks use"
    ]
    named = replace(TWO, named={"NCCL_SOCKET_IFNAME": "ib"})
    assert not of_interfaces(named, named, on_gpu=True)
    assert named.chosen(on_gpu=True) == "ib0"
    assert named.chosen(on_gpu=False) == "eth0"


def test_packets_of_other_sizes() -> None:
    assert of_interfaces(ONE, replace(ONE, mtu={"eth0": 9000}), ONE) == [
        "warning: b: packets have up to 9000 bytes (MTU), elsewhere 1500"
    ]


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth1", ["eth1"]),
        ("^docker,lo", ["eth0", "eth1", "ib0"]),
        ("^=eth0", ["lo", "eth1", "docker0", "ib0"]),
        ("wlan", []),
    ],
)
def test_how_nccl_reads_its_variable(wanted: str, taken: list[str]) -> None:
    assert nccl_choice(wanted, ["lo", "eth0", "eth1", "docker0", "ib0"]) == taken


def test_an_interface_that_is_missing_is_named_before_anything_starts() -> None:
    assert missing({}, on_gpu=False) is None
    assert missing({"GLOO_SOCKET_IFNAME": "lo"}, on_gpu=False) is None
    said = missing({"GLOO_SOCKET_IFNAME": "lo,eth77"}, on_gpu=False)
    assert said is not None
    assert said.startswith("GLOO_SOCKET_IFNAME: no interface is called 'eth77'; ")
    said = missing({"GLOO_SOCKET_IFNAME": "^docker"}, on_gpu=False)
    assert said is not None
    assert "takes whole names only" in said
    assert missing({"NCCL_SOCKET_IFNAME": "^docker"}, on_gpu=True) is None
    assert missing({"NCCL_SOCKET_IFNAME": "eth77"}, on_gpu=True) is not None


# Clocks.


def test_the_offset_of_a_clock() -> None:
    # Asked at 10 s, answered at 10.2 s; in the middle, the other clock was at 12.1 s.
    offset, uncertainty = clocks.estimate(10_000_000_000, 12_100_000_000, 10_200_000_000)
    assert offset == pytest.approx(2.0)
    assert uncertainty == pytest.approx(0.1)


def test_only_a_clock_that_is_certainly_off_is_named() -> None:
    found = [Clock(1, 5.0, 0.1), Clock(2, -1.5, 1.0)]
    assert words(clocks.judge(found, cluster_of(1, 1, 1))) == [
        "warning: b: its clock is 5 s ahead of that of a"
    ]
