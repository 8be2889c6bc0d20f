"""Packaging: two import packages, ``megabit`` (here) and ``megabit_kernels`` (in kernels/).

``pip wheel . --no-deps`` makes one wheel of them, which needs nothing of the repository: the files
of ``examples/`` are in it as ``megabit/examples``, and ``megabit examples`` writes them out.

``make setup`` installs this with ``constraints.txt``, which holds the exact releases; the ranges
below are what the code needs.
"""

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "kernels"))

from native_build import AnyPython, BuildNative, native_extension  # noqa: E402


def version() -> str:
    """The version in ``megabit/__init__.py``, read as text: a build imports no part of megabit."""
    source = (ROOT / "megabit" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError('megabit/__init__.py has no line __version__ = "..."')
    return match.group(1)


TELEMETRY = [
    "tensorboard",
    "prometheus-client>=0.19",  # gives its server back, so that it can be closed
    "nvidia-ml-py",
    "wandb",
]
"""What only some sinks of metrics need; megabit says so where one is missing."""

LM_EVAL = ["lm_eval>=0.4.13"]
"""For tasks of lm-evaluation-harness (megabit eval --tasks)."""

SERVE = ["fastapi>=0.115", "uvicorn>=0.30", "jinja2", "prometheus-client>=0.19", "psutil"]
"""For ``megabit serve`` and ``megabit chat``; an engine in Python needs none of it."""

DOCS = ["mkdocs-material", "mkdocstrings[python]"]
"""For ``make docs``, which makes a site of the manual."""

setup(
    name="megabit",
    version=version(),
    description="Train and serve ternary language models (BitNet b1.58) with TP x PP x DP",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The megabit authors",
    license="Apache-2.0",
    keywords="BitNet ternary quantization language-model tensor-parallel pipeline-parallel",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=[
        "megabit.examples",
        *find_packages(".", include=["megabit", "megabit.*"]),
        *find_packages("kernels", include=["megabit_kernels", "megabit_kernels.*"]),
    ],
    package_dir={
        "megabit": "megabit",
        "megabit.examples": "examples",
        "megabit_kernels": "kernels/megabit_kernels",
    },
    package_data={
        "": ["py.typed", "assets/*", "tuned/*.json"],
        "megabit.examples": [f"**/*.{kind}" for kind in ("json", "py", "sbatch", "sh", "yaml")],
    },
    ext_modules=[native_extension("kernels/csrc", "megabit_kernels")],
    cmdclass={"bdist_wheel": AnyPython, "build_ext": BuildNative},
    entry_points={"console_scripts": ["megabit = megabit.cli.main:main"]},
    install_requires=[
        "torch>=2.11",
        # Where Triton publishes wheels; elsewhere the plain CPU path is the only one.
        'triton; platform_system == "Linux" and platform_machine in "x86_64 aarch64"',
        "einops",
        "omegaconf>=2.4",  # Literal in structured configs
        "PyYAML",
        "numpy",
        "tokenizers",
        "gguf",
        "safetensors",
        "rich",
        "typer",
        "matplotlib",
        "pyarrow",
    ],
    extras_require={
        "telemetry": TELEMETRY,
        "lm-eval": LM_EVAL,
        "serve": SERVE,
        "docs": DOCS,
        "dev": [
            *TELEMETRY,
            *SERVE,
            *DOCS,
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            # What exports are read with: the other side of the interchange.
            "transformers>=5.16",
            "accelerate",
            *LM_EVAL,
            # What talks to the server, as its users' tools do.
            "openai",
            "lm_eval[api]",
            "httpx2",
            "websockets",
            "ruff",
            "mypy",
            "types-PyYAML",
        ],
    },
)
