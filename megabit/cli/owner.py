"""``megabit owner``: the process that keeps the islands of a stale-synchronous run together."""

import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from megabit.cli.arguments import Settings
from megabit.cli.signals import on_signals
from megabit.config import load_config
from megabit.errors import UserError


def owner(
    settings: Settings = None,
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to listen; default: 127.0.0.1 and the port of outer.owner. There is no "
            "authentication: other addresses are for private networks.",
            show_default=False,
        ),
    ] = None,
    state: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Where the outer weights are kept (safetensors); goes on from there if it exists.",
        ),
    ] = Path("outer.safetensors"),
    save_every: Annotated[
        int, typer.Option(help="Rounds from one save to the next; more than 1 can be lost.", min=1)
    ] = 1,
) -> None:
    """Own the outer weights of islands that train with outer.method=stale (experimental).

    Start it before the islands, with the same settings; it ends when all of them have finished.
    SIGTERM or Ctrl-C: it writes FILE and ends with 0; the same command goes on from there.

    Example: megabit owner run.yaml outer.method=stale outer.islands=2 outer.owner=10.0.0.1:7000
    --bind 10.0.0.1:7000 --state runs/outer.safetensors
    """
    config = load_config(settings or [])
    if config.outer.method != "stale":
        raise UserError(f"outer.method: an owner is for stale, not {config.outer.method}")

    import torch

    from megabit.outer.owner import Owner
    from megabit.outer.owner_link import split_address

    torch.set_num_threads(1)  # a round takes milliseconds, and who trains here needs the cores
    stop = threading.Event()
    default = f"127.0.0.1:{split_address(str(config.outer.owner))[1]}"
    with (
        on_signals((signal.SIGTERM, signal.SIGINT), lambda number: stop.set()),
        _listen(bind or default) as listener,
    ):
        process = Owner(config, state, save_every, _say)
        host, port = listener.getsockname()[:2]
        _say(f"listens on {host}:{port} for {config.outer.islands} islands; state in {state}")
        if not ipaddress.ip_address(host).is_loopback:
            _say("no authentication: whoever reaches this port can take part; keep it private")
        is_over = process.serve(listener, stop)
    _say("all islands have finished" if is_over else f"stopped; the same command goes on: {state}")
    sys.exit(0)


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} owner: {line}", flush=True)


def _listen(address: str) -> socket.socket:
    """A socket that listens on ``host:port``."""
    from megabit.outer.owner_link import split_address

    try:
        host, port = split_address(address)
    except ValueError as error:
        raise UserError(f"--bind: {error}, such as 127.0.0.1:7000") from error
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family)
    except OSError as error:
        # create_server has added the address to strerror; numbers of getaddrinfo are negative.
        is_systems = error.errno is not None and error.errno > 0
        reason = os.strerror(error.errno or 0) if is_systems else error.strerror
        raise UserError(
            f"--bind: cannot listen on {address} ({reason}); "
            "name an address of this host and a free port"
        ) from error
