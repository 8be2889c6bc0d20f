"""``config.json`` of Hugging Face's ``transformers`` ↔ ``ModelConfig``.

Reading takes ``BitNetForCausalLM``, and models of LLaMA's architecture, which have no SubLN: dense
ones, from which training can start, and ternary ones such as Falcon-E. What megabit's model does
not have is refused by name: to leave it out would give another model. Keys that are absent have the
defaults of the class in ``transformers`` that reads the file; writing leaves none to them, since
the classes differ (``tie_word_embeddings``, positions).

Sources: ``transformers``, ``models/bitnet/configuration_bitnet.py`` and those of llama, mistral and
qwen2; ``utils/quantization_config.py`` (``BitNetQuantConfig``); ``modeling_rope_utils.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megabit.config import Config, ModelConfig, find_problems
from megabit.errors import UserError
from megabit.interop.json_fields import Fields, read_json, shown
from megabit_kernels.formats.huggingface import LinearClass

BITNET = "BitNetForCausalLM"

Mode = Literal["offline", "online"]
"""What transformers calls ``quantization_mode``."""

_COMMON = {"initializer_range": 0.02, "tie_word_embeddings": False}
_LLAMA = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, **_COMMON}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    BITNET: {
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 2048,
        **_COMMON,
    },
    "LlamaForCausalLM": {
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        **_LLAMA,
    },
    "MistralForCausalLM": {
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        **_LLAMA,
    },
    "Qwen2ForCausalLM": {
        "max_position_embeddings": 32_768,
        "use_sliding_window": False,
        **_LLAMA,
    },
}
"""The architectures that are read, and what their classes take absent keys for."""

MAX_LAYERS = 10_000
MAX_LENGTH = 2**24
"""More than any model has: names of all tensors, and tables of all positions, are made."""

_NEVER_TERNARY = {"lm_head", "lm_head.weight", "embed_tokens", "model.embed_tokens", "model.norm"}
"""What ``modules_to_not_convert`` may name: modules that are not ternary in megabit either."""

_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True)
class Quantization:
    """How a model holds its ternary weights and computes with them.

    Raises:
        UserError: ``bitlinear`` holds packed codes only, so it cannot be ``online``.
    """

    mode: Mode = "offline"
    """``offline``: codes and scales; ``online``: master weights, quantized in each forward pass."""
    linear_class: LinearClass = "autobitlinear"
    """What a scale means (``megabit_kernels.formats.huggingface``), and where is rounded."""

    def __post_init__(self) -> None:
        if self.mode == "online" and self.linear_class != "autobitlinear":
            raise UserError(
                f"linear_class: {self.linear_class} holds packed codes only; "
                "mode online needs autobitlinear"
            )


@dataclass(frozen=True)
class HuggingFaceConfig:
    """What a checkpoint's ``config.json`` says."""

    architecture: str
    model: ModelConfig
    max_length: int
    quantization: Quantization | None
    """None: dense weights."""
    dtype: torch.dtype | None
    """What is computed in, where it is named."""


def read_config(path: Path) -> HuggingFaceConfig:
    """Read and check a ``config.json``.

    Raises:
        UserError: it is not the configuration of a model that megabit has.
    """
    tree = read_json(path)
    fields = Fields(path, tree)
    named = tree.get("architectures")
    architecture = named[0] if isinstance(named, list) and len(named) == 1 else None
    if not isinstance(architecture, str) or architecture not in DEFAULTS:
        fields.refuse("architectures", f"a list of one of {', '.join(DEFAULTS)}")
    fields = Fields(path, tree, DEFAULTS[architecture])
    _refuse_what_megabit_lacks(fields)
    return HuggingFaceConfig(
        architecture,
        _model(fields, architecture),
        fields.integer("max_position_embeddings", MAX_LENGTH),
        _quantization(fields),
        _dtype(fields),
    )


def config_tree(
    model: ModelConfig,
    max_length: int,
    quantization: Quantization,
    dtype: torch.dtype,
    token_ids: Mapping[str, Any],
) -> dict[str, Any]:
    """``config.json`` of a ``BitNetForCausalLM``.

    Args:
        token_ids: ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``.
    """
    dtype_name = str(dtype).removeprefix("torch.")
    return {
        "architectures": [BITNET],
        "model_type": "bitnet",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "hidden_act": model.hidden_act,
        "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": max_length,
        # transformers 4.5x reads the first of these two, and of the dtypes; 5.x the second.
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "torch_dtype": dtype_name,
        "dtype": dtype_name,
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": model.initializer_range,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        **token_ids,
        "quantization_config": {
            "quant_method": "bitnet",
            "linear_class": quantization.linear_class,
            "quantization_mode": quantization.mode,
            "modules_to_not_convert": ["lm_head"],
            "use_rms_norm": False,
        },
    }


def _model(fields: Fields, architecture: str) -> ModelConfig:
    heads = fields.integer("num_attention_heads")
    says_none = fields.get("num_key_value_heads") is None and any(
        "num_key_value_heads" in tree for tree in (fields.tree, fields.defaults)
    )
    model = ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers", MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=heads if says_none else fields.integer("num_key_value_heads"),
        hidden_act=fields.choice("hidden_act", ("silu", "relu2")),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope_theta=_rope_theta(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        initializer_range=fields.number("initializer_range"),
        norm_placement="subln" if architecture == BITNET else "prenorm",
    )
    head_dim = fields.get("head_dim")
    if head_dim is not None and fields.integer("head_dim") * heads != model.hidden_size:
        fields.refuse("head_dim", f"hidden_size/num_attention_heads = {model.hidden_size}/{heads}")
    problems = [p for p in find_problems(Config(model=model)) if p.startswith("model")]
    if problems:
        raise UserError(f"{fields.path}: {problems[0]}")
    return model


def _rope_theta(fields: Fields) -> float:
    """The base of plain rotary positions; ``rope_parameters`` holds it since transformers 5."""
    for key in ("rope_parameters", "rope_scaling"):
        section = fields.section(key, {"rope_type": "default", "rope_theta": None})
        if section is None:
            continue
        for name in ("rope_type", "type"):  # the second in old files
            if name in section.tree and section.tree[name] != "default":
                section.refuse(name, "default: megabit has no scaled rotary positions")
        _refuse_partial_rotation(section)
        unknown = section.tree.keys() - _ROPE_KEYS
        if unknown:
            section.refuse(min(unknown), "left out: megabit has plain rotary positions only")
        if section.get("rope_theta") is not None:
            return section.number("rope_theta")
    return fields.number("rope_theta")


def _refuse_what_megabit_lacks(fields: Fields) -> None:
    for key in ("attention_bias", "mlp_bias", "use_sliding_window", "use_qk_norm"):
        if fields.flag(key):
            fields.refuse(key, "false: megabit's layers have no such thing")
    _refuse_partial_rotation(fields)
    # Qwen2 names a window that it does not use; one as wide as the longest text is none.
    has_window = fields.get("use_sliding_window") is None
    if has_window and fields.get("sliding_window") is not None:
        length = fields.integer("max_position_embeddings", MAX_LENGTH)
        if fields.integer("sliding_window") < length:
            fields.refuse("sliding_window", "null: megabit's attention has no window")


def _refuse_partial_rotation(fields: Fields) -> None:
    if fields.get("partial_rotary_factor") not in (None, 1):
        fields.refuse("partial_rotary_factor", "1: megabit rotates whole heads")


def _quantization(fields: Fields) -> Quantization | None:
    defaults = {"linear_class": "bitlinear", "quantization_mode": "offline"}
    section = fields.section("quantization_config", defaults)
    if section is None:
        return None
    section.choice("quant_method", ("bitnet",))
    if section.flag("use_rms_norm"):
        section.refuse("use_rms_norm", "false: megabit's layers have no norm in front of each")
    skipped = section.get("modules_to_not_convert")
    if skipped is not None and not (
        isinstance(skipped, list)
        and all(isinstance(name, str) for name in skipped)
        and {"lm_head"} <= {*skipped} <= _NEVER_TERNARY
    ):
        section.refuse("modules_to_not_convert", '["lm_head"]: all other layers are ternary')
    mode: Mode = section.choice("quantization_mode", ("offline", "online"))
    linear_class: LinearClass = section.choice("linear_class", ("bitlinear", "autobitlinear"))
    try:
        return Quantization(mode, linear_class)
    except UserError as error:
        raise UserError(f"{fields.path}: quantization_config: {error}") from error


def _dtype(fields: Fields) -> torch.dtype | None:
    name = fields.tree.get("dtype", fields.tree.get("torch_dtype"))
    if name is None:
        return None
    known = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
    dtype = known.get(f"torch.{str(name).removeprefix('torch.')}")
    if dtype is None:
        raise UserError(
            f"{fields.path}: dtype: must be bfloat16, float16 or float32, not {shown(name)}"
        )
    return dtype
