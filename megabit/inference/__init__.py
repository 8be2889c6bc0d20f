"""Generate text with a model, at any layout: ``Engine`` is the way in.

All ranks compute the same batches in one order, so blocks of the cache may be given away while a
batch that uses them is under way, and what ranks must do together (report, end) is a batch as well.
With p stages, p batches of different sequences are under way: rank 0 puts the next one together
when the oldest comes back. Running sequences are shared out evenly; chunks of one prompt follow
each other at once. When a rank fails, its peers fail in the collective that they share, or after
``engine.timeout_s``; none is ever replaced alone, and no collective is done again.
"""

from megabit.inference.engine import Answer, Engine, Generation
from megabit.inference.messages import SamplingParams

__all__ = ["Answer", "Engine", "Generation", "SamplingParams"]
