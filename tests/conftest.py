"""For all tests, before any of their modules is imported.

Without a GPU, Triton's kernels run in its interpreter (``tests/kernels/triton``). Triton reads the
variable when it is imported, which torch does on its own for some of its optimizers and profilers;
so it is set here, whatever is collected first.

Files whose tests take long come first, so that no process is left with one of them at the end.

Each test must leave the process as it was: the next one may fork it, and what a test forgets there
breaks another one that happens to run in the same process.
"""

import os
import resource
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# Ranks have one thread each, and what they compute is compared bit by bit with this process.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# As the command line sets it, in whose own process some tests call it.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# How fast examples are drawn says something about the machine only.
settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])  # stable: files stay together, in their order


VARIABLES = (
    *("MEGABIT_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "OMP_", "TORCH_"),
    *("TORCHELASTIC_", "NCCL_", "GLOO_"),
)
"""What processes of a job are told by; pytest and libraries write into others."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def state_of_process() -> dict[str, object]:
    """What all code in it and all its forks share, but for modules."""
    environment = {k: v for k, v in os.environ.items() if k.startswith(VARIABLES)}
    return {
        **{f"variable {name}": value for name, value in environment.items()},
        **{f"handler of {number.name}": signal.getsignal(number) for number in SIGNALS},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "limit of files": resource.getrlimit(resource.RLIMIT_FSIZE),
        "current folder": os.getcwd(),
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
    }


@pytest.fixture(autouse=True)
def the_process_stays_as_it_is() -> Iterator[None]:
    before = state_of_process()
    yield
    after = state_of_process()
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert not changed, f"left behind in the process: {sorted(changed)}"
