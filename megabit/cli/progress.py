"""How far a command is that reads or writes a whole model: a bar, on a terminal only."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from megabit.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megabit.checkpoint.source import Index, ModelSource

Advance = Callable[[str, float], None]
"""Told what comes next, and how much is done with what came before."""


@contextmanager
def bar(total: float) -> Iterator[Advance]:
    """A bar on stderr, which is gone at the end of the block; nothing if that is a file."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    is_shown = sys.stderr.isatty()
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not is_shown
    ) as progress:
        task = progress.add_task("", total=total)

        def advance(name: str, done: float) -> None:
            progress.update(task, description=name, advance=done)

        yield advance


@contextmanager
def watched(source: "ModelSource") -> Iterator["ModelSource"]:
    """``source``, with a bar that shows how much of it has been read."""
    from megabit.checkpoint.source import logical_tensors

    sizes = {name: prod(tensor.shape) for name, tensor in logical_tensors(source.model).items()}
    with bar(sum(sizes.values())) as advance:
        yield _Watched(source, sizes, advance)


@dataclass(frozen=True)
class _Watched:
    """A ``ModelSource`` that tells when a tensor of it is first read.

    A scale that is taken of masters is half of a tensor's work.
    """

    source: "ModelSource"
    sizes: Mapping[str, int]
    advance: Advance
    told: dict[str, float] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def model(self) -> ModelConfig:
        return self.source.model

    @property
    def max_length(self) -> int:
        return self.source.max_length

    @property
    def has_masters(self) -> bool:
        return self.source.has_masters

    @property
    def assets(self) -> Mapping[str, Path]:
        return self.source.assets

    def values(self, name: str, index: "Index | None" = None) -> "Tensor":
        self._tell(name, 1.0)
        return self.source.values(name, index)

    def codes(self, name: str, index: "Index | None" = None) -> "Tensor":
        self._tell(name, 1.0)
        return self.source.codes(name, index)

    def scale(self, name: str) -> "Tensor":
        if self.has_masters:
            self._tell(name, 0.5)
        return self.source.scale(name)

    def _tell(self, name: str, share: float) -> None:
        before = self.told.get(name, 0.0)
        if share > before:
            self.told[name] = share
            self.advance(name, (share - before) * self.sizes[name])
