"""Integer products against sums in fp64, which are exact up to 2^53.

Triton's interpreter runs the plain path of the unpacking. That the assembler's path computes the
same, and the tensor cores too, only a GPU can show.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megabit_kernels import numerics
from megabit_kernels.epilogue import Epilogue
from megabit_kernels.layouts import from_planes, to_planes
from megabit_kernels.triton import fallback, products
from megabit_kernels.triton.config import TileConfig
from megabit_kernels.triton.int8_gemm import int8_gemm
from megabit_kernels.triton.packed_gemm import packed_gemm
from megabit_kernels.triton.split_k import split_k
from tests.kernels.triton.operands import activations, ternary, uniform

Product = Callable[[Tensor, Tensor, Epilogue | None], Tensor]
"""Of int8 activations and int8 weights, which the packed ones pack."""

SMALL = TileConfig(16, 32)


def packed(config: TileConfig) -> Product:
    return lambda x_q, weight, epilogue=None: packed_gemm(x_q, to_planes(weight), config, epilogue)


def decode(config: TileConfig) -> Product:
    return lambda x_q, weight, epilogue=None: split_k(x_q, to_planes(weight), config, epilogue)


def int8(config: TileConfig) -> Product:
    return lambda x_q, weight, epilogue=None: int8_gemm(x_q, weight, config, epilogue)


TERNARY = {
    "packed": packed(SMALL),
    "packed, fp16": packed(TileConfig(16, 32, operand="fp16")),
    "decode": decode(SMALL),
    "decode, split": decode(TileConfig(16, 16, split=3)),
    "decode, split, fp16": decode(TileConfig(16, 16, split=2, operand="fp16")),
    "int8": int8(TileConfig(16, 32, 64)),
    "cublas": fallback.int8_product,
    "cublas, packed": lambda x_q, weight, epilogue=None: fallback.packed_product(
        x_q, to_planes(weight), epilogue
    ),
}
every_ternary_product = pytest.mark.parametrize("product", TERNARY.values(), ids=TERNARY)


def oracle(x_q: Tensor, weight: Tensor) -> Tensor:
    return (x_q.double() @ weight.double().t()).to(torch.int32)


@every_ternary_product
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (3, 5, 7), (16, 32, 256), (7, 65, 501), (13, 33, 1030)]
)
def test_integers_are_exact(product: Product, m: int, n: int, k: int) -> None:
    x_q, weight = activations(m, k), ternary(n, k)
    acc = product(x_q, weight, None)
    assert torch.equal(acc, oracle(x_q, weight))
    assert acc.dtype == torch.int32


@pytest.mark.parametrize("name", ["packed", "packed, fp16", "decode, split", "int8"])
def test_the_largest_sums_are_exact(name: str) -> None:
    x_q = torch.tensor([[127], [-128]], dtype=torch.int8).expand(2, numerics.MAX_EXACT_K)
    weight = torch.tensor([[1], [-1], [0]], dtype=torch.int8).expand(3, numerics.MAX_EXACT_K)
    assert torch.equal(TERNARY[name](x_q, weight, None), oracle(x_q, weight))


def test_the_largest_sums_of_int8_weights_are_exact() -> None:
    x_q = torch.tensor([[127], [-128]], dtype=torch.int8).expand(2, numerics.MAX_EXACT_K)
    weight = torch.tensor([[127], [-127]], dtype=torch.int8).expand(2, numerics.MAX_EXACT_K)
    acc = int8_gemm(x_q, weight, TileConfig(16, 16, 256))
    assert torch.equal(acc, oracle(x_q, weight))


@every_ternary_product
def test_rows_of_zeros_give_zeros(product: Product) -> None:
    x_q, weight = activations(4, 300), ternary(6, 300)
    x_q[1], weight[2] = 0, 0
    acc = product(x_q, weight, None)
    assert torch.equal(acc, oracle(x_q, weight))
    assert not acc[1].any()
    assert not acc[:, 2].any()


@every_ternary_product
@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 7), (4, 0, 7), (4, 5, 0), (0, 0, 0)])
def test_an_empty_operand_gives_an_empty_or_a_zero_product(
    product: Product, m: int, n: int, k: int
) -> None:
    acc = product(activations(m, k), ternary(n, k), None)
    assert torch.equal(acc, torch.zeros(m, n, dtype=torch.int32))
    epilogue = Epilogue(torch.ones(m, 1), torch.ones(()), torch.bfloat16)
    assert torch.equal(
        product(activations(m, k), ternary(n, k), epilogue), torch.zeros(m, n).bfloat16()
    )


@every_ternary_product
def test_strides_do_not_matter(product: Product) -> None:
    x_q, weight = activations(198, 8).t()[::2, ::2], ternary(99, 20).t()[::2]
    assert not x_q.is_contiguous()
    assert not weight.is_contiguous()
    assert torch.equal(product(x_q, weight, None), oracle(x_q, weight))


def test_planes_may_be_a_slice_of_rows() -> None:
    x_q, weight = activations(5, 300), ternary(20, 300)
    acc = packed_gemm(x_q, to_planes(weight)[3::2], SMALL)
    assert torch.equal(acc, oracle(x_q, weight[3::2]))


@pytest.mark.parametrize("group", [1, 2, 8])
def test_every_tile_is_computed_once(group: int) -> None:
    x_q, weight = activations(70, 40), ternary(100, 40)
    config = TileConfig(16, 32, 64, group=group)
    assert torch.equal(packed_gemm(x_q, to_planes(weight), config), oracle(x_q, weight))
    assert torch.equal(int8_gemm(x_q, weight, config), oracle(x_q, weight))


@pytest.mark.parametrize("split", [1, 2, 5, 64])
def test_a_sum_may_be_split_unevenly(split: int) -> None:
    x_q, weight = activations(3, 1500), ternary(17, 1500)
    acc = split_k(x_q, to_planes(weight), TileConfig(16, 16, split=split))
    assert torch.equal(acc, oracle(x_q, weight))


@every_ternary_product
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_epilogue_has_the_bits_of_the_definition(product: Product, dtype: torch.dtype) -> None:
    x_q, weight = activations(9, 600), ternary(40, 600)
    x_scale, w_scale = uniform(9, 1, seed=2) / 127, uniform(seed=3)
    y = product(x_q, weight, Epilogue(x_scale, w_scale, dtype))
    expected = numerics.dequantize_product(oracle(x_q, weight), x_scale, w_scale, dtype)
    assert y.dtype == dtype
    assert torch.equal(y, expected)


@pytest.mark.parametrize("choice", [TileConfig(16, 32, 64), "cublas"])
def test_every_row_of_an_int8_weight_may_have_its_scale(choice: TileConfig | str) -> None:
    x_q, weight = activations(5, 200), activations(33, 200, seed=4).clamp_min(-127)
    x_scale, w_scale = uniform(5, 1, seed=2), uniform(33, seed=3)
    y = products.int8_product(x_q, weight, Epilogue(x_scale, w_scale, torch.float32), choice)
    expected = numerics.dequantize_product(oracle(x_q, weight), x_scale, w_scale, torch.float32)
    assert torch.equal(y, expected)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of 0 · Inf, which is meant
@every_ternary_product
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_spoils_its_row_only(product: Product, bad: float) -> None:
    x_q, weight = activations(4, 64), ternary(8, 64)
    x_q[2] = 0
    x_scale = torch.tensor([[0.5], [1.0], [bad], [2.0]])
    y = product(x_q, weight, Epilogue(x_scale, torch.tensor(0.25), torch.float32))
    assert y[2].isnan().all()
    assert y[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 257), (40, 512), (0, 5), (5, 0)])
def test_unpacked_planes_are_the_codes(n: int, k: int) -> None:
    codes = ternary(n, k)
    assert torch.equal(fallback.unpack_planes(to_planes(codes), k), codes)
    assert torch.equal(from_planes(to_planes(codes), k), codes)


@pytest.mark.parametrize("choice", [None, "cublas", TileConfig(16, 16, 64)])
def test_the_choice_of_tiles_changes_no_integer(choice: TileConfig | None) -> None:
    x_q, weight = activations(6, 300), ternary(10, 300)
    planes, expected = to_planes(weight), oracle(x_q, weight)
    assert torch.equal(products.packed_product(x_q, planes, choice=choice), expected)
    assert torch.equal(products.decode_product(x_q, planes, choice=choice), expected)
    assert torch.equal(products.int8_product(x_q, weight, choice=choice), expected)


def test_what_a_kernel_cannot_take_is_refused_by_name() -> None:
    x_q, weight = activations(4, 300), ternary(8, 300)
    planes = to_planes(weight)
    scales = torch.ones(4, 1), torch.ones(())
    with pytest.raises(TypeError, match=r"x_q is torch\.int32"):
        packed_gemm(x_q.int(), planes, SMALL)
    with pytest.raises(ValueError, match="x_q has shape"):
        packed_gemm(x_q[0], planes, SMALL)
    with pytest.raises(TypeError, match=r"planes is torch\.int8"):
        packed_gemm(x_q, weight, SMALL)
    with pytest.raises(ValueError, match=r"planes has shape \(8, 128\): \[8, 64\] is wanted"):
        packed_gemm(x_q[:, :256], planes, SMALL)
    with pytest.raises(ValueError, match=r"weight has shape \(8, 300\)"):
        int8_gemm(x_q[:, :256], weight, TileConfig(16, 16, 64))
    with pytest.raises(ValueError, match="x_q has 17 rows: at most 16"):
        split_k(activations(17, 300), planes, SMALL)
    with pytest.raises(ValueError, match="block_m = 32: 16 is wanted"):
        split_k(x_q, planes, TileConfig(32, 16))
    with pytest.raises(ValueError, match="K = 131073 exceeds 131072"):
        packed_gemm(activations(1, numerics.MAX_EXACT_K + 1), planes, SMALL)
    with pytest.raises(ValueError, match="x_scale has shape"):
        packed_gemm(x_q, planes, SMALL, Epilogue(torch.ones(4), scales[1], torch.float32))
    with pytest.raises(ValueError, match="w_scale has shape"):
        packed_gemm(x_q, planes, SMALL, Epilogue(scales[0], torch.ones(8), torch.float32))
    with pytest.raises(TypeError, match=r"w_scale is torch\.float64"):
        packed_gemm(x_q, planes, SMALL, Epilogue(scales[0], scales[1].double(), torch.float32))
    with pytest.raises(TypeError, match=r"dtype is torch\.int32"):
        packed_gemm(x_q, planes, SMALL, Epilogue(*scales, torch.int32))
    with pytest.raises(ValueError, match=r"different devices: x_q on .*, planes on meta"):
        packed_gemm(x_q, planes.to("meta"), SMALL)
