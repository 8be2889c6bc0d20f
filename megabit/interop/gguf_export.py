"""Write a ternary model as a GGUF file, for llama.cpp (TQ1_0, TQ2_0) or bitnet.cpp (I2_S).

What is written, and why so:

- *Architecture* ``bitnet``, the one that llama.cpp's own converter writes for these models. Its
  graph has megabit's norms and RoPE over halves of a head, so nothing is permuted. It has SiLU
  whatever ``bitnet.hidden_activation`` says; a ReLU² model is written all the same, with a warning.
  bitnet.cpp has a second graph, ``bitnet-b1.58``, with ReLU²; I2_S files of ReLU² models name it.
- *Logits* are computed with the embedding in all of these graphs, so a model with an output matrix
  of its own is refused.
- *Scales*: each block of TQ1_0 and TQ2_0 holds γ in fp16, rounded, and I2_S holds it in fp32. There
  are no ``.scale`` tensors (llama.cpp would multiply by them, its converter writes none, and other
  readers of the TQ types know nothing of them).
- *Embedding* in fp16, as both converters do, or fp32; norms in fp32.

llama.cpp quantizes activations to int8 in blocks of 256, megabit a whole token at a time: where a
product's K is above 256, logits agree to the rounding of activations, not bit by bit.

Sources: llama.cpp, ``conversion/bitnet.py``, ``src/models/bitnet.cpp``; bitnet.cpp,
``utils/convert-hf-to-gguf-bitnet.py``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megabit.checkpoint.progress import Report, no_report, reporting
from megabit.checkpoint.source import ModelSource, logical_tensors
from megabit.config import ModelConfig
from megabit.errors import UserError
from megabit.files import replacing, sync
from megabit.interop.expressible import check_expressible
from megabit.interop.gguf_file import GgufTensor, write_gguf
from megabit.interop.gguf_tokenizer import read_tokenizer
from megabit_kernels.formats import gguf as formats
from megabit_kernels.packing import check_packed

GgufTensorType = Literal["TQ1_0", "TQ2_0", "I2_S"]
EmbeddingType = Literal["F16", "F32"]

BLOCKS = {"TQ1_0": formats.TQ_BLOCK, "TQ2_0": formats.TQ_BLOCK, "I2_S": formats.I2_S_BLOCK}
"""Weights in a block. Each row of a ternary weight must be a multiple of it."""

BLOCK_BYTES = {"TQ1_0": 54, "TQ2_0": 66, "I2_S": 32}
TAIL_BYTES = {"TQ1_0": 0, "TQ2_0": 0, "I2_S": formats.I2_S_TAIL_BYTES}

DENSE_TYPES = {torch.float32: 0, torch.float16: 1}
"""The numbers of F32 and F16 in a file."""

FILE_TYPES = {"TQ1_0": 36, "TQ2_0": 37, "I2_S": 40}
"""``general.file_type``, which is shown to users. bitnet.cpp's newer fork calls I2_S 41; its
converter and its published files say 40."""

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "mlp.down_proj": "ffn_down",
}
"""The tensors of a layer: Hugging Face's name and GGUF's."""

ROWS = 4096
"""Rows of a dense tensor that are read at once, so that it is in memory once, as it is written."""


@dataclass(frozen=True)
class GgufReport:
    """What was written."""

    path: Path
    architecture: str
    tensors: int
    bytes: int
    scale_change: float
    """Largest relative change of a scale by rounding; 0 where the format holds fp32."""
    warnings: tuple[str, ...]
    """Where a reader is known to compute something else; one line each, for the user to see."""


def export_gguf(
    source: ModelSource,
    out: Path,
    tensor_type: GgufTensorType,
    embedding_type: EmbeddingType = "F16",
    report: Report = no_report,
) -> GgufReport:
    """Write ``source`` to a new file ``out``; one tensor is in memory at a time.

    Raises:
        UserError: ``out`` exists or cannot be written, or the model, its tokenizer or a value has
            no place in such a file. Nothing is left behind then.
    """
    model = source.model
    _check(source, out, tensor_type)
    tokenizer = read_tokenizer(source)
    architecture = _architecture(model, tensor_type)
    scale_changes: list[float] = []
    tensors = reporting(_tensors(source, tensor_type, embedding_type, scale_changes), report)
    try:
        with replacing(out) as draft:
            write_gguf(draft, architecture, FILE_TYPES[tensor_type], source, tokenizer, tensors)
            sync(draft)
        sync(out.parent)
        size = out.stat().st_size
    except OSError as error:
        raise UserError(f"{out}: cannot write it ({error.strerror or error})") from error
    return GgufReport(
        path=out,
        architecture=architecture,
        tensors=len(tensors),
        bytes=size,
        scale_change=max(scale_changes),
        warnings=_warnings(model, tensor_type),
    )


def _check(source: ModelSource, out: Path, tensor_type: GgufTensorType) -> None:
    """Raise UserError for what can be told from the model's configuration."""
    if out.exists() or out.is_symlink():
        raise UserError(f"{out}: exists; give another path, or remove it first")
    if not out.parent.is_dir():
        raise UserError(f"{out}: its folder does not exist; create {out.parent} first")
    model = source.model
    if model.linear != "ternary":
        raise UserError(
            f"{source.path}: model.linear is {model.linear}; {tensor_type} holds ternary weights, "
            "so model.linear must be ternary"
        )
    check_expressible(source, "GGUF")  # γ is carried, however it was made
    if not model.tie_word_embeddings:
        raise UserError(
            f"{source.path}: model.tie_word_embeddings is false; llama.cpp and bitnet.cpp compute "
            "logits with the embedding for this architecture, so it must be true"
        )
    problems = []
    for name, tensor in logical_tensors(model).items():
        k = tensor.shape[-1]
        if tensor.is_ternary and ".layers.0." in name and k % BLOCKS[tensor_type]:
            fitting = [other for other, block in BLOCKS.items() if k % block == 0]
            problems.append(
                f"{source.path}: {name} (and every layer's) has rows of {k} weights, no multiple "
                f"of {BLOCKS[tensor_type]}, the block of {tensor_type}; "
                + (f"{', '.join(fitting)} would fit" if fitting else "no ternary type would fit")
            )
    if problems:
        raise UserError(*problems)


def _architecture(model: ModelConfig, tensor_type: GgufTensorType) -> str:
    is_relu2 = model.hidden_act == "relu2"
    return "bitnet-b1.58" if tensor_type == "I2_S" and is_relu2 else "bitnet"


def _warnings(model: ModelConfig, tensor_type: GgufTensorType) -> tuple[str, ...]:
    warnings = []
    is_i2_s = tensor_type == "I2_S"
    if is_i2_s:
        warnings.append(
            "experimental: llama.cpp cannot read I2_S; bitnet.cpp can, with its own fork of it"
        )
    if model.hidden_act == "relu2":
        warnings.append(
            "experimental: this model has ReLU², which bitnet.cpp computes with its llama.cpp "
            "of 2025 (40ed0f29); with that of July 2026 (390c3077) it computes SiLU, wrongly"
            if is_i2_s
            else "experimental: this model has ReLU², and llama.cpp computes SiLU for the "
            "architecture bitnet: what it generates will be wrong"
        )
    return tuple(warnings)


def _tensors(
    source: ModelSource,
    tensor_type: GgufTensorType,
    embedding_type: EmbeddingType,
    scale_changes: list[float],
) -> list[GgufTensor]:
    """All tensors of the file; loading one appends to ``scale_changes``."""
    tensors = []
    for name, tensor in logical_tensors(source.model).items():
        if tensor.is_ternary:
            written = _ternary(source, name, tensor.shape, tensor_type, scale_changes)
        else:
            is_half = len(tensor.shape) == 2 and embedding_type == "F16"
            dtype = torch.float16 if is_half else torch.float32
            written = _dense(source, name, tensor.shape, dtype)
        tensors.append(written)
    return tensors


def _gguf_name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def _dense(
    source: ModelSource, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> GgufTensor:
    def load() -> Tensor:
        result = torch.empty(shape, dtype=dtype)
        rest = tuple(slice(0, size) for size in shape[1:])
        for begin in range(0, shape[0], ROWS):
            rows = slice(begin, min(begin + ROWS, shape[0]))
            result[rows] = source.values(name, (rows, *rest)).to(dtype)
        if not bool(result.isfinite().all()):
            advice = "; write the embedding as F32" if dtype == torch.float16 else ""
            raise UserError(f"{source.path}: {name} has values not finite in {dtype}{advice}")
        return result

    size = torch.Size(shape).numel() * dtype.itemsize
    return GgufTensor(_gguf_name(name), shape, DENSE_TYPES[dtype], size, load)


def _ternary(
    source: ModelSource,
    name: str,
    shape: tuple[int, ...],
    tensor_type: GgufTensorType,
    scale_changes: list[float],
) -> GgufTensor:
    n, k = shape

    def load() -> Tensor:
        scale = source.scale(name)
        encode = {
            "TQ1_0": formats.encode_tq1_0,
            "TQ2_0": formats.encode_tq2_0,
            "I2_S": formats.encode_i2_s,
        }[tensor_type]
        packed = source.codes(name)
        try:
            check_packed(packed, k, "codes")
            data = encode(packed, k, scale)
        except ValueError as error:
            raise UserError(f"{source.path}: {name}: {error}") from error
        written = scale if tensor_type == "I2_S" else scale.to(torch.float16)
        scale_changes.append(abs(float(written) / float(scale) - 1))
        return data

    size = n * k // BLOCKS[tensor_type] * BLOCK_BYTES[tensor_type] + TAIL_BYTES[tensor_type]
    return GgufTensor(_gguf_name(name), shape, formats.TensorType[tensor_type].value, size, load)
