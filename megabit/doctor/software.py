"""Whether all ranks run the same: releases, and settings."""

import platform
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

import megabit
from megabit.doctor.finding import Finding, Severity
from megabit.doctor.places import Cluster

REINSTALL = "install the same release everywhere, or use one environment on shared storage"
RELEASES: Mapping[str, tuple[Severity, str]] = {
    "megabit": ("wrong", REINSTALL),
    "torch": ("wrong", REINSTALL),
    "python": ("warning", REINSTALL),
}


@dataclass(frozen=True)
class Software:
    """What one rank runs."""

    megabit: str
    torch: str
    python: str
    settings: dict[str, str]
    """By key, the command's options too."""

    @staticmethod
    def here(settings: Mapping[str, str]) -> "Software":
        """Of this process."""
        return Software(
            megabit.__version__, torch.__version__, platform.python_version(), dict(settings)
        )


def judge(everyone: Sequence[Software], cluster: Cluster) -> Iterator[Finding]:
    """What differs between ranks, and on which."""
    for name, (severity, advice) in RELEASES.items():
        values = [getattr(software, name) for software in everyone]
        for value, ranks, common in differing(values):
            what = f"{cluster.names(ranks)}: {name} is {value}, elsewhere {common}"
            yield Finding(severity, "software", what, advice)
    keys = dict.fromkeys(key for software in everyone for key in software.settings)
    for key in keys:
        values = [software.settings.get(key, "absent") for software in everyone]
        for value, ranks, common in differing(values):
            yield Finding(
                "wrong",
                "settings",
                f"{cluster.names(ranks)}: {key} is {value}, elsewhere {common}",
                "start all ranks with the same files and arguments",
            )


def differing(values: Sequence[str]) -> list[tuple[str, list[int], str]]:
    """(value, ranks that have it, the value that most have) for all values that fewer have.

    Of two that equally many have, that of the lower rank counts as the common one.
    """
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    common = max(ranks, key=lambda value: len(ranks[value]))
    return [(value, found, common) for value, found in ranks.items() if value != common]
