"""Checkpoints that the layout which wrote them reads back bit by bit.

Loading at another layout is not supported yet: it needs the place of each tensor in its logical
tensor, which ``Shard`` has and the files do not.
"""

from megabit.checkpoint.store import Checkpoint, CheckpointStore

__all__ = ["Checkpoint", "CheckpointStore"]
