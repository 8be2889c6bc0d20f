"""Tables of the page: events with their evidence, evaluations, and bytes beside their formulas."""

from collections.abc import Mapping, Sequence
from typing import Any

from megabit.report.frame import MARKS
from megabit.report.markup import escape, table
from megabit.report.run import Event, Run, finite, number
from megabit.report.units import Unit, digits, text_of

MAX_EVENTS = 300
MAX_EVALUATIONS = 200


def event_table(runs: Sequence[Run]) -> str:
    """What happened in all runs, newest first; of very many, saves are left out first."""
    events = [(event, run) for run in runs for event in run.events]
    left_out = len(events) - MAX_EVENTS
    if left_out > 0:
        # Stable: what matters more first, of equals the newest.
        events.sort(key=lambda pair: (pair[0].mark == "checkpoint", -pair[0].step))
        events = events[:MAX_EVENTS]
    events.sort(key=lambda pair: -pair[0].step)
    if not events:
        return ""
    several = len(runs) > 1
    rows = [
        [
            f"{event.step:,}",
            *([escape(run.name)] if several else []),
            f'<span class="badge {event.mark}">{MARKS[event.mark]}</span>',
            escape(event.name),
            escape(event.action.replace("_", " ")),
            escape(event.text) + _evidence(event),
        ]
        for event, run in events
    ]
    heads = ["step", *(["run"] if several else []), "kind", "what", "action", "evidence"]
    note = f'<p class="about">{left_out:,} older ones are not shown.</p>' if left_out > 0 else ""
    return table(heads, rows, numeric=[0]) + note


def evaluation_table(runs: Sequence[Run]) -> str:
    """Held-out text and validation texts after each evaluation, newest first."""
    several = len(runs) > 1
    rows = []
    for run in runs:
        for row in run.evaluations[::-1][:MAX_EVALUATIONS]:
            head = [f"{row['step']:,}", *([escape(run.name)] if several else [])]
            if "held_out_loss" in row:
                values = {
                    "loss": row.get("held_out_loss"),
                    "bits_per_byte": row.get("held_out_bits_per_byte"),
                    "perplexity": row.get("held_out_perplexity"),
                }
                rows.append([*head, "held out", *_scores(values)])
            sets = row.get("validation")
            for name, values in sets.items() if isinstance(sets, Mapping) else ():
                if isinstance(values, Mapping):
                    rows.append([*head, escape(name), *_scores(values)])
    if not rows:
        return ""
    heads = ["step", *(["run"] if several else []), "text", "loss", "bits per byte", "perplexity"]
    first = len(heads) - 3
    return table(heads, rows, numeric=[0, first, first + 1, first + 2])


def accounting_table(run: Run) -> str:
    """Bytes sent and kept, as measured and as the formulas say."""
    parts: tuple[tuple[str, Unit, str, str, str], ...] = (
        ("sent in a step", "MB", "sent_by_purpose_mb", "expected_sent_by_purpose_mb", "sent_mb"),
        ("kept by a rank", "MiB", "memory_mib", "expected_memory_mib", "memory_mib"),
    )
    rows = []
    for what, unit, measured, expected, rival in parts:
        tables = [run.accounting.get(key) for key in (measured, expected, f"megatron_{rival}")]
        ours, formula, theirs = (t if isinstance(t, Mapping) else {} for t in tables)
        for name in dict.fromkeys([*ours, *formula]):
            values = [finite(t.get(name)) for t in (ours, formula, theirs)]
            # What is in neither is no row.
            if any(values[:2]):
                rows.append([what, escape(name), *(_size(value, unit) for value in values)])
    heads = ["", "what", "measured", "by formula", "Megatron-LM"]
    return table(heads, rows, numeric=[2, 3, 4]) if rows else ""


def _scores(values: Mapping[str, Any]) -> list[str]:
    found = [number(values, key) for key in ("loss", "bits_per_byte", "perplexity")]
    return ["–" if value is None else digits(value) for value in found]


def _size(value: float | None, unit: Unit) -> str:
    return "" if value is None else text_of(value, unit)


def _evidence(event: Event) -> str:
    if not event.evidence:
        return ""
    items = "".join(
        f"<li><span>{escape(key)}</span> {escape(_value(value))}</li>"
        for key, value in event.evidence.items()
    )
    return f'<ul class="evidence">{items}</ul>'


def _value(value: Any) -> str:
    as_number = finite(value)
    text = str(value) if as_number is None else digits(as_number)
    return text if len(text) <= 200 else text[:197] + "…"
