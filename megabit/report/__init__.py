"""``megabit report``: what a run left in its folder, as one HTML page that needs nothing else."""

from megabit.report.write import write_report

__all__ = ["write_report"]
