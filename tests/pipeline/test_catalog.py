"""Schedules by name, and those of the user's: each thing that can be wrong, in one line."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megabit.config import SCHEDULE_CHUNKS
from megabit.errors import UserError
from megabit.pipeline.actions import Exchange, Forward
from megabit.pipeline.catalog import (
    GENERATORS,
    MAX_FINDINGS,
    is_user_schedule,
    make_forward_schedule,
    make_schedule,
)
from megabit.pipeline.placement import Placement
from megabit.pipeline.simulate import Costs, peak_activations, simulate
from megabit.pipeline.validate import validate
from tests.pipeline.cases import CHUNKS

EXAMPLE = f"{Path(__file__).parents[2] / 'examples/schedules/eager_1f1b.py'}:eager_1f1b"
HEADER = """\
from dataclasses import dataclass, replace
from megabit.pipeline.actions import *
from megabit.pipeline.communicate import with_communication
from megabit.pipeline.placement import Placement
from megabit.pipeline.schedules import gpipe, one_forward_one_backward

"""

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the body of a generator to a file, and name it."""

    def write(body: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(
            f"{HEADER}def mine(ranks, microbatches, chunks):\n    {body}\n", encoding="utf-8"
        )
        return f"{path}:mine"

    return write


def problems(name: str, ranks: int = 2, microbatches: int = 3, chunks: int = 1) -> list[str]:
    """Without the beginning that they must all have."""
    with pytest.raises(UserError) as raised:
        make_schedule(name, ranks, microbatches, chunks)
    start = f"parallel.schedule: {name}: " if is_user_schedule(name) else "parallel.schedule: "
    assert all(problem.startswith(start) for problem in raised.value.problems)
    assert not any("\n" in problem for problem in raised.value.problems)
    return [problem.removeprefix(start) for problem in raised.value.problems]


# Ours.


@pytest.mark.parametrize("name", GENERATORS)
def test_ours(name: str) -> None:
    for chunks in CHUNKS[name]:
        schedule = make_schedule(name, 3, 5, chunks)
        validate(schedule)
        assert (schedule.placement.ranks, schedule.placement.chunks) == (3, chunks)
        assert schedule.microbatches == 5
        assert any(isinstance(action, Exchange) for action in schedule.ranks[0])


def test_the_configuration_knows_the_same_names() -> None:
    assert SCHEDULE_CHUNKS.keys() == GENERATORS.keys()
    for name, chunks in SCHEDULE_CHUNKS.items():
        make_schedule(name, 2, 2, chunks)


def test_unknown_name() -> None:
    assert problems("1f2b") == [
        "there is no '1f2b', but gpipe, 1f1b, interleaved, zb-h1, zb-v, v-half, v-min, and "
        "path/to/file.py:function for one of your own"
    ]


def test_wrong_number_of_chunks() -> None:
    assert problems("1f1b", chunks=2) == ["1f1b must have 1 stage on each rank, not 2"]
    assert problems("zb-v", chunks=3) == ["zb-v must have 2 stages on each rank, not 3"]


def test_forward_schedule() -> None:
    for placement in (Placement.loop(3), Placement.loop(2, 3), Placement.v(4)):
        schedule = make_forward_schedule(placement, 5)
        validate(schedule, forward_only=True)
        assert schedule.placement == placement
        assert all(isinstance(action, Forward | Exchange) for action in schedule.ranks[0])


# The user's.


def test_example() -> None:
    schedule = make_schedule(EXAMPLE, 4, 64)
    validate(schedule)
    assert max(peak_activations(schedule)) == 2 * 4 - 1
    # What its docstring promises.
    costs = Costs.even(schedule.placement, message=0.5)
    assert round(simulate(schedule, costs).bubble, 2) == 0.06
    assert round(simulate(make_schedule("1f1b", 4, 64), costs).bubble, 2) == 0.31
    for ranks, microbatches in ((1, 1), (3, 1), (4, 3), (5, 17)):
        make_schedule(EXAMPLE, ranks, microbatches)
    assert problems(EXAMPLE, chunks=2) == [
        "called with (2, 3, 2), it raises ValueError: needs parallel.vpp=1"
    ]


@pytest.mark.parametrize(
    ("name", "is_user"),
    [("1f1b", False), ("zb-v", False), ("m:f", True), ("a/b.py:f", True), ("C:\\b.py:f", True)],
)
def test_is_user_schedule(name: str, is_user: bool) -> None:
    assert is_user_schedule(name) == is_user


def test_from_a_file(write: Write) -> None:
    name = write("return gpipe(ranks, microbatches, chunks)")
    assert make_schedule(name, 2, 3) == make_schedule("gpipe", 2, 3)


def test_from_a_relative_path(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = write("return gpipe(ranks, microbatches, chunks)").rpartition(":")
    monkeypatch.chdir(Path(path).parent)
    assert make_schedule("mine.py:mine", 2, 3) == make_schedule("gpipe", 2, 3)


def test_from_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "schedule_of_mine.py").write_text(
        f"{HEADER}def f(*sizes): return gpipe(*sizes)\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make_schedule("schedule_of_mine:f", 2, 3) == make_schedule("gpipe", 2, 3)
    monkeypatch.delitem(sys.modules, "schedule_of_mine")


def test_a_file_may_define_classes(tmp_path: Path) -> None:
    """Dataclasses look up their module, with annotations as text."""
    path = tmp_path / "mine.py"
    path.write_text(
        f"from __future__ import annotations\n{HEADER}"
        "@dataclass\nclass Mine:\n    extra: int = 1\n\n"
        "    def __call__(self, *sizes): return gpipe(*sizes)\n\nmine = Mine()\n",
        encoding="utf-8",
    )
    assert make_schedule(f"{path}:mine", 2, 3) == make_schedule("gpipe", 2, 3)


def test_messages_of_its_own_are_kept(write: Write) -> None:
    """Here each receive is posted right before it is needed."""
    body = """
    schedule = gpipe(ranks, microbatches, chunks)
    a = [Message("activation", i, 0, 1) for i in range(3)]
    g = [Message("gradient", i, 0, 1) for i in range(3)]
    def back(m): return replace(m, peer=0)
    first = []
    for i in range(3):
        first += [Forward(i), Exchange((a[i],), ())]
    for i in range(3):
        first += [Exchange((), (g[i],)), Backward(i)]
    second = []
    for i in range(3):
        second += [Exchange((), (back(a[i]),)), Forward(i)]
    for i in range(3):
        second += [Backward(i), Exchange((back(g[i]),), ())]
    return replace(schedule, ranks=[first, second])"""
    schedule = make_schedule(write(body), 2, 3)
    assert str(schedule.ranks[1][0]) == "[recv a0←0]"
    assert str(schedule.ranks[1][2]) == "[recv a1←0]"


def test_no_such_file(tmp_path: Path) -> None:
    path = tmp_path / "none.py"
    assert problems(f"{path}:f") == [f"there is no file {path}"]


def test_no_such_module() -> None:
    assert problems("no_such_module:f") == [
        "cannot import no_such_module: ModuleNotFoundError: No module named 'no_such_module'"
    ]


def test_a_file_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f(:\n", encoding="utf-8")
    [problem] = problems(f"{path}:f")
    assert problem.startswith(f"cannot import {path}: SyntaxError: ")
    path.write_text("open('/no/such/file')\n", encoding="utf-8")
    [problem] = problems(f"{path}:f")
    assert problem.startswith(f"cannot import {path}: FileNotFoundError: ")


def test_no_such_function(write: Write) -> None:
    path, _, _ = write("return 1").rpartition(":")
    assert problems(f"{path}:other") == [f"{path} has no function 'other'"]
    assert problems(f"{path}:__name__") == [f"{path} has no function '__name__'"]


def test_it_raises(write: Write) -> None:
    name = write("raise ValueError('needs 4 ranks\\nat least')")
    assert problems(name) == ["called with (2, 3, 1), it raises ValueError: needs 4 ranks"]
    name = write("assert ranks > 2")
    assert problems(name) == ["called with (2, 3, 1), it raises AssertionError"]


def test_wrong_arguments(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f(ranks): return ranks\n", encoding="utf-8")
    [problem] = problems(f"{path}:f")
    assert problem.startswith("called with (2, 3, 1), it raises TypeError: f() takes 1")


def test_it_returns_no_schedule(write: Write) -> None:
    expected = "must return a megabit.pipeline.actions.Schedule"
    assert problems(write("return [[], []]")) == [f"returns list, {expected}"]
    assert problems(write("pass")) == [f"returns NoneType, {expected}"]


def test_wrong_sizes(write: Write) -> None:
    assert problems(write("return gpipe(3, 4, 1)"), chunks=2) == [
        "was asked for 2 ranks, returns a schedule of 3",
        "was asked for 2 chunks, returns a schedule of 1",
        "was asked for 3 microbatches, returns a schedule of 4",
    ]


def test_wrong_placement(write: Write) -> None:
    body = "return replace(gpipe(2, 3, 1), placement=Placement(((1,), (0,))))"
    assert problems(write(body)) == [
        "placement: must have the first stage on rank 0, and the last on rank 0 or the last rank"
    ]


def test_findings_of_the_validator(write: Write) -> None:
    body = "s = gpipe(2, 3, 1); return replace(s, ranks=[s.ranks[0][:-1], s.ranks[1]])"
    assert problems(write(body)) == ["rank 0: never runs BW2, nor B2 and W2"]


def test_only_the_first_findings(write: Write) -> None:
    body = "s = gpipe(2, 3, 1); return replace(s, ranks=[[], s.ranks[1]])"
    found = problems(write(body))
    assert found[0] == "rank 0: never runs F0"
    assert len(found) == MAX_FINDINGS + 1
    assert found[-1] == "and 1 more"


def test_stuck(write: Write) -> None:
    body = "s = gpipe(2, 1, 1); return replace(s, ranks=[s.ranks[0][::-1], s.ranks[1]])"
    assert problems(write(body), microbatches=1) == ["rank 0: runs BW0 before F0"]
    body = """
    F, B = Forward, Backward
    first = [F(0), F(1), F(0, 1), F(1, 1), B(0, 1), B(0), B(1, 1), B(1)]
    second = [F(0), F(0, 1), F(1), F(1, 1), B(0, 1), B(1, 1), B(0), B(1)]
    return Schedule(Placement.v(2), 2, [first, second])"""
    assert problems(write(body), microbatches=2, chunks=2) == [
        "rank 0: stuck before BW0, for which rank 1 never gets to compute g0",
        "rank 1: stuck before BW1.1, for which rank 0 never gets to compute g1.1",
    ]


def test_deadlock(write: Write) -> None:
    body = """
    schedule = with_communication(one_forward_one_backward(2, 2, 1))
    a, g = Message("activation", 1, 0, 1), Message("gradient", 0, 0, 0)
    first = [Forward(0), Exchange((replace(a, microbatch=0),), ()), Forward(1), Exchange((a,), ())]
    for i in range(2):
        first += [Exchange((), (replace(g, microbatch=i, peer=1),)), Backward(i)]
    second = []
    for i in range(2):
        second += [Exchange((), (replace(a, microbatch=i, peer=0),)), Forward(i)]
        second += [Backward(i), Exchange((replace(g, microbatch=i),), ())]
    return replace(schedule, ranks=[first, second])"""
    assert problems(write(body), microbatches=2) == [
        "rank 0: deadlock, waits to send a1 to rank 1",
        "rank 1: deadlock, waits to send g0 to rank 0",
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("ranks=7", "returns what cannot be read: TypeError: "),
        ("ranks=[['F0'], [Forward(0)]]", "rank 0: 'F0' is no action"),
        ("ranks=[[Forward('0')], []]", "returns what cannot be read: TypeError: "),
        ("placement=None", "returns what cannot be read: AttributeError: "),
        ("ranks=[[Exchange(1, 2)], []]", "returns what cannot be read: TypeError: "),
    ],
)
def test_what_is_not_even_a_schedule_inside(write: Write, change: str, problem: str) -> None:
    found = problems(write(f"return replace(gpipe(2, 3, 1), {change})"))
    assert found[0].startswith(problem)
