"""The workflow of GitHub Actions: what developers run, with no more rights than that needs."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    content = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    loaded: dict[Any, Any] = yaml.safe_load(content)
    return loaded


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_it_runs_what_developers_and_the_project_run(workflow: dict[Any, Any]) -> None:
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = [command.removeprefix("make ") for command in commands if command.startswith("make ")]
    assert set(made) <= targets
    assert {"lint", "test"} <= set(made)
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()
    others = [command for command in commands if not command.startswith("make ")]
    assert others == ["pip wheel . --no-deps -w dist/"]  # as in README, docs and test_release.py


def test_it_has_the_versions_of_python_that_the_package_names(workflow: dict[Any, Any]) -> None:
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.py").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == named


def test_it_may_read_only_and_ends(workflow: dict[Any, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] > 0 for job in workflow["jobs"].values())
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in used)
    assert not [step for step in steps(workflow) if ("uses" in step) == ("run" in step)]
