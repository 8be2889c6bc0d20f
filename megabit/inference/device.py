"""Where a rank of an engine computes."""

import torch

from megabit.errors import UserError


def device_of_rank(wanted: str, rank: int, world_size: int) -> torch.device:
    """The device of a rank, all of them on this host.

    Raises:
        UserError: there is no such device, or none that is left for this rank.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("engine.device: cuda was asked for but torch sees no GPU; use cpu or auto")
    if world_size > torch.cuda.device_count():
        raise UserError(
            f"engine.device: {world_size} ranks need as many GPUs, this host has "
            f"{torch.cuda.device_count()}; use fewer ranks or cpu"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)
