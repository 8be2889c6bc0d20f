"""Greedy generation by a dense model in plain torch: what a ternary model of that shape replaces.

Eager, as a short script would have it: the layers of ``baselines``, a cache of keys and values that
is allocated once, ``F.scaled_dot_product_attention`` over what is in it. Weights and activations
are bf16 and random.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megabit.benchmark.baselines import Attention, DenseLinear, Layer, Norm, rotated
from megabit.config import ModelConfig

DTYPE = torch.bfloat16
STD = 0.02


class DenseGenerator:
    """A dense model of the shape of ``model``, on one device.

    Args:
        sequences: side by side at most.
        length: tokens of a sequence at most, its prompt included.
    """

    def __init__(
        self, model: ModelConfig, sequences: int, length: int, device: torch.device
    ) -> None:
        self._device = device
        with torch.device("meta"):  # to be filled where it is, not to be copied there
            layers = [Layer(model, 0.0, DenseLinear, DTYPE) for _ in range(model.num_hidden_layers)]
            self._layers = nn.ModuleList(layers)
            self._norm = Norm(model.hidden_size, model.rms_norm_eps, dtype=DTYPE)
            self._embedding = nn.Embedding(model.vocab_size, model.hidden_size, dtype=DTYPE)
            self._head = DenseLinear(model.hidden_size, model.vocab_size, DTYPE)
        for module in (self._layers, self._norm, self._embedding, self._head):
            module.to_empty(device=device)
            for parameter in module.parameters():
                with torch.no_grad():
                    parameter.normal_(0, STD) if parameter.dim() > 1 else parameter.fill_(1)
        if model.tie_word_embeddings:
            self._head.weight = self._embedding.weight
        exponent = torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
        angle = torch.outer(torch.arange(length).double(), model.rope_theta**-exponent)
        self._cos, self._sin = (table.to(device, DTYPE) for table in (angle.cos(), angle.sin()))
        shape = (sequences, model.num_key_value_heads, length, model.head_dim)
        self._cache = [
            (
                torch.zeros(shape, dtype=DTYPE, device=device),
                torch.zeros(shape, dtype=DTYPE, device=device),
            )
            for _ in layers
        ]

    @torch.inference_mode()
    def generate(self, prompts: Tensor, new_tokens: int) -> int:
        """Continue ``prompts [B, S]``; how many tokens were made, once they are here."""
        tokens, start = prompts.to(self._device), 0
        made = []
        for _ in range(new_tokens):
            made.append(self._likeliest(tokens, start))
            start += tokens.shape[1]
            tokens = made[-1]
        return torch.cat(made, 1).cpu().numel()

    def _likeliest(self, tokens: Tensor, start: int) -> Tensor:
        """Tokens ``[B, S]`` of positions from ``start`` on → the next ones ``[B, 1]``."""
        x = self._embedding(tokens)
        for layer, cache in zip(self._layers, self._cache, strict=True):
            assert isinstance(layer, Layer)
            x = x + self._attended(layer.self_attn, layer.input_layernorm(x), cache, start)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits: Tensor = self._head(self._norm(x[:, -1:]))
        return logits.argmax(-1)

    def _attended(
        self, attention: Attention, x: Tensor, cache: tuple[Tensor, Tensor], start: int
    ) -> Tensor:
        batch, length, _ = x.shape
        end = start + length
        q, k, v = (
            proj(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        tables = self._cos[start:end], self._sin[start:end]
        keys, values = (kept[:batch, :, :end] for kept in cache)
        keys[:, :, start:] = rotated(k, *tables)
        values[:, :, start:] = v
        y = F.scaled_dot_product_attention(
            rotated(q, *tables),
            keys,
            values,
            is_causal=length > 1,
            enable_gqa=attention.is_grouped,
        )
        result: Tensor = attention.o_proj(attention.attn_sub_norm(y.transpose(1, 2).flatten(2)))
        return result
