"""What a forward pass carries along to every layer: random numbers, results to compute once, and
where backward puts what is to be computed later."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from megabit.tensor_parallel.probe import ActivationProbe
from megabit.tensor_parallel.weight_gradients import WeightGradientQueue


@dataclass(frozen=True)
class Noise:
    """The random numbers of one microbatch of a training step: the same at every layout.

    They depend on the run's seed, the step, the number of the microbatch in the *global* batch and
    on the name of what draws them.
    """

    seed: int
    step: int
    microbatch: int

    def seed_of(self, name: str) -> int:
        """A 63-bit seed for ``name``."""
        text = f"{self.seed}/{self.step}/{self.microbatch}/{name}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


@dataclass
class Kept:
    """Results that a recomputation takes over from the first pass, in the order of computation.

    What ranks reduced together is kept where it is small, so that it is neither computed nor
    communicated again.
    """

    results: list[Tensor] = field(default_factory=list)
    is_replay: bool = False
    """Whether this is the second pass, to which ``results`` are given."""
    _next: int = 0
    _last_product: int | None = None

    def result(self, compute: Callable[[], Tensor], is_product: bool) -> Tensor:
        """What ``compute`` gave in the first pass."""
        if self.is_replay:
            self._next += 1
            # Another tensor: the graph of the second pass must not hang on the one that is kept.
            return self.results[self._next - 1].detach()
        if is_product:
            self._last_product = len(self.results)
        self.results.append(compute())
        return self.results[-1]

    def end_first_pass(self) -> None:
        """The part that is recomputed ends with a product: nothing behind it reads its values
        again, so their shape is enough."""
        if self._last_product is not None:
            last = self.results[self._last_product]
            self.results[self._last_product] = last.new_empty(()).expand(last.shape)


@dataclass(frozen=True)
class Quantization:
    """How far a run quantizes at present, beside what its model says."""

    share: float = 1.0
    """λ: 0 is full precision, 1 ternary. Weights are W + λ(γ·code − W), activations likewise."""
    full_precision_activations: bool = False
    """W1.58A16, whatever the model says: a measure of the stability guard."""


TERNARY = Quantization()
"""λ = 1, and activations as the model says."""


class AttentionCache(Protocol):
    """Keys and values of tokens that earlier forward passes computed (``inference.kv_cache``)."""

    @property
    def positions(self) -> Tensor:
        """int64 ``[T]``: of the pass's tokens in their sequences."""

    @property
    def query_starts(self) -> Tensor:
        """int ``[n + 1]``: where the tokens of n sequences begin, and where the last ends."""

    def keep(self, layer: int, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keep ``k`` and ``v``, as ``attend`` does, and give all that is kept of each sequence:
        ``[context, KV heads, D]``, of the dtype of ``k``."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kv_of_query: Tensor) -> Tensor:
        """Keep ``k`` and ``v``, and attend to them and to what is kept of the same sequences.

        Args:
            layer: of the whole model.
            q: ``[T, query heads, D]``, rotated; ``k`` and ``v``: ``[T, KV heads, D]``.
            kv_of_query: int ``[query heads]``, the KV head that each reads.

        Returns:
            ``[T, query heads, D]``.
        """


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass of a stage."""

    noise: Noise | None = None
    """None outside training: no dropout, and no backward pass that rounds stochastically."""
    kept: Kept | None = None
    weight_gradients: WeightGradientQueue | None = None
    """Where backward puts off the gradients of weight matrices; None: it computes them at once."""
    quantization: Quantization = TERNARY
    probe: ActivationProbe | None = None
    """Counts what activations are quantized to, where somebody wants to know."""
    cache: AttentionCache | None = None
    """Tokens are of many sequences, and attend to what is cached of them. None: they are whole
    sequences of one length, which attend to themselves."""

    def statistics(self, compute: Callable[[], Tensor]) -> Tensor:
        """``compute()``, statistics that ranks share; a recomputation gets what it gave before."""
        return compute() if self.kept is None else self.kept.result(compute, is_product=False)

    def product(self, compute: Callable[[], Tensor]) -> Tensor:
        """``compute()``, a row-parallel product; a recomputation gets what it gave before."""
        return compute() if self.kept is None else self.kept.result(compute, is_product=True)

    def seed_of(self, name: str) -> int:
        """A seed for ``name``; 0 without noise."""
        return 0 if self.noise is None else self.noise.seed_of(name)


PLAIN = ForwardPass()
"""A pass of its own: evaluation, inference, a layer used alone."""
