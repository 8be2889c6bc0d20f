"""What others may build on: every public name exists, is documented, and works as it says; the
version is said once, and the list of changes begins with it."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import megabit
import megabit_kernels
from tests import consumer
from tests.public_api import PACKAGES, PUBLIC, ROOT, public_names, source_of

Documented = ast.ClassDef | ast.FunctionDef


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_there(package: str) -> None:
    module = importlib.import_module(package)
    names = public_names(package)
    assert names
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_exports_is_in_the_document(package: str) -> None:
    exported = {f"{package}.{name}" for name in public_names(package)}
    assert exported - {f"{package}.__version__"} <= set(PUBLIC)


def test_the_document_has_each_name_once() -> None:
    assert len(set(PUBLIC)) == len(PUBLIC) > 100


def test_a_name_that_is_not_there_is_not_promised() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        importlib.import_module("megabit.checkpoint").Nothing  # noqa: B018


def home_of(name: str, package: str) -> Path:
    """The file that defines a public name: that of the package, or the one it is imported from."""
    tree = ast.parse(source_of(package).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            assert node.module is not None
            return home_of(name, node.module)
    return source_of(package)


def undocumented(path: Path, name: str) -> Iterator[str]:
    """``name``, and the public methods of a class, where nothing says what they are."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for place, node in enumerate(tree.body):
        match node:
            case ast.ClassDef() | ast.FunctionDef() if node.name == name:
                yield from without_docstring(node)
                return
            case (
                ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found))
            ) if found == name:
                match tree.body[place + 1 : place + 2]:
                    case [ast.Expr(value=ast.Constant(value=str()))]:
                        return
                yield name
                return
    raise AssertionError(f"{name} is not defined in {path}")


def without_docstring(node: Documented) -> Iterator[str]:
    if not ast.get_docstring(node):
        yield node.name
    if isinstance(node, ast.ClassDef):
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                yield from (f"{node.name}.{found}" for found in without_docstring(method))


def test_public_names_are_documented() -> None:
    missing = []
    for whole in PUBLIC:
        package, _, name = whole.rpartition(".")
        missing += [f"{package}: {found}" for found in undocumented(home_of(name, package), name)]
    assert [name for name in missing if not name.endswith(".extra_repr")] == []  # torch's own


def test_the_consumer_of_the_type_check_runs() -> None:
    losses = consumer.train(3)
    assert losses[-1] < losses[0]
    codes = (torch.arange(200) % 3 - 1).to(torch.int8).view(5, 40)
    exact, scaled = consumer.product(torch.ones(3, 40), codes)
    assert torch.equal(exact, 127 * codes.int().sum(1).expand(3, 5))
    torch.testing.assert_close(scaled, 0.5 * codes.float().sum(1).expand(3, 5))
    bubble, peaks = consumer.idle("1f1b", 2, 4)
    assert 0 < bubble < 1
    assert peaks == [2, 1]
    config, text = consumer.settings(["parallel.tp=2", "parallel.pp=2"])
    assert (config.parallel.tp, text.splitlines()[-1].endswith("0 problems")) == (2, True)


def test_every_folder_of_sources_is_a_package() -> None:
    """What has no ``__init__.py`` is not in the wheel."""
    folders = {
        path.parent
        for home in (ROOT / "megabit", ROOT / "kernels" / "megabit_kernels")
        for path in home.rglob("*.py")
    }
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


# Versions.


def test_the_changes_begin_with_the_version() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[?(\d+\.\d+\.\d+)\]?", changes, re.MULTILINE)
    assert versions[0] == megabit.__version__
    numbers = [tuple(map(int, version.split("."))) for version in versions]
    assert numbers == sorted(set(numbers), reverse=True)


def test_the_kernels_have_the_same_version() -> None:
    """One repository, one list of changes, though they install alone."""
    assert megabit_kernels.__version__ == megabit.__version__
