"""Logits as Hugging Face's ``BitNetForCausalLM``, or a ternary LLaMA, computes them: what an import
is checked against.

Plain torch on one process, one layer in memory at a time. On the CPU, with as many threads, the
result is bit-equal to that of ``transformers`` 5.24 (``arithmetic``). It is for checks: training
and evaluation use int8 products (``megabit_kernels``), whose logits differ by rounding.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from megabit.checkpoint.source import ModelSource, logical_tensors
from megabit.errors import UserError
from megabit.interop.expressible import check_expressible
from megabit.interop.huggingface import arithmetic
from megabit.interop.huggingface.arithmetic import Attention, Linear
from megabit.interop.huggingface.config import Quantization
from megabit.interop.huggingface.scales import stored_scale
from megabit.interop.huggingface.source import HuggingFaceSource
from megabit_kernels.packing import unpack


@dataclass(frozen=True)
class HuggingFaceMode:
    """Which of transformers' computations is meant."""

    quantization: Quantization
    dtype: torch.dtype = torch.bfloat16
    """The model's, as ``from_pretrained`` gets it."""
    attention: Attention = "sdpa"
    compiled: bool = True
    """As transformers does, which needs a C++ compiler; without it as where compiling is off."""


def mode_of(source: HuggingFaceSource) -> HuggingFaceMode:
    """What ``from_pretrained`` without further arguments makes of a checkpoint.

    Raises:
        UserError: it is no ternary checkpoint.
    """
    if source.quantization is None:
        raise UserError(
            f"{source.path}: is a dense {source.architecture}; hf mode is that of a model with "
            "quantization_config"
        )
    return HuggingFaceMode(source.quantization, source.dtype)


@torch.no_grad()
def huggingface_logits(source: ModelSource, tokens: Tensor, mode: HuggingFaceMode) -> Tensor:
    """Logits ``[B, S, V]`` in ``mode.dtype`` for ``tokens``, int64 ``[B, S]``.

    Args:
        source: in mode ``online`` one that has master weights.

    Raises:
        UserError: transformers has no such model.
    """
    model, dtype = source.model, mode.dtype
    is_online = mode.quantization.mode == "online"
    check_expressible(source, "hf mode", True, "use mode offline" if is_online else None)
    has_sub_norms = model.norm_placement == "subln"

    def values(name: str) -> Tensor:
        return source.values(f"{name}.weight").to(dtype)

    norm = partial(arithmetic.rms_norm, eps=model.rms_norm_eps)
    tables = arithmetic.rotary_tables(tokens.shape[1], model.head_dim, model.rope_theta, dtype)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, model.head_dim)).transpose(1, 2)

    x = F.embedding(tokens, values("model.embed_tokens"))
    for index in range(model.num_hidden_layers):
        layer = f"model.layers.{index}"
        linear = partial(_linear, source, mode, layer)
        h = norm(x, values(f"{layer}.input_layernorm"))
        q, k, v = (heads(linear(f"self_attn.{part}_proj")(h)) for part in "qkv")
        q, k = (arithmetic.rotate(part, *tables) for part in (q, k))
        h = arithmetic.attend(q, k, v, mode.attention)
        if has_sub_norms:
            h = norm(h, values(f"{layer}.self_attn.attn_sub_norm"))
        x = x + linear("self_attn.o_proj")(h)
        h = norm(x, values(f"{layer}.post_attention_layernorm"))
        gate = arithmetic.activation(linear("mlp.gate_proj")(h), model.hidden_act)
        h = gate * linear("mlp.up_proj")(h)
        if has_sub_norms:
            h = norm(h, values(f"{layer}.mlp.ffn_sub_norm"))
        x = x + linear("mlp.down_proj")(h)
    head = "model.embed_tokens" if model.tie_word_embeddings else "lm_head"
    return F.linear(norm(x, values("model.norm")), values(head))


def _linear(source: ModelSource, mode: HuggingFaceMode, layer: str, part: str) -> Linear:
    """A layer's product with one of its ternary weights."""
    name = f"{layer}.{part}.weight"
    if mode.quantization.mode == "online":
        return arithmetic.online_linear(source.values(name).to(mode.dtype), mode.compiled)
    k = logical_tensors(source.model)[name].shape[1]
    codes = unpack(source.codes(name), k).to(mode.dtype)
    linear_class = mode.quantization.linear_class
    scale = stored_scale(source, name, linear_class).to(mode.dtype)
    of_class = {"autobitlinear": arithmetic.auto_linear, "bitlinear": arithmetic.bit_linear}
    return of_class[linear_class](codes, scale, mode.compiled)
