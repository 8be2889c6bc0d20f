"""Read any part of a logical tensor from the files of a checkpoint, however it was cut up.

What is where is told by torch's distributed checkpoint: ``HuggingFaceStorageReader`` reads the
headers of all files, ``create_read_items_for_chunk_list`` says which parts of them a slice is made
of. Only these are read. So there is no step that reshards a checkpoint: every load does.
"""

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megabit.checkpoint.manifest import DamagedCheckpoint
from megabit.checkpoint.source import Index


class TensorReader:
    """The safetensors files in ``folder``, read as logical tensors; a context manager.

    Raises:
        DamagedCheckpoint: a file is not a safetensors file, or parts do not belong together.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        except (
            OSError,
            SafetensorError,
            ValueError,
            LookupError,
            TypeError,
            RecursionError,
        ) as error:
            raise DamagedCheckpoint(f"{folder}: cannot read its tensors ({error})") from error
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: info
            for name, info in metadata.state_dict_metadata.items()
            if isinstance(info, TensorStorageMetadata)
        }
        self._places = metadata.storage_data
        problem = _first_wrong_part(self.tensors, self._places)
        if problem is not None:
            raise DamagedCheckpoint(f"{folder}: {problem}")
        self._files = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()
        self._files.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the logical tensor."""
        return tuple(self.tensors[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """Of a logical tensor, as it is stored."""
        return self.tensors[name].properties.dtype

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """A part of a logical tensor, or all of it, on the CPU."""
        shape = self.shape(name)
        index = index or tuple(slice(0, size) for size in shape)
        target = torch.empty([part.stop - part.start for part in index], dtype=self.dtype(name))
        self.read_into(target, name, index)
        return target

    def read_into(self, target: Tensor, name: str, index: Index) -> None:
        """Copy a part of a logical tensor into ``target``, which has its shape and dtype.

        Raises:
            DamagedCheckpoint: the tensor is missing, of another dtype or shape, or incomplete.
        """
        info = self.tensors.get(name)
        if info is None:
            raise DamagedCheckpoint(f"{self.folder}: {name} is missing")
        if info.properties.dtype != target.dtype:
            raise DamagedCheckpoint(
                f"{self.folder}: {name} is {info.properties.dtype}, not {target.dtype}"
            )
        if len(info.size) != len(index) or any(
            part.stop > size for part, size in zip(index, info.size, strict=True)
        ):
            wanted = ", ".join(f"{part.start}:{part.stop}" for part in index)
            raise DamagedCheckpoint(
                f"{self.folder}: {name} is {tuple(info.size)} and has no [{wanted}]"
            )
        begin = torch.Size([part.start for part in index])
        wanted_part = ChunkStorageMetadata(begin, torch.Size(target.shape))
        read = 0
        for item in create_read_items_for_chunk_list(name, info, [wanted_part]):
            source = self._part(name, item.storage_index, item.storage_offsets, item.lengths)
            place = tuple(
                slice(at, at + length)
                for at, length in zip(item.dest_offsets, item.lengths, strict=True)
            )
            target[place].copy_(source)
            read += math.prod(item.lengths)
        if read != target.numel():
            raise DamagedCheckpoint(
                f"{self.folder}: {name} has {read} of the {target.numel()} elements that are wanted"
            )

    def _part(self, name: str, place: Any, offsets: torch.Size, lengths: torch.Size) -> Tensor:
        path = self._places[place].relative_path
        try:
            if path not in self._open:
                self._open[path] = self._files.enter_context(safe_open(path, framework="pt"))
            part = tuple(
                slice(at, at + length) for at, length in zip(offsets, lengths, strict=True)
            )
            return self._open[path].get_slice(name)[part]
        except (OSError, SafetensorError) as error:
            raise DamagedCheckpoint(f"{path}: cannot read {name} ({error})") from error


def _first_wrong_part(
    tensors: Mapping[str, TensorStorageMetadata], places: Mapping[MetadataIndex, Any]
) -> str | None:
    """What torch's reader takes for granted: parts of a tensor have its dtype and as many
    dimensions as it, and no two begin at the same place."""
    counts = Counter(place.fqn for place in places)
    for name, info in tensors.items():
        dims = len(info.size)
        for part in info.chunks:
            if not len(part.offsets) == len(part.sizes) == dims or min(part.offsets, default=0) < 0:
                return f"{name} has a part {list(part.sizes)} at {list(part.offsets)}"
        if counts[name] != len(info.chunks):
            return f"{name} has parts that overlap"
    for place, part in places.items():
        dtype = tensors[place.fqn].properties.dtype
        if part.dtype != dtype:
            return f"{place.fqn} is {dtype} in one file and {part.dtype} in another"
    return None
