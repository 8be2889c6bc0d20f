"""What a rank says about itself when it connects to the owner of the outer weights.

Which run it belongs to (the settings that must agree), who it is, which parts of the model it
brings to a meeting and which it takes home, and where its island stands. It comes from a network:
every field is checked, against the model's own names and shapes, before anything is made of it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megabit.config import Config, leaves
from megabit.outer.frames import Frame, FrameError, shown

MAX_RANKS = 1 << 16
MAX_ROUND = 2**31
_AGREED = (
    "train.seed",
    "train.global_batch_size",
    "data.seq_length",
    "loss.objective",
    "outer.islands",
    "outer.inner_steps",
    "outer.lr",
    "outer.momentum",
    "outer.staleness",
)
"""Beside all that begins with ``model.``."""

Settings = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
"""Of the model's logical tensors, by name."""


def agreed_settings(config: Config) -> dict[str, Any]:
    """The settings that islands and owner must have in common, by key; plain values, which are the
    same after a way through JSON."""
    tree = dict(leaves(dataclasses.asdict(config)))
    return {key: tree[key] for key in tree if key.startswith("model.") or key in _AGREED}


def disagreement(theirs: Mapping[str, Any], own: Settings) -> str | None:
    """The first setting that is not the same, in words."""
    for key in own:
        if theirs.get(key) != own[key]:
            return f"{key} is {shown(str(theirs.get(key)))} there and {own[key]!r} here"
    return None


@dataclass(frozen=True)
class Region:
    """A block of a logical tensor."""

    name: str
    spans: tuple[tuple[int, int], ...]
    """Begin and end, of each dimension."""

    @staticmethod
    def of(name: str, index: Sequence[slice]) -> "Region":
        return Region(name, tuple((part.start, part.stop) for part in index))

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.spans)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.spans)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Hello:
    """A rank of an island."""

    settings: Settings
    island: int
    rank: int
    ranks: int
    """Of the island."""
    token: str
    """Of this try of the island to connect: its ranks have the same, and no other try has."""
    gives: tuple[Region, ...]
    """What it brings: over the ranks of an island, every element once. In this order its values
    are sent."""
    takes: tuple[Region, ...]
    """What it is to have after a meeting, in the order that it gets it in."""
    round: int
    """Which the island is in."""
    base: int
    """Rounds that were closed in the weights that the round began with."""
    base_id: str
    """Which weights these were (``Anchor.id``); empty if it does not know."""
    is_fresh: bool
    """Whether it has its initial weights, which all islands of a run have in common."""

    def fields(self) -> dict[str, Any]:
        """For the header of a frame."""
        own = dict(vars(self))
        for name in ("gives", "takes"):
            own[name] = [[region.name, *region.spans] for region in own[name]]
        return own

    @staticmethod
    def parse(frame: Frame, own: Settings, shapes: Shapes) -> "Hello":
        """What a frame says.

        Args:
            own: settings of the owner, which must be the same.

        Raises:
            FrameError: it is no such frame, has other settings, or names what the model has not.
        """
        settings = frame.expect("hello").fields.get("settings")
        if not isinstance(settings, dict) or frame.value_bytes:
            raise FrameError("hello: must have settings, and no values")
        problem = disagreement(settings, own)
        if problem is not None:
            raise FrameError(f"settings: {problem}; all islands and the owner need the same")
        ranks = frame.integer("ranks", 1, MAX_RANKS)
        return Hello(
            settings=settings,
            island=frame.integer("island", 0, own["outer.islands"] - 1),
            rank=frame.integer("rank", 0, ranks - 1),
            ranks=ranks,
            token=frame.text("token", 64),
            gives=_regions(frame, "gives", shapes),
            takes=_regions(frame, "takes", shapes),
            round=frame.integer("round", 0, MAX_ROUND),
            base=frame.integer("base", 0, MAX_ROUND),
            base_id=frame.text("base_id", 64),
            is_fresh=frame.flag("is_fresh"),
        )


def _regions(frame: Frame, field: str, shapes: Shapes) -> tuple[Region, ...]:
    listed = frame.fields.get(field)
    if not isinstance(listed, list):
        raise FrameError(f"hello: {field} must be a list")
    return tuple(_region(entry, field, shapes) for entry in listed)


def _region(entry: object, field: str, shapes: Shapes) -> Region:
    match entry:
        case [str(name), *spans] if name in shapes:
            shape = shapes[name]
        case [str(name), *_]:
            raise FrameError(f"hello: {field} has {shown(name)}, which the model has not")
        case _:
            raise FrameError(f"hello: {field} must be names and spans")
    checked = []
    for span in spans:
        match span:
            case [int(start), int(stop)] if type(start) is type(stop) is int:
                checked.append((start, stop))
            case _:
                raise FrameError(f"hello: {field} must be names and spans")
    if len(checked) != len(shape) or any(
        not 0 <= start < stop <= size for (start, stop), size in zip(checked, shape, strict=True)
    ):
        raise FrameError(f"hello: {field} has a part of {name} that is outside of {list(shape)}")
    return Region(name, tuple(checked))


def tiling_problem(regions: Sequence[Region], shapes: Shapes) -> str | None:
    """Why ``regions``, each of them inside, are not every element of the model once; None if they
    are."""
    by_name: dict[str, list[Region]] = {name: [] for name in shapes}
    for region in regions:
        by_name[region.name].append(region)
    for name, parts in by_name.items():
        if sum(part.numel for part in parts) != math.prod(shapes[name]):
            return f"does not bring every element of {name} once"
        seen = torch.zeros(shapes[name], dtype=torch.bool)
        for part in parts:
            if seen[part.index].any():
                return f"brings a part of {name} twice"
            seen[part.index] = True
    return None
