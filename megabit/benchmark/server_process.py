"""A server of this machine, for as long as it is measured."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megabit.benchmark.http_stream import Address, get_json
from megabit.errors import RunError, UserError

_LOADING_S = 600.0
_STOPPING_S = 60.0


@contextmanager
def served(checkpoint: Path, settings: Sequence[str]) -> Iterator[str]:
    """``megabit serve`` on a free port, once it is ready; its URL. It logs to standard error.

    Raises:
        RunError: it did not start; it has said why.
    """
    command = [sys.executable, "-m", "megabit", "serve", str(checkpoint), "server.port=0"]
    process = subprocess.Popen(
        [*command, *settings, "--quiet"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        url = next((word for word in line.split() if word.startswith("http://")), None)
        if url is None:
            raise RunError(f"megabit serve {checkpoint}: ended with {process.wait()}")
        _wait_until_ready(process, url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(_STOPPING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _wait_until_ready(process: subprocess.Popen[str], url: str) -> None:
    end = time.monotonic() + _LOADING_S
    while process.poll() is None and time.monotonic() < end:
        try:
            asyncio.run(get_json(Address.of(url), "/ready", {}))
            return
        except UserError:  # not yet
            time.sleep(0.1)
    raise RunError(f"megabit serve: was not ready at {url}")
