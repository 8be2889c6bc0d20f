"""What is said of an engine that has failed."""

import re
from collections.abc import Sequence
from signal import Signals

_LONGEST = 200


def killed(codes: Sequence[int | None]) -> str | None:
    """The first rank that a signal has ended; others may have ended because of it."""
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            return f"rank {rank} was ended by {Signals(-code).name}"
    return None


def short(reason: str) -> str:
    """For clients: one line, without places in source files and addresses; the log has it all."""
    line = (reason.splitlines() or [""])[0]
    text = " ".join(re.sub(r"\[[^\]]*[/.:][^\]]*\](:\d+)?", "", line).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
