"""What a check has found, in words."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Severity = Literal["wrong", "warning", "note"]
"""``wrong``: a job would fail, be wrong, or be much too slow. ``warning``: look at it. ``note``:
what was not checked, and why."""


@dataclass(frozen=True)
class Finding:
    """One line, and what to do about it."""

    severity: Severity
    check: str
    """Which one, in a word."""
    what: str
    advice: str = ""


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sorted by severity; of the same, in the order in which they were found."""
    return sorted(findings, key=lambda finding: get_args(Severity).index(finding.severity))
