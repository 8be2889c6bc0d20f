"""Documents name tests as their proof: each of them exists, so that a renamed one is noticed; and
the order of imports is told as it is held."""

import ast
import re
from pathlib import Path

import pytest

from tests.test_repository import ORDER

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "kernels/README.md"])
NAMED = re.compile(r"\b(tests/[\w/]+\.py)(?:::(\w+))?")


def proofs(document: Path) -> set[tuple[str, str]]:
    """Files of tests, and a test in each or nothing."""
    return set(NAMED.findall(document.read_text(encoding="utf-8")))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_test_that_a_document_names_exists(document: Path) -> None:
    for file, name in sorted(proofs(document)):
        path = ROOT / file
        assert path.is_file(), f"{file} is gone"
        functions = {
            node.name
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef)
        }
        assert not name or name in functions, f"{file} has no {name}"


def test_every_promise_of_exactness_has_one() -> None:
    """The document of proofs names a test in each of its parts; what is not exact is a table."""
    text = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert len(parts) > 5
    assert all("::test_" in part for part in parts)


def test_the_order_of_imports_is_the_one_that_is_held() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    told = re.search(r"Imports point one way\*\*: ([^.]+)\.", text)
    assert told is not None
    levels = [{part.strip() for part in level.split(",")} for level in told[1].split("→")]
    small = {"__main__", "apex", "files", "retry", "units", "errors"}
    assert levels == [level - small for level in ORDER if level - small]
