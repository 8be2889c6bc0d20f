"""Save and load checkpoints: one safetensors file for each rank, and one JSON file about them all.

    checkpoints/latest                      the name of the newest complete one
    checkpoints/step_00000100/about.json    layout, step, config and whatever else the caller adds
    checkpoints/step_00000100/rank_00000.safetensors

A checkpoint is written under a temporary name, synced, renamed, and only then called the latest, so
a run that dies at any instant leaves the previous one in place. Nothing is unpickled.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megabit.errors import RunError, UserError
from megabit.mesh import ParallelMesh
from megabit.reduce import all_gather, first_problem

FORMAT = "megabit checkpoint"
VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    about: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.about["step"])


class CheckpointStore:
    """The checkpoints of one run. On several hosts, ``folder`` must be one they share."""

    def __init__(self, folder: Path, mesh: ParallelMesh) -> None:
        self.folder = folder
        self.mesh = mesh

    def save(self, step: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
        """Write a checkpoint of ``step``; collective over the whole mesh.

        Args:
            tensors: this rank's.
            about: JSON values that every rank has alike.

        Raises:
            RunError: on every rank, if any of them could not write; the previous checkpoint stands.
        """
        final = self.folder / f"step_{step:08d}"
        draft = final.with_name(final.name + ".tmp")
        try:
            self._together(f"{draft}: cannot create it", lambda: _new_folder(draft), main_only=True)
            own = draft / self._rank_file()
            self._together(f"{own}: cannot write it", lambda: _write_tensors(own, tensors))
            header = {
                "format": FORMAT,
                "version": VERSION,
                "step": step,
                "layout": self._layout(),
                "sha256": self._gather_digests(own),
            }
            self._together(
                f"{final}: cannot complete it",
                lambda: self._publish(draft, final, {**header, **about}),
                main_only=True,
            )
        except RunError:
            if self.mesh.is_main:
                shutil.rmtree(draft, ignore_errors=True)
            raise
        return final

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, or None if there is none; collective over the mesh.

        Raises:
            UserError: what ``latest`` names is missing or is not a checkpoint of this version, or
                hosts do not see the same one.
        """
        checkpoint: Checkpoint | None = None
        problem: str | None = None
        try:
            checkpoint = self._read_latest()
        except UserError as error:
            problem = str(error)
        self._refuse(problem)
        step = torch.tensor([-1 if checkpoint is None else checkpoint.step])
        steps = all_gather(step.to(self.mesh.device), self.mesh.world)
        if (steps != steps[0]).any():
            raise UserError(
                f"run.dir: hosts see different checkpoints in {self.folder}; "
                "it must be a folder that all of them share"
            )
        return checkpoint

    def check_layout(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of another layout."""
        saved, own = checkpoint.about.get("layout"), self._layout()
        if saved != own:
            raise UserError(
                f"{checkpoint.path}: was saved at {_format_layout(saved)}, this run is at "
                f"{_format_layout(own)}; resume at the same layout, or use another run.dir"
            )

    def load(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """This rank's tensors; collective over the whole mesh.

        Raises:
            UserError: on every rank, if the layout is not the one that wrote it, or any rank's file
                is missing or damaged.
        """
        self.check_layout(checkpoint)
        tensors: dict[str, Tensor] = {}
        problem: str | None = None
        path = checkpoint.path / self._rank_file()
        try:
            if _sha256(path).hex() != checkpoint.about["sha256"][self.mesh.world.rank]:
                raise ValueError("it is not what was saved: its checksum differs")
            tensors = load_file(path, device=str(self.mesh.device))
        except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
            problem = (
                f"{path}: cannot read it ({error}); "
                f"put the name of a complete checkpoint into {self.folder / 'latest'}"
            )
        self._refuse(problem)
        return tensors

    def _read_latest(self) -> Checkpoint | None:
        pointer = self.folder / "latest"
        try:
            name = pointer.read_text(encoding="utf-8").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        path = self.folder / name / "about.json"
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path}: cannot read it ({error}); "
                f"put the name of a complete checkpoint into {pointer}"
            ) from error
        ours = isinstance(about, dict) and about.get("format") == FORMAT
        if not ours or about.get("version") != VERSION or not isinstance(about.get("step"), int):
            raise UserError(
                f"{path}: is not a {FORMAT} of version {VERSION}; "
                f"put the name of a complete checkpoint into {pointer}"
            )
        return Checkpoint(path.parent, about)

    def _refuse(self, problem: str | None) -> None:
        """Raise on every rank what went wrong on any."""
        problem = first_problem(problem, self.mesh.world, self.mesh.device)
        if problem is not None:
            raise UserError(problem)

    def _gather_digests(self, own_file: Path) -> list[str]:
        """SHA-256 of every rank's file."""
        own = torch.frombuffer(bytearray(_sha256(own_file)), dtype=torch.uint8)
        digests = all_gather(own.unsqueeze(0).to(self.mesh.device), self.mesh.world)
        return [bytes(digest).hex() for digest in digests.tolist()]

    def _publish(self, draft: Path, final: Path, about: Mapping[str, Any]) -> None:
        files = len(list(draft.glob("rank_*.safetensors")))
        if files != self.mesh.world.size:
            raise OSError(
                f"has the files of {files} of {self.mesh.world.size} ranks; "
                "run.dir must be a folder that all hosts share"
            )
        _write_text(draft / "about.json", json.dumps(about, indent=2) + "\n")
        _sync(draft)
        if final.exists():  # this step was saved before, by a run that then went on from earlier
            shutil.rmtree(final)
        draft.rename(final)
        pointer = self.folder / "latest.tmp"
        _write_text(pointer, final.name + "\n")
        pointer.replace(self.folder / "latest")
        _sync(self.folder)

    def _together(self, what: str, action: Callable[[], object], main_only: bool = False) -> None:
        """Run ``action`` on every rank (or the main one) and fail on all if it fails on any."""
        problem: str | None = None
        if self.mesh.is_main or not main_only:
            try:
                action()
            except (OSError, SafetensorError) as error:
                problem = f"{what} ({error})"
        problem = first_problem(problem, self.mesh.world, self.mesh.device)
        if problem is not None:
            raise RunError(problem)

    def _rank_file(self) -> str:
        return _rank_file(self.mesh.world.rank)

    def _layout(self) -> dict[str, int]:
        return {"tp": self.mesh.tp.size, "pp": self.mesh.pp.size, "dp": self.mesh.dp.size}


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _format_layout(layout: Any) -> str:
    if not isinstance(layout, dict):
        return "an unknown layout"
    return " × ".join(f"{axis}={size}" for axis, size in layout.items())


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _new_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    _sync(path)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
