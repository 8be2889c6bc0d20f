"""Where Triton's kernels run in these tests: on the GPU, or without one in Triton's interpreter.

``tests/conftest.py`` chooses it by ``TRITON_INTERPRET``. Whoever sets that runs the interpreter on
a machine with a GPU too.
"""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def device() -> torch.device:
    """Where the kernels run."""
    from megabit_kernels.triton.arithmetic import is_interpreted

    return torch.device("cpu" if is_interpreted() else "cuda")


@pytest.fixture(autouse=True, scope="module")
def operands_are_made_there(device: torch.device) -> Iterator[None]:
    """Tensors are on the device of the kernels unless a test says otherwise."""
    with device:
        yield
