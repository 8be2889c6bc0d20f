"""AdamW over a stage's parameters, by the fastest implementation that is there."""

from collections.abc import Iterable

import torch

from megabit.apex import fused_adam
from megabit.config import OptimConfig
from megabit.tensor_parallel import ShardedParameter
from megabit.training.schedule import Hyperparameters


def build_optimizer(
    parameters: Iterable[ShardedParameter], optim: OptimConfig
) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices and none on norm gains.

    NVIDIA apex's FusedAdam where it is installed and the parameters are on a GPU, else torch's
    fused AdamW. Both decouple the decay and correct the bias, and keep ``exp_avg`` and
    ``exp_avg_sq``.
    """
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "decays": True},
        {"params": [p for p in parameters if p.dim() == 1], "decays": False},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (optim.betas[0], optim.betas[1])
    apex_adam = fused_adam() if parameters[0].is_cuda else None
    if apex_adam is not None:
        return apex_adam(groups, betas=betas, eps=optim.eps, adam_w_mode=True)
    return torch.optim.AdamW(groups, betas=betas, eps=optim.eps, fused=True)


def set_hyperparameters(optimizer: torch.optim.Optimizer, values: Hyperparameters) -> None:
    """Apply to every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = values.lr
        group["weight_decay"] = values.weight_decay if group["decays"] else 0.0
