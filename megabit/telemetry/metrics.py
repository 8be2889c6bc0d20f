"""The numbers of a run: a row for each log interval, each evaluation and each event.

A row is what ``metrics.jsonl`` has on a line, and what every other sink gets:

- a log interval: the fields of ``IntervalMetrics``;
- an evaluation: those of ``EvaluationMetrics``;
- an event: ``{"step": …, "event": {"kind": …, "name": …, "action": …, "evidence": …, "text": …}}``.

None is a number that there is none of (MFU without a known peak); a field of a GPU is absent where
there is no GPU. In the file, None and what is not finite are ``null``.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from megabit.telemetry.gpu import GpuMetrics

Row = dict[str, Any]

AXES = ("tp", "pp", "dp", "dp_inter", "outer", "world")
"""What is sent and waited for is counted by these. ``dp_inter``: between hosts, where gradients are
reduced inside a host first; ``outer``: between islands."""
PHASES = ("data", "forward_backward", "gradients", "update", "other")
"""Of a step, in order. ``gradients``: complete, reduced and measured; ``update``: with what
publishes the new weights."""


@dataclass(frozen=True)
class LayerMetrics:
    """What the probed step did to one ternary layer, or to all; None where it was not counted."""

    zero_fraction: float | None = None
    """Share of the codes that are 0 after it."""
    code_flips: float | None = None
    """Share of the codes that it changed; about 5e-4 in BitNet (arXiv 2412.04787)."""
    threshold_distance: float | None = None
    """Mean of | |w|/γ − 1/2 |: how far master weights are from where rounding changes."""
    saturation: float | None = None
    """Share of the int8 activations at ±127; the largest of each token always is."""


@dataclass(frozen=True)
class IntervalMetrics:
    """Means over the steps of one log interval, over all ranks; of the loss and its gradient, over
    the steps that were not skipped (not a number if all were). The same on every rank."""

    step: int
    """Steps done."""
    consumed_tokens: int
    """Tokens that all steps so far have taken."""
    loss: float
    """Cross-entropy of all target tokens in nats, before each update."""
    objective: float
    """What was minimised, a mean over target tokens."""
    bits_per_byte: float
    """Not a number for embeddings."""
    grad_norm: float
    """Before clipping."""
    grad_norm_std: float
    """Its standard deviation over the steps; 0 if there was one."""
    grad_norm_spread: float | None
    """Standard deviation over DP ranks of the norm before they reduce it, as a share of its mean,
    in the probed step."""
    skipped: int
    """Steps that changed no weight."""
    lr: float
    weight_decay: float
    quantization_share: float
    """λ"""
    batch_size: int
    """Samples, over all ranks. This and the four before: of the last step."""
    loss_scale: float
    tokens_per_s: float
    """Target tokens, over all ranks."""
    tflops: float
    """Of one rank; see ``utilization``."""
    mfu: float | None
    step_s: float
    time_s: dict[str, float]
    """The same by phase (``PHASES``), a mean over ranks. Phases are timed on the host, which does
    not wait for a GPU before ``gradients`` are measured."""
    exposed_s: dict[str, float]
    """Seconds of a step in which the rank that waits longest is blocked, by axis."""
    exposed_share: float
    """Share of the step in which the rank that waits longest is blocked in collectives: over all
    axes but pp, since what it waits for there is the bubble. Slower ranks are waited for, too."""
    data_share: float
    """Share of the step in which the rank that waits longest for its batch does."""
    straggler_ratio: float | None
    """How much longer than its peers the slowest rank is busy: its step without what it waits for
    other ranks, but with what it waits for its data, over the median of that of the other ranks of
    its stage. None where no rank has peers. Of a GPU only what the host does beside it is seen."""
    straggler_rank: int | None
    """That rank, of the world."""
    sent_mb: dict[str, float]
    """MB that all ranks together send in a step, by axis (ring volume)."""
    sent_by_purpose_mb: dict[str, float]
    """The same, by axis and purpose (``reduce.Purpose``)."""
    bubble: float
    """Time in which ranks are idle in the pipeline's schedule, as long as the slowest of them runs
    it, for each unit of time in which they compute: (p−1)/m with 1F1B and equal stages."""
    memory_mib: float
    """Peak so far of the rank that had most."""
    zero_fraction: float
    """Share of the codes that are 0; 0 for a dense model, not a number where nothing was probed and
    the model is not ternary yet."""
    code_flips: float | None = None
    """This and the next two: of the probed step, over all layers, as in ``LayerMetrics``."""
    threshold_distance: float | None = None
    saturation: float | None = None
    gpu: GpuMetrics = field(default_factory=GpuMetrics)
    """Worst of all ranks; in a row each by itself, as ``gpu_power_w``."""
    layers: dict[str, LayerMetrics] | None = None
    """Each ternary layer, if ``telemetry.per_layer``."""

    def row(self) -> Row:
        """For sinks and alerts."""
        row = asdict(self)
        gpu, layers = row.pop("gpu"), row.pop("layers")
        row |= {f"gpu_{key}": value for key, value in gpu.items() if value is not None}
        return row if layers is None else row | {"layers": layers}

    def line(self, expected_mb: Mapping[str, float] | None = None) -> str:
        """For the console; ``expected_mb`` is what should have been sent, by axis."""
        expected = {} if expected_mb is None else expected_mb
        sent = " ".join(
            f"{axis} {mb:.1f}" + ("" if expected_mb is None else f"/{expected.get(axis, 0):.1f}")
            for axis, mb in self.sent_mb.items()
            if mb or expected.get(axis)
        )
        traffic = f"  MB {sent}" if sent else ""
        share = "" if self.quantization_share == 1 else f"  λ {self.quantization_share:.2f}"
        flips = "" if self.code_flips is None else f"  flips {self.code_flips:.3%}"
        mfu = "" if self.mfu is None else f"  MFU {self.mfu:.1%}"
        bits = "" if math.isnan(self.bits_per_byte) else f"bits/byte {self.bits_per_byte:.4f}  "
        return (
            f"step {self.step:>6}  loss {self.loss:.4f}  {bits}"
            f"norm {self.grad_norm:.3f}  lr {self.lr:.2e}  {self.tokens_per_s:,.0f} tok/s  "
            f"zeros {self.zero_fraction:.1%}{share}{flips}{traffic}  "
            f"bubble {self.bubble:.0%}{mfu}"
        )


class Score(Protocol):
    """A mean over the predicted tokens of a text."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        ...

    @property
    def bits_per_byte(self) -> float: ...


@dataclass(frozen=True)
class EvaluationMetrics:
    """After ``step`` steps, on held-out text and on other texts by name."""

    step: int
    held_out_loss: float
    held_out_bits_per_byte: float | None
    """None for embeddings."""
    validation: Mapping[str, Score] = field(default_factory=dict)
    held_out_tokens: int | None = None
    """That were predicted; of embeddings, pairs."""
    held_out_recall_at_1: float | None = None
    """Of embeddings: how often an anchor's nearest passage is its own."""

    def row(self) -> Row:
        """For sinks; without what there is none of."""
        row: Row = {"step": self.step, "held_out_loss": self.held_out_loss}
        if self.held_out_tokens is not None:
            row["held_out_tokens"] = self.held_out_tokens
        if self.held_out_recall_at_1 is not None:
            row["held_out_recall_at_1"] = self.held_out_recall_at_1
        if self.held_out_bits_per_byte is not None:
            row["held_out_bits_per_byte"] = self.held_out_bits_per_byte
            row["held_out_perplexity"] = perplexity(self.held_out_loss)
        if self.validation:
            row["validation"] = {
                name: {
                    "loss": score.loss,
                    "bits_per_byte": score.bits_per_byte,
                    "perplexity": perplexity(score.loss),
                }
                for name, score in self.validation.items()
            }
        return row

    def lines(self) -> Iterator[str]:
        """For the console."""
        line = f"step {self.step:>6}  held-out loss {self.held_out_loss:.4f}"
        if self.held_out_bits_per_byte is not None:
            line += f"  bits/byte {self.held_out_bits_per_byte:.4f}"
        if self.held_out_recall_at_1 is not None:
            line += f"  recall@1 {self.held_out_recall_at_1:.1%} of {self.held_out_tokens} pairs"
        yield line
        for name, score in self.validation.items():
            yield (
                f"step {self.step:>6}  {name} loss {score.loss:.4f}  "
                f"bits/byte {score.bits_per_byte:.4f}"
            )


@dataclass(frozen=True)
class Event:
    """Something that happened once, after ``step`` steps."""

    step: int
    kind: Literal["guard", "alert", "checkpoint", "fault", "tuning"]
    name: str
    """Of the rule, or of what was saved."""
    action: str
    evidence: Mapping[str, Any]
    """The numbers that it was done for."""
    text: str
    """All of it, for people."""

    def row(self) -> Row:
        """For sinks."""
        event = asdict(self)
        return {"step": event.pop("step"), "event": event}

    def line(self) -> str:
        """For the console."""
        prefix = "ALERT " if self.kind in ("alert", "fault") else ""
        return f"step {self.step:>6}  {prefix}{self.text}"


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is too large."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def flatten(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a row under names such as ``exposed_s/dp``, without what is None."""
    flat: dict[str, float] = {}
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}/")
        elif value is not None:
            flat[name] = value
    return flat


def read_metrics(path: Path) -> list[Row]:
    """All objects of a ``metrics.jsonl``; a last line cut short by a crash is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows
