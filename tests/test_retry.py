"""What is tried again, how often, and what is not."""

import errno
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megabit.checkpoint.folder import CheckpointFolder, Retention
from megabit.checkpoint.manifest import MANIFEST
from megabit.data.corpus import read_manifest
from megabit.errors import UserError
from megabit.faults.drills import failing_storage
from megabit.retry import Retry, is_transient, retrying


def failing(error: Exception, times: int) -> Callable[[], str]:
    """Raises ``error`` so often, and then gives a result."""
    left = [error] * times

    def do() -> str:
        if left:
            raise left.pop()
        return "done"

    return do


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET])
def test_what_passes_is_tried_again(number: int) -> None:
    alerts: list[str] = []
    pauses: list[float] = []
    result = retrying(
        failing(os_error(number), 2), "reading x", 3, 10.0, alerts.append, pauses.append
    )
    assert result == "done"
    assert pauses == [10.0, 10.0]
    reason = os.strerror(number)
    assert alerts == [f"reading x failed ({reason}); retry {i} of 3 in 10 s" for i in (1, 2)]


def test_not_for_ever() -> None:
    alerts: list[str] = []
    with pytest.raises(OSError, match="Input/output error"):
        retrying(failing(os_error(errno.EIO), 9), "x", 3, 0.0, alerts.append)
    assert len(alerts) == 3
    with pytest.raises(OSError, match="Input/output error"):
        retrying(failing(os_error(errno.EIO), 1), "x", 0, 0.0, alerts.append)
    assert len(alerts) == 3


@pytest.mark.parametrize(
    "error",
    [
        *map(os_error, (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.ENOENT, errno.EROFS)),
        os_error(errno.EFBIG),
        RuntimeError("a collective"),
        UserError("a file: is damaged"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_another_try_cannot_mend_fails_at_once(error: BaseException) -> None:
    def do() -> None:
        raise error

    alerts: list[str] = []
    with pytest.raises(type(error)) as caught:
        retrying(do, "x", 3, 0.0, alerts.append)
    assert caught.value is error
    assert alerts == []


def test_an_error_in_words_has_the_cause_of_its_cause() -> None:
    """Most readers make a line for people of an OSError."""

    def read() -> None:
        try:
            raise os_error(errno.ESTALE)
        except OSError as error:
            raise UserError("x: cannot read it") from error

    with pytest.raises(UserError) as caught:
        read()
    assert is_transient(caught.value)


def test_nobody_at_the_rendezvous_yet() -> None:
    """What torch's store raises where no server listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(RuntimeError) as caught:
        dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
    assert is_transient(caught.value)


def test_a_name_that_nobody_has_yet() -> None:
    """Of a pod that has not started."""
    with pytest.raises(socket.gaierror) as caught:
        socket.getaddrinfo("nowhere.invalid", 1)
    assert is_transient(caught.value)


def test_a_drill_is_met_by_one_try() -> None:
    faults: list[AbstractContextManager[None]] = [nullcontext(), failing_storage()]
    alerts: list[str] = []
    retry = Retry(3, 0.0, alerts.append, around=lambda: faults.pop())
    assert retry(lambda: "done", "writing x") == "done"
    assert alerts == ["writing x failed (Input/output error); retry 1 of 3 in 0 s"]


def test_a_checkpoint_that_was_renamed_is_published_by_the_next_try(tmp_path: Path) -> None:
    """A try may fail between the rename and the move of ``latest``."""
    folder = CheckpointFolder(tmp_path)
    draft = folder.draft(5, "a")
    draft.mkdir()
    (draft / MANIFEST).write_text("{}")
    draft.rename(folder.of_step(5))  # as far as the first try came
    assert folder.publish(draft, 5, Retention()) == folder.of_step(5)
    assert folder.latest() == folder.of_step(5)
    with pytest.raises(FileNotFoundError):
        folder.publish(folder.draft(6, "a"), 6, Retention())
    assert folder.latest() == folder.of_step(5)


def test_a_manifest_that_cannot_be_read_is_not_a_missing_one(tmp_path: Path) -> None:
    """Else a corpus on a disk that hiccups would be called none."""
    assert read_manifest(tmp_path) is None
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(UserError, match=r"manifest.json: cannot read it \(Is a directory\)"):
        read_manifest(tmp_path)
