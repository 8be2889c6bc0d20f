"""Where a rank computes."""

from typing import TYPE_CHECKING

from megabit.cli.environment import Launch
from megabit.config import Config
from megabit.errors import UserError

if TYPE_CHECKING:
    import torch


def device_of(config: Config, launch: Launch) -> "torch.device":
    """The device of this rank, as ``run.device`` says.

    Raises:
        UserError: there is no such device, or none that is left for this rank.
    """
    import torch

    wanted = config.run.device
    if config.parallel.exact == "full" and wanted == "auto" and torch.cuda.is_available():
        raise UserError("run.device: parallel.exact=full holds on the CPU only; use cpu")
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("run.device: cuda was asked for but torch sees no GPU; use cpu or auto")
    if launch.local_world_size > torch.cuda.device_count():
        raise UserError(
            f"run.device: {launch.local_world_size} ranks on this host need as many GPUs, "
            f"it has {torch.cuda.device_count()}; start fewer ranks or use cpu"
        )
    torch.cuda.set_device(launch.local_rank)
    return torch.device("cuda", launch.local_rank)
