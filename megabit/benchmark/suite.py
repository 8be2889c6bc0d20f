"""All benchmarks of this machine's CPU, one after another: ``megabit bench all``, ``make bench``.

Each is a command in a process of its own, so that no allocator, thread or compiled code of one is
another's. Its JSON and what it printed stay in the folder of results. One that fails is named, and
the others are kept.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import torch

from megabit.benchmark.document import Document, Part
from megabit.benchmark.environment import describe_place
from megabit.benchmark.parts import kernels_part
from megabit.benchmark.render import render
from megabit.benchmark.serve import Load
from megabit.benchmark.serve_rounds import measure_serving
from megabit.config import load_config
from megabit.errors import RunError, UserError
from megabit.files import write_text

RESULTS, PAGE = "results.json", "benchmarks.md"
SMALL, WIDE = "small.yaml", "wide.yaml"
TINY = (
    *("model.hidden_size=32", "model.intermediate_size=48", "model.num_hidden_layers=2"),
    *("model.num_attention_heads=2", "model.num_key_value_heads=2", "model.vocab_size=300"),
    *("data.seq_length=16", "train.global_batch_size=8", "train.micro_batch_size=2"),
)
"""What makes any of the models small enough for a quick run."""
LIMIT_S = 1800
"""For one benchmark: what takes longer hangs."""


@dataclass(frozen=True)
class Step:
    """One benchmark of the suite."""

    name: str
    command: tuple[str, ...]
    """After ``megabit bench``; ``*.yaml`` is a file of ``examples/benchmarks``."""
    quick: tuple[str, ...]
    """What is appended for a quick run."""


def _training(name: str, settings: Sequence[str], steps: int) -> Step:
    return Step(name, ("train", *settings, "--steps", str(steps)), (*TINY, "--steps", "1"))


STEPS = (
    Step(
        "kernels",
        (
            *("kernels", "--shapes", "2b4t", "--m", "1,16,256", "--threads", "1"),
            *("--implementations", "default,bitlinear"),
        ),
        ("--quick", "--shapes", "trainer", "--m", "1"),
    ),
    _training(
        "train-wide",
        (WIDE, "precision.compute=bfloat16", "precision.ternary_backward=int8"),
        steps=3,
    ),
    _training("train-one-process", (SMALL,), steps=4),
    _training("train-tp2", (SMALL, "parallel.tp=2", "--nproc", "2"), steps=4),
    _training("train-pp2", (SMALL, "parallel.pp=2", "--nproc", "2"), steps=4),
    _training("train-dp2", (SMALL, "--nproc", "2"), steps=4),
    Step(
        "pipeline",
        (
            *(
                "pipeline",
                "pipeline.yaml",
                "model.num_hidden_layers=8",
                "--schedule",
                "1f1b",
                "--schedule",
                "zb-h1",
            ),
            *("--schedule", "zb-v", "--steps", "3"),
        ),
        (*TINY, "model.num_hidden_layers=4", "--steps", "1"),
    ),
    Step("checkpoint", ("checkpoint", "checkpoint.yaml"), (*TINY, "--repeats", "1")),
    Step(
        "engine",
        ("engine",),
        (
            *("model.hidden_size=64", "model.intermediate_size=96", "model.num_hidden_layers=1"),
            *("model.vocab_size=300", "--requests", "2", "--prompt-tokens", "4"),
            *("--new-tokens", "2", "--turns", "1", "--dtype", "float32"),
        ),
    ),
)
SERVE = "serve"
NAMES = (*(step.name for step in STEPS), SERVE)

Told = Callable[[str], None]


def run_suite(
    out: Path, examples: Path, names: Sequence[str], is_quick: bool, told: Told
) -> Document:
    """Run the benchmarks of those ``names``, and write ``results.json`` and ``benchmarks.md`` into
    ``out``, again after each of them.

    Args:
        examples: the folder with the settings of benchmarks.
        told: hears what is going on, a line at a time.

    Raises:
        UserError: ``examples`` is another folder, or a name is not one.
    """
    for name in names:
        if name not in NAMES:
            raise UserError(f"--only: {name} is not one of {', '.join(NAMES)}")
    if not (examples / SMALL).is_file():
        raise UserError(
            f"--examples: {examples} has no {SMALL}; run it in megabit's repository, or name its "
            "folder examples/benchmarks"
        )
    out.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    parts: list[Part] = []
    document = describe_place(torch.device("cpu"), is_quick)
    for number, name in enumerate(names, 1):
        told(f"{number} of {len(names)}: {name}")
        started = monotonic()
        try:
            found = _measure(name, out, examples, is_quick)
        except (RunError, UserError) as error:
            failed[name] = str(error)
            told(f"  failed: {error}")
        else:
            elapsed_s = round(monotonic() - started, 1)
            parts += [replace(part, name=name, elapsed_s=elapsed_s) for part in found]
            told(f"  {elapsed_s:.0f} s")
        document = replace(document.with_parts(*parts), failed=dict(failed))
        document.write(out / RESULTS)
        write_text(out / PAGE, render([document]))
    return document


def _measure(name: str, out: Path, examples: Path, is_quick: bool) -> tuple[Part, ...]:
    if name == SERVE:
        return (_serving(examples, is_quick),)
    step = next(step for step in STEPS if step.name == name)
    words = [*step.command, *(step.quick if is_quick else ())]
    words = [str(examples / word) if word.endswith(".yaml") else word for word in words]
    shown = shlex.join(["megabit", "bench", *words])
    if step.name == "kernels":
        _run([*words, "--out", str(out / name)], out / f"{name}.log")
        whole = json.loads((out / name / "kernels.json").read_text(encoding="utf-8"))
        return (replace(kernels_part(whole), command=shown),)
    file = out / f"{name}.json"
    file.unlink(missing_ok=True)
    _run([*words, "--json", str(file)], out / f"{name}.log")
    return tuple(replace(part, command=shown) for part in Document.read(file).parts)


def _serving(examples: Path, is_quick: bool) -> Part:
    settings = [str(examples / "serve.yaml"), *(TINY[:6] if is_quick else ())]
    load = Load(requests=4 if is_quick else 32, prompt_tokens=16, answer_tokens=4, warmup=1)
    if not is_quick:
        load = replace(load, prompt_tokens=64, answer_tokens=64)
    part = measure_serving(
        load_config(settings).model,
        clients=2 if is_quick else 16,
        load=load,
        rounds=1 if is_quick else 3,
        # A machine that is busy for a while is to be measured, and not to fail.
        settings=("engine.kv_cache_mb=64", "server.first_token_timeout_s=600"),
    )
    return replace(part, command=f"megabit bench all --only {SERVE}")


def _run(words: Sequence[str], log: Path) -> None:
    """``megabit bench`` with ``words``; what it prints goes to ``log``.

    Raises:
        RunError: it failed, with the last line that it said, or took too long.
    """
    command = [sys.executable, "-m", "megabit", "bench", *words]
    with log.open("wb") as said:
        # A session of its own: it may have ranks, which end with it.
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RunError(f"took more than {LIMIT_S // 60} minutes; see {log.name}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        raise RunError(f"ended with {code}: {last.removeprefix('error: ')}")
