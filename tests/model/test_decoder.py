"""The decoder on one process: Hugging Face's names, and a plain implementation's logits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megabit.config import Config, DataConfig, ModelConfig, PrecisionConfig, load_config
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages, build_stages, num_parameters
from megabit.model.mlp import _Relu2Glu
from megabit.model.rope import RotaryEmbedding, rotate
from megabit.tensor_parallel import sharded_parameters
from megabit_kernels import numerics

BATCH, LENGTH = 2, 7
MODEL = ModelConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=68,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    initializer_range=0.3,  # large, so that attention and activations are far from linear
)


def stage_of(model: ModelConfig, compute: str = "float64") -> CausalLMStages:
    config = Config(
        model=model,
        precision=PrecisionConfig(compute=compute),  # type: ignore[arg-type]
        data=DataConfig(seq_length=LENGTH),
    )
    stage = build_stages(config, ParallelMesh())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # gains of ones would hide a norm in the wrong place
        for parameter in stage.parameters():
            if parameter.dim() == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return stage


def tokens_of(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(MODEL.vocab_size, (BATCH, LENGTH), generator=generator)


# Names and sizes


@pytest.mark.parametrize("tied", [True, False])
def test_names_are_those_of_hugging_face(tied: bool) -> None:
    """``BitNetForCausalLM``'s, with its ``tie_word_embeddings``."""
    stage = stage_of(replace(MODEL, tie_word_embeddings=tied))
    per_layer = {
        "input_layernorm.weight": (48,),
        "self_attn.q_proj.weight": (48, 48),
        "self_attn.k_proj.weight": (16, 48),
        "self_attn.v_proj.weight": (16, 48),
        "self_attn.attn_sub_norm.weight": (48,),
        "self_attn.o_proj.weight": (48, 48),
        "post_attention_layernorm.weight": (48,),
        "mlp.gate_proj.weight": (68, 48),
        "mlp.up_proj.weight": (68, 48),
        "mlp.ffn_sub_norm.weight": (68,),
        "mlp.down_proj.weight": (48, 68),
    }
    expected = {
        "model.embed_tokens.weight": (97, 48),
        **{f"model.layers.{i}.{name}": s for i in range(2) for name, s in per_layer.items()},
        "model.norm.weight": (48,),
    }
    if not tied:
        expected["lm_head.weight"] = (97, 48)
    assert {name: tuple(p.shape) for name, p in stage.named_parameters()} == expected
    assert list(stage.state_dict()) == list(expected)  # in this order; no buffer is stored


@pytest.mark.parametrize("tied", [True, False])
def test_number_of_parameters(tied: bool) -> None:
    model = replace(MODEL, tie_word_embeddings=tied)
    parameters = sharded_parameters(stage_of(model)).values()
    assert num_parameters(model) == sum(parameter.shard.numel for parameter in parameters)
    assert num_parameters(model) == sum(parameter.numel() for parameter in parameters)


# Parts


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def hugging_face_rope(x: Tensor, theta: float) -> Tensor:
    """``x [B, S, heads, D]``, by the formula of ``apply_rotary_pos_emb``."""
    length, head_dim = x.shape[1], x.shape[-1]
    inverse = 1 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * inverse
    table = torch.cat((angle, angle), -1)[:, None]
    return x * table.cos() + rotate_half(x) * table.sin()


def test_rotary_positions() -> None:
    x = torch.randn(2, LENGTH, 3, 8, dtype=torch.float64)
    rope = RotaryEmbedding(8, 4 * LENGTH, 10_000.0, torch.device("cpu"))
    tables = rope.tables(LENGTH, torch.float64)
    # The same products in fp64; angles and sums are rounded once or twice more.
    torch.testing.assert_close(
        rotate(x, *tables), hugging_face_rope(x, 10_000.0), rtol=1e-13, atol=1e-13
    )
    assert torch.equal(rotate(x, *tables)[:, 0], x[:, 0])  # position 0
    leaf = x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, *tables), leaf)
    assert torch.autograd.gradcheck(
        lambda x: rotate(x.transpose(0, 2), *(t[:1] for t in tables)), x[:, :1]
    )


def test_relu2_glu() -> None:
    gate, up = (torch.randn(5, 6, dtype=torch.float64).requires_grad_() for _ in range(2))
    grad = torch.randn(5, 6, dtype=torch.float64)
    found = _Relu2Glu.apply(gate, up)
    expected = gate.relu().square() * up
    assert torch.equal(found, expected)
    pairs = zip(
        torch.autograd.grad(found, (gate, up), grad, retain_graph=True),
        torch.autograd.grad(expected, (gate, up), grad),
        strict=True,
    )
    for a, b in pairs:  # the same four factors, multiplied in another order
        torch.testing.assert_close(a, b, rtol=1e-15, atol=0)
    assert torch.autograd.gradcheck(_Relu2Glu.apply, (gate, up))
    zero = torch.zeros(1, requires_grad=True)
    (d_zero,) = torch.autograd.grad(_Relu2Glu.apply(zero, torch.ones(1)), zero)
    assert d_zero.item() == 0  # smooth at the kink


# The whole


def plain_logits(weights: dict[str, Tensor], model: ModelConfig, tokens: Tensor) -> Tensor:
    """A second implementation of the model, after Hugging Face's ``modeling_bitnet.py``."""
    batch, length = tokens.shape
    linear = F.linear if model.linear == "dense" else numerics.fake_quantized_linear

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[name], model.rms_norm_eps)

    def heads_of(x: Tensor) -> Tensor:
        return x.view(batch, length, -1, model.head_dim)

    x = weights["model.embed_tokens.weight"][tokens.flatten()]
    future = torch.full((length, length), -torch.inf, dtype=x.dtype).triu(1)
    for i in range(model.num_hidden_layers):
        layer = f"model.layers.{i}."
        h = norm(x, layer + "input_layernorm.weight")
        q, k, v = (heads_of(linear(h, weights[f"{layer}self_attn.{n}_proj.weight"])) for n in "qkv")
        q, k = hugging_face_rope(q, model.rope_theta), hugging_face_rope(k, model.rope_theta)
        groups = model.num_attention_heads // model.num_key_value_heads
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / model.head_dim**0.5 + future
        h = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(batch * length, -1)
        h = norm(h, layer + "self_attn.attn_sub_norm.weight")
        x = x + linear(h, weights[layer + "self_attn.o_proj.weight"])
        h = norm(x, layer + "post_attention_layernorm.weight")
        gate, up = (linear(h, weights[f"{layer}mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        h = (F.silu(gate) if model.hidden_act == "silu" else gate.relu() ** 2) * up
        h = norm(h, layer + "mlp.ffn_sub_norm.weight")
        x = x + linear(h, weights[layer + "mlp.down_proj.weight"])
    head = "model.embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"
    return F.linear(norm(x, "model.norm.weight"), weights[head])


@pytest.mark.parametrize("linear", ["dense", "ternary"])
@pytest.mark.parametrize("hidden_act", ["relu2", "silu"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_a_plain_implementation(linear: str, hidden_act: str, tied: bool, kv_heads: int) -> None:
    model = replace(
        MODEL,
        linear=linear,  # type: ignore[arg-type]
        hidden_act=hidden_act,  # type: ignore[arg-type]
        tie_word_embeddings=tied,
        num_key_value_heads=kv_heads,
    )
    stage, tokens = stage_of(model), tokens_of()
    targets = tokens_of(seed=1)
    mask = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 3 > 0
    hidden = stage(tokens)
    loss = stage.loss(hidden, targets, mask)
    found = torch.autograd.grad(loss, tuple(stage.parameters()))

    weights = {name: p.detach().clone().requires_grad_() for name, p in stage.named_parameters()}
    logits = plain_logits(weights, model, tokens)
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
    expected = losses[mask.flatten()].sum()
    wanted = torch.autograd.grad(expected, tuple(weights.values()))
    # fp64 through two layers. A code could flip only if a value lay within 1e-13 of a tie.
    torch.testing.assert_close(stage.logits(hidden), logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    for name, a, b in zip(weights, found, wanted, strict=True):
        largest = b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10 * largest, msg=name)


@pytest.mark.parametrize("linear", ["dense", "ternary"])
def test_the_future_does_not_change_the_past(linear: str) -> None:
    stage = stage_of(replace(MODEL, linear=linear), "float32")  # type: ignore[arg-type]
    tokens = tokens_of()
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % MODEL.vocab_size
    before, after = (
        stage.logits(stage(t)).view(BATCH, LENGTH, MODEL.vocab_size) for t in (tokens, changed)
    )
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_samples_of_a_batch_do_not_see_each_other() -> None:
    stage = stage_of(MODEL, "float32")
    tokens = tokens_of()
    changed = tokens.clone()
    changed[1] = (changed[1] + 1) % MODEL.vocab_size
    before, after = (stage.logits(stage(t))[:LENGTH] for t in (tokens, changed))
    assert torch.equal(before, after)


def test_the_shape_of_bitnet_2b4t_has_its_number_of_parameters() -> None:
    root = Path(__file__).resolve().parents[2]
    config = load_config([str(root / "examples" / "model" / "bitnet_2b4t.yaml")])
    # What the tensors of microsoft/bitnet-b1.58-2B-4T add up to.
    assert num_parameters(config.model) == 2_412_820_480
