"""A Hugging Face checkpoint on disk as a ``ModelSource``.

Names of tensors are megabit's own. Ternary weights come in four forms:

- dense: of a model that is not ternary yet; a start for training
- ``online``: master weights, of which codes and scales are derived as in training
- ``offline``, packed: uint8 ``[N/4, K]`` that mixes rows, with a ``weight_scale`` beside it
- ``offline``, loose: codes as floats, to which transformers unpacks ``autobitlinear``

Only what is asked for is read. A LLaMA has no SubLN: its ``norm_placement`` is ``prenorm``.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megabit.checkpoint.latent import LatentWeights
from megabit.checkpoint.source import Index, row_slices
from megabit.config import ModelConfig
from megabit.errors import UserError
from megabit.interop.huggingface.config import Quantization, read_config
from megabit.interop.huggingface.contents import CHUNK_ELEMENTS, EMBEDDING, Contents
from megabit.interop.huggingface.tensor_folder import TensorFolder
from megabit.interop.huggingface.tokenizer_files import COPIED
from megabit_kernels import numerics
from megabit_kernels.formats.huggingface import decode_scale
from megabit_kernels.packing import check_bytes, pack

ASSETS = ("config.json", *COPIED)


class HuggingFaceSource:
    """The checkpoint in a folder.

    Opening it reads headers and scales, and checks that each tensor is there once and is what
    ``config.json`` asks for. ``verify`` looks at all values.

    Args:
        path: a folder with ``config.json`` and safetensors files.

    Raises:
        UserError: it is not a model that megabit has, or not whole.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = TensorFolder(path)
        self._config = read_config(path / "config.json")
        self._contents = Contents(self._folder, self._config)
        self._latent = LatentWeights(path, self._contents.logical, self.values)
        self._gammas: dict[str, Tensor] = {}
        if self._contents.is_offline:
            self._gammas = {name: self._gamma(name) for name in self._contents.ternary()}

    @property
    def path(self) -> Path:
        return self._path

    @property
    def model(self) -> ModelConfig:
        return self._contents.model

    @property
    def max_length(self) -> int:
        return self._config.max_length

    @property
    def has_masters(self) -> bool:
        return not self._contents.is_offline

    @property
    def assets(self) -> Mapping[str, Path]:
        return {name: self.path / name for name in ASSETS if (self.path / name).is_file()}

    @property
    def architecture(self) -> str:
        """As ``config.json`` calls it."""
        return self._config.architecture

    @property
    def quantization(self) -> Quantization | None:
        """How ternary weights are held; None: dense."""
        return self._config.quantization

    @property
    def dtype(self) -> torch.dtype:
        """What transformers computes in unless it is told otherwise."""
        return self._config.dtype or self._contents.stored(EMBEDDING).dtype or torch.float32

    def values(self, name: str, index: Index | None = None) -> Tensor:
        tensor = self._contents.logical[name]
        index = index or tensor.whole
        if tensor.is_ternary and not self.has_masters:
            raise UserError(
                f"{self.path}: has codes and scales of {name} and no master weights, "
                "from which training could go on"
            )
        return self._folder.read(self._contents.stored_name(name), index)

    def codes(self, name: str, index: Index | None = None) -> Tensor:
        """As ``ModelSource`` says.

        Raises:
            UserError: they cannot be read, are no codes, or the whole weight is zero.
        """
        whole = self._contents.logical[name].whole
        index = index or whole
        if self.has_masters:
            self.scale(name)
            return self._latent.codes(name, index)
        is_packed = self._contents.is_packed(name)
        codes = (self._packed_codes if is_packed else self._loose_codes)(name, index)
        if index == whole and not bool(codes.any()):
            self._refuse_zeros(name)
        return pack(codes)

    def scale(self, name: str) -> Tensor:
        if not self.has_masters:
            return self._gammas[name]
        gamma = self._latent.scale(name)
        if bool(gamma <= numerics.MIN_SCALE) and not any(
            bool(self.values(name, rows).any())
            for rows in row_slices(self._contents.logical[name].whole, CHUNK_ELEMENTS)
        ):
            self._refuse_zeros(name)
        return gamma

    def weight_scale(self, name: str) -> Tensor:
        """The ``weight_scale`` of shape [1] that an ``offline`` checkpoint has for ``name``, as it
        is stored."""
        return self._folder.read(f"{name}_scale").reshape(1)

    def verify(self) -> None:
        """Look at all values, reading the whole checkpoint once.

        Raises:
            UserError: a number is not finite, a byte holds code 3, or a ternary weight is zero.
        """
        for name, tensor in self._contents.logical.items():
            if not tensor.is_ternary:
                for rows in row_slices(tensor.whole, CHUNK_ELEMENTS):
                    if not bool(self.values(name, rows).isfinite().all()):
                        self._contents.refuse(
                            self._contents.stored_name(name),
                            "has values that are not finite; get the file again",
                        )
            elif self.has_masters:
                self.scale(name)
            else:
                self.codes(name)

    def _gamma(self, name: str) -> Tensor:
        """γ of codes, from the scale beside them."""
        assert self.quantization is not None
        stored = self.weight_scale(name)
        try:
            gamma = decode_scale(stored, self.quantization.linear_class)
        except ValueError:
            gamma = torch.zeros(())
        if not (bool(gamma.isfinite()) and bool(gamma > 0)):
            self._contents.refuse(
                f"{name}_scale",
                f"must be positive and finite, not {stored.item()}; get the file again",
            )
        return gamma

    def _packed_codes(self, name: str, index: Index) -> Tensor:
        """int8 codes of a part: row ``i·N/4 + r`` is field i of the bytes in row r."""
        rows, columns = index
        quarter = self._contents.logical[name].shape[0] // 4
        width = columns.stop - columns.start
        codes = torch.empty(rows.stop - rows.start, width, dtype=torch.int8)
        for field in range(4):
            begin = max(rows.start, field * quarter)
            end = min(rows.stop, (field + 1) * quarter)
            if begin < end:
                place = slice(begin - field * quarter, end - field * quarter)
                data = self._folder.read(name, (place, columns))
                try:
                    check_bytes(data, "it")
                except ValueError as error:
                    self._contents.refuse(name, f"{error}; get the file again")
                fields = (data >> 2 * field & 3).view(torch.int8).sub_(1)
                codes[begin - rows.start : end - rows.start] = fields
        return codes

    def _loose_codes(self, name: str, index: Index) -> Tensor:
        """int8 codes of a part of what holds them as floats."""
        values = self._folder.read(name, index)
        if not bool(((values == 0) | (values.abs() == 1)).all()):
            self._contents.refuse(name, "must hold −1, 0 and 1 only; get the file again")
        return values.to(torch.int8)

    def _refuse_zeros(self, name: str) -> None:
        self._contents.refuse(
            name, "is zero everywhere, as in damaged uploads; get the file again, or another one"
        )
