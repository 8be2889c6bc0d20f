"""What is measured: the ternary layers of known models, and how many tokens go through them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """One matrix ``[N, K]``; layers of a model that have the same sizes are one."""

    model: str
    name: str
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.model} {self.name}, {self.n} × {self.k}"

    def operations(self, m: int) -> int:
        """Of a product with ``m`` tokens, a multiplication and an addition counted as two."""
        return 2 * m * self.n * self.k


MODELS: dict[str, tuple[Layer, ...]] = {
    # BitNet b1.58 2B4T: hidden 2560, 5 key-value heads of 128, ffn 6912.
    "2b4t": (
        Layer("2b4t", "q, o", 2560, 2560),
        Layer("2b4t", "k, v", 640, 2560),
        Layer("2b4t", "gate, up", 6912, 2560),
        Layer("2b4t", "down", 2560, 6912),
    ),
    # The 3B of "The Era of 1-bit LLMs": hidden 3200, as many key-value heads as heads, ffn 8640.
    "3b": (
        Layer("3b", "q, k, v, o", 3200, 3200),
        Layer("3b", "gate, up", 8640, 3200),
        Layer("3b", "down", 3200, 8640),
    ),
    # Llama 70B: hidden 8192, 8 key-value heads of 128, ffn 28672.
    "70b": (
        Layer("70b", "q, o", 8192, 8192),
        Layer("70b", "k, v", 1024, 8192),
        Layer("70b", "gate, up", 28672, 8192),
        Layer("70b", "down", 8192, 28672),
    ),
    # examples/model/tiny.yaml, which trains on a laptop.
    "trainer": (
        Layer("trainer", "q, o", 256, 256),
        Layer("trainer", "k, v", 128, 256),
        Layer("trainer", "gate, up", 768, 256),
        Layer("trainer", "down", 256, 768),
    ),
}

TOKENS = tuple(2**power for power in range(13))
"""M from 1 to 4096."""
QUICK_TOKENS = (1, 16, 256)


def layers_of(models: Sequence[str]) -> tuple[Layer, ...]:
    """The layers of the named models, in their order.

    Raises:
        ValueError: a name is not in ``MODELS``, or there is none.
    """
    unknown = [name for name in models if name not in MODELS]
    if unknown or not models:
        named = f"{unknown[0]!r} is not one" if unknown else "none is named"
        raise ValueError(f"shapes: {named}; choose from {', '.join(MODELS)}")
    return tuple(layer for name in dict.fromkeys(models) for layer in MODELS[name])
