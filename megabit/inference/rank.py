"""``python -m megabit.inference.rank``: one rank process of an engine, see ``ranks``."""

import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from megabit.errors import RunError, UserError
from megabit.inference.messages import (
    AbortRequest,
    AddRequest,
    Failed,
    Message,
    Stop,
    decode,
    encode,
)
from megabit.inference.ranks import RankJob

if TYPE_CHECKING:
    from megabit.inference.session import EngineSession

REPORT_S = 1.0
"""Between reports, whatever happens."""
READ_BYTES = 1 << 20


def main() -> None:
    """Run the rank that the command line describes; exits with 1 if it fails."""
    job = RankJob(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started the ranks decides what it means
    threading.Thread(target=_end_with, args=(job.lifeline,), daemon=True).start()
    connection = None if job.socket is None else socket(fileno=job.socket)
    code = 0
    try:
        _run(job, connection)
    except BaseException as error:
        code = 1
        text = _described(error, job)
        job.error_file.write_text(text, encoding="utf-8")
        if connection is not None:
            with suppress(OSError):
                connection.sendall(encode(Failed(text, isinstance(error, UserError))))
    # Not by way of exit handlers: those of torch take a second, and wait for ranks that are dead.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(job: RankJob, connection: socket | None) -> None:
    import torch

    from megabit.inference.device import device_of_rank
    from megabit.inference.start import start_core
    from megabit.mesh import TIMEOUT, ParallelMesh, process_group
    from megabit_kernels.allocator import keep_freed_memory

    serving = job.serving
    torch.set_num_threads(job.threads)
    keep_freed_memory()
    device = device_of_rank(serving.engine.device, job.rank, job.world_size)
    waits = timedelta(seconds=serving.engine.timeout_s)
    # Loading may take one rank long while the others wait on the world's group; nothing else does.
    with process_group(job.rank, job.world_size, device, f"file://{job.rendezvous}", TIMEOUT):
        mesh = ParallelMesh.create(serving.parallel.tp, serving.parallel.pp, device, waits)
        try:
            started = start_core(Path(job.checkpoint), serving, mesh)
            if connection is None:
                started.core.follow()
            else:
                session = started.session()
                connection.sendall(encode(session.ready(started.description)))
                _serve(session, connection)
        finally:
            mesh.close()


def _serve(session: "EngineSession", connection: socket) -> None:
    """Requests in, answers and reports out, until ``Stop``."""
    connection.setblocking(False)
    buffer = bytearray()
    next_report = 0.0
    while True:
        wait = 0.0 if session.has_work else max(0.0, next_report - time.monotonic())
        answers: list[Message] = []
        for message in _received(connection, buffer, wait):
            if isinstance(message, Stop):
                session.end()
                return
            if isinstance(message, AddRequest | AbortRequest):
                answers += session.handle(message)
        if session.has_work:
            answers += session.step()
        if time.monotonic() >= next_report:
            answers.append(session.stats())
            next_report = time.monotonic() + REPORT_S
        if answers:
            connection.setblocking(True)
            connection.sendall(b"".join(map(encode, answers)))
            connection.setblocking(False)


def _received(connection: socket, buffer: bytearray, wait_s: float) -> list[Message]:
    """Messages that are there, or come within ``wait_s``; what is left of a line stays in
    ``buffer``."""
    readable, _, _ = select.select([connection], [], [], wait_s)
    if not readable:
        return []
    while True:
        try:
            data = connection.recv(READ_BYTES)
        except BlockingIOError:
            break
        if not data:
            return [Stop()]
        buffer += data
        if len(data) < READ_BYTES:
            break
    *lines, rest = bytes(buffer).split(b"\n")
    buffer[:] = rest
    return [decode(line) for line in lines]


def _end_with(lifeline: int) -> None:
    """End when whoever started this process has."""
    with suppress(OSError):
        os.read(lifeline, 1)
    os._exit(0)


def _described(error: BaseException, job: RankJob) -> str:
    """For people: what is wrong with the input as it is, else with the rank's number."""
    if isinstance(error, UserError | RunError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:500]
    print("".join(traceback.format_exception(error)), file=sys.stderr)
    return (
        f"rank {job.rank} of {job.world_size} failed: {type(error).__name__}: {text} "
        f"({Path(last.filename).name}:{last.lineno})"
    )


if __name__ == "__main__":
    main()
