"""Sizes, rates, times and errors, as people read them."""

from megabit.errors import first_line, named_line
from megabit.units import (
    counted,
    file_size_text,
    flops_text,
    rate_text,
    size_text,
    speed_text,
    time_text,
)


def test_measurements_have_two_digits() -> None:
    assert rate_text(94e6 / 8) == "94 Mbit/s"
    assert rate_text(9.4e9 / 8) == "9.4 Gbit/s"
    assert [time_text(t) for t in (0, 12e-6, 1.5e-3, 20, 180, 9000)] == [
        "0 ns",
        "12 µs",
        "1.5 ms",
        "20 s",
        "3 min",
        "2.5 h",
    ]
    assert [size_text(n) for n in (8, 65536, 999_600)] == ["8 B", "66 kB", "1 MB"]
    assert speed_text(1.25e9) == "1.2 GB/s"
    assert flops_text(989e12) == "989 TFLOP/s"


def test_sizes_of_files() -> None:
    sizes = (0, 999, 1000, 999_949, 999_950, 12_345_678, 3 * 10**18)
    assert [file_size_text(size) for size in sizes] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "999.9 kB",
        "1.0 MB",
        "12.3 MB",
        "3000.0 PB",
    ]


def test_counts() -> None:
    assert [counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert counted(3, "microbatch", "es") == "3 microbatches"


def test_the_first_line_of_an_error() -> None:
    gloo = RuntimeError(
        "[/src/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:4\n…"
    )
    assert first_line(gloo) == "Connection closed by peer [::1]:4"
    assert first_line(ValueError("[1, 2] is too short\nas it is")) == "[1, 2] is too short"
    assert first_line(KeyError()) == "KeyError"
    assert named_line(ValueError("too short")) == "ValueError: too short"
    assert named_line(ValueError()) == "ValueError"
