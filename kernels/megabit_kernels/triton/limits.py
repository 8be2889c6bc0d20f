"""What the kernels take. This imports no Triton, so that dispatch may ask before it has any."""

import torch

DECODE_ROWS = 16
"""Most rows of a product for ``split_k``: those of its one tile, the fewest tensor cores take."""

FLOATS = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
"""What is computed in fp32 without loss, and what the compiler calls a pointer to it."""

OUTPUTS = {**FLOATS, torch.float16: "*fp16"}
"""What a product can be scaled to, and what attention and dense products take."""

PAGES = {**OUTPUTS, torch.int8: "*i8"}
"""What pages of keys and values are made of."""

MAX_HEAD_DIM = 256
"""Widest heads of attention."""
