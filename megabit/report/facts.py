"""The head of the page: what was trained, how far it came, and how runs differ."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megabit.report.markup import escape, table
from megabit.report.run import Run, finite, number
from megabit.report.units import Unit, digits, text_of

MAX_DIFFERENCES = 60


def state_of(run: Run) -> str:
    """How far a run is, in words."""
    steps = finite(run.setting("train.steps"))
    at = f"{run.last_step:,}"
    if (number(run.summary, "steps") or 0) >= run.last_step:
        return f"finished, {at} steps"
    return f"step {at} of {steps:,.0f}, not finished" if steps else f"step {at}, not finished"


def tiles(run: Run) -> str:
    """The figures that people ask for first."""
    shown = "".join(
        f'<div class="tile"><dt>{label}</dt><dd>{escape(value)}</dd>'
        f'<dd class="about">{escape(note)}</dd></div>'
        for label, value, note in _figures(run)
    )
    return f'<dl class="tiles">{shown}</dl>'


def comparison(runs: Sequence[Run]) -> str:
    """The same figures of several runs, and the settings in which they differ."""
    by_run = [{label: (value, note) for label, value, note in _figures(run)} for run in runs]
    labels = list(dict.fromkeys(label for figures in by_run for label in figures))
    rows = [
        [
            f'<i class="key c{place}"></i> {escape(run.name)}',
            escape(state_of(run)),
            *(escape(figures.get(label, ("–", ""))[0]) for label in labels),
        ]
        for place, (run, figures) in enumerate(zip(runs, by_run, strict=True))
    ]
    return table(["run", "state", *labels], rows, numeric=range(2, 2 + len(labels)))


def differences(runs: Sequence[Run]) -> str:
    """Settings that are not the same in all runs."""
    flat = [dict(_leaves(run.config)) for run in runs]
    keys = sorted({key for settings in flat for key in settings})
    rows = []
    for key in keys:
        values = [_plain(settings.get(key, "–")) for settings in flat]
        if len(set(values)) > 1 and key != "run.dir":
            rows.append([f"<code>{escape(key)}</code>", *(escape(value) for value in values)])
    if not rows:
        return ""
    more = len(rows) - MAX_DIFFERENCES
    note = f'<p class="about">and {more} more</p>' if more > 0 else ""
    return table(["setting", *(escape(run.name) for run in runs)], rows[:MAX_DIFFERENCES]) + note


def facts(run: Run) -> str:
    """Model, layout and recipe, as far as the files say."""
    shown = "".join(
        f"<div><dt>{label}</dt><dd>{escape(text)}</dd></div>"
        for label, text in (
            ("Model", _model(run)),
            ("Quantization", _quantization(run)),
            ("Layout", _layout(run)),
            ("Recipe", _recipe(run)),
            ("Batch", _batch(run)),
            ("Precision", _precision(run)),
        )
        if text
    )
    return f'<dl class="facts">{shown}</dl>' if shown else ""


def _figures(run: Run) -> Iterator[tuple[str, str, str]]:
    """Label, value, note."""
    held_out = _known(run.evaluations, "held_out_bits_per_byte")
    if held_out:
        best = (
            f"best {digits(min(held_out))}" if min(held_out) < held_out[-1] else "the best so far"
        )
        yield "Held-out bits per byte", digits(held_out[-1]), best if len(held_out) > 1 else ""
    loss = _known(run.intervals, "loss")
    if loss:
        yield "Training loss", digits(loss[-1]), f"{digits(loss[0])} at first"
    if run.has_tokens:
        seconds = _seconds(run)
        note = f"in {_duration(seconds)} of training" if seconds else ""
        yield "Tokens", text_of(run.tokens_at(run.last_step), "count"), note
    units: tuple[tuple[str, str, Unit], ...] = (
        ("tokens_per_s", "Tokens per second", "count"),
        ("tflops", "FLOP/s of a rank", "TFLOP/s"),
        ("mfu", "MFU", "share"),
    )
    for metric, label, unit in units:
        values = _known(run.intervals, metric)
        if values:
            middle = sorted(values)[len(values) // 2]
            yield label, text_of(middle, unit), f"median; {text_of(values[-1], unit)} at last"
    memory = _known(run.intervals, "memory_mib") or [
        value for value in [number(run.summary, "peak_memory_mib")] if value is not None
    ]
    if memory:
        yield "Peak memory", text_of(max(memory), "MiB"), "of a process"


def _known(rows: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    values = (number(row, metric) for row in rows)
    return [value for value in values if value is not None]


def _seconds(run: Run) -> float:
    """That steps took, by the mean of each interval."""
    total, before = 0.0, 0
    for row in run.intervals:
        total += (row["step"] - before) * (number(row, "step_s") or 0.0)
        before = row["step"]
    return total


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours / 24:.1f} days"


def _model(run: Run) -> str:
    get = run.setting
    if get("model.hidden_size") is None:
        return ""
    parameters = number(run.summary, "parameters")
    return ", ".join(
        [
            *([f"{digits(parameters / 1e6)} M parameters"] if parameters else []),
            f"{get('model.num_hidden_layers')} layers × {get('model.hidden_size')}",
            f"{get('model.num_attention_heads')} heads",
            f"feed-forward {get('model.intermediate_size')} with {get('model.hidden_act')}",
            f"vocabulary {get('model.vocab_size')}",
        ]
    )


def _quantization(run: Run) -> str:
    get = run.setting
    if get("model.linear") is None:
        return ""
    if get("model.linear") != "ternary":
        return f"none: {get('model.linear')} layers"
    return ", ".join(
        [
            "ternary",
            *(
                f"{value}"
                for name in ("weight_scale", "norm_placement")
                if (value := get(f"model.{name}"))
            ),
            *([f"activations {get('model.activations')}"] if get("model.activations") else []),
            *(["Hadamard"] if get("model.hadamard") else []),
        ]
    )


def _layout(run: Run) -> str:
    layout = run.summary.get("layout")
    sizes = (
        layout
        if isinstance(layout, Mapping)
        else {axis: run.setting(f"parallel.{axis}") for axis in ("tp", "pp")}
    )
    shown = [f"{axis.upper()} {size}" for axis, size in sizes.items() if size is not None]
    if not shown:
        return ""
    extras = [str(run.setting("parallel.schedule"))] if (sizes.get("pp") or 1) != 1 else []
    extras += ["sequence parallel"] if run.setting("parallel.sequence_parallel") else []
    return ", ".join([" × ".join(shown), *extras])


def _recipe(run: Run) -> str:
    get = run.setting
    if get("optim.lr") is None:
        return ""
    return ", ".join(
        [
            f"{get('optim.name') or 'adamw'}",
            *([str(get("optim.schedule")).replace("_", " ")] if get("optim.schedule") else []),
            f"peak rate {_arrow(get('optim.lr'))}",
            f"weight decay {_arrow(get('optim.weight_decay'))}",
        ]
    )


def _batch(run: Run) -> str:
    get = run.setting
    batch, length = get("train.global_batch_size"), get("data.seq_length")
    if batch is None or length is None:
        return ""
    return f"{batch} samples of {length} tokens, microbatches of {get('train.micro_batch_size')}"


def _precision(run: Run) -> str:
    compute = run.setting("precision.compute")
    backward = run.setting("precision.ternary_backward")
    if compute is None:
        return ""
    return str(compute) + (f", ternary backward in {backward}" if backward == "int8" else "")


def _arrow(values: Any) -> str:
    return " → ".join(str(value) for value in values) if isinstance(values, list) else str(values)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "…"
