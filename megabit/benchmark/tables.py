"""The result for a terminal: everyone's speed, each rank's time, and where the time goes."""

from collections.abc import Iterator
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from megabit.benchmark import breakdown
from megabit.benchmark.breakdown import OUTSIDE, PARTS, Parts
from megabit.benchmark.contestants import MEGABIT
from megabit.benchmark.measure import WARMUP, Record
from megabit.benchmark.run import Result
from megabit.config import Config
from megabit.model import num_parameters
from megabit_kernels.benchmark.machine import counted
from megabit_kernels.benchmark.measure import Timing
from megabit_kernels.benchmark.tables import describe_seconds

LEGEND = (
    "tokens/s: of the median step; spread: the shortest and the 90th percentile against it. ×: "
    "tokens/s divided by those of the baseline. loss: of the last step. memory: the most that a "
    "process had, Python and torch included; of several ranks, the largest. Baselines are plain "
    "torch in one process: dense has torch's linear layers where megabit has ternary ones, fake "
    "has fake-quantized ones; bf16 keeps fp32 weights, casts them where it uses them, and has "
    "activations in bf16."
)
RANK_LEGEND = (
    "Shares of the step: compute is what is left of it beside the time that the rank was blocked "
    "in communication, by axis (exposed: what runs beside computation is not in it). bubble: time "
    "in the pipeline's schedule that the rank waited, against that it computed. MB: sent in a step."
)


def describe(config: Config, world_size: int) -> Iterator[str]:
    """What will be measured."""
    model, parallel, train, data = config.model, config.parallel, config.train, config.data
    yield (
        f"Model: {num_parameters(model) / 1e6:.2f} M parameters, {model.linear}, "
        f"{model.num_hidden_layers} layers × {model.hidden_size}, feed-forward "
        f"{model.intermediate_size}, {model.num_attention_heads} heads, vocabulary "
        f"{model.vocab_size}"
    )
    dp = world_size // (parallel.tp * parallel.pp)
    backward = config.precision.ternary_backward
    yield (
        f"megabit: TP {parallel.tp} × PP {parallel.pp} × DP {dp}"
        + (" with sequence parallelism" if parallel.sequence_parallel else "")
        + f", in {config.precision.compute}"
        + (f", products of ternary layers' backward in {backward}" if backward != "compute" else "")
    )
    yield (
        f"Step: {train.global_batch_size} samples of {data.seq_length} random tokens, "
        f"{train.micro_batch_size} at a time; one thread for each process"
    )


def speed_table(result: Result) -> Table:
    """A row for each contestant, with its ratios to the baselines."""
    steps = len(result.ranks[0].seconds)
    table = _table(f"Training, median of {counted(steps, 'step')} after {WARMUP}")
    table.add_column("contestant", no_wrap=True)
    for heading in ("tokens/s", "step", "spread"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in result.baselines:
        table.add_column(f"×{name}", justify="right", no_wrap=True)
    for heading in ("memory", "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    rates = result.tokens_per_s
    records = {MEGABIT: result.ranks, **{n: [r] for n, r in result.baselines.items()}}
    for name, seconds in result.all_seconds.items():
        timing = Timing.of(seconds)
        table.add_row(
            name,
            Text(f"{rates[name]:,.0f}", style="bold"),
            describe_seconds(timing.median_s),
            f"{_change(timing.min_s, timing.median_s)} {_change(timing.p90_s, timing.median_s)} %",
            *(f"{rates[name] / rates[baseline]:.2f}" for baseline in result.baselines),
            f"{max(record.peak_bytes for record in records[name]) / 1e6:,.0f} MB",
            f"{records[name][0].losses[-1]:.4f}",
            style=None if name == MEGABIT else "dim",
        )
    return table


def rank_table(result: Result) -> Table:
    """A row for each rank of the configuration: what it did with its time, what it sent."""
    table = _table("Ranks of megabit, means of a step")
    # Those that the layout has: of all six there would be no room for the numbers.
    axes = [
        axis
        for axis in result.ranks[0].waited_s
        if any(record.waited_s[axis] or record.sent_bytes[axis] for record in result.ranks)
    ]
    for heading in ("rank", "step", "compute", *(f"wait {axis}" for axis in axes), "bubble"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in (*(f"MB {axis}" for axis in axes), "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rank, record in enumerate(result.ranks):
        step_s = fmean(record.seconds)
        table.add_row(
            str(rank),
            describe_seconds(step_s),
            Text(f"{compute_share(record):.1%}", style="bold"),
            *(f"{record.waited_s[axis] / step_s:.1%}" for axis in axes),
            f"{record.bubble:.1%}",
            *(f"{record.sent_bytes[axis] / 1e6:,.2f}" for axis in axes),
            f"{record.peak_bytes / 1e6:,.0f} MB",
        )
    return table


def compute_share(record: Record) -> float:
    """Share of a step in which the rank was not blocked in communication."""
    return 1 - sum(record.waited_s.values()) / fmean(record.seconds)


def parts_table(result: Result) -> Table | None:
    """A column for each contestant: where one step of it went. None if nobody was asked."""
    columns: dict[str, Parts] = {}
    of_megabit = {f"{MEGABIT} (rank 0)" if len(result.ranks) > 1 else MEGABIT: result.ranks[0]}
    for name, record in {**of_megabit, **result.baselines}.items():
        if record.parts is not None:
            columns[name] = record.parts
    if not columns:
        return None
    table = _table("Where one step goes, as the profiler sees it: ms, and share")
    table.add_column("part", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for part in PARTS:
        cells = (
            f"{1e3 * parts[part]:,.1f} {parts[part] / sum(parts.values()):>4.0%}"
            for parts in columns.values()
        )
        table.add_row(part, *cells, style="dim" if part == OUTSIDE else None)
    table.add_row("step", *(f"{1e3 * sum(parts.values()):,.1f}     " for parts in columns.values()))
    return table


def limit(result: Result) -> str:
    """One line: what takes the most of a step, and so limits the speed."""
    ranks = result.ranks
    shares = {
        f"waiting on {axis}": fmean(r.waited_s[axis] / fmean(r.seconds) for r in ranks)
        for axis in ranks[0].waited_s
    }
    shares["compute"] = fmean(map(compute_share, ranks))
    name = max(shares, key=lambda name: shares[name])
    line = f"Limited by {name}: {shares[name]:.0%} of the time of a step, mean over the ranks"
    parts = ranks[0].parts
    if len(ranks) == 1 and parts is not None:
        largest = sorted(PARTS, key=lambda part: -parts[part])[:3]
        named = ", ".join(f"{part} {parts[part] / sum(parts.values()):.0%}" for part in largest)
        line += f" (most of it: {named})"
    return line + "."


def legends(result: Result) -> Iterator[str]:
    """What the columns of the tables mean."""
    yield LEGEND
    yield RANK_LEGEND
    if result.ranks[0].parts is not None:
        yield breakdown.LEGEND


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )


def _change(value: float, reference: float) -> str:
    return f"{100 * (value / reference - 1):+.0f}".replace("-", "−")
