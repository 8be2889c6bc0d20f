"""What a finished run leaves for people: the loss curve as a picture."""

from pathlib import Path

from megabit.files import replacing
from megabit.telemetry.metrics import read_metrics


def draw_curve(metrics_path: Path, png: Path, title: str) -> None:
    """Draw training and held-out bits per byte over steps; for embeddings, the loss."""
    # Not at import time: matplotlib takes a second, and only the main rank draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(metrics_path)
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    is_text = any(row.get("bits_per_byte") is not None for row in rows)
    measure = "bits_per_byte" if is_text else "loss"
    for key, label, style in (
        (measure, "train", {"color": "tab:blue", "linewidth": 1.2}),
        (f"held_out_{measure}", "held out", {"color": "tab:orange", "marker": "o"}),
    ):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel=measure.replace("_", " "), title=title)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    with replacing(png) as draft:
        figure.savefig(draft, format="png", dpi=130)
