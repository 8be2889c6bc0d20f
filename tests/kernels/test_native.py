"""The native CPU kernels: for each instruction set of this machine, exact integers and the bits of
``numerics``.

The products have one way for a few rows and another for many, blocks of 16 and chunks of 1024 in K,
panels of 64 in N, tiles of 4 or 6 rows in M: sizes are chosen around these.
"""

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from megabit_kernels import huge_pages, layouts, native, numerics
from megabit_kernels.native import NativeLibrary, isas

ROWS = [0, 1, 2, 3, 5, 8, 12, 16, 17, 33, 48, 64, 65, 100, 257]
WEIGHT_SIZES = [(1, 1), (64, 64), (65, 63), (7, 1000), (130, 257), (3, 1025), (66, 2060)]
GAMMA = 0.0371
FLOATS = [torch.float32, torch.bfloat16]

each_isa = pytest.mark.parametrize("isa", isas() or ["not built"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kernels() -> NativeLibrary:
    return native.require()


def randint(low: int, high: int, *shape: int) -> Tensor:
    """int8 values, ``high`` included; the same for the same arguments."""
    seed = hash((low, high, *shape)) % 2**31
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int8)


def product(x_q: Tensor, weight: Tensor) -> Tensor:
    """The definition. fp64 counts these integers exactly, and faster than int64."""
    return (x_q.double() @ weight.double().t()).to(torch.int32)


def bits(x: Tensor) -> Tensor:
    """Floats as integers, every NaN as the same one."""
    x = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def test_this_machine_has_what_every_machine_has() -> None:
    assert isas()[-1] == "portable"
    assert len(set(isas())) == len(isas())


# Products.


@each_isa
@pytest.mark.parametrize(("n", "k"), WEIGHT_SIZES)
def test_ternary_products_are_exact(kernels: NativeLibrary, isa: str, n: int, k: int) -> None:
    codes = randint(-1, 1, n, k)
    panels = kernels.pack_panels(codes)
    for m in ROWS:
        x_q = randint(-128, 127, m, k)
        acc = kernels.ternary_matmul(x_q, panels, n, isa)
        assert acc.dtype == torch.int32
        assert torch.equal(acc, product(x_q, codes)), m


@each_isa
@pytest.mark.parametrize(("n", "k"), WEIGHT_SIZES)
def test_int8_products_are_exact(kernels: NativeLibrary, isa: str, n: int, k: int) -> None:
    weight = randint(-127, 127, n, k)
    panels = kernels.pack_int8(weight)
    for m in ROWS:
        x_q = randint(-128, 127, m, k)
        acc = kernels.int8_matmul(x_q, panels, n, isa)
        assert acc.dtype == torch.int32
        assert torch.equal(acc, product(x_q, weight)), m


@each_isa
@pytest.mark.parametrize("m", [1, 2, 7, 13])
@pytest.mark.parametrize("k", [1, 15, 129, 1001, 4096, numerics.MAX_EXACT_K])
def test_the_largest_sums(kernels: NativeLibrary, isa: str, m: int, k: int) -> None:
    """All of one sign, for both signs of both operands, and columns of zeros."""
    x_q = torch.tensor([-128, 127, 0, -128], dtype=torch.int8).repeat(m)[:m, None]
    codes = torch.tensor([1, -1, 0], dtype=torch.int8)[:, None].repeat(1, k)
    x_q = x_q.repeat(1, k)
    ternary, int8 = kernels.pack_panels(codes), kernels.pack_int8(codes * 127)
    assert torch.equal(kernels.ternary_matmul(x_q, ternary, 3, isa), product(x_q, codes))
    assert torch.equal(kernels.int8_matmul(x_q, int8, 3, isa), product(x_q, codes * 127))


@each_isa
@pytest.mark.parametrize("x", [-128, 127])
def test_extremes_that_change_sign_along_k(kernels: NativeLibrary, isa: str, x: int) -> None:
    """Sums that would saturate 16 bits within one instruction, or soon after, cancel later."""
    k = 5000
    codes = torch.ones(2, k, dtype=torch.int8)
    codes[:, k // 2 :] = -1
    codes[1, ::2] *= -1
    x_q = torch.full((9, k), x, dtype=torch.int8)
    for rows in (x_q[:1], x_q):
        ternary = kernels.ternary_matmul(rows, kernels.pack_panels(codes), 2, isa)
        assert torch.equal(ternary, product(rows, codes))
        int8 = kernels.int8_matmul(rows, kernels.pack_int8(codes * 127), 2, isa)
        assert torch.equal(int8, product(rows, codes * 127))


@each_isa
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("m", [0, 1, 4, 19])
def test_scaled_products_round_as_numerics_does(
    kernels: NativeLibrary, isa: str, dtype: torch.dtype, m: int
) -> None:
    n, k = 70, 300
    x_q, codes, weight = randint(-128, 127, m, k), randint(-1, 1, n, k), randint(-127, 127, n, k)
    x_scale = torch.rand(m, 1, generator=torch.Generator().manual_seed(m)) + 1e-3
    w_scale = torch.rand(n, generator=torch.Generator().manual_seed(1)) + 1e-3
    gamma = torch.tensor(GAMMA)

    y = kernels.ternary_linear(
        x_q, x_scale, kernels.pack_panels(codes), n, float(gamma), dtype, isa
    )
    expected = numerics.dequantize_product(product(x_q, codes), x_scale, gamma, dtype)
    assert torch.equal(y, expected)
    assert y.dtype == dtype

    logits = kernels.int8_linear(x_q, x_scale, kernels.pack_int8(weight), n, w_scale, dtype, isa)
    expected = numerics.dequantize_product(product(x_q, weight), x_scale, w_scale, dtype)
    assert torch.equal(logits, expected)


@each_isa
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("m", [3, 20])
def test_a_token_without_a_finite_scale_has_nan_outputs_and_others_none(
    kernels: NativeLibrary, isa: str, dtype: torch.dtype, m: int
) -> None:
    x = torch.randn(m, 64, generator=torch.Generator().manual_seed(0))
    x[0, 5], x[1, 6] = torch.nan, -torch.inf
    codes = randint(-1, 1, 10, 64)
    x_q, x_scale = kernels.quantize_activation(x, isa=isa)
    y = kernels.ternary_linear(x_q, x_scale, kernels.pack_panels(codes), 10, GAMMA, dtype, isa)
    assert y[:2].isnan().all()
    assert y[2:].isfinite().all()


@each_isa
def test_empty_operands_give_empty_or_zero_results(kernels: NativeLibrary, isa: str) -> None:
    for m, n, k in [(0, 0, 0), (0, 3, 5), (2, 0, 5), (2, 3, 0), (9, 3, 0)]:
        x_q, codes = torch.ones(m, k, dtype=torch.int8), torch.ones(n, k, dtype=torch.int8)
        expected = torch.zeros(m, n, dtype=torch.int32) + k
        assert torch.equal(
            kernels.ternary_matmul(x_q, kernels.pack_panels(codes), n, isa), expected
        )
        assert torch.equal(kernels.int8_matmul(x_q, kernels.pack_int8(codes), n, isa), expected)


@each_isa
def test_operands_that_are_not_contiguous(kernels: NativeLibrary, isa: str) -> None:
    codes = randint(-1, 1, 60, 90)
    x_q = randint(-128, 127, 44, 90)
    for rows, columns in [
        (slice(1, None), slice(1, None)),
        (slice(None, None, 3), slice(0, 90, 2)),
    ]:
        x, w = x_q[rows, columns], codes[rows, columns]
        panels = kernels.pack_panels(w)
        assert torch.equal(kernels.ternary_matmul(x, panels, len(w), isa), product(x, w))
    transposed = x_q.t().contiguous().t()
    panels = kernels.pack_panels(codes.t().contiguous().t())
    expected = product(x_q, codes)
    assert torch.equal(kernels.ternary_matmul(transposed, panels, 60, isa), expected)
    spread = panels[:, :, :, None].repeat(1, 1, 1, 2, 1)[:, :, :, 0]
    assert torch.equal(kernels.ternary_matmul(x_q, spread, 60, isa), expected)


def test_more_rows_than_are_rearranged_at_a_time(kernels: NativeLibrary) -> None:
    """4 MiB of activations: 32 rows of the widest K."""
    x_q, codes = randint(-128, 127, 75, numerics.MAX_EXACT_K), randint(-1, 1, 5, 131_072)
    acc = kernels.ternary_matmul(x_q, kernels.pack_panels(codes), 5)
    assert torch.equal(acc, product(x_q, codes))


# Activations.


@each_isa
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(0, 7), (5, 0), (1, 1), (3, 15), (4, 257), (33, 64)])
def test_activations_have_the_bits_of_numerics(
    kernels: NativeLibrary, isa: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 3
    x = x.to(dtype)
    absmax = numerics.absmax(x)
    for given in (None, absmax, absmax * 1.7):
        scale = numerics.activation_scale(absmax if given is None else given)
        x_q, x_scale = kernels.quantize_activation(x, given, isa)
        assert torch.equal(x_scale, scale)
        assert torch.equal(x_q, numerics.quantize_activation(x, scale))


@each_isa
@pytest.mark.parametrize("dtype", FLOATS)
def test_ties_go_to_even_and_quotients_are_clamped(
    kernels: NativeLibrary, isa: str, dtype: torch.dtype
) -> None:
    """With max|x| given as 127 the scale is 1: every half is a tie, and larger values clamp."""
    x = torch.arange(-280, 281).to(dtype)[None] / 2
    x_q, scale = kernels.quantize_activation(x, torch.tensor([[127.0]]), isa)
    assert scale.item() == 1
    assert torch.equal(x_q, x.float().round().clamp(-128, 127).to(torch.int8))


@each_isa
@pytest.mark.parametrize("dtype", FLOATS)
def test_activations_of_every_magnitude(
    kernels: NativeLibrary, isa: str, dtype: torch.dtype
) -> None:
    """Zeros, subnormal numbers, the largest ones, NaN and infinities of both signs."""
    tiny, largest = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    x = torch.zeros(8, 40, dtype=dtype)
    x[1, 0], x[1, 1] = tiny / 4, -0.0
    x[2, 0], x[2, 1] = largest, -largest / 3
    x[3, 3], x[4, 30], x[5, 39] = torch.nan, torch.inf, -torch.inf
    x[6] = torch.linspace(-1e-6, 1e-6, 40)
    x[7] = torch.linspace(-2, 2, 40)
    x_q, scale = kernels.quantize_activation(x, isa=isa)
    expected = numerics.activation_scale(numerics.absmax(x))
    assert torch.equal(bits(scale), bits(expected))
    assert torch.equal(x_q, numerics.quantize_activation(x, expected))
    assert not x_q[3:6].any()


# Weights.


@pytest.mark.parametrize(("n", "k"), [*WEIGHT_SIZES, (0, 5), (5, 0)])
def test_panels_are_those_of_layouts(kernels: NativeLibrary, n: int, k: int) -> None:
    codes = randint(-1, 1, n, k)
    panels = kernels.pack_panels(codes)
    assert torch.equal(panels, layouts.to_panels(codes))
    assert torch.equal(kernels.pack_panels(codes, out=panels.fill_(0)), layouts.to_panels(codes))


@each_isa
@pytest.mark.parametrize("dtype", native.UNPACKED)
@pytest.mark.parametrize(("n", "k"), [*WEIGHT_SIZES, (0, 5), (5, 0)])
def test_panels_unpack_to_their_codes(
    kernels: NativeLibrary, isa: str, dtype: torch.dtype, n: int, k: int
) -> None:
    codes = randint(-1, 1, n, k)
    unpacked = kernels.unpack_panels(layouts.to_panels(codes), n, k, dtype, isa)
    assert unpacked.dtype == dtype
    assert torch.equal(unpacked, codes.to(dtype))


@each_isa
@pytest.mark.parametrize(("n", "k"), [*WEIGHT_SIZES, (0, 5), (5, 0)])
def test_latent_weights_are_ternarized_as_numerics_does(
    kernels: NativeLibrary, isa: str, n: int, k: int
) -> None:
    gamma = torch.tensor(GAMMA)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n)) * 0.05
    ties = torch.tensor([0.5, -0.5, 1.5, -1.5, 0.0, -0.0]) * gamma
    weight.view(-1)[: len(ties)] = ties[: weight.numel()]
    codes = numerics.ternarize(weight, gamma)
    assert torch.equal(kernels.ternarize_codes(weight, float(gamma), isa), codes)
    panels = kernels.ternarize_panels(weight, float(gamma), isa=isa)
    assert torch.equal(panels, layouts.to_panels(codes))
    again = kernels.ternarize_panels(weight, float(gamma), out=panels.fill_(0), isa=isa)
    assert torch.equal(again, layouts.to_panels(codes))
    assert again.data_ptr() == panels.data_ptr()


@each_isa
def test_latent_weights_that_are_not_finite(kernels: NativeLibrary, isa: str) -> None:
    weight = torch.tensor([[torch.nan, torch.inf, -torch.inf, 3e38, -3e38] * 7])
    expected = torch.tensor([[0, 1, -1, 1, -1] * 7], dtype=torch.int8)
    assert torch.equal(kernels.ternarize_codes(weight, 1e-5, isa), expected)


def test_int8_panels_are_as_documented(kernels: NativeLibrary) -> None:
    n, k = 70, 11
    weight = randint(-127, 127, n, k)
    panels = kernels.pack_int8(weight)
    assert panels.shape == (2, 4, 64, 4)
    values = panels.permute(0, 2, 1, 3).reshape(128, 16).int() - 128
    assert torch.equal(values[:n, :k], weight.int())
    assert not values[n:].any()
    assert not values[:, k:].any()


# Threads and processes.


@each_isa
def test_two_threads_change_no_bit(kernels: NativeLibrary, isa: str) -> None:
    torch.set_num_threads(2)
    n, k = 1500, 1100
    codes, weight = randint(-1, 1, n, k), randint(-127, 127, n, k)
    ternary, int8 = kernels.pack_panels(codes), kernels.pack_int8(weight)
    assert torch.equal(ternary, layouts.to_panels(codes))
    for m in (1, 3, 40, 300):
        x_q = randint(-128, 127, m, k)
        assert torch.equal(kernels.ternary_matmul(x_q, ternary, n, isa), product(x_q, codes))
        assert torch.equal(kernels.int8_matmul(x_q, int8, n, isa), product(x_q, weight))
    x = torch.randn(2000, k, generator=torch.Generator().manual_seed(0))
    scale = numerics.activation_scale(numerics.absmax(x))
    assert torch.equal(
        kernels.quantize_activation(x, isa=isa)[0], numerics.quantize_activation(x, scale)
    )
    latent, gamma = x[:n] * 0.05, torch.tensor(GAMMA)
    panels = kernels.ternarize_panels(latent, float(gamma), isa=isa)
    assert torch.equal(panels, layouts.to_panels(numerics.ternarize(latent, gamma)))
    assert torch.equal(
        kernels.ternarize_codes(latent, float(gamma), isa), numerics.ternarize(latent, gamma)
    )
    assert torch.equal(kernels.unpack_panels(ternary, n, k, torch.float32, isa), codes.float())


def exact_here(threads: int) -> bool:
    """Some products on so many threads, one row and many, against the definition."""
    torch.set_num_threads(threads)
    kernels = native.require()
    codes = randint(-1, 1, 2000, 1000)
    panels = kernels.pack_panels(codes)
    return all(
        torch.equal(kernels.ternary_matmul(x_q, panels, 2000), product(x_q, codes))
        for x_q in (randint(-128, 127, m, 1000) for m in (1, 7, 50) * 5)
    )


def test_python_threads_share_the_library() -> None:
    """ctypes lets them run at once: each has its own scratch memory."""
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(exact_here, [1] * 8))


def test_a_thread_that_ended_leaves_nothing_behind_that_others_need() -> None:
    results: list[bool] = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: results.append(exact_here(2)))
        thread.start()
        thread.join()
    assert results == [True] * 3


def test_forks_of_a_process_that_used_the_threads(kernels: NativeLibrary) -> None:
    """The threads of the pool are not in the child, which must not wait for them.

    Torch's own loops would: the child leaves them on one thread, and computes nothing else.
    """
    x_q, codes = randint(-128, 127, 40, 1000), randint(-1, 1, 2000, 1000)
    panels, expected = kernels.pack_panels(codes), product(x_q, codes)

    def multiply() -> Tensor:
        torch.set_num_threads(2)
        acc = kernels.ternary_matmul(x_q, panels, 2000)
        torch.set_num_threads(1)
        return acc

    def child() -> None:
        assert torch.equal(multiply(), expected)

    assert torch.equal(multiply(), expected)
    run_at_once("fork", child)
    assert torch.equal(multiply(), expected)


@pytest.mark.slow
def test_fresh_processes_at_once() -> None:
    run_at_once("spawn", assert_exact_here)


def assert_exact_here() -> None:
    assert exact_here(2)


def run_at_once(method: str, target: Callable[[], None]) -> None:
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=target) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()  # one that hangs, rather than the tests
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]


# Memory, measurements, bad arguments.


@pytest.mark.parametrize("shape", [(0,), (3, 5), (700, 1000, 4)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_huge_pages_hold_tensors_like_any_others(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = huge_pages.empty(shape, dtype)
    assert x.shape == shape
    assert x.dtype == dtype
    assert x.is_contiguous()
    if x.nbytes >= huge_pages.MIN_BYTES:
        assert x.data_ptr() % huge_pages.PAGE_BYTES == 0
    part = x.fill_(1)[: 1 if shape[0] else 0].clone()
    last = x.view(-1)[-1:]
    del x  # views keep the memory
    assert bool((last == 1).all())
    assert bool((part == 1).all())


@each_isa
def test_measurements_are_positive(kernels: NativeLibrary, isa: str) -> None:
    assert kernels.measure_dot_peak(0.001, isa) > 0
    assert kernels.measure_read_bandwidth(torch.ones(1 << 20), 1) > 0


def test_wrong_arguments_are_named(kernels: NativeLibrary) -> None:
    x_q, codes = randint(-128, 127, 3, 20), randint(-1, 1, 4, 20)
    panels, int8, scale = kernels.pack_panels(codes), kernels.pack_int8(codes), torch.ones(3, 1)
    wide = torch.zeros(1, numerics.MAX_EXACT_K + 16, dtype=torch.int8)
    wide_panels = kernels.pack_panels(wide)
    bf16, fp64 = torch.bfloat16, torch.float64
    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "x_q is torch.int32", lambda: kernels.ternary_matmul(x_q.int(), panels, 4)),
        (TypeError, "on meta", lambda: kernels.ternary_matmul(x_q.to("meta"), panels, 4)),
        (ValueError, "x_q has shape", lambda: kernels.ternary_matmul(x_q[0], panels, 4)),
        (ValueError, "panels have shape", lambda: kernels.ternary_matmul(x_q, panels, 65)),
        (ValueError, "panels have shape", lambda: kernels.int8_matmul(x_q, panels, 4)),
        (ValueError, "panels have shape", lambda: kernels.ternary_matmul(x_q[:, :4], panels, 4)),
        (ValueError, "131088 exceeds 131072", lambda: kernels.ternary_matmul(wide, wide_panels, 1)),
        (ValueError, "isa = 'mmx'", lambda: kernels.ternary_matmul(x_q, panels, 4, "mmx")),
        (
            ValueError,
            "x_scale has shape",
            lambda: kernels.ternary_linear(x_q, scale[:2], panels, 4, 1.0, bf16),
        ),
        (
            TypeError,
            "dtype is torch.float64",
            lambda: kernels.ternary_linear(x_q, scale, panels, 4, 1.0, fp64),
        ),
        (
            ValueError,
            "w_scale has shape",
            lambda: kernels.int8_linear(x_q, scale, int8, 4, scale, bf16),
        ),
        (TypeError, "x.dtype is torch.float64", lambda: kernels.quantize_activation(x_q.double())),
        (ValueError, "absmax has", lambda: kernels.quantize_activation(x_q.float(), scale[1:])),
        (ValueError, "other than -1, 0 and 1", lambda: kernels.pack_panels(codes + 1)),
        (ValueError, "other than -1, 0 and 1", lambda: kernels.pack_panels(codes - 1)),
        (ValueError, "holds -128", lambda: kernels.pack_int8(torch.full_like(codes, -128))),
        (ValueError, "out has shape", lambda: kernels.pack_panels(codes, out=panels[:, :1])),
        (TypeError, "dtype is torch.float64", lambda: kernels.unpack_panels(panels, 4, 20, fp64)),
        (TypeError, "weight is", lambda: kernels.ternarize_panels(codes.double(), 1.0)),
    ]
    for error, message, call in wrong:
        with pytest.raises(error, match=message):
            call()
