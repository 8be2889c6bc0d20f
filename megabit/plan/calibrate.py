"""``megabit plan --calibrate``: the constants of this machine, measured in a few minutes.

    parts of small models (``part_samples``), on as many processes at once as there are cores
        → seconds of F, B and W, and the units of each term that they are made of (``compute``)
        → non-negative least squares (``fit``) → seconds for a unit: ``Rates``, by compute dtype
    messages between ranks (``link_samples``) → α and β: ``Network``

The shapes are chosen so that terms can be told apart: many tokens and few, wide and narrow, long
samples and short ones, a large vocabulary, ranks of TP 2 and 4; some have int8 or bf16 backward
products, dense layers, prenorm. Residuals are in the file (``Rates.errors``).

On a GPU the same parts are timed on the device, at larger shapes, and its links are those of
``catalog``, which are assumptions.
"""

import dataclasses
import datetime
import platform
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch

from megabit.config import (
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from megabit.doctor.machine import Machine as Host
from megabit.launch import run_ranks
from megabit.pipeline.plan import plan_stages
from megabit.plan.catalog import known_machine
from megabit.plan.fit import non_negative, relative_error
from megabit.plan.link_samples import CASES, LinkEffort, measure_links
from megabit.plan.machine import TERMS, Device, Machine, Network, Rates, Term
from megabit.plan.part_samples import LAYERS, Effort, Sample, measure_parts
from megabit.telemetry.utilization import known_peak
from megabit.training.shapes import RankShape

Progress = Callable[[float], None]
"""Is told which share is done."""


@dataclass(frozen=True)
class Probe:
    """A configuration that is measured."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    length: int
    batch: int
    vocab: int = 2048
    tp: int = 1
    act: str = "relu2"
    backward: str = "compute"
    linear: str = "ternary"
    norm: str = "subln"

    def shape(self, compute: str) -> RankShape:
        """Of rank 0."""
        model = ModelConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=LAYERS,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            hidden_act=self.act,  # type: ignore[arg-type]
            tie_word_embeddings=False,
            linear=self.linear,  # type: ignore[arg-type]
            norm_placement=self.norm,  # type: ignore[arg-type]
        )
        config = Config(
            model=model,
            parallel=ParallelConfig(tp=self.tp),
            precision=PrecisionConfig(
                compute=compute,  # type: ignore[arg-type]
                ternary_backward=self.backward,  # type: ignore[arg-type]
            ),
            data=DataConfig(seq_length=self.length),
            train=TrainConfig(micro_batch_size=self.batch, global_batch_size=self.batch),
        )
        return RankShape(config, self.tp, 0, plan_stages(config, 1))


CPU_PROBES = (
    Probe(256, 768, 4, 4, 256, 4, vocab=4096),
    Probe(512, 1536, 8, 4, 256, 4, vocab=8192, act="silu"),
    Probe(512, 1536, 8, 4, 256, 4, tp=2, act="silu"),
    Probe(512, 1536, 8, 4, 256, 4, tp=4),
    Probe(768, 2304, 12, 12, 256, 2),
    Probe(256, 768, 8, 8, 512, 2, vocab=1024),
    Probe(256, 768, 8, 8, 1024, 1, tp=2),
    Probe(256, 768, 4, 2, 128, 1, vocab=512),
    Probe(128, 384, 4, 4, 128, 2, tp=2),
    Probe(1024, 2816, 8, 8, 128, 2, tp=2, act="silu"),
    Probe(1024, 2048, 16, 16, 64, 2, vocab=1024),
    Probe(128, 512, 2, 2, 256, 8, vocab=16384),
    Probe(512, 1536, 8, 8, 256, 4, backward="int8"),
    Probe(512, 1536, 8, 8, 128, 2, tp=2, backward="int8"),
    Probe(512, 1536, 8, 8, 256, 4, backward="bfloat16"),
    Probe(512, 1536, 8, 8, 256, 2, linear="dense"),
    Probe(512, 1536, 8, 8, 256, 4, norm="prenorm"),
)
"""What ranks on a core compute in reasonable time."""

GPU_PROBES = (
    Probe(2048, 5632, 16, 16, 2048, 4, vocab=32768),
    Probe(4096, 11008, 32, 8, 2048, 2, vocab=32768, act="silu"),
    Probe(4096, 11008, 32, 8, 2048, 2, tp=2),
    Probe(4096, 11008, 32, 8, 2048, 2, tp=8, act="silu"),
    Probe(1024, 2816, 16, 16, 4096, 2, vocab=65536),
    Probe(1024, 2816, 8, 8, 512, 1),
    Probe(512, 1536, 8, 8, 256, 1, vocab=1024),
    Probe(2048, 5632, 16, 16, 8192, 1, tp=2),
    Probe(2560, 6912, 20, 5, 2048, 4, backward="int8"),
    Probe(2560, 6912, 20, 5, 2048, 2, tp=4, backward="int8"),
    Probe(2560, 6912, 20, 20, 2048, 2, linear="dense"),
)


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    cpu_probes: tuple[Probe, ...] = CPU_PROBES
    gpu_probes: tuple[Probe, ...] = GPU_PROBES
    parts: Effort = dataclasses.field(default_factory=Effort)
    links: LinkEffort = dataclasses.field(default_factory=LinkEffort)
    cases: tuple[tuple[int, int], ...] = CASES
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


def calibrate(
    progress: Progress = lambda share: None,
    device: torch.device | None = None,
    plan: Plan | None = None,
    created: Mapping[str, str] | None = None,
) -> Machine:
    """The machine at hand. Nothing else should run on it meanwhile.

    Args:
        device: a CUDA device, or the CPU: by default the CPU.
        plan: of the measurement; a smaller one for tests.
        created: more about where and with what, such as the commit.
    """
    plan, device = plan or Plan(), device or torch.device("cpu")
    facts = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **(created or {}),
    }
    machine = _gpu(device, plan, progress) if device.type == "cuda" else _cpu(plan, progress)
    return dataclasses.replace(machine, created=facts)


def fit_rates(samples: Sequence[Sample]) -> Rates:
    """Seconds for a unit of each term that occurs in ``samples``, and the errors of what was
    measured by kind.

    F, B and W of layers, the embedding, the head and the update have terms of their own, so each
    is a fit by itself: what one's counts miss does not bend the others.
    """
    seconds: dict[Term, float] = {}
    errors: dict[str, float] = {}
    for kinds in _groups(samples):
        group = [sample for sample in samples if sample.what in kinds]
        terms = [term for term in TERMS if any(sample.work.get(term) for sample in group)]
        rows = [[sample.work.get(term, 0.0) for term in terms] for sample in group]
        found = non_negative(rows, [sample.seconds for sample in group])
        seconds |= zip(terms, found, strict=True)
        for what in kinds:
            chosen = [i for i, sample in enumerate(group) if sample.what == what]
            errors[what] = relative_error(
                [rows[i] for i in chosen], found, [group[i].seconds for i in chosen]
            )
    return Rates(_with_likely(seconds), errors)


def _groups(samples: Sequence[Sample]) -> list[list[str]]:
    """Kinds of samples that are fitted together."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for what in dict.fromkeys(sample.what for sample in samples):
        part = what.partition(" ")[0]
        groups[what if part == "layer" else part].append(what)
    return [*groups.values()]


def _with_likely(seconds: dict[Term, float]) -> dict[Term, float]:
    """Terms that were not measured take what the nearest one does."""
    likely: tuple[tuple[Term, Term], ...] = (
        ("bfloat16 input gradient product", "input gradient product"),
        ("bfloat16 weight gradient product", "weight gradient product"),
        ("dense product", "weight gradient product"),
    )
    for missing, alike in likely:
        if missing not in seconds and alike in seconds:
            seconds[missing] = seconds[alike]
    return seconds


def _cpu(plan: Plan, progress: Progress) -> Machine:
    host = Host.here({})
    cores = max(1, int(host.usable))
    # First, while this process is small: ranks are its forks.
    links, base = measure_links(plan.links, lambda share: progress(0.3 * share), plan.cases)
    rates = {}
    for number, dtype in enumerate(plan.dtypes):

        def at(share: float, number: int = number) -> None:
            progress(0.3 + 0.7 * (number + share) / len(plan.dtypes))

        rates[dtype] = fit_rates(_samples_on_cores(plan, dtype, cores, at))
    pairs = {each.kind: each.link for each in links if (each.ranks, each.groups) == plan.cases[0]}
    return Machine(
        device=Device(
            name=f"{cores} cores of {platform.machine()}, {host.isa or 'no native kernels'}",
            memory_bytes=host.memory_bytes,
            base_bytes=base,
            rates=rates,
            peak_tflops={},
            is_shared=True,
            cores=cores,
            source="measured by megabit plan --calibrate",
        ),
        network=Network(intra=pairs, measured=tuple(links)),
        nodes_of=max(ranks * groups for ranks, groups in plan.cases),
        is_measured=True,
        source="measured by megabit plan --calibrate",
    )


def _samples_on_cores(plan: Plan, dtype: str, cores: int, progress: Progress) -> list[Sample]:
    """Of all probes, means over as many processes at once as there are cores."""
    samples: list[Sample] = []
    for number, probe in enumerate(_of_dtype(plan.cpu_probes, dtype)):
        progress(number / len(plan.cpu_probes))
        measure = partial(measure_parts, probe.shape(dtype), torch.device("cpu"), plan.parts)
        by_process = run_ranks(measure, cores)
        samples += [
            dataclasses.replace(alike[0], seconds=fmean(sample.seconds for sample in alike))
            for alike in zip(*by_process, strict=True)
        ]
    return samples


def _gpu(device: torch.device, plan: Plan, progress: Progress) -> Machine:
    name = torch.cuda.get_device_name(device)
    like = next((gpu for gpu in ("h200", "h100", "a100", "b200") if gpu.upper() in name), "h100")
    known = known_machine(like, 8, "ib400")
    rates, peaks = {}, {}
    for number, dtype in enumerate(plan.dtypes):
        samples: list[Sample] = []
        probes = _of_dtype(plan.gpu_probes, dtype)
        for done, probe in enumerate(probes):
            progress((number + done / len(probes)) / len(plan.dtypes))
            samples += measure_parts(probe.shape(dtype), device, plan.parts)
            torch.cuda.empty_cache()
        rates[dtype] = fit_rates(samples)
        peak = known_peak(name, dtype)
        if peak is not None:
            peaks[dtype] = peak
    free, total = torch.cuda.mem_get_info(device)
    measured = dataclasses.replace(
        known.device,
        name=name,
        memory_bytes=total,
        base_bytes=max(0, total - free - torch.cuda.memory_reserved(device)),
        rates=rates,
        peak_tflops=peaks,
        source="measured by megabit plan --calibrate",
    )
    return dataclasses.replace(
        known,
        device=measured,
        is_measured=True,
        source=f"device measured by megabit plan --calibrate; links: {known.source}",
    )


def _of_dtype(probes: Sequence[Probe], dtype: str) -> list[Probe]:
    """Those that differ from others in that dtype."""
    return [probe for probe in probes if probe.backward != dtype]
