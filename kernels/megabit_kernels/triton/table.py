"""Measured choices of tiles on disk: one JSON file for each card.

A file is only ever replaced whole, so a reader sees all of an old one or all of a new one, and of
several writers at once the last one's choices stay.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, get_args

from megabit_kernels.triton.config import Choice, Kernel, TileConfig

VERSION = 1
"""Of the format, and of what a choice means to the kernels; files of another one are not read."""


class Key(NamedTuple):
    """What a measurement holds for."""

    kernel: Kernel
    n: int
    k: int
    m: int
    """The power of two at or above the number of rows."""

    @staticmethod
    def of(kernel: Kernel, m: int, n: int, k: int) -> "Key":
        """The key of a product with M rows."""
        return Key(kernel, n, k, 1 << max(m - 1, 0).bit_length())


Table = Mapping[Key, Choice]


def file_name(card: str) -> str:
    """``NVIDIA H100 80GB HBM3`` → ``nvidia-h100-80gb-hbm3.json``."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-") + ".json"


def read(path: Path) -> dict[Key, Choice]:
    """The table in a file; an empty one if there is no file, or it has another version.

    Raises:
        ValueError: if the file is not such a table.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        content = json.loads(text)
        if content["version"] != VERSION:
            return {}
        return dict(_parse(row) for row in content["choices"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of tiles: {error!r}") from error


def merge(path: Path, card: str, choices: Table) -> None:
    """Adds ``choices`` to those in a file, which is made if need be."""
    merged = {**read(path), **choices}
    rows = ",\n".join(json.dumps(_row(key, merged[key])) for key in sorted(merged))
    text = f'{{"version": {VERSION}, "card": {json.dumps(card)}, "choices": [\n{rows}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)


def _row(key: Key, choice: Choice) -> dict[str, Any]:
    tiles = choice if choice == "cublas" else asdict(choice)
    return {**key._asdict(), "choice": tiles}


def _parse(row: dict[str, Any]) -> tuple[Key, Choice]:
    tiles = row.pop("choice")
    key = Key(**row)
    if key.kernel not in get_args(Kernel):
        raise ValueError(f"there is no kernel {key.kernel!r}")
    return key, tiles if tiles == "cublas" else TileConfig(**tiles)
