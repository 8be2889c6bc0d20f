"""Activation quantizers: the textbook's formulas, whatever part of a token a rank has."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.tensor_parallel import ForwardPass, Kept
from megabit.tensor_parallel.activations import LEVELS, ActivationQuantizer
from megabit_kernels import numerics

ONE = Axis.single("tp")
T, K = 33, 48
KINDS = ("int8", "top_half")


def tokens(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of very different sizes, some with many equal magnitudes and some of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator, dtype=torch.float64)
    x *= torch.logspace(-4, 4, T, dtype=torch.float64)[:, None]
    x[3] = 0
    x[4] = 2.0
    x[5, ::3] = 0
    x[6] = torch.tensor([1.0, -1.0, 0.25, 0.5]).repeat(K // 4)
    x[7] = 0
    x[7, :5] = torch.tensor([5.0, -4.0, 3.0, 2.0, -1.0])
    return x.to(dtype)


def quantize(kind: str, x: Tensor, absmax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return ActivationQuantizer(kind).quantize(x, absmax, ONE)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_int8(dtype: torch.dtype) -> None:
    x = tokens(dtype=dtype)
    codes, scale = quantize("int8", x)
    assert torch.equal(scale, numerics.activation_scale(numerics.absmax(x)))
    assert torch.equal(codes, numerics.quantize_activation(x, scale))
    known = quantize("int8", x, 2 * numerics.absmax(x))  # it is believed
    assert torch.equal(known[1], numerics.activation_scale(2 * numerics.absmax(x)))
    assert known[0].abs().max() == 64


def test_int4() -> None:
    """By hand: the mean of 1, 1, 1/4 and 1/2 is 11/16, and steps are 11/16/√7 = 0.26 wide."""
    codes, scale = quantize("int4", tokens())
    assert scale.dtype == torch.float32
    assert scale[6].item() == pytest.approx(11 / 16 / math.sqrt(7))
    assert codes[6, :4].tolist() == [4, -4, 1, 2]
    assert codes[4].tolist() == [3] * K  # x/s = √7 = 2.65
    assert not codes[3].any()
    assert scale[3].item() == pytest.approx(1e-5 / math.sqrt(7))
    # 5 of 48 are not zero: 15/48/√7 = 0.118 is a step, and codes end at −8 and 7.
    assert codes[7, :6].tolist() == [7, -8, 7, 7, -8, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_int4_by_the_formula(dtype: torch.dtype) -> None:
    x = tokens(1, dtype)
    codes, scale = quantize("int4", x)
    wide = x.double()
    step = wide.abs().mean(1, keepdim=True).clamp_min(1e-5) / math.sqrt(7)
    # A sum of 48 numbers in fp32, and some roundings.
    torch.testing.assert_close(scale.double(), step, rtol=1e-6, atol=0)
    exact = wide / step
    is_clear = (exact - exact.floor() - 0.5).abs() > 1e-4  # of a tie that rounding could decide
    assert is_clear.double().mean() > 0.9
    assert torch.equal(codes[is_clear], exact.round().clamp(-8, 7).to(torch.int8)[is_clear])


def test_int4_of_a_token_does_not_depend_on_the_others() -> None:
    """Under sequence parallelism a rank has some of the tokens."""
    for width in (48, 64, 100, 2560):
        x = torch.randn(32, width, generator=torch.Generator().manual_seed(width))
        codes, scale = quantize("int4", x)
        for parts in (2, 4, 32):
            split = [quantize("int4", part) for part in x.chunk(parts)]
            assert torch.equal(torch.cat([c for c, _ in split]), codes)
            assert torch.equal(torch.cat([s for _, s in split]), scale)


@pytest.mark.parametrize("width", [1, 2, 3, 47, 48])
def test_the_larger_half(width: int) -> None:
    """As many as are wanted and no more than ties make necessary, by a loop over each token."""
    x = tokens()[:, :width]
    codes, scale = quantize("top_half", x)
    plain, plain_scale = quantize("int8", x)
    assert torch.equal(scale, plain_scale)
    for row, all_of_it in zip(codes.tolist(), plain.tolist(), strict=True):
        order = sorted((abs(code) for code in all_of_it), reverse=True)
        least = order[math.ceil(width / 2) - 1]
        assert row == [code if abs(code) >= least else 0 for code in all_of_it]


def test_what_a_tie_does() -> None:
    x = torch.tensor(
        [[4.0, 4, 4, 4, 1, 1, 1, 1], [4, 1, 1, 1, 1, 1, 1, 1], [4, 3, 2, 1, 0, 0, 0, 0]]
    )
    codes, _ = quantize("top_half", x)
    # All of the second token's ones are at the threshold; half of the third token is zeros.
    assert (codes != 0).sum(1).tolist() == [4, 8, 4]


def test_what_is_not_finite() -> None:
    x = tokens()
    x[1, 3], x[2, 5] = math.nan, math.inf
    for kind in ("int8", "int4", "top_half"):
        codes, scale = quantize(kind, x)
        assert not codes[1:3].any()
        assert scale[1].isnan()
        assert scale[2].isinf()
        others = [0, *range(3, T)]
        clean = quantize(kind, tokens()[others])
        assert torch.equal(codes[others], clean[0])
        assert torch.equal(scale[others], clean[1])


@pytest.mark.parametrize("degree", [2, 4])
def test_codes_are_the_same_at_every_degree(degree: int) -> None:
    """Columns are split over ranks, which bring their part of the maximum and of the counts."""
    x = tokens()
    expected = {kind: quantize(kind, x) for kind in KINDS}

    def run() -> dict[str, tuple[Tensor, Tensor]]:
        tp = ParallelMesh.create(degree, 1, torch.device("cpu")).tp
        own, found = x.chunk(degree, 1)[tp.rank], {}
        for kind in KINDS:
            quantizer = ActivationQuantizer(kind)  # type: ignore[arg-type]
            tp.sent.clear()
            found[kind] = quantizer.quantize(own, None, tp)
            numbers = 4 * T * (1 + LEVELS * (kind == "top_half"))
            assert tp.sent == {"statistics": 2 * (degree - 1) / degree * numbers}
            known = quantizer.quantize(own, numerics.absmax(x), tp)
            assert all(torch.equal(a, b) for a, b in zip(known, found[kind], strict=True))
        with pytest.raises(ValueError, match="whole token"):
            ActivationQuantizer("int4").quantize(own, None, tp)
        return found

    ranks = run_ranks(run, degree)
    for kind, (codes, scale) in expected.items():
        assert torch.equal(torch.cat([rank[kind][0] for rank in ranks], 1), codes)
        assert all(torch.equal(rank[kind][1], scale) for rank in ranks)


def test_a_recomputation_sends_nothing_again() -> None:
    x = tokens()

    def run() -> None:
        tp = ParallelMesh.create(2, 1, torch.device("cpu")).tp
        own, kept = x.chunk(2, 1)[tp.rank], Kept()
        quantizer, first_pass = ActivationQuantizer("top_half"), ForwardPass(kept=kept)
        first = quantizer.quantize(own, None, tp, first_pass)
        tp.sent.clear()
        replay = replace(first_pass, kept=Kept(kept.results, is_replay=True))
        second = quantizer.quantize(own, None, tp, replay)
        assert not tp.sent
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    run_ranks(run, 2)


def test_full_precision_is_no_quantizer() -> None:
    with pytest.raises(ValueError, match="not quantized"):
        quantize("none", tokens())
