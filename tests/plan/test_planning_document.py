"""docs/planning.md says what was measured, and what it says lies within the limits it names."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from megabit.plan.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "plan"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_plan", ROOT / "docs/measure_plan.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_results(script: ModuleType) -> None:
    text = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    document = json.loads((RESULTS / "compared.json").read_text(encoding="utf-8"))
    assert script.with_tables(text, document) == text


def test_what_was_predicted_lies_within_the_limits() -> None:
    """The step time of each layout within 15 %, the peak memory of ten within 5 %, and the layout
    that is chosen no more than 5 % slower than the fastest."""
    document = json.loads((RESULTS / "compared.json").read_text(encoding="utf-8"))
    cases = document["validated"]
    assert all(abs(case["predicted_s"] / case["measured_s"] - 1) <= 0.15 for case in cases)
    peaks = [max(case["predicted_bytes"]) / max(case["bytes"]) - 1 for case in cases]
    assert sum(abs(error) <= 0.05 for error in peaks) >= 10
    ranked = document["ranked"]
    chosen = min(ranked, key=lambda case: case["predicted_s"])
    assert chosen["measured_s"] <= 1.05 * min(case["measured_s"] for case in ranked)


def test_the_constants_can_be_read() -> None:
    """Those that the predictions were made with."""
    assert Machine.read(RESULTS / "machine.json").is_measured
