"""The weights of one layer, in each form that a contestant wants, and enough of each.

A contestant finds its weight in memory and not in a cache if it goes through several in turn. They
are copies of one another at different addresses, since no contestant's time depends on values. They
lie where such weights lie in use: ours in huge pages where the native kernels put them there,
torch's where torch puts them.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megabit_kernels import huge_pages
from megabit_kernels.benchmark.roofline import CACHES
from megabit_kernels.benchmark.shapes import Layer
from megabit_kernels.conversion import Layout
from megabit_kernels.weight import TernaryWeight

MIN_WEIGHTS, MAX_WEIGHTS = 2, 4096


class NoRoom(Exception):
    """Two weights of a form do not fit the memory that they may take."""


Form = Layout | torch.dtype
"""A layout of a ``TernaryWeight``, or the dtype of a plain matrix ``[N, K]``."""


def bytes_per_value(form: Form) -> float:
    """Memory that a weight takes in a form, padding aside."""
    if isinstance(form, torch.dtype):
        return form.itemsize
    return 1 if form == "int8" else 1 / 4


class LayerWeights:
    """Makes each form when it is first asked for, and keeps it."""

    def __init__(
        self, layer: Layer, device: torch.device, cache_bytes: int, memory_bytes: int
    ) -> None:
        """``cache_bytes`` is the last-level cache, ``memory_bytes`` what one form may take."""
        self.layer = layer
        self._shape = layer.n, layer.k
        self._device = device
        self._cache_bytes = cache_bytes
        self._memory_bytes = memory_bytes
        self._forms: dict[Form, list[Any]] = {}

    def of(self, form: Form) -> list[Any]:
        """Distinct weights, ``TernaryWeight`` or ``Tensor``, each in ``form``.

        A plain matrix holds codes if it is int8, random values if it is floating-point.

        Raises:
            NoRoom: two of them take more than ``memory_bytes``.
        """
        if form not in self._forms:
            self._forms[form] = self._make(form)
        return self._forms[form]

    def bytes_of(self, form: Form) -> int:
        """Of one weight in ``form``."""
        weight = self.of(form)[0]
        return weight.nbytes

    def _make(self, form: Form) -> list[Any]:
        one_bytes = int(math.prod(self._shape) * bytes_per_value(form))
        if MIN_WEIGHTS * one_bytes > self._memory_bytes:
            raise NoRoom(
                f"two weights take {MIN_WEIGHTS * one_bytes / 1e9:.1f} GB; "
                f"one form may take {self._memory_bytes / 1e9:.1f} GB"
            )
        if isinstance(form, torch.dtype):
            return list(self._copies(self._values(form)))
        scale = torch.ones((), device=self._device)
        if form == "int8":
            codes = self.of(torch.int8)
            return [TernaryWeight(one, form, self._shape, scale) for one in codes]
        weight = TernaryWeight.from_codes(self._values(torch.int8), scale, form)
        return [replace(weight, data=one) for one in self._copies(weight.data)]

    def _values(self, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(0)
        if dtype == torch.int8:
            make = partial(torch.randint, -1, 2, self._shape)
        else:
            make = partial(torch.randn, self._shape)
        return make(dtype=dtype, device=self._device, generator=generator)

    def _copies(self, first: Tensor) -> Tensor:
        """``[count, …]``: as many as cold caches need and memory allows."""
        count = min(-(-CACHES * self._cache_bytes // first.nbytes), MAX_WEIGHTS)
        count = max(MIN_WEIGHTS, min(count, self._memory_bytes // first.nbytes))
        shape = (count, *first.shape)
        if first.dtype == torch.uint8 and self._device.type == "cpu":
            copies = huge_pages.empty(shape, first.dtype)
        else:
            copies = torch.empty(shape, dtype=first.dtype, device=self._device)
        return copies.copy_(first.expand(shape))
