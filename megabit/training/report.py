"""What a finished run leaves for people: the loss curve as a picture, the summary as JSON."""

from pathlib import Path

from megabit.telemetry.metrics import read_metrics


def draw_curve(metrics_path: Path, png: Path, title: str) -> None:
    """Draw training and held-out bits per byte over steps."""
    # Not at import time: matplotlib takes a second, and only the main rank draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(metrics_path)
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for key, label, style in (
        ("bits_per_byte", "train", {"color": "tab:blue", "linewidth": 1.2}),
        ("held_out_bits_per_byte", "held out", {"color": "tab:orange", "marker": "o"}),
    ):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel="bits per byte", title=title)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(png, dpi=130)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` so that the file is either whole or not there."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
