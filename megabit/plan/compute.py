"""What a rank computes in a step, counted in the terms of ``machine.Term``, and how long it takes.

Products count as multiply-adds. Elementwise work counts as bytes, pass by pass as the modules make
them: training's norms, rotations, gates and loss are plain torch, each operation of which reads its
operands and writes its result. Operands and results of products count as bytes, too; that is what
makes a narrow product, as of a high TP degree, slower than its multiply-adds. The same counts, with
measured seconds for a unit of each term, are fitted to a CPU (``calibrate``), and with datasheet
figures to GPUs (``catalog``).

``layer_work`` has the layers.

Left out, as small or rare: dropout, layout-exact training's sums in parts, label smoothing.
"""

from megabit.pipeline.balance import PartCosts
from megabit.plan.layer_work import (
    PartWork,
    Work,
    collected_bytes,
    layer_work,
    norm_bytes,
    own_tokens,
    units,
    width,
)
from megabit.plan.machine import Rates
from megabit.training.shapes import RankShape

MAPPED_BYTES = 32 * 2**20
"""Of a tensor, up to which freed memory is used again (``megabit_kernels.allocator``)."""


def part_times(shape: RankShape, rates: Rates) -> PartCosts:
    """Seconds of a microbatch by part of the model, without communication; with what is
    recomputed. Layers are taken to be alike: they recompute what most of the rank's do."""
    return PartCosts(
        layer=layer_work(shape).cost(rates),
        embedding=embedding_work(shape).cost(rates),
        head=head_work(shape).cost(rates),
        source="estimate",
    )


def update_s(shape: RankShape, rates: Rates) -> float:
    """Seconds after the last backward pass: norm, clipping, AdamW or Muon, new codes, and the sums
    of what came over DP; without communication and ``Rates.step_s``."""
    return rates.of(update_work(shape))


def embedding_work(shape: RankShape) -> PartWork:
    """Of the embedding; its gradient is all put off to W."""
    compute, wide = shape.compute_bytes, shape.wide_bytes
    hidden, rows = shape.config.model.hidden_size, width(shape, shape.config.model.vocab_size)
    numbers = shape.tokens * hidden
    # Rows are looked up and masked; where there are others, what is summed is a copy.
    forward = numbers * compute * (4 + 2 * (shape.tp > 1))
    # The gradient in fp32, added to rows of a matrix of zeros, and that to the bucket.
    gradient = numbers * (compute + 4 * wide) + rows * hidden * 4 * wide
    return PartWork(
        {"embedding bytes": forward, "embedding": 1},
        {},
        {"embedding gradient bytes": gradient, "embedding": 1},
    )


def head_work(shape: RankShape) -> PartWork:
    """Of the last norm, the head and the loss."""
    compute, wide, tokens = shape.compute_bytes, shape.wide_bytes, shape.tokens
    hidden, rows = shape.config.model.hidden_size, width(shape, shape.config.model.vocab_size)
    products, logits, matrix = tokens * hidden * rows, tokens * rows, rows * hidden
    normalized = own_tokens(shape) * hidden
    norm, norm_gradient = norm_bytes(shape)
    converts = compute < wide
    operands = compute * (tokens * hidden + matrix)
    # Largest logit, difference, exponential, sum: a read, then two, two and one wide ones.
    loss = logits * (2 * compute + converts * (compute + wide) + 5 * wide)
    loss_gradient = logits * (2 * wide + converts * (compute + wide) + compute)
    narrow = _mapped(logits * compute)
    wide_ones = (1 + converts) * _mapped(logits * wide)
    return PartWork(
        {
            "logits product": products,
            "loss bytes": loss + operands + normalized * norm,
            "mapped bytes": narrow + wide_ones,
            "head": 1,
        },
        {
            "logits gradient product": products,
            "loss gradient bytes": loss_gradient + operands + normalized * norm_gradient,
            "mapped bytes": converts * narrow + _mapped(logits * wide),
            "head": 1,
        },
        {
            "logits gradient product": products,
            "loss gradient bytes": compute * (logits + tokens * hidden)
            + matrix * (compute + collected_bytes(shape, compute)),
            "mapped bytes": _mapped(matrix * compute),
            "head": 1,
        },
    )


def _mapped(num_bytes: float) -> float:
    return num_bytes if num_bytes > MAPPED_BYTES else 0.0


def update_work(shape: RankShape) -> Work:
    """Of an update; see ``update_s``."""
    dp, wide, compute = shape.dp, shape.wide_bytes, shape.compute_bytes
    work = units()
    is_muon = shape.config.optim.name == "muon"
    for held in shape.parameters():
        kind = held.kind
        own = held.part(dp) * (1 if shape.is_sharded else dp)
        whole = held.numel
        times = shape.microbatches if shape.sums_travel_each_microbatch else 1
        work["tensor"] += 1
        work["updated element"] += own
        work["update bytes"] += dp * held.part(dp) * wide  # sums begin at zero
        if dp > 1:  # as many terms as there are ranks, added in a tree
            work["update bytes"] += times * (dp - 1) * held.part(dp) * 3 * wide
            if shape.wire_bytes != wide:
                work["update bytes"] += 2 * times * dp * held.part(dp) * (wide + shape.wire_bytes)
        if kind == "ternary":
            work["made code"] += whole + (own if shape.is_sharded else 0)
        elif kind != "second use":
            number = compute if kind == "matrix" else wide
            work["update bytes"] += whole * (wide + number)
        if is_muon and kind in ("ternary", "matrix"):
            work["weight gradient product"] += own * _muon_products(shape, held.rows, held.columns)
    return work


def _muon_products(shape: RankShape, rows: int, columns: int) -> float:
    """Multiply-adds for each element of a matrix that is orthogonalised: each iteration has X·Xᵀ,
    its square, and their product with X, over the shorter side."""
    short = min(rows, columns)
    return shape.config.optim.muon_iterations * (2 * short + short**2 / max(rows, columns))
