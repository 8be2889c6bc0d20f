"""Gated feed-forward layer, SwiGLU or ReLU² GLU."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megabit.config import ModelConfig
from megabit.interop.huggingface import arithmetic
from megabit.model.linear import RowInput, column_linear, project, row_linear, sub_norm
from megabit.model.norm import Normalized
from megabit.model.recompute import recomputed
from megabit.tensor_parallel import PLAIN, BlockPartition, ForwardPass, LayerContext
from megabit_kernels import numerics


class MLP(nn.Module):
    """``down(act(gate(x)) · up(x))``, as a rule with a norm inside (``linear.RowInput``):
    ``Normalized [t, H]`` → ``[t, H]``."""

    def __init__(self, model: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        self.hidden_act = model.hidden_act
        self.rounds_as_huggingface = context.huggingface is not None
        partition = BlockPartition(model.intermediate_size, model.num_attention_heads)
        columns = partition.span(context.tp.rank, context.tp.size)
        self.gate_proj = column_linear(model, columns, context)
        self.up_proj = column_linear(model, columns, context)
        self.ffn_sub_norm = sub_norm(model, columns, context)
        self.before_down = RowInput(model, partition, self.ffn_sub_norm)
        self.down_proj = row_linear(model, columns, "down", context)

    def forward(
        self, x: Normalized, forward_pass: ForwardPass = PLAIN, selective: bool = False
    ) -> Tensor:
        """``selective``: keep gate and up only, and compute what follows again backward."""
        gate, up = project([self.gate_proj, self.up_proj], x, forward_pass)
        if selective:
            return recomputed(self._finish, (gate, up), forward_pass)
        return self._finish(gate, up, forward_pass)

    def _finish(self, gate: Tensor, up: Tensor, forward_pass: ForwardPass) -> Tensor:
        y = self.before_down(self._gated(gate, up), forward_pass)
        return self.down_proj(*y, forward_pass)

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.rounds_as_huggingface:
            return arithmetic.activation(gate, self.hidden_act) * up
        if not torch.is_grad_enabled():
            return numerics.gated_linear_unit(gate, up, self.hidden_act)
        glu = _Relu2Glu if self.hidden_act == "relu2" else _SwiGlu
        y: Tensor = glu.apply(gate, up)
        return y


class _SwiGlu(Function):
    """``silu(gate) · up``, saving only its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return numerics.gated_linear_unit(gate, up, "silu")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        sigmoid = numerics.sigmoid(gate)
        silu = sigmoid * gate
        d_up = grads[0] * silu
        # d silu = σ + silu · (1 − σ)
        d_silu = silu.mul_(1 - sigmoid).add_(sigmoid)
        return d_silu.mul_(up).mul_(grads[0]), d_up


class _Relu2Glu(Function):
    """``relu(gate)² · up``, saving only its inputs (autograd would save five tensors)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return numerics.gated_linear_unit(gate, up, "relu2")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        positive = gate.relu()
        by_positive = grads[0] * positive
        d_up = by_positive * positive
        return by_positive.mul_(up).mul_(2), d_up
