"""FLOPs per token against counts by hand, and against the number of weights."""

import math
from dataclasses import replace

import pytest

from megabit.checkpoint.source import logical_tensors
from megabit.config import ModelConfig
from megabit.model.flops import Flops, flops_per_token

GROUPED = ModelConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
PLAIN = ModelConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
)


def test_grouped_queries_by_hand() -> None:
    """2 layers; q is 8 × 8, k and v 4 × 8, gate 12 × 8; the head 10 × 8; 5 tokens."""
    found = flops_per_token(GROUPED, 5)
    assert found == Flops(
        q=2 * 64 * 2,
        k=2 * 32 * 2,
        v=2 * 32 * 2,
        o=2 * 64 * 2,
        gate=2 * 96 * 2,
        up=2 * 96 * 2,
        down=2 * 96 * 2,
        attention=2 * (2 * 8 * 5 + 2 * 5 * 8),  # of each layer: 5 scores, a sum of 5 values
        head=160,
    )
    assert found.products == 256 + 128 + 128 + 256 + 3 * 384 + 160 == 2080
    assert (found.forward, found.total) == (2400, 7200)


def test_plain_attention_by_hand() -> None:
    """3 layers; q, k, v and o are 16 × 16, gate 20 × 16; the head 50 × 16; 7 tokens."""
    found = flops_per_token(PLAIN, 7)
    assert found.q == found.k == found.v == found.o == 3 * 512
    assert found.gate == found.up == found.down == 3 * 640
    assert (found.head, found.attention) == (1600, 3 * 4 * 16 * 7)
    assert found.forward == 4 * 1536 + 3 * 1920 + 1600 + 1344 == 14_848
    assert found.total == 3 * 14_848


@pytest.mark.parametrize("model", [GROUPED, PLAIN], ids=["grouped", "plain"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_convention_of_palm(model: ModelConfig, tied: bool) -> None:
    """6·N + 12·L·H·S, where N leaves out gains, and an embedding that is not the head as well."""
    model = replace(model, tie_word_embeddings=tied)
    skipped = () if tied else ("model.embed_tokens.weight",)
    weights = sum(
        math.prod(tensor.shape)
        for name, tensor in logical_tensors(model).items()
        if len(tensor.shape) == 2 and name not in skipped
    )
    found = flops_per_token(model, 64)
    attention = 12 * model.num_hidden_layers * model.hidden_size * 64
    assert found.total == 6 * weights + attention
    assert found == flops_per_token(replace(model, tie_word_embeddings=not tied), 64)
