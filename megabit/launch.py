"""Run a function on several ranks of this host, as forked processes that talk over gloo.

For ``megabit parity`` and for tests. Training jobs are started by torchrun instead, so that they
can span hosts.
"""

import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megabit.errors import RunError, UserError
from megabit.mesh import process_group
from megabit_kernels.allocator import keep_freed_memory

T = TypeVar("T")

CAUSE_S = 0.3
"""How long to listen for what made a rank fail: another one that died or failed before it."""


class RankError(RunError):
    """A rank failed; the message holds its number and traceback."""


def run_ranks(function: Callable[[], T], world_size: int, timeout_s: float = 300) -> list[T]:
    """Call ``function`` on each of ``world_size`` ranks; returns what each rank returned.

    Ranks are forks of this process, so ``function`` may be a closure over anything; what it returns
    must be picklable. Each rank computes with one thread, which keeps results repeatable. When one
    rank fails the others are killed and ``RankError`` carries its traceback.
    """
    # Every optimizer imports this. Here once, it takes a second; in each rank, seconds for all.
    importlib.import_module("torch._dynamo")
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        init_method = f"file://{Path(folder) / 'rendezvous'}"
        readers: dict[Connection, int] = {}
        ranks = []
        for rank in range(world_size):
            reader, writer = fork.Pipe(duplex=False)
            process = fork.Process(
                target=_rank_main,
                args=(function, rank, world_size, init_method, timeout_s, writer),
            )
            process.start()
            writer.close()
            readers[reader] = rank
            ranks.append(process)
        try:
            return _collect(readers, world_size)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(readers: dict[Connection, int], world_size: int) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[float, str]] = []
    # Ranks that lose a peer fail as well, so the first failure heard of need not be the cause.
    while readers:
        ready = wait(list(readers), timeout=CAUSE_S if failures else None)
        if not ready:
            break
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = readers.pop(reader)
            try:
                ended_at, ok, value = pickle.loads(reader.recv_bytes())
            except (EOFError, OSError):
                failures.append((0, f"rank {rank} died without a word"))
                continue
            if ok:
                results[rank] = value
            else:
                failures.append((ended_at, f"rank {rank} failed:\n{value}"))
    if failures:
        raise RankError(min(failures)[1])
    return [results[rank] for rank in range(world_size)]


def _rank_main(
    function: Callable[[], Any],
    rank: int,
    world_size: int,
    init_method: str,
    timeout_s: float,
    writer: Connection,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        with process_group(
            rank, world_size, torch.device("cpu"), init_method, timedelta(seconds=timeout_s)
        ):
            try:
                _send(writer, True, function())
                if world_size > 1:
                    # Others may still be connecting to this rank: leaving now would fail them.
                    with suppress(RuntimeError):
                        dist.barrier()
            except BaseException as error:
                # Before the group closes, which makes other ranks fail.
                _send(writer, False, _describe(error))
    except BaseException as error:
        _send(writer, False, _describe(error))
    finally:
        writer.close()
        # Skip the parent's exit handlers, which a fork would run a second time.
        os._exit(0)


def _describe(error: BaseException) -> str:
    """What the parent is told: a message meant for people as it is, else the traceback."""
    if isinstance(error, UserError | RunError):
        return str(error)
    return "".join(traceback.format_exception(error))


def _send(writer: Connection, ok: bool, value: Any) -> None:
    # Not writer.send(): torch would share the memory of tensors, which ends with this process.
    writer.send_bytes(pickle.dumps((time.monotonic(), ok, value)))
