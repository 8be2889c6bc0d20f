"""Codecs by themselves: what they lose, what they never lose, and how many bytes they make."""

import math

import pytest
import torch
from torch import Tensor

from megabit.config import load_config
from megabit.data_parallel.codecs import BlockCodec, TernaryCodec, TopKCodec, codec_of
from megabit.data_parallel.wire import Codec

SHAPES = ((1, 1), (1, 7), (3, 1), (5, 3), (3, 64), (2, 128), (4, 129), (7, 257), (1, 1000))
"""Rows and columns: below, at and above a block; odd and even."""
CODECS: dict[str, Codec] = {
    "int8": BlockCodec(128, bits=8),
    "int8 in blocks of 3": BlockCodec(3, bits=8),
    "int4": BlockCodec(128, bits=4),
    "int4 in blocks of 5": BlockCodec(5, bits=4),
    "topk 0.01": TopKCodec(0.01),
    "topk 0.3": TopKCodec(0.3),
    "topk 1": TopKCodec(1.0),
    "ternary": TernaryCodec(),
}
NEUTRAL: dict[str, Codec] = {
    "int8": BlockCodec(1, bits=8),
    "int4": BlockCodec(1, bits=4),
    "topk": TopKCodec(1.0),
}
"""Settings with which nothing is lost. That of ``ternary``, and of all, is a ``min_numel`` that no
tensor has: then no codec is used."""


def draw(rows: int, columns: int, n: int = 2, seed: int = 0) -> Tensor:
    """Values of very unequal magnitude, as a view into something larger, as buckets have them."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(n, rows * columns + 64, generator=generator)
    parts *= torch.exp2(8 * torch.randn(parts.shape, generator=generator))
    return parts[:, 32 : 32 + rows * columns].unflatten(1, (rows, columns))


def encode(codec: Codec, x: Tensor, seed: int = 0) -> Tensor:
    maximum = x.abs().amax() if codec.needs_maximum else None
    return codec.encode(x, maximum, torch.Generator().manual_seed(seed))


def sent(codec: Codec, x: Tensor, seed: int = 0) -> Tensor:
    """What arrives."""
    return codec.decode(encode(codec, x, seed), *x.shape[1:])


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_message_has_the_bytes_of_the_formula(name: str, shape: tuple[int, int]) -> None:
    codec, x = CODECS[name], draw(*shape)
    message = encode(codec, x)
    assert message.dtype == torch.uint8
    assert message.shape == (2, codec.tensor_bytes(*shape))
    assert message.shape[1] % 4 == 0
    # It arrives between others.
    whole = torch.cat([torch.full((2, 4), 255, dtype=torch.uint8), message, message], dim=1)
    decoded = codec.decode(whole[:, 4 : 4 + message.shape[1]], *shape)
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, codec.decode(message, *shape))
    assert decoded.shape == x.shape


def test_bytes_written_out() -> None:
    """Of 3 rows of 129: two blocks of 128 each, or 2 = ceil(0.01 · 129) elements."""
    expected = {
        BlockCodec(128, bits=8): 4 * 3 * 2 + 388,  # 387 codes
        BlockCodec(128, bits=4): 4 * 3 * 2 + 196,  # 65 bytes a row
        TopKCodec(0.01): 4 * 3 * 2 + 2 * 3 * 2,
        TopKCodec(1.0): 4 * 3 * 129,  # needs no indices
        TernaryCodec(): 4 + 100,  # 33 bytes a row
    }.items()
    for codec, size in expected:
        assert codec.tensor_bytes(3, 129) == size
    # Indices of rows that are too long for 2 bytes take 4.
    assert TopKCodec(0.5).tensor_bytes(1, 65_536) == (4 + 2) * 32_768
    assert TopKCodec(0.5).tensor_bytes(1, 65_538) == (4 + 4) * 32_769


@pytest.mark.parametrize("name", NEUTRAL)
@pytest.mark.parametrize("shape", SHAPES)
def test_neutral_settings_lose_nothing(name: str, shape: tuple[int, int]) -> None:
    x = draw(*shape)
    extremes = torch.tensor([0.0, -0.0, 1e-45, -1e-38, 3.4e38, -3.4e38, 1.0])
    x.view(2, -1)[0, : len(extremes)] = extremes[: x[0].numel()]
    assert torch.equal(sent(NEUTRAL[name], x), x)


@pytest.mark.parametrize("name", [name for name in CODECS if name != "ternary"])
def test_messages_do_not_depend_on_chance_or_on_other_rows(name: str) -> None:
    """Ranks of a TP group that hold the same row, among different ones, lose the same of it."""
    codec, x = CODECS[name], draw(6, 129)
    assert torch.equal(encode(codec, x, seed=1), encode(codec, x, seed=2))
    one_by_one = [sent(codec, row.unsqueeze(1)) for row in x.unbind(1)]
    assert torch.equal(sent(codec, x), torch.cat(one_by_one, dim=1))


@pytest.mark.parametrize("name", [name for name in CODECS if name != "ternary"])
def test_zeros_and_the_largest_element_stay(name: str) -> None:
    codec = CODECS[name]
    assert torch.equal(sent(codec, torch.zeros(2, 3, 129)), torch.zeros(2, 3, 129))
    x = draw(3, 129)
    largest = x.abs().argmax(-1, keepdim=True)
    assert torch.equal(sent(codec, x).gather(-1, largest), x.gather(-1, largest))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_arrives(name: str, bad: float) -> None:
    """Where it was, and nothing else of finite blocks or rows is touched."""
    codec, x = CODECS[name], draw(3, 20)
    x[1, 2, 11] = bad
    decoded = sent(codec, x)
    assert not decoded[1, 2, 11].isfinite()
    if not codec.needs_maximum:  # of which there is one for all
        assert decoded[:, :2].isfinite().all()
        assert decoded[0].isfinite().all()


@pytest.mark.parametrize(("bits", "limit"), [(8, 127), (4, 7)])
@pytest.mark.parametrize("block", [1, 4, 128, 1000])
def test_blocks_round_by_half_a_unit(bits: int, limit: int, block: int) -> None:
    x = draw(5, 300)
    lost = (sent(BlockCodec(block, bits), x) - x).abs()  # type: ignore[arg-type]
    for own, error in zip(x.split(block, -1), lost.split(block, -1), strict=True):
        unit = own.abs().amax(-1, keepdim=True) / limit
        # x / scale · limit, code / limit and · scale round in fp32: each to 2^-24 of the scale.
        assert (error <= unit * (0.5 + limit * 2**-22)).all()


def test_blocks_round_to_even_and_cut_rows_only() -> None:
    x = torch.tensor([[[7.0, 0.5, 1.5, -2.5], [14.0, 1.0, 3.0, 0.0]]])
    even = torch.tensor([[[7.0, 0.0, 2.0, -2.0], [14.0, 0.0, 4.0, 0.0]]])
    assert torch.equal(sent(BlockCodec(100, bits=4), x), even)


def test_topk_takes_the_largest_and_of_equal_ones_the_left() -> None:
    x = torch.tensor([[[1.0, -3.0, 2.0, 3.0, -2.0], [5.0, 5.0, -5.0, 5.0, 5.0]]])
    expected = torch.tensor([[[0.0, -3.0, 2.0, 3.0, 0.0], [5.0, 5.0, -5.0, 0.0, 0.0]]])
    assert torch.equal(sent(TopKCodec(0.6), x), expected)


@pytest.mark.parametrize(
    ("ratio", "columns", "kept"), [(0.07, 100, 7), (0.01, 300, 3), (0.01, 301, 4), (0.001, 5, 1)]
)
def test_topk_keeps_the_share_that_is_written(ratio: float, columns: int, kept: int) -> None:
    """0.07 · 100 is above 7 in binary."""
    assert TopKCodec(ratio).kept(columns) == kept
    assert (sent(TopKCodec(ratio), draw(4, columns)) != 0).sum(-1).eq(kept).all()


@pytest.mark.parametrize("columns", [40_000, 65_536, 65_537, 100_000])
def test_topk_finds_its_place_in_long_rows(columns: int) -> None:
    """Indices above 32,767 look negative in 2 bytes."""
    x = draw(2, columns)
    x[..., -1] = 1e30
    decoded = sent(TopKCodec(0.001), x)
    chosen = decoded != 0
    assert torch.equal(decoded[chosen], x[chosen])
    assert chosen[..., -1].all()
    assert chosen.sum(-1).eq(math.ceil(columns / 1000)).all()


def test_ternary_is_unbiased() -> None:
    """The mean of N draws is x within its standard error, sqrt(|x| (maximum − |x|) / N)."""
    draws, maximum = 4000, torch.tensor(2.0)
    x = torch.linspace(-2, 2, 401).view(1, 1, -1)
    generator = torch.Generator().manual_seed(7)
    codec = TernaryCodec()
    total, seen = torch.zeros_like(x, dtype=torch.float64), set()
    for _ in range(draws):
        drawn = codec.decode(codec.encode(x, maximum, generator), 1, 401)
        total += drawn
        seen |= set(drawn.unique().tolist())
    assert seen == {-2.0, 0.0, 2.0}
    magnitude = x.abs().double()
    error = (magnitude * (2 - magnitude) / draws).sqrt()
    distance = (total / draws - x).abs()
    # Of 401 elements none is 5 standard errors off but by a chance of 2e-4; fp32's random numbers
    # resolve 2^-24 of the maximum. At 0 and at the maximum nothing is left to chance.
    assert (distance <= 5 * error + 2.0**-23).all()
    inner = error > 0
    # The mean of 398 squares of standard normals is 1, with a standard deviation of 0.07.
    assert ((distance / error)[inner] ** 2).mean() == pytest.approx(1, abs=0.3)


def test_ternary_follows_its_generator_and_the_shared_maximum() -> None:
    x = torch.linspace(-1, 1, 150).view(1, 3, 50)
    assert torch.equal(sent(TernaryCodec(), x, seed=1), sent(TernaryCodec(), x, seed=1))
    assert not torch.equal(sent(TernaryCodec(), x, seed=1), sent(TernaryCodec(), x, seed=2))
    larger = torch.tensor(2.0)  # another rank's
    message = TernaryCodec().encode(x, larger, torch.Generator().manual_seed(1))
    decoded = TernaryCodec().decode(message, 3, 50)
    assert set(decoded.unique().tolist()) == {-2.0, 0.0, 2.0}
    with pytest.raises(ValueError, match="largest magnitude"):
        TernaryCodec().encode(x, None, torch.Generator())


def test_ternary_of_zeros_is_zero() -> None:
    assert torch.equal(sent(TernaryCodec(), torch.zeros(2, 3, 5)), torch.zeros(2, 3, 5))


def test_settings_choose_the_codec() -> None:
    def chosen(*settings: str) -> Codec | None:
        return codec_of(load_config([*settings]))

    assert chosen() is None
    assert chosen("precision.gradients=bfloat16") is None
    assert chosen("precision.gradients=int8", "communication.block=64") == BlockCodec(64, 8)
    assert chosen("precision.gradients=int4") == BlockCodec(128, 4)
    ratio = "communication.topk_ratio=0.05"
    assert chosen("precision.gradients=topk", ratio) == TopKCodec(0.05)
    assert chosen("precision.gradients=ternary") == TernaryCodec()
