"""Where Triton's kernels run in these tests: on the GPU, or without one in Triton's interpreter.

Triton reads the variable when it decorates a kernel, so it is set before any test module (and thus
any kernel) is imported. Whoever sets it runs the interpreter on a machine with a GPU too.
"""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


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
