"""What a run keeps of its weights beside masters and moments, where it communicates less.

- *Islands* (``outer``) have masters and moments of their own between meetings. Those of the first
  are called as if it were alone, so that whoever reads a checkpoint as a model finds one; those of
  island i are ``island{i}.kind/name``.
- An *outer optimizer* keeps what all islands began the round with, and its momentum.
- A *codec* with error feedback keeps what it has lost (``data_parallel.lost``).

A run goes on with other numbers of islands and of DP ranks, too: a new island begins with what one
of those before had.
"""

from collections.abc import Mapping
from typing import Any

import torch

from megabit.checkpoint import MASTER_KINDS, Checkpoint, Part, TensorReader
from megabit.checkpoint.verify import MoreTensors
from megabit.data_parallel import Piece
from megabit.data_parallel.lost import HEAD_ERROR, lost_names, lost_pieces, restore_lost
from megabit.outer.opening import OWN_KINDS, SHARED_KINDS
from megabit.reduce import gather_json
from megabit.training.step import TrainingState


def training_parts(state: TrainingState) -> list[Part]:
    """What this rank saves: over all ranks, every element of what there is once. Collective."""
    island, more = state.mesh.outer.rank, MoreTensors(shared_kinds=SHARED_KINDS)
    pieces = [*state.optimizer.pieces(owned=True), *lost_pieces(state.optimizer)]
    if state.outer is not None:
        pieces += state.outer.pieces(owned=True)
    return [
        Part(
            f"{more.in_island(island, kind)}/{piece.name}",
            piece.shard.shape,
            tuple(part.start for part in piece.index),
            tensor,
        )
        for piece in pieces
        for kind, tensor in piece.tensors.items()
        if kind != "gradient" and (island == 0 or kind not in SHARED_KINDS)
    ]


def more_of_manifest(state: TrainingState) -> dict[str, Any]:
    """What ``Manifest.run`` says of it; collective over islands and the pipeline."""
    mesh, optimizer = state.mesh, state.optimizer
    reduction = optimizer.gradients.reduction
    kinds: set[str] = set()
    if state.outer is not None:
        kinds = {kind for piece in state.outer.pieces() for kind in piece.tensors}
    of_stages = gather_json(lost_names(optimizer), mesh.pp, mesh.device)
    lost: dict[str, list[str]] = {}
    for kind, name in (pair for names in of_stages for pair in names):
        for sender in range(reduction.senders[1]):
            lost.setdefault(f"{kind}{sender}", []).append(name)
    own: dict[str, Any] = {"updates": optimizer.updates, "state": state.progress.state()}
    if state.outer is not None:
        own["outer"] = state.outer.state()
    islands = gather_json(own, mesh.outer, mesh.device)
    more = MoreTensors(
        islands=mesh.outer.size,
        shared_kinds=[kind for kind in SHARED_KINDS if kind in kinds],
        own_kinds=[kind for kind in OWN_KINDS if kind in kinds],
        partial_kinds=lost,
        updated=[island["updates"] > 0 for island in islands],
    )
    return {"more_tensors": more.as_json(), "islands": islands}


def saved_island(state: TrainingState, checkpoint: Checkpoint) -> tuple[int, Mapping[str, Any]]:
    """The island of a checkpoint that this rank's goes on from, and what was its own there:
    ``updates``, the guard's ``state``, and the ``outer`` optimizer's."""
    manifest = checkpoint.manifest
    own = {"updates": manifest.updates, "state": manifest.run.get("state", {})}
    islands = manifest.run.get("islands") or [own]
    island = state.mesh.outer.rank % len(islands)
    return island, islands[island]


def restore_tensors(state: TrainingState, checkpoint: Checkpoint, island: int) -> None:
    """Read this rank's slices of all that there is, of ``island``. What the checkpoint has none of
    stays as at the beginning."""
    more = MoreTensors.of(checkpoint.manifest)
    outer_kinds = {*more.shared_kinds, *more.own_kinds}
    with TensorReader(checkpoint.path) as reader:

        def read(kind: str, piece: Piece) -> None:
            name = f"{more.in_island(island, kind)}/{piece.name}"
            reader.read_into(piece.tensors[kind], name, piece.index)

        for piece in state.optimizer.pieces():
            for kind in MASTER_KINDS:
                if kind in piece.tensors:
                    read(kind, piece)
        if state.outer is not None:
            for piece in state.outer.pieces():
                for kind in (*SHARED_KINDS, *OWN_KINDS):
                    if kind in piece.tensors and kind in outer_kinds:
                        read(kind, piece)
        kinds = [kind for kind in more.partial_kinds if not kind.startswith(HEAD_ERROR)]

        def rows(name: str, index: tuple[slice, ...]) -> torch.Tensor | None:
            kind, _, tensor = name.partition("/")
            if tensor not in more.partial_kinds.get(kind, ()):
                return None
            return reader.read(f"{more.in_island(island, kind)}/{tensor}", index)

        restore_lost(state.optimizer, len(kinds), rows)
