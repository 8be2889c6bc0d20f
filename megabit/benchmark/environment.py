"""Where and with what something was measured: commit, machine, versions. No names, no paths."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import megabit
from megabit.benchmark.document import Document
from megabit_kernels.benchmark.machine import Machine

PACKAGES = ("torch", "triton", "transformers", "numpy")
COMPILERS = ("cc", "c++")
CARD_FACTS = {
    "driver_version": "driver",
    "clocks.sm": "clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
}
"""What NVIDIA's tool is asked for, and what we call it."""
_TIMEOUT_S = 20


def describe_place(device: torch.device, is_quick: bool = False) -> Document:
    """A document without parts; made before anything is measured, its load is that of others."""
    machine = machine_facts(device)
    commit, is_dirty = commit_of(Path(megabit.__file__).parent)
    return Document(
        commit,
        is_dirty,
        date=str(machine.pop("date")),
        machine=machine,
        versions=versions(),
        parts=(),
        is_quick=is_quick,
    )


def machine_facts(device: torch.device) -> dict[str, Any]:
    """``Machine`` of the kernels' benchmark as it is, and the host's memory; of a card the driver,
    too, and what it does at this moment."""
    facts = dict(vars(Machine.describe(device)))
    del facts["torch_version"], facts["python_version"]  # are among the versions
    facts["host_memory_bytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        facts["card_memory_bytes"] = torch.cuda.mem_get_info(device)[1]
        facts |= card_facts(device)
    return facts


def card_facts(device: torch.device) -> dict[str, str]:
    """Driver, clocks, temperature and power of a card by NVML; none where its tool is missing."""
    asked = ["nvidia-smi", f"--query-gpu={','.join(CARD_FACTS)}", "--format=csv,noheader,nounits"]
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    said = _said(asked if uuid is None else [*asked, f"--id=GPU-{str(uuid).removeprefix('GPU-')}"])
    values = said.splitlines()[0].split(", ") if said.strip() else []
    return dict(zip(CARD_FACTS.values(), values, strict=False))


def card_state(device: torch.device) -> str:
    """What a card does now, in words; empty on a CPU, and where the tool is missing."""
    facts = card_facts(device) if device.type == "cuda" else {}
    if not facts:
        return ""
    return (
        f"{facts['clock_mhz']} MHz, memory {facts['memory_clock_mhz']} MHz, "
        f"{facts['temperature_c']} °C, {facts['power_w']} of {facts['power_limit_w']} W"
    )


def versions() -> dict[str, str]:
    """Of Python, megabit, the packages that take part, and the compilers."""
    found = {
        "python": platform.python_version(),
        "megabit": megabit.__version__,
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda is not None and torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
    for name in COMPILERS:
        if line := _said([name, "--version"]).partition("\n")[0]:
            found[name] = line
    return found


def commit_of(folder: Path) -> tuple[str, bool]:
    """The commit that ``folder`` is checked out from, and whether tracked files differ from it;
    an empty one where it is no checkout."""
    git = ["git", "-C", str(folder)]
    if not _said([*git, "ls-files", "__init__.py"]):  # or it lies in a checkout of something else
        return "", False
    commit = _said([*git, "rev-parse", "HEAD"]).strip()
    changed = _said([*git, "status", "--porcelain", "--untracked-files=no"])
    return commit, bool(changed.strip())


def _said(command: Sequence[str]) -> str:
    """Standard output of a command; empty if it cannot be run or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
