"""What the kernels are worth, measured: ``megabit bench kernels``.

Options (``command``, ``console``) → ``Settings`` → ``Benchmark`` (``run``) races the contestants
(``contestants``) over the layers of known models (``shapes``) in turns (``measure``, ``clock``) →
``Result`` (``results``): rows whose times stand against what the machine can do at best
(``roofline``) and against what people use today, as tables (``tables``), JSON, CSV and a picture
(``plot``).
"""

from megabit_kernels.benchmark.results import Result
from megabit_kernels.benchmark.run import Benchmark, Settings

__all__ = ["Benchmark", "Result", "Settings"]
