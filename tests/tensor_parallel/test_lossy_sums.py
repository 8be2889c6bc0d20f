"""int8 sums over TP: the same bits on all ranks, a bounded error, and agreed ways around them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import pytest
import torch
from torch import Tensor

from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.reduce import all_reduce, any_rank
from megabit.tensor_parallel import BlockPartition, LayerContext, RowParallelBitLinear
from megabit.tensor_parallel.lossy_sums import LossySums, Reason
from megabit.tensor_parallel.row_sums import sum_products
from megabit_kernels import numerics

T = TypeVar("T")
CPU = torch.device("cpu")
DEGREES = (2, 4)
SHAPES = ((16, 256), (13, 300), (3, 128), (1, 1), (2, 127), (5, 129))
"""Tokens and numbers of each: also what no degree and no group divides, and less than a rank each.
"""
CREST_LIMIT = 8.8
NO_LIMIT = 12.0
"""More than any group of 128 can have."""


@dataclass(frozen=True)
class Summed:
    """What a rank has after one sum."""

    y: Tensor
    rounded: int
    fallbacks: Counter[Reason]
    sent_as: dict[str, float]


def message_bytes(tokens: int, width: int) -> int:
    """Of one message with ``[tokens, width]`` numbers: a flag, scales of 128 each, a byte for each
    number."""
    return 4 + tokens * (width + 4 * -(-width // 128))


def on_axis(degree: int, function: Callable[[Axis], T]) -> list[T]:
    return run_ranks(lambda: function(ParallelMesh.create(degree, 1, CPU).tp), degree)


def context_of(axis: Axis, lossy_sums: LossySums | None) -> LayerContext:
    mode: Literal["int32", "int8"] = "int32" if lossy_sums is None else "int8"
    return replace(LayerContext.single(), tp=axis, row_reduce=mode, lossy_sums=lossy_sums)


def terms_of(degree: int, tokens: int, width: int) -> Tensor:
    """int32 ``[degree, tokens, width]``: the products of each rank, spread as real ones are."""
    generator = torch.Generator().manual_seed(1000 * tokens + width)
    return (900 * torch.randn(degree, tokens, width, generator=generator)).to(torch.int32)


def scales(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, 1, generator=generator) + 0.01, torch.tensor(0.37)


def exact_sum(terms: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    total = terms.sum(0, dtype=torch.int32)
    return numerics.dequantize_product(total, *scales(terms.shape[1]), dtype)


def summed(
    axis: Axis,
    terms: Tensor,
    *,
    x_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    min_bytes: float = 0,
    max_crest: float = NO_LIMIT,
    enabled: bool = True,
) -> Summed:
    lossy = LossySums(min_bytes, max_crest, enabled)
    s, w = scales(terms.shape[1])
    axis.sent_as.clear()
    own = terms[axis.rank].clone()
    y = sum_products(own, s if x_scale is None else x_scale, w, dtype, context_of(axis, lossy))
    return Summed(y, lossy.rounded, lossy.fallbacks, dict(axis.sent_as))


# What is rounded


@pytest.mark.parametrize("degree", DEGREES)
def test_all_ranks_have_the_same_bits_near_the_exact_sum(degree: int) -> None:
    def run(axis: Axis) -> list[Summed]:
        return [
            summed(axis, terms_of(degree, *shape), dtype=dtype)
            for shape in SHAPES
            for dtype in (torch.float32, torch.bfloat16)
        ]

    cases = [(shape, dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)]
    for (shape, dtype), ranks in zip(cases, zip(*on_axis(degree, run), strict=True), strict=True):
        terms = terms_of(degree, *shape)
        y = ranks[0].y
        assert all(torch.equal(rank.y, y) for rank in ranks)
        assert y.dtype == dtype
        assert y.shape == shape
        assert all((rank.rounded, rank.fallbacks) == (1, {}) for rank in ranks)
        # Each term, and the sum, are off by half a code at most; codes are 1/127 of the absmax of
        # their group, which that of the token bounds. bf16 adds half of 2⁻⁷ of the number itself.
        s, w = scales(shape[0])
        token_max = (terms.abs().amax(-1).float() * s.t() * w).sum(0)
        bound = token_max[:, None] * (2 * 0.5 / 127 + (2**-8 if dtype == torch.bfloat16 else 0))
        exact = exact_sum(terms)
        assert ((y.float() - exact).abs() <= 1.02 * bound).all()  # the sum's absmax is rounded, too
        if exact.numel() > 1:
            assert not torch.equal(y.float(), exact)


def test_the_error_does_not_grow_with_the_degree() -> None:
    """Two roundings at any of them, about 0.91 % of a normal distribution (0.227 % · crest √2)."""
    errors = []
    for degree in DEGREES:
        terms = terms_of(degree, 64, 512)
        y = on_axis(degree, partial(summed, terms=terms))[0].y
        exact = exact_sum(terms)
        errors.append(((y - exact).norm() / exact.norm()).item())
    # A mean over 32768 numbers: its own spread is far below a tenth.
    assert errors == pytest.approx([0.0091] * len(errors), rel=0.1)


def test_a_token_does_not_depend_on_the_others_of_the_batch() -> None:
    """Nor on the rank that adds it up."""
    terms = terms_of(2, 9, 300)
    x_scale, w_scale = scales(9)

    def run(axis: Axis) -> tuple[Tensor, list[Tensor]]:
        lossy = context_of(axis, LossySums(0, NO_LIMIT))
        own = terms[axis.rank]
        whole = sum_products(own.clone(), x_scale, w_scale, torch.float32, lossy)
        alone = [
            sum_products(own[i : i + 1].clone(), x_scale[i : i + 1], w_scale, whole.dtype, lossy)
            for i in range(9)
        ]
        return whole, alone

    for whole, alone in on_axis(2, run):
        assert torch.equal(torch.cat(alone), whole)


def test_zeros_stay_zeros_beside_numbers_of_any_size() -> None:
    """Whole groups and whole tokens of zeros, and scales near both ends of fp32."""
    terms = terms_of(2, 6, 256)
    terms[:, 1], terms[:, 2, :128], terms[0, 3] = 0, 0, 0
    x_scale = torch.tensor([1.0, 1.0, 1.0, 1.0, 1e33, 1e-37])[:, None]
    exact = terms.sum(0).float() * (x_scale * scales(6)[1])
    for rank in on_axis(2, partial(summed, terms=terms, x_scale=x_scale, max_crest=CREST_LIMIT)):
        assert rank.rounded == 1
        assert torch.equal(rank.y[exact == 0], exact[exact == 0])
        for token in (0, 2, 3, 4, 5):  # as above, with a margin of twice the usual error
            error = (rank.y[token] / x_scale[token] - exact[token] / x_scale[token]).norm()
            assert error <= 0.02 * (exact[token] / x_scale[token]).norm()


@pytest.mark.parametrize("degree", DEGREES)
def test_bytes_of_an_int8_sum(degree: int) -> None:
    """Each rank has a part of the padded tokens: terms of it go out, the sum of it comes back."""
    for tokens, width in ((16, 256), (13, 300)):
        part = message_bytes(-(-tokens // degree), width)
        for rank in on_axis(degree, partial(summed, terms=terms_of(degree, tokens, width))):
            assert rank.sent_as == {"int8": 2 * (degree - 1) * part}
    assert message_bytes(1, 256) == 4 + 256 + 2 * 4
    assert message_bytes(2, 300) == 4 + 2 * (300 + 3 * 4)


# What is not


def expect_exact(ranks: list[Summed], terms: Tensor, reason: Reason, exact: Tensor) -> None:
    for rank in ranks:
        assert rank.rounded == 0
        assert rank.fallbacks == {reason: 1}
        assert torch.equal(rank.y.nan_to_num(), exact.nan_to_num())
        assert torch.equal(rank.y.isnan(), exact.isnan())
        assert rank.sent_as["exact16"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_sums_are_exact(dtype: torch.dtype) -> None:
    """By the size of the output, to the byte; a sum of nothing always."""
    terms = terms_of(2, 8, 128)
    size = 8 * 128 * dtype.itemsize

    def run(axis: Axis) -> tuple[Summed, Summed, Summed]:
        return (
            summed(axis, terms, dtype=dtype, min_bytes=size + 1),
            summed(axis, terms, dtype=dtype, min_bytes=size),
            summed(axis, terms[:, :0]),
        )

    ranks = on_axis(2, run)
    expect_exact([below for below, *_ in ranks], terms, "size", exact_sum(terms, dtype))
    for below, at, nothing in ranks:
        assert "int8" not in below.sent_as
        assert (at.rounded, at.fallbacks) == (1, {})
        assert nothing.y.shape == (0, 128)
        assert nothing.fallbacks == {"size": 1}


def test_sums_are_exact_while_the_guard_says_so() -> None:
    terms = terms_of(2, 8, 128)
    ranks = on_axis(2, partial(summed, terms=terms, enabled=False))
    expect_exact(ranks, terms, "guard", exact_sum(terms))
    assert all("int8" not in rank.sent_as for rank in ranks)


@pytest.mark.parametrize("degree", DEGREES)
def test_one_group_of_one_rank_makes_all_fall_back(degree: int) -> None:
    """A single large number, in a token that another rank adds up: crest 11.3."""
    terms = terms_of(degree, 8, 300)
    terms[degree - 1, 0, :128] = 0
    terms[degree - 1, 0, 5] = 900
    ranks = on_axis(degree, partial(summed, terms=terms, max_crest=CREST_LIMIT))
    expect_exact(ranks, terms, "crest", exact_sum(terms))
    # The first shot was in vain; there was no second.
    assert {r.sent_as["int8"] for r in ranks} == {(degree - 1) * message_bytes(8 // degree, 300)}
    assert all(r.rounded for r in on_axis(degree, partial(summed, terms=terms)))


def test_the_crest_of_a_short_group_is_that_of_its_numbers() -> None:
    """One of 44 numbers: 6.6. Counted as one of 128 it would be 11.3."""
    terms = terms_of(2, 4, 300)
    terms[:, :, 256:] = 0
    terms[:, :, 260] = 900
    for limit, is_rounded in ((6.6, 0), (6.7, 1)):
        ranks = on_axis(2, partial(summed, terms=terms, max_crest=limit))
        assert {rank.rounded for rank in ranks} == {is_rounded}


@pytest.mark.parametrize("degree", DEGREES)
def test_terms_that_cancel_out_are_seen_in_the_second_shot(degree: int) -> None:
    """No rank's own terms have a high crest, but the sum of the last token does."""
    terms = terms_of(degree, 8, 128)
    terms[:, 7] = 1000
    terms[1, 7] = -1000 * (degree - 1)
    terms[0, 7, 3] += 100
    ranks = on_axis(degree, partial(summed, terms=terms, max_crest=CREST_LIMIT))
    expect_exact(ranks, terms, "crest", exact_sum(terms))
    sent = 2 * (degree - 1) * message_bytes(8 // degree, 128)
    assert {rank.sent_as["int8"] for rank in ranks} == {sent}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("degree", DEGREES)
def test_a_number_that_is_not_finite_goes_the_exact_way(degree: int, value: float) -> None:
    """In the scale of a token; then the result is what exact sums give: NaN, or ±infinity."""
    terms = terms_of(degree, 8, 128)
    x_scale, w_scale = scales(8)
    x_scale[2] = value
    exact = numerics.dequantize_product(
        terms.sum(0, dtype=torch.int32), x_scale, w_scale, torch.float32
    )
    assert not exact[2].isfinite().any()
    ranks = on_axis(degree, partial(summed, terms=terms, x_scale=x_scale, max_crest=CREST_LIMIT))
    expect_exact(ranks, terms, "nonfinite", exact)


@pytest.mark.parametrize("degree", DEGREES)
def test_nan_on_one_rank_only(degree: int) -> None:
    """No one waits in another collective; and it counts before a crest that another rank has."""
    terms = terms_of(degree, 8, 128)
    terms[0, 1] = 0
    terms[0, 1, 1] = 900
    x_scale, _ = scales(8)

    def run(axis: Axis) -> Summed:
        own = x_scale.clone()
        if axis.rank == degree - 1:
            own[0] = float("nan")  # of a token that rank 0 adds up, with its own scale
        return summed(axis, terms, x_scale=own, max_crest=CREST_LIMIT)

    expect_exact(on_axis(degree, run), terms, "nonfinite", exact_sum(terms))


def test_a_sum_that_overflows_goes_the_exact_way() -> None:
    """Finite terms of which the dequantized sum is not: seen in the second shot."""
    terms = torch.full((2, 2, 128), 1000, dtype=torch.int32)
    x_scale = torch.full((2, 1), 3e35 / 0.37)
    exact = numerics.dequantize_product(
        terms.sum(0, dtype=torch.int32), x_scale, scales(2)[1], torch.float32
    )
    assert exact.isinf().all()
    expect_exact(
        on_axis(2, partial(summed, terms=terms, x_scale=x_scale)), terms, "nonfinite", exact
    )


def test_a_fallback_may_need_int32() -> None:
    """One overflow after the other: all three ways are tried, and counted."""
    terms = terms_of(2, 4, 128)
    terms[1, 0, 0] = 1_000_000
    ranks = on_axis(2, partial(summed, terms=terms, max_crest=CREST_LIMIT))
    expect_exact(ranks, terms, "crest", exact_sum(terms))
    values = 4 * 128
    expected = {
        "int8": message_bytes(2, 128),
        "exact16": values * 2 / 2 + 2 + values * 4 / 2,  # terms, a flag, the result in fp32
        "int32": values * 4 / 2,
    }
    assert all(rank.sent_as == expected for rank in ranks)


def test_counters_add_up_and_the_switch_works_between_sums() -> None:
    terms = terms_of(2, 8, 128)

    def run(axis: Axis) -> tuple[int, Counter[Reason], list[Tensor]]:
        lossy = LossySums(0, NO_LIMIT)
        context = context_of(axis, lossy)
        results = []
        for enabled in (True, False, False, True):
            lossy.enabled = enabled
            own = terms[axis.rank].clone()
            results.append(sum_products(own, *scales(8), torch.float32, context))
        return lossy.rounded, lossy.fallbacks, results

    exact = exact_sum(terms)
    for rounded, fallbacks, results in on_axis(2, run):
        assert (rounded, fallbacks) == (2, {"guard": 2})
        assert [torch.equal(y, exact) for y in results] == [False, True, True, False]
        assert torch.equal(results[0], results[3])


def test_bytes_by_codec_and_calls_of_an_axis() -> None:
    """What has no codec is counted by its purpose, and bytes by purpose are all of them."""

    def run() -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], float], dict[str, int]]:
        mesh = ParallelMesh.create(2, 1, CPU)
        all_reduce(torch.zeros(10), mesh.tp, purpose="activations")
        for lossy_sums in (None, LossySums(0, NO_LIMIT)):
            acc = terms_of(2, 8, 128)[mesh.tp.rank].clone()
            sum_products(acc, *scales(8), torch.float32, context_of(mesh.tp, lossy_sums))
        any_rank(True, mesh.tp, CPU)
        return mesh.sent_as(), mesh.sent(), mesh.calls()

    by_codec: dict[tuple[str, str], float] = {
        ("tp", "activations"): 40,
        ("tp", "int32"): 8 * 128 * 4,
        ("tp", "int8"): 2 * message_bytes(4, 128),
        ("tp", "control"): 8,
    }
    by_purpose = {
        ("tp", "activations"): sum(by_codec.values()) - 8,
        ("tp", "control"): by_codec["tp", "control"],
    }
    calls = {"tp": 1 + 1 + 2 + 1, "pp": 0, "dp": 0, "dp_inter": 0, "outer": 0, "world": 0}
    assert run_ranks(run, 2) == [(by_codec, by_purpose, calls)] * 2


# In a layer


def test_a_real_layer_with_one_rank_and_with_several() -> None:
    """One rank has nothing to send, and rounds nothing."""
    width, columns = 256, 512
    partition = BlockPartition(columns, 4)
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, columns, generator=generator) for n in (width, 32))

    def run(axis: Axis, lossy_sums: LossySums | None = None) -> tuple[Tensor, LossySums]:
        lossy = lossy_sums or LossySums(0, CREST_LIMIT)
        own = partition.span(axis.rank, axis.size)
        layer = RowParallelBitLinear(own, width, context_of(axis, lossy))
        with torch.no_grad():
            layer.weight.copy_(weight[:, own.start : own.stop])
            return layer(x[:, own.start : own.stop]), lossy

    exact, lossy = run(Axis.single("tp"))
    assert (lossy.rounded, lossy.fallbacks) == (0, {})
    alone = summed(Axis.single("tp"), terms_of(1, 8, 128))
    assert torch.equal(alone.y, exact_sum(terms_of(1, 8, 128)))
    assert (alone.rounded, alone.fallbacks, alone.sent_as) == (0, {}, {})
    for degree in DEGREES:
        for y, lossy in on_axis(degree, run):
            assert (lossy.rounded, lossy.fallbacks) == (1, {})
            error = ((y - exact).norm() / exact.norm()).item()
            assert 0.005 < error < 0.012  # 0.91 %; crest factors of real groups vary
        for y, lossy in on_axis(degree, partial(run, lossy_sums=LossySums(1e9, CREST_LIMIT))):
            assert torch.equal(y, exact)
            assert lossy.fallbacks == {"size": 1}


def test_a_context_that_does_not_go_together() -> None:
    lossy = LossySums(0, CREST_LIMIT)
    for changes in (
        {"row_reduce": "int8"},
        {"row_reduce": "exact16", "lossy_sums": lossy},
        {"row_reduce": "int8", "lossy_sums": lossy, "sequence_parallel": True},
    ):
        with pytest.raises(ValueError, match="int8 sums"):
            replace(LayerContext.single(), **changes)
