"""What breaks in a cluster, and how a run notices: signs of life and the watchdog, drills, checks
of collectives and of replicated weights."""

HUNG = 71
"""Exit code of a rank that its watchdog has ended."""
