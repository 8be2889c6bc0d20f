"""Lossy formats of gradients (``precision.gradients``): less to send over DP, and what is lost.

Each file is one ``wire.Codec``: ``blocks`` rounds to 8 or 4 bits, ``topk`` sends the largest
elements, ``ternary`` draws −1, 0 or +1. docs/communication.md has what they cost in bytes and loss.
"""

from megabit.config import Config
from megabit.data_parallel.codecs.blocks import BlockCodec
from megabit.data_parallel.codecs.ternary import TernaryCodec
from megabit.data_parallel.codecs.topk import TopKCodec
from megabit.data_parallel.wire import Codec

__all__ = ["BlockCodec", "TernaryCodec", "TopKCodec", "codec_of"]


def codec_of(config: Config) -> Codec | None:
    """The codec that ``config`` asks for; None where gradients travel as floats."""
    communication = config.communication
    match config.precision.gradients:
        case "int8":
            return BlockCodec(communication.block, bits=8)
        case "int4":
            return BlockCodec(communication.block, bits=4)
        case "topk":
            return TopKCodec(communication.topk_ratio)
        case "ternary":
            return TernaryCodec()
        case _:
            return None
