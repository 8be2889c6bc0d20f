"""``docs/api.md`` names what is public: each name is there and says what it is, and nothing that a
public package exports is left out."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from tests.public_api import PACKAGES, public_names

DOCUMENT = Path(__file__).parents[1] / "docs" / "api.md"
NAMES = re.findall(r"^::: ([\w.]+)$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
EXPLAINED_BY_TORCH = ("forward", "extra_repr")


def named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_says_what_it_is(name: str) -> None:
    thing = named(name)
    if not inspect.isclass(thing) and not inspect.isfunction(thing):
        return  # a constant
    assert thing.__doc__
    # What a dataclass without a docstring would have.
    assert not thing.__doc__.startswith(f"{thing.__name__}(")
    for key, member in vars(thing).items() if inspect.isclass(thing) else ():
        if not key.startswith("_") and inspect.isfunction(member):
            assert member.__doc__ or key in EXPLAINED_BY_TORCH, f"{name}.{key}"


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_exports_is_documented(package: str) -> None:
    exported = {f"{package}.{name}" for name in public_names(package)}
    assert exported - {f"{package}.__version__"} <= set(NAMES)


def test_no_name_is_there_twice() -> None:
    assert len(set(NAMES)) == len(NAMES) > 100
