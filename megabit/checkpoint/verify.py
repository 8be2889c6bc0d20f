"""Is a checkpoint what was saved, and does it hold what its model needs?"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megabit.checkpoint.manifest import (
    ASSETS,
    MANIFEST,
    DamagedCheckpoint,
    Kind,
    Manifest,
)
from megabit.checkpoint.reader import TensorReader
from megabit.checkpoint.source import LogicalTensor, logical_tensors
from megabit.config import ModelConfig
from megabit.errors import UserError
from megabit.files import FileInfo, describe_file
from megabit_kernels.packing import packed_width

ADAM_KINDS = ("master", "exp_avg", "exp_avg_sq")
MUON_KINDS = ("master", "momentum")
MASTER_KINDS = (*ADAM_KINDS, "momentum")
"""What a training checkpoint has of a logical tensor, ``kind/name``: by AdamW, by Muon, in all."""
MAX_ISLANDS = 4096
"""More is no run's, and a manifest is not trusted with memory."""
CODES, SCALE = "codes", "scale"
"""What a ternary checkpoint has of a ternary weight: ``name.codes`` and ``name.scale``."""


@dataclass(frozen=True)
class MoreTensors:
    """What a training checkpoint has beside masters and moments; ``Manifest.run`` says so."""

    islands: int = 1
    """Of each but the first, ``kind/name`` is called ``island{i}.kind/name``."""
    shared_kinds: Sequence[str] = ()
    """Of every tensor, the same for all islands: what an outer optimizer keeps."""
    own_kinds: Sequence[str] = ()
    """Of every tensor, for each island."""
    partial_kinds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """For each island, of some tensors: what a codec has lost."""
    updated: Sequence[bool] = (True,)
    """Of each island, whether its weights were ever updated: if so, there are moments."""

    def as_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @staticmethod
    def of(manifest: Manifest) -> "MoreTensors":
        """As saved; nothing in older checkpoints.

        Raises:
            DamagedCheckpoint: it is something else.
        """
        saved = manifest.run.get("more_tensors", {"updated": [manifest.updates > 0]})
        try:
            more = MoreTensors(**saved)
            is_well = 1 <= int(more.islands) <= MAX_ISLANDS
            is_well &= len(more.updated) == more.islands
            kinds = [*more.shared_kinds, *more.own_kinds, *more.partial_kinds]
            names = [name for each in more.partial_kinds.values() for name in each]
            is_well &= all(isinstance(text, str) for text in (*kinds, *names))
        except (TypeError, ValueError, AttributeError):
            is_well = False
        if not is_well:
            raise DamagedCheckpoint(f"{MANIFEST}: has no readable more_tensors")
        return more

    def in_island(self, island: int, kind: str) -> str:
        """What ``kind`` is called for an island."""
        return kind if island == 0 or kind in self.shared_kinds else f"island{island}.{kind}"


def expected_tensors(
    kind: Kind,
    model: ModelConfig,
    has_moments: bool = True,
    optimizer: str = "adamw",
    more: MoreTensors | None = None,
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what a checkpoint of ``model`` holds.

    Args:
        has_moments: whether weights were ever updated.
        optimizer: as of ``optim.name``.
    """
    tensors = logical_tensors(model)
    if kind == "training":
        more = more or MoreTensors(updated=(has_moments,))
        return {
            f"{more.in_island(island, k)}/{name}": tensor.shape
            for name, tensor in tensors.items()
            for island in range(more.islands)
            for k in (
                *_kinds(name, tensor, optimizer)[: None if more.updated[island] else 1],
                *more.shared_kinds,
                *more.own_kinds,
                *(partial for partial, names in more.partial_kinds.items() if name in names),
            )
        }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        if tensor.is_ternary:
            rows, columns = tensor.shape
            shapes[f"{name}.{CODES}"] = (rows, packed_width(columns))
            shapes[f"{name}.{SCALE}"] = ()
        else:
            shapes[name] = tensor.shape
    return shapes


def optimizer_of(manifest: Manifest) -> str:
    """``optim.name`` of the run that was saved."""
    settings = manifest.run.get("config")
    optim = settings.get("optim") if isinstance(settings, dict) else None
    return str(optim.get("name", "adamw")) if isinstance(optim, dict) else "adamw"


def check_names(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder that lacks a file or holds one that the manifest does not list. What begins
    with a dot is no part of it: file systems and desktops put such files anywhere."""
    found = {
        path.relative_to(folder).as_posix()
        for base in (folder, folder / ASSETS)
        if base.is_dir()
        for path in base.iterdir()
        if not path.name.startswith(".") and (path != folder / ASSETS or not path.is_dir())
    }
    problems = [f"{folder / name}: is missing" for name in sorted({*manifest.files} - found)]
    problems += [
        f"{folder / name}: is not part of the checkpoint"
        for name in sorted(found - {*manifest.files, MANIFEST})
    ]
    if problems:
        raise DamagedCheckpoint(*problems)


def check_file(folder: Path, name: str, expected: FileInfo) -> None:
    """Refuse a file that is not the one that was saved; reads all of it."""
    path = folder / name
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: cannot read it ({error.strerror})") from error
    if size != expected.bytes:
        raise DamagedCheckpoint(f"{path}: has {size} bytes, but {expected.bytes} were saved")
    try:
        found = describe_file(path)
    except UserError as error:
        raise DamagedCheckpoint(*error.problems) from error
    if found != expected:
        raise DamagedCheckpoint(f"{path}: is not what was saved: its SHA-256 differs")


def check_tensors(folder: Path, manifest: Manifest) -> None:
    """Refuse tensors that are not those of the model, or whose parts do not make them up; reads
    the headers of files only."""
    with TensorReader(folder) as reader:
        if manifest.model.num_hidden_layers > len(reader.tensors):  # before they are listed
            raise DamagedCheckpoint(
                f"{folder}: has {len(reader.tensors)} tensors, too few for a model of "
                f"{manifest.model.num_hidden_layers} layers"
            )
        more = MoreTensors.of(manifest)
        expected = expected_tensors(
            manifest.kind, manifest.model, manifest.updates > 0, optimizer_of(manifest), more
        )
        problems = [
            *_wrong_names({*reader.tensors}, {*expected}),
            *_wrong_infos(reader, expected, manifest.kind),
        ]
    if problems:
        raise DamagedCheckpoint(*(f"{folder}: {problem}" for problem in problems[:10]))


def verify(folder: Path) -> Iterator[str]:
    """Check everything; yields the name of each file before it is read, for progress.

    Raises:
        DamagedCheckpoint: something is not what was saved.
    """
    manifest = Manifest.read(folder)
    check_names(folder, manifest)
    for name, expected in manifest.files.items():
        yield name
        check_file(folder, name, expected)
    check_tensors(folder, manifest)


def _kinds(name: str, tensor: LogicalTensor, optimizer: str) -> tuple[str, ...]:
    is_muons = optimizer == "muon" and ".layers." in name and len(tensor.shape) == 2
    return MUON_KINDS if is_muons else ADAM_KINDS


def _wrong_names(found: set[str], expected: set[str]) -> Iterator[str]:
    yield from (f"{name} is missing" for name in sorted(expected - found))
    yield from (f"{name} is none of the model's tensors" for name in sorted(found - expected))


def _wrong_infos(
    reader: TensorReader, expected: Mapping[str, tuple[int, ...]], kind: Kind
) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in reader.tensors:
            continue
        found, dtype = reader.shape(name), reader.dtype(name)
        if found != shape:
            yield f"{name} has shape {list(found)}, the model needs {list(shape)}"
        elif dtype not in _dtypes(name, kind):
            yield f"{name} is {dtype}, not {' or '.join(map(str, _dtypes(name, kind)))}"
        else:
            yield from _wrong_parts(name, shape, reader.tensors[name].chunks)


def _dtypes(name: str, kind: Kind) -> tuple[torch.dtype, ...]:
    """What a tensor may be stored in."""
    if kind == "training":
        return torch.float32, torch.float64
    if name.endswith(f".{CODES}"):
        return (torch.uint8,)
    if name.endswith(f".{SCALE}"):
        return (torch.float32,)
    return torch.float32, torch.bfloat16


def _wrong_parts(
    name: str, shape: Sequence[int], parts: Sequence[ChunkStorageMetadata]
) -> Iterator[str]:
    if sum(math.prod(part.sizes) for part in parts) != math.prod(shape):
        yield f"{name} is not complete"
    elif any_overlap(parts):
        yield f"{name} has parts that overlap"


def any_overlap(parts: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether any two parts of a tensor have an element in common."""
    active: list[ChunkStorageMetadata] = []  # those that reach the rows of the present one
    for part in sorted(parts, key=lambda part: tuple(part.offsets)):
        active = [
            other
            for other in active
            if not part.offsets or other.offsets[0] + other.sizes[0] > part.offsets[0]
        ]
        if any(_overlap(part, other) for other in active):
            return True
        active.append(part)
    return False


def _overlap(a: ChunkStorageMetadata, b: ChunkStorageMetadata) -> bool:
    return all(
        start < other_start + other_size and other_start < start + size
        for start, size, other_start, other_size in zip(
            a.offsets, a.sizes, b.offsets, b.sizes, strict=True
        )
    )
