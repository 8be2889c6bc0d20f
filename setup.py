"""Packaging: two import packages, ``megabit`` (here) and ``megabit_kernels`` (in kernels/).

``make setup`` installs this with ``constraints.txt``, which holds the exact releases; the ranges
below are what the code needs.
"""

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "kernels"))

from native_build import BuildNative, native_extension  # noqa: E402


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

setup(
    name="megabit",
    version=version(),
    description="Train ternary language models (BitNet b1.58) in tensor, pipeline, data parallel",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        *find_packages(".", include=["megabit", "megabit.*"]),
        *find_packages("kernels", include=["megabit_kernels", "megabit_kernels.*"]),
    ],
    package_dir={
        "megabit": "megabit",
        "megabit_kernels": "kernels/megabit_kernels",
    },
    package_data={
        "megabit_kernels.triton": ["tuned/*.json"],
        "megabit.report": ["assets/*"],
        "megabit.serving": ["assets/*"],
    },
    ext_modules=[native_extension("kernels/csrc", "megabit_kernels")],
    cmdclass={"build_ext": BuildNative},
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
        "dev": [
            *TELEMETRY,
            *SERVE,
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
