"""Is the layout part of the model? Run the same training at several layouts and compare.

Each layout runs for a few steps in real ranks on this host (gloo, one thread each): the same
initialisation, samples, masks and recipe. What the ranks hold is put together again by logical
tensor and compared with one process. The masks are uneven on purpose, so that microbatches and DP
ranks have different numbers of target tokens.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megabit.checkpoint import MASTER_KINDS
from megabit.config import SCHEDULE_CHUNKS, Config, find_problems
from megabit.data.batches import Batch
from megabit.data.corpus import check_vocab, load_corpus, read_manifest
from megabit.data.sampler import TrainingSampler
from megabit.errors import UserError
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model.initialize import logical_normal
from megabit.pipeline.catalog import make_forward_schedule
from megabit.pipeline.execute import run_schedule
from megabit.reduce import is_same
from megabit.tensor_parallel import Shard, ternary_layers
from megabit.training.step import TrainingState, forward_backward, train_step

SampleSource = Callable[[int], np.ndarray]
"""Sample number → int64 ``[S + 1]``."""


@dataclass(frozen=True)
class Layout:
    """One way to lay the configured model over ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    layers_per_stage: tuple[int, ...] | None = None
    schedule: str | None = None
    """None: as configured, where there is a pipeline."""
    vpp: int | None = None
    """Stages on each pipeline rank; None: as the schedule has it."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        parts = [f"{axis}={size}" for axis, size in self._degrees() if size > 1]
        parts += ["sp"] * self.sequence_parallel
        if self.layers_per_stage is not None:
            parts.append("layers=" + "/".join(map(str, self.layers_per_stage)))
        parts += [] if self.schedule is None else [self.schedule]
        parts += [] if self.vpp is None else [f"vpp={self.vpp}"]
        return ",".join(parts) or "one process"

    def _degrees(self) -> list[tuple[str, int]]:
        return [("tp", self.tp), ("pp", self.pp), ("dp", self.dp)]

    @staticmethod
    def parse(text: str) -> "Layout":
        """From ``tp=2,pp=2``; ``sp`` is sequence parallelism, ``layers=3/1`` sets the stages, and
        ``pp=2,interleaved,vpp=3`` or ``pp=2,zb-v`` the schedule."""
        degrees: dict[str, int] = {"tp": 1, "pp": 1, "dp": 1}
        schedule: str | None = None
        sequence_parallel = False
        layers: tuple[int, ...] | None = None
        for part in map(str.strip, text.split(",")):
            key, _, value = part.partition("=")
            if part == "sp":
                sequence_parallel = True
            elif key == "layers" and all(count.isdigit() for count in value.split("/")):
                layers = tuple(map(int, value.split("/")))
            elif key in (*degrees, "vpp") and value.isdigit() and int(value) > 0:
                degrees[key] = int(value)
            elif part in SCHEDULE_CHUNKS or ":" in part:
                schedule = part
            else:
                raise UserError(
                    f"layout {text!r}: cannot read {part!r}; write it like tp=2,pp=2,sp,layers=3/1 "
                    f"or pp=2,zb-v; schedules: {', '.join(SCHEDULE_CHUNKS)}, my_file.py:function"
                )
        vpp = degrees.pop("vpp", None)
        return Layout(
            **degrees,
            sequence_parallel=sequence_parallel,
            layers_per_stage=layers,
            schedule=schedule,
            vpp=vpp,
        )

    @staticmethod
    def of(config: Config) -> "Layout":
        """The layout that ``config`` names; it leaves DP to the world size."""
        parallel = config.parallel
        stages = parallel.layers_per_stage
        return Layout(
            parallel.tp,
            parallel.pp,
            sequence_parallel=parallel.sequence_parallel,
            layers_per_stage=None if stages is None else tuple(stages),
        )

    def apply(self, config: Config) -> Config:
        """``config`` at this layout.

        Raises:
            UserError: the configured model does not fit it.
        """
        schedule, vpp = config.parallel.schedule, self.vpp or config.parallel.vpp
        if self.schedule is not None:
            schedule, vpp = self.schedule, self.vpp
        elif self.pp == 1:
            schedule, vpp = "1f1b", None  # no pipeline, whatever is configured for those
        parallel = dataclasses.replace(
            config.parallel,
            tp=self.tp,
            pp=self.pp,
            vpp=vpp,
            schedule=schedule,
            sequence_parallel=self.sequence_parallel,
            layers_per_stage=None if self.layers_per_stage is None else [*self.layers_per_stage],
        )
        config = dataclasses.replace(config, parallel=parallel)
        problems = find_problems(config, self.world_size)
        if problems:
            raise UserError(*(f"layout {self}: {problem}" for problem in problems))
        return config


@dataclass(frozen=True)
class Record:
    """What a layout computed, as logical tensors."""

    logits: Tensor
    """``[B · S, V]`` of the first microbatch, before any step"""
    gradients: dict[str, Tensor]
    """Of the first step, before clipping"""
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    """Master weights after the last step"""
    moments: dict[str, Tensor]
    """After the last step; names begin with ``exp_avg/`` or ``exp_avg_sq/``, Muon's with
    ``momentum/``"""
    codes: dict[str, Tensor]
    """After the last step"""


@dataclass(frozen=True)
class Difference:
    """One layout against one process. Relative differences are to the largest reference value."""

    layout: Layout
    forward_is_bit_equal: bool
    """Whether the logits before any step are."""
    logits: float
    loss: float
    """Of the first step, relative."""
    gradient: float
    """Of the first step, the largest over the logical tensors, relative."""
    gradient_name: str
    grad_norm: float
    """Of the first step, relative."""
    last_loss: float
    """Of the last step, relative."""
    weight: float
    """After the last step: the largest ‖difference‖ / ‖reference‖ of a logical tensor."""
    is_identical: bool
    """Whether all losses and gradient norms, and after the last step all master weights, moments
    and codes are bit-equal."""
    codes_changed: int
    """After the last step."""
    num_codes: int


@dataclass(frozen=True)
class Tolerance:
    """How far a layout may be from one process.

    The first step differs by the order of floating-point sums only. Then small differences grow:
    AdamW divides a gradient by its own size, so where it is near zero a rounding difference moves a
    weight by up to the learning rate, and a weight or activation near a rounding boundary takes
    another code.
    """

    loss: float
    """Of the first step."""
    gradient: float
    """Of the first step, and for the norm of the gradients."""
    last_loss: float
    weight: float
    codes: float
    """Share of the codes that may have changed after the last step."""
    forward_is_bit_equal: bool
    """Whether the forward pass may not differ at all."""
    is_identical: bool = False
    """Whether nothing may."""

    @staticmethod
    def of(config: Config) -> "Tolerance":
        if config.parallel.exact == "full":
            return Tolerance(0, 0, 0, 0, 0, forward_is_bit_equal=True, is_identical=True)
        # A dense row-parallel layer sums floats over TP, and fp64 products of other shapes may be
        # computed in another order; all sums of a ternary fp32 or bf16 forward pass are exact.
        exact = config.model.linear == "ternary" and config.precision.compute != "float64"
        if config.precision.compute == "float64":
            return Tolerance(1e-9, 1e-9, 1e-9, 1e-9, 0.0, exact)
        # Losses of microbatches are added in fp32, in another grouping over DP.
        loss = 1e-6
        precision = config.precision
        if precision.ternary_backward == "int8":
            # Rounding to 1/127 of a row's largest value, by other random numbers where a row spans
            # ranks; the products of a row average it.
            return Tolerance(loss, 2e-1, 1e-2, 1e-1, 3e-2, exact)
        if "bfloat16" in (precision.compute, precision.ternary_backward, precision.gradients):
            # Gradients, and a dense model's activations, are rounded to bf16 (2^-9) in every layer.
            return Tolerance(loss if exact else 1e-2, 5e-2, 1e-2, 5e-2, 1e-2, exact)
        # Sums of up to 2^13 fp32 terms, each rounded to 2^-24. Weights: where a gradient is nearly
        # zero, a step of the learning rate (2e-3) has either sign, against weights of 2e-2.
        return Tolerance(loss if exact else 1e-5, 1e-5, 1e-3, 1e-2, 1e-3, exact)

    def allows(self, difference: Difference) -> bool:
        """Whether ``difference`` is within it."""
        return (
            (difference.forward_is_bit_equal or not self.forward_is_bit_equal)
            and (difference.is_identical or not self.is_identical)
            and difference.loss <= self.loss
            and difference.gradient <= self.gradient
            and difference.grad_norm <= self.gradient
            and difference.last_loss <= self.last_loss
            and difference.weight <= self.weight
            and difference.codes_changed <= self.codes * difference.num_codes
        )


def compare_layouts(
    config: Config, layouts: Sequence[Layout], steps: int, report: Callable[[Difference], None]
) -> list[Difference]:
    """Run ``config`` at each layout and at one process for ``steps`` steps."""
    configs = [(layout, layout.apply(config)) for layout in layouts]
    samples = sample_source(config)
    reference = record(Layout().apply(config), Layout(), steps, samples)
    differences = []
    for layout, laid_out in configs:
        differences.append(compare(layout, record(laid_out, layout, steps, samples), reference))
        report(differences[-1])
    return differences


def sample_source(config: Config) -> SampleSource:
    """The prepared corpus in ``data.dir``, or random tokens where there is none."""
    folder, length = Path(config.data.dir), config.data.seq_length
    if read_manifest(folder) is not None:
        corpus = load_corpus(folder)
        check_vocab(corpus, config.model.vocab_size)
        return TrainingSampler(corpus.open_train(), length, config.train.seed).sample

    def random_sample(number: int) -> np.ndarray:
        rng = np.random.default_rng((config.train.seed, number))
        return rng.integers(config.model.vocab_size, size=length + 1)

    return random_sample


def record(config: Config, layout: Layout, steps: int, samples: SampleSource) -> Record:
    """Run ``config``, which is at ``layout``, in ranks of its own; put the results together."""
    return record_each([config], layout, steps, samples)[0]


def record_each(
    configs: Sequence[Config], layout: Layout, steps: int, samples: SampleSource
) -> list[Record]:
    """``record`` of several configurations, one after the other in the same ranks."""

    def run_rank() -> list[_RankRecord]:
        mesh = ParallelMesh.create(layout.tp, layout.pp, torch.device("cpu"))
        return [_run_rank(config, mesh, steps, samples) for config in configs]

    by_rank = run_ranks(run_rank, layout.world_size)
    return [_put_together(parts) for parts in zip(*by_rank, strict=True)]


def compare(layout: Layout, own: Record, reference: Record) -> Difference:
    """How far ``own`` is from ``reference``."""
    gradients = {
        name: _relative(own.gradients[name], gradient)
        for name, gradient in reference.gradients.items()
    }
    worst = max(gradients, key=lambda name: gradients[name])
    return Difference(
        layout=layout,
        forward_is_bit_equal=torch.equal(own.logits, reference.logits),
        logits=_relative(own.logits, reference.logits),
        loss=_relative_number(own.losses[0], reference.losses[0]),
        gradient=gradients[worst],
        gradient_name=worst,
        grad_norm=_relative_number(own.grad_norms[0], reference.grad_norms[0]),
        last_loss=_relative_number(own.losses[-1], reference.losses[-1]),
        weight=max(_relative_norm(own.weights[n], w) for n, w in reference.weights.items()),
        is_identical=_are_identical(own, reference),
        codes_changed=sum(
            int((own.codes[name] != codes).sum()) for name, codes in reference.codes.items()
        ),
        num_codes=sum(codes.numel() for codes in reference.codes.values()),
    )


def uneven_batch(config: Config, mesh: ParallelMesh, step: int, samples: SampleSource) -> Batch:
    """This rank's part of step ``step``, with another share of masked targets in each sample."""
    size, micro = config.train.global_batch_size, config.train.micro_batch_size
    per_rank = size // mesh.dp.size
    first = step * size + mesh.dp.rank * per_rank
    tokens, masks = [], []
    for number in range(first, first + per_rank):
        rng = np.random.default_rng((config.train.seed, number, 1))
        tokens.append(samples(number))
        masks.append(rng.random(config.data.seq_length) < rng.uniform(0.1, 1))
    shape = (-1, micro, config.data.seq_length)
    stacked = torch.from_numpy(np.stack(tokens))
    return Batch(
        stacked[:, :-1].reshape(shape),
        stacked[:, 1:].reshape(shape),
        torch.from_numpy(np.stack(masks)).view(shape),
    )


_Index = tuple[slice, ...]
_Owned = dict[str, list[tuple[Shard, _Index, Tensor]]]
"""By logical name: the parts of a tensor that a rank owns, and where they belong."""


@dataclass(frozen=True)
class _RankRecord:
    """The owned parts of a ``Record`` on one rank."""

    logits: Tensor | None
    gradients: _Owned
    losses: list[float]
    grad_norms: list[float]
    weights: _Owned
    moments: _Owned
    codes: _Owned


def _put_together(parts: Sequence[_RankRecord]) -> Record:
    return Record(
        logits=torch.cat([part.logits for part in parts if part.logits is not None], dim=1),
        gradients=_assemble([part.gradients for part in parts]),
        losses=parts[0].losses,
        grad_norms=parts[0].grad_norms,
        weights=_assemble([part.weights for part in parts]),
        moments=_assemble([part.moments for part in parts]),
        codes=_assemble([part.codes for part in parts]),
    )


def _run_rank(config: Config, mesh: ParallelMesh, steps: int, samples: SampleSource) -> _RankRecord:
    state = TrainingState.create(config, mesh)
    _vary_gains(state)
    batch = uneven_batch(config, mesh, 0, samples)
    logits = _first_logits(state, batch)
    forward_backward(state, batch, step=0)
    gradients = _owned(state, {"gradient": ""})
    reports = [
        train_step(state, uneven_batch(config, mesh, step, samples), step) for step in range(steps)
    ]
    return _RankRecord(
        logits,
        gradients,
        [report.loss for report in reports],
        [report.grad_norm for report in reports],
        weights=_owned(state, {"master": ""}),
        moments=_owned(state, {kind: f"{kind}/" for kind in MASTER_KINDS if kind != "master"}),
        codes=_owned_codes(state),
    )


@torch.no_grad()
def _vary_gains(state: TrainingState) -> None:
    """Norm gains begin as ones, which would hide what is done with them."""
    for piece in state.optimizer.pieces():
        if len(piece.shard.shape) == 1:
            (index,) = piece.index
            shape = (*piece.shard.shape, 1)
            seed = state.config.train.seed
            noise = logical_normal(seed, piece.name, shape, index.start, index.stop)
            piece.tensors["master"].copy_(1 + 0.2 * noise[:, 0])
    state.optimizer.publish()


def _first_logits(state: TrainingState, batch: Batch) -> Tensor | None:
    """This rank's columns of the first microbatch's logits; None where another rank has them."""
    stages = state.stages
    result = run_schedule(
        make_forward_schedule(state.plan.schedule.placement, 1),
        stages,
        [batch.inputs[0]],
        lambda hidden, microbatch, forward_pass: stages.logits(hidden),
        state.mesh.pp,
    )
    if not result.outputs or state.mesh.dp.rank:
        return None
    return result.outputs[0].clone()


def _owned(state: TrainingState, kinds: dict[str, str]) -> _Owned:
    """What this rank alone reports of the optimizer's ``kinds``, which map to prefixes of names,
    where there are any."""
    owned: _Owned = {}
    for piece in state.optimizer.pieces(owned=True):
        for kind, prefix in kinds.items():
            if kind not in piece.tensors:
                continue
            part = piece.shard, piece.index, piece.tensors[kind].clone()
            owned.setdefault(prefix + piece.name, []).append(part)
    return owned


def _owned_codes(state: TrainingState) -> _Owned:
    owned: _Owned = {}
    digest = hashlib.sha256()
    for layer in ternary_layers(state.stages):
        digest.update(layer.ternary().packed().cpu().numpy().tobytes())
    if not is_same(digest.digest(), state.mesh.dp, state.mesh.device):
        raise AssertionError("DP ranks have different codes")
    for layer in ternary_layers(state.stages) if state.mesh.dp.rank == 0 else ():
        shard = layer.weight.shard
        index = [slice(0, size) for size in shard.shape]
        index[shard.dim] = slice(shard.span.owned_start, shard.span.owned_stop)
        codes = shard.owned(layer.ternary().codes()).clone()
        owned[f"{layer.name}.weight"] = [(shard, tuple(index), codes)]
    return owned


def _assemble(parts: Sequence[_Owned]) -> dict[str, Tensor]:
    """Logical tensors from the parts that ranks own; each element must come exactly once."""
    logical: dict[str, Tensor] = {}
    seen: dict[str, int] = {}
    for name, pieces in (item for part in parts for item in part.items()):
        for shard, index, tensor in pieces:
            logical.setdefault(name, tensor.new_zeros(shard.shape))[index] = tensor
            seen[name] = seen.get(name, 0) + tensor.numel()
    for name, whole in logical.items():
        if seen[name] != whole.numel():
            raise AssertionError(f"{name}: ranks own {seen[name]} of {whole.numel()} elements")
    return logical


def _are_identical(own: Record, reference: Record) -> bool:
    numbers = [(r.losses, r.grad_norms) for r in (own, reference)]
    tensors = [{**r.weights, **r.moments, **r.codes} for r in (own, reference)]
    return numbers[0] == numbers[1] and all(
        torch.equal(tensors[0][name], tensor) for name, tensor in tensors[1].items()
    )


def _relative_norm(own: Tensor, reference: Tensor) -> float:
    own, reference = own.double(), reference.double()
    return float(((own - reference).norm() / reference.norm()).nan_to_num(nan=math.inf))


def _relative_number(own: float, reference: float) -> float:
    return _relative(*torch.tensor([own, reference], dtype=torch.float64))


def _relative(own: Tensor, reference: Tensor) -> float:
    own, reference = own.double(), reference.double()
    difference = (own - reference).abs().max() / reference.abs().max().clamp_min(1e-30)
    return float(difference.nan_to_num(nan=math.inf))  # a NaN must lose every comparison
