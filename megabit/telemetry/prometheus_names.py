"""What Prometheus calls the metrics of a run: one table, which dashboards and tests read.

Names follow its conventions: base units (seconds, bytes, ratios from 0 to 1), unit last, ``_total``
for what only grows. Numbers are those of ``metrics.jsonl`` times ``scale``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megabit.units import MB, MIB


@dataclass(frozen=True)
class PrometheusMetric:
    """One metric: a number of a row, or one for each entry of a table in it."""

    key: str
    """Where it is in a row: parts of a table by a dot, ``*`` for each of its keys."""
    name: str
    help: str
    labels: tuple[str, ...] = ()
    """What the keys at ``*`` are; of two, a key is both, with a space between."""
    scale: float = 1.0

    def samples(self, row: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
        """Values of the labels, and the number; nothing of what the row lacks or has no number
        for."""
        for labels, value in _entries(row, self.key.split("."), len(self.labels)):
            yield labels, value * self.scale


def _entries(
    value: Any, parts: list[str], num_labels: int
) -> Iterator[tuple[tuple[str, ...], float]]:
    if not parts:
        if value is not None:
            yield (), value
        return
    if not isinstance(value, Mapping):
        return
    part, *rest = parts
    if part == "*":
        for key, entry in value.items():
            own = tuple(key.split(" ", num_labels - 1))
            for labels, number in _entries(entry, rest, num_labels):
                yield own + labels, number
    elif part in value:
        yield from _entries(value[part], rest, num_labels)


INTERVAL_METRICS = (
    PrometheusMetric("step", "megabit_step", "Optimizer steps done"),
    PrometheusMetric("consumed_tokens", "megabit_consumed_tokens", "Tokens that steps have taken"),
    PrometheusMetric("loss", "megabit_loss", "Cross-entropy of all target tokens, nats per token"),
    PrometheusMetric("objective", "megabit_objective", "What is minimised"),
    PrometheusMetric("bits_per_byte", "megabit_bits_per_byte", "The loss in bits per byte of text"),
    PrometheusMetric("grad_norm", "megabit_grad_norm", "Global norm of the gradient, unclipped"),
    PrometheusMetric(
        "grad_norm_std", "megabit_grad_norm_std", "Its standard deviation over the interval's steps"
    ),
    PrometheusMetric(
        "grad_norm_spread",
        "megabit_grad_norm_spread_ratio",
        "Standard deviation of DP ranks' own norms, before they are reduced, over their mean",
    ),
    PrometheusMetric("skipped", "megabit_skipped_steps", "Steps of the interval without an update"),
    PrometheusMetric("lr", "megabit_learning_rate", "Learning rate"),
    PrometheusMetric("weight_decay", "megabit_weight_decay", "Weight decay"),
    PrometheusMetric(
        "quantization_share",
        "megabit_quantization_ratio",
        "How far quantization is faded in: lambda",
    ),
    PrometheusMetric("batch_size", "megabit_batch_size_samples", "Samples in a step"),
    PrometheusMetric("loss_scale", "megabit_loss_scale", "What the loss is multiplied with"),
    PrometheusMetric("tokens_per_s", "megabit_tokens_per_second", "Target tokens, all ranks"),
    PrometheusMetric(
        "tflops",
        "megabit_rank_flops_per_second",
        "Model FLOPs of a dense model of this shape, per rank",
        scale=1e12,
    ),
    PrometheusMetric("mfu", "megabit_mfu_ratio", "The same as a share of the device's peak"),
    PrometheusMetric("step_s", "megabit_step_seconds", "Time of a step"),
    PrometheusMetric("time_s.*", "megabit_phase_seconds", "Time of a step by phase", ("phase",)),
    PrometheusMetric(
        "exposed_s.*",
        "megabit_exposed_seconds",
        "Time of a step in which the rank that waits longest is blocked",
        ("axis",),
    ),
    PrometheusMetric(
        "exposed_share",
        "megabit_exposed_ratio",
        "Share of the step that a rank is blocked in collectives, the pipeline's left out",
    ),
    PrometheusMetric(
        "data_share",
        "megabit_data_wait_ratio",
        "Share of the step that the rank that waits longest for its batch does",
    ),
    PrometheusMetric(
        "straggler_ratio",
        "megabit_straggler_ratio",
        "Busy time of the slowest rank over the median of the other ranks of its stage",
    ),
    PrometheusMetric("straggler_rank", "megabit_straggler_rank", "That rank's number"),
    PrometheusMetric(
        "sent_mb.*", "megabit_sent_bytes", "What all ranks send in a step", ("axis",), MB
    ),
    PrometheusMetric(
        "sent_by_purpose_mb.*",
        "megabit_sent_by_purpose_bytes",
        "What all ranks send in a step",
        ("axis", "purpose"),
        MB,
    ),
    PrometheusMetric(
        "bubble", "megabit_bubble_ratio", "Idle time in the pipeline over time that is computed"
    ),
    PrometheusMetric(
        "memory_mib", "megabit_memory_peak_bytes", "Peak memory of the largest rank", scale=MIB
    ),
    PrometheusMetric("zero_fraction", "megabit_zero_ratio", "Share of the codes that are 0"),
    PrometheusMetric(
        "code_flips", "megabit_code_flips_ratio", "Share of the codes that one step changed"
    ),
    PrometheusMetric(
        "threshold_distance",
        "megabit_threshold_distance_ratio",
        "Mean distance of master weights to where rounding changes, in units of gamma",
    ),
    PrometheusMetric(
        "saturation", "megabit_saturation_ratio", "Share of int8 activations at 127 or -127"
    ),
    PrometheusMetric(
        "gpu_utilization", "megabit_gpu_utilization_ratio", "Of the least busy GPU of a rank"
    ),
    PrometheusMetric("gpu_power_w", "megabit_gpu_power_watts", "Of the GPU that draws most"),
    PrometheusMetric("gpu_temperature_c", "megabit_gpu_temperature_celsius", "Of the hottest GPU"),
    PrometheusMetric(
        "gpu_memory_mib", "megabit_gpu_memory_bytes", "In use on the fullest GPU", scale=MIB
    ),
    PrometheusMetric(
        "gpu_xid_errors", "megabit_gpu_xid_errors", "Critical XID errors of one GPU in this run"
    ),
    PrometheusMetric(
        "gpu_ecc_errors",
        "megabit_gpu_ecc_errors",
        "Uncorrected ECC errors of one GPU since its driver was loaded",
    ),
    PrometheusMetric(
        "layers.*.zero_fraction", "megabit_layer_zero_ratio", "As megabit_zero_ratio", ("layer",)
    ),
    PrometheusMetric(
        "layers.*.code_flips",
        "megabit_layer_code_flips_ratio",
        "As megabit_code_flips_ratio",
        ("layer",),
    ),
    PrometheusMetric(
        "layers.*.threshold_distance",
        "megabit_layer_threshold_distance_ratio",
        "As megabit_threshold_distance_ratio",
        ("layer",),
    ),
    PrometheusMetric(
        "layers.*.saturation",
        "megabit_layer_saturation_ratio",
        "As megabit_saturation_ratio",
        ("layer",),
    ),
)
"""Of the newest log interval."""

EVALUATION_METRICS = (
    PrometheusMetric("held_out_loss", "megabit_held_out_loss", "Nats per token of held-out text"),
    PrometheusMetric(
        "held_out_bits_per_byte", "megabit_held_out_bits_per_byte", "The same in bits per byte"
    ),
    PrometheusMetric(
        "held_out_perplexity", "megabit_held_out_perplexity", "The same as a perplexity of tokens"
    ),
    PrometheusMetric(
        "validation.*.loss",
        "megabit_validation_loss",
        "Nats per token of another validation set",
        ("dataset",),
    ),
    PrometheusMetric(
        "validation.*.bits_per_byte",
        "megabit_validation_bits_per_byte",
        "The same in bits per byte",
        ("dataset",),
    ),
    PrometheusMetric(
        "validation.*.perplexity",
        "megabit_validation_perplexity",
        "The same as a perplexity of tokens",
        ("dataset",),
    ),
)
"""Of the newest evaluation."""

EVENTS = PrometheusMetric(
    "event",
    "megabit_events_total",
    "Guard actions, alerts, faults and checkpoints since this process began",
    ("kind", "name", "action"),
)

PROMETHEUS_METRICS = (*INTERVAL_METRICS, *EVALUATION_METRICS, EVENTS)
"""All that is exported."""
