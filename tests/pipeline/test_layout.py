"""Layers on stages: none lost, none repeated, in the order of the model."""

from hypothesis import given
from hypothesis import strategies as st

from megabit.pipeline.layout import StageLayout, stage_layouts


@given(st.lists(st.integers(0, 20), min_size=1, max_size=16))
def test_every_layer_is_on_one_stage(counts: list[int]) -> None:
    layouts = stage_layouts(counts)
    assert [len(layout.layers) for layout in layouts] == counts
    assert [layer for layout in layouts for layer in layout.layers] == list(range(sum(counts)))
    assert [layout.embedding for layout in layouts] == [True] + [False] * (len(counts) - 1)
    assert [layout.head for layout in layouts] == [False] * (len(counts) - 1) + [True]


def test_the_embedding_is_first_and_the_head_last() -> None:
    assert stage_layouts([3, 0, 2]) == (
        StageLayout(range(3), embedding=True, head=False),
        StageLayout(range(3, 3), embedding=False, head=False),
        StageLayout(range(3, 5), embedding=False, head=True),
    )
    assert stage_layouts([4]) == (StageLayout(range(4), embedding=True, head=True),)
