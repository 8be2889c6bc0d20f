"""A plan for serving in a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megabit.plan.machine import Machine
from megabit.plan.report import gb_text, memory_bars, warn_of_predictions
from megabit.plan.serving import Load, ServingFound, reasons

LEGEND = (
    "sequences: side by side in a replica. first: milliseconds to the first token of a prompt that "
    "comes while all others are answered. later: for each later token, others' prompts included. "
    "blocks: of keys and values, of a replica."
)


def print_serving(
    found: ServingFound, machine: Machine, load: Load, top: int, console: Console
) -> None:
    """Print the ``top`` layouts, the best one's memory, and why others are out."""
    console.print(
        f"Requests: {load.prompt_tokens} tokens, answered by {load.answer_tokens}", soft_wrap=True
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    headings = ("TP×PP", "replicas", "sequences", "first", "later", "tokens/s", "blocks", "memory")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, candidate in enumerate(found.candidates[:top]):
        table.add_row(
            f"{candidate.tp}×{candidate.pp}",
            str(candidate.replicas),
            str(candidate.sequences),
            f"{1e3 * candidate.ttft_s:.4g} ms",
            f"{1e3 * candidate.tpot_s:.4g} ms",
            f"{candidate.tokens_per_s:,.0f}",
            f"{candidate.blocks:,}",
            gb_text(sum(candidate.memory.values())),
            style="bold" if number == 0 else None,
        )
    console.print(table)
    console.print(memory_bars(found.candidates[0].memory))
    for line in reasons(found):
        console.print(f"Out: {line}", soft_wrap=True)
    console.print(LEGEND, style="dim", soft_wrap=True)
    warn_of_predictions(machine, console)
