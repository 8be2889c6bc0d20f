"""What the measurements were taken on: the facts that a reader of a result asks for first."""

import os
import platform
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from megabit_kernels import native

CPUS = Path("/sys/devices/system/cpu")
ASSUMED_CACHE = 32 * 2**20
"""Bytes of the last-level cache where the system does not tell."""


@dataclass(frozen=True)
class Machine:
    """The device that computes, and the software that it runs."""

    device: str
    """``cpu`` or ``cuda``"""
    name: str
    isa: str
    """Instruction set of the native kernels, or the compute capability of a card"""
    cores: int
    cache_bytes: int
    """Last-level cache of a CPU, L2 of a card"""
    memory_bytes: int
    """That are free; half of all where the system doesn't tell"""
    huge_pages: str
    """Transparent huge pages: ``always``, ``madvise``, ``never``, or empty where there are none"""
    load: float
    """Runnable processes over the last minute: what else used the machine"""
    torch_version: str
    python_version: str
    system: str
    date: str
    """UTC, ISO 8601"""

    @staticmethod
    def describe(device: torch.device) -> "Machine":
        """This machine, as ``device`` sees it."""
        on_card = device.type == "cuda"
        return Machine(
            device=device.type,
            name=torch.cuda.get_device_name(device) if on_card else _cpu_name(),
            isa=_card_isa(device) if on_card else _cpu_isa(),
            cores=os.cpu_count() or 1,
            cache_bytes=_l2_bytes(device) if on_card else last_level_cache_bytes(),
            memory_bytes=torch.cuda.mem_get_info(device)[0] if on_card else _free_memory(),
            huge_pages=_huge_pages(),
            load=round(os.getloadavg()[0], 2),
            torch_version=torch.__version__,
            python_version=platform.python_version(),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def __str__(self) -> str:
        computes = "" if self.device == "cuda" else f", {counted(self.cores, 'core')}"
        return f"{self.name} ({self.isa}{computes}), torch {self.torch_version}"

    def with_threads(self, count: int) -> str:
        """``, 2 threads``; nothing on a card."""
        return "" if self.device == "cuda" else f", {counted(count, 'thread')}"


def counted(number: int, noun: str) -> str:
    """``1 core``, ``2 cores``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def last_level_cache_bytes(cpus: Path = CPUS) -> int:
    """All last-level caches together: groups of cores may have one each."""
    sizes: dict[tuple[int, str], int] = {}
    for cache in cpus.glob("cpu[0-9]*/cache/index[0-9]*"):
        level, cores, size = (_text(cache / name) for name in ("level", "shared_cpu_list", "size"))
        if level and size.endswith("K"):
            sizes[int(level), cores] = 1024 * int(size[:-1])
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last) or ASSUMED_CACHE


def _cpu_name() -> str:
    name = re.search(r"^model name\s*: (.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return name[1] if name else platform.processor() or platform.machine()


def _cpu_isa() -> str:
    return native.isas()[0] if native.isas() else torch.backends.cpu.get_cpu_capability()


def _free_memory() -> int:
    kibibytes = re.search(r"^MemAvailable: +(\d+) kB$", _text(Path("/proc/meminfo")), re.MULTILINE)
    if kibibytes:
        return 1024 * int(kibibytes[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _huge_pages() -> str:
    chosen = re.search(r"\[(\w+)\]", _text(Path("/sys/kernel/mm/transparent_hugepage/enabled")))
    return chosen[1] if chosen else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _card_isa(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _l2_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)
