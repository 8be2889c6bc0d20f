"""How a model scales, on paper: the fastest layout on ever more GPUs, and a picture of them.

    configuration, GPUs → search → Point ┐
                                         ├─ JSON ─→ picture
    the same with dense layers  → Point ┘

The batch is the recipe's at its largest, whatever the number of GPUs (strong scaling), without its
ramp. Beside each ternary model there is the dense one of the same width in bf16, as a distributed
optimizer trains it: Megatron-LM's recipe, with bf16 gradients and weights on the wire and fp32
masters in parts. All of it is a prediction (``plan.catalog``).
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megabit.config import Config
from megabit.errors import UserError
from megabit.files import read_text, replacing, write_text
from megabit.plan.machine import Machine
from megabit.plan.search import USABLE_MEMORY, Found, Search
from megabit.plan.step import tokens_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCHEMA = 1
"""Of the file."""
Kind = Literal["ternary", "dense"]
KINDS: tuple[Kind, ...] = ("ternary", "dense")
COLORS = ("#5b93d6", "#f0914a", "#63b26a", "#9467bd")
"""Of models."""
STYLES: Mapping[Kind, tuple[str, str]] = {"ternary": ("-", "o"), "dense": ("--", "s")}


@dataclass(frozen=True)
class Point:
    """The fastest layout of a model on so many GPUs, or why there is none."""

    model: str
    """What the picture calls it."""
    kind: Kind
    gpus: int
    layout: str = ""
    """``TP 2 × PP 4 × DP 8``."""
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    """Of all GPUs; 0 where there is no layout."""
    mfu: float | None = None
    memory_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """By part, of the rank that needs most."""
    gpu_days: float = 0.0
    """For the tokens of the recipe."""
    reason: str = ""
    """Why there is no layout."""


@dataclass(frozen=True)
class Scaling:
    """All points of a picture, and what they were predicted of."""

    machine: Mapping[str, Any]
    """As ``Machine.to_json``."""
    models: Mapping[str, Mapping[str, Any]]
    """By name: tokens of a run, and of a step."""
    points: Sequence[Point]

    def of(self, model: str, kind: Kind) -> list[Point]:
        """Fewest GPUs first."""
        own = (p for p in self.points if (p.model, p.kind) == (model, kind))
        return sorted(own, key=lambda point: point.gpus)

    def to_json(self) -> str:
        """The file."""
        points = [dataclasses.asdict(point) for point in self.points]
        document = {
            "schema": SCHEMA,
            "what": "predictions of megabit plan; nothing of this was measured on such a machine",
            "machine": self.machine,
            "models": self.models,
            "points": points,
        }
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"

    @staticmethod
    def read(path: Path) -> "Scaling":
        """What ``to_json`` wrote.

        Raises:
            UserError: it cannot be read, or is something else.
        """
        try:
            document = json.loads(read_text(path))
            if document["schema"] != SCHEMA:
                raise ValueError(f"schema is {document['schema']}, not {SCHEMA}")
            points = [Point(**point) for point in document["points"]]
            return Scaling(document["machine"], document["models"], points)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: is no file of scaling ({error})") from error


def scaled(
    configs: Mapping[str, Config],
    gpus: Sequence[int],
    machine: Machine,
    done: Sequence[Point] = (),
) -> Iterator[Scaling]:
    """Search for all points: a document after each of them.

    Args:
        configs: recipes of ternary models, by the name of the model.
        done: points that are there already.
    """
    models = {
        name: {
            "tokens": tokens_of(config),
            "batch_tokens": config.train.global_batch_size * config.data.seq_length,
        }
        for name, config in configs.items()
    }
    points = [*done]
    known = {(point.model, point.kind, point.gpus) for point in points}
    wanted = [(n, kind, name) for n in gpus for name in configs for kind in KINDS]
    for count, kind, name in wanted:
        if (name, kind, count) not in known:
            points.append(find_point(name, configs[name], kind, count, machine))
            yield Scaling(json.loads(machine.to_json()), models, [*points])


def find_point(name: str, config: Config, kind: Kind, gpus: int, machine: Machine) -> Point:
    """The fastest layout of ``config``, as it is or with dense layers, on so many GPUs."""
    config = without_ramp(config)
    keep: frozenset[str] = frozenset()
    if kind == "dense":
        config, keep = as_dense(config), frozenset({"optim.zero_stage"})
    found = Search(config, gpus, machine, keep, top=1).run()
    if not found.candidates:
        return Point(name, kind, gpus, reason=_reason(found))
    best = found.candidates[0]
    step = best.step
    days = step.days(tokens_of(config))
    return Point(
        name,
        kind,
        gpus,
        best.name,
        best.choices,
        step.total_s,
        step.tokens_per_s,
        step.mfu,
        best.memory,
        days * gpus,
    )


def without_ramp(config: Config) -> Config:
    """With the last batch size from the first step on, and gradients that travel in bf16."""
    train = dataclasses.replace(
        config.train, batch_ramp_start=None, batch_ramp_increment=0, batch_ramp_tokens=0
    )
    precision = dataclasses.replace(config.precision, gradients="bfloat16")
    return dataclasses.replace(config, train=train, precision=precision)


def as_dense(config: Config) -> Config:
    """The model that has dense layers where ``config`` has ternary ones, without the norms that
    only those need, and a distributed optimizer."""
    model = dataclasses.replace(config.model, linear="dense", norm_placement="prenorm")
    optim = dataclasses.replace(config.optim, zero_stage=1)
    return dataclasses.replace(config, model=model, optim=optim)


def _reason(found: Found) -> str:
    """Why nothing was found, in a line."""
    if found.too_large:
        nearest = found.too_large[0]
        parallel = nearest.layout.config.parallel
        return (
            f"needs too much memory: the nearest, TP {parallel.tp} × PP {parallel.pp} × "
            f"DP {nearest.layout.dp}, {nearest.missing:.2f} times what a GPU has"
        )
    key, _ = found.impossible.most_common(1)[0]
    return found.examples[key]


def write_scaling(path: Path, scaling: Scaling) -> None:
    """Write the file; ``Scaling.read`` reads it."""
    write_text(path, scaling.to_json())


def draw_scaling(scaling: Scaling, path: Path) -> None:
    """Write a PNG of four panels: tokens a second, MFU, memory and GPU-days by GPUs. A line for
    each model and kind, with gaps where there is no layout; below, why."""
    # Not at import time: matplotlib takes a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9.2), layout="constrained")
    FigureCanvasAgg(figure)
    (speed, mfu), (memory, days) = figure.subplots(2, 2)
    for model, color in zip(scaling.models, COLORS, strict=False):
        for kind in KINDS:
            points = [p for p in scaling.of(model, kind) if p.tokens_per_s]
            if points:
                _draw_lines(points, color, (speed, mfu, memory, days))
        _draw_proportional(speed, scaling.of(model, "ternary"), color)
    limit = USABLE_MEMORY * scaling.machine["device"]["memory_bytes"] / 1e9
    memory.axhline(limit, color="gray", linewidth=1, linestyle=":")
    place = memory.get_yaxis_transform()
    memory.text(0.01, limit, "usable", color="gray", fontsize=8, va="bottom", transform=place)
    speed.set_yscale("log")
    days.set_yscale("log")
    gpus = sorted({point.gpus for point in scaling.points})
    for axes, title in (
        (speed, "tokens a second (dotted: in proportion to GPUs)"),
        (mfu, "MFU, % of the bf16 peak"),
        (memory, "memory of the fullest GPU, GB"),
        (days, "GPU-days for all tokens of the recipe"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_xticks(gpus, [f"{count:,}" for count in gpus], rotation=30)
        axes.minorticks_off()
        axes.set_xlabel("GPUs")
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=None if axes in (speed, days) else 0)
    if speed.get_lines():
        speed.legend(fontsize=8, loc="upper left")
    figure.suptitle(
        f"Predicted, not measured: the fastest layout on {scaling.machine['device']['name']}, "
        f"{scaling.machine['nodes_of']} a node, at the recipe's batch",
        fontsize=11,
    )
    figure.supxlabel("\n".join(gaps(scaling)), fontsize=8, ha="left", x=0.01)
    with replacing(path) as draft:
        figure.savefig(draft, format="png", dpi=120)


def gaps(scaling: Scaling) -> Iterator[str]:
    """Where a model has no layout, and why, a line for each model and kind."""
    for model in scaling.models:
        for kind in KINDS:
            missing = [point for point in scaling.of(model, kind) if not point.tokens_per_s]
            if missing:
                counts = ", ".join(f"{point.gpus:,}" for point in missing)
                yield f"{model} {kind}, no layout on {counts} GPUs: {missing[-1].reason}"


def _draw_lines(points: Sequence[Point], color: str, panels: Sequence["Axes"]) -> None:
    """Of a model and kind."""
    style, marker = STYLES[points[0].kind]
    gpus = [point.gpus for point in points]
    speed, mfu, memory, days = panels
    for axes, values in (
        (speed, [point.tokens_per_s for point in points]),
        (mfu, [100 * (point.mfu or 0.0) for point in points]),
        (memory, [sum(point.memory_bytes.values()) / 1e9 for point in points]),
        (days, [point.gpu_days for point in points]),
    ):
        axes.plot(
            gpus,
            values,
            color=color,
            linestyle=style,
            marker=marker,
            markersize=4,
            linewidth=1.5,
            markerfacecolor=color if points[0].kind == "ternary" else "white",
            label=f"{points[0].model} {_words(points[0].kind)}",
        )


def _draw_proportional(axes: "Axes", points: Sequence[Point], color: str) -> None:
    """As fast for each GPU as the first point."""
    there = [point for point in points if point.tokens_per_s]
    if there:
        each = there[0].tokens_per_s / there[0].gpus
        gpus = [there[0].gpus, there[-1].gpus]
        axes.plot(gpus, [each * n for n in gpus], color=color, linewidth=0.8, linestyle=":")


def _words(kind: Kind) -> str:
    return "ternary" if kind == "ternary" else "dense bf16"
