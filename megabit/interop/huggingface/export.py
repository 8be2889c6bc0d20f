"""Write a model as a checkpoint that ``transformers`` loads as ``BitNetForCausalLM``.

Tensors go through one by one. The folder appears when all of it is on disk. What is written, for
``offline``: codes packed four rows to a byte, and a ``weight_scale`` that gives γ back exactly; for
``online``: master weights. All other tensors are floats of ``dtype``.

bf16 master weights have another γ than fp32 ones and, near a rounding boundary, other codes; the
report says how many. Codes times γ are no master weights: their mean magnitude is γ times the share
of codes that are not zero, so that whoever quantizes them again gets the codes and a smaller γ.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megabit.checkpoint.new_folder import new_folder
from megabit.checkpoint.progress import Report, no_report, reporting
from megabit.checkpoint.source import ModelSource, logical_tensors, row_slices
from megabit.checkpoint.tensor_file import MAX_FILE_BYTES, LazyTensor, in_files, write_tensors
from megabit.errors import UserError
from megabit.files import write_text
from megabit.interop.expressible import check_expressible
from megabit.interop.huggingface.config import Mode, Quantization, config_tree
from megabit.interop.huggingface.scales import stored_scale
from megabit.interop.huggingface.tensor_folder import INDEX
from megabit.interop.huggingface.tokenizer_files import token_ids, write_tokenizer_files
from megabit_kernels import numerics
from megabit_kernels.formats.huggingface import LinearClass, encode
from megabit_kernels.packing import unpack


@dataclass(frozen=True)
class ExportReport:
    """What was written."""

    path: Path
    tensors: int
    bytes: int
    """Of the safetensors files."""
    changed_codes: int
    """Codes that the written master weights have and those of the source have not."""
    total_codes: int


def export_huggingface(
    source: ModelSource,
    out: Path,
    mode: Mode = "offline",
    linear_class: LinearClass = "autobitlinear",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    max_shard_bytes: int = MAX_FILE_BYTES,
    report: Report = no_report,
) -> ExportReport:
    """Write ``source`` to the new folder ``out``.

    Args:
        mode: codes and scales, or master weights.
        linear_class: what a scale means; ``online`` has ``autobitlinear`` only.
        dtype: of everything but codes and scales.
        max_shard_bytes: a file is larger only if a single tensor is.

    Raises:
        UserError: the model cannot be written so, or ``out`` exists or cannot be written.
    """
    quantization = Quantization(mode, linear_class)
    _check(source, quantization)
    ids = token_ids(source)
    stored_dtype: torch.dtype = getattr(torch, dtype)
    config = config_tree(source.model, source.max_length, quantization, stored_dtype, ids)
    changed: dict[str, int] = {}
    with new_folder(out) as draft:
        tensors = [*_tensors(source, quantization, stored_dtype, changed)]
        tensors = reporting(tensors, report)
        size = _write_shards(draft, tensors, max_shard_bytes)
        write_text(draft / "config.json", json.dumps(config, indent=2) + "\n", durable=True)
        write_tokenizer_files(source, draft, ids)
    total = sum(
        torch.Size(tensor.shape).numel()
        for tensor in logical_tensors(source.model).values()
        if tensor.is_ternary
    )
    return ExportReport(out, len(tensors), size, sum(changed.values()), total)


def _check(source: ModelSource, quantization: Quantization) -> None:
    if source.model.linear != "ternary":
        raise UserError(
            f"{source.path}: is a dense model (model.linear); only ternary ones are written"
        )
    is_online = quantization.mode == "online"
    offline = "use mode offline, which carries γ" if is_online else None
    check_expressible(source, "BitNetForCausalLM", derives_scales=offline)
    if is_online and not source.has_masters:
        raise UserError(
            f"{source.path}: has codes and scales only, and mode online needs master weights: "
            "codes times γ would be quantized to a smaller γ; use mode offline"
        )
    if quantization.linear_class == "bitlinear":
        for name, tensor in logical_tensors(source.model).items():
            if tensor.is_ternary and tensor.shape[0] % 4:
                raise UserError(
                    f"{source.path}: {name} has {tensor.shape[0]} rows, and bitlinear packs 4 to a "
                    "byte; use autobitlinear"
                )


def _tensors(
    source: ModelSource, quantization: Quantization, dtype: torch.dtype, changed: dict[str, int]
) -> Iterator[LazyTensor]:
    """What is written, in the order of the forward pass; ``changed`` is filled as it is read."""
    for name, tensor in logical_tensors(source.model).items():
        if not tensor.is_ternary:
            yield LazyTensor(name, dtype, tensor.shape, partial(_dense, source, name, dtype))
        elif quantization.mode == "online":
            load: Callable[[], Tensor] = partial(_master, source, name, dtype, changed)
            yield LazyTensor(name, dtype, tensor.shape, load)
        else:
            n, k = tensor.shape
            if n % 4 == 0:
                load = partial(_packed, source, name, k)
                yield LazyTensor(name, torch.uint8, (n // 4, k), load)
            else:  # transformers takes codes as floats, too
                yield LazyTensor(name, dtype, (n, k), partial(_loose, source, name, k, dtype))
            scale = stored_scale(source, name, quantization.linear_class, dtype)
            yield LazyTensor.of(f"{name}_scale", scale)


def _dense(source: ModelSource, name: str, dtype: torch.dtype) -> Tensor:
    return source.values(name).to(dtype)


def _packed(source: ModelSource, name: str, k: int) -> Tensor:
    return encode(source.codes(name), k)


def _loose(source: ModelSource, name: str, k: int, dtype: torch.dtype) -> Tensor:
    return unpack(source.codes(name), k).to(dtype)


def _master(source: ModelSource, name: str, dtype: torch.dtype, changed: dict[str, int]) -> Tensor:
    """The master weight as it is written; counts the codes that it does not share."""
    values = source.values(name)
    written = values.to(dtype)
    if values.dtype != dtype:
        old, new = source.scale(name), numerics.absmean_scale(written)
        changed[name] = 0
        whole = tuple(slice(0, size) for size in values.shape)
        for rows in row_slices(whole, numerics.BLOCK):
            differ = numerics.ternarize(values[rows], old) != numerics.ternarize(written[rows], new)
            changed[name] += int(differ.sum())
    return written


def _write_shards(folder: Path, tensors: list[LazyTensor], max_bytes: int) -> int:
    """Write ``model.safetensors``, or shards and their index; returns the bytes of these files."""
    shards = in_files(tensors, max_bytes)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.bytes for tensor in tensors)},
            "weight_map": {t.name: name for name, shard in shards.items() for t in shard},
        }
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n", durable=True)
    written = [
        write_tensors(folder / name, shard, {"format": "pt"}) for name, shard in shards.items()
    ]
    return sum(info.bytes for info in written)
