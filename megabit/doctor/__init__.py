"""``megabit doctor``: what is wrong with a machine or a cluster, in words, before a job meets it.

``examine`` runs the checks one after another on all ranks. Each check is a file with three parts:
what a rank reads or the ranks measure together (a frozen dataclass), ``judge``, a pure function
from what all ranks have found to ``Finding``s, and, where something is to be shown, ``figures``.
Everybody has everybody's measurements, so all ranks come to the same findings.

    places, software      who is where, and runs what         (gathered as JSON)
    machine, gpu, interfaces                                   (read by each rank, then gathered)
    clocks                offset between hosts                 (ping-pong)
    storage, disk         the folder of the run                (files)
    pairs → links         latency and rate between every pair  (a tournament of disjoint pairs)
    collectives           against what the pairs let expect
    products              each rank's arithmetic
"""

from megabit.doctor.examine import Diagnosis, Plan, examine
from megabit.doctor.finding import Finding, Severity, worst_first

__all__ = ["Diagnosis", "Finding", "Plan", "Severity", "examine", "worst_first"]
