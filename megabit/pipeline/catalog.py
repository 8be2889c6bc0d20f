"""Schedules by name: our own, and functions of the user's, which are proved like ours.

A function of the user's is named as ``my_module:function`` or ``path/to/file.py:function``. It is
called with the numbers of ranks, microbatches and chunks, and returns a ``Schedule``, with messages
or without. ``examples/schedules`` has one to begin with.
"""

import importlib
import importlib.util
import os.path
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TypeAlias

from megabit.errors import UserError, named_line
from megabit.pipeline.actions import Exchange, Schedule
from megabit.pipeline.communicate import LOOKAHEAD, with_communication
from megabit.pipeline.placement import Placement
from megabit.pipeline.schedules import forward_only, gpipe, interleaved, one_forward_one_backward
from megabit.pipeline.v_shaped import v_half, v_min, zb_v
from megabit.pipeline.validate import ScheduleError, compute_findings, validate
from megabit.pipeline.zero_bubble import zb_h1

Generator: TypeAlias = Callable[[int, int, int], Schedule]
"""Of ranks, microbatches and chunks."""

GENERATORS: dict[str, Generator] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
}

MAX_FINDINGS = 5


def make_schedule(
    name: str, ranks: int, microbatches: int, chunks: int = 1, lookahead: int = LOOKAHEAD
) -> Schedule:
    """The named schedule with its communication, proved to be complete and free of deadlock.

    Args:
        lookahead: see ``with_communication``.

    Raises:
        UserError: there is no such schedule, not with so many chunks, or the user's is wrong.
    """
    if is_user_schedule(name):
        return _make_user_schedule(name, ranks, microbatches, chunks, lookahead)
    if name not in GENERATORS:
        raise _error(
            f"there is no {name!r}, but {', '.join(GENERATORS)}, and path/to/file.py:function for "
            "one of your own"
        )
    try:
        schedule = GENERATORS[name](ranks, microbatches, chunks)
    except ValueError as error:
        raise _error(f"{name} {error}") from error
    schedule = with_communication(schedule, lookahead)
    validate(schedule)
    return schedule


def make_forward_schedule(
    placement: Placement, microbatches: int, lookahead: int = LOOKAHEAD
) -> Schedule:
    """A schedule for evaluation on the stages of ``placement``, proved likewise."""
    schedule = with_communication(forward_only(placement, microbatches), lookahead)
    validate(schedule, forward_only=True)
    return schedule


def is_user_schedule(name: str) -> bool:
    """Whether ``name`` is of a function of the user's."""
    return ":" in name


def _make_user_schedule(
    name: str, ranks: int, microbatches: int, chunks: int, lookahead: int
) -> Schedule:
    generator = _load(name)
    try:
        schedule = generator(ranks, microbatches, chunks)
    except Exception as error:
        call = f"called with ({ranks}, {microbatches}, {chunks})"
        raise _error(f"{name}: {call}, it raises {named_line(error)}") from error
    if not isinstance(schedule, Schedule):
        raise _error(
            f"{name}: returns {type(schedule).__name__}, must return a "
            "megabit.pipeline.actions.Schedule"
        )
    try:
        findings = _size_findings(schedule, ranks, microbatches, chunks)
        if findings:
            raise ScheduleError(*findings)
        if not any(isinstance(action, Exchange) for rank in schedule.ranks for action in rank):
            findings = compute_findings(schedule)
            if findings:
                raise ScheduleError(*findings)
            schedule = with_communication(schedule, lookahead)
        validate(schedule)
    except ScheduleError as error:
        lines = [*error.findings[:MAX_FINDINGS]]
        if len(error.findings) > MAX_FINDINGS:
            lines.append(f"and {len(error.findings) - MAX_FINDINGS} more")
        raise _error(*(f"{name}: {line}" for line in lines)) from error
    except Exception as error:  # such as a microbatch that is a string
        raise _error(f"{name}: returns what cannot be read: {named_line(error)}") from error
    return schedule


def _size_findings(schedule: Schedule, ranks: int, microbatches: int, chunks: int) -> list[str]:
    placement = schedule.placement
    if placement.problem:  # which the validator says; then it has no sizes
        return []
    sizes = {
        "ranks": (placement.ranks, ranks),
        "chunks": (placement.chunks, chunks),
        "microbatches": (schedule.microbatches, microbatches),
    }
    return [
        f"was asked for {wanted} {what}, returns a schedule of {got}"
        for what, (got, wanted) in sizes.items()
        if got != wanted
    ]


def _load(name: str) -> Generator:
    """The function that ``name`` names."""
    source, _, function = name.rpartition(":")
    is_file = source.endswith(".py")
    if is_file and not os.path.isfile(source):
        raise _error(f"{name}: there is no file {os.path.abspath(source)}")
    try:
        module = _load_file(source) if is_file else importlib.import_module(source)
    except Exception as error:
        raise _error(f"{name}: cannot import {source}: {named_line(error)}") from error
    generator = getattr(module, function, None)
    if not callable(generator):
        raise _error(f"{name}: {source} has no function {function!r}")
    return generator


def _load_file(path: str) -> ModuleType:
    # A name that no import can ask for.
    spec = importlib.util.spec_from_file_location(f"schedule {os.path.abspath(path)}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up what they are made of
    spec.loader.exec_module(module)
    return module


def _error(*problems: str) -> UserError:
    return UserError(*(f"parallel.schedule: {problem}" for problem in problems))
