"""Write safetensors files one tensor at a time.

A file is the length of a JSON header, the header, and the tensors' bytes one after the other
(huggingface/safetensors, ``README``: Format). Names, dtypes and shapes are known before the values
are, so no more than one tensor is in memory, and the file's SHA-256 is taken on the way.

What is one rank's part of larger tensors says so in the way of torch's distributed checkpoints
(``torch.distributed.checkpoint``, ``HuggingFaceStorageWriter``): an entry of the header's metadata
holds where in its logical tensor each part begins. So ``HuggingFaceStorageReader`` puts the parts
of several files together. torch's writer is not used: it holds a second copy of all tensors
and neither hashes nor syncs what it writes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megabit.files import FileInfo

SHARDING_INFO = "DCP_SHARDING_INFO"
"""Where torch's reader looks for the offsets of parts."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls them."""

SINGLE_FILE = "model.safetensors"
MAX_FILE_BYTES = 5_000_000_000
"""Of a whole model's files, which are hashed by one rank each when they are loaded."""

CHUNK_BYTES = 1 << 22
"""Hashed and written at a time, so that the second finds it in the cache."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor to be written, and how to get its values when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]
    offset: tuple[int, ...] | None = None
    """Where in its logical tensor it begins, if it may be a part of one."""

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @staticmethod
    def of(name: str, tensor: Tensor, offset: tuple[int, ...] | None = None) -> "LazyTensor":
        """One that is there already."""
        return LazyTensor(name, tensor.dtype, tuple(tensor.shape), lambda: tensor, offset)


def in_files(
    tensors: Sequence[LazyTensor], max_bytes: int = MAX_FILE_BYTES
) -> dict[str, list[LazyTensor]]:
    """How a model's tensors are laid in files, by their names: one, or as many as it takes for
    none to be larger than ``max_bytes`` unless a single tensor is."""
    files: list[list[LazyTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if files[-1] and filled + tensor.bytes > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.bytes
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    return dict(zip(names, files, strict=True))


def write_tensors(
    path: Path, tensors: Sequence[LazyTensor], metadata: Mapping[str, str] | None = None
) -> FileInfo:
    """Write a new file and wait until it is on disk; returns its size and hash.

    Raises:
        OSError: it exists, or cannot be written.
    """
    # Wider dtypes first: each tensor begins at a multiple of its element's size.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header = _header(ordered, metadata or {})
    digest = hashlib.sha256()
    with path.open("xb") as file:

        def put(data: bytes | memoryview) -> None:
            digest.update(data)
            file.write(data)

        put(len(header).to_bytes(8, "little"))
        put(header)
        for tensor in ordered:
            _put_values(tensor, put)
        file.flush()
        os.fsync(file.fileno())
        return FileInfo(file.tell(), digest.hexdigest())


def _put_values(tensor: LazyTensor, put: Callable[[memoryview], None]) -> None:
    """A function of its own, so that nothing holds the values when those of the next one come."""
    values = tensor.load()
    if values.dtype != tensor.dtype or tuple(values.shape) != tensor.shape:
        raise ValueError(
            f"{tensor.name} is {values.dtype} {tuple(values.shape)}, "
            f"not {tensor.dtype} {tensor.shape}"
        )
    flat = values.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
    for begin in range(0, len(flat), CHUNK_BYTES):
        put(flat[begin : begin + CHUNK_BYTES])


def _header(tensors: Sequence[LazyTensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {}
    begin = 0
    for tensor in tensors:
        if tensor.name in entries:
            raise ValueError(f"{tensor.name} is given twice")
        end = begin + tensor.bytes
        entries[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (begin, end),
        }
        begin = end
    about = dict(metadata)
    if any(tensor.offset is not None for tensor in tensors):
        offsets = {t.name: t.offset or (0,) * len(t.shape) for t in tensors}
        about[SHARDING_INFO] = json.dumps({n: {"saved_offsets": o} for n, o in offsets.items()})
    text = json.dumps({"__metadata__": about, **entries}, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
