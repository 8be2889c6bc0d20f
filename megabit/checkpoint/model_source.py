"""A megabit checkpoint as a ``ModelSource``: masters, or codes and scales.

Reads headers when it is opened, and then only the slices that are asked for. Whether files are what
was saved is a question of its own (``verify``): its answer takes a pass over all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megabit.checkpoint.folder import find_checkpoint
from megabit.checkpoint.latent import LatentWeights
from megabit.checkpoint.manifest import (
    MANIFEST,
    NEVER_TERNARY,
    QUANTIZATION_SHARE,
    DamagedCheckpoint,
    Manifest,
)
from megabit.checkpoint.reader import TensorReader
from megabit.checkpoint.source import Index, LogicalTensor, logical_tensors
from megabit.checkpoint.verify import CODES, SCALE, check_tensors
from megabit.config import ModelConfig
from megabit.errors import UserError
from megabit.tensor_parallel import WeightScale
from megabit_kernels import packing


class CheckpointSource(ABC):
    """What both kinds have in common; a ``ModelSource``."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.tensors: Mapping[str, LogicalTensor] = logical_tensors(manifest.model)
        self._reader = TensorReader(path)

    @property
    def model(self) -> ModelConfig:
        return self.manifest.model

    @property
    def max_length(self) -> int:
        return self.manifest.max_length

    @property
    def has_masters(self) -> bool:
        return self.manifest.kind == "training"

    @property
    def was_never_ternary(self) -> bool:
        """Whether these are a dense model's weights, of which nothing was trained yet."""
        return self.manifest.updates == 0 and bool(self.manifest.run.get(NEVER_TERNARY))

    @property
    def assets(self) -> Mapping[str, Path]:
        return self.manifest.assets(self.path)

    def _read(self, stored_as: str, index: Index | None = None) -> Tensor:
        with self._reader as reader:  # what stays open is mapped, and fills memory as it is read
            return reader.read(stored_as, index)

    @abstractmethod
    def values(self, name: str, index: Index | None = None) -> Tensor: ...

    @abstractmethod
    def codes(self, name: str, index: Index | None = None) -> Tensor: ...

    @abstractmethod
    def scale(self, name: str) -> Tensor: ...


class TrainingSource(CheckpointSource):
    """Of a training checkpoint: codes and scales are made of the masters, as training does it."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path, manifest)
        rule = WeightScale.of(manifest.model)
        self._latent = LatentWeights(path, self.tensors, self.values, rule)

    def values(self, name: str, index: Index | None = None) -> Tensor:
        return self._read(f"master/{name}", index)

    def codes(self, name: str, index: Index | None = None) -> Tensor:
        return self._latent.codes(name, index)

    def scale(self, name: str) -> Tensor:
        return self._latent.scale(name)


class TernarySource(CheckpointSource):
    """Of a ternary checkpoint: codes and scales are what is stored."""

    def values(self, name: str, index: Index | None = None) -> Tensor:
        if self.tensors[name].is_ternary:
            raise UserError(
                f"{self.path}: has codes of {name} and no master weights. Codes cannot become "
                "masters: γ·code would give the same codes and a smaller γ; use a training "
                "checkpoint"
            )
        return self._read(name, index)

    def codes(self, name: str, index: Index | None = None) -> Tensor:
        rows, columns = index or self.tensors[name].whole
        is_at_byte = columns.start % packing.CODES_PER_BYTE == 0
        is_last = columns.stop == self.tensors[name].shape[1]
        if not is_at_byte or not (is_last or columns.stop % packing.CODES_PER_BYTE == 0):
            raise ValueError(f"columns {columns.start}:{columns.stop} of {name} cut a byte")
        first, last = map(packing.packed_width, (columns.start, columns.stop))
        packed = self._read(f"{name}.{CODES}", (rows, slice(first, last)))
        try:
            packing.check_packed(packed, columns.stop - columns.start, f"{name}.{CODES}")
        except (TypeError, ValueError) as error:
            raise DamagedCheckpoint(f"{self.path}: {error}") from error
        return packed

    def scale(self, name: str) -> Tensor:
        scale = self._read(f"{name}.{SCALE}")
        if not (scale.isfinite() and scale > 0):
            raise DamagedCheckpoint(
                f"{self.path}: {name}.{SCALE} is {scale.item()}, not a positive number"
            )
        return scale


def open_model(path: Path, to_train: bool = False) -> CheckpointSource:
    """The model in a checkpoint, or in the newest one of a run or of a folder of checkpoints.

    Args:
        to_train: its masters are to be trained on; then it need not be ternary yet.

    Raises:
        DamagedCheckpoint: its tensors are not those of its model.
        UserError: there is no checkpoint, or one of another version, or one that was saved before
            the end of a run's quantization ramp.
    """
    folder = find_checkpoint(path)
    manifest = Manifest.read(folder)
    if not to_train:
        _refuse_unfinished_ramp(folder, manifest)
    check_tensors(folder, manifest)
    source = TrainingSource if manifest.kind == "training" else TernarySource
    return source(folder, manifest)


def _refuse_unfinished_ramp(folder: Path, manifest: Manifest) -> None:
    """Its codes would be another model than what was trained: W + λ(γ·code − W)."""
    share = manifest.run.get(QUANTIZATION_SHARE, 1.0)
    if not isinstance(share, int | float):
        raise DamagedCheckpoint(f"{folder / MANIFEST}: is damaged ({QUANTIZATION_SHARE}={share!r})")
    if not share >= 1:
        raise UserError(
            f"{folder}: was saved at λ = {share:g} of its quantization ramp: it is not ternary "
            "yet; train on, or use a later checkpoint"
        )
