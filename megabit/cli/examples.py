"""``megabit examples``: the YAML files and scripts that the documents speak of, for those who have
installed megabit and have no repository."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from megabit.checkpoint.new_folder import new_folder

HOMES = (Path(__file__).parents[1] / "examples", Path(__file__).parents[2] / "examples")
"""Where they are: in an installed package, or in a repository. Nowhere else is a copy of them."""


def examples(
    folder: Annotated[Path, typer.Argument(help="Where to write the folder examples.")] = Path(),
) -> None:
    """Write the folder examples: settings of models, layouts, recipes and sites, and scripts.

    Commands of the documents, such as megabit train examples/model/tiny.yaml, then work as they
    stand. The scripts in it keep data/ and runs/ beside it.

    Example: megabit examples
    """
    source = next(home for home in HOMES if home.is_dir())
    target = folder / "examples"
    with new_folder(target) as draft:
        shutil.copytree(
            source, draft, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
        )
    kinds = sorted(path.name for path in target.iterdir() if path.is_dir())
    print(f"{target}: {', '.join(kinds)}, and scripts")
