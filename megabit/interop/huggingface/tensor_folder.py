"""The safetensors files of a folder, read as one: ``model.safetensors``, or shards and an index.

All that headers tell is checked when the folder is opened; values are read part by part and not
kept. What is not safetensors is not read: ``pytorch_model.bin`` is a pickle, which may run code.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megabit.checkpoint.source import Index
from megabit.checkpoint.tensor_file import DTYPES, SINGLE_FILE
from megabit.errors import UserError, first_line
from megabit.interop.json_fields import Fields, read_json, shown_name

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None: one that megabit does not know."""


class TensorFolder:
    """The tensors in ``path``, each in one file.

    Raises:
        UserError: a file is missing or damaged, or index and files differ.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        placed = _placed(path)
        for file in sorted({*placed.values()} if placed is not None else {path / SINGLE_FILE}):
            for name, tensor in _stored(file):
                if placed is not None and placed.get(name) != file:
                    raise UserError(
                        f"{file}: has {shown_name(name)}, which {INDEX} does not place there; "
                        "get index and shards of one version"
                    )
                self.tensors[name] = tensor
        missing = sorted((placed or {}).keys() - self.tensors.keys())
        if placed and missing:
            raise UserError(
                f"{placed[missing[0]]}: has no {shown_name(missing[0])}, which {INDEX} places "
                "there; get index and shards of one version"
            )

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """Part of a tensor, on the CPU; memory only for what is then used of it.

        Raises:
            UserError: it cannot be read.
        """
        stored = self.tensors[name]
        parts = index or tuple(slice(0, size) for size in stored.shape)
        try:
            with safe_open(stored.file, framework="pt") as file:
                part: Tensor = file.get_slice(name)[parts]
        except (OSError, SafetensorError) as error:
            raise UserError(f"{stored.file}: cannot read {name} ({first_line(error)})") from error
        return part


def _placed(path: Path) -> dict[str, Path] | None:
    """The file of each tensor as the index says; None if there is one file only."""
    if not path.is_dir():
        raise UserError(f"{path}: is not a folder; give one with config.json and {SINGLE_FILE}")
    if (path / SINGLE_FILE).exists():  # it comes before an index in transformers, too
        return None
    index = path / INDEX
    if not index.exists():
        pickles = sorted(file.name for file in path.glob("*.bin"))
        if pickles:
            raise UserError(
                f"{path / pickles[0]}: is a pickle, which may run code and is not read; "
                f"convert it to {SINGLE_FILE}"
            )
        raise UserError(f"{path}: has no {SINGLE_FILE} and no {INDEX}")
    weight_map = Fields(index, read_json(index)).section("weight_map")
    if weight_map is None or not weight_map.tree:
        raise UserError(f"{index}: weight_map: must name the file of each tensor, and is missing")
    return {name: path / _file_name(weight_map, name) for name in weight_map.tree}


def _file_name(weight_map: Fields, name: str) -> str:
    """A file in the folder itself: what an index says must not lead out of it."""
    value = weight_map.tree[name]
    is_name = isinstance(value, str) and all(
        kind(value).name == value for kind in (PurePosixPath, PureWindowsPath)
    )
    if not is_name or value == ".." or not value.endswith(".safetensors"):
        weight_map.refuse(name, "the name of a .safetensors file in the same folder")
    return str(value)


def _stored(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                part = file.get_slice(name)
                yield (
                    name,
                    StoredTensor(path, tuple(part.get_shape()), dtypes.get(part.get_dtype())),
                )
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path}: cannot read it ({first_line(error)}); get the file again"
        ) from error
