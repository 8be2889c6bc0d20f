"""Gated feed-forward layer, SwiGLU or ReLU² GLU, with a SubLN before the down projection."""

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from megabit.config import ModelConfig
from megabit.model.linear import linear_types
from megabit.model.norm import Normalized, RMSNorm
from megabit.tensor_parallel import BlockPartition, LayerContext


class MLP(nn.Module):
    """``down(norm(act(gate(x)) · up(x)))``: ``Normalized [t, H]`` → ``[t, H]``."""

    def __init__(self, model: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        self.hidden_act = model.hidden_act
        partition = BlockPartition(model.intermediate_size, model.num_attention_heads)
        columns = partition.span(context.tp.rank, context.tp.size)
        column, row = linear_types(model)
        self.gate_proj = column(model.hidden_size, columns, context)
        self.up_proj = column(model.hidden_size, columns, context)
        self.ffn_sub_norm = RMSNorm(columns, model.rms_norm_eps, context)
        self.down_proj = row(columns, model.hidden_size, context)

    def forward(self, x: Normalized) -> Tensor:
        gate, up = self.gate_proj.forward_together([self.gate_proj, self.up_proj], *x)
        y = _Relu2Glu.apply(gate, up) if self.hidden_act == "relu2" else F.silu(gate) * up
        return self.down_proj(*self.ffn_sub_norm(y))


class _Relu2Glu(Function):
    """``relu(gate)² · up`` [T, f], saving only its inputs (autograd would save five tensors)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate.relu().square_().mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        positive = gate.relu()
        by_positive = grads[0] * positive
        d_up = by_positive * positive
        return by_positive.mul_(up).mul_(2), d_up
