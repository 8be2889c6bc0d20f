"""What the kernels take. This imports no Triton, so that dispatch may ask before it has any."""

import torch

DECODE_ROWS = 16
"""Most rows of a product for ``split_k``: those of its one tile, the fewest tensor cores take."""

FLOATS = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
"""What is computed in fp32 without loss, and what the compiler calls a pointer to it."""

OUTPUTS = (torch.float32, torch.float16, torch.bfloat16)
"""What a product can be scaled to."""
