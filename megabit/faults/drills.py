"""Drills: faults that are planted on purpose, to see what a run makes of them.

``faults.drills`` says which fault strikes which rank before which step. The training thread asks
before each step (``Drills.before_step``), and in it (``in_step``). The rank that is struck first
writes a marker into ``run.dir/faults``, durably, so that a run that is started again is not struck
again; then it says what is to come on stderr, and then it comes. What a fault does to the run is
the rest of the code's business: nothing else knows of drills.
"""

import ctypes
import errno
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from megabit.config import Drill
from megabit.files import write_text
from megabit.mesh import Axis
from megabit.reduce import all_reduce
from megabit.tensor_parallel import ternary_layers

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
LONG_S = 10**6

Attempt = Callable[[], AbstractContextManager[None]]
"""What a try to write a checkpoint is made in (``retry.Retry.around``)."""


class DrillError(RuntimeError):
    """What the drill ``exception`` raises: an error that nobody expects."""


class Drills:
    """Those of a run, as one rank meets them.

    Args:
        folder: ``run.dir/faults``, where the markers are.
        stages: the module whose forward and backward passes are trained.
        world: of all ranks.
        device: of this rank.
        announce: told of a drill on whatever rank, where it is due; the main rank logs it.
        break_storage: given what the next tries to write a checkpoint are made in.
    """

    def __init__(
        self,
        drills: Sequence[Drill],
        folder: Path,
        stages: nn.Module,
        world: Axis,
        device: torch.device,
        announce: Callable[[Drill], None],
        break_storage: Callable[[Attempt], None],
    ) -> None:
        self._stages, self._world, self._device = stages, world, device
        self._announce, self._break_storage = announce, break_storage
        self._pause_s = 0.0
        # Markers are read once: while a run lasts, who is struck would race with who looks.
        self._due = {
            marker: drill
            for number, drill in enumerate(drills)
            if not (marker := folder / _marker(number, drill)).exists()
        }

    def before_step(self, step: int) -> None:
        """Let strike what is due before step ``step`` (0-based)."""
        for marker, drill in [*self._due.items()]:
            if drill.step == step:
                del self._due[marker]
                if drill.rank >= self._world.size:  # an elastic job may have it another time
                    continue
                self._announce(drill)
                is_struck = drill.rank == self._world.rank
                if is_struck:
                    marker.parent.mkdir(parents=True, exist_ok=True)
                    write_text(marker, "", durable=True)
                    print(f"DRILL {described(drill)}", file=sys.stderr, flush=True)
                if drill.fault == "mismatch":  # of a collective that all ranks call
                    size = 7 if is_struck else 6
                    all_reduce(torch.zeros(size, device=self._device), self._world)
                elif is_struck:
                    self._strike(drill)

    def in_step(self) -> None:
        """While a step is timed: what makes the rank slow, if anything does."""
        if self._pause_s:
            time.sleep(self._pause_s)

    def _strike(self, drill: Drill) -> None:
        match drill.fault:
            case "kill" | "stop" | "term":
                os.kill(os.getpid(), SIGNALS[drill.fault])
            case "exit":
                os._exit(1)  # no finally, no exit handler: the others are not told
            case "exception":
                raise DrillError(described(drill))
            case "segfault":
                ctypes.string_at(0)
            case "abort":
                os.abort()
            case "hang":
                while True:
                    time.sleep(LONG_S)
            case "hold_gil":
                hold = ctypes.PyDLL(None).sleep  # unlike CDLL, PyDLL keeps the lock
                while True:
                    hold(LONG_S)
            case "slow":
                self._pause_s += drill.seconds
            case "nan":
                _poison_gradient(self._stages)
            case "flip_code":
                flip_code(self._stages)
            case "disk_full":
                self._break_storage(_once(full_disk()))
            case "storage_error":
                self._break_storage(_once(failing_storage()))


def described(drill: Drill) -> str:
    """For people."""
    more = f" of {drill.seconds:g} s in each step" if drill.fault == "slow" else ""
    return f"{drill.fault}{more} on rank {drill.rank}, before step {drill.step + 1}"


def flip_code(stages: nn.Module) -> None:
    """Flip one bit of the codes of the first ternary weight, as memory that fails would: nothing
    notices but a comparison with other replicas."""
    layer = next(ternary_layers(stages))
    data = layer.ternary().data.view(torch.uint8)
    data.view(-1)[data.numel() // 2] ^= 1


def _poison_gradient(stages: nn.Module) -> None:
    """Make the gradient that enters the next backward pass NaN, once."""

    def poison(gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, math.nan)

    def after_forward(module: nn.Module, inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(poison)
            handle.remove()

    handle = stages.register_forward_hook(after_forward)


@contextmanager
def full_disk() -> Iterator[None]:
    """Meanwhile no file of this process may grow: writes fail as on a full disk (with EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def failing_storage() -> Iterator[None]:
    """Fails at once, as a file system does whose server is away."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))
    yield


def _once(fault: AbstractContextManager[None]) -> Attempt:
    """``fault`` for the first try, nothing for those after it."""
    faults = [fault]
    return lambda: faults.pop() if faults else nullcontext()


def _marker(number: int, drill: Drill) -> str:
    return f"drill_{number}_{drill.fault}_rank{drill.rank}_step{drill.step}.done"
