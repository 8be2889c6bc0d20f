"""Training runs in ranks of their own, and what they leave in their folders."""

import io
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from megabit.checkpoint import TensorReader
from megabit.config import Config
from megabit.data.corpus import CorpusInfo
from megabit.errors import UserError
from megabit.launch import run_ranks
from megabit.telemetry.metrics import read_metrics
from megabit.training import trainer
from tests.training.tiny import make_mesh, tiny

TIMES = {
    *("tokens_per_s", "tflops", "mfu", "step_s", "time_s", "bubble"),
    *("exposed_s", "exposed_share", "memory_mib"),
    *("data_share", "straggler_ratio", "straggler_rank"),
}


def config_of(corpus: CorpusInfo, folder: Path, *settings: str) -> Config:
    return tiny(f"data.dir={corpus.dir}", f"run.dir={folder}", *settings)


class AtStep(io.StringIO):
    """A console's file that sends the process a signal once a step is reported on it."""

    def __init__(self, step: int, number: signal.Signals) -> None:
        super().__init__()
        self.line = re.compile(rf"^step +{step}  loss", re.MULTILINE)
        self.number = number

    def write(self, text: str) -> int:
        if self.line.search(text):
            os.kill(os.getpid(), self.number)
        return super().write(text)


def train_here(config: Config, file: Callable[[], io.StringIO] = io.StringIO) -> tuple[bool, str]:
    """On the calling rank: whether the run finished, and what it said."""
    mesh = make_mesh(config)
    console = Console(file=file(), width=200, quiet=not mesh.is_main)
    finished = trainer.train(config, mesh, console)
    assert isinstance(console.file, io.StringIO)
    return finished, console.file.getvalue()


def train(
    config: Config, world_size: int, file: Callable[[], io.StringIO] = io.StringIO
) -> tuple[bool, str]:
    """``train_here`` on all ranks, as the main one sees it."""
    return run_ranks(lambda: train_here(config, file), world_size)[0]


def refused(config: Config, world_size: int) -> str:
    """The one line with which rank 0, and all others with it, refuses to start."""

    def run() -> list[str]:
        with pytest.raises(UserError) as caught:
            trainer.train(config, make_mesh(config), Console(quiet=True))
        return list(caught.value.problems)

    ranks = run_ranks(run, world_size)
    assert [len(problems) for problems in ranks] == [1] * world_size
    return ranks[0][0]  # the only rank that prints


def checkpoint(folder: Path, step: int) -> dict[str, Tensor]:
    """Masters and moments of a checkpoint, whole."""
    with TensorReader(folder / "checkpoints" / f"step_{step:08d}") as reader:
        return {name: reader.read(name) for name in reader.tensors}


def assert_same_tensors(tensors: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """Of two checkpoints, which hold masters and moments."""
    assert tensors.keys() == others.keys()
    assert any(name.startswith("exp_avg_sq/") for name in tensors)
    assert any(name.startswith("master/") for name in tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics without what a clock says, and of events only the guard's: alerts go by the
    clock, too, and what is saved when by who stops a run."""
    metrics = read_metrics(folder / "metrics.jsonl")
    kept = [row for row in metrics if row.get("event", {}).get("kind") in (None, "guard")]
    return [{key: row[key] for key in row.keys() - TIMES} for row in kept]
