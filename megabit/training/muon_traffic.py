"""What Muon sends to orthogonalise whole matrices, by formula; part of ``traffic``.

Of a logical matrix of n·k elements, one rank of r (TP × DP of a stage, or TP where masters are not
sharded) gets all elements but its own, each from the rank that counts it, and sends each other rank
the elements that this one updates, of KV heads that several ranks hold to each of them: all in all
about 2·(r−1)/r · n·k · w bytes. Matrices go round the ranks by size, largest first, equally large
ones in the order of the forward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megabit.config import ModelConfig
from megabit.model.kv_heads import HeadSplit, kv_rows
from megabit.tensor_parallel import BlockPartition, Span
from megabit.training.shapes import RankShape


@dataclass(frozen=True)
class _Matrix:
    rows: int
    columns: int
    spans: tuple[Span, ...]
    """By TP rank: the rows, or the columns, that it has."""
    is_cut_by_rows: bool

    def elements(self, tp_rank: int, dp_rank: int, parts: int, is_counted: bool) -> int:
        """What a rank has of the matrix, or only what it counts; DP ranks have ``parts`` parts."""
        span = self.spans[tp_rank]
        if not self.is_cut_by_rows:
            return len(_part(range(self.rows), dp_rank, parts)) * span.width
        held = _part(range(span.start, span.stop), dp_rank, parts)
        if is_counted:
            first = max(held.start, span.owned_start)
            held = range(first, min(held.stop, span.owned_stop))
        return len(held) * self.columns


def sent_updates(shape: RankShape) -> list[float]:
    """Bytes that each rank of ``shape``'s stage sends in a step, in the order of ranks.

    Where DP ranks do the same, those of the first one.
    """
    parts = shape.dp if shape.is_sharded else 1
    ranks = [divmod(rank, shape.tp) for rank in range(parts * shape.tp)]
    layer = sorted(_layer(shape.config.model, shape.tp), key=lambda m: -m.rows * m.columns)
    counted, held = (
        [[m.elements(tp_rank, dp_rank, parts, choice) for dp_rank, tp_rank in ranks] for m in layer]
        for choice in (True, False)
    )
    sent, number = [0.0] * len(ranks), 0
    for size in dict.fromkeys(matrix.rows * matrix.columns for matrix in layer):
        alike = [i for i, matrix in enumerate(layer) if matrix.rows * matrix.columns == size]
        for i in alike * len(shape.layers):
            own = number % len(ranks)
            sent[own] += sum(held[i]) - held[i][own] - counted[i][own]
            number += 1
    for i in range(len(layer)):
        sent = [n + len(shape.layers) * c for n, c in zip(sent, counted[i], strict=True)]
    return [elements * shape.wide_bytes for elements in sent]


def _layer(model: ModelConfig, tp: int) -> Iterator[_Matrix]:
    """In the order of the forward pass."""
    hidden, ffn, heads = model.hidden_size, model.intermediate_size, model.num_attention_heads
    kv_heads = model.num_key_value_heads
    query, wide = (
        tuple(BlockPartition(size, heads).span(rank, tp) for rank in range(tp))
        for size in (hidden, ffn)
    )
    kv = tuple(kv_rows(HeadSplit(heads, kv_heads, rank, tp), model.head_dim) for rank in range(tp))
    yield _Matrix(hidden, hidden, query, is_cut_by_rows=True)
    yield _Matrix(kv_heads * model.head_dim, hidden, kv, is_cut_by_rows=True)
    yield _Matrix(kv_heads * model.head_dim, hidden, kv, is_cut_by_rows=True)
    yield _Matrix(hidden, hidden, query, is_cut_by_rows=False)
    yield _Matrix(ffn, hidden, wide, is_cut_by_rows=True)
    yield _Matrix(ffn, hidden, wide, is_cut_by_rows=True)
    yield _Matrix(hidden, ffn, wide, is_cut_by_rows=False)


def _part(rows: range, part: int, parts: int) -> range:
    """The rows of a DP rank: ``ceil(n / parts)`` of them, the last ranks fewer or none."""
    count = -(-len(rows) // parts)
    return rows[part * count : (part + 1) * count]
