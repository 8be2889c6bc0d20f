"""What a planner knows of a machine: how fast its devices compute, and its networks carry.

A device's *rates* are seconds for a unit of each term that ``compute`` counts, such as a
multiply-add of a ternary product or a byte of an elementwise pass. A *link* is α–β: seconds until
the first byte, and bytes a second. They are measured (``calibrate``), or datasheet figures times
stated efficiencies (``catalog``): ``is_measured`` says which. Both kinds are one JSON file.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from megabit.errors import UserError
from megabit.training.messages import Kind

SCHEMA = 1
"""Of the file."""

Term = Literal[
    "ternary product",
    "dense product",
    "input gradient product",
    "weight gradient product",
    "bfloat16 input gradient product",
    "bfloat16 weight gradient product",
    "int8 input gradient product",
    "int8 weight gradient product",
    "logits product",
    "logits gradient product",
    "attention",
    "attention gradient",
    "forward bytes",
    "input gradient bytes",
    "weight gradient bytes",
    "loss bytes",
    "loss gradient bytes",
    "embedding bytes",
    "embedding gradient bytes",
    "mapped bytes",
    "unpacked code",
    "layer forward",
    "layer input gradient",
    "layer weight gradient",
    "embedding",
    "head",
    "updated element",
    "made code",
    "update bytes",
    "tensor",
    "step",
]
"""What takes time. ``… product`` and ``attention`` are multiply-adds: those of a ternary layer's
forward pass (int8 × codes), of dense layers forward, of layers' gradients with operands in the
compute dtype, the same with ``precision.ternary_backward``, of the head forward and backward, and
of causal attention. ``… bytes`` are read and written by elementwise passes: of layers in F, B and
W, of head and loss (with exponentials), of the embedding, and around an update. *Mapped bytes* are
of tensors so large that a CPU's allocator asks the system for each of them. An *unpacked code* is
an element of a ternary weight that backward multiplies with; an *updated element* one that the
optimizer updates, a *made code* a ternary weight that layers get anew. ``layer …``, ``embedding``,
``head``, ``tensor`` (of a stage, in an update) and ``step`` are counts: what each takes however
small it is."""

TERMS: tuple[Term, ...] = get_args(Term)
NEEDED: tuple[Term, ...] = (
    "ternary product",
    "dense product",
    "input gradient product",
    "weight gradient product",
    "logits product",
    "attention",
    "attention gradient",
    "forward bytes",
    "input gradient bytes",
    "weight gradient bytes",
)
"""Without these a file says nothing of a device; others may be left out, and take no time."""

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Rates:
    """What a device does with one compute dtype while all of it is at work."""

    seconds: Mapping[Term, float]
    """For a unit of each term; a term that is not there takes none."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Of a fit: by what was fitted, the root of the mean squared relative residual."""

    @property
    def step_s(self) -> float:
        """What a step takes beside all that is counted."""
        return self.seconds.get("step", 0.0)

    def of(self, work: Mapping[Term, float]) -> float:
        """Seconds for so many units of each term."""
        return sum(units * self.seconds.get(term, 0.0) for term, units in work.items())


@dataclass(frozen=True)
class AlphaBeta:
    """A link, in the words of a ring: each of its steps takes α, and bytes pass at β."""

    alpha_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class GroupLink:
    """As measured: of one kind of message in groups of so many ranks, so many groups at a time."""

    kind: Kind
    ranks: int
    groups: int
    link: AlphaBeta
    error: float = 0.0
    """The largest relative difference between a measured time and the line."""


@dataclass(frozen=True)
class Network:
    """Between ranks."""

    intra: Mapping[Kind, AlphaBeta]
    """Inside a node."""
    inter: Mapping[Kind, AlphaBeta] = field(default_factory=dict)
    """Between nodes, for each rank that takes part; nothing where there is one node only."""
    measured: tuple[GroupLink, ...] = ()
    """Inside a node that ranks share the cores of: what ``intra`` is for those groups."""
    overlap: float = 0.0
    """Share of a DP collective that is hidden behind computing at no cost."""


@dataclass(frozen=True)
class Device:
    """What one rank computes on."""

    name: str
    memory_bytes: int
    """That a rank can use; of a CPU, the host's, which its ranks share."""
    base_bytes: int
    """What a process has before any model: libraries, context, communicators."""
    rates: Mapping[str, Rates]
    """By compute dtype."""
    peak_tflops: Mapping[str, float]
    """By compute dtype, that MFU is a share of."""
    is_shared: bool = False
    """Whether the ranks of a host share its cores and memory: a CPU."""
    cores: int | None = None
    """Of the host, of a CPU."""
    source: str = ""
    """Where the figures come from."""

    def rates_of(self, compute: str) -> Rates:
        """Of a compute dtype.

        Raises:
            UserError: none are known.
        """
        if compute not in self.rates:
            known = ", ".join(self.rates)
            raise UserError(f"precision.compute: {self.name} has no rates for {compute}; {known}")
        return self.rates[compute]


@dataclass(frozen=True)
class Machine:
    """Nodes of equal devices, and the networks in and between them."""

    device: Device
    network: Network
    nodes_of: int
    """Ranks on a node."""
    is_measured: bool
    """Whether its figures were measured; else what is made of them is a prediction."""
    source: str
    created: Mapping[str, str] = field(default_factory=dict)
    """When and with what it was measured: commit, date, versions."""

    def on_node(self, ranks: int) -> int:
        """How many of so many consecutive ranks share a node."""
        return min(ranks, self.nodes_of)

    def to_json(self) -> str:
        """The file."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    @staticmethod
    def from_json(text: str, name: str) -> "Machine":
        """Args:
            name: of the file, for problems.

        Raises:
            UserError: it is not such a file, or a figure has a wrong type or cannot be.
        """
        try:
            return _machine(_Reader(json.loads(text)))
        except (ValueError, KeyError) as error:
            reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{name}: {reason}; a file of `megabit plan --calibrate` is wanted"
            ) from None

    @staticmethod
    def read(path: Path) -> "Machine":
        """What ``to_json`` wrote.

        Raises:
            UserError: see ``from_json``, or it cannot be read.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: {error}; name a file of `megabit plan --calibrate`") from None
        return Machine.from_json(text, str(path))


class _Reader:
    """A JSON object that is asked for each of its keys once, by type; ``done`` finds the others."""

    def __init__(self, value: Any, place: str = "") -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{place or 'the file'} is no object")
        self._left, self._place = dict(value), place

    def _take(self, key: str) -> tuple[Any, str]:
        place = f"{self._place}.{key}" if self._place else key
        if key not in self._left:
            raise KeyError(place)
        return self._left.pop(key), place

    def number(self, key: str, least: float = 0.0, above: bool = False) -> float:
        value, place = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{place} is {value!r}, no number")
        if not math.isfinite(value) or value < least or (above and value == least):
            raise ValueError(f"{place} is {value}; {'above' if above else 'at least'} {least:g}")
        return float(value)

    def integer(self, key: str, least: int = 0) -> int:
        value, place = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{place} is {value!r}, no integer from {least} on")
        return value

    def optional_integer(self, key: str, least: int) -> int | None:
        if self._left.get(key) is None:
            self._take(key)
            return None
        return self.integer(key, least)

    def text(self, key: str) -> str:
        value, place = self._take(key)
        if not isinstance(value, str):
            raise ValueError(f"{place} is {value!r}, no text")
        return value

    def flag(self, key: str) -> bool:
        value, place = self._take(key)
        if not isinstance(value, bool):
            raise ValueError(f"{place} is {value!r}, not true or false")
        return value

    def object(self, key: str) -> "_Reader":
        return _Reader(*self._take(key))

    def objects(self, key: str) -> list["_Reader"]:
        value, place = self._take(key)
        if not isinstance(value, list):
            raise ValueError(f"{place} is no list")
        return [_Reader(each, f"{place}.{i}") for i, each in enumerate(value)]

    def names(self, known: tuple[str, ...] | None = None) -> list[str]:
        for key in self._left:
            if known is not None and key not in known:
                raise ValueError(f"{self._place}.{key} is unknown")
        return [*self._left]

    def done(self) -> None:
        if self._left:
            raise ValueError(
                f"{self._place + '.' if self._place else ''}{min(self._left)} is unknown"
            )


def _machine(file: _Reader) -> Machine:
    schema = file.integer("schema")
    if schema != SCHEMA:
        raise ValueError(f"schema is {schema}, and this release reads {SCHEMA}")
    created = file.object("created")
    machine = Machine(
        device=_device(file.object("device")),
        network=_network(file.object("network")),
        nodes_of=file.integer("nodes_of", 1),
        is_measured=file.flag("is_measured"),
        source=file.text("source"),
        created={key: created.text(key) for key in created.names()},
    )
    file.done()
    return machine


def _device(device: _Reader) -> Device:
    rates, peaks = device.object("rates"), device.object("peak_tflops")
    result = Device(
        name=device.text("name"),
        memory_bytes=device.integer("memory_bytes", 1),
        base_bytes=device.integer("base_bytes"),
        rates={dtype: _rates(rates.object(dtype)) for dtype in rates.names()},
        peak_tflops={dtype: peaks.number(dtype, above=True) for dtype in peaks.names()},
        is_shared=device.flag("is_shared"),
        cores=device.optional_integer("cores", 1),
        source=device.text("source"),
    )
    if result.is_shared and result.cores is None:
        raise ValueError("device.cores is null, and device.is_shared true")
    device.done()
    return result


def _rates(rates: _Reader) -> Rates:
    seconds, errors = rates.object("seconds"), rates.object("errors")
    result = Rates(
        {cast(Term, term): seconds.number(term) for term in seconds.names(TERMS)},
        {what: errors.number(what) for what in errors.names()},
    )
    rates.done()
    missing = [term for term in NEEDED if term not in result.seconds]
    if missing:
        raise KeyError(f"{missing[0]!r} of device.rates")
    return result


def _network(network: _Reader) -> Network:
    result = Network(
        intra=_links(network.object("intra")),
        inter=_links(network.object("inter")),
        measured=tuple(_group_link(each) for each in network.objects("measured")),
        overlap=network.number("overlap"),
    )
    if result.overlap > 1:
        raise ValueError(f"network.overlap is {result.overlap:g}; at most 1")
    network.done()
    return result


def _links(links: _Reader) -> dict[Kind, AlphaBeta]:
    return {cast(Kind, kind): _link(links.object(kind)) for kind in links.names(KINDS)}


def _link(link: _Reader) -> AlphaBeta:
    result = AlphaBeta(link.number("alpha_s"), link.number("bytes_per_s", above=True))
    link.done()
    return result


def _group_link(link: _Reader) -> GroupLink:
    name = link.text("kind")
    kind = next((kind for kind in KINDS if kind == name), None)
    if kind is None:
        raise ValueError(f"network.measured has the kind {name!r}; {', '.join(KINDS)}")
    result = GroupLink(
        kind,
        link.integer("ranks", 2),
        link.integer("groups", 1),
        _link(link.object("link")),
        link.number("error"),
    )
    link.done()
    return result
