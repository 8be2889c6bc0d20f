"""Axes and numbers, against values by hand."""

import math

import pytest

from megabit.report.scale import Scale, scale_of
from megabit.report.units import Unit, axis_text, largest_unit, text_of


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [
        (0, 100, False, [0, 25, 50, 75, 100]),
        (0, 2000, False, [0, 500, 1000, 1500, 2000]),
        (1.9, 4.1, False, [2, 3, 4]),
        (-0.3, 0.3, False, [-0.2, 0, 0.2]),
        (0, 3e-4, False, [0, 1e-4, 2e-4, 3e-4]),
        (1.5, 60, True, [2, 5, 10, 20, 50]),
        (0.5, 2e6, True, [1, 100, 1e4, 1e6]),
        (2.0, 4.0, True, [2, 2.5, 3, 3.5, 4]),
    ],
)
def test_ticks_are_round_and_within(
    low: float, high: float, log: bool, expected: list[float]
) -> None:
    ticks = Scale(low, high, log).ticks()
    assert ticks == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert not any(math.copysign(1, tick) < 0 for tick in ticks if tick == 0)


def test_places() -> None:
    assert [Scale(2, 4).place(v) for v in (2, 3, 4, 5, -1)] == [0, 0.5, 1, 1, 0]
    log = Scale(1, 100, log=True)
    assert [log.place(v) for v in (1, 10, 100, 0, -5)] == [0, 0.5, 1, 0, 0]


@pytest.mark.parametrize("values", [[0.0], [2.5], [-3.0, -3.0], [1e-300], [1e300], [0.0, 1e-320]])
@pytest.mark.parametrize("from_zero", [False, True])
def test_a_scale_has_room_for_all(values: list[float], from_zero: bool) -> None:
    scale = scale_of(values, from_zero)
    assert scale.low < scale.high
    assert all(scale.low <= value <= scale.high for value in values)
    assert not from_zero or scale.low <= 0 <= scale.high
    assert scale.ticks()


def test_a_log_scale_ignores_what_it_cannot_show() -> None:
    scale = scale_of([0.0, -1.0, 10.0, 1000.0], log=True)
    assert 5 < scale.low < 10
    assert 1000 < scale.high < 2000


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0005, "share", "0.05 %"),
        (0.31234, "share", "31.23 %"),
        (0.0123, "seconds", "12.3 ms"),
        (1.5, "seconds", "1.5 s"),
        (0.0, "seconds", "0 s"),
        (1234.5, "MB", "1.234 GB"),
        (2048.0, "MiB", "2 GiB"),
        (12_345.6, "count", "12.35k"),
        (2560, "count", "2,560"),
        (3e-5, "number", "3e-5"),
        (5.165e-4, "number", "5.165e-4"),
        (2.09731, "number", "2.097"),
        (65536.0, "number", "65,536"),
        (612.34, "W", "612.3 W"),
        (5.78, "TFLOP/s", "5.78 TFLOP/s"),
        (0.001292, "TFLOP/s", "1.292 GFLOP/s"),
        (-0.25, "number", "-0.25"),
    ],
)
def test_numbers_for_people(value: float, unit: Unit, text: str) -> None:
    assert text_of(value, unit) == text


def test_axes_have_little_room() -> None:
    assert [axis_text(v, "TFLOP/s") for v in (0.0, 0.0015, 2.0)] == ["0", "1.5 G", "2 T"]
    assert axis_text(0.0, "share") == "0"


def test_binary_units_have_round_axes() -> None:
    scale = scale_of([3000.0], from_zero=True)
    ticks = scale.ticks(unit=largest_unit(scale.high, "MiB"))
    assert [axis_text(tick, "MiB") for tick in ticks] == ["0", "1 GiB", "2 GiB", "3 GiB"]
