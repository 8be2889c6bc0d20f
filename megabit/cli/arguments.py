"""Arguments that several subcommands share."""

from typing import Annotated, Optional

import typer

Settings = Annotated[
    Optional[list[str]],
    typer.Argument(
        metavar="SETTINGS",
        help="YAML files and key=value pairs, merged left to right; 'megabit config' lists all keys.",
        show_default=False,
    ),
]
