"""Arguments that several subcommands share."""

from pathlib import Path
from typing import Annotated

import typer

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SETTINGS",
        help="YAML files and key=value pairs, merged from left to right; 'megabit config' lists "
        "all keys.",
        show_default=False,
    ),
]

ServingSettings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SETTINGS",
        help="YAML files and key=value pairs, merged from left to right; 'megabit config "
        "--serving' lists all keys.",
        show_default=False,
    ),
]

ModelPath = Annotated[
    Path,
    typer.Argument(
        metavar="CKPT",
        help="A checkpoint, a run's folder (then its newest checkpoint), or a folder of "
        "Hugging Face's.",
        show_default=False,
    ),
]
