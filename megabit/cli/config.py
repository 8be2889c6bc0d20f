"""``megabit config``: print the resolved configuration."""

from typing import Annotated

import typer

from megabit.cli.arguments import Settings
from megabit.config import load_config, load_serving_config, to_yaml
from megabit.errors import UserError


def show_config(
    settings: Settings = None,
    world_size: Annotated[
        int | None, typer.Option(help="Also check the layout against this many ranks.", min=1)
    ] = None,
    serving: Annotated[
        bool, typer.Option("--serving", help="Settings of serve, generate and chat instead.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Check only, print nothing.")
    ] = False,
) -> None:
    """Merge and check SETTINGS, and print the whole tree with every default.

    Example: megabit config examples/model/tiny.yaml parallel.tp=2 --world-size 4
    """
    if serving and world_size is not None:
        raise UserError("--world-size: is parallel.tp · parallel.pp with --serving; leave it out")
    if serving:
        text = to_yaml(load_serving_config(settings or []))
    else:
        text = to_yaml(load_config(settings or [], world_size))
    if not quiet:
        print(text, end="")
