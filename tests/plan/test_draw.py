"""Scaling on paper: points of tiny models, their file, and the picture."""

import dataclasses
import json
from pathlib import Path

import pytest

from megabit.config import find_problems
from megabit.errors import UserError
from megabit.plan.catalog import known_machine
from megabit.plan.draw import (
    KINDS,
    Point,
    Scaling,
    as_dense,
    draw_scaling,
    find_point,
    gaps,
    scaled,
    tokens_of,
    without_ramp,
    write_scaling,
)
from megabit.plan.search import Search
from tests.training.tiny import tiny

H100 = known_machine("h100", 8, "ib400")
SIZES = ("train.global_batch_size=4", "train.micro_batch_size=1", "train.steps=15625")
CONFIGS = {
    "small": tiny(*SIZES, "precision.compute=bfloat16"),
    "wide": tiny(*SIZES, "precision.compute=bfloat16", "model.intermediate_size=96"),
}
GPUS = (1, 2, 3, 64)


@pytest.fixture(scope="module")
def scaling() -> Scaling:
    *_, last = scaled(CONFIGS, GPUS, H100)
    return last


def test_each_point_is_the_best_that_a_search_finds(scaling: Scaling) -> None:
    assert len(scaling.points) == len(CONFIGS) * len(GPUS) * len(KINDS)
    best = Search(without_ramp(CONFIGS["wide"]), 2, H100, top=1).run().candidates[0]
    point = scaling.of("wide", "ternary")[1]
    assert (point.gpus, point.layout, point.settings) == (2, best.name, best.choices)
    assert point.tokens_per_s == best.step.tokens_per_s
    assert point.memory_bytes == best.memory
    assert point.gpu_days == pytest.approx(2 * 1e6 / best.step.tokens_per_s / 86_400)
    assert scaling.models["wide"] == {"tokens": 10**6, "batch_tokens": 4 * 16}
    dense = scaling.of("wide", "dense")[1]
    assert dense.settings["optim.zero_stage"] == 1
    assert dense.memory_bytes["codes"] == 0 < point.memory_bytes["codes"]


def test_where_nothing_works_there_is_a_reason(scaling: Scaling) -> None:
    """Three ranks cannot share four samples or four heads, and 64 are too many for four samples,
    four heads and two layers; in a small memory nothing fits."""
    for model in CONFIGS:
        for kind in KINDS:
            for point in scaling.of(model, kind):
                assert bool(point.reason) == (point.gpus in (3, 64)) == (not point.layout)
    lines = [*gaps(scaling)]
    assert len(lines) == 4
    assert lines[0].startswith("small ternary, no layout on 3, 64 GPUs: ")
    tight = dataclasses.replace(H100, device=dataclasses.replace(H100.device, memory_bytes=10**6))
    point = find_point("small", CONFIGS["small"], "ternary", 2, tight)
    assert point.reason.startswith("needs too much memory: the nearest, TP ")


def test_what_is_compared_can_be_trained() -> None:
    ramp = tiny(
        *("train.global_batch_size=4", "train.micro_batch_size=1", "train.batch_ramp_start=2"),
        *("train.batch_ramp_increment=2", "train.batch_ramp_tokens=1000"),
    )
    ternary = without_ramp(ramp)
    dense = as_dense(ternary)
    assert find_problems(ternary, 4) == find_problems(dense, 4) == []
    assert find_problems(ramp, 4) != []
    assert ternary.precision.gradients == dense.precision.gradients == "bfloat16"
    assert (dense.model.linear, dense.optim.zero_stage) == ("dense", 1)
    assert tokens_of(ramp) == 6 * 4 * 16


def test_a_file_is_read_back_and_gone_on_with(scaling: Scaling, tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    write_scaling(path, scaling)
    read = Scaling.read(path)
    assert read.points == scaling.points
    assert (read.models, read.machine) == (scaling.models, scaling.machine)
    assert "nothing of this was measured" in json.loads(path.read_text())["what"]
    assert [*scaled(CONFIGS, GPUS, H100, read.points)] == []
    (more,) = scaled(CONFIGS, GPUS, H100, read.points[:-1])
    assert more.points == scaling.points


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 1, "points": [{"a": 1}]}'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"other\.json: is no file of scaling"):
        Scaling.read(path)


def test_the_picture(scaling: Scaling, tmp_path: Path) -> None:
    path = tmp_path / "scaling.png"
    draw_scaling(scaling, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    nothing = [Point(p.model, p.kind, p.gpus, reason="no") for p in scaling.points]
    draw_scaling(dataclasses.replace(scaling, points=nothing), path)
    assert [p.name for p in tmp_path.iterdir()] == ["scaling.png"]
