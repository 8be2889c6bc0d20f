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
    assert len(document["validated"]) >= 10
    assert script.with_tables(text, document) == text


def test_the_constants_can_be_read() -> None:
    """Those that the predictions were made with."""
    assert Machine.read(RESULTS / "machine.json").is_measured
