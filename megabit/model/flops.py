"""Floating-point operations of a model's products, for TFLOP/s and model FLOPs utilization (MFU).

A multiply-add is two. Counted is what the *model* takes, whatever a run does more (recomputation)
and in whatever numbers it does it (int8 forward). Norms, rotary positions, activations, softmax,
quantization and a Hadamard transform's additions are left out, and the embedding is a lookup.

Attention is counted as in PaLM (arXiv 2204.02311, appendix B):
each query meets all S keys, so a token takes 6·N + 12·L·H·S in all, with N the weights of matrices
(the head's, but no embedding that is only looked up) and H the hidden size. Figures of MFU in the
literature mean that, so ours are of the same kind. Causal attention needs only (S + 1)/2 keys for
each query: counted so, a token would take about 6·N + 6·L·H·S.
"""

from dataclasses import dataclass

from megabit.config import ModelConfig

BACKWARD_AND_FORWARD = 3
"""Backward has two products, of input and weight gradients, for each one forward."""


@dataclass(frozen=True)
class Flops:
    """Of one token's forward pass, by where they are spent; layers are added up."""

    q: int
    k: int
    v: int
    o: int
    gate: int
    up: int
    down: int
    attention: int
    """Scores and weighted values, of all S keys."""
    head: int

    @property
    def products(self) -> int:
        """Of weight matrices: 2·N."""
        projections = self.q + self.k + self.v + self.o + self.gate + self.up + self.down
        return projections + self.head

    @property
    def forward(self) -> int:
        """As PaLM counts."""
        return self.products + self.attention

    @property
    def total(self) -> int:
        """Forward and backward, as PaLM counts: what MFU is a share of."""
        return BACKWARD_AND_FORWARD * self.forward


def flops_per_token(model: ModelConfig, seq_length: int, has_head: bool = True) -> Flops:
    """Of a token in samples of ``seq_length`` tokens (S).

    Grouped queries save in k and v, not in attention: each query head meets its keys. A tied head
    computes as much as one of its own; embeddings are made without.
    """
    hidden, layers = model.hidden_size, model.num_hidden_layers
    kv = model.num_key_value_heads * model.head_dim
    square, to_kv, to_ffn = (2 * layers * hidden * n for n in (hidden, kv, model.intermediate_size))
    return Flops(
        q=square,
        k=to_kv,
        v=to_kv,
        o=square,
        gate=to_ffn,
        up=to_ffn,
        down=to_ffn,
        attention=2 * 2 * layers * hidden * seq_length,
        head=2 * hidden * model.vocab_size if has_head else 0,
    )
