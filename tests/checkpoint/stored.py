"""Checkpoints of a very small model, made part by part without a training run, and processes that
are killed while they save them."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabit.checkpoint import (
    CheckpointStore,
    Manifest,
    Part,
    Retention,
    Saved,
    TensorReader,
)
from megabit.checkpoint.manifest import Kind
from megabit.checkpoint.tensor_file import LazyTensor, write_tensors
from megabit.checkpoint.verify import expected_tensors, verify
from megabit.config import ModelConfig
from megabit.files import describe_file
from megabit.mesh import ParallelMesh

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
PATIENCE_S = 60
"""For what takes no time at all, on a machine that is busy."""
CHANGES_DISK = (
    *("open", "write", "writelines", "fsync", "sendfile", "rename", "replace", "unlink", "remove"),
    *("mkdir", "rmdir", "link", "symlink", "truncate", "ftruncate"),
)
"""Functions of C that Python changes a disk with."""


def manifest(step: int, kind: Kind = "training", updates: int = 1) -> Manifest:
    """Without files."""
    return Manifest(kind, step, updates, MODEL, max_length=32, run={"note": "ä", "rates": [0.1]})


def tensors_of(step: int, kind: Kind = "training", updates: int = 1) -> dict[str, Tensor]:
    """All tensors of a checkpoint; other values at each step."""
    generator = torch.Generator().manual_seed(step)
    tensors = {}
    for name, shape in expected_tensors(kind, MODEL, updates > 0).items():
        values = torch.randn(shape, generator=generator)
        is_codes = name.endswith(".codes")
        tensors[name] = values.mul(50).to(torch.uint8) if is_codes else values
    return tensors


def parts_of(tensors: Mapping[str, Tensor], rank: int = 0, size: int = 1) -> list[Part]:
    """A rank's: matrices are cut by rows or by columns in turn, vectors too unevenly; what has no
    dimension goes to the last rank."""
    parts = []
    for number, (name, whole) in enumerate(tensors.items()):
        if whole.dim() == 0:
            if rank == size - 1:
                parts.append(Part(name, (), (), whole))
            continue
        dim = number % whole.dim()
        length = whole.shape[dim]
        begin, end = (length * r * (r + 1) // (size * (size + 1)) for r in (rank, rank + 1))
        if begin == end:  # of short tensors, ranks at the front have nothing
            continue
        offset = tuple(begin if d == dim else 0 for d in range(whole.dim()))
        parts.append(Part(name, tuple(whole.shape), offset, whole.narrow(dim, begin, end - begin)))
    return parts


def write_checkpoint(
    folder: Path,
    step: int,
    size: int = 1,
    kind: Kind = "training",
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:
    """The folder of a checkpoint that ``size`` ranks would have written."""
    folder.mkdir(parents=True)
    tensors = tensors_of(step, kind) if tensors is None else tensors
    for rank in range(size):
        parts = [LazyTensor.of(p.name, p.values, p.offset) for p in parts_of(tensors, rank, size)]
        write_tensors(folder / f"rank_{rank:05d}.safetensors", parts)
    sign(folder, manifest(step, kind))
    return folder


def sign(folder: Path, about: Manifest | None = None) -> None:
    """Make the manifest agree with the files that are there, whatever they are."""
    about = about or Manifest.read(folder)
    (folder / "manifest.json").unlink(missing_ok=True)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): describe_file(path) for path in paths}
    replace(about, files=files).write(folder)


def make_mesh() -> ParallelMesh:
    """Of the calling rank; all ranks are along TP."""
    if not dist.is_initialized():
        return ParallelMesh()
    return ParallelMesh.create(dist.get_world_size(), 1, torch.device("cpu"))


def make_store(folder: Path, retention: Retention | None = None) -> CheckpointStore:
    """On the calling rank."""
    return CheckpointStore(folder, make_mesh(), retention)


def own_parts(store: CheckpointStore, tensors: Mapping[str, Tensor]) -> list[Part]:
    return parts_of(tensors, store.mesh.world.rank, store.mesh.world.size)


def begin_save(store: CheckpointStore, step: int, assets: Mapping[str, Path] | None = None) -> None:
    """Of what ``tensors_of`` gives; nothing may be under way."""
    assert store.save(manifest(step), own_parts(store, tensors_of(step)), assets or {}) is None


def save(store: CheckpointStore, step: int, assets: Mapping[str, Path] | None = None) -> str | None:
    """Save and wait; returns the problem."""
    begin_save(store, step, assets)
    saved = store.finish()
    assert saved is not None
    return saved.problem


def poll_until_told(checkpoints: CheckpointStore) -> Saved:
    """In a world of one."""
    started = time.monotonic()
    while (saved := checkpoints.poll()) is None:
        assert time.monotonic() < started + PATIENCE_S
        time.sleep(0.001)
    return saved


def found_step(checkpoints: CheckpointStore) -> int:
    """Of the newest checkpoint, or -1."""
    found = checkpoints.find(falls_back=False, alert=pytest.fail)
    return -1 if found is None else found.manifest.step


def assert_holds(path: Path, step: int, kind: Kind = "training") -> None:
    """``path`` is a complete checkpoint of ``step`` with the values of ``tensors_of``."""
    checked = [*verify(path)]
    about = Manifest.read(path)
    assert (about.step, [*about.files]) == (step, checked)
    expected = tensors_of(step, kind)
    with TensorReader(path) as reader:
        assert reader.tensors.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(reader.read(name), values), name


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files in a folder, by path."""
    paths = [path for path in folder.rglob("*") if not path.is_dir()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@contextmanager
def killed_before(number: int, *functions: str) -> Iterator[None]:
    """Kill this process right before the ``number``-th call, from 1, of one of ``functions`` of C,
    in any thread that begins in the block, or in this one."""
    calls = count(1)

    def profile(frame: FrameType, event: str, function: Any) -> None:
        is_one = event == "c_call" and getattr(function, "__name__", "") in functions
        if is_one and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def dies_before(number: int, function: Callable[[], object]) -> bool:
    """Run ``function`` in a fork that is killed before its ``number``-th change of the disk;
    returns whether it came to that."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            with killed_before(number, *CHANGES_DISK):
                function()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False
