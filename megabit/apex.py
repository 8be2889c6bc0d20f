"""NVIDIA apex's fused optimizer and norm, where they are installed; looked for when first wanted.

The PyPI project named ``apex`` is something else, so it takes more than the name: the module must
have the class and its CUDA extension must load. torch's own fused AdamW and the norm in
``model/norm.py`` serve everywhere else. Not run by the tests, which have no GPU: they check that
other packages of that name are left alone.
"""

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor


def fused_adam() -> type[Any] | None:
    """``apex.optimizers.FusedAdam``, or None."""
    return _find("apex.optimizers", "FusedAdam", extension="amp_C")


def fused_rms_norm() -> Callable[[Tensor, Tensor, tuple[int, ...], float], Tensor] | None:
    """``f(x, gain, normalized_shape, eps)`` of apex, or None."""
    module = "apex.normalization.fused_layer_norm"
    return _find(module, "fused_rms_norm_affine", extension="fused_layer_norm_cuda")


def _find(module: str, name: str, extension: str) -> Any:
    try:
        importlib.import_module(extension)
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
