"""A model as a checkpoint of its own: ternary (``megabit export safetensors``), or training.

A ternary checkpoint ``out/`` is a folder of three things, of which the first is enough to compute
with: ``model.safetensors``, ``assets/`` (the tokenizer), and ``manifest.json`` (hashes, the step).
``model.safetensors`` (several files, ``model-00001-of-…``, above 5 GB) is an ordinary safetensors
file whose metadata describes it:

- ``format``: ``megabit ternary``; ``version``: ``1``. Read no other version by these rules.
- ``model``: JSON of the model's shape (``ModelConfig``); ``max_length``: positions it was made for.

For each ternary weight ``W [N, K]``, by its Hugging Face name ``W``:

- ``W.codes``: uint8 ``[N, ceil(K/4)]``. The code of ``w[n, 4j + i]`` is in bits 2i and 2i + 1 of
  byte j of row n: 0, 1, 2 for −1, 0, +1. 3 is invalid; what fills up the last byte of a row is 1.
- ``W.scale``: fp32, 0-dimensional, γ. The weight is γ · code.

Embedding, head and norm gains are there under their own names: gains in fp32, matrices in fp32 or
bf16. All of it is the model's logical tensors, whole; a tied head is the embedding.

Codes and γ cannot be made from each other: γ · code as a master weight would give the same codes
and γ' = mean|γ · code|, smaller by the share of zeros. So nothing here turns codes into masters,
and who copies a model copies codes and γ as they are.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megabit.checkpoint.assets import copy_assets
from megabit.checkpoint.manifest import Kind, Manifest
from megabit.checkpoint.new_folder import new_folder
from megabit.checkpoint.progress import Report, no_report, reporting
from megabit.checkpoint.source import LogicalTensor, ModelSource, logical_tensors
from megabit.checkpoint.tensor_file import LazyTensor, in_files, write_tensors
from megabit.checkpoint.verify import CODES, SCALE
from megabit.errors import UserError
from megabit_kernels.packing import packed_width

FORMAT = "megabit ternary"
VERSION = 1


@dataclass(frozen=True)
class Origin:
    """What is known of how a model came about."""

    step: int = 0
    """Training steps done."""
    updates: int = 0
    run: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""


@dataclass(frozen=True)
class Written:
    """A checkpoint that was written."""

    path: Path
    kind: Kind
    tensors: int
    bytes: int
    """Of all files but the manifest."""
    ternary_bytes: int
    """Of codes and scales."""


def write_ternary(
    source: ModelSource,
    out: Path,
    origin: Origin | None = None,
    dtype: Literal["bfloat16", "float32"] | None = None,
    report: Report = no_report,
) -> Written:
    """Write the codes and scales of ``source`` as they are, one tensor in memory at a time.

    Args:
        out: a folder that does not exist.
        dtype: of embedding and head; None keeps bf16 as it is, and makes fp32 of the rest. A run
            that computes in bf16 rounds them to it in any case.

    Raises:
        UserError: the model has no ternary weights, it cannot be read, or ``out`` not written.
    """
    if source.model.linear != "ternary":
        raise UserError(
            f"{source.path}: is a model of dense layers (model.linear); it has no codes to write"
        )
    chosen = None if dtype is None else getattr(torch, dtype)
    tensors: list[LazyTensor] = []
    for name, tensor in logical_tensors(source.model).items():
        if tensor.is_ternary:
            tensors += _ternary(source, name, tensor)
        else:
            is_matrix = len(tensor.shape) > 1
            wanted = chosen or _stored_dtype(source, name, tensor)
            tensors.append(
                _dense(source, name, tensor.shape, wanted if is_matrix else torch.float32, name)
            )
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "model": json.dumps(asdict(source.model)),
        "max_length": str(source.max_length),
    }
    tensors = reporting(tensors, report)
    return _write(source, out, "ternary", tensors, origin or Origin(), metadata, source.assets)


def write_training(
    source: ModelSource,
    out: Path,
    run: Mapping[str, Any] | None = None,
    more_assets: Mapping[str, Path] | None = None,
    report: Report = no_report,
) -> Written:
    """Write the masters of ``source``, in fp32, as a training checkpoint of step 0: what a run can
    begin with. One tensor in memory at a time.

    Args:
        out: a folder that does not exist.
        run: JSON values for the manifest.
        more_assets: beside those of the source.

    Raises:
        UserError: there are no masters, they cannot be read, or ``out`` not written.
    """
    if not source.has_masters:
        raise UserError(
            f"{source.path}: has codes and no master weights. Codes cannot become masters: γ·code "
            "would give the same codes and a smaller γ; import it as a ternary checkpoint"
        )
    tensors = [
        _dense(source, name, tensor.shape, torch.float32, f"master/{name}")
        for name, tensor in logical_tensors(source.model).items()
    ]
    assets = {**source.assets, **(more_assets or {})}
    origin = Origin(run=run or {})
    return _write(source, out, "training", reporting(tensors, report), origin, {}, assets)


def _ternary(source: ModelSource, name: str, tensor: LogicalTensor) -> list[LazyTensor]:
    rows, columns = tensor.shape
    shape = (rows, packed_width(columns))
    return [
        LazyTensor(f"{name}.{CODES}", torch.uint8, shape, lambda: source.codes(name)),
        LazyTensor(f"{name}.{SCALE}", torch.float32, (), lambda: source.scale(name)),
    ]


def _dense(
    source: ModelSource, name: str, shape: tuple[int, ...], dtype: torch.dtype, stored_as: str
) -> LazyTensor:
    def load() -> Tensor:
        return source.values(name).to(dtype)

    return LazyTensor(stored_as, dtype, shape, load)


def _stored_dtype(source: ModelSource, name: str, tensor: LogicalTensor) -> torch.dtype:
    """That of the source if it is bf16, else fp32, which holds fp16 exactly."""
    first = tuple(slice(0, min(1, size)) for size in tensor.shape)
    is_bf16 = source.values(name, first).dtype == torch.bfloat16
    return torch.bfloat16 if is_bf16 else torch.float32


def _write(
    source: ModelSource,
    out: Path,
    kind: Kind,
    tensors: Sequence[LazyTensor],
    origin: Origin,
    metadata: Mapping[str, str],
    assets: Mapping[str, Path],
) -> Written:
    with new_folder(out) as folder:
        files = {
            name: write_tensors(folder / name, own, metadata)
            for name, own in in_files(tensors).items()
        }
        files |= copy_assets(assets, folder)
        Manifest(
            kind=kind,
            step=origin.step,
            updates=origin.updates,
            model=source.model,
            max_length=source.max_length,
            files=files,
            run=origin.run,
        ).write(folder)
    ternary = [t for t in tensors if t.name.endswith((f".{CODES}", f".{SCALE}"))]
    return Written(
        path=out,
        kind=kind,
        tensors=len(tensors),
        bytes=sum(info.bytes for info in files.values()),
        ternary_bytes=sum(tensor.bytes for tensor in ternary),
    )
