"""What the exit code of ``megabit train`` says to a scheduler; docs/launching.md has the table."""

from megabit import faults

FINISHED = 0
FAILED = 1
"""A run cannot go on, or a rank died; what is told on stderr says why."""
REFUSED = 2
"""The settings, or a file that they name, are wrong: the same command fails again."""
HUNG = faults.HUNG
"""Nothing moved for ``faults.hang_s``; the stacks are in ``run.dir/faults``."""
STOPPED = 75
"""Asked to stop by SIGTERM, and saved: the same command goes on (EX_TEMPFAIL of sysexits.h)."""
REGROUP = 76
"""Saved and stopped to be started again with other hosts; only launchers see it."""
INTERRUPTED = 130
"""Ctrl-C, and saved."""
