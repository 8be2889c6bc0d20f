"""Damage to a checkpoint on disk, as storage that fails does it, for drills."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megabit.errors import UserError

Damage = Literal["bit_flip", "truncate", "delete_shard"]


def choose(files: Sequence[Path], seed: int) -> Path:
    """One of ``files``; the same for the same seed."""
    return files[int(random.Random(seed).random() * len(files))]


def damage_file(path: Path, damage: Damage, seed: int) -> str:
    """Harm ``path``, at a place that ``seed`` decides; says what was done.

    Raises:
        UserError: it cannot be written, or has nothing to harm.
    """
    place = random.Random(seed + 1).random()
    try:
        size = path.stat().st_size
        if damage == "delete_shard":
            path.unlink()
            return f"deleted {path}"
        if not size:
            raise UserError(f"{path}: is empty, so there is nothing to harm")
        at = int(place * size)
        with path.open("r+b") as file:
            if damage == "truncate":
                file.truncate(at)
                return f"cut {path} from {size} to {at} bytes"
            file.seek(at)
            (byte,) = file.read(1)
            bit = int(place * size * 8) % 8
            file.seek(at)
            file.write(bytes([byte ^ 1 << bit]))
            return f"flipped bit {bit} of byte {at} of {path}"
    except OSError as error:
        raise UserError(f"{path}: cannot harm it ({error.strerror})") from error
