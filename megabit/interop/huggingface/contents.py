"""What a Hugging Face checkpoint must hold, and under which names.

Everything that headers tell is checked here, before a value is read.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

import torch

from megabit.checkpoint.source import LogicalTensor, logical_tensors, row_slices
from megabit.config import ModelConfig
from megabit.errors import UserError
from megabit.interop.huggingface.config import HuggingFaceConfig
from megabit.interop.huggingface.tensor_folder import StoredTensor, TensorFolder
from megabit.interop.json_fields import shown_name

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

DENSE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALE_DTYPES = (*DENSE_DTYPES, torch.float64)

_COMPUTED = "rotary_emb.inv_freq"
"""A table that old releases saved and none reads."""

CHUNK_ELEMENTS = 1 << 20
"""Of a tensor all of which is looked at, in memory at a time; at least a row."""

_LISTED = 3
"""Names in a message."""


class Contents:
    """The tensors of a checkpoint by megabit's names.

    Raises:
        UserError: a tensor is missing, is of another shape or dtype, or is none of the model's.
    """

    def __init__(self, folder: TensorFolder, config: HuggingFaceConfig) -> None:
        self.folder = folder
        self.config = config
        stored = folder.tensors
        self.model = self._resolve_tied(config.model)
        self.logical = logical_tensors(self.model)
        wanted = {self.stored_name(name) for name in self.logical}
        if self.is_offline:
            wanted |= {f"{name}_scale" for name in self.ternary()}
        missing = [name for name in wanted if name not in stored]
        if missing:
            raise UserError(f"{folder.path}: has no {_listed(missing)}; get all of its files")
        ignored = {HEAD} if self.model.tie_word_embeddings else set()
        unknown = [
            name for name in stored.keys() - wanted - ignored if not name.endswith(_COMPUTED)
        ]
        if unknown:
            raise UserError(
                f"{stored[min(unknown)].file}: has {_listed(unknown)}, which megabit's model "
                "has not: it is another architecture"
            )
        for name, tensor in self.logical.items():
            self._check(name, tensor)

    @property
    def is_offline(self) -> bool:
        """Whether ternary weights are codes and scales."""
        quantization = self.config.quantization
        return quantization is not None and quantization.mode == "offline"

    def ternary(self) -> Iterator[str]:
        """Names of ternary weights."""
        return (name for name, tensor in self.logical.items() if tensor.is_ternary)

    def stored_name(self, name: str) -> str:
        """A tied head may be stored in place of the embedding."""
        return HEAD if name == EMBEDDING and EMBEDDING not in self.folder.tensors else name

    def stored(self, name: str) -> StoredTensor:
        """Where a tensor is."""
        return self.folder.tensors[self.stored_name(name)]

    def is_packed(self, name: str) -> bool:
        """Whether four codes are in a byte."""
        return self.stored(name).dtype == torch.uint8

    def refuse(self, name: str, what: str) -> NoReturn:
        """Raise for the tensor of that name."""
        raise UserError(f"{self.folder.tensors[name].file}: {name}: {what}")

    def _check(self, name: str, tensor: LogicalTensor) -> None:
        stored_name = self.stored_name(name)
        stored = self.stored(name)
        if not (tensor.is_ternary and self.is_offline):
            if stored.shape != tensor.shape or stored.dtype not in DENSE_DTYPES:
                self._refuse_kind(stored_name, f"floats of shape {tensor.shape}")
            return
        scale = self.folder.tensors[f"{name}_scale"]
        if scale.shape not in ((1,), ()) or scale.dtype not in SCALE_DTYPES:
            self._refuse_kind(f"{name}_scale", "one float")
        n, k = tensor.shape
        is_loose = stored.shape == (n, k) and stored.dtype in DENSE_DTYPES
        if self.config.quantization is not None:
            is_loose &= self.config.quantization.linear_class == "autobitlinear"
        is_packed = n % 4 == 0 and stored.shape == (n // 4, k) and self.is_packed(name)
        if not (is_packed or is_loose):
            self._refuse_kind(stored_name, f"packed codes of shape ({n}/4, {k})")

    def _refuse_kind(self, name: str, wanted: str) -> NoReturn:
        found = self.folder.tensors[name]
        dtype = "an unknown dtype" if found.dtype is None else str(found.dtype)
        self.refuse(name, f"must be {wanted}, not {dtype} {found.shape}")

    def _resolve_tied(self, model: ModelConfig) -> ModelConfig:
        """As transformers does: a head that differs from the embedding is not tied to it."""
        stored = self.folder.tensors
        if not model.tie_word_embeddings or not {HEAD, EMBEDDING} <= stored.keys():
            return model
        whole = slice(0, model.vocab_size), slice(0, model.hidden_size)
        shape = (model.vocab_size, model.hidden_size)
        is_tied = stored[HEAD].shape == stored[EMBEDDING].shape == shape and all(
            torch.equal(*(self.folder.read(name, rows).float() for name in (HEAD, EMBEDDING)))
            for rows in row_slices(whole, CHUNK_ELEMENTS)
        )
        return model if is_tied else replace(model, tie_word_embeddings=False)


def _listed(names: list[str]) -> str:
    shown = ", ".join(shown_name(name) for name in sorted(names)[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"
