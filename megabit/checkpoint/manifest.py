"""What a checkpoint is: the file that says which others belong to it, and what is in them.

    step_00000100/manifest.json             kind, step, model, files with their SHA-256
    step_00000100/rank_00000.safetensors    the parts of logical tensors that a rank wrote
    step_00000100/assets/tokenizer.json     what travels with the model

Two kinds: ``training`` holds masters and moments, in fp32, and is what a run goes on from;
``ternary`` holds 2-bit codes, scales and dense weights, a sixteenth of the masters' bytes, for
evaluation and serving. It cannot resume a run: codes say nothing of where the latent weights were.

The manifest is written last and carries a checksum of its own, so that whatever became of a folder,
it either proves that everything is as it was saved or names the file that is not.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from megabit.config import ModelConfig, config_from_tree
from megabit.errors import UserError
from megabit.files import FileInfo, write_text

FORMAT = "megabit checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
ASSETS = "assets"
CHECKSUM = "checksum"
NEVER_TERNARY = "imported dense"
"""In ``Manifest.run`` of weights that were not trained as a ternary model's so far."""
QUANTIZATION_SHARE = "quantization_share"
"""In ``Manifest.run``: λ of the weights that were saved. Without it, 1: they are ternary."""
MAX_BYTES = 1 << 28
"""A manifest is far smaller, whatever the model."""

Kind = Literal["training", "ternary"]


class DamagedCheckpoint(UserError):
    """A checkpoint is not what was saved."""


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint but the values."""

    kind: Kind
    step: int
    """Training steps done."""
    updates: int
    """How often weights were updated; steps that were skipped do not count. Moments are there after
    the first."""
    model: ModelConfig
    max_length: int
    """Positions that the model was made for."""
    files: Mapping[str, FileInfo] = field(default_factory=dict)
    """By path in the folder, all but the manifest."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that the trainer adds."""

    def assets(self, folder: Path) -> dict[str, Path]:
        """What travels with the model, by name; ``folder`` is the checkpoint's."""
        prefix = f"{ASSETS}/"
        names = [name for name in self.files if name.startswith(prefix)]
        return {name.removeprefix(prefix): folder / name for name in names}

    def write(self, folder: Path) -> None:
        """Write it into ``folder``, durably."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        content[CHECKSUM] = _checksum(content)
        write_text(folder / MANIFEST, json.dumps(content, indent=1) + "\n", durable=True)

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """The manifest of ``folder``; looks at no other file.

        Raises:
            DamagedCheckpoint: it is missing or not as it was written.
            UserError: it is of another version.
        """
        path = folder / MANIFEST
        if not path.exists() and (folder / "about.json").is_file():
            raise UserError(
                f"{folder}: is of version 1, which one layout alone could read; "
                f"this megabit reads version {VERSION}"
            )
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ValueError("it is too large")
            content = json.loads(path.read_text(encoding="utf-8"))
            checksum = _checksum(content)
        except (OSError, ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path}: cannot read it ({error})") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise DamagedCheckpoint(f"{path}: is not the manifest of a {FORMAT}")
        if content.get("version") != VERSION:
            raise UserError(
                f"{path}: is of version {content.get('version')!r}; "
                f"this megabit reads version {VERSION}"
            )
        if content.get(CHECKSUM) != checksum:
            raise DamagedCheckpoint(f"{path}: is not what was saved: its checksum differs")
        return _parse(content, path)


def _checksum(content: Any) -> str:
    """Of what a manifest holds beside it."""
    rest = {**content, CHECKSUM: None} if isinstance(content, dict) else content
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _parse(content: Mapping[str, Any], path: Path) -> Manifest:
    """The checksum is right; types are checked all the same, since anyone can compute one."""
    try:
        manifest = Manifest(
            kind=_one_of(content["kind"], ("training", "ternary")),
            step=_count(content["step"]),
            updates=_count(content["updates"]),
            model=config_from_tree({"model": content["model"]}, str(path)).model,
            max_length=_count(content["max_length"]),
            files={
                _inside(name): FileInfo(_count(info["bytes"]), str(info["sha256"]))
                for name, info in content["files"].items()
            },
            run=dict(content["run"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: is damaged ({error!r})") from error
    return manifest


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a count")
    return value


def _one_of(value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known:
        raise ValueError(f"{value!r} is none of {', '.join(known)}")
    return value


def _inside(name: str) -> str:
    """``name``, if it is a path inside the folder."""
    path = PurePosixPath(name)
    if not path.parts or not name.isprintable():  # a message that names it must be one line
        raise ValueError(f"{name!r} is not the name of a file")
    if path.is_absolute() or ".." in path.parts or path.as_posix() != name:
        raise ValueError(f"{name!r} is not a path inside the checkpoint")
    return name
