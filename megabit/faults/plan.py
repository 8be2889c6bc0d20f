"""A list of drills by chance: faults come as in a cluster, on any rank, at no regular distance.

The same seed gives the same list on every machine and with every version of Python, of which only
``random()`` is promised to stay as it is.
"""

import math
import random
from collections.abc import Sequence
from typing import get_args, get_type_hints

from megabit.config import Drill
from megabit.errors import UserError

FAULTS: tuple[str, ...] = get_args(get_type_hints(Drill)["fault"])
"""All that there are."""
ENDING = ("kill", "term", "exit", "exception", "segfault", "abort")
"""Those that end a process at once: what is planned unless other ones are named."""


def plan_drills(
    seed: int, ranks: int, steps: int, mean_steps: float, faults: Sequence[str] = ENDING
) -> list[Drill]:
    """Drills for a run of ``steps`` steps on ``ranks`` ranks.

    Args:
        mean_steps: between two faults; the distances are exponentially distributed.
        faults: to choose from, all equally likely.

    Raises:
        UserError: one of ``faults`` is none.
    """
    for fault in faults:
        if fault not in FAULTS:
            raise UserError(f"--faults: {fault!r} is no fault; there are {', '.join(FAULTS)}")
    chance = random.Random(seed)
    drills: list[Drill] = []
    time = 0.0
    while True:
        time -= mean_steps * math.log(1 - chance.random())
        fault = faults[int(chance.random() * len(faults))]
        rank = int(chance.random() * ranks)
        if time >= steps:
            return drills
        drills.append(Drill(fault, rank=rank, step=int(time)))  # type: ignore[arg-type]
