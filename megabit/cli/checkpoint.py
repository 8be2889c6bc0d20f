"""``megabit ckpt``: what checkpoints hold, and whether they are what was saved."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megabit.cli.progress import bar
from megabit.config import Config, leaves
from megabit.errors import UserError
from megabit.units import file_size_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from megabit.checkpoint import CheckpointFolder, Manifest, TensorReader

app = typer.Typer(no_args_is_help=True)

KINDS = {
    "training": "training: masters and moments; a run goes on from it, at any layout",
    "ternary": "ternary: codes, scales and dense weights, to evaluate and export; "
    "it cannot resume a run",
}

Path_ = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="A checkpoint, a folder of checkpoints, or a run's folder.",
        show_default=False,
    ),
]


@app.callback()
def ckpt() -> None:
    """Look at checkpoints and check them.

    Example: megabit ckpt show runs/default

    Example: megabit ckpt verify runs/default/checkpoints
    """


@app.command("show")
def show(
    path: Path_,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Also list every tensor and its parts.")
    ] = False,
) -> None:
    """Print what is in a checkpoint; of a folder of several, list them.

    Reads headers only: whether all bytes are what was saved is for megabit ckpt verify.

    Example: megabit ckpt show runs/default/checkpoints/step_00000100 --tensors
    """
    from rich.console import Console

    from megabit.checkpoint.folder import checkpoint_folders, find_checkpoint
    from megabit.checkpoint.manifest import MANIFEST

    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:  # nothing to fit a table into
        console = Console(markup=False, highlight=False, emoji=False, width=1000)
    folders = [folder for folder in checkpoint_folders(path) if folder.steps()]
    if folders and not (path / MANIFEST).is_file() and not tensors:
        for folder in folders:
            console.print(f"{folder.path}", style="bold", soft_wrap=True)
            console.print(_list(folder))
        return
    _show(find_checkpoint(path), tensors, console)


@app.command("verify")
def verify(path: Path_) -> None:
    """Read every byte of a checkpoint, or of all that are in a folder, and compare hashes, names,
    shapes and dtypes with what was saved.

    Exits with 2 and a line for each problem if there is any.

    Example: megabit ckpt verify runs/default
    """
    from megabit.checkpoint import Manifest
    from megabit.checkpoint.diagnose import diagnose
    from megabit.checkpoint.folder import checkpoint_folders, find_checkpoint
    from megabit.checkpoint.manifest import MANIFEST

    problems: list[str] = []
    checkpoints, folders = [path], list["CheckpointFolder"]()
    if not (path / MANIFEST).is_file():
        folders = checkpoint_folders(path)
        checkpoints = [f.of_step(step) for f in folders for step in f.steps()]
        for folder in folders:  # what ``latest`` names is to be there, whatever else is
            try:
                latest = folder.latest()
            except UserError as error:
                problems += error.problems
                continue
            if latest is not None and latest not in checkpoints:
                checkpoints.append(latest)
        checkpoints = checkpoints or ([] if problems else [find_checkpoint(path)])
    total = max(1, sum(_size(checkpoint) for checkpoint in checkpoints))
    done = 0
    with bar() as progress:
        for checkpoint in checkpoints:

            def report(name: str, size: int, of: Path = checkpoint) -> None:
                nonlocal done
                progress(f"{of.name}/{name}", done / total)
                done += size

            new = diagnose(checkpoint, report)
            if new and not checkpoint.exists() and checkpoint not in _named(folders):
                continue  # a run that goes on has removed it meanwhile
            problems += new
            if not new:
                manifest = Manifest.read(checkpoint)
                size = sum(file.bytes for file in manifest.files.values())
                files = len(manifest.files) + 1
                print(
                    f"in order: {checkpoint}, {manifest.kind}, step {manifest.step}, "
                    f"{files} files, {file_size_text(size)}",
                    flush=True,
                )
    if problems:
        raise UserError(*problems)


def _named(folders: "list[CheckpointFolder]") -> list[Path | None]:
    """What ``latest`` says now."""
    named: list[Path | None] = []
    for folder in folders:
        with suppress(UserError):
            named.append(folder.latest())
    return named


def _size(checkpoint: Path) -> int:
    """What there is to read; 0 if nobody knows."""
    from megabit.checkpoint import Manifest

    try:
        return sum(file.bytes for file in Manifest.read(checkpoint).files.values())
    except UserError:
        return 0


# What ``show`` prints.


def _list(folder: "CheckpointFolder") -> "Table":
    from megabit.checkpoint import Manifest

    try:
        latest = folder.latest()
    except UserError as error:
        latest = None
        print(f"{error}")
    table = _table("step", "kind", "size", "saved by", "")
    for step in sorted(folder.steps()):
        path = folder.of_step(step)
        mark = "latest" if path == latest else ""
        try:
            manifest = Manifest.read(path)
        except UserError as error:
            table.add_row(str(step), "damaged", "", "", f"{mark} {error}".strip())
            continue
        size = file_size_text(sum(file.bytes for file in manifest.files.values()))
        table.add_row(str(step), manifest.kind, size, _layout(manifest), mark)
    return table


def _show(path: Path, lists_tensors: bool, console: "Console") -> None:
    from megabit.checkpoint import Manifest
    from megabit.checkpoint.reader import TensorReader
    from megabit.checkpoint.verify import MoreTensors, expected_tensors, optimizer_of

    manifest = Manifest.read(path)
    console.print(f"{path}", style="bold", soft_wrap=True)
    for key, value in _facts(manifest):
        console.print(f"{key:<16}  {value}", soft_wrap=True)
    table = _table("file", "size", "SHA-256")
    for name, file in manifest.files.items():
        table.add_row(name, file_size_text(file.bytes), file.sha256[:16])
    console.print(table)
    with TensorReader(path) as reader:
        # In the order of the forward pass; names that are none of the model's come last.
        optimizer = optimizer_of(manifest)
        more = MoreTensors.of(manifest)
        known = expected_tensors(manifest.kind, manifest.model, optimizer=optimizer, more=more)
        names = [
            *(n for n in known if n in reader.tensors),
            *(reader.tensors.keys() - known.keys()),
        ]
        console.print(_tensor_groups(reader, names))
        if lists_tensors:
            console.print(_all_tensors(reader, names))


def _facts(manifest: "Manifest") -> Iterator[tuple[str, str]]:
    from megabit.model.words import model_text

    run = manifest.run
    yield "kind", KINDS[manifest.kind]
    yield "step", f"{manifest.step}, {manifest.updates} updates of the weights"
    yield "model", model_text(manifest.model)
    yield "positions", f"{manifest.max_length}"
    yield "saved by", _layout(manifest)
    for key, value in run.items():
        if key == "config":
            changed = _differences(value)
            yield "settings", " ".join(changed) if changed else "all as by default"
        elif key != "layout":
            yield key.replace("_", " "), str(value)


def _layout(manifest: "Manifest") -> str:
    layout = manifest.run.get("layout")
    if not isinstance(layout, Mapping):
        return "one process"
    return " × ".join(f"{str(axis).upper()} {size}" for axis, size in layout.items())


def _differences(saved: Any) -> list[str]:
    """Settings beside the model's that are not as by default, as one would write them."""
    if not isinstance(saved, Mapping):
        return []
    defaults = dict(leaves(asdict(Config())))
    return [
        f"{key}={value}"
        for key, value in leaves(saved)
        if not key.startswith("model.") and value != defaults.get(key)
    ]


def _tensor_groups(reader: "TensorReader", names: Sequence[str]) -> "Table":
    """How much there is of masters, moments, codes, scales and dense weights."""
    from megabit.checkpoint.verify import CODES, SCALE

    groups: dict[tuple[str, str], tuple[int, int]] = {}
    for name in names:
        kind = name.split("/")[0] if "/" in name else name.rpartition(".")[2]
        label = kind if "/" in name or kind in (CODES, SCALE) else "dense"
        size = prod(reader.shape(name)) * reader.dtype(name).itemsize
        key = label, _dtype(reader, name)
        count, total = groups.get(key, (0, 0))
        groups[key] = count + 1, total + size
    table = _table("what", "tensors", "dtype", "size")
    for (label, dtype), (count, size) in groups.items():
        note = ", four to a byte" if label == CODES else ""
        table.add_row(label + note, str(count), dtype, file_size_text(size))
    return table


def _all_tensors(reader: "TensorReader", names: Sequence[str]) -> "Table":
    table = _table("tensor", "dtype", "shape", "parts")
    for name in names:
        info = reader.tensors[name]
        parts = str(len(info.chunks))
        table.add_row(name, _dtype(reader, name), str(list(info.size)), parts)
    return table


def _dtype(reader: "TensorReader", name: str) -> str:
    return str(reader.dtype(name)).removeprefix("torch.")


def _table(first: str, *headings: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        right = heading in ("size", "tensors", "parts")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    return table
