"""Checkpoints that any layout can load, and models on disk.

A training checkpoint holds parts of *logical* tensors, whoever had them. ``store`` saves and finds
them, all ranks together; ``folder`` keeps them in order; ``tensor_file`` writes a rank's file,
``reader`` reads any slice from all files; ``manifest`` and ``verify`` say whether it is what was
saved. ``source`` is how a model is read tensor by tensor, from these or other formats.
"""

from megabit.checkpoint.folder import CheckpointFolder, Retention
from megabit.checkpoint.manifest import DamagedCheckpoint, Manifest
from megabit.checkpoint.reader import TensorReader
from megabit.checkpoint.store import CheckpointStore, Part, Saved
from megabit.checkpoint.together import Checkpoint, on_all_ranks, verified
from megabit.checkpoint.verify import MASTER_KINDS

__all__ = [
    "MASTER_KINDS",
    "Checkpoint",
    "CheckpointFolder",
    "CheckpointStore",
    "DamagedCheckpoint",
    "Manifest",
    "Part",
    "Retention",
    "Saved",
    "TensorReader",
    "on_all_ranks",
    "verified",
]
