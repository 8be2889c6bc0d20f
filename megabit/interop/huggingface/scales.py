"""The ``weight_scale`` of a ternary weight: γ, or 1/γ, in a dtype that gives γ back."""

import torch
from torch import Tensor

from megabit.checkpoint.source import ModelSource
from megabit.interop.huggingface.config import Quantization
from megabit.interop.huggingface.source import HuggingFaceSource
from megabit_kernels.formats.huggingface import LinearClass, decode_scale, encode_scale


def stored_scale(
    source: ModelSource, name: str, linear_class: LinearClass, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``weight_scale``, shape [1], of which ``decode_scale`` makes exactly γ.

    In ``dtype`` if that is enough. fp32 always is for ``autobitlinear``. For ``bitlinear`` it is
    not: for about one γ in seven, no fp32 number has it as its inverse rounded to fp32, because
    below √2 inverses are further apart than the numbers around them. Then it is fp64.

    transformers casts it to the model's dtype when it loads, whatever it is stored in. A source
    that has such a scale itself keeps it as it is.
    """
    if isinstance(source, HuggingFaceSource) and source.quantization == Quantization(
        "offline", linear_class
    ):
        return source.weight_scale(name)
    gamma = source.scale(name)
    for candidate in (dtype, torch.float32):
        stored = encode_scale(gamma, linear_class, candidate)
        if bool(decode_scale(stored, linear_class) == gamma):
            return stored
    return encode_scale(gamma, linear_class, torch.float64)
