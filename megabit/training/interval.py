"""From the reports of single steps on each rank to one row for all of them.

All times are of the host's clock. On a GPU a collective is waited for on the device, and the host
goes on until it wants a number: there ``exposed_s`` and ``straggler_ratio`` show next to nothing.
"""

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice, product
from statistics import fmean, median, pstdev
from typing import Literal, get_args

import torch

from megabit.checkpoint.source import logical_tensors
from megabit.data.corpus import SplitInfo
from megabit.evaluation.text_loss import bits_per_byte
from megabit.mesh import ParallelMesh
from megabit.model.flops import flops_per_token
from megabit.reduce import Purpose, all_reduce
from megabit.telemetry import AXES, PHASES, GpuMetrics, GpuWatch, IntervalMetrics, LayerMetrics
from megabit.telemetry.utilization import peak_tflops, tflops_per_rank
from megabit.training.memory import peak_bytes
from megabit.training.probe import (
    COUNTS,
    StepProbe,
    layer_rows,
    over_layers,
    pack,
    spread,
    unpack,
)
from megabit.training.step import StepReport, TrainingState
from megabit.units import MB, MIB

SENT = [*product(AXES, get_args(Purpose))]
"""(axis, purpose) of what is counted."""
COLLECTIVE_AXES = tuple(axis for axis in AXES if axis != "pp")
"""Waiting over pp is the bubble, a figure of its own."""


class Interval:
    """Collects the steps since the last log line.

    Args:
        gpu: that of this rank, for as long as the run lasts; None: nothing is known of one.
    """

    def __init__(self, state: TrainingState, gpu: GpuWatch | None = None) -> None:
        self._state = state
        self._gpu = gpu
        self._reports: list[StepReport] = []
        self._seconds = 0.0
        self._phases: defaultdict[str, float] = defaultdict(float)
        self._sent: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._waited: defaultdict[str, float] = defaultdict(float)
        self._started = 0.0
        self._sent_before: dict[tuple[str, str], float] = {}
        self._waited_before: dict[str, float] = {}

    @property
    def steps(self) -> int:
        """How many have been collected."""
        return len(self._reports)

    @property
    def reports(self) -> Sequence[StepReport]:
        """Of these, in order."""
        return self._reports

    def begin_step(self) -> None:
        """Before the step's data is waited for; what happens between steps is not counted."""
        self._started = time.perf_counter()
        self._sent_before = self._state.mesh.sent()
        self._waited_before = self._state.mesh.waited_s()

    def has_batch(self) -> None:
        """When the data is there."""
        self._phases["data"] += time.perf_counter() - self._started

    def end_step(self, report: StepReport) -> None:
        """After the update."""
        mesh = self._state.mesh
        self._reports.append(report)
        self._seconds += time.perf_counter() - self._started
        for phase, seconds in report.phases.items():
            self._phases[phase] += seconds
        for key, total in mesh.sent().items():
            self._sent[key] += total - self._sent_before.get(key, 0.0)
        for axis, waited in mesh.waited_s().items():
            self._waited[axis] += waited - self._waited_before.get(axis, 0.0)
        if self._gpu is not None:
            self._gpu.sample()

    def metrics(self, step: int, split: SplitInfo) -> IntervalMetrics:
        """The means over the interval, the same on every rank; two collectives over the world.

        Args:
            step: steps done.
            split: the training split, for bits per byte.
        """
        state, config, count = self._state, self._state.config, self.steps
        mesh, ranks = state.mesh, state.mesh.world.size
        tensors = {n: t for n, t in logical_tensors(config.model).items() if t.is_ternary}
        sums = _reduced(self._sums(step, [*tensors]), mesh, "sum")
        maxima = _reduced(self._maxima(), mesh, "max")
        seconds = sums["seconds"][0] / ranks
        spent = dict(zip(PHASES[:-1], (s / ranks for s in sums["phases"]), strict=True))
        exposed = dict(zip(AXES, maxima["waited"], strict=True))
        sent = {
            " ".join(key): total / count / MB
            for key, total in zip(SENT, sums["sent"], strict=True)
            if total
        }
        by_axis = dict.fromkeys(AXES, 0.0)
        for name, megabytes in sent.items():
            by_axis[name.split()[0]] += megabytes
        layers = unpack(sums["layers"], [*tensors])
        probed = over_layers(layers, tensors)
        last, is_text = self._reports[-1], config.loss.objective == "language_model"
        updates = [report for report in self._reports if not report.is_skipped]
        norms = [report.grad_norm for report in updates]
        loss = _mean_of_tokens([(report.loss, report.num_tokens) for report in updates])
        tokens_per_s = sum(report.num_tokens for report in self._reports) / seconds
        # Embeddings are made of halves of a sample, and without a head.
        length = config.data.seq_length // (1 if is_text else 2)
        flops = flops_per_token(config.model, length, has_head=is_text).total
        tflops = tflops_per_rank(flops, tokens_per_s, ranks)
        peak = maxima["peak"][0]
        (busy_s,), (longest_s,) = sums["busy"], maxima["pipeline"]
        slowest = straggler(sums["computing"], sums["stage"])
        return IntervalMetrics(
            step=step,
            consumed_tokens=state.steps.tokens_before(step),
            loss=loss,
            objective=_mean_of_tokens([(r.objective, r.num_tokens) for r in updates]),
            bits_per_byte=bits_per_byte(loss, split) if is_text else math.nan,
            grad_norm=fmean(norms) if norms else math.nan,
            grad_norm_std=pstdev(norms) if norms else math.nan,
            grad_norm_spread=None if self._probe is None else spread(sums["squares"]),
            skipped=count - len(updates),
            lr=last.lr,
            weight_decay=last.weight_decay,
            quantization_share=last.quantization.share,
            batch_size=last.batch_size,
            loss_scale=last.loss_scale,
            tokens_per_s=tokens_per_s,
            tflops=tflops,
            mfu=tflops / peak if peak > 0 else None,
            step_s=seconds / count,
            time_s={
                **{phase: value / count for phase, value in spent.items()},
                PHASES[-1]: (seconds - sum(spent.values())) / count,
            },
            exposed_s={axis: waited / count for axis, waited in exposed.items()},
            exposed_share=maxima["blocked"][0] / seconds,
            data_share=maxima["data"][0] / seconds,
            straggler_ratio=None if slowest is None else slowest[0],
            straggler_rank=None if slowest is None else slowest[1],
            sent_mb=by_axis,
            sent_by_purpose_mb=sent,
            bubble=ranks * longest_s / busy_s - 1 if mesh.pp.size > 1 else 0.0,
            memory_mib=maxima["memory"][0] / MIB,
            zero_fraction=self._zero_fraction(probed, *sums["zeros"]),
            code_flips=probed.code_flips,
            threshold_distance=probed.threshold_distance,
            saturation=probed.saturation,
            gpu=GpuMetrics.from_maxima(maxima["gpu"]),
            layers=dict(layer_rows(layers)) if config.telemetry.per_layer else None,
        )

    @property
    def _probe(self) -> StepProbe | None:
        """The newest, of a step that changed weights if there is one; on all ranks or on none."""
        probed = [report for report in self._reports if report.probe is not None]
        probed.sort(key=lambda report: not report.is_skipped)
        return probed[-1].probe if probed else None

    def _sums(self, step: int, names: Sequence[str]) -> dict[str, list[float]]:
        """What is added up over ranks; ``names`` are all ternary weights of the model."""
        mesh, probe = self._state.mesh, self._probe
        world = mesh.world
        squares = [0.0] * mesh.dp.size
        if probe is not None:
            squares[mesh.dp.rank] = probe.local_square
        return {
            # Of each rank by itself: the others add 0 to its number.
            "computing": _at(world.rank, world.size, self._seconds - sum(self._waited.values())),
            "stage": _at(world.rank, world.size, mesh.pp.rank),
            "sent": [self._sent[key] for key in SENT],
            "busy": [sum(r.pipeline.seconds - r.pipeline.wait_s for r in self._reports)],
            "seconds": [self._seconds],
            "phases": [self._phases[phase] for phase in PHASES[:-1]],
            "zeros": [*self._zeros(step)],
            "squares": squares,
            "layers": [0.0] * (COUNTS * len(names)) if probe is None else pack(probe, names),
        }

    def _maxima(self) -> dict[str, list[float]]:
        """What the largest on any rank is wanted of."""
        state = self._state
        device, config = state.mesh.device, state.config
        peak = peak_tflops(device, config.precision.compute, config.telemetry.peak_tflops)
        gpu = GpuMetrics() if self._gpu is None else self._gpu.take()
        return {
            "pipeline": [sum(report.pipeline.seconds for report in self._reports)],
            "waited": [self._waited[axis] for axis in AXES],
            "blocked": [sum(self._waited[axis] for axis in COLLECTIVE_AXES)],
            "data": [self._phases["data"]],
            "memory": [peak_bytes(device)],
            "peak": [-math.inf if peak is None else peak],
            "gpu": gpu.as_maxima(),
        }

    def _zeros(self, step: int) -> tuple[int, int]:
        """Codes that are 0, and all, where no probe has counted them and there are codes."""
        state = self._state
        is_counted = any(r.probe is not None and not r.is_skipped for r in self._reports)
        # Every DP rank has the same codes; the others' may still be on their way.
        if is_counted or state.mesh.dp.rank != 0 or state.quantization_of(step).share < 1:
            return 0, 0
        return state.stages.zero_fraction()

    def _zero_fraction(self, probed: LayerMetrics, zeros: float, codes: float) -> float:
        if probed.zero_fraction is not None:
            return probed.zero_fraction
        if codes:
            return zeros / codes
        return 0.0 if self._state.config.model.linear == "dense" else math.nan


def straggler(busy_s: Sequence[float], stages: Sequence[float]) -> tuple[float, int] | None:
    """The rank that computes longest, as a multiple of the median of its peers, and its number.

    Peers are the other ranks of its stage, which have the same work; other stages have other work.

    Args:
        busy_s: seconds in which each rank was not blocked.
        stages: of each rank.

    Returns:
        None where no rank has peers.
    """
    ratios = []
    for stage in sorted(set(stages)):
        slowest, *peers = sorted(
            ((s, -rank) for rank, s in enumerate(busy_s) if stages[rank] == stage), reverse=True
        )
        usual = median(s for s, _ in peers) if peers else 0.0
        if usual > 0:
            ratios.append((slowest[0] / usual, -slowest[1]))
    return max(ratios, key=lambda pair: pair[0]) if ratios else None


def _at(index: int, size: int, value: float) -> list[float]:
    """``value`` among zeros."""
    values = [0.0] * size
    values[index] = value
    return values


def _mean_of_tokens(pairs: Sequence[tuple[float, int]]) -> float:
    """Of (mean, tokens); not a number if there are none."""
    tokens = sum(count for _, count in pairs)
    return sum(mean * count for mean, count in pairs) / tokens if tokens else math.nan


def _reduced(
    values: Mapping[str, Sequence[float]], mesh: ParallelMesh, op: Literal["sum", "max"]
) -> dict[str, list[float]]:
    """Each of ``values`` reduced over the world, in one collective of fp64 numbers."""
    own = [number for numbers in values.values() for number in numbers]
    packed = torch.tensor(own, dtype=torch.float64, device=mesh.device)
    reduced = iter(all_reduce(packed, mesh.world, op).tolist())
    return {name: [*islice(reduced, len(numbers))] for name, numbers in values.items()}
