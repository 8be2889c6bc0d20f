"""The small files that travel with a run's model: its tokenizer, and what it was imported with."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from megabit.data.corpus import TOKENIZER, CorpusInfo


def keep_assets(folder: Path, corpus: CorpusInfo, inherited: Mapping[str, Path]) -> None:
    """Copy them into ``folder``, in place of what is there: what they come from may go away.

    Args:
        inherited: of the model that the run begins with or goes on from. They belong to its
            tokenizer; with another one, there is only that.

    Raises:
        OSError: they cannot be copied.
    """
    assets = {TOKENIZER: corpus.tokenizer_path}
    if TOKENIZER in inherited and _same_json(inherited[TOKENIZER], corpus.tokenizer_path):
        assets = {**inherited, **assets}
    draft = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    for name, path in assets.items():
        shutil.copyfile(path, draft / name)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


def kept_assets(folder: Path) -> dict[str, Path]:
    """By name."""
    return {path.name: path for path in sorted(folder.iterdir())}


def _same_json(path: Path, other: Path) -> bool:
    try:
        first, second = (json.loads(file.read_text(encoding="utf-8")) for file in (path, other))
    except ValueError:  # what others wrote
        return False
    return bool(first == second)
