"""``megabit serve``: a model behind the OpenAI API."""

import logging
import sys
from typing import Annotated

import typer

from megabit.cli.arguments import ModelPath, ServingSettings


def serve(
    ckpt: ModelPath,
    settings: ServingSettings = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Do not print a line for each request.")
    ] = False,
) -> None:
    """Serve a model over HTTP, computed by tp × pp processes of this host.

    Routes: POST /v1/completions and /v1/chat/completions (streaming, too), GET /v1/models, /health,
    /ready, /metrics, /version, and a page to chat with the model at /. SETTINGS are those of
    parallel.tp, parallel.pp, parallel.layers_per_stage, parallel.row_reduce, engine.\\* and
    server.\\*. SIGTERM or Ctrl-C ends requests under way first, a second one does not.

    Example: megabit serve runs/default parallel.tp=2 server.port=8000
    """
    from megabit.serving.start import serve_model

    log_to_stderr(quiet)
    sys.exit(serve_model(ckpt, settings or [], _announce))


def _announce(name: str, url: str) -> None:
    print(f"Serving {name} at {url} (loading the model)", flush=True)


def log_to_stderr(quiet: bool) -> None:
    """What the server has to say."""
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    logging.getLogger("megabit.serving").setLevel(logging.WARNING if quiet else logging.INFO)
