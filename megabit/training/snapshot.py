"""What a snapshot of a run holds: codes, scales, and dense weights as the model computes with them.

Nothing is derived for it: each rank writes its rows of the codes that its layers have already. Over
all ranks the parts are disjoint and complete, whatever the layout (``ZeroOptimizer.pieces``).
"""

import torch

from megabit.checkpoint import Part
from megabit.checkpoint.verify import CODES, SCALE
from megabit.data_parallel import Piece
from megabit.training.step import TrainingState
from megabit_kernels import TernaryWeight
from megabit_kernels.packing import packed_width


@torch.no_grad()
def ternary_parts(state: TrainingState) -> list[Part]:
    """This rank's part of a ternary checkpoint; waits for codes that are on their way to it.

    Matrices have the dtype that is computed in, or fp32 where that is fp64; gains and scales are
    fp32.
    """
    compute = state.stages.context.compute_dtype
    matrix_dtype = torch.float32 if compute == torch.float64 else compute
    layers = state.optimizer.publisher.layers
    parts: list[Part] = []
    for piece in state.optimizer.pieces(owned=True):
        if piece.name in layers:
            parts += _ternary_parts(piece, layers[piece.name].ternary())
            continue
        master = piece.tensors["master"]
        dtype = matrix_dtype if master.dim() > 1 else torch.float32
        offset = tuple(part.start for part in piece.index)
        parts.append(Part(piece.name, piece.shard.shape, offset, master.to(dtype)))
    return parts


def _ternary_parts(piece: Piece, ternary: TernaryWeight) -> list[Part]:
    """Rows of a layer's codes and, from the rank that has the first of them, γ."""
    rows, columns = piece.index
    codes = ternary.packed()[piece.rows.start : piece.rows.stop]
    # Ranks cut columns at multiples of 4, so no byte is another rank's, too (``BlockPartition``).
    offset = (rows.start, packed_width(columns.start))
    shape = (piece.shard.shape[0], packed_width(piece.shard.shape[1]))
    parts = [Part(f"{piece.name}.{CODES}", shape, offset, codes)]
    if offset == (0, 0):
        parts.append(Part(f"{piece.name}.{SCALE}", (), (), ternary.scale.float()))
    return parts
