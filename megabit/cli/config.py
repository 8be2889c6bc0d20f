"""``megabit config``: print the resolved configuration."""

from typing import Annotated

import typer

from megabit.cli.arguments import Settings
from megabit.config import load_config, to_yaml


def show_config(
    settings: Settings = None,
    world_size: Annotated[
        int | None, typer.Option(help="Also check the layout against this many ranks.", min=1)
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Check only, print nothing.")
    ] = False,
) -> None:
    """Merge and check SETTINGS, and print the whole tree with every default.

    Example: megabit config examples/model/tiny.yaml parallel.tp=2 --world-size 4
    """
    config = load_config(settings or [], world_size)
    if not quiet:
        print(to_yaml(config), end="")
