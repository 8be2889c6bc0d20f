"""Attention over pages in Triton: values against torch, and bits that only the sequence decides."""

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megabit_kernels import KVPages, causal_attention, gpu, plain_attention
from megabit_kernels.triton.paged_attention import paged_attention
from megabit_kernels.triton.write_pages import write_pages
from tests.kernels.triton.operands import integers, normal

# What a GPU computes silently, numpy mentions: the interpreter is numpy.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half a unit in the last place of 1: the relative error of one rounding."""


@dataclass(frozen=True)
class Sequences:
    """Sequences as a model makes them; ``kv_of_query`` says how many heads there are."""

    lengths: tuple[int, ...]
    kv_of_query: tuple[int, ...] = (0, 0, 1, 1)
    head_dim: int = 32
    dtype: torch.dtype = torch.float32

    def tokens(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[length, heads, D]``, k and v ``[length, KV heads, D]`` of sequence i."""
        heads, kv_heads = len(self.kv_of_query), max(self.kv_of_query) + 1
        q = normal(self.lengths[i], heads, self.head_dim, seed=3 * i, dtype=self.dtype)
        k = normal(self.lengths[i], kv_heads, self.head_dim, seed=3 * i + 1, dtype=self.dtype)
        v = normal(self.lengths[i], kv_heads, self.head_dim, seed=3 * i + 2, dtype=self.dtype)
        return q, k, v


@dataclass(frozen=True)
class Cache:
    """Pages with the whole of some sequences, each page anywhere."""

    sequences: Sequences
    pages: KVPages
    tables: Tensor

    @staticmethod
    def of(
        sequences: Sequences,
        dtype: torch.dtype | None = None,
        block_size: int = 16,
        seed: int = 0,
        spoilt: tuple[str, int] | None = None,
    ) -> "Cache":
        """Free slots and free pages hold NaN. In sequence 0 one key or value may be ``spoilt``."""
        counts = [-(-length // block_size) for length in sequences.lengths]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator("cpu").manual_seed(seed))
        order = order.to(torch.get_default_device(), torch.int32)
        kv_heads = max(sequences.kv_of_query) + 1
        pages = KVPages.allocate(
            len(order),
            block_size,
            kv_heads,
            sequences.head_dim,
            dtype or sequences.dtype,
            torch.get_default_device(),
        )
        for x in (pages.keys, pages.values):
            x.fill_(math.nan if x.dtype.is_floating_point else 100)
        for scale in (pages.key_scale, pages.value_scale):
            if scale is not None:
                scale.fill_(math.nan)
        tables = torch.full((len(counts), max(counts, default=0)), 0, dtype=torch.int32)
        used = 0
        for i, count in enumerate(counts):
            tables[i, :count] = order[used : used + count]
            used += count
            _, k, v = sequences.tokens(i)
            if i == 0 and spoilt is not None:
                which, position = spoilt
                (k if which == "key" else v)[position, :, 5] = math.inf
            place = torch.arange(sequences.lengths[i])
            slots = tables[i].long()[place // block_size] * block_size + place % block_size
            plain_attention.write_pages(pages, k, v, slots)
        return Cache(sequences, pages, tables)

    def attend(self, *chunks: tuple[int, int, int], plain: bool = False) -> list[Tensor]:
        """One call for ``chunks`` (sequence, begin, end); the result of each."""
        kv_of_query = torch.tensor(self.sequences.kv_of_query, dtype=torch.int32)
        which = [i for i, _, _ in chunks]
        sizes = [end - begin for _, begin, end in chunks]
        starts = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
        contexts = torch.tensor([end for _, _, end in chunks], dtype=torch.int32)
        parts = [self.sequences.tokens(i)[0][begin:end] for i, begin, end in chunks]
        attention = plain_attention.paged_attention if plain else paged_attention
        out = attention(
            torch.cat(parts), self.pages, kv_of_query, self.tables[which], starts, contexts
        )
        return list(out.split(sizes))

    def whole(self, plain: bool = False) -> list[Tensor]:
        """All sequences in one call."""
        lengths = self.sequences.lengths
        return self.attend(*((i, 0, length) for i, length in enumerate(lengths)), plain=plain)


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# Values.


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pages", [*FLOATS, torch.int8])
def test_values(dtype: torch.dtype, pages: torch.dtype) -> None:
    cache = Cache.of(Sequences((35, 1), (0, 0), 64, dtype), pages)
    operand = dtype if pages in (dtype, torch.int8) else torch.float32
    # Softmax weights and the result are rounded once each, relative to values of 4 at most; fp32
    # adds sums over 35 tokens and 64 dimensions in another order.
    bound = 4 * (EPSILON[operand] + EPSILON[dtype] + 64 * EPSILON[torch.float32])
    for ours, expected in zip(cache.whole(), cache.whole(plain=True), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), expected.float(), rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [
        ((0,), 32, 1),
        ((0, 0, 0, 1), 48, 8),  # KV heads that are shared unevenly
        ((0, 1, 2), 80, 12),
        ((1, 0, 1), 128, 16),
        ((0,) * 20, 64, 32),  # more heads on a KV head than a program has rows
        ((1, 1), 256, 64),  # a KV head that nobody reads
    ],
)
def test_shapes(heads: tuple[int, ...], head_dim: int, block_size: int) -> None:
    cache = Cache.of(Sequences((21, 3), heads, head_dim), block_size=block_size)
    for ours, expected in zip(cache.whole(), cache.whole(plain=True), strict=True):
        # Sums over D and over tokens in another order: a few roundings of values up to 4.
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5)


def test_operands_may_be_parts_of_a_product() -> None:
    """As q, k and v are: columns of one matrix."""
    heads, kv_heads, d = 4, 2, 32
    qkv = normal(5, (heads + 2 * kv_heads) * d)
    q, k, v = (
        x.unflatten(1, (-1, d)) for x in qkv.split([heads * d, kv_heads * d, kv_heads * d], 1)
    )
    index = (torch.tensor([0, 0, 1, 1], dtype=torch.int32), torch.tensor([[1]], dtype=torch.int32))
    bounds = (torch.tensor([0, 5], dtype=torch.int32), torch.tensor([5], dtype=torch.int32))
    results = []
    for call in (lambda x: x, lambda x: x.contiguous()):
        pages = KVPages.allocate(2, 16, kv_heads, d, torch.float32, q.device)
        write_pages(pages, call(k), call(v), 16 + torch.arange(5))
        results.append(paged_attention(call(q), pages, *index, *bounds))
    assert torch.equal(*results)


def test_scores_far_apart() -> None:
    """The largest score decides alone, wherever it is; differences overflow no exponential."""
    pages = KVPages.allocate(3, 16, 1, 32, torch.float32, torch.get_default_device())
    k, v = normal(40, 1, 32, seed=1), normal(40, 1, 32, seed=2)
    for place in (0, 20, 39):
        k[:, 0] = -1e3 * normal(32, seed=3).sign()
        k[place] = -k[place]
        write_pages(pages, k, v, torch.arange(40))
        q = 1e3 * normal(1, 1, 32, seed=3).sign()
        one = torch.tensor([40], dtype=torch.int32)
        tables = torch.arange(3, dtype=torch.int32).unsqueeze(0)
        starts, heads = torch.tensor([0, 1]).int(), torch.tensor([0]).int()
        assert torch.equal(paged_attention(q, pages, heads, tables, starts, one)[0], v[place])


def test_nothing_to_do() -> None:
    cache = Cache.of(Sequences((20, 7)))
    (empty,) = cache.attend((0, 5, 5))
    assert empty.shape == (0, 4, 32)
    none, some = cache.attend((1, 4, 4), (0, 18, 20))
    assert len(none) == 0
    assert_equal([some], cache.attend((0, 18, 20)))
    assert gpu.paged_attention(
        normal(0, 4, 32),
        cache.pages,
        torch.tensor([0, 0, 1, 1]).int(),
        cache.tables[:0],
        torch.tensor([0]).int(),
        torch.tensor([]).int(),
    ).shape == (0, 4, 32)


# Bits.


@pytest.mark.parametrize(
    ("dtype", "pages", "heads"),
    [
        (torch.float32, torch.float32, (0, 0, 1)),
        (torch.bfloat16, torch.bfloat16, (0, 1)),
        (torch.float16, torch.int8, (0, 0)),
    ],
)
def test_chunks_batches_and_pages_change_no_bit(
    dtype: torch.dtype, pages: torch.dtype, heads: tuple[int, ...]
) -> None:
    # More keys than a turn of the loop takes: 16 in fp32, 32 in the others.
    sequences = Sequences((35, 2, 17), heads, 128, dtype)
    cache = Cache.of(sequences, pages)
    whole = cache.whole()
    assert all(y.isfinite().all() for y in whole)
    # In the company of others, in another order, and alone.
    assert_equal(cache.attend((2, 0, 17), (0, 0, 35), (1, 0, 2)), [whole[2], whole[0], whole[1]])
    assert_equal(cache.attend((1, 0, 2)), [whole[1]])
    # A prompt in chunks, while another sequence goes on; and its last token alone.
    for begin, end in pairwise((0, 7, 35)):
        parts = cache.attend((1, 1, 2), (0, begin, end))
        assert_equal(parts, [whole[1][1:], whole[0][begin:end]])
    assert_equal(cache.attend((0, 34, 35)), [whole[0][34:]])
    # In other pages, of another size.
    assert_equal(Cache.of(sequences, pages, 8, seed=2).whole(), whole)


def test_heads_change_no_bit() -> None:
    """A rank of many has some of the heads."""
    sequences = Sequences((40,), (0, 0, 1, 1))
    cache = Cache.of(sequences)
    (whole,) = cache.whole()
    q, k, v = sequences.tokens(0)
    pages = KVPages.allocate(3, 16, 1, 32, torch.float32, q.device)
    write_pages(pages, k[:, 1:], v[:, 1:], torch.arange(40))
    out = paged_attention(
        q[:, 3:],
        pages,
        torch.tensor([0]).int(),
        torch.arange(3).int().unsqueeze(0),
        torch.tensor([0, 40]).int(),
        torch.tensor([40]).int(),
    )
    assert torch.equal(out, whole[:, 3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("which", ["key", "value"])
def test_what_is_not_finite_stays_with_those_that_see_it(which: str, dtype: torch.dtype) -> None:
    sequences = Sequences((30, 20), (0, 0))
    clean = Cache.of(sequences, dtype).whole()
    spoilt = Cache.of(sequences, dtype, spoilt=(which, 21))
    first, second = spoilt.whole()
    assert torch.equal(second, clean[1])
    assert torch.equal(first[:21], clean[0][:21])
    # A key of ∞ makes scores of ±∞, and at −∞ a weight of zero.
    seen = first[21:]
    assert seen.isnan().all() if which == "value" or dtype == torch.int8 else seen.isnan().any()
    assert_equal(spoilt.attend((0, 15, 25)), [first[15:25]])


def test_whole_samples_have_the_bits_of_pages() -> None:
    sequences = Sequences((20,), dtype=torch.bfloat16)
    q, k, v = sequences.tokens(0)
    kv_of_query = torch.tensor(sequences.kv_of_query).int()
    out = causal_attention(q[None], k[None], v[None], kv_of_query, "triton")
    assert_equal([out[0]], Cache.of(sequences, block_size=8).whole())


# Pages.


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pages", [*FLOATS, torch.int8])
def test_pages_are_written_as_defined(dtype: torch.dtype, pages: torch.dtype) -> None:
    k, v = 3 * normal(6, 2, 80, dtype=dtype), normal(6, 2, 80, seed=1, dtype=dtype)
    k[1], k[2, 0, 3], k[3, 1, 0], v[4, 0, 79] = 0.0, math.nan, math.inf, -math.inf
    k[5], v[5] = 1e-30, 6e4
    slots = integers(0, 8, 6) + 8 * torch.arange(6)
    written = []
    for write in (gpu.write_pages, plain_attention.write_pages):
        cache = KVPages.allocate(6, 8, 2, 80, pages, k.device)
        write(cache, k, v, slots)
        written.append([cache.keys, cache.values, cache.key_scale, cache.value_scale])
    for ours, theirs in zip(*written, strict=True):
        if theirs is not None:
            assert ours is not None
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_codes_at_a_tie_round_to_even() -> None:
    """Quotients that end in ½: with a scale of 1, the numbers themselves."""
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5]).view(1, 1, 8)
    cache = KVPages.allocate(1, 1, 1, 8, torch.int8, x.device)
    write_pages(cache, x, -x, torch.tensor([0]))
    codes = torch.tensor([127, 0, 2, 2, 0, -2, 126, -126], dtype=torch.int8)
    assert torch.equal(cache.keys.flatten(), codes)
    assert torch.equal(cache.values.flatten(), -codes)


def test_what_the_kernels_do_not_compute_torch_does() -> None:
    cache = Cache.of(Sequences((9,)))
    arguments = (
        torch.tensor([0, 0, 1, 1]).int(),
        cache.tables,
        torch.tensor([0, 1]).int(),
        torch.tensor([9]).int(),
    )
    q = normal(1, 4, 32, dtype=torch.float64)
    expected = plain_attention.paged_attention(q, cache.pages, *arguments)
    assert torch.equal(gpu.paged_attention(q, cache.pages, *arguments), expected)
    wide = KVPages.allocate(1, 16, 1, 32, torch.float64, q.device)
    x = normal(1, 1, 32, dtype=torch.float64)
    gpu.write_pages(wide, x, -x, torch.tensor([3]))
    assert torch.equal(wide.values[0, 0, 3], -x.flatten())
    with pytest.raises(TypeError, match=r"q is torch.float64"):
        paged_attention(q, cache.pages, *arguments)
    with pytest.raises(ValueError, match="q has D = 16: that of the pages, 32"):
        paged_attention(q.float()[..., :16], cache.pages, *arguments)
    with pytest.raises(TypeError, match=r"pages are torch.float64"):
        write_pages(wide, x.float(), x.float(), torch.tensor([3]))
    with pytest.raises(ValueError, match=r"v has shape .*: \[1, 1, 32\] is wanted"):
        write_pages(wide, x.float(), x[..., :8], torch.tensor([3]))
