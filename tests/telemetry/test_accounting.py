"""The tables of what is sent and kept, and how one sees that a figure is not as expected."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megabit.telemetry import Accounting, MetricsLog
from megabit.telemetry.metrics import read_metrics
from tests.telemetry.rows import metrics

ACCOUNTING = Accounting(
    sent_by_purpose_mb={"tp activations": 1.5, "dp weight gradients": 1234.5678},
    expected_sent_by_purpose_mb={"tp activations": 1.5, "dp weight gradients": 1234.5678},
    megatron_sent_mb={"dp weight gradients": 2000.0},
    rank=3,
    memory_mib={"codes": 0.25, "masters": 4.0},
    expected_memory_mib={"codes": 0.25, "masters": 4.0},
    megatron_memory_mib={"codes": 2.0, "masters": 4.0},
    peak_memory_mib=612.3,
)


def rows(accounting: Accounting) -> list[list[str]]:
    """The cells of each printed line that has some."""
    console = Console(file=io.StringIO(), width=100)
    for table in accounting.tables():
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return [[c.strip() for c in x.strip("│").split("│")] for x in lines if x.startswith("│")]


def test_measured_and_expected_stand_side_by_side() -> None:
    assert ACCOUNTING.agrees
    assert rows(ACCOUNTING) == [
        ["tp", "activations", "1.500", "1.500", "=", ""],
        ["dp", "weight gradients", "1,234.568", "1,234.568", "=", "2,000.000"],
        ["codes", "0.250", "0.250", "=", "2.000"],
        ["masters", "4.000", "4.000", "=", "4.000"],
        ["peak of a process", "612.3", "", "", ""],
    ]


def test_a_difference_is_marked() -> None:
    """Of a millionth too, which rounds to the same digits; and what is not there on one side."""
    accounting = replace(
        ACCOUNTING,
        sent_by_purpose_mb={"tp activations": 1.5 * (1 + 1e-6), "pp activations": 2.0},
        memory_mib={"codes": 0.25, "masters": 4.5},
    )
    assert not accounting.agrees
    assert rows(accounting) == [
        ["tp", "activations", "1.500", "1.500", "DIFFERS", ""],
        ["pp", "activations", "2.000", "0.000000", "DIFFERS", ""],
        ["dp", "weight gradients", "0.000000", "1,234.568", "DIFFERS", "2,000.000"],
        ["codes", "0.250", "0.250", "=", "2.000"],
        ["masters", "4.500", "4.000", "DIFFERS", "4.000"],
        ["peak of a process", "612.3", "", "", ""],
    ]


def test_rounding_of_thirds_is_no_difference() -> None:
    third = replace(
        ACCOUNTING,
        sent_by_purpose_mb={"dp weights": 0.1 + 0.2},
        expected_sent_by_purpose_mb={"dp weights": 0.3},
    )
    assert third.sent_by_purpose_mb != third.expected_sent_by_purpose_mb
    assert third.agrees


def test_one_process_has_no_table_of_traffic() -> None:
    alone = replace(ACCOUNTING, sent_by_purpose_mb={}, expected_sent_by_purpose_mb={})
    assert [row[0] for row in rows(alone)] == ["codes", "masters", "peak of a process"]


def test_the_log_keeps_it_beside_the_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    console = Console(file=io.StringIO(), width=100)
    for step in (5, 10):  # a run, and that run resumed
        with MetricsLog(path, 0, 10, console, None, {}) as log:
            log.accounting(step, ACCOUNTING)
    assert json.loads((tmp_path / "accounting.json").read_text()) == {
        "step": 10,
        "sent_by_purpose_mb": {"tp activations": 1.5, "dp weight gradients": 1234.5678},
        "expected_sent_by_purpose_mb": {"tp activations": 1.5, "dp weight gradients": 1234.5678},
        "megatron_sent_mb": {"dp weight gradients": 2000.0},
        "rank": 3,
        "memory_mib": {"codes": 0.25, "masters": 4.0},
        "expected_memory_mib": {"codes": 0.25, "masters": 4.0},
        "megatron_memory_mib": {"codes": 2.0, "masters": 4.0},
        "peak_memory_mib": 612.3,
    }
    assert read_metrics(path) == []
    assert isinstance(console.file, io.StringIO)
    assert "What rank 3 keeps" in console.file.getvalue()


def test_each_line_has_what_was_expected_and_a_difference_shows_all_again(tmp_path: Path) -> None:
    sent = {"tp": 1.5, "pp": 0.0, "dp": 1234.5678}
    row = metrics(5, sent_mb=sent, sent_by_purpose_mb=ACCOUNTING.sent_by_purpose_mb)
    console = Console(file=io.StringIO(), width=200)
    assert isinstance(console.file, io.StringIO)
    differs = replace(ACCOUNTING, memory_mib={"codes": 0.5, "masters": 4.0})
    with MetricsLog(tmp_path / "metrics.jsonl", 0, 10, console, None, {}) as log:
        tables = []
        for account in (ACCOUNTING, ACCOUNTING, differs):
            log.interval(row, account)
            tables.append(console.file.getvalue().count("What rank 3 keeps"))
    assert "MB tp 1.5/1.5 dp 1234.6/1234.6  bubble" in console.file.getvalue()
    assert tables == [1, 1, 2]


def test_a_rank_that_is_not_the_main_one_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with MetricsLog(None, 0, 10, Console(quiet=True), None, {}) as log:
        log.accounting(5, ACCOUNTING)
    assert list(tmp_path.iterdir()) == []
