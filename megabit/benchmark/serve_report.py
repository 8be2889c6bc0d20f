"""The benchmark of a server in a terminal, as JSON and as a picture."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megabit.benchmark.serve import MEASURES, PERCENTILES, Limits, Load, Result, run
from megabit.files import replacing, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 100


def run_and_report(
    url: str,
    load: Load,
    limits: Limits,
    key: str | None,
    out: Path | None,
    png: Path | None,
) -> bool:
    """Measure, print, write; returns whether every request was answered."""
    console = Console(width=max(_WIDTH, Console().width), markup=False, highlight=False)
    console.print(f"{url}: {described(load)}", soft_wrap=True)
    with console.status("Warming up") as status:
        result = asyncio.run(
            run(url, load, limits, key, lambda done: status.update(f"{done} requests have ended"))
        )
    for line in lines(result):
        console.print(line, soft_wrap=True)
    console.print(_table(result))
    if out is not None:
        write_text(out, json.dumps(as_json(result), indent=1, ensure_ascii=False) + "\n")
    if png is not None:
        draw(result, png)
    return not result.failures


def described(load: Load) -> str:
    """A load in words."""
    kind = (
        f"closed loop of {load.clients} clients"
        if load.rate is None
        else f"Poisson, {load.rate:g} requests/s"
    )
    prompts = (
        f"{len(load.prompts)} prompts in turn"
        if load.prompts
        else f"prompts of {load.prompt_tokens} tokens"
    )
    shared = f" ({load.shared_tokens} of them the same)" if load.shared_tokens else ""
    limits = [] if load.requests is None else [f"at most {load.requests} requests"]
    limits += [] if load.seconds is None else [f"for {load.seconds:g} s"]
    return (
        f"{', '.join([kind, *limits])}; {prompts}{shared}, answers of "
        f"{load.answer_tokens} tokens at temperature {load.temperature:g}"
    )


def lines(result: Result) -> list[str]:
    """Totals for people."""
    rates = result.rates
    told = [
        f"{result.model}: {len(result.complete)} of {len(result.replies)} requests answered in "
        f"{result.seconds:.1f} s: {rates['requests_per_s']:.2f} requests/s, "
        f"{rates['generated_tokens_per_s']:,.1f} tokens/s generated, "
        f"{rates['prompt_tokens_per_s']:,.1f} tokens/s of prompts"
    ]
    told += [f"failed, {count} ×: {reason}" for reason, count in result.failures.items()]
    if (good := result.goodput) is not None:
        told.append(f"goodput: {good:.2f} requests/s within the limits ({_limits(result.limits)})")
    return told


def as_json(result: Result) -> dict[str, Any]:
    """All that was measured."""
    load = asdict(result.load)
    load["prompts"] = len(result.load.prompts)
    return {
        "format": "megabit serve benchmark",
        "version": 1,
        "url": result.url,
        "model": result.model,
        "load": load,
        "limits": asdict(result.limits),
        "seconds": result.seconds,
        "answered": len(result.complete),
        "failed": result.failures,
        **result.rates,
        "goodput_requests_per_s": result.goodput,
        **{measure: result.summary(measure) for measure in MEASURES},
        "requests": [
            {
                "sent_s": reply.sent_at - result.began_at,
                "pieces_s": [at - result.began_at for at in reply.pieces_at],
                "ended_s": reply.ended_at - result.began_at,
                "status": reply.status,
                "prompt_tokens": reply.prompt_tokens,
                "completion_tokens": reply.completion_tokens,
                "error": reply.error,
            }
            for reply in result.replies
        ],
    }


def draw(result: Result, png: Path) -> None:
    """Shares of requests by their times, and throughput over time."""
    # Not at import time: matplotlib takes a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    (first, between), (whole, over_time) = figure.subplots(2, 2)
    for axes, measure in ((first, "ttft_s"), (between, "itl_s"), (whole, "e2e_s")):
        _draw_shares(axes, result, measure)
    _draw_throughput(over_time, result)
    figure.suptitle(f"{result.model}: {described(result.load)}", fontsize=9)
    with replacing(png) as draft:
        figure.savefig(draft, format="png", dpi=130)


def _draw_shares(axes: "Axes", result: Result, measure: str) -> None:
    values = np.sort(np.array(result.values(measure))) * 1e3
    if len(values):
        shares = np.arange(1, len(values) + 1) / len(values) * 100
        axes.plot(values, shares, color="tab:blue", linewidth=1.4)
        for percentile, style in zip(PERCENTILES, ("-", "--", ":"), strict=True):
            at = float(np.percentile(values, percentile))
            label = f"p{percentile}: {at:,.1f} ms"
            axes.axvline(at, color="tab:orange", linewidth=1, linestyle=style, label=label)
        axes.legend(fontsize=8, loc="lower right")
        if values[0] > 0 and values[-1] / values[0] > 20:
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter("")  # they would lie over each other
    axes.set(xlabel="ms", ylabel="% at most", title=MEASURES[measure], ylim=(0, 101))
    axes.grid(alpha=0.3)


def _draw_throughput(axes: "Axes", result: Result) -> None:
    """Pieces are spread over the tokens of their answer, since some tokens show no text."""
    bin_s = max(1.0, result.seconds / 60)
    edges = np.append(np.arange(0.0, result.seconds, bin_s), max(result.seconds, 1e-3))
    at, weights = [], []
    for reply in result.complete:
        at += [piece - result.began_at for piece in reply.pieces_at]
        weights += [reply.completion_tokens / max(1, len(reply.pieces_at))] * len(reply.pieces_at)
    tokens, _ = np.histogram(at, bins=edges, weights=weights)
    axes.stairs(tokens / np.diff(edges), edges, color="tab:blue", fill=True, alpha=0.5)
    axes.set(xlabel="s", ylabel="tokens/s", title="generated", xlim=(0, max(result.seconds, 1e-3)))
    axes.grid(alpha=0.3)
    open_ = axes.twinx()
    changes = sorted(
        [(r.sent_at - result.began_at, 1) for r in result.replies]
        + [(r.ended_at - result.began_at, -1) for r in result.replies]
    )
    counts = np.cumsum([change for _, change in changes])
    open_.step([time for time, _ in changes], counts, color="tab:orange", where="post", linewidth=1)
    open_.set(ylabel="requests under way", ylim=(0, max([1, *counts]) * 1.1))


def _table(result: Result) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("ms", no_wrap=True)
    for heading in ("mean", *(f"p{p}" for p in PERCENTILES), "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    for measure, name in MEASURES.items():
        found = result.summary(measure)
        cells = ["-"] * (len(PERCENTILES) + 2)
        if found is not None:
            cells = [f"{1e3 * value:,.1f}" for value in found.values()]
        table.add_row(f"{name} ({measure.removesuffix('_s')})", *cells)
    return table


def _limits(limits: Limits) -> str:
    named = {"first token": limits.ttft_s, "each token": limits.tpot_s}
    return ", ".join(f"{name} {1e3 * s:g} ms" for name, s in named.items() if s is not None)
