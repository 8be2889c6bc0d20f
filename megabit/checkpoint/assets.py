"""Small files that travel with a model: its tokenizer, and what other tools want kept."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from megabit.checkpoint.manifest import ASSETS
from megabit.errors import UserError
from megabit.files import FileInfo, describe_file, sync


def copy_assets(assets: Mapping[str, Path], checkpoint: Path) -> dict[str, FileInfo]:
    """Copy ``assets`` into a checkpoint's folder, durably; returns them by path in it.

    Raises:
        UserError: one is not there.
    """
    if not assets:
        return {}
    folder = checkpoint / ASSETS
    folder.mkdir()
    for name, path in assets.items():
        if not path.is_file():
            raise UserError(f"{path}: is missing; it belongs to the model")
        shutil.copyfile(path, folder / name)
        sync(folder / name)
    sync(folder)
    return {f"{ASSETS}/{name}": describe_file(folder / name) for name in assets}
