"""``python -m megabit_kernels.benchmark``: the same as ``megabit bench kernels``."""

import sys

from megabit_kernels.benchmark.command import main

sys.exit(main(sys.argv[1:], "python -m megabit_kernels.benchmark"))
