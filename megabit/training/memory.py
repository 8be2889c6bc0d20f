"""What a rank holds of a model, by formula: the figure beside ``ZeroOptimizer.nbytes()``.

With P the elements that each of d DP ranks has of a stage's tensors (``Held.part``), and w the
bytes of fp32 (fp64 if compute is):

- codes: 2 bits for each ternary weight, in whole tiles of the layout that the device computes with;
- dense weights: each matrix in ``precision.compute``, each gain in w bytes; while λ < 1 ternary
  weights are among the matrices, and there are no codes;
- gradients: d·P·w, the sums that microbatches add to (``zero_stage`` 2: of gains only), and with
  DP the sums over ranks beside them at the end of backward: P·w, or d·P·w with ``zero_stage`` 0;
- masters: P·w, or d·P·w with ``zero_stage`` 0; moments: twice as much, or with Muon, of layers'
  matrices, as much.

What an outer optimizer keeps is ``outer_bytes``. Activations, buffers that travel (a bucket's for
as long as it does: with a slow network, up to d·P gradients on the wire) and the libraries
themselves are in the process' peak, which is measured here (``peak_bytes``); ``plan.memory``
predicts it.
"""

import resource
import sys
from pathlib import Path

import torch

from megabit.data_parallel.layout import REDUCED_EACH_MICROBATCH
from megabit.training.shapes import Held, RankShape
from megabit_kernels.conversion import Layout, data_shape
from megabit_kernels.dispatch import best_layout

KINDS = ("codes", "dense weights", "gradients", "masters", "moments")


def resident_bytes(
    shape: RankShape,
    device: torch.device,
    has_updated: bool = True,
    share: float = 1.0,
    layout: Layout | None = None,
) -> dict[str, int]:
    """Bytes by kind after a step.

    Args:
        has_updated: whether any step has changed weights; moments begin with the first that does.
        share: λ of the next step.
        layout: in which codes are held; None: the one that is best on this machine's ``device``.
    """
    layout = layout or best_layout(device)
    total = dict.fromkeys(KINDS, 0)
    for held in shape.parameters():
        for kind, num_bytes in _resident(held, shape, layout, share).items():
            total[kind] += num_bytes
    if shape.config.optim.name == "muon":
        for held in shape.layer_matrices():  # have a momentum in place of two moments
            total["moments"] -= _resident(held, shape, layout, share)["masters"]
    return total if has_updated else {**total, "moments": 0}


def outer_bytes(shape: RankShape) -> int:
    """What the outer optimizer of an island keeps on this rank (``outer.method``), of the rows that
    it brings to meetings: of DiLoCo an anchor, a momentum and, where messages are coded, what they
    have lost; of ``stale`` at most so many rounds as it may be ahead, and where the present one
    began. Gossip keeps nothing."""
    outer, dp = shape.config.outer, shape.dp
    dp_rank = shape.rank // shape.tp % dp
    elements = 0
    for held in shape.parameters():
        if held.kind != "second use":
            first = dp_rank * -(-held.rows // dp)
            elements += max(0, min(held.rows - first, -(-held.rows // dp))) * held.columns
    copies = {
        "diloco": 2 + (outer.wire != "float32"),
        "stale": 1 + outer.staleness if outer.staleness else 0,
    }
    return copies.get(outer.method, 0) * elements * shape.wide_bytes


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has had: of the GPU's, what torch had allocated; of the
    host's, everything, libraries and mapped files included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # Linux' ru_maxrss would begin with the peak of the program that started this one.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, LookupError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _resident(held: Held, shape: RankShape, layout: Layout, share: float) -> dict[str, int]:
    dp, wide = shape.dp, shape.wide_bytes
    all_parts = dp * held.part(dp) * wide
    masters = held.part(dp) * wide if shape.is_sharded else all_parts
    codes = dense = 0
    match held.kind:
        case "ternary" if share == 1:
            codes = _codes(held, layout)
        case "ternary" | "matrix":
            dense = held.numel * shape.compute_bytes
        case "gain" | "partial gain":
            dense = held.numel * wide
        case "second use":  # its values are those of the embedding
            pass
    return {
        "codes": codes,
        "dense weights": dense,
        "gradients": _sums(held, shape),
        "masters": masters,
        "moments": 2 * masters,
    }


def megatron_bytes(shape: RankShape) -> dict[str, int]:
    """For comparison, what a rank would keep in Megatron-LM with its distributed optimizer: bf16
    weights, fp32 gradients, and fp32 masters and moments in parts."""
    numel = {"ternary": 0, "other": 0}
    for held in shape.parameters():
        if held.kind != "second use":
            numel["ternary" if held.kind == "ternary" else "other"] += held.numel
    total = sum(numel.values())
    return {
        "codes": 2 * numel["ternary"],
        "dense weights": 2 * numel["other"],
        "gradients": 4 * total,
        "masters": 4 * total // shape.dp,
        "moments": 8 * total // shape.dp,
    }


def _sums(held: Held, shape: RankShape) -> int:
    """Of gradients, at the end of backward: whole ones and, with DP, the part that is updated."""
    part = held.part(shape.dp) * shape.wide_bytes
    if shape.dp == 1:
        return part
    is_passed_on = shape.sums_travel_each_microbatch and held.kind in REDUCED_EACH_MICROBATCH
    whole = 0 if is_passed_on else shape.dp * part
    return whole + (part if shape.is_sharded else shape.dp * part)


def _codes(held: Held, layout: Layout) -> int:
    """Every layout has items of one byte."""
    return torch.Size(data_shape(layout, held.rows, held.columns)).numel()
