"""The mean of islands, plain and coded: values, what coding loses, and that it comes later."""

import pytest
import torch
from torch import Tensor

from megabit.launch import run_ranks
from megabit.outer.diloco import DiLoCo
from megabit.outer.mean import CastCodec, RowSplit
from megabit.outer.tensors import AnchoredTensor, by_bucket
from tests.outer.islands import IslandRun, on_wire, outer_config

MEETINGS = 40


def diloco(islands: int, wire: str) -> DiLoCo:
    config = outer_config(islands, *on_wire(wire))
    outer = IslandRun.create(config).outer
    assert isinstance(outer, DiLoCo)
    return outer


def anchored(outer: DiLoCo) -> list[AnchoredTensor]:
    return outer.fragments[0]


def change(tensor: AnchoredTensor, island: int) -> Tensor:
    """Which the island wants: of very different sizes in a row."""
    generator = torch.Generator().manual_seed(island + sum(map(ord, tensor.name)))
    numbers = torch.randn(tensor.weights.shape, generator=generator)
    return numbers * 10 ** torch.randn(tensor.weights.shape, generator=generator)


def mean_changes(outer: DiLoCo, island: int) -> list[Tensor]:
    """The mean change that all islands apply, of each tensor; anchors are zeros here."""
    changes = []
    for message in by_bucket(anchored(outer)):
        for tensor in message:
            tensor.anchor.zero_()
            tensor.weights.copy_(-change(tensor, island))
        finish = outer.mean.start(message)
        changes += [-mean for mean in finish()]
    return changes


def meant(outer: DiLoCo, islands: int) -> list[Tensor]:
    return [
        torch.stack([change(tensor, island).double() for island in range(islands)]).mean(0)
        for tensor in anchored(outer)
    ]


@pytest.mark.parametrize("islands", [1, 2, 3])
def test_a_plain_mean_is_the_mean(islands: int) -> None:
    """To the rounding of a sum and a quotient in fp32; the same bits on all islands."""

    def mean() -> tuple[list[Tensor], list[Tensor]]:
        outer = diloco(islands, "float32")
        rank = outer.optimizer.mesh.outer.rank
        return mean_changes(outer, rank), meant(outer, islands)

    ranks = run_ranks(mean, islands)
    for own, true in ranks:
        for a, b, first in zip(own, true, ranks[0][0], strict=True):
            assert torch.equal(a, first)
            torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
@pytest.mark.parametrize("islands", [1, 2, 3])
def test_what_is_lost_comes_later(islands: int, wire: str) -> None:
    """The changes that T meetings have applied add up to T times the mean change, less the mean of
    the errors that islands have left. So the mean over meetings is off by that over T, however
    coarse the codec, and the errors do not grow."""

    def run() -> tuple[list[Tensor], list[list[Tensor]], list[Tensor], list[Tensor]]:
        outer = diloco(islands, wire)
        rank = outer.optimizer.mesh.outer.rank
        meetings = [mean_changes(outer, rank) for _ in range(MEETINGS)]
        errors = [t.error for t in anchored(outer) if t.error is not None]
        total = [torch.stack(of).double().sum(0) for of in zip(*meetings, strict=True)]
        return total, meetings, errors, meant(outer, islands)

    ranks = run_ranks(run, islands)
    for number, true in enumerate(ranks[0][3]):
        total = ranks[0][0][number]
        left = torch.stack([rank[2][number].double() for rank in ranks]).mean(0)
        largest = max(x.abs().max().item() for x in (true, *(r[1][0][number] for r in ranks)))
        # Sums in fp32: the change and its error round once in each meeting.
        rounding = MEETINGS * 1e-6 * largest * islands
        torch.testing.assert_close(total + left, MEETINGS * true, rtol=0, atol=rounding)
        # bfloat16 keeps 8 bits of a number and int8 7 of the largest of its block; the first shot
        # loses half a unit of that and the second as much of the mean.
        assert left.abs().max() < 3 * islands * largest / 100
        for rank in ranks:  # the same bits on all islands
            assert all(
                torch.equal(a[number], b[number]) for a, b in zip(rank[1], ranks[0][1], strict=True)
            )


def test_without_feedback_it_never_comes() -> None:
    """So the test above can fail: the same change is off by the same in each meeting."""

    def run() -> tuple[float, float]:
        outer = diloco(2, "int8")
        rank = outer.optimizer.mesh.outer.rank
        off = []
        for feeds_back in (False, True):
            totals = [torch.zeros_like(true) for true in meant(outer, 2)]
            for _ in range(MEETINGS):
                for tensor in anchored(outer):
                    if not feeds_back and tensor.error is not None:
                        tensor.error.zero_()
                for total, applied in zip(totals, mean_changes(outer, rank), strict=True):
                    total += applied
            true = meant(outer, 2)
            mean_off = [(t / MEETINGS - x).abs().max() for t, x in zip(totals, true, strict=True)]
            off.append(torch.stack(mean_off).max().item())
        return off[0], off[1]

    without, with_feedback = run_ranks(run, 2)[0]
    assert without > 5 * with_feedback


def test_gains_lose_nothing() -> None:
    """They are sent as fp32, in the same two shots."""

    def run() -> list[tuple[bool, float]]:
        outer = diloco(2, "int8")
        mean_changes(outer, outer.optimizer.mesh.outer.rank)
        errors = ((t, t.error) for t in anchored(outer))
        return [(t.is_gain, e.abs().max().item()) for t, e in errors if e is not None]

    kept = run_ranks(run, 2)[0]
    assert sum(is_gain for is_gain, _ in kept) == 2
    assert all((error == 0) == is_gain for is_gain, error in kept)


@pytest.mark.parametrize("islands", [1, 2, 3, 5])
@pytest.mark.parametrize("first_row", [0, 1, 7])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_rows_of_islands(rows: int, first_row: int, islands: int) -> None:
    """Each row once, with the island that its logical number says, wherever a rank's rows begin."""
    x = torch.arange(rows * 4.0).view(rows, 4) + 1
    split = RowSplit(first_row, rows, islands)
    parts = split.split(x)
    assert parts.shape == (islands, split.most, 4)
    assert torch.equal(split.join(parts), x)
    for island in range(islands):
        for row in x[split.of(island)]:
            assert (first_row + int(row[0] - 1) // 4) % islands == island


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (3, 7, 16)])
def test_cast(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    codec, x = CastCodec(dtype), torch.randn(shape)
    message = codec.encode(x, None, torch.Generator())
    assert message.dtype == torch.uint8
    assert message.shape == (shape[0], codec.tensor_bytes(*shape[1:]))
    assert message.shape[1] % 4 == 0
    assert torch.equal(codec.decode(message, *shape[1:]), x.to(dtype).float())


def test_a_change_that_is_not_finite_stays_so() -> None:
    """Nothing hides that an island has diverged."""

    def run() -> bool:
        outer = diloco(2, "int8")
        tensor = anchored(outer)[0]
        tensor.weights[0, 0] = torch.inf
        finish = outer.mean.start([tensor])
        return bool(finish()[0].isfinite().all())

    assert run_ranks(run, 2) == [False, False]
