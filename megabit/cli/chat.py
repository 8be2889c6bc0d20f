"""``megabit chat``: a page to talk with a model."""

import sys
from typing import Annotated

import typer

from megabit.cli.arguments import ModelPath, ServingSettings
from megabit.cli.serve import log_to_stderr


def chat(
    ckpt: ModelPath,
    settings: ServingSettings = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Serve a page to chat with a model, on a free port of this machine; Ctrl-C ends it.

    SETTINGS are those of megabit serve, which this is, but for the port.

    Example: megabit chat runs/default --open
    """
    from megabit.serving.start import serve_model

    def announce(name: str, url: str) -> None:
        print(f"Chat with {name}: {url} (loading the model; Ctrl-C ends it)", flush=True)
        if open_page:
            typer.launch(url)

    log_to_stderr(quiet=False)
    sys.exit(serve_model(ckpt, ["server.port=0", *(settings or [])], announce))
