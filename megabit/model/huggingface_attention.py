"""Causal self-attention as ``transformers`` computes it."""

from einops import rearrange
from torch import Tensor

from megabit.interop.huggingface import arithmetic
from megabit.model.attention import Attention
from megabit.model.rope import rotate
from megabit.tensor_parallel import ForwardPass


class HuggingFaceAttention(Attention):
    """Over whole sequences by torch's SDPA, with the bits of ``transformers``; over a cache of keys
    and values as ``Attention``, which agrees to rounding. For inference."""

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: int,
        forward_pass: ForwardPass,
    ) -> Tensor:
        if forward_pass.cache is not None:
            return super()._attend(q, k, v, rope, batch, forward_pass)
        q, k, v = (
            rearrange(y, "(b s) (h d) -> b s h d", b=batch, d=self.head_dim) for y in (q, k, v)
        )
        q, k = rotate(q, *rope), rotate(k, *rope)
        k, v = self.kv_heads.expand(k, v)
        q, k, v = (rearrange(y, "b s h d -> b h s d") for y in (q, k, v))
        return arithmetic.attend(q, k, v, "sdpa").flatten(0, 1)
