"""For all tests, before any of their modules is imported.

Without a GPU, Triton's kernels run in its interpreter (``tests/kernels/triton``). Triton reads the
variable when it is imported, which torch does on its own for some of its optimizers and profilers;
so it is set here, whatever is collected first.
"""

import os

import torch

# Ranks have one thread each, and what they compute is compared bit by bit with this process.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
