"""A small ternary model of awkward shapes, made of megabit's layers and, beside it, of plain torch.

Rows do not divide evenly over 2 or 4 ranks, and one weight has fewer rows than there are ranks. The
plain model shares no code with megabit: straight-through estimator, norm and AdamW are written out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from megabit.config import Config, load_config
from megabit.data_parallel import ZeroOptimizer
from megabit.mesh import ParallelMesh
from megabit.model.norm import RMSNorm
from megabit.tensor_parallel import (
    ColumnParallelBitLinear,
    ColumnParallelLinear,
    LayerContext,
    Span,
    TernaryLayer,
    VocabParallelEmbedding,
    whole,
)

VOCAB, WIDTH, EPS = 50, 24, 1e-5
TERNARY = {"up": (36, WIDTH), "down": (21, 36), "seven": (7, 21), "three": (3, 21)}
"""Rows and columns by name; the last two have the same input, of odd width."""
SHAPES = {
    "embedding.weight": (VOCAB, WIDTH),
    "norm.weight": (WIDTH,),
    **{f"{name}.weight": shape for name, shape in TERNARY.items()},
    "sub_norm.weight": (21,),
    "head.weight": (VOCAB, 10),
}
NUM_ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES.values())
STEPS, MICROBATCHES, TOKENS = 20, 8, 12
CLIP = 0.145
BETAS = (0.9, 0.95)


def initial(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights by name: matrices N(0, 0.05), gains around 1."""
    generator = torch.Generator().manual_seed(4)
    draw = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: (1 + 0.2 * x if x.dim() == 1 else 0.05 * x).to(dtype) for name, x in draw.items()}


def tokens(step: int) -> Tensor:
    """Inputs and targets of all microbatches of a step: int64 ``[2, m, T]``."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(VOCAB, (2, MICROBATCHES, TOKENS), generator=generator)


def hyperparameters(step: int) -> tuple[float, float]:
    """Learning rate and weight decay: both change."""
    return 4e-3 * (1 - step / (2 * STEPS)), 0.1 if step < STEPS // 2 else 0.02


class Small(nn.Module):
    """Of megabit's layers, with ``initial`` values."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        context = LayerContext.single(dtype)

        def rows(size: int) -> Span:
            return whole(size, owned=True)

        self.embedding = VocabParallelEmbedding(rows(VOCAB), WIDTH, context)
        self.norm = RMSNorm(rows(WIDTH), EPS, context)
        self.up, self.down, self.seven, self.three = (
            ColumnParallelBitLinear(columns, rows(n), context) for n, columns in TERNARY.values()
        )
        self.sub_norm = RMSNorm(rows(21), EPS, context)
        self.head = ColumnParallelLinear(10, rows(VOCAB), context)
        for name, value in initial(dtype).items():
            self.get_parameter(name).data.copy_(value)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses of ``[T]`` tokens."""
        x = self.norm(self.embedding(inputs)).values
        x = self.sub_norm(self.down(F.silu(self.up(x)))).values
        x = torch.cat(self.seven.forward_together([self.seven, self.three], x), dim=-1)
        return F.cross_entropy(self.head(x), targets, reduction="sum")


def config_of(zero_stage: int, *settings: str) -> Config:
    """Several buckets of one or two tensors each."""
    optim = [f"optim.zero_stage={zero_stage}", f"optim.betas={list(BETAS)}"]
    return load_config([*optim, "parallel.bucket_mb=0.006", *settings])


@dataclass
class SmallRun:
    """The small model and its optimizer on the calling rank of a job that is all data-parallel."""

    mesh: ParallelMesh
    model: Small
    optimizer: ZeroOptimizer

    @staticmethod
    def create(config: Config, mesh: ParallelMesh) -> "SmallRun":
        model = Small(getattr(torch, config.precision.compute))
        return SmallRun(mesh, model, ZeroOptimizer.create(model, mesh, config))

    def backward(self, step: int, batch: Tensor | None = None) -> None:
        """The gradients of this rank's microbatches of ``batch``, by default ``tokens``."""
        batch = tokens(step) if batch is None else batch
        own = batch.chunk(self.mesh.dp.size, dim=1)[self.mesh.dp.rank]
        self.optimizer.gradients.begin_step(own.shape[1])
        for inputs, targets in own.unbind(1):
            (self.model(inputs, targets) / batch[0].numel()).backward()
        self.optimizer.finish_gradients()

    def step(self, step: int, batch: Tensor | None = None) -> float:
        """A whole step; returns the norm of its gradient."""
        self.backward(step, batch)
        norm = self.optimizer.gradient_norm(NUM_ELEMENTS)
        self.optimizer.step(min(1.0, CLIP / norm), *hyperparameters(step))
        return norm

    def layers(self) -> dict[str, TernaryLayer]:
        return {name: getattr(self.model, name) for name in TERNARY}

    def codes(self) -> dict[str, Tensor]:
        """Of all ternary layers, by the names of their weights."""
        return {f"{name}.weight": x.ternary().codes() for name, x in self.layers().items()}


def make_mesh() -> ParallelMesh:
    """All ranks of the job along DP."""
    return (
        ParallelMesh.create(1, 1, torch.device("cpu")) if dist.is_initialized() else ParallelMesh()
    )


# The same in plain torch.


class StraightThrough(Function):
    """The textbook ternary layer, ``x [T, K]``, ``w [N, K]`` → ``[T, N]``; exact integers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        gamma, q = plain_ternary(w)
        s = x.abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
        x_q = (x / s).round().clamp(-128, 127)
        ctx.save_for_backward(q * gamma, x_q * s)
        return (x_q.double() @ q.double().t()).to(x.dtype) * (s * gamma)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        w, x = ctx.saved_tensors
        return grads[0] @ w, grads[0].t() @ x


def plain_ternary(w: Tensor) -> tuple[Tensor, Tensor]:
    """γ and codes, as floats."""
    gamma = w.double().abs().mean().clamp_min(1e-5).to(w.dtype)
    return gamma, (w / gamma).round().clamp(-1, 1)


def plain_loss(weights: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    """What ``Small`` computes."""

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x * gain * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)

    def layer(x: Tensor, name: str) -> Tensor:
        return StraightThrough.apply(x, weights[f"{name}.weight"])

    x = norm(weights["embedding.weight"][inputs], weights["norm.weight"])
    x = norm(layer(F.silu(layer(x, "up")), "down"), weights["sub_norm.weight"])
    x = torch.cat([layer(x, "seven"), layer(x, "three")], dim=-1)
    return F.cross_entropy(x @ weights["head.weight"].t(), targets, reduction="sum")


@dataclass
class PlainRun:
    """A plain training loop of one process."""

    weights: dict[str, nn.Parameter]
    adam: torch.optim.AdamW

    @staticmethod
    def create(dtype: torch.dtype = torch.float32) -> "PlainRun":
        weights = {name: nn.Parameter(value) for name, value in initial(dtype).items()}
        gains = [w for w in weights.values() if w.dim() == 1]
        matrices = [w for w in weights.values() if w.dim() > 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": gains, "weight_decay": 0.0},
        ]
        return PlainRun(weights, torch.optim.AdamW(groups, betas=BETAS, foreach=False, fused=False))

    def step(self, step: int, batch: Tensor | None = None) -> float:
        """A step over all microbatches of ``batch``, by default ``tokens``; returns the norm of its
        gradient."""
        batch = tokens(step) if batch is None else batch
        self.adam.zero_grad()
        for inputs, targets in batch.unbind(1):
            (plain_loss(self.weights, inputs, targets) / batch[0].numel()).backward()
        gradients = [w.grad for w in self.weights.values() if w.grad is not None]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
        for gradient in gradients:  # torch's own clipping adds 1e-6 to the norm
            gradient.mul_(min(1.0, CLIP / norm))
        lr, weight_decay = hyperparameters(step)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.param_groups[0]["weight_decay"] = weight_decay
        self.adam.step()
        return norm

    def moment(self, kind: str) -> dict[str, Tensor]:
        return {name: self.adam.state[w][kind] for name, w in self.weights.items()}

    def codes(self) -> dict[str, Tensor]:
        names = [f"{name}.weight" for name in TERNARY]
        return {
            name: plain_ternary(self.weights[name].detach())[1].to(torch.int8) for name in names
        }
