"""``examples/codecs/sign.py`` keeps what ``wire.Codec`` promises, by itself and between ranks."""

import math
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megabit.data_parallel.wire import Codec
from megabit.launch import run_ranks
from tests.data_parallel.small import STEPS, SmallRun, config_of, make_mesh
from tests.training.tiny import logical, owned

FILE = Path(__file__).parents[2] / "examples/codecs/sign.py"
SIGN: Codec = runpy.run_path(str(FILE))["SignCodec"]()
SHAPES = ((1, 1), (1, 7), (3, 8), (5, 3), (4, 129))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) ** 3


def sent(x: Tensor) -> Tensor:
    """What arrives of ``[n, rows, columns]``."""
    return SIGN.decode(SIGN.encode(x, None, torch.Generator()), *x.shape[1:])


@pytest.mark.parametrize("shape", SHAPES)
def test_signs_times_the_mean_of_each_row(shape: tuple[int, int]) -> None:
    x = draw(2, *shape)
    message = SIGN.encode(x, None, torch.Generator())
    assert message.dtype == torch.uint8
    assert message.shape == (2, SIGN.tensor_bytes(*shape))
    assert message.shape[1] % 4 == 0
    expected = torch.where(x >= 0, 1.0, -1.0) * x.abs().mean(-1, keepdim=True)
    assert torch.equal(sent(x), expected)


def test_a_row_does_not_depend_on_others() -> None:
    """Ranks of a TP group that hold the same row, among different ones, lose the same of it."""
    x = draw(2, 5, 21)
    alone = [sent(row.unsqueeze(1)) for row in x.unbind(1)]
    assert torch.equal(sent(x), torch.cat(alone, dim=1))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_arrives_and_touches_no_other_row(bad: float) -> None:
    x = draw(2, 3, 20)
    x[1, 2, 11] = bad
    arrived = sent(x)
    assert not arrived[1, 2].isfinite().any()
    assert arrived[0].isfinite().all()
    assert arrived[1, :2].isfinite().all()


def test_with_feedback_the_mean_of_what_arrives_is_right() -> None:
    """Σ s = Σ g − e: of a gradient that stays the same, the mean is off by |e| / T."""
    gradient, error = draw(1, 3, 64), torch.zeros(1, 3, 64)
    total, steps = torch.zeros_like(gradient), 2000
    for _ in range(steps):
        arrived = sent(gradient + error)
        error = gradient + error - arrived
        total += arrived
    off = (total / steps - gradient).norm()
    assert off < 0.05 * gradient.norm() < (sent(gradient) - gradient).norm()
    assert float(off) == pytest.approx(float(error.norm()) / steps, rel=1e-2)


def test_ranks_train_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are those of the formula, and weights end near those of plain data parallelism."""

    def run(codec: Codec | None) -> tuple[dict[str, Tensor], float, float]:
        monkeypatch.setattr("megabit.data_parallel.zero.codec_of", lambda config: codec)
        mesh = make_mesh()
        small = SmallRun.create(config_of(1, "precision.gradients=int8"), mesh)
        if codec is None:
            small = SmallRun.create(config_of(1), mesh)
        small.step(0)
        counted = mesh.sent()["dp", "weight gradients"]
        expected = 0.0
        for bucket in small.optimizer.gradients.buckets:
            if codec is None or not bucket.is_coded:
                expected += 4 * bucket.layout.part
            else:
                slots = bucket.layout.slots
                expected += sum(codec.tensor_bytes(s.rows_per_rank, s.columns) for s in slots)
        for step in range(1, STEPS):
            small.step(step)
        return owned(small.optimizer), counted, expected

    plain, coded = (run_ranks(lambda codec=codec: run(codec), 2) for codec in (None, SIGN))
    for _, counted, expected in coded:
        assert counted == expected < plain[0][1] / 3
    before, after = (logical(rank[0] for rank in ranks) for ranks in (plain, coded))
    assert after.keys() == before.keys()
    distance = [(after[name] - before[name]).norm() / before[name].norm() for name in before]
    assert 0 < max(distance) < 0.5
