"""A model goes through import and export without being in memory."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megabit.checkpoint.source import logical_tensors
from megabit.config import ModelConfig
from megabit.interop.huggingface import HuggingFaceSource, export_huggingface
from tests.interop.random_source import TINY, RandomSource

MODEL = ModelConfig(
    vocab_size=2000,
    hidden_size=2048,
    intermediate_size=4096,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
)
LARGEST = 4 * MODEL.hidden_size * MODEL.intermediate_size


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def export_all(folder: Path) -> None:
    """Write the model in each form, from the one before; prints how much the peak rose by each."""
    export_huggingface(RandomSource(TINY), folder / "tiny")  # loads what exports need
    before = peak_bytes()
    forms = (
        ("online", "autobitlinear", "bfloat16"),
        ("offline", "autobitlinear", "float32"),
        ("offline", "bitlinear", "bfloat16"),
    )
    path = folder / "masters"
    for number, form in enumerate(forms):
        source = HuggingFaceSource(path)
        source.verify()
        path = folder / str(number)
        export_huggingface(source, path, *form, max_shard_bytes=100 << 20)
        print(peak_bytes() - before)


@pytest.mark.slow
def test_peak_memory_is_that_of_two_tensors(tmp_path: Path) -> None:
    export_huggingface(RandomSource(MODEL), tmp_path / "masters", "online", dtype="float32")
    total = sum(torch.Size(tensor.shape).numel() for tensor in logical_tensors(MODEL).values())
    assert 4 * total > 250 << 20
    script = (
        "import sys; from pathlib import Path; "
        "from tests.interop.test_huggingface_memory import export_all; "
        "export_all(Path(sys.argv[1]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        # So that memory that was freed is the system's again: glibc would keep up to 64 MiB of it.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rises = [int(line) for line in run.stdout.split()]
    assert len(rises) == 3
    # A tensor as it is stored, as it is written, and pieces below a MiB that glibc keeps.
    assert max(rises) <= 2 * LARGEST + (16 << 20)
