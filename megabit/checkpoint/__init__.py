"""Checkpoints that any layout can load, and models on disk.

A training checkpoint holds parts of *logical* tensors, whoever had them. ``store`` saves and finds
them, all ranks together; ``folder`` keeps them in order; ``tensor_file`` writes a rank's file,
``reader`` reads any slice from all files; ``manifest`` and ``verify`` say whether it is what was
saved. ``source`` is how a model is read tensor by tensor, from these or other formats.

Names are imported when they are asked for: ``folder`` and ``manifest`` need no torch, and a process
that only wants to know what a checkpoint is should not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megabit.checkpoint.folder import CheckpointFolder, Retention
    from megabit.checkpoint.manifest import DamagedCheckpoint, Manifest
    from megabit.checkpoint.reader import TensorReader
    from megabit.checkpoint.store import CheckpointStore, Part, Saved
    from megabit.checkpoint.together import Checkpoint, on_all_ranks, verified
    from megabit.checkpoint.verify import MASTER_KINDS

_HOMES = {
    "MASTER_KINDS": "verify",
    "Checkpoint": "together",
    "CheckpointFolder": "folder",
    "CheckpointStore": "store",
    "DamagedCheckpoint": "manifest",
    "Manifest": "manifest",
    "Part": "store",
    "Retention": "folder",
    "Saved": "store",
    "TensorReader": "reader",
    "on_all_ranks": "together",
    "verified": "together",
}

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


if not TYPE_CHECKING:  # to a type checker it would say that there is any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
