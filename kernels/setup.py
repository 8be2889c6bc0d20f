"""Packaging of ``megabit_kernels`` alone: ``pip install ./kernels``."""

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a build does not put the folder of setup.py there

from native_build import AnyPython, BuildNative, native_extension  # noqa: E402


def version() -> str:
    """The version in ``megabit_kernels/__init__.py``, read as text: a build imports no torch."""
    source = (ROOT / "megabit_kernels" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError('megabit_kernels/__init__.py has no line __version__ = "..."')
    return match.group(1)


setup(
    name="megabit-kernels",
    version=version(),
    description="Exact products of int8 activations and ternary weights, on CPUs and GPUs",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(".", include=["megabit_kernels", "megabit_kernels.*"]),
    ext_modules=[native_extension("csrc", "megabit_kernels")],
    cmdclass={"bdist_wheel": AnyPython, "build_ext": BuildNative},
    install_requires=[
        "torch>=2.11",
        'triton; platform_system == "Linux" and platform_machine in "x86_64 aarch64"',
    ],
    package_data={"": ["py.typed", "tuned/*.json"]},
    extras_require={"benchmark": ["matplotlib", "rich"]},
)
