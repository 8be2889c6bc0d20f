"""What the launcher (torchrun, or anything that sets the same variables) says about this process."""

import os
from dataclasses import dataclass

from megabit.errors import UserError


@dataclass(frozen=True)
class Launch:
    """This process among those that were launched together; a process of its own is rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int

    @staticmethod
    def from_environment() -> "Launch":
        """Read RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them."""
        try:
            launch = Launch(
                rank=launched_rank(),
                local_rank=int(os.environ.get("LOCAL_RANK", "0")),
                world_size=int(os.environ.get("WORLD_SIZE", "1")),
            )
        except ValueError as error:
            raise UserError(f"RANK, LOCAL_RANK, WORLD_SIZE: must be numbers ({error})") from None
        if not 0 <= launch.rank < launch.world_size:
            raise UserError(f"RANK: {launch.rank} is not below WORLD_SIZE={launch.world_size}")
        return launch


def launched_rank() -> int:
    """RANK, or 0 where there is no launcher."""
    return int(os.environ.get("RANK", "0"))
