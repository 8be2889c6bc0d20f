"""γ as a multiple of the mean or the median of |W|: the same bits however a tensor is cut."""

import math

import pytest
import torch
from torch import Tensor

from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.tensor_parallel import BitLinear, OwnedElements, WeightScale
from megabit.tensor_parallel.weight_scale import bytes_of_sums
from megabit_kernels import numerics

CPU = torch.device("cpu")
STATISTICS = ("absmean", "absmedian")
MULTIPLIERS = (1.0, 0.866, 1.1547)


def gamma(rule: WeightScale, *parts: Tensor, numel: int | None = None) -> Tensor:
    """Of the tensor that consists of ``parts``, on one rank."""
    count = sum(part.numel() for part in parts) if numel is None else numel
    dtype = numerics.stats_dtype(parts[0].dtype)
    (scale,) = rule.of_tensors([OwnedElements(parts, count)], Axis.single("tp"), dtype, CPU)
    return scale


def weights() -> list[Tensor]:
    """Of many sizes and magnitudes, with ties, zeros and subnormals."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in (1, 2, 3, 4, 7, 64, 65, 1000):
        x = torch.randn(size, generator=generator)
        found += [x, x * 10.0 ** torch.linspace(-44, 4, size), (3 * x).round(), x.bfloat16()]
        found += [torch.zeros(size), torch.full((size,), -1e-40), x.double()]
    return found


@pytest.mark.parametrize("multiplier", MULTIPLIERS)
def test_the_median_is_torchs(multiplier: float) -> None:
    rule = WeightScale("absmedian", multiplier)
    for weight in weights():
        median = max(weight.abs().float().median().double().item(), 1e-5)
        wanted = torch.tensor(median * multiplier, dtype=torch.float64)
        found = gamma(rule, weight)
        assert torch.equal(found, wanted.to(found.dtype)), weight
        assert torch.equal(found, numerics.absmedian_scale(weight, multiplier))


@pytest.mark.parametrize("multiplier", MULTIPLIERS)
def test_the_mean_is_torchs(multiplier: float) -> None:
    rule = WeightScale("absmean", multiplier)
    for weight in weights():
        wanted = max(weight.double().abs().mean().item(), 1e-5) * multiplier
        # Elements are rounded to units of 2^-(62 - log2(size)), and γ once to fp32.
        assert gamma(rule, weight).item() == pytest.approx(wanted, rel=2**-23)
        assert torch.equal(gamma(rule, weight), numerics.absmean_scale(weight, multiplier))


def test_a_multiple_of_the_mean_by_hand() -> None:
    weight = torch.tensor([0.5, -1.5, 2.0, 0.0])
    assert gamma(WeightScale("absmean", 0.5), weight) == 0.5
    assert gamma(WeightScale("absmedian", 3.0), weight) == 1.5  # the lower of 0.5 and 1.5
    assert gamma(WeightScale("absmean", 2.0), torch.zeros(4)) == torch.tensor(2e-5)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_parts_of_any_size_give_the_same_bits(statistic: str) -> None:
    weight = torch.randn(300, 7, generator=torch.Generator().manual_seed(1))
    weight *= torch.logspace(-3, 1, 300)[:, None]
    whole = gamma(WeightScale(statistic), weight)
    for cuts in ([300], [1, 299], [0, 128, 0, 172], [100, 100, 100]):
        assert torch.equal(gamma(WeightScale(statistic), *weight.split(cuts)), whole)
    assert torch.equal(gamma(WeightScale(statistic), *weight.split(3, dim=1)), whole)


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**16, -(2.0**16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_no_weight_makes_it_infinite(
    statistic: str, bad: float, dtype: torch.dtype
) -> None:
    weight = torch.randn(50, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert gamma(WeightScale(statistic), weight).isfinite()
    weight[49, 3] = bad
    assert gamma(WeightScale(statistic, 0.866), *weight.split(10)) == math.inf


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_with_unequal_parts(statistic: str, degree: int) -> None:
    """Several tensors at once, of one of which the last rank has nothing, in so many bytes."""
    generator = torch.Generator().manual_seed(2)
    tensors = [
        torch.randn(size, generator=generator) * 10.0 ** torch.linspace(-3, 1, size)
        for size in (degree - 1, 50, 101)
    ]
    rule = WeightScale(statistic, 1.1547)

    def run() -> tuple[list[Tensor], float]:
        tp = ParallelMesh.create(degree, 1, CPU).tp
        owned = [OwnedElements(list(x.chunk(degree)[tp.rank :][:1]), x.numel()) for x in tensors]
        return rule.of_tensors(owned, tp, torch.float32, CPU), tp.sent["scales"]

    for scales, sent in run_ranks(run, degree):
        for found, tensor in zip(scales, tensors, strict=True):
            assert torch.equal(found, gamma(rule, tensor))
        per_tensor = 4 * 256 * 8 if statistic == "absmedian" else 2 * 8
        assert bytes_of_sums(statistic) == per_tensor
        assert sent == 2 * (degree - 1) / degree * len(tensors) * per_tensor


def test_no_tensors_exchange_nothing() -> None:
    for statistic in STATISTICS:
        assert WeightScale(statistic).of_tensors([], Axis.single("tp"), torch.float32, CPU) == []


@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_layer_used_alone_has_the_scale_it_was_told(statistic: str) -> None:
    layer = BitLinear(20, 9, weight_scale=WeightScale(statistic, 0.866))
    weight = layer.weight.detach()
    reference = {"absmean": numerics.absmean_scale, "absmedian": numerics.absmedian_scale}
    wanted = reference[statistic](weight, 0.866)
    assert torch.equal(layer.ternary().scale, wanted)
    assert torch.equal(layer.ternary().codes(), numerics.ternarize(weight, wanted))
    # It says something: another multiple gives other codes.
    assert not torch.equal(numerics.ternarize(weight, wanted / 0.866), layer.ternary().codes())
