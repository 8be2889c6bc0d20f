"""What is drawn: one table of plots, by the names of ``metrics.jsonl``.

A plot appears if a run has numbers for it. A metric that stays at its ``neutral`` value all along
says nothing, and is left out.
"""

from dataclasses import dataclass

from megabit.report.units import Unit


@dataclass(frozen=True)
class Line:
    """A metric: ``loss``, a part of a table, ``time_s.data``, or all its parts, ``exposed_s.*``."""

    metric: str
    label: str = ""
    is_evaluation: bool = False
    """Of evaluations, which are few: each gets a dot."""


@dataclass(frozen=True)
class Reference:
    """A value to compare with, drawn across the plot."""

    value: float
    label: str


@dataclass(frozen=True)
class Panel:
    """A plot. ``log`` offers a logarithmic scale, ``stacked`` draws parts of a whole."""

    title: str
    about: str
    lines: tuple[Line, ...]
    unit: Unit = "number"
    from_zero: bool = False
    log: bool = False
    stacked: bool = False
    wide: bool = False
    neutral: float | None = None
    reference: Reference | None = None


@dataclass(frozen=True)
class Section:
    """Plots under one heading."""

    title: str
    panels: tuple[Panel, ...]


PUBLISHED_FLIPS = Reference(0.0005, "published reference 0.05 %")
"""Share of the codes that a step changes in BitNet (arXiv 2412.04787)."""

SECTIONS = (
    Section(
        "Learning",
        (
            Panel(
                "Bits per byte",
                "Independent of the tokenizer. Training: mean of an interval, before each update.",
                (
                    Line("bits_per_byte", "training"),
                    Line("held_out_bits_per_byte", "held out", is_evaluation=True),
                ),
                log=True,
                wide=True,
            ),
            Panel(
                "Loss",
                "Cross-entropy of all tokens, in nats.",
                (
                    Line("loss", "training"),
                    Line("held_out_loss", "held out", is_evaluation=True),
                ),
                log=True,
            ),
            Panel(
                "Objective",
                "What is minimised, where it is not the plain loss.",
                (Line("objective", "objective"), Line("loss", "loss")),
                log=True,
            ),
            Panel(
                "Validation texts",
                "Bits per byte of each text.",
                (Line("validation.*.bits_per_byte", is_evaluation=True),),
                log=True,
            ),
            Panel(
                "Learning rate",
                "At the interval's last step.",
                (Line("lr", "rate"),),
                from_zero=True,
            ),
            Panel(
                "Weight decay",
                "On matrices.",
                (Line("weight_decay", "decay"),),
                from_zero=True,
                neutral=0.0,
            ),
            Panel(
                "Quantization share λ",
                "W + λ(γ·code − W): ternary from λ = 1 on.",
                (Line("quantization_share", "λ"),),
                from_zero=True,
                neutral=1.0,
            ),
            Panel(
                "Batch size",
                "Samples in a step.",
                (Line("batch_size", "samples"),),
                unit="count",
                from_zero=True,
            ),
        ),
    ),
    Section(
        "Stability",
        (
            Panel(
                "Gradient norm",
                "Global L2 norm before clipping.",
                (Line("grad_norm", "mean"),),
                from_zero=True,
                log=True,
            ),
            Panel(
                "Gradient norm, how steady",
                "Over steps; over DP ranks, before they add up.",
                (
                    Line("grad_norm_std", "std over steps"),
                    Line("grad_norm_spread", "spread over ranks"),
                ),
                from_zero=True,
                log=True,
            ),
            Panel(
                "Skipped steps",
                "Not finite, or left out by the guard.",
                (Line("skipped", "steps"),),
                unit="count",
                from_zero=True,
                neutral=0.0,
            ),
            Panel(
                "Loss scale",
                "For fp16: halved when a gradient overflows.",
                (Line("loss_scale", "factor"),),
                from_zero=True,
                neutral=1.0,
            ),
        ),
    ),
    Section(
        "Ternary weights",
        (
            Panel(
                "Code flips",
                "Share of the codes that one step changed.",
                (Line("code_flips", "flips"),),
                unit="share",
                from_zero=True,
                reference=PUBLISHED_FLIPS,
            ),
            Panel(
                "Zeros",
                "Share of the codes that are 0.",
                (Line("zero_fraction", "zeros"),),
                unit="share",
                neutral=0.0,
            ),
            Panel(
                "Distance to the thresholds",
                "Mean | |w|/γ − ½ | of master weights w.",
                (Line("threshold_distance", "distance"),),
            ),
            Panel(
                "Saturation",
                "Share of int8 activations at ±127.",
                (Line("saturation", "saturated"),),
                unit="share",
                from_zero=True,
            ),
        ),
    ),
    Section(
        "Speed",
        (
            Panel(
                "Throughput",
                "Tokens in a second, all ranks together.",
                (Line("tokens_per_s", "tokens/s"),),
                unit="count",
                from_zero=True,
            ),
            Panel(
                "FLOP/s of a rank",
                "In the FLOPs of the dense model of the same shape.",
                (Line("tflops", "FLOP/s"),),
                unit="TFLOP/s",
                from_zero=True,
            ),
            Panel(
                "MFU",
                "Those FLOPs as a share of what the device can do.",
                (Line("mfu", "MFU"),),
                unit="share",
                from_zero=True,
            ),
            Panel(
                "Time of a step",
                "By phase; data is the time that it was waited for.",
                (
                    Line("time_s.forward_backward", "forward, backward"),
                    Line("time_s.gradients", "gradients"),
                    Line("time_s.update", "update"),
                    Line("time_s.data", "data"),
                    Line("time_s.other", "other"),
                ),
                unit="seconds",
                from_zero=True,
                stacked=True,
            ),
        ),
    ),
    Section(
        "Communication",
        (
            Panel(
                "Exposed communication",
                "Of a step; the rank that waits longest.",
                (Line("exposed_s.*"),),
                unit="seconds",
                from_zero=True,
                neutral=0.0,
            ),
            Panel(
                "Exposed share",
                "Of a step: in collectives, the pipeline's left out.",
                (Line("exposed_share", "exposed"),),
                unit="share",
                from_zero=True,
                neutral=0.0,
            ),
            Panel(
                "Waiting for data",
                "Share of the step, of the rank that waits longest.",
                (Line("data_share", "waiting"),),
                unit="share",
                from_zero=True,
            ),
            Panel(
                "Straggler",
                "Busy time of the slowest rank, over the median of the others of its stage.",
                (Line("straggler_ratio", "ratio"),),
            ),
            Panel(
                "Sent in a step",
                "By all ranks together, by axis.",
                (Line("sent_mb.*"),),
                unit="MB",
                from_zero=True,
                neutral=0.0,
            ),
            Panel(
                "Pipeline bubble",
                "Idle time for each unit of computing time.",
                (Line("bubble"),),
                unit="share",
                from_zero=True,
                neutral=0.0,
            ),
        ),
    ),
    Section(
        "Hardware",
        (
            Panel(
                "Memory",
                "Peak so far, of the process that has most.",
                (Line("memory_mib", "peak"),),
                unit="MiB",
                from_zero=True,
            ),
            Panel(
                "GPU utilization",
                "Of the least busy one.",
                (Line("gpu_utilization", "utilization"),),
                unit="share",
                from_zero=True,
            ),
            Panel("GPU power", "", (Line("gpu_power_w", "power"),), unit="W", from_zero=True),
            Panel(
                "GPU temperature",
                "Of the hottest one.",
                (Line("gpu_temperature_c", "temperature"),),
                unit="°C",
            ),
            Panel(
                "GPU memory",
                "Of the fullest one.",
                (Line("gpu_memory_mib", "in use"),),
                unit="MiB",
                from_zero=True,
            ),
            Panel(
                "GPU errors",
                "Uncorrected ECC and XID.",
                (Line("gpu_ecc_errors", "ECC"), Line("gpu_xid_errors", "XID")),
                unit="count",
                from_zero=True,
                neutral=0.0,
            ),
        ),
    ),
)

LAYER_PANELS = (
    Panel("Code flips", "", (Line("code_flips"),), unit="share"),
    Panel("Zeros", "", (Line("zero_fraction"),), unit="share"),
    Panel("Distance to the thresholds", "", (Line("threshold_distance"),)),
    Panel("Saturation", "", (Line("saturation"),), unit="share"),
)
"""Heat maps: what ``layers`` has of each layer."""
