"""Runs Triton kernels on the CPU, in Triton's interpreter.

Triton reads the variable when it decorates a kernel, so it is set before any test module (and thus
any kernel) is imported. Every other test leaves Triton alone.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
