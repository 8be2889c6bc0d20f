"""How far a function is that writes a whole model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor

Report = Callable[[str, float], None]
"""Told what is done next, and what share of all is done."""


class Loadable(Protocol):
    """A tensor to be written, of which the values are not there yet."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...

    @property
    def bytes(self) -> int: ...

    @property
    def load(self) -> Callable[[], Tensor]: ...


T = TypeVar("T", bound=Loadable)


def no_report(name: str, share: float) -> None:
    """Tells nobody."""


def reporting(tensors: Sequence[T], report: Report) -> list[T]:
    """``tensors`` that tell ``report`` when they are loaded, in whatever order."""
    total = max(1, sum(tensor.bytes for tensor in tensors))
    done = 0

    def observed(tensor: T) -> Callable[[], Tensor]:
        def load() -> Tensor:
            nonlocal done
            report(tensor.name, done / total)
            done += tensor.bytes
            return tensor.load()

        return load

    return [replace(tensor, load=observed(tensor)) for tensor in tensors]
