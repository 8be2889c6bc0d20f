"""Training with little communication: islands train by themselves, and meet every so many steps.

``outer_step`` is what a meeting makes of the islands' weights; ``diloco``, ``gossip`` and ``stale``
say who meets whom. Whatever they do is done to fp32 master weights, and codes are made anew from
those: a mean of codes would be no code.
"""

from megabit.outer.opening import Outer, open_outer

__all__ = ["Outer", "open_outer"]
