"""What a finished run leaves: a sample, the curve, the summary."""

import json

from rich.console import Console

from megabit.data.corpus import CorpusInfo
from megabit.errors import RunError, UserError
from megabit.files import write_text
from megabit.model import num_parameters
from megabit.report import write_report
from megabit.telemetry import EvaluationMetrics
from megabit.training.accounting import largest_peak_mib
from megabit.training.report import draw_curve
from megabit.training.run_files import RunFiles
from megabit.training.sample import sample_text
from megabit.training.step import TrainingState


def conclude(
    state: TrainingState,
    corpus: CorpusInfo,
    result: EvaluationMetrics,
    files: RunFiles,
    console: Console,
) -> None:
    """Sample text, draw the curve and write the summary of a finished run; collective."""
    config, mesh = state.config, state.mesh
    sample = None
    if config.run.sample_tokens and config.loss.objective == "language_model":
        sample = sample_text(
            state.stages,
            state.plan.schedule.placement,
            corpus.load_tokenizer(),
            mesh,
            config.run.sample_prompt,
            config.run.sample_tokens,
            config.data.seq_length,
            seed=config.train.seed,
        )
        console.rule("sample")
        console.print(sample, markup=False, highlight=False, soft_wrap=True)
        console.rule()
    peak_memory_mib = largest_peak_mib(mesh)
    if not mesh.is_main:
        return
    try:
        _write_results(state, result, sample, peak_memory_mib, files)
        report = write_report(files.folder)
    except (OSError, UserError) as error:
        raise RunError(
            f"{files.folder}: cannot write curve, summary and report ({error})"
        ) from error
    bits = result.held_out_bits_per_byte
    console.print(
        ("" if bits is None else f"Held-out bits per byte: {bits:.4f}\n")
        + f"Report: {report}\nSummary: {files.summary}",
        highlight=False,
        soft_wrap=True,
    )


def _write_results(
    state: TrainingState,
    result: EvaluationMetrics,
    sample: str | None,
    peak_memory_mib: float,
    files: RunFiles,
) -> None:
    """The curve and the summary."""
    config, mesh = state.config, state.mesh
    layout = {"tp": mesh.tp.size, "pp": mesh.pp.size, "dp": mesh.dp.size}
    title = " × ".join(f"{axis.upper()} {size}" for axis, size in layout.items())
    draw_curve(files.metrics, files.curve, f"{config.model.linear}, {title}")
    summary = {
        "steps": state.steps.steps,
        "parameters": num_parameters(config.model),
        "layout": layout,
        "peak_memory_mib": round(peak_memory_mib, 1),
        **{key: value for key, value in result.row().items() if key != "step"},
        "sample": sample,
    }
    write_text(files.summary, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
