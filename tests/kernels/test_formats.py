"""Formats of other projects: their own bytes, their own meaning of a scale, and exact ways back."""

import hashlib
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megabit_kernels import layouts, packing
from megabit_kernels.formats import gguf, huggingface
from megabit_kernels.formats.huggingface import LinearClass

GAMMA = torch.tensor(0.0371)
LINEAR_CLASSES: tuple[LinearClass, ...] = ("bitlinear", "autobitlinear")


def random_codes(n: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(n + 10_000 * k)
    return torch.randint(-1, 2, (n, k), generator=generator, dtype=torch.int8)


def packed_codes(n: int, k: int) -> Tensor:
    return packing.pack(random_codes(n, k))


# What TP does with a matrix: cut, convert each shard, convert back, rejoin.


def through_every_form(packed: Tensor, k: int, scale: Tensor) -> set[str]:
    """Each layout and format gives the matrix back; returns those that have a place for it."""
    n, codes, forms = packed.shape[0], packing.unpack(packed, k), {"packed", "planes", "panels"}
    assert torch.equal(packing.pack(codes), packed)
    assert torch.equal(layouts.from_planes(layouts.to_planes(codes), k), codes)
    assert torch.equal(layouts.from_panels(layouts.to_panels(codes), n, k), codes)
    if n % 4 == 0:
        forms.add("huggingface")
        assert torch.equal(huggingface.decode(huggingface.encode(packed, k)), packed)
    if k % 128 == 0:
        forms.add("i2_s")
        decoded, gamma = gguf.decode_i2_s(gguf.encode_i2_s(packed, k, scale), n, k)
        assert torch.equal(decoded, packed)
        assert torch.equal(gamma, scale)
    if k % 256 == 0:
        forms |= {"tq1_0", "tq2_0"}
        in_fp16 = scale.half().float() if bool(codes.any()) else torch.tensor(0.0)
        for decoded, gamma in (
            gguf.decode_tq1_0(gguf.encode_tq1_0(packed, k, scale)),
            gguf.decode_tq2_0(gguf.encode_tq2_0(packed, k, scale)),
        ):
            assert torch.equal(decoded, packed)
            assert torch.equal(gamma, in_fp16)
    return forms


@st.composite
def shards(draw: st.DrawFn, size: int, step: int) -> list[slice]:
    """``size`` cut at multiples of ``step`` for 1 to 4 ranks, evenly or not; some may get none."""
    edge = st.integers(0, size // step).map(lambda i: i * step)
    edges = sorted(draw(st.lists(edge, max_size=3)))
    return [slice(start, stop) for start, stop in pairwise([0, *edges, size])]


@settings(deadline=None)
@given(data=st.data())
def test_shards_go_through_every_form_and_rejoin(data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 24), "n")
    k = data.draw(st.integers(0, 600) | st.sampled_from([256, 512, 1280]), "k")
    rows = data.draw(shards(n, data.draw(st.sampled_from([1, 4]))), "rows")
    columns = data.draw(shards(k, data.draw(st.sampled_from([4, 128, 256]))), "columns")
    scale = torch.tensor(data.draw(st.floats(2**-16, 100.0, width=32), "scale"))
    packed = packed_codes(n, k)
    through_every_form(packed, k, scale)
    bands = []
    for row in rows:
        parts = [packing.slice_packed(packed, k, row, column) for column in columns]
        for part, column in zip(parts, columns, strict=True):
            through_every_form(part, column.stop - column.start, scale)
        bands.append(torch.cat(parts, 1))
    assert torch.equal(torch.cat(bands), packed)


def test_which_forms_have_a_place_for_which_shard() -> None:
    """6912 over TP 2 is 3456: no rows of TQ blocks, but of I2_S blocks."""
    packed = packed_codes(8, 6912)
    common = {"packed", "planes", "panels", "huggingface"}
    assert through_every_form(packed, 6912, GAMMA) == common | {"i2_s", "tq1_0", "tq2_0"}
    half = packing.slice_packed(packed, 6912, columns=slice(0, 3456))
    assert through_every_form(half, 3456, GAMMA) == common | {"i2_s"}
    odd = packing.slice_packed(packed, 6912, slice(0, 3), slice(6900, 6912))
    assert through_every_form(odd, 12, GAMMA) == common - {"huggingface"}


# Bytes that other programs made of one matrix.


def golden_codes() -> Tensor:
    """``[4, 512]``, from a generator that any language has. Row 1 ends in a block of zero weights.

    The expected bytes below are what the named programs wrote for codes · 0.0371 in fp32.
    """
    state, codes = 1, []
    for _ in range(4 * 512):
        state = (1103515245 * state + 12345) % 2**31
        codes.append((state >> 16) % 3 - 1)
    matrix = torch.tensor(codes, dtype=torch.int8).view(4, 512)
    matrix[1, 256:] = 0
    return matrix


def in_hex(data: Tensor) -> str:
    return data.numpy().tobytes().hex()


def sha256(data: Tensor) -> str:
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def test_tq1_0_has_the_bytes_of_the_gguf_package() -> None:
    """``gguf.quants.quantize`` of gguf 0.19.0, and ``quantize_row_tq1_0_ref`` of ggml."""
    data = gguf.encode_tq1_0(packing.pack(golden_codes()), 512, GAMMA)
    assert data.shape == (4, 2 * 54)
    assert in_hex(data[0, :54]) == (
        "f47341a786d30a0c4e4166b42e47bae454050a3fd59db829073755dc7ac8d6bc"  # 5 · 32 weights
        "f62a4392aa96c367e9902a429cab5975"  # 5 · 16
        "bbcb1a17"  # 4 · 4
        "c028"  # γ in fp16
    )
    assert sha256(data) == "faa22884a1d00f80c4f03d6521aea06df74c46e4054272b6d97f1974bee5a177"


def test_tq2_0_has_the_bytes_of_the_gguf_package() -> None:
    """``gguf.quants.quantize`` of gguf 0.19.0, and ``quantize_row_tq2_0_ref`` of ggml."""
    data = gguf.encode_tq2_0(packing.pack(golden_codes()), 512, GAMMA)
    assert data.shape == (4, 2 * 66)
    assert in_hex(data[0, :66]) == (
        "9a05886925161010288891829458520aa84010485659521480a4a82685065692"
        "98111106a546a8568a45108255090604a995081a296a1022580996a999409255"
        "c028"
    )
    assert sha256(data) == "81d30e892d268b23071a447ee1d3bd17e2bf5ed9d7ce911ed8c7bc20442cc66b"


def test_i2_s_has_the_bytes_of_bitnet_cpp() -> None:
    """``quantize_to_i2_s`` of utils/convert-hf-to-gguf-bitnet.py, microsoft/BitNet at 16da220a."""
    data = gguf.encode_i2_s(packing.pack(golden_codes()), 512, GAMMA)
    assert data.shape == (4 * 512 // 4 + 32,)
    assert in_hex(data[:32]) == "a65022695894040428224682162585a02a01042195658514021a2a9852909586"
    assert in_hex(data[-32:]) == "2bf6173d" + 28 * "00"  # γ in fp32
    assert sha256(data) == "dee16ab7bf019eee7f18d302876ec0d966aab26ffc879454a33f6c53312c57a1"


def test_hugging_face_has_the_bytes_of_transformers() -> None:
    """``pack_weights`` of transformers, integrations/bitnet.py."""
    data = huggingface.encode(packing.pack(golden_codes()), 512)
    assert data.shape == (1, 512)
    assert in_hex(data[0, :8]) == "265150a5059aa064"
    assert sha256(data) == "a2a66d1f5ad3ea3e0db12c3ed18741463aa1260bf23306f74f5f975da7649d02"


def test_the_ids_of_the_tensor_types() -> None:
    assert {t.name: int(t) for t in gguf.TensorType} == {"TQ1_0": 34, "TQ2_0": 35, "I2_S": 36}


# Hugging Face.


@pytest.mark.parametrize(("n", "k"), [(0, 3), (4, 0), (4, 1), (8, 7), (12, 64)])
def test_hugging_face_rows_are_a_quarter_apart(n: int, k: int) -> None:
    codes = random_codes(n, k)
    weight = huggingface.encode(packing.pack(codes), k)
    quarter = n // 4
    assert weight.dtype == torch.uint8
    assert weight.shape == (quarter, k)
    for i in range(4):
        rows = codes[i * quarter : (i + 1) * quarter]
        assert torch.equal((weight.int() >> 2 * i & 3) - 1, rows.int())


def test_hugging_face_needs_four_rows_to_a_byte() -> None:
    with pytest.raises(ValueError, match="N = 6 must be a multiple of 4"):
        huggingface.encode(packed_codes(6, 8), 8)


@pytest.mark.parametrize("byte", [0b11, 0b11_00, 0b01_11_01_10, 0b11_00_00_00])
def test_hugging_face_bytes_with_code_3_are_refused(byte: int) -> None:
    weight = huggingface.encode(packed_codes(8, 5), 5)
    weight[1, 2] = byte
    with pytest.raises(ValueError, match="weight holds code 3"):
        huggingface.decode(weight)


@pytest.mark.parametrize("gamma", [1e-5, 0.0371, 0.7, 1.0, 3.0])
def test_what_a_hugging_face_scale_means(gamma: float) -> None:
    scale = torch.tensor(gamma)
    divisor = huggingface.encode_scale(scale, "bitlinear")
    factor = huggingface.encode_scale(scale, "autobitlinear")
    assert divisor.shape == factor.shape == (1,)
    assert divisor.item() == torch.tensor(1 / scale.item()).item()
    assert torch.equal(factor, scale.view(1))
    assert torch.equal(huggingface.decode_scale(factor, "autobitlinear"), scale)


def test_a_reciprocal_keeps_a_scale_to_one_unit_in_the_last_place() -> None:
    generator = torch.Generator().manual_seed(0)
    for gamma in torch.rand(200, generator=generator) + 1e-5:
        back = huggingface.decode_scale(huggingface.encode_scale(gamma, "bitlinear"), "bitlinear")
        assert back.shape == ()
        assert abs(int(back.view(torch.int32)) - int(gamma.view(torch.int32))) <= 1


@pytest.mark.parametrize("linear_class", LINEAR_CLASSES)
def test_a_bf16_scale_keeps_eight_bits(linear_class: LinearClass) -> None:
    stored = huggingface.encode_scale(GAMMA, linear_class, torch.bfloat16)
    assert stored.dtype == torch.bfloat16
    back = huggingface.decode_scale(stored, linear_class)
    assert back.dtype == torch.float32
    # bf16 has 8 significant bits, so rounding to it changes a number by 2^-9 of it at most.
    assert abs(back / GAMMA - 1) <= 2**-8


@pytest.mark.parametrize("linear_class", LINEAR_CLASSES)
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_hugging_face_scales_are_checked(linear_class: LinearClass, value: float) -> None:
    with pytest.raises(ValueError, match=r"^scale must be positive and finite, not"):
        huggingface.encode_scale(torch.tensor(value), linear_class)
    with pytest.raises(ValueError, match="weight_scale must be positive and finite, not"):
        huggingface.decode_scale(torch.tensor([value]), linear_class)


def test_hugging_face_scales_need_a_class_and_one_element() -> None:
    with pytest.raises(ValueError, match="one of bitlinear, autobitlinear, not 'linear'"):
        huggingface.decode_scale(torch.ones(1), "linear")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scale must have one element, not shape \(2,\)"):
        huggingface.encode_scale(torch.ones(2), "bitlinear")


# GGUF.


def test_every_byte_of_tq1_0_is_some_weights() -> None:
    """Five digits have 3^5 values, so of the 256 bytes some are ours and all can be read."""
    data = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 54)
    data[:, 52:] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    codes = packing.unpack(gguf.decode_tq1_0(data)[0], 256)
    for byte, row in enumerate(codes.tolist()):
        fraction = byte
        for place in range(5):
            digit, fraction = divmod(3 * fraction, 256)
            assert set(row[32 * place : 32 * place + 32]) == {digit - 1}
            assert set(row[160 + 16 * place : 160 + 16 * place + 16]) == {digit - 1}
            assert set(row[240 + 4 * place : 240 + 4 * place + 4]) <= {digit - 1}


def test_a_matrix_of_zeros_has_no_scale_in_tq_types() -> None:
    zeros = packing.pack(torch.zeros(2, 512, dtype=torch.int8))
    for decoded, gamma in (
        gguf.decode_tq1_0(gguf.encode_tq1_0(zeros, 512, GAMMA)),
        gguf.decode_tq2_0(gguf.encode_tq2_0(zeros, 512, GAMMA)),
    ):
        assert torch.equal(decoded, zeros)
        assert gamma == 0


def test_blocks_of_different_scales_are_refused() -> None:
    packed = packed_codes(3, 256)
    for encode, decode in (
        (gguf.encode_tq1_0, gguf.decode_tq1_0),
        (gguf.encode_tq2_0, gguf.decode_tq2_0),
    ):
        mixed = torch.cat([encode(packed, 256, GAMMA), encode(packed, 256, 2 * GAMMA)])
        with pytest.raises(ValueError, match=r"2 different block scales, from 0.037\d* to 0.074"):
            decode(mixed)
        infinite = encode(packed, 256, GAMMA)
        infinite[:, -2:] = torch.tensor([torch.inf], dtype=torch.float16).view(torch.uint8)
        with pytest.raises(ValueError, match="block scale inf; it must be positive and finite"):
            decode(infinite)


def test_gguf_bytes_with_code_3_are_refused() -> None:
    packed = packed_codes(2, 256)
    tq2_0, i2_s = gguf.encode_tq2_0(packed, 256, GAMMA), gguf.encode_i2_s(packed, 256, GAMMA)
    tq2_0[1, 5] = i2_s[17] = 0b00_11_01_10
    with pytest.raises(ValueError, match="data holds code 3"):
        gguf.decode_tq2_0(tq2_0)
    with pytest.raises(ValueError, match="data holds code 3"):
        gguf.decode_i2_s(i2_s, 2, 256)


def test_data_at_any_place_in_a_file() -> None:
    """A tensor of a mapped file need not begin where an fp16 or fp32 number may."""
    packed = packed_codes(2, 256)
    for data, decode in (
        (gguf.encode_tq1_0(packed, 256, GAMMA), gguf.decode_tq1_0),
        (gguf.encode_tq2_0(packed, 256, GAMMA), gguf.decode_tq2_0),
        (gguf.encode_i2_s(packed, 256, GAMMA), lambda data: gguf.decode_i2_s(data, 2, 256)),
    ):
        file = torch.cat([data.new_zeros(1), data.flatten()])
        assert torch.equal(decode(file[1:].view(data.shape))[0], packed)


def test_rows_must_be_whole_blocks() -> None:
    for encode in (gguf.encode_tq1_0, gguf.encode_tq2_0):
        with pytest.raises(ValueError, match="K = 3456 must be a multiple of 256, the block of TQ"):
            encode(packed_codes(1, 3456), 3456, GAMMA)
    with pytest.raises(ValueError, match="K = 8640 must be a multiple of 128, the block of I2_S"):
        gguf.encode_i2_s(packed_codes(2, 8640), 8640, GAMMA)
    with pytest.raises(ValueError, match="K = 64 must be a multiple of 128"):
        gguf.decode_i2_s(torch.zeros(64, dtype=torch.uint8), 2, 64)


def test_gguf_data_of_the_wrong_size_is_refused() -> None:
    for decode in (gguf.decode_tq1_0, gguf.decode_tq2_0):
        with pytest.raises(ValueError, match=r"data has 100 bytes a row; it must be a multiple of"):
            decode(torch.zeros(2, 100, dtype=torch.uint8))
        with pytest.raises(TypeError, match=r"data must be torch.uint8, not torch.int8"):
            decode(torch.zeros(2, 54 * 66, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"data has shape \(64,\); I2_S of \[2, 128\] is 96 bytes"):
        gguf.decode_i2_s(torch.zeros(64, dtype=torch.uint8), 2, 128)
    with pytest.raises(TypeError, match=r"data must be torch.uint8, not torch.float32"):
        gguf.decode_i2_s(torch.zeros(96), 2, 128)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_gguf_scales_are_checked(value: float) -> None:
    for encode in (gguf.encode_tq1_0, gguf.encode_tq2_0, gguf.encode_i2_s):
        with pytest.raises(ValueError, match="scale must be positive and finite, not"):
            encode(packed_codes(2, 256), 256, torch.tensor(value))
        with pytest.raises(ValueError, match=r"scale must have one element, not shape \(2,\)"):
            encode(packed_codes(2, 256), 256, torch.ones(2))
    data = gguf.encode_i2_s(packed_codes(1, 128), 128, GAMMA)
    data[32:36] = torch.tensor([-torch.inf]).view(torch.uint8)
    with pytest.raises(ValueError, match="scale -inf; it must be finite and not negative"):
        gguf.decode_i2_s(data, 1, 128)


@pytest.mark.parametrize("value", [1e-9, 1e5])
def test_scales_that_fp16_cannot_hold_are_refused(value: float) -> None:
    for encode in (gguf.encode_tq1_0, gguf.encode_tq2_0):
        with pytest.raises(ValueError, match="must be in the range of fp16"):
            encode(packed_codes(2, 256), 256, torch.tensor(value))
