"""The benchmark measures what it says: real contestants, tiny layers, the files that it leaves."""

import csv
import io
import json
import math
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from megabit_kernels.benchmark import Benchmark, Result, Settings
from megabit_kernels.benchmark.clock import HostStopwatch
from megabit_kernels.benchmark.command import main, settings_from
from megabit_kernels.benchmark.console import WIDTH
from megabit_kernels.benchmark.contestants import (
    BASELINES,
    contestant,
    fake_quantized_linear,
    other_names,
    our_names,
)
from megabit_kernels.benchmark.machine import last_level_cache_bytes
from megabit_kernels.benchmark.measure import TURNS, Timing, runs_of, time_in_turns, turns_of
from megabit_kernels.benchmark.roofline import Roofline, buffer_sizes
from megabit_kernels.benchmark.shapes import MODELS, TOKENS, Layer, layers_of
from megabit_kernels.benchmark.tables import describe_seconds, tables
from megabit_kernels.benchmark.weights import LayerWeights, NoRoom, bytes_per_value
from megabit_kernels.numerics import fake_quantized_linear as fake_quantized_definition

CPU = torch.device("cpu")
ODD = Layer("tiny", "odd", 70, 130)
SQUARE = Layer("tiny", "square", 128, 64)
SETTINGS = Settings(layers=(ODD, SQUARE), tokens=(1, 5), threads=(1,), budget_s=0.002)
ROOFLINE = Roofline(
    peaks={"int8": 1e12, "bfloat16": 5e11, "float32": 1e11},
    bandwidths={1 << 16: 8e10, 1 << 20: 9e10, 1 << 24: 6e10, 1 << 28: 3e10},
    cache_bytes=1 << 24,
    source="native",
)


@pytest.fixture(scope="module")
def result() -> Result:
    """Of a whole run; tests may not change it."""
    benchmark = Benchmark(SETTINGS)
    raced = list(benchmark.run())
    assert raced == benchmark.races
    return benchmark.result


# What comes out.


def test_every_contestant_runs_in_every_race(result: Result) -> None:
    assert (result.is_complete, result.left_out) == (True, [])
    chosen = next(row.implementation for row in result.rows() if row.contestant == "default")
    names = [name for name in (*our_names(CPU), *BASELINES) if name != chosen]
    races = [
        (layer.name, m, caches)
        for layer in SETTINGS.layers
        for caches in ("cold", "hot")
        for m in SETTINGS.tokens
    ]
    rows = [(row.layer, row.m, row.caches, row.contestant) for row in result.rows()]
    assert rows == [(*race, name) for race in races for name in names]


def test_what_default_chose_runs_by_its_name_if_asked() -> None:
    chosen = contestant("default", ODD, 1, CPU).implementation
    benchmark = Benchmark(replace(SETTINGS, implementations=(chosen, "default")))
    assert {benchmark.names_of(race) for race in benchmark.races} == {
        (chosen, "default", *BASELINES)
    }


def test_figures_follow_from_the_times(result: Result) -> None:
    rows = result.rows()
    medians = {(row.layer, row.m, row.caches, row.contestant): row.median_us for row in rows}
    for row in rows:
        assert 0 < row.min_us <= row.median_us <= row.p90_us
        assert row.runs >= TURNS
        assert row.gops == pytest.approx(2 * row.m * row.n * row.k / (row.median_us * 1e3))
        assert row.gb_per_s == pytest.approx(row.weight_bytes / (row.median_us * 1e3))
        assert row.exceeds_roof == (row.roof_percent > 100)
        assert (row.threads, row.scaling) == (1, 1)
        for name in BASELINES:
            baseline = medians[row.layer, row.m, row.caches, name]
            assert row.times[name] == pytest.approx(baseline / row.median_us)
        if row.contestant in BASELINES:
            assert row.times[row.contestant] == 1


def test_files_hold_the_same_rows(result: Result, tmp_path: Path) -> None:
    written = result.write(tmp_path / "new" / "folder")
    assert [path.name for path in written] == ["kernels.json", "kernels.csv", "roofline.png"]
    assert sorted(written) == sorted((tmp_path / "new" / "folder").iterdir())

    whole = json.loads(written[0].read_text())
    assert whole["is_complete"]
    assert whole["settings"]["threads"] == [1]
    assert whole["rooflines"].keys() == {"1"}
    assert whole["rooflines"]["1"]["peaks"].keys() == {"int8", "bfloat16", "float32"}
    with written[1].open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(whole["rows"]) == len(result.rows())
    for line, row in zip(lines, whole["rows"], strict=True):
        for name in BASELINES:
            assert float(line.pop(f"times_{name}")) == row["times"][name]
        assert line == {key: str(value) for key, value in row.items() if key != "times"}

    assert written[2].read_bytes().startswith(b"\x89PNG\r\n")


def test_a_second_result_takes_the_place_of_the_first(result: Result, tmp_path: Path) -> None:
    result.write(tmp_path)
    replace(result, finishes=result.finishes[:1], is_complete=False).write(tmp_path)
    assert len(json.loads((tmp_path / "kernels.json").read_text())["rows"]) == 1
    assert len(list(tmp_path.iterdir())) == 3


def text_of(result: Result) -> str:
    text = io.StringIO()
    console = Console(file=text, width=WIDTH)
    for table in tables(result):
        console.print(table)
    return text.getvalue()


def test_tables_show_ours_beside_the_baselines(result: Result) -> None:
    text = text_of(result)
    for layer in ("tiny odd: 70 × 130", "tiny square: 128 × 64"):
        assert f"{layer}, cold caches, 1 thread" in text
        assert f"{layer}, hot caches, 1 thread" in text
    chosen = next(row.implementation for row in result.rows() if row.contestant == "default")
    assert text.count(f"default ({chosen})") == 8
    for name in BASELINES:
        assert text.count(f"{name} (torch)") == 8
    assert "×1 thread" not in text
    assert "…" not in text  # everything fits


def test_what_exceeds_its_roof_says_so(result: Result) -> None:
    low = replace(ROOFLINE, peaks=dict.fromkeys(ROOFLINE.peaks, 1e3))
    rows = replace(result, rooflines={1: low}).rows()
    assert all(row.exceeds_roof and row.roof_percent > 100 for row in rows)
    shown = [
        line for line in text_of(replace(result, rooflines={1: low})).splitlines() if "%" in line
    ]
    assert shown
    assert all("!" in line for line in shown)
    high = replace(ROOFLINE, peaks=dict.fromkeys(ROOFLINE.peaks, 1e18))
    assert "!" not in text_of(replace(result, rooflines={1: high}))


# Several numbers of threads.


def test_threads_are_compared_with_the_fewest(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    asked = replace(SETTINGS, layers=(ODD,), tokens=(3,), implementations=("default",))
    benchmark = Benchmark(asked)
    list(benchmark.run())
    assert torch.get_num_threads() == before
    # A machine may have one core only, so the second number of threads repeats the first's times.
    result = benchmark.result
    slower = [
        replace(one, timing=replace(one.timing, median_s=4 * one.timing.median_s))
        for one in result.finishes
    ]
    twice = [
        replace(one, race=replace(one.race, threads=threads))
        for threads, finishes in ((1, slower), (2, result.finishes))
        for one in finishes
    ]
    both = replace(result, finishes=twice, rooflines=dict.fromkeys((1, 2), result.rooflines[1]))
    assert {row.scaling for row in both.rows() if row.threads == 1} == {1}
    assert {row.scaling for row in both.rows() if row.threads == 2} == {4}
    of_one, of_two, *_ = (
        table_text for table_text in text_of(both).split("tiny odd: ") if "cold" in table_text
    )
    assert "cold caches, 1 thread" in of_one
    assert "×1 thread" not in of_one
    assert "cold caches, 2 threads" in of_two
    assert "×1 thread" in of_two
    assert of_two.count(" 4.00") == 1 + len(BASELINES)
    with both.write(tmp_path)[1].open() as file:
        assert {(line["threads"], line["scaling"]) for line in csv.DictReader(file)} == {
            ("1", "1.0"),
            ("2", "4.0"),
        }


def test_threads_are_set_for_roofs_and_races_alone() -> None:
    cores = os.cpu_count() or 1
    before = torch.get_num_threads()
    counts = tuple(sorted({1, cores}))
    benchmark = Benchmark(replace(SETTINGS, layers=(ODD,), tokens=(1,), threads=(cores, 1, 1)))
    assert tuple(benchmark.result.rooflines) == counts
    assert [race.threads for race in benchmark.races] == [*counts, *counts]
    assert torch.get_num_threads() == before


# Options.


def test_options_are_read_as_they_are_written() -> None:
    settings = settings_from("3b", "16, 1,16", "cpu", "2,1", "native,default", 1.5, quick=True)
    assert settings == Settings(
        layers=MODELS["3b"],
        tokens=(1, 16),
        threads=(1, 2),
        implementations=("native", "default"),
        budget_s=0.06,
        limit_s=90,
    )
    assert settings_from() == Settings(
        layers=layers_of(["2b4t", "3b", "70b"]), tokens=TOKENS, limit_s=5400
    )
    assert settings_from(device="cuda").limit_s == 7 * 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "7b"], "--shapes: '7b' is not one; choose from 2b4t, 3b, 70b, trainer"),
        (["--m", "1,two"], "--m: 'two' is not a number; write it like --m 1,2"),
        (["--device", "tpu"], "--device: 'tpu' is not cpu or cuda"),
        (["--implementations", "nativ"], "--implementations: 'nativ' is not one of default, "),
        (["--threads", "1,x"], "--threads: 'x' is not a number; write it like --threads 1,2"),
        (["--threads", "1,99999"], "--threads: 99999 is not from 1 to "),
        (["--minutes", "0"], "--minutes: 0 is not a positive number"),
        (["--minutes", "ten"], "argument --minutes: invalid float value: 'ten'"),
        (["--thread", "1"], "unrecognized arguments: --thread 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_cannot_be(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments, "bench")
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


@pytest.mark.parametrize("minutes", [0.0, -1.0, math.inf, math.nan])
def test_there_must_be_time(minutes: float) -> None:
    with pytest.raises(ValueError, match=rf"^minutes: {minutes:g} is not a positive number"):
        settings_from(minutes=minutes)


def test_nothing_measured_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shapes", "trainer", "--m", "1", "--minutes", "1e-9", "--out", str(tmp_path)]
    assert main(options, "bench") == 1
    assert "nothing was measured, nothing is written" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


# Stopping early.


def test_a_run_that_is_left_keeps_its_races(tmp_path: Path) -> None:
    benchmark = Benchmark(replace(SETTINGS, layers=(ODD,), implementations=("default",)))
    races = benchmark.run()
    assert [next(races), next(races)] == benchmark.races[:2]
    races.close()
    assert {finish.race for finish in benchmark.result.finishes} == set(benchmark.races[:2])
    whole = json.loads(benchmark.result.write(tmp_path)[0].read_text())
    assert (whole["is_complete"], len(whole["rows"])) == (False, 2 * (1 + len(BASELINES)))


def test_what_does_not_fit_the_time_is_left_out() -> None:
    benchmark = Benchmark(replace(SETTINGS, limit_s=0))
    assert list(benchmark.run()) == []
    assert not benchmark.result.is_complete
    assert [one.race for one in benchmark.result.left_out] == benchmark.races
    assert {str(one) for one in benchmark.result.left_out} == {"all contestants: no time left"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "tpu"}, "device: 'tpu' is not cpu or cuda"),
        ({"tokens": (1, 0)}, "m: 0 is not from 1 to 65536"),
        ({"threads": (1, 0)}, "threads: 0 is not from 1 to "),
        ({"threads": (99999,)}, "threads: 99999 is not from 1 to "),
        ({"implementations": ("nativ",)}, "implementations: 'nativ' is not one of default, "),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Benchmark(replace(SETTINGS, **changes))


def test_unknown_models() -> None:
    with pytest.raises(ValueError, match=r"^shapes: '7b' is not one; choose from 2b4t, 3b, 70b"):
        layers_of(["2b4t", "7b"])
    assert layers_of(["3b", "3b"]) == MODELS["3b"]


# The contestants.


@pytest.mark.parametrize("layer", [ODD, SQUARE], ids=lambda layer: layer.name)
@pytest.mark.parametrize("m", [1, 5])
def test_all_integer_contestants_compute_the_same(layer: Layer, m: int) -> None:
    weights = LayerWeights(layer, CPU, cache_bytes=1 << 16, memory_bytes=1 << 24)
    x = torch.randn(m, layer.k, generator=torch.Generator().manual_seed(m))
    expected = contestant("int_mm", layer, m, CPU).calls(x, weights, cold=False)[0]()
    names = {*our_names(CPU), *other_names(CPU)} - {"bitlinear"}
    for name in names:
        calls = contestant(name, layer, m, CPU).calls(x, weights, cold=True)
        assert len(calls) > 1
        for call in (calls[0], calls[-1]):
            assert torch.equal(call(), expected), name


def test_the_fake_quantized_layer_is_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 64, generator=generator), torch.randn(32, 64, generator=generator)
    # It sums γ in fp32, the definition in fp64.
    torch.testing.assert_close(
        fake_quantized_linear(x, weight), fake_quantized_definition(x, weight)
    )


def test_cold_weights_are_distinct_and_exceed_the_cache() -> None:
    weights = LayerWeights(SQUARE, CPU, cache_bytes=1 << 16, memory_bytes=1 << 24)
    for form in (torch.float32, torch.bfloat16, torch.int8, "int8", "panels", "planes"):
        forms = weights.of(form)
        tensors = [getattr(one, "data", one) for one in forms]
        size = weights.bytes_of(form)
        assert size >= 128 * 64 * bytes_per_value(form)
        addresses = sorted(tensor.data_ptr() for tensor in tensors)
        assert all(b - a >= size for a, b in pairwise(addresses))
        assert 4 << 16 <= len(forms) * size < (4 << 16) + size
        assert weights.of(form) is forms


def test_weights_keep_to_their_memory() -> None:
    one = 4 * 128 * 64
    few = LayerWeights(SQUARE, CPU, cache_bytes=1 << 24, memory_bytes=3 * one)
    assert len(few.of(torch.float32)) == 3
    none = LayerWeights(SQUARE, CPU, cache_bytes=1 << 24, memory_bytes=2 * one - 1)
    with pytest.raises(NoRoom, match="two weights take"):
        none.of(torch.float32)
    assert len(none.of(torch.bfloat16)) == 3


# The roofline.


@pytest.mark.parametrize(
    ("operands", "m", "rotated_bytes", "roof", "seconds"),
    [
        ("int8", 1000, 1 << 28, "int8", 2000 * 1e6 / 1e12),
        ("float32", 1000, 1 << 28, "float32", 2000 * 1e6 / 1e11),
        ("int8", 1, 1 << 28, "memory", 1e6 / 3e10),
        ("int8", 1, 1 << 26, "memory", 1e6 / 3e10),  # four times the cache
        ("int8", 1, (1 << 26) - 1, "cache", 1e6 / 6e10),
        ("int8", 1, (1 << 24) - 1, "cache", 1e6 / 9e10),
        # Measured as 80 GB/s, but a larger buffer could be read faster.
        ("int8", 1, 1 << 16, "cache", 1e6 / 9e10),
        ("int8", 1, 1, "cache", 1e6 / 9e10),
    ],
)
def test_the_bound_is_the_longer_time(
    operands: Any, m: int, rotated_bytes: int, roof: str, seconds: float
) -> None:
    bound = ROOFLINE.bound(operands, 2 * m * 10**6, 10**6, rotated_bytes)
    assert (bound.roof, bound.seconds) == (roof, pytest.approx(seconds))
    assert bound.percent(4 * seconds) == pytest.approx(25)


def test_the_higher_roof_of_two_measurements_counts() -> None:
    other = replace(ROOFLINE, peaks={"int8": 2e12, "bfloat16": 1e11, "float32": 2e11})
    both = ROOFLINE.at_best(other)
    assert both == other.at_best(ROOFLINE)
    assert both.peaks == {"int8": 2e12, "bfloat16": 5e11, "float32": 2e11}


def test_measured_buffers_go_from_the_cache_to_memory(result: Result) -> None:
    sizes = buffer_sizes(32 << 20, CPU)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (64 << 10, 256 << 20)
    roofline = result.rooflines[1]
    assert list(roofline.bandwidths) == buffer_sizes(roofline.cache_bytes, CPU)
    assert roofline.cache_bandwidth >= roofline.memory_bandwidth > 0
    assert min(roofline.peaks.values()) > 0


def test_all_caches_of_the_last_level_count(tmp_path: Path) -> None:
    """Two groups of two cores, each with an L3 of its own."""
    for cpu in range(4):
        for index, (level, cores, size) in enumerate(
            [(1, f"{cpu}", "48K"), (3, "0-1" if cpu < 2 else "2-3", "32768K")]
        ):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, value in (("level", level), ("shared_cpu_list", cores), ("size", size)):
                (folder / name).write_text(f"{value}\n")
    assert last_level_cache_bytes(tmp_path) == 64 << 20
    assert last_level_cache_bytes(tmp_path / "none") == 32 << 20


# Times.


def test_calls_go_through_the_weights_in_turn() -> None:
    seen: list[int] = []
    watch = HostStopwatch([lambda i=i: seen.append(i) for i in range(3)])
    assert len(watch.seconds(4)) == 4
    watch.seconds(1)
    assert seen == [0, 1, 2, 0, 1]


def test_contestants_take_turns_and_the_first_run_of_a_turn_does_not_count() -> None:
    order: list[str] = []

    def refuses() -> None:
        raise RuntimeError("K must be even\nand more")

    timings, failures = time_in_turns(
        {
            "a": [lambda: order.append("a")],
            "refuses": [refuses],
            "b": [lambda: order.append("b")],
        },
        CPU,
        cache_bytes=1,
        budget_s=1e-9,
    )
    assert failures == {"refuses": "K must be even"}
    assert order[-2 * TURNS :] == ["a", "b"] * TURNS
    assert timings.keys() == {"a", "b"}
    assert timings["a"].runs == TURNS  # one run a turn, which then has to count
    timings, _ = time_in_turns({"a": [lambda: None]}, CPU, cache_bytes=1, budget_s=1e-3)
    assert timings["a"].runs > TURNS


def test_long_calls_run_a_few_times_only() -> None:
    assert runs_of(1e-3, 0.3) == 60
    assert runs_of(10, 0.3) == 1
    assert turns_of(10) < turns_of(1e-3)


def test_timing() -> None:
    assert Timing.of([3.0, 1.0, 2.0]) == Timing(2.0, 1.0, pytest.approx(2.8), 3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.234e-6, "1.23 µs"), (57.14e-6, "57.1 µs"), (0.00999, "9.99 ms"), (12.5, "12.5 s")],
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert describe_seconds(seconds) == text
