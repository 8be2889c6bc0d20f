"""Where tensors lie in buckets: every row once, whatever the sizes."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from megabit.data_parallel.layout import ALIGNMENT, BucketLayout, Kind, Slot, lay_out
from megabit.mesh import ParallelMesh
from megabit.tensor_parallel import Shard, ShardedParameter, whole
from megabit.training.step import TrainingState, forward_backward
from tests.training.tiny import own_batch, tiny

MIB = 2**20
SHAPES = [(1, 4), (3, 20), (7, 5), (8, 8), (64, 64), (5,), (1,), (97,), (130, 12)]
"""Fewer rows than ranks, one dimension, odd numbers of rows and of columns."""


def parameter(*shape: int) -> ShardedParameter:
    shard = Shard(shape, 0, whole(shape[0], owned=True))
    return ShardedParameter(shard, torch.float32, torch.device("cpu"))


def one_bucket(ranks: int, kind: Kind = "matrix") -> BucketLayout:
    """All awkward shapes in one bucket."""
    named = [(str(shape), parameter(*shape), kind) for shape in SHAPES]
    (layout,) = lay_out(named, ranks, bucket_mb=1.0)
    return layout


RANKS = pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 13])


@RANKS
def test_every_row_is_in_exactly_one_part(ranks: int) -> None:
    layout = one_bucket(ranks)
    assert [slot.name for slot in layout.slots] == [*map(str, reversed(SHAPES))]
    for slot in layout.slots:
        rows = [row for part in range(ranks) for row in slot.rows_of(part)]
        assert rows == [*range(slot.rows)]
        assert max(len(slot.rows_of(part)) for part in range(ranks)) == slot.rows_per_rank
        owned = [row for part in range(ranks) for row in slot.owned_rows_of(part)]
        assert owned == rows  # on the only rank of TP
    assert layout.gradients == len(SHAPES)


@RANKS
def test_offsets_are_aligned_and_slots_do_not_overlap(ranks: int) -> None:
    """Fused AdamW computes the last elements of a tensor by other code: no part may have any."""
    layout = one_bucket(ranks)
    ends = 0
    for slot in layout.slots:
        assert slot.offset % ALIGNMENT == 0
        assert slot.offset == -(-ends // ALIGNMENT) * ALIGNMENT  # no more padding than needed
        ends = slot.offset + slot.size
    assert layout.part % ALIGNMENT == 0
    assert 0 <= layout.part - ends < ALIGNMENT
    # Of a tensor, at most one row for each rank and the alignment are padding.
    padding = layout.part * ranks - sum(slot.parameter.numel() for slot in layout.slots)
    bound = sum(ranks * (slot.columns + ALIGNMENT) for slot in layout.slots)
    assert 0 <= padding < bound


@RANKS
def test_what_is_added_to_a_bucket_is_found_in_it(ranks: int) -> None:
    """Row by row, and as a whole; and nothing is written beside it."""
    layout = one_bucket(ranks)
    parts = torch.zeros(ranks, layout.part)
    values: dict[str, Tensor] = {}
    for number, slot in enumerate(layout.slots):
        shape = slot.parameter.shape
        values[slot.name] = torch.arange(1.0, shape.numel() + 1).view(shape) + 1000 * number
        layout.add(parts, slot, values[slot.name])
        layout.add(parts, slot, 2 * values[slot.name])
    for slot in layout.slots:
        expected = 3 * values[slot.name].reshape(slot.rows, slot.columns)
        assert torch.equal(layout.local(parts, slot), expected)
        for part in range(ranks):
            rows = slot.rows_of(part)
            if rows:
                view = slot.rows_in(parts, part, rows, part)
                assert torch.equal(view, expected[rows.start : rows.stop])
    total = sum(3 * value.double().sum() for value in values.values())
    assert parts.double().sum() == total  # integers below 2^53


@RANKS
def test_a_gradient_may_be_a_view(ranks: int) -> None:
    layout = one_bucket(ranks)
    parts = torch.zeros(ranks, layout.part)
    slot = next(slot for slot in layout.slots if slot.name == str((130, 12)))
    gradient = torch.arange(130.0 * 12).view(12, 130).t()
    layout.add(parts, slot, gradient)
    assert torch.equal(layout.local(parts, slot), gradient)


def test_rows_that_another_rank_counts() -> None:
    """Of 8 rows of which this TP rank owns 2 to 5, each part counts its share."""
    span = whole(8, owned=True).owning(2, 6)
    shared = ShardedParameter(Shard((8, 4), 0, span), torch.float32, torch.device("cpu"))
    for ranks in (1, 2, 3, 4, 8):
        (layout,) = lay_out([("shared", shared, "ternary")], ranks, 1.0)
        (slot,) = layout.slots
        owned = [row for part in range(ranks) for row in slot.owned_rows_of(part)]
        assert owned == [2, 3, 4, 5]
        for part in range(ranks):
            assert set(slot.owned_rows_of(part)) <= set(slot.rows_of(part))


def test_none_of_a_copy_is_counted() -> None:
    copy = ShardedParameter(Shard((8, 4), 0, whole(8, owned=False)), torch.float32, "cpu")
    (layout,) = lay_out([("copy", copy, "matrix")], 2, 1.0)
    assert [len(layout.slots[0].owned_rows_of(part)) for part in range(2)] == [0, 0]


def test_kinds_do_not_share_a_bucket() -> None:
    kinds: list[Kind] = ["matrix", "gain", "ternary", "partial gain", "ternary", "gain"]
    named = [(str(i), parameter(8, 4), kind) for i, kind in enumerate(kinds)]
    layouts = lay_out(named, 2, 1.0)
    found = {layout.kind: [slot.name for slot in layout.slots] for layout in layouts}
    assert found == {
        "matrix": ["0"],
        "gain": ["5", "1"],
        "ternary": ["4", "2"],
        "partial gain": ["3"],
    }
    # Backward passes go from the last to the first, and the last slot completes a bucket.
    assert [layout.kind for layout in layouts] == ["partial gain", "ternary", "gain", "matrix"]


@pytest.mark.parametrize("bucket_mb", [0.0001, 0.001, 0.01])
def test_buckets_are_in_the_order_in_which_a_backward_pass_completes_them(bucket_mb: float) -> None:
    kinds = itertools.cycle(["matrix", "gain", "ternary", "ternary", "gain"])
    named: list[tuple[str, ShardedParameter, Kind]] = [
        (str(i), parameter(8, 8), kind)  # type: ignore[misc]
        for i, kind in zip(range(40), kinds, strict=False)
    ]
    layouts = lay_out(named, 2, bucket_mb)
    completed = [int(layout.slots[-1].name) for layout in layouts]
    assert completed == sorted(completed, reverse=True)
    slots = [int(slot.name) for layout in layouts for slot in layout.slots]
    assert sorted(slots) == [*range(40)]
    for layout in layouts:
        names = [int(slot.name) for slot in layout.slots]
        assert names == sorted(names, reverse=True)


@pytest.mark.parametrize("bucket_mb", [0.0001, 0.001, 0.01, 1.0])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_stages_do_not_share_a_bucket(chunks: int, bucket_mb: float) -> None:
    """Of a rank with several: they are complete stage by stage, from the last to the first."""
    kinds = itertools.cycle(["matrix", "gain", "ternary", "ternary", "gain"])
    named: list[tuple[str, ShardedParameter, Kind]] = [
        (str(i), parameter(8, 8), kind)  # type: ignore[misc]
        for i, kind in zip(range(42), kinds, strict=False)
    ]

    def chunk_of(name: str) -> int:
        return int(name) * chunks // 42

    layouts = lay_out(named, 2, bucket_mb, chunk_of)
    of_layouts = [{chunk_of(slot.name) for slot in layout.slots} for layout in layouts]
    assert all(len(of_layout) == 1 for of_layout in of_layouts)
    assert {*itertools.chain(*of_layouts)} == {*range(chunks)}
    completed = [int(layout.slots[-1].name) for layout in layouts]
    assert completed == sorted(completed, reverse=True)
    slots = [int(slot.name) for layout in layouts for slot in layout.slots]
    assert sorted(slots) == [*range(42)]


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("bucket_mb", [0.01, 0.03, 25])
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
)
def test_a_step_completes_buckets_in_their_order(
    schedule: str, chunks: int, bucket_mb: float, tied: str
) -> None:
    """On a rank with all stages of a model, with backward passes that compute all gradients. What
    one function hands over, such as the gradients of q, k and v, comes in any order."""
    config = tiny(
        *(f"parallel.schedule={schedule}", f"parallel.vpp={chunks}", "model.num_hidden_layers=3"),
        *(f"parallel.bucket_mb={bucket_mb}", f"model.tie_word_embeddings={tied}"),
    )
    state = TrainingState.create(config, ParallelMesh())
    buckets = state.optimizer.gradients.buckets
    completed: list[int] = []

    def watch(parameter: ShardedParameter) -> None:
        collector = parameter._collector
        assert collector is not None

        def collect(gradient: Tensor) -> None:
            collector(gradient)
            done = [i for i, bucket in enumerate(buckets) if bucket.total is not None]
            completed.extend(i for i in done if i not in completed)

        parameter._collector = collect

    for bucket in buckets:
        assert len({state.stages.chunk_of(slot.name) for slot in bucket.layout.slots}) == 1
        for slot in bucket.layout.slots:
            watch(slot.parameter)
    forward_backward(state, own_batch(config, state.mesh, 0), 0)
    assert completed == [*range(len(buckets))]


@pytest.mark.parametrize(
    ("ranks", "per_bucket"), [(1, 2), (2, 2), (8, 2), (12, 3), (16, 4), (32, 8), (64, 16)]
)
def test_buckets_grow_with_more_than_eight_ranks(ranks: int, per_bucket: int) -> None:
    """What a rank sends to each other one stays as large as at 8 ranks."""
    size = 128 * 128
    named: list[tuple[str, ShardedParameter, Kind]] = [
        (str(i), parameter(128, 128), "ternary") for i in range(32)
    ]
    layouts = lay_out(named, ranks, bucket_mb=2 * size * 4 / MIB)
    counts = [len(layout.slots) for layout in layouts]
    assert counts[:-1] == [per_bucket] * (len(counts) - 1)
    assert 0 < counts[-1] <= per_bucket
    if ranks >= 8 and 128 % ranks == 0:
        assert layouts[0].part == size * 2 / 8


def test_a_tensor_that_is_larger_than_a_bucket_has_one_of_its_own() -> None:
    named: list[tuple[str, ShardedParameter, Kind]] = [
        ("small", parameter(8, 8), "ternary"),
        ("large", parameter(128, 128), "ternary"),
        ("other", parameter(8, 8), "ternary"),
    ]
    layouts = lay_out(named, 2, bucket_mb=0.001)
    assert [[slot.name for slot in layout.slots] for layout in layouts] == [
        *(["other"], ["large"], ["small"])
    ]


def test_slots_know_their_sizes() -> None:
    (layout,) = lay_out([("gain", parameter(97), "gain")], 4, 1.0)
    (slot,) = layout.slots
    assert isinstance(slot, Slot)
    assert (slot.rows, slot.columns, slot.rows_per_rank, slot.size) == (97, 1, 25, 25)
    assert [len(slot.rows_of(part)) for part in range(4)] == [25, 25, 25, 22]


@RANKS
def test_packed_codes_have_places_of_their_own(ranks: int) -> None:
    """Rows begin at bytes of their own, also where four codes do not divide a row."""
    layout = one_bucket(ranks, "ternary")
    parts = torch.zeros(ranks, layout.code_part, dtype=torch.uint8)
    ends = 0
    for number, slot in enumerate(layout.slots):
        assert slot.code_columns == math.ceil(slot.columns / 4)
        size = slot.rows_per_rank * slot.code_columns
        assert slot.code_offset == -(-ends // 16) * 16
        ends = slot.code_offset + size
        for part in range(ranks):
            rows = slot.rows_of(part)
            end = slot.code_offset + len(rows) * slot.code_columns
            assert not parts[part, slot.code_offset : end].any()
            parts[part, slot.code_offset : end] = number + 1
    assert 0 <= layout.code_part - ends < 16
    for number, slot in enumerate(layout.slots):
        packed = layout.local_codes(parts, slot)
        assert packed.shape == (slot.rows, slot.code_columns)
        assert (packed == number + 1).all()
