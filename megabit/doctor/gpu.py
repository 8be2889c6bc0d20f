"""A rank's GPU, its driver, and NCCL; says so where there is none.

Read after the ranks have computed, so that a GPU that slows down under load shows it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megabit.doctor.finding import Finding
from megabit.doctor.places import Cluster
from megabit.doctor.software import differing
from megabit.telemetry import open_gpu_reader
from megabit.units import size_text

INSTALLED = Path("/proc/driver/nvidia/gpus")
"""Where the driver lists its GPUs."""
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "too hot, says the driver",
    0x40: "too hot, says the hardware",
    0x80: "power brake",
}
"""NVML's bits for why clocks are low; a power cap is normal and not among them."""
FREE_SHARE = 0.9
"""Of its memory, that a GPU has when nobody else uses it."""


@dataclass(frozen=True)
class Gpu:
    """What a rank has; of the fields behind ``installed`` all are None on a CPU."""

    installed: int
    """On this host, says the driver."""
    visible: int
    """To torch."""
    cuda_of_torch: str | None
    """That torch was built for; None: a CPU build."""
    name: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    nccl: str | None = None
    driver: str | None = None
    cuda_of_driver: str | None = None
    """The newest that the driver can run."""
    ecc_errors: int | None = None
    """Uncorrected ones since the driver was loaded."""
    temperature_c: float | None = None
    slowdowns: int | None = None
    """See ``SLOWDOWNS``."""

    @staticmethod
    def here(device: torch.device, warn: Callable[[str], None]) -> "Gpu":
        """Of this process; ``warn`` is told if NVML does not answer."""
        installed = len(list(INSTALLED.iterdir())) if INSTALLED.is_dir() else 0
        visible, cuda = torch.cuda.device_count(), torch.version.cuda
        if device.type != "cuda":
            return Gpu(installed, visible, cuda)
        free, total = torch.cuda.mem_get_info(device)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        properties = torch.cuda.get_device_properties(device)
        own = torch.cuda.memory_reserved(device)  # what this process has is free for the job
        gpu = (installed, visible, cuda, properties.name, total, free + own, nccl)
        reader = open_gpu_reader(device, warn)
        if reader is None:
            return Gpu(*gpu)
        read = reader.read()
        return Gpu(
            *gpu,
            *_driver(),
            ecc_errors=read.ecc_errors,
            temperature_c=read.temperature_c,
            slowdowns=_slowdowns(str(properties.uuid)),
        )


def judge(everyone: Sequence[Gpu], cluster: Cluster, needed_bytes: float = 0) -> Iterator[Finding]:
    """What is broken, does not fit, or differs.

    Args:
        needed_bytes: what a rank's weights and moments take, at least.
    """
    idle = [rank for rank, gpu in enumerate(everyone) if gpu.name is None and gpu.installed]
    if idle:
        build = everyone[idle[0]].cuda_of_torch
        yield Finding(
            "warning",
            "GPU",
            f"{cluster.names(idle)}: there are {everyone[idle[0]].installed} NVIDIA GPUs, but "
            + ("torch is a build for CPUs" if build is None else "the ranks compute on the CPU"),
            "install torch for CUDA" if build is None else "use run.device=cuda",
        )
    if all(gpu.name is None for gpu in everyone):
        if not idle:
            yield Finding("note", "GPU", "no GPU: devices, driver and NCCL are not checked")
        return
    for what, severity in (("name", "warning"), ("driver", "warning"), ("nccl", "wrong")):
        values = [str(getattr(gpu, what)) for gpu in everyone]
        label = {"name": "the GPU", "driver": "the driver", "nccl": "NCCL"}[what]
        for value, ranks, common in differing(values):
            yield Finding(
                "wrong" if severity == "wrong" else "warning",
                "GPU",
                f"{cluster.names(ranks)}: {label} is {value}, elsewhere {common}",
                "use hosts of the same kind with the same software",
            )
    for rank, gpu in enumerate(everyone):
        yield from _of_rank(cluster.name(rank), gpu)
    small = [r for r, gpu in enumerate(everyone) if needed_bytes > (gpu.free_bytes or math.inf)]
    if small:
        yield Finding(
            "wrong",
            "memory",
            f"{cluster.names(small)}: weights and moments take {size_text(needed_bytes)} of a GPU, "
            f"but {size_text(everyone[small[0]].free_bytes or 0)} are free",
            "use more ranks, tp or pp, or a smaller model",
        )
    for host in cluster.hosts:
        visible = everyone[host.ranks[0]].visible
        if visible > len(host.ranks):
            yield Finding(
                "warning",
                "GPU",
                f"{host.name}: {visible - len(host.ranks)} of its {visible} GPUs have no rank",
                f"start {visible} ranks there, unless that is meant",
            )


def _of_rank(name: str, gpu: Gpu) -> Iterator[Finding]:
    if (
        gpu.cuda_of_torch
        and gpu.cuda_of_driver
        and _major(gpu.cuda_of_torch) > _major(gpu.cuda_of_driver)
    ):
        yield Finding(
            "wrong",
            "driver",
            f"{name}: driver {gpu.driver} runs CUDA {gpu.cuda_of_driver} at most, torch is built "
            f"for {gpu.cuda_of_torch}",
            "update the driver, or install torch for that CUDA",
        )
    if gpu.ecc_errors:
        yield Finding(
            "wrong",
            "GPU",
            f"{name}: {gpu.ecc_errors} uncorrected memory errors since its driver was loaded",
            "take the GPU out, or reset it and test it before it is used again",
        )
    reasons = [text for bit, text in SLOWDOWNS.items() if (gpu.slowdowns or 0) & bit]
    if reasons:
        hot = "" if gpu.temperature_c is None else f" at {gpu.temperature_c:.0f} °C"
        yield Finding(
            "warning",
            "GPU",
            f"{name}: its clocks are lowered ({', '.join(reasons)}){hot}",
            "check its cooling and its power supply",
        )
    if gpu.total_bytes and gpu.free_bytes and gpu.free_bytes < FREE_SHARE * gpu.total_bytes:
        yield Finding(
            "warning",
            "GPU",
            f"{name}: others use {size_text(gpu.total_bytes - gpu.free_bytes)} of its "
            f"{size_text(gpu.total_bytes)}",
            "nvidia-smi shows by whom",
        )


def figures(everyone: Sequence[Gpu]) -> Iterator[tuple[str, str]]:
    """Of the first rank with a GPU."""
    gpu = next((gpu for gpu in everyone if gpu.name is not None), None)
    if gpu is not None:
        yield "GPU", f"{gpu.name}, {size_text(gpu.total_bytes or 0)}"
        yield "driver", f"{gpu.driver or 'not known'}, runs CUDA {gpu.cuda_of_driver or '?'}"
        yield "NCCL", f"{gpu.nccl}, torch for CUDA {gpu.cuda_of_torch}"


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _driver() -> tuple[str, str]:
    """Its version, and that of the CUDA it can run; NVML is initialised."""
    import pynvml  # type: ignore[import-untyped]

    version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    return _text(pynvml.nvmlSystemGetDriverVersion()), f"{version // 1000}.{version % 1000 // 10}"


def _slowdowns(uuid: str) -> int | None:
    import pynvml

    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    except pynvml.NVMLError:
        return None


def _text(value: Any) -> str:
    """Older releases of pynvml give bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
