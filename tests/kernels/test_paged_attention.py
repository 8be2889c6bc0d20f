"""Attention over pages: right values, and bits that depend on a token and its context alone.

Each instruction set of this machine, and plain torch, is held to the same.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megabit_kernels import KVPages, attention, native, native_attention, plain_attention

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [1, 16, 17, 37, 64, 65, 131]
"""Of sequences: one token, whole pages, whole chunks of 64 keys, and one more than either."""

each_way = pytest.mark.parametrize("way", [*native.isas(), "torch"])


@dataclass(frozen=True)
class Kernels:
    write: Callable[..., None]
    attend: Callable[..., Tensor]


def kernels(way: str) -> Kernels:
    if way == "torch":
        return Kernels(plain_attention.write_pages, plain_attention.paged_attention)
    library = native.require()
    return Kernels(
        partial(native_attention.write_pages, library, isa=way),
        partial(native_attention.paged_attention, library, isa=way),
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Sequence:
    """Of one sequence: q ``[S, heads, D]``, k and v ``[S, KV heads, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor

    def __len__(self) -> int:
        return len(self.q)


def sequence(
    length: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> Sequence:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(length, count, head_dim, generator=generator, dtype=torch.float64).to(dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    return Sequence(q, k, v)


def groups(heads: int, kv_heads: int) -> Tensor:
    return torch.arange(heads, dtype=torch.int32) // (heads // kv_heads)


@dataclass
class Cache:
    """Pages of some sequences, handed out in a random order."""

    sequences: list[Sequence]
    kv_of_query: Tensor
    pages: KVPages
    tables: Tensor
    kernels: Kernels

    @staticmethod
    def of(
        sequences: list[Sequence],
        kv_of_query: Tensor,
        way: str,
        block_size: int = 16,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> "Cache":
        _, kv_heads, head_dim = sequences[0].k.shape
        most = max(math.ceil(len(one) / block_size) for one in sequences)
        count = most * len(sequences) + 3
        pages = KVPages.allocate(
            count, block_size, kv_heads, head_dim, dtype or sequences[0].q.dtype
        )
        if pages.dtype != torch.int8:  # what was there before must not matter
            pages.keys.fill_(math.nan)
            pages.values.fill_(math.nan)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        tables = order[: most * len(sequences)].view(len(sequences), most).int()
        return Cache(sequences, kv_of_query, pages, tables, kernels(way))

    def step(self, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """One call for tokens ``begin`` to ``end`` of some sequences: what each of them gets."""
        size = self.pages.block_size
        slots, starts = [], [0]
        for i, begin, end in parts:
            at = torch.arange(begin, end)
            slots.append(self.tables[i].long()[at // size] * size + at % size)
            starts.append(starts[-1] + end - begin)
        q, k, v = (
            torch.cat([getattr(self.sequences[i], name)[begin:end] for i, begin, end in parts])
            for name in "qkv"
        )
        self.kernels.write(self.pages, k, v, torch.cat(slots))
        y = self.kernels.attend(
            q,
            self.pages,
            self.kv_of_query,
            self.tables[[i for i, _, _ in parts]],
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([end for _, _, end in parts], dtype=torch.int32),
        )
        return list(y.split([end - begin for _, begin, end in parts]))

    def whole(self) -> list[Tensor]:
        return self.step([(i, 0, len(one)) for i, one in enumerate(self.sequences)])


def alone(one: Sequence, kv_of_query: Tensor, way: str) -> Tensor:
    """One sequence, whole, in a cache of its own."""
    return Cache.of([one], kv_of_query, way).whole()[0]


def expected(one: Sequence, kv_of_query: Tensor) -> Tensor:
    index = kv_of_query.long()
    q, k, v = one.q.double(), one.k.double()[:, index], one.v.double()[:, index]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0).transpose(0, 1)


@each_way
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 2), (4, 4, 64), (6, 2, 18), (8, 1, 128), (2, 1, 256)]
)
def test_values(way: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    sequences = [sequence(length, heads, kv_heads, head_dim, dtype) for length in LENGTHS]
    kv_of_query = groups(heads, kv_heads)
    # A score is off by some roundings of numbers up to |q||k|/sqrt(D), here some ten: 1e-5 is ten
    # roundings of ten. Values are up to five. The result is rounded once more, to its own dtype.
    rtol, atol = torch.finfo(dtype).eps, 2e-5
    for one, y in zip(sequences, Cache.of(sequences, kv_of_query, way).whole(), strict=True):
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), expected(one, kv_of_query), rtol=rtol, atol=atol)


def test_fp64() -> None:
    one, kv_of_query = sequence(37, 4, 2, 24, torch.float64), groups(4, 2)
    q, k, v = (x.unsqueeze(0) for x in (one.q, one.k, one.v))
    y = attention.causal_attention(q, k, v, kv_of_query)
    torch.testing.assert_close(y[0], expected(one, kv_of_query), rtol=1e-13, atol=1e-13)


# What may not change a bit.


@each_way
@pytest.mark.parametrize("dtype", FLOATS)
def test_other_sequences_chunks_and_pages_change_no_bit(way: str, dtype: torch.dtype) -> None:
    kv_of_query = groups(4, 2)
    sequences = [sequence(length, 4, 2, 24, dtype) for length in LENGTHS]
    wanted = [alone(one, kv_of_query, way) for one in sequences]
    for block_size, chunk in ((8, 1), (16, 7), (32, 64), (48, 50), (5, 3)):
        cache = Cache.of(sequences, kv_of_query, way, block_size, seed=block_size)
        got: list[list[Tensor]] = [[] for _ in sequences]
        done = [0] * len(sequences)
        # Chunks of all sizes up to `chunk`, of more and fewer sequences in each call.
        while parts := [
            (i, done[i], min(len(one), done[i] + 1 + (sum(done) + i) % chunk))
            for i, one in enumerate(sequences)
            if done[i] < len(one)
        ]:
            for (i, _, end), y in zip(parts, cache.step(parts), strict=True):
                got[i].append(y)
                done[i] = end
        for one, pieces in zip(wanted, got, strict=True):
            assert torch.equal(torch.cat(pieces), one), (block_size, chunk)


@each_way
@pytest.mark.parametrize("head_dim", [64, 18])
def test_heads_of_other_ranks_change_no_bit(way: str, head_dim: int) -> None:
    """A rank has some of the heads; heads that read one KV head may be on two ranks."""
    one, kv_of_query = sequence(70, 12, 3, head_dim), groups(12, 3)
    wanted = alone(one, kv_of_query, way)
    for degree in (2, 3, 4, 12):
        count = 12 // degree
        for first in range(0, 12, count):
            own = kv_of_query[first : first + count]
            kv = slice(int(own[0]), int(own[-1]) + 1)
            part = Sequence(one.q[:, first : first + count], one.k[:, kv], one.v[:, kv])
            y = alone(part, own - own[0], way)
            assert torch.equal(y, wanted[:, first : first + count]), (degree, first)


@each_way
def test_threads_change_no_bit(way: str) -> None:
    sequences = [sequence(length, 4, 2, 64) for length in (130, 3, 100)]
    one_thread = Cache.of(sequences, groups(4, 2), way).whole()
    torch.set_num_threads(2)
    for y, wanted in zip(Cache.of(sequences, groups(4, 2), way).whole(), one_thread, strict=True):
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_whole_samples_have_the_bits_of_a_cache(dtype: torch.dtype) -> None:
    samples = [sequence(37, 4, 2, 24, dtype), sequence(38, 4, 2, 24, dtype)]
    q, k, v = (torch.stack([getattr(one, name)[:37] for one in samples]) for name in "qkv")
    y = attention.causal_attention(q, k, v, groups(4, 2))
    for i in range(2):
        pages = KVPages.allocate(5, 8, 2, 24, dtype)
        attention.write_pages(pages, k[i], v[i], torch.arange(37))
        for token in range(37):
            got = attention.paged_attention(
                q[i, token : token + 1],
                pages,
                groups(4, 2),
                torch.arange(5, dtype=torch.int32).unsqueeze(0),
                torch.tensor([0, 1], dtype=torch.int32),
                torch.tensor([token + 1], dtype=torch.int32),
            )
            assert torch.equal(got[0], y[i, token])


@pytest.mark.skipif(len(native.isas()) < 3, reason="one set of vector instructions at most")
def test_instruction_sets_with_fused_multiply_add_agree() -> None:
    sequences = [sequence(length, 6, 2, 48) for length in LENGTHS]
    best, *others = [isa for isa in native.isas() if isa != "portable"]
    wanted = Cache.of(sequences, groups(6, 2), best).whole()
    for isa in others:
        got = Cache.of(sequences, groups(6, 2), isa).whole()
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), isa


# int8 pages.


@each_way
@pytest.mark.parametrize("block_size", [8, 32])
def test_int8_pages_are_what_they_stand_for(way: str, block_size: int) -> None:
    """The bits of fp32 pages that hold code · scale, which is within half a unit of the number."""
    sequences = [sequence(length, 4, 2, 24) for length in LENGTHS]
    rounded = []
    for one in sequences:
        codes = [plain_attention.quantize_heads(x) for x in (one.k, one.v)]
        k, v = (code * scale.unsqueeze(-1) for code, scale in codes)
        for x, wide, (_, scale) in zip((one.k, one.v), (k, v), codes, strict=True):
            # A unit is the scale; a little more, since the quotient and the product are rounded.
            assert ((x - wide).abs() <= 0.50001 * scale.unsqueeze(-1)).all()
            assert torch.equal(scale, x.abs().amax(-1) / 127)
        rounded.append(Sequence(one.q, k, v))
    int8 = Cache.of(sequences, groups(4, 2), way, block_size, torch.int8).whole()
    fp32 = Cache.of(rounded, groups(4, 2), way, block_size).whole()
    for y, wanted in zip(int8, fp32, strict=True):
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("page_dtype", [*FLOATS, torch.int8])
def test_pages_are_written_alike(isa: str, dtype: torch.dtype, page_dtype: torch.dtype) -> None:
    """The native kernel has the bits of torch, special numbers and ties included."""
    k = torch.randn(40, 2, 70).mul(torch.logspace(-9, 6, 40)[:, None, None]).to(dtype)
    k[0], k[1, 0, 3], k[2, 1, 5], k[3, 0, 7] = 0, math.nan, math.inf, -math.inf
    v = torch.randn(40, 2, 70).mul(8).round().div(8).add(2**-9).to(dtype)
    slots = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:40]
    by_torch, by_isa = (KVPages.allocate(6, 10, 2, 70, page_dtype) for _ in range(2))
    plain_attention.write_pages(by_torch, k, v, slots)
    kernels(isa).write(by_isa, k, v, slots)
    for name in ("keys", "values", "key_scale", "value_scale"):
        got, wanted = getattr(by_isa, name), getattr(by_torch, name)
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


# Numbers that are hard, and ones that are wrong.


@each_way
@pytest.mark.parametrize("page_dtype", [torch.float32, torch.int8])
def test_what_is_not_finite_stays_where_it_is_seen(way: str, page_dtype: torch.dtype) -> None:
    clean = [sequence(length, 2, 1, 32) for length in (40, 70)]
    wanted = Cache.of(clean, groups(2, 1), way, dtype=page_dtype).whole()
    for bad in (math.nan, math.inf, -math.inf):
        for name, token in (("k", 20), ("v", 20), ("q", 20), ("v", 39)):
            spoiled = Sequence(*(getattr(clean[0], x).clone() for x in "qkv"))
            getattr(spoiled, name)[token, 0, 5] = bad
            first, second = Cache.of(
                [spoiled, clean[1]], groups(2, 1), way, dtype=page_dtype
            ).whole()
            assert torch.equal(second, wanted[1])
            assert torch.equal(first[:token], wanted[0][:token])
            if name == "q":  # of that head and token only
                assert torch.equal(first[token + 1 :], wanted[0][token + 1 :])
                assert torch.equal(first[token, 1], wanted[0][token, 1])
            if name == "v":  # everyone who sees it
                assert not first[token:, :, 5].isfinite().any()


@each_way
def test_scores_of_any_size(way: str) -> None:
    """Weights are relative to the largest score, so nothing overflows."""
    one = sequence(66, 2, 1, 16)
    for factor in (0.0, 1e-20, 1e4, 1e15):
        scaled = Sequence(one.q * factor, one.k, one.v)
        y = alone(scaled, groups(2, 1), way)
        # From 1e4 on a weight is 1 or as good as 0, unless two scores are close; what is rounded
        # of a score of 1e4 is up to 1e-3, and as much of a weight: fp64 decides who is largest.
        close = {0.0: 1e-6, 1e-20: 1e-6, 1e4: 1e-2, 1e15: 1e-6}[factor]
        torch.testing.assert_close(y.double(), expected(scaled, groups(2, 1)), rtol=0, atol=close)


@each_way
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_first_token_sees_its_own_value_only(way: str, dtype: torch.dtype) -> None:
    one = sequence(3, 4, 2, 10, dtype)
    y = alone(one, groups(4, 2), way)
    assert torch.equal(y[0], one.v[0][groups(4, 2).long()])


@each_way
def test_nothing_to_do(way: str) -> None:
    one = sequence(20, 2, 1, 16)
    cache = Cache.of([one, one], groups(2, 1), way)
    wanted = cache.whole()[0]
    empty = cache.step([(0, 20, 20), (1, 0, 20)])
    assert len(empty[0]) == 0
    assert torch.equal(empty[1], wanted)
    nobody = (torch.zeros(0, 4).int(), torch.zeros(1).int(), torch.zeros(0).int())
    y = cache.kernels.attend(one.q[:0], cache.pages, groups(2, 1), *nobody)
    assert y.shape == (0, 2, 16)
    cache.kernels.write(cache.pages, one.k[:0], one.v[:0], torch.zeros(0).long())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kv_of_query": [0, 2]}, "there are 2 KV heads"),
        ({"kv_of_query": [0, -1]}, "there are 2 KV heads"),
        ({"block_tables": [[0, 3]]}, r"pages \[0, 3\]; there are 3"),
        ({"block_tables": [[-1, 0]]}, r"pages \[-1, 0\]; there are 3"),
        ({"block_tables": [[0]]}, "10 tokens, but only 1 pages"),
        ({"query_starts": [0, 5]}, "must go from 0 to 4"),
        ({"query_starts": [1, 4]}, "must go from 0 to 4"),
        ({"context_lengths": [3]}, "4 queries and 3 tokens"),
        ({"context_lengths": [17]}, "17 tokens, but only 2 pages"),
    ],
)
def test_what_is_not_there_is_not_read(wrong: dict[str, list[int]], message: str) -> None:
    native.require()
    right = {
        "kv_of_query": [0, 1],
        "block_tables": [[0, 1]],
        "query_starts": [0, 4],
        "context_lengths": [10],
    }
    numbers = {name: torch.tensor(x, dtype=torch.int32) for name, x in (right | wrong).items()}
    pages = KVPages.allocate(3, 8, 2, 16, torch.float32)
    with pytest.raises(ValueError, match=message):
        attention.paged_attention(torch.zeros(4, 2, 16), pages, **numbers, implementation="native")


def test_slots_that_are_not_there() -> None:
    pages = KVPages.allocate(3, 8, 2, 16, torch.float32)
    for slot in (24, -1):
        k = torch.ones(2, 2, 16)
        with pytest.raises(ValueError, match="each must be 0 to 23"):
            attention.write_pages(pages, k, k, torch.tensor([0, slot]), implementation="native")
    assert not pages.keys.any()


def test_operands_of_another_shape_or_dtype() -> None:
    pages = KVPages.allocate(3, 8, 2, 16, torch.float32)
    k = torch.ones(2, 2, 16)
    with pytest.raises(ValueError, match=r"k has shape \(2, 2, 15\)"):
        attention.write_pages(pages, k[..., 1:], k, torch.arange(2))
    with pytest.raises(TypeError, match=r"slots is torch.int32"):
        attention.write_pages(pages, k, k, torch.arange(2).int())
    with pytest.raises(TypeError, match=r"v is torch.bfloat16"):
        attention.write_pages(pages, k, k.bfloat16(), torch.arange(2))
    with pytest.raises(TypeError, match=r"dtype is torch.int32; pages are of one of float32, bf"):
        KVPages.allocate(3, 8, 2, 16, torch.int32)


# Training.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(2, 37, 3, 18), (1, 1, 1, 2), (1, 130, 2, 64)])
def test_gradients_of_attention(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    operands = [x.requires_grad_() for x in (q, k, v)]
    y = attention.trained_attention(*operands)
    if dtype != torch.float64 and native.isas():
        every = torch.arange(shape[2])
        assert torch.equal(y, attention.causal_attention(q, k, v, every))
    wide = [x.detach().double().requires_grad_() for x in operands]
    turned = (x.transpose(1, 2) for x in wide)
    reference = F.scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)
    # Sums of some hundred numbers up to ten, rounded to the dtype; in bf16, torch's own backward
    # rounds weights and products to bf16 besides.
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 8e-2}[dtype]
    torch.testing.assert_close(y.double(), reference, rtol=0, atol=tolerance)
    got = torch.autograd.grad(y, operands, grad)
    wanted = torch.autograd.grad(reference, wide, grad.double())
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance)
