"""Which tiles a product runs with: measured once on a card, and looked up from then on.

Tables come from two places: ``tuned/`` beside this file, for cards that somebody measured and
shipped, and ``~/.cache/megabit/tuned/``, for what was measured here, which goes first. A shape in
neither runs with a default; nothing is measured unless ``tune`` is called.

Every choice gives the same integers. Gradients are floating-point sums, whose last bits depend on
the tiles; processes that read the same tables agree.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from megabit_kernels.triton.candidates import Card, default
from megabit_kernels.triton.config import Choice, Kernel
from megabit_kernels.triton.table import Key, Table, file_name, merge, read

Timer = Callable[[Callable[[], object]], float]
"""Seconds that a call takes; it may make the call many times."""

SHIPPED = Path(__file__).parent / "tuned"


def choose(kernel: Kernel, m: int, n: int, k: int, device: torch.device) -> Choice:
    """What to run a product of these sizes with: as measured, or a default."""
    card = card_of(device)
    measured = table_of(card.name).get(Key.of(kernel, m, n, k))
    return default(kernel, m, n, k, card) if measured is None else measured


def tune(candidates: Sequence[Choice], run: Callable[[Choice], object], timer: Timer) -> Choice:
    """The fastest of ``candidates``; of equals the first.

    Args:
        run: runs the product with a candidate. Those that the card has no room for are left out.
    """
    seconds: dict[Choice, float] = {}
    for candidate in candidates:
        try:
            run(candidate)  # compiled before it is timed
        except (OutOfResources, PTXASError):
            continue
        seconds[candidate] = timer(partial(run, candidate))
    if not seconds:
        raise RuntimeError(f"the card has room for none of {len(candidates)} candidates")
    return min(seconds, key=seconds.__getitem__)


def record(card: str, choices: Table, folder: Path | None = None) -> Path:
    """Keeps measured choices for later runs, and for this one.

    Args:
        folder: where the card's file is; None is the user's cache.

    Returns:
        The file.
    """
    path = (folder or own_folder()) / file_name(card)
    merge(path, card, choices)
    table_of.cache_clear()
    return path


@cache
def table_of(card: str) -> Table:
    """All that is known of a card. A file of the user's that cannot be read is not used."""
    try:
        own = read(own_folder() / file_name(card))
    except (OSError, ValueError) as error:
        warnings.warn(f"tuned tiles are not used: {error}", stacklevel=2)
        own = {}
    return {**read(SHIPPED / file_name(card)), **own}


def own_folder() -> Path:
    """Where this user's measurements are kept."""
    return Path.home() / ".cache" / "megabit" / "tuned"


@cache
def card_of(device: torch.device) -> Card:
    """The GPU of a tensor on ``device``; for the interpreter, a small Ampere."""
    if device.type != "cuda":
        return Card("interpreter", 1, 80)
    properties = torch.cuda.get_device_properties(device)
    capability = 10 * properties.major + properties.minor
    return Card(properties.name, properties.multi_processor_count, capability)


def gpu_seconds(run: Callable[[], object]) -> float:
    """Median time of ``run`` on the current GPU, its L2 cache flushed before every call."""
    return triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median") / 1000
