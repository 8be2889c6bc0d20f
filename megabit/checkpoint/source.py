"""A model on disk, whatever its format: what importers, exporters and loaders ask of one.

Names and shapes are those of logical tensors, and follow from the ``ModelConfig``. A source is
read tensor by tensor, or slice by slice, and keeps none of it: who copies a model needs memory for
one tensor, and a rank reads its own part only.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from megabit.config import ModelConfig

Index = tuple[slice, ...]
"""Part of a logical tensor: one slice for each dimension, with step 1 and both ends given."""


@dataclass(frozen=True)
class LogicalTensor:
    """What a model's tensor is, apart from its values."""

    shape: tuple[int, ...]
    is_ternary: bool

    @property
    def whole(self) -> Index:
        """The index of all of it."""
        return tuple(slice(0, size) for size in self.shape)


def logical_tensors(model: ModelConfig) -> dict[str, LogicalTensor]:
    """Every tensor of a model by its name, in the order of the forward pass."""
    hidden, ffn = model.hidden_size, model.intermediate_size
    kv = model.num_key_value_heads * model.head_dim
    is_ternary = model.linear == "ternary"
    tensors = {"model.embed_tokens.weight": LogicalTensor((model.vocab_size, hidden), False)}
    for index in range(model.num_hidden_layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.q_proj.rms_norm": (hidden,),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.k_proj.rms_norm": (hidden,),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.v_proj.rms_norm": (hidden,),
            "self_attn.attn_sub_norm": (hidden,),
            "self_attn.o_proj": (hidden, hidden),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.gate_proj.rms_norm": (hidden,),
            "mlp.up_proj": (ffn, hidden),
            "mlp.up_proj.rms_norm": (hidden,),
            "mlp.ffn_sub_norm": (ffn,),
            "mlp.down_proj": (hidden, ffn),
        }
        for name, shape in layer.items():
            if len(shape) == 1 and not _has_gain(model, name):
                continue
            tensors[f"model.layers.{index}.{name}.weight"] = LogicalTensor(
                shape, is_ternary and len(shape) == 2
            )
    tensors["model.norm.weight"] = LogicalTensor((hidden,), False)
    if not model.tie_word_embeddings:
        tensors["lm_head.weight"] = LogicalTensor((model.vocab_size, hidden), False)
    return tensors


def _has_gain(model: ModelConfig, norm: str) -> bool:
    """Whether the norm of that name, in a layer, has a gain in the model."""
    match model.norm_placement:
        case "in_linear":
            return False
        case "prenorm":
            return norm.endswith("layernorm")
        case "subln":
            return not norm.endswith("rms_norm")
        case "per_proj":
            return True


def row_slices(index: Index, elements: int) -> Iterator[Index]:
    """``index`` in parts of about so many elements, each of at least a row: how what is too large
    for memory is gone through. Of no rows, one part of none."""
    rows, *others = index
    step = max(1, elements // max(1, math.prod(part.stop - part.start for part in others)))
    for start in range(rows.start, rows.stop, step) or [rows.start]:
        yield (slice(start, min(start + step, rows.stop)), *others)


class ModelSource(Protocol):
    """A model on disk."""

    @property
    def path(self) -> Path:
        """For messages."""

    @property
    def model(self) -> ModelConfig:
        """Its shape and options."""

    @property
    def max_length(self) -> int:
        """Positions that the model was made for."""

    @property
    def has_masters(self) -> bool:
        """Whether ternary weights are there as latent weights, which an optimizer can go on from,
        or as codes and scales only."""

    @property
    def assets(self) -> Mapping[str, Path]:
        """Small files that travel with the model, by name: ``tokenizer.json``, and what else a
        tool that made the model wants kept."""

    def values(self, name: str, index: Index | None = None) -> Tensor:
        """Part of a dense tensor, or of a master weight, in the dtype that it is stored in.

        Raises:
            UserError: it is a ternary weight and there are no masters, or it cannot be read.
        """

    def codes(self, name: str, index: Index | None = None) -> Tensor:
        """Part of a ternary weight as canonical packed codes: uint8 ``[n, ceil(k/4)]``. Columns
        begin at a multiple of 4."""

    def scale(self, name: str) -> Tensor:
        """γ of a ternary weight, fp32, 0-dimensional: that of the whole logical tensor."""
