"""AdamW over flat parts of master weights, by the fastest implementation that is there."""

from collections.abc import Sequence

import torch
from torch import nn

from megabit.apex import fused_adam
from megabit.config import OptimConfig


def build_adam(
    matrices: Sequence[nn.Parameter], gains: Sequence[nn.Parameter], optim: OptimConfig
) -> torch.optim.Optimizer:
    """AdamW with weight decay on ``matrices`` and none on ``gains``.

    NVIDIA apex's FusedAdam where it is installed and the weights are on a GPU, else torch's fused
    AdamW. Both decouple the decay and correct the bias, and keep ``exp_avg`` and ``exp_avg_sq``.
    """
    groups = [{"params": [*matrices], "decays": True}, {"params": [*gains], "decays": False}]
    # A rank of which all is Muon's has an AdamW with nothing to do.
    groups = [group for group in groups if group["params"]] or groups[:1]
    betas = (optim.betas[0], optim.betas[1])
    is_on_gpu = any(weights.is_cuda for weights in (*matrices, *gains))
    apex_adam = fused_adam() if is_on_gpu else None
    if apex_adam is not None:
        return apex_adam(groups, betas=betas, eps=optim.eps, adam_w_mode=True)
    return torch.optim.AdamW(groups, betas=betas, eps=optim.eps, fused=True)


def set_hyperparameters(adam: torch.optim.Optimizer, lr: float, weight_decay: float) -> None:
    """Apply to every parameter group."""
    for group in adam.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay if group["decays"] else 0.0
