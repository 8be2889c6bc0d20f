"""The ternary-native ZeRO optimizer: fp32 masters and moments in parts, codes for everyone.

A rank of the model holds codes and γ of ternary weights and dense replicas of the rest; masters and
moments are here only, and from ``zero_stage`` 1 on each DP rank has its part of them (``layout``).
One step is

    gradients' sums over DP (``buckets``) → tied copies → max|g| and Σg² over the world: clip, or
    all ranks skip → AdamW, or Muon, on the part → Σ|W| of all tensors, one integer all-reduce → γ,
    codes of the part → codes and dense replicas to all DP ranks (``publish``)

Sums that decide for all, Σg² and Σ|W|, are integers (``megabit_kernels.numerics``): no order of
ranks changes them.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megabit.config import Config
from megabit.config.validate_cluster import COMPRESSED
from megabit.data_parallel.adam import build_adam, set_hyperparameters
from megabit.data_parallel.buckets import Bucket, GradientBuckets, tied_totals
from megabit.data_parallel.codecs import codec_of
from megabit.data_parallel.layout import REDUCED_EACH_MICROBATCH, Kind, lay_out
from megabit.data_parallel.masters import Master, Piece
from megabit.data_parallel.muon import Muon, is_muons
from megabit.data_parallel.probe import WeightCounts, count_changes, own_codes
from megabit.data_parallel.publish import Publisher
from megabit.data_parallel.reduction import GradientReduction
from megabit.mesh import ParallelMesh
from megabit.reduce import Line, all_reduce
from megabit.tensor_parallel import (
    ShardedParameter,
    TernaryLayer,
    WeightScale,
    sharded_parameters,
)
from megabit_kernels import numerics, square_sum


@dataclass
class ZeroOptimizer:
    """The optimizer of a rank's stages, and the way of its gradients and weights over DP."""

    mesh: ParallelMesh
    gradients: GradientBuckets
    masters: list[Master]
    adam: torch.optim.Optimizer
    publisher: Publisher
    tied: tuple[ShardedParameter, ShardedParameter | None] | None
    """The embedding, and its second use as a head if that is on this rank with a gradient of its
    own."""
    is_sharded: bool
    muon: Muon | None = None
    """Updates what AdamW does not; None where AdamW updates everything."""
    updates: int = 0
    """How often weights were updated; steps that were skipped do not count."""
    plan: "_BucketPlan" = field(kw_only=True)
    """How tensors are put into buckets."""

    @staticmethod
    def create(
        stages: nn.Module,
        mesh: ParallelMesh,
        config: Config,
        tied: tuple[ShardedParameter, ShardedParameter | None] | None = None,
        chunk_of: Callable[[str], int] = lambda name: 0,
        share: float = 1.0,
    ) -> "ZeroOptimizer":
        """Take over the values and gradients of ``stages``' parameters; collective over the mesh.

        Afterwards its ternary layers hold codes only.

        Args:
            tied: the tied embedding, where this rank has it.
            chunk_of: which of the rank's stages a parameter belongs to, by its name.
            share: λ of the first forward pass; below 1 the layers hold W̃ (``publish``).
        """
        layers = {
            f"{name}.weight": module
            for name, module in stages.named_modules()
            if isinstance(module, TernaryLayer)
        }
        initial = sharded_parameters(stages)
        values = {name: parameter.detach() for name, parameter in initial.items()}
        dtype = next(iter(values.values())).dtype
        compute_dtype = getattr(torch, config.precision.compute)
        for layer in layers.values():
            layer.give_up_latent()
        parameters = [
            (name, p, _kind(name in layers, p)) for name, p in sharded_parameters(stages).items()
        ]
        for _, parameter, kind in parameters:
            if kind == "matrix":
                parameter.data = parameter.data.to(compute_dtype)
        if tied is not None and tied[1] is not None:
            tied[1].data = tied[0].data
            parameters.append(("second use", tied[1], "second use"))
        is_sharded = config.optim.zero_stage > 0 and mesh.dp.size > 1
        with_muon = config.optim.name == "muon"
        plan = _BucketPlan(
            config,
            mesh,
            parameters,
            is_sharded,
            muons={name for name, _, kind in parameters if with_muon and is_muons(name, kind)},
            coded={n for n, p, kind in parameters if is_coded(kind, p.shard.numel, config)},
            chunk_of=chunk_of,
        )
        buckets = plan.buckets(config.parallel.bucket_mb)
        gradients = GradientBuckets(
            buckets,
            mesh,
            dtype,
            _reduction(config, mesh, dtype),
            reduces_each_microbatch=config.optim.zero_stage == 2 and mesh.dp.size > 1,
            gathers_sums=not is_sharded,
        )
        masters = [Master.of(bucket, values, mesh, is_sharded, dtype) for bucket in buckets]
        optimizer = ZeroOptimizer(
            mesh,
            gradients,
            masters,
            plan.adam(masters),
            Publisher(mesh, layers, compute_dtype, is_sharded, WeightScale.of(config.model)),
            tied,
            is_sharded,
            plan.muon(masters),
            plan=plan,
        )
        gradients.collect()
        optimizer.publisher.publish(masters, share)
        return optimizer

    @torch.no_grad()
    def relayout(self, bucket_mb: float) -> None:
        """Put everything into buckets of another size; collective over the stage. No bit of any
        update changes by it: a rank has the same rows of each tensor in any bucket, and all sums
        are of single elements. Between two steps only."""
        self.publisher.settle()
        kept = {(p.name, p.rows.start): _copied(p.tensors) for p in self.pieces()}
        lost = self.gradients.reduction.take_lost()
        buckets = self.plan.buckets(bucket_mb)
        dtype = self.gradients.dtype
        self.masters = [Master.of(b, {}, self.mesh, self.is_sharded, dtype) for b in buckets]
        self.gradients.buckets = buckets
        self.adam, self.muon = self.plan.adam(self.masters), self.plan.muon(self.masters)
        self.begin_restore(self.updates)
        for piece in self.pieces():
            for kind, values_of in kept[piece.name, piece.rows.start].items():
                piece.tensors[kind].copy_(values_of)
        self.gradients.reduction.give_lost(lost, [bucket.layout for bucket in buckets])
        self.gradients.collect()

    def finish_gradients(self) -> None:
        """Complete the sums of this rank's parts; collective over DP, and over the two pipeline
        ranks that hold a tied embedding."""
        self.gradients.finish()
        if self.tied is None:
            return
        embedding, second_use = self.tied
        total = tied_totals(self.gradients.buckets, embedding)
        if second_use is not None:
            head = tied_totals(self.gradients.buckets, second_use)
            total += head
            head.zero_()
        elif self.mesh.embedding.size > 1:
            total.copy_(
                all_reduce(total.contiguous(), self.mesh.embedding, purpose="weight gradients")
            )

    def gradient_norm(self, num_elements: int) -> float:
        """L2 norm of the whole model's gradient, the same on every rank; inf if anything in it is
        not finite. Each logical element counts once, however many ranks hold it.

        Args:
            num_elements: of the whole model.
        """
        mesh = self.mesh
        owned = [rows for m in self.masters for rows in _gradients(m, owned=True)]
        counts = self.is_sharded or mesh.dp.rank == 0
        largest = torch.zeros((), dtype=torch.float64, device=mesh.device)
        # Of all rows: a replica that nobody counts would apply what is not finite in it, too.
        for rows in (rows for m in self.masters for rows in _gradients(m, owned=False)):
            bounds = torch.stack(torch.aminmax(rows)).double()
            largest = torch.maximum(largest, bounds.abs().amax())
        largest = largest.nan_to_num(nan=math.inf, posinf=math.inf)
        agreed = all_reduce(largest, mesh.island, "max").item()
        if not math.isfinite(agreed):
            return math.inf
        total = torch.zeros((), dtype=torch.int64, device=mesh.device)
        for rows in owned if counts else []:
            total += square_sum(rows, agreed, num_elements)
        return numerics.norm_from_fixed_point(all_reduce(total, mesh.island), agreed, num_elements)

    @torch.no_grad()
    def clip_values(self, limit: float) -> None:
        """Cut every element of the complete gradient down to the magnitude ``limit``, instead of
        scaling all of it by its norm. Sends nothing: each element is cut where it is.

        An infinite element would be cut down as well: ``gradient_norm`` must have found none. The
        limit is in units of what ``finish_gradients`` has summed up, with the scale of the loss.
        """
        for master in self.masters:
            assert master.bucket.total is not None
            master.bucket.total.clamp_(-limit, limit)

    @torch.no_grad()
    def step(
        self, scale: float, lr: float, weight_decay: float, share: float = 1.0, watch: bool = False
    ) -> dict[str, WeightCounts] | None:
        """Update the masters with ``scale`` · gradients, and publish; collective over the stage.

        Args:
            share: λ of the next forward pass.
            watch: count what the update does to the codes of this rank's part, by name of weight.
        """
        publisher, dp_rank = self.publisher, self.mesh.dp.rank
        before = own_codes(self.masters, publisher.scales, dp_rank) if watch else None
        publisher.settle()  # what still travels may be the masters' own memory
        for master in self.masters:
            total = master.bucket.total
            assert total is not None
            master.weights.grad = total if scale == 1 else total.mul_(scale)
        set_hyperparameters(self.adam, lr, weight_decay)
        self.adam.step()
        if self.muon is not None:
            self.muon.step(lr, weight_decay)
        self.updates += 1
        for master in self.masters:
            master.weights.grad = master.bucket.total = None
        publisher.publish(self.masters, share)
        if before is None:
            return None
        return count_changes(self.masters, publisher.scales, dp_rank, before)

    def pieces(self, owned: bool = False) -> Iterator[Piece]:
        """What this rank updates, by tensor and part; the same on every DP rank if nothing is
        sharded. Views: writing to them changes the optimizer (then ``publish``).

        Args:
            owned: only what this rank counts where others hold the same: over all ranks, every
                element once.
        """
        own = range(self.mesh.dp.rank, self.mesh.dp.rank + 1) if owned else None
        for master in self.masters:
            kept = {"master": master.weights.detach(), **self._moments(master)}
            if master.bucket.total is not None:
                kept["gradient"] = master.bucket.total
            for slot in master.bucket.layout.slots:
                if self.tied is not None and slot.parameter is self.tied[1]:
                    continue
                shape = slot.parameter.shape[1:]
                views = {key: [*master.held(slot, x, owned, own)] for key, x in kept.items()}
                for i, (rows, _) in enumerate(views["master"]):
                    tensors = {key: v[i][1].view(-1, *shape) for key, v in views.items()}
                    yield Piece(slot.name, slot.parameter.shard, rows, tensors)

    def begin_restore(self, updates: int) -> None:
        """Make room for the moments after so many updates; ``pieces`` then has views of them to
        fill, and of the masters. To be ended by ``publish``."""
        self.updates = updates
        self.adam.state.clear()
        if self.muon is not None:
            self.muon.momentum.clear()
        for group in self.adam.param_groups:
            if "step" in group:  # apex counts by group
                group["step"] = updates
        if not updates:
            return
        if self.muon is not None:
            self.muon.restore()
        for weights in (w for group in self.adam.param_groups for w in group["params"]):
            self.adam.state[weights] = {
                "step": torch.tensor(float(updates), device=weights.device),
                "exp_avg": torch.zeros_like(weights.detach()),
                "exp_avg_sq": torch.zeros_like(weights.detach()),
            }

    def publish(self, share: float = 1.0) -> None:
        """Publish masters that were written to; collective over the stage.

        Args:
            share: λ of the next forward pass.
        """
        self.publisher.publish(self.masters, share)

    def skip(self) -> None:
        """Instead of ``step``: drop the gradients. What a codec has lost of them goes with them."""
        self.gradients.reduction.forget()

    def nbytes(self) -> dict[str, int]:
        """Bytes on this rank by what they are: what stays from step to step, and of gradients their
        sums at the end of backward."""
        moments = [x for master in self.masters for x in self._moments(master).values()]
        return {
            "gradients": self.gradients.height,
            "masters": sum(master.weights.nbytes for master in self.masters),
            "moments": sum(x.nbytes for x in moments),
            **self.publisher.nbytes(self.masters),
        }

    def _moments(self, master: Master) -> dict[str, Tensor]:
        """What the master's optimizer keeps beside it, from its first update on."""
        if self.muon is not None and master.weights in self.muon.momentum:
            return {"momentum": self.muon.momentum[master.weights]}
        state = self.adam.state.get(master.weights, {})
        return {key: state[key] for key in ("exp_avg", "exp_avg_sq") if key in state}


def is_coded(kind: Kind, numel: int, config: Config) -> bool:
    """Whether gradients of such a tensor lose something on their way over DP.

    Args:
        numel: of the logical tensor.
    """
    is_lossy = config.precision.gradients in COMPRESSED
    is_matrix = kind in REDUCED_EACH_MICROBATCH
    return is_lossy and is_matrix and numel >= config.communication.min_numel


def _reduction(config: Config, mesh: ParallelMesh, dtype: torch.dtype) -> GradientReduction:
    wire = config.precision.gradients
    return GradientReduction(
        mesh,
        dtype,
        wire_dtype=torch.bfloat16 if wire == "bfloat16" else dtype,
        codec=codec_of(config),
        with_feedback=config.communication.error_feedback and wire != "ternary",
        seed=config.train.seed,
        line=Line(begins_when_here=mesh.device.type == "cpu"),
    )


def _kind(is_ternary: bool, parameter: ShardedParameter) -> Kind:
    if is_ternary:
        return "ternary"
    if parameter.dim() > 1:
        return "matrix"
    return "partial gain" if parameter.shard.grad_is_partial else "gain"


@dataclass(frozen=True)
class _BucketPlan:
    """The tensors of a rank's stages, and what decides which of them share a bucket."""

    config: Config
    mesh: ParallelMesh
    parameters: Sequence[tuple[str, ShardedParameter, Kind]]
    is_sharded: bool
    muons: Collection[str]
    """Names of what Muon updates."""
    coded: Collection[str]
    """Names of what travels coded."""
    chunk_of: Callable[[str], int]

    def buckets(self, bucket_mb: float) -> list[Bucket]:
        def group_of(name: str) -> int:  # a bucket has one optimizer, and one way to travel
            return 4 * self.chunk_of(name) + 2 * (name in self.coded) + (name in self.muons)

        layouts = lay_out(self.parameters, self.mesh.dp.size, bucket_mb, group_of)
        return [
            Bucket(layout, number, layout.slots[0].name in self.coded)
            for number, layout in enumerate(layouts)
        ]

    def adam(self, masters: Sequence[Master]) -> torch.optim.Optimizer:
        own = [master for master in masters if master.name not in self.muons]
        decays = [m.bucket.layout.kind in ("ternary", "matrix") for m in own]
        weights = [*zip(own, decays, strict=True)]
        return build_adam(
            [m.weights for m, d in weights if d],
            [m.weights for m, d in weights if not d],
            self.config.optim,
        )

    def muon(self, masters: Sequence[Master]) -> Muon | None:
        own = [master for master in masters if master.name in self.muons]
        if not own:
            return None
        names = [name for name, _, _ in self.parameters]
        return Muon.create(own, names, self.mesh, self.config.optim, self.is_sharded)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {kind: tensor.clone() for kind, tensor in tensors.items()}


def _gradients(master: Master, owned: bool) -> Iterator[Tensor]:
    assert master.bucket.total is not None
    for slot in master.bucket.layout.slots:
        for _, rows in master.held(slot, master.bucket.total, owned):
            yield rows
