"""How far megabit's int8 forward pass is from transformers' on the same model and tokens.

They are the same model in other arithmetic (``interop.huggingface.arithmetic``), so logits differ
by rounding: an activation near a boundary takes another code of int8, and what is rounded to bf16
is rounded at other places. A wrong import is told by far more.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megabit.checkpoint.source import ModelSource
from megabit.config import Config, DataConfig, PrecisionConfig
from megabit.errors import UserError
from megabit.interop.huggingface import (
    HuggingFaceMode,
    HuggingFaceSource,
    huggingface_logits,
    mode_of,
)
from megabit.mesh import ParallelMesh
from megabit.model.decoder import build_stages
from megabit.model.load import load_stages


@dataclass(frozen=True)
class Difference:
    """Of two forward passes."""

    largest: float
    """Of |a − b| over all logits."""
    mean: float
    """Of |a − b| over all logits."""
    spread: float
    """Standard deviation of transformers' logits, to compare the others with."""
    equal_choices: float
    """Share of positions whose largest logit is that of the same token."""

    def __str__(self) -> str:
        return (
            f"logits differ by {self.mean:.2g} on average, {self.largest:.2g} at most "
            f"(they spread by {self.spread:.2g}); "
            f"the most likely token is the same at {self.equal_choices:.1%} of positions"
        )


def compare_with_huggingface(
    source: ModelSource, tokens: Tensor, mode: HuggingFaceMode | None = None
) -> Difference:
    """Compute logits of ``tokens``, int64 ``[B, S]``, both ways. Needs memory for the model in
    fp32.

    Args:
        mode: None is that of the checkpoint, not compiled: compiling takes longer than the check,
            and shows in the last bits only.
    """
    theirs = huggingface_logits(source, tokens, mode or _own_mode(source)).double()
    ours = int8_logits(source, tokens).double()
    distance = (ours - theirs).abs()
    return Difference(
        largest=float(distance.max()),
        mean=float(distance.mean()),
        spread=float(theirs.std()),
        equal_choices=float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()),
    )


@torch.no_grad()
def int8_logits(source: ModelSource, tokens: Tensor) -> Tensor:
    """Logits ``[B, S, V]`` in fp32 of megabit's own forward pass on this process."""
    config = Config(
        model=source.model,
        data=DataConfig(seq_length=tokens.shape[1]),
        precision=PrecisionConfig(compute="float32"),
    )
    stages = build_stages(config, ParallelMesh()).eval()
    load_stages(stages, source)
    return stages.logits(stages(tokens)).unflatten(0, tokens.shape)


def _own_mode(source: ModelSource) -> HuggingFaceMode:
    if not isinstance(source, HuggingFaceSource):
        raise UserError(
            f"{source.path}: is no Hugging Face checkpoint; name a mode to compare with"
        )
    return replace(mode_of(source), compiled=False)
