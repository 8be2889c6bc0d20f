"""The file itself: GGUF version 3, written by the ``gguf`` package one tensor at a time.

Everything is known before the first tensor is loaded but the tensors' bytes: keys and values, then
names, shapes, types and offsets, then the data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import Tensor

from megabit.checkpoint.source import ModelSource
from megabit.interop.gguf_tokenizer import GgufTokenizer

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file, and how to get its data when its turn comes."""

    name: str
    shape: tuple[int, ...]
    """Of the weights, not of the bytes; outermost dimension first, as in torch."""
    type_id: int
    """The number of the type in the file."""
    bytes: int
    load: Callable[[], Tensor]
    """Any dtype and shape; the bytes are written as they lie in memory."""


def write_gguf(
    path: Path,
    architecture: str,
    file_type: int,
    source: ModelSource,
    tokenizer: GgufTokenizer,
    tensors: Sequence[GgufTensor],
) -> None:
    """Write ``path``; what a failure leaves there is the caller's to remove."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, architecture)
    try:
        _add_model(writer, architecture, file_type, source)
        _add_tokenizer(writer, tokenizer)
        for tensor in tensors:
            # The library's own enumeration lacks 36, I2_S; it only writes the number. The dtype
            # tells it that the shape is one of weights.
            type_id = cast("GGMLQuantizationType", tensor.type_id)
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), tensor.bytes, raw_dtype=type_id
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.load().cpu().contiguous().numpy())
    finally:
        writer.close()


def _add_model(
    writer: "GGUFWriter", architecture: str, file_type: int, source: ModelSource
) -> None:
    import gguf

    model = source.model
    writer.add_type("model")
    writer.add_name(source.path.name.encode(errors="replace").decode())
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(model.vocab_size)
    writer.add_context_length(source.max_length)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_hidden_layers)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_attention_heads)
    writer.add_head_count_kv(model.num_key_value_heads)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(1.0)
    # Not read for this architecture so far; a reader that is put right will need it.
    writer.add_string(f"{architecture}.hidden_activation", model.hidden_act)


def _add_tokenizer(writer: "GGUFWriter", tokenizer: GgufTokenizer) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    writer.add_token_merges(tokenizer.merges)
    writer.add_bos_token_id(tokenizer.bos)
    writer.add_eos_token_id(tokenizer.eos)
    writer.add_add_bos_token(tokenizer.add_bos)
    writer.add_add_eos_token(tokenizer.add_eos)
    if tokenizer.eot is not None:
        writer.add_eot_token_id(tokenizer.eot)
    if tokenizer.pad is not None:
        writer.add_pad_token_id(tokenizer.pad)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
