"""JSON files from outside, each value of which is looked at before it is used."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megabit.errors import UserError, first_line

MAX_SIZE = 2**31 - 1

_Choice = TypeVar("_Choice", bound=str)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        UserError: it cannot be read or holds something else.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON ({first_line(error)}); get the file again") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must hold a JSON object, not {shown(tree)}")
    return tree


class Fields:
    """The keys of a JSON object.

    Every method raises UserError, naming file and key, where the value is not what it must be.

    Args:
        defaults: what absent keys stand for; a key that is in neither is refused.
    """

    def __init__(
        self,
        path: Path,
        tree: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        prefix: str = "",
    ) -> None:
        self.path = path
        self.tree = tree
        self.defaults = defaults or {}
        self.prefix = prefix

    def refuse(self, key: str, wanted: str) -> NoReturn:
        """Raise for what ``key`` holds."""
        is_there = key in self.tree or key in self.defaults
        found = f"not {shown(self.get(key))}" if is_there else "and is missing"
        name = shown_name(f"{self.prefix}{key}")
        raise UserError(f"{self.path}: {name}: must be {wanted}, {found}")

    def get(self, key: str) -> Any:
        """The value, whatever it is."""
        return self.tree.get(key, self.defaults.get(key))

    def integer(self, key: str, most: int = MAX_SIZE) -> int:
        """A whole number from 1."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            self.refuse(key, f"a whole number from 1 to {most}")
        return value

    def number(self, key: str) -> float:
        """A finite number above 0."""
        value = self.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            self.refuse(key, "a finite number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; absent means false."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "true or false")
        return bool(value)

    def choice(self, key: str, choices: tuple[_Choice, ...]) -> _Choice:
        """One of some texts."""
        value = self.get(key)
        for choice in choices:
            if value == choice:
                return choice
        self.refuse(key, f"one of {', '.join(choices)}")

    def section(self, key: str, defaults: Mapping[str, Any] | None = None) -> "Fields | None":
        """An object; None where there is none."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(key, "an object")
        return Fields(self.path, value, defaults, f"{self.prefix}{key}.")


def shown(value: object) -> str:
    """A value for a message, on one line and not too long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def shown_name(name: str) -> str:
    """A name from outside for a message: as it is, unless it would spoil the line."""
    return name if name.isprintable() and 0 < len(name) <= 120 else shown(name)
