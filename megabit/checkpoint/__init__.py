"""Checkpoints that the layout which wrote them reads back bit by bit.

Resharding (loading at another layout) is to come behind this same interface.
"""

from megabit.checkpoint.store import Checkpoint, CheckpointStore

__all__ = ["Checkpoint", "CheckpointStore"]
