"""What is computed without gradients has the bits of what is computed with them."""

import pytest
import torch

from megabit.config import ModelConfig
from megabit.model.mlp import MLP
from megabit.model.norm import RMSNorm, hidden_norm
from megabit.model.rope import RotaryEmbedding, rotate
from megabit.tensor_parallel import LayerContext, ternarize_layers, ternary_layers

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
MODEL = ModelConfig(hidden_size=72, intermediate_size=104, num_attention_heads=4)


def context_in(dtype: torch.dtype) -> LayerContext:
    wide = torch.promote_types(dtype, torch.float32)
    return LayerContext(LayerContext.single().tp, torch.device("cpu"), dtype, wide, dtype)


@DTYPES
@pytest.mark.parametrize("activation", ["relu2", "silu"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_a_norm_and_an_mlp(dtype: torch.dtype, activation: str, tokens: int) -> None:
    model = ModelConfig(**{**vars(MODEL), "hidden_act": activation})
    context = context_in(dtype)
    torch.manual_seed(0)
    norm, mlp = hidden_norm(model, context), MLP(model, context)
    for name, parameter in [*norm.named_parameters(), *mlp.named_parameters()]:
        torch.nn.init.uniform_(parameter, -1 if "proj" in name else 0.5)
    ternarize_layers(list(ternary_layers(mlp)), context.tp)
    x = torch.randn(tokens, model.hidden_size, dtype=dtype)
    normalized = norm(x.requires_grad_())
    y = mlp(normalized)
    assert y.requires_grad
    with torch.no_grad():
        without = norm(x)
        assert torch.equal(without.values, normalized.values)
        assert torch.equal(without.absmax, normalized.absmax)
        assert torch.equal(mlp(without), y)


@DTYPES
def test_what_a_norm_computes(dtype: torch.dtype) -> None:
    """The absmax is exactly that of the values before they are rounded to the compute dtype."""
    norm = hidden_norm(MODEL, context_in(dtype))
    assert isinstance(norm, RMSNorm)
    assert norm.weight is not None
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(5, MODEL.hidden_size, dtype=dtype)
    with torch.no_grad():
        values, absmax = norm(x)
    wide = x.to(absmax.dtype)
    rstd = torch.rsqrt(wide.square().sum(-1, keepdim=True) / MODEL.hidden_size + MODEL.rms_norm_eps)
    expected = wide * norm.weight.detach().to(wide.dtype) * rstd
    assert torch.equal(values, expected.to(dtype))
    assert torch.equal(absmax, expected.abs().amax(-1, keepdim=True))


@DTYPES
def test_a_rotation(dtype: torch.dtype) -> None:
    x = torch.randn(2, 9, 3, 10, dtype=dtype)
    tables = RotaryEmbedding(10, 16, 10_000.0, torch.device("cpu")).tables(9, dtype)
    with_gradients = rotate(x.requires_grad_(), *tables)
    with torch.no_grad():
        without = rotate(x, *tables)
        a, b = x.chunk(2, -1)
        cos, sin = tables
        expected = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    assert with_gradients.requires_grad
    assert torch.equal(without, with_gradients)
    assert torch.equal(without, expected)
