"""Layers on stages: none lost, none repeated, the head's stage never the fullest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabit.pipeline.layout import StageLayout, stage_layouts


@given(st.integers(1, 200), st.integers(1, 16))
def test_the_default_is_even_and_spares_the_last_stage(num_layers: int, pp: int) -> None:
    layouts = stage_layouts(num_layers, pp)
    sizes = [len(layout.layers) for layout in layouts]
    assert [layer for layout in layouts for layer in layout.layers] == list(range(num_layers))
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=16))
def test_an_explicit_layout_is_kept(counts: list[int]) -> None:
    layouts = stage_layouts(sum(counts), len(counts), counts)
    assert [len(layout.layers) for layout in layouts] == counts
    assert [layer for layout in layouts for layer in layout.layers] == list(range(sum(counts)))


def test_the_embedding_is_first_and_the_head_last() -> None:
    assert stage_layouts(7, 3) == [
        StageLayout(range(3), embedding=True, head=False),
        StageLayout(range(3, 5), embedding=False, head=False),
        StageLayout(range(5, 7), embedding=False, head=True),
    ]
    assert stage_layouts(4, 1) == [StageLayout(range(4), embedding=True, head=True)]


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([2, 1], id="loses a layer"),
        pytest.param([2, 3], id="has a layer too many"),
        pytest.param([5, -1], id="repeats a layer"),
        pytest.param([4], id="too few stages"),
        pytest.param([2, 1, 1], id="too many stages"),
        pytest.param([], id="no stage"),
    ],
)
def test_a_wrong_layout_is_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="4 layers over 2 stages"):
        stage_layouts(4, 2, counts)
