"""A plan in a terminal: the best layouts, the best one part by part, and why others are out."""

from collections.abc import Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megabit.plan.machine import Machine
from megabit.plan.search import Candidate, Found, Rejected

BAR = 30
"""Columns of the longest bar."""
MAX_RULES = 6
LEGEND = (
    "step: seconds. bubble and exposed (communication that nothing hides): shares of the step. "
    "memory: of the rank that needs most. MFU counts the FLOPs of the dense model "
    "(docs/planning.md)."
)


def print_plan(found: Found, machine: Machine, tokens: float, top: int, console: Console) -> None:
    """Print all of it.

    Args:
        tokens: of the whole run.
        top: so many layouts.
    """
    best = found.candidates[0]
    console.print(_layouts(found.candidates[:top], tokens))
    console.print(
        f"Best: {best.name}, {_run_text(best, tokens)} for {tokens:.3g} tokens.",
        style="bold",
        soft_wrap=True,
    )
    console.print(bars(f"Time of a step, {best.step.total_s:.4g} s", _times(best)))
    console.print(memory_bars(best.memory))
    for line in rejections(found):
        console.print(line, soft_wrap=True)
    console.print(LEGEND, style="dim", soft_wrap=True)
    warn_of_predictions(machine, console)


def warn_of_predictions(machine: Machine, console: Console) -> None:
    """Say so, unless the machine was measured."""
    if not machine.is_measured:
        console.print(
            "A prediction: the constants are data sheets' and assumptions, never measured. "
            "megabit plan --calibrate measures a machine.",
            style="yellow",
            soft_wrap=True,
        )


def describe_machine(machine: Machine, world_size: int) -> str:
    """The machine on a line."""
    kind = "measured" if machine.is_measured else "predicted"
    whose = "a host" if machine.device.is_shared else "each"
    return (
        f"{world_size} ranks on {machine.device.name}, {machine.nodes_of} a node, "
        f"{gb_text(machine.device.memory_bytes)} {whose} ({kind}: {machine.source})"
    )


def rejections(found: Found) -> Iterator[str]:
    """Why layouts are out, the nearest miss first."""
    yield (
        f"{found.considered} layouts were considered: {len(found.candidates)} fit, "
        f"{len(found.too_large)} need too much memory, {found.slower} are slower by their work "
        f"alone, {found.impossible.total()} are impossible."
    )
    if found.too_large:
        yield f"Too much memory, nearest: {_miss(found.too_large[0])}"
        if len(found.too_large) > 1:
            yield f"Too much memory, farthest: {_miss(found.too_large[-1])}"
    for key, count in found.impossible.most_common(MAX_RULES):
        yield f"Impossible, {count} by {key}: such as {found.examples[key]}"


def _miss(rejected: Rejected) -> str:
    parallel, config = rejected.layout.config.parallel, rejected.layout.config
    largest = sorted(rejected.memory.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{part} {gb_text(size)}" for part, size in largest)
    return (
        f"TP {parallel.tp} × PP {parallel.pp} × DP {rejected.layout.dp}, {parallel.schedule}, "
        f"microbatch {config.train.micro_batch_size}, ZeRO {config.optim.zero_stage}, recompute "
        f"{config.train.recompute} needs {gb_text(sum(rejected.memory.values()))} or more on a "
        f"rank, {rejected.missing:.2f} times what there is ({parts})"
    )


def _layouts(candidates: Sequence[Candidate], tokens: float) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("TP×PP×DP", "schedule", "SP", "sums"):
        table.add_column(heading, no_wrap=True)
    numbers = ("micro", "ZeRO", "recompute", "step", "tokens/s", "MFU", "bubble", "exposed")
    for heading in (*numbers, "memory", "days", "GPU-hours"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, candidate in enumerate(candidates):
        config, step = candidate.layout.config, candidate.step
        parallel = config.parallel
        chunks = f" v={parallel.chunks}" if parallel.schedule == "interleaved" else ""
        days = step.days(tokens)
        table.add_row(
            f"{parallel.tp}×{parallel.pp}×{candidate.layout.dp}",
            parallel.schedule + chunks if parallel.pp > 1 else "-",
            "yes" if parallel.sequence_parallel else "-",
            parallel.row_reduce if parallel.tp > 1 else "-",
            str(config.train.micro_batch_size),
            str(config.optim.zero_stage),
            config.train.recompute,
            f"{step.total_s:.4g}",
            f"{step.tokens_per_s:,.0f}",
            "-" if step.mfu is None else f"{step.mfu:.1%}",
            f"{step.bubble:.1%}",
            f"{step.exposed:.1%}",
            gb_text(candidate.memory_bytes),
            f"{days:,.3g}",
            f"{days * 24 * step.ranks:,.4g}",
            style="bold" if number == 0 else None,
        )
    return table


def _run_text(best: Candidate, tokens: float) -> str:
    days = best.step.days(tokens)
    return f"{days:,.3g} days, {days * 24 * best.step.ranks:,.4g} GPU-hours"


def _times(best: Candidate) -> dict[str, tuple[float, str]]:
    parts = {part: (size, f"{size:.4g} s") for part, size in best.step.seconds.items()}
    if best.step.hidden_s:
        parts["(DP, hidden)"] = best.step.hidden_s, f"{best.step.hidden_s:.4g} s"
    return parts


def memory_bars(memory: Mapping[str, int]) -> Table:
    """Bytes of a rank, by part."""
    title = f"Memory of a rank, {gb_text(sum(memory.values()))}"
    return bars(title, {part: (size, gb_text(size)) for part, size in memory.items()})


def bars(title: str, parts: Mapping[str, tuple[float, str]]) -> Table:
    """A bar for each part: how large it is, and how that is written."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    longest = max(size for size, _ in parts.values()) or 1
    for part, (size, text) in parts.items():
        if size:
            table.add_row(f"  {part}", text, "█" * max(1, round(BAR * size / longest)))
    return table


def gb_text(size: float) -> str:
    """Bytes, in GB."""
    return f"{size / 1e9:.3g} GB"
