"""What each benchmark found, in the common form of ``document``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megabit.benchmark.checkpoint import (
    ASYNCHRONOUS,
    SNAPSHOT,
    SYNCHRONOUS,
    TORCH,
    TORCH_ASYNC,
    CheckpointResult,
)
from megabit.benchmark.contestants import MEGABIT
from megabit.benchmark.document import Part, Row, Sample
from megabit.benchmark.engine import Dtype, Load, Speeds
from megabit.benchmark.pipeline import Comparison
from megabit.benchmark.run import Result
from megabit.config import Config, ModelConfig
from megabit.model import num_parameters
from megabit_kernels.benchmark.machine import counted
from megabit_kernels.benchmark.measure import Timing

RACES = {"default": ("bf16", "int_mm"), "bitlinear": ("fake_quantized",)}
"""Of the kernels' contestants: ours, and what they stand beside in a document."""
NAMES = {
    "bf16": "torch.mm, bf16",
    "int_mm": "torch._int_mm",
    "fake_quantized": "fake-quantized layer",
}
SAVES = (
    ("training waits, asynchronous save", "blocked", ASYNCHRONOUS, TORCH_ASYNC),
    ("on disk, synchronous save", "total", SYNCHRONOUS, TORCH),
    ("on disk, asynchronous save", "total", ASYNCHRONOUS, TORCH_ASYNC),
    ("on disk, snapshot of codes", "total", SNAPSHOT, TORCH),
)


def train_part(result: Result, world_size: int) -> Part:
    """Training steps of a configuration, beside each baseline."""
    config, parallel = result.config, result.config.parallel
    tokens = float(config.train.global_batch_size * config.data.seq_length)
    dp = world_size // (parallel.tp * parallel.pp)
    layout = f"TP {parallel.tp} × PP {parallel.pp} × DP {dp}"
    all_seconds = result.all_seconds
    ours = Sample.of(MEGABIT, all_seconds.pop(MEGABIT), tokens)
    also = {"peak_memory_bytes": float(max(record.peak_bytes for record in result.ranks))}
    return Part(
        "train",
        f"Training, {_layers(config.model)}, {layout}",
        {
            **_shape(config),
            "ranks": world_size,
            "layout": layout,
            "compute": config.precision.compute,
            "ternary_backward": config.precision.ternary_backward,
        },
        tuple(
            Row(
                layout,
                ours,
                Sample.of(f"{name}, one process", seconds, tokens),
                "tokens",
                {**also, "baseline_peak_memory_bytes": float(result.baselines[name].peak_bytes)},
            )
            for name, seconds in all_seconds.items()
        ),
    )


def pipeline_part(result: Comparison, config: Config) -> Part:
    """Schedules beside one process, and their bubbles beside the simulator's."""
    one = Sample.of("one process", result.one_process_s, result.tokens)
    rows = tuple(
        Row(
            name,
            Sample.of(name, own.seconds, result.tokens),
            one,
            "tokens",
            {"bubble_share": own.bubble, "simulated_bubble_share": own.simulated_bubble},
        )
        for name, own in result.schedules.items()
    )
    ranks = config.parallel.tp * config.parallel.pp
    title = f"Pipeline schedules, {_layers(config.model)}, PP {config.parallel.pp}"
    return Part("pipeline", title, {**_shape(config), "ranks": ranks}, rows)


def checkpoint_part(result: CheckpointResult, config: Config, world_size: int) -> Part:
    """Saves beside those of torch's distributed checkpoint."""
    rows = []
    for what, measure, ours, baseline in SAVES:
        samples = [
            Sample.of(name, save.all_blocked_s if measure == "blocked" else save.all_total_s)
            for name, save in ((name, result.saves[name]) for name in (ours, baseline))
        ]
        also = {
            "written_bytes": float(result.saves[ours].bytes),
            "baseline_written_bytes": float(result.saves[baseline].bytes),
        }
        rows.append(Row(what, samples[0], samples[1], also=also))
    settings = {
        **_shape(config),
        "ranks": world_size,
        "step_s": result.step_s,
        "step_while_saving_s": result.step_while_saving_s,
    }
    return Part("checkpoint", f"Checkpoints, {_layers(config.model)}", settings, tuple(rows))


def engine_part(
    results: Sequence[Speeds], model: ModelConfig, load: Load, threads: int, dtype: Dtype
) -> Part:
    """The engine beside transformers, and beside itself with one request at a time."""
    rows = []
    for speeds in results:
        samples = {
            name: Sample.of(name, seconds, speeds.tokens)
            for name, seconds in speeds.seconds.items()
        }
        ours = samples.pop(MEGABIT)
        what = counted(speeds.requests, "request")
        rows += [Row(what, ours, other, "tokens") for other in samples.values()]
    settings = {
        **_model(model),
        "dtype": dtype,
        "threads": threads,
        "prompt_tokens": load.prompt_tokens,
        "new_tokens": load.new_tokens,
    }
    return Part("engine", f"Generation, {_layers(model)}", settings, tuple(rows))


def kernels_part(whole: Mapping[str, Any]) -> Part:
    """The kernels' own JSON: products with weights from memory, and whole layers of that kind,
    beside what people use in their place."""
    found = {
        (row["model"], row["layer"], row["m"], row["threads"], row["contestant"]): row
        for row in whole["rows"]
        if row["caches"] == "cold"
    }
    left_out = {
        f"{one['race']['layer']['name']}, M = {one['race']['m']}: {one['contestant']}: "
        f"{one['reason']}"
        for one in whole["left_out"]
    }
    settings = {
        "operands": "int8 tokens [M, K], ternary weight [N, K] from memory (cold caches)",
        "threads": sorted({row["threads"] for row in whole["rows"]}),
    }
    title = "Ternary products, beside torch's"
    return Part("kernels", title, settings, tuple(_races(found)), tuple(sorted(left_out)))


def _races(found: Mapping[tuple[Any, ...], Mapping[str, Any]]) -> Iterator[Row]:
    for key, row in found.items():
        *place, contestant = key
        for name in RACES.get(contestant, ()):
            baseline = found.get((*place, name))
            if baseline is not None:
                kind = "layer" if contestant == "bitlinear" else "product"
                what = f"{row['layer']} ({row['n']} × {row['k']}), M = {row['m']}, {kind}"
                ours = _kernel_sample(f"{contestant} ({row['implementation']})", row)
                also = {"roofline_share": row["roof_percent"] / 100}
                yield Row(what, ours, _kernel_sample(NAMES[name], baseline), also=also)


def _kernel_sample(name: str, row: Mapping[str, Any]) -> Sample:
    median_s, min_s, p90_s = (row[f"{kind}_us"] / 1e6 for kind in ("median", "min", "p90"))
    return Sample(name, Timing(median_s, min_s, p90_s, row["runs"]))


def _layers(model: ModelConfig) -> str:
    return f"{counted(model.num_hidden_layers, 'layer')} of {model.hidden_size}"


def _model(model: ModelConfig) -> dict[str, Any]:
    return {
        "parameters": num_parameters(model),
        "layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "linear": model.linear,
    }


def _shape(config: Config) -> dict[str, Any]:
    return {
        **_model(config.model),
        "seq_length": config.data.seq_length,
        "samples_a_step": config.train.global_batch_size,
        "samples_a_microbatch": config.train.micro_batch_size,
    }
