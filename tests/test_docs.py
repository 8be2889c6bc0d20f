"""What the documents say is true: commands and code run, settings are settings, links lead
somewhere, and the site can be built.

A document is a session: its blocks of shell and Python are run in order, in a folder of their own,
where the reader of ``docs/first_run.md`` has been before. ``tests/small_megabit.py`` says what is
added to commands so that they take seconds; ``tests/documents.py`` how a block says why it is not
run.
"""

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml

from megabit.cli.main import app
from megabit.config import Config, ServingConfig, load_config, load_serving_config
from tests.documents import (
    DOCUMENTS,
    ROOT,
    Block,
    anchors,
    blocks,
    command_of,
    commands,
    links,
    prose,
)
from tests.small_megabit import BACKGROUND, SERVERS, SMALL

FIRST_RUN = ROOT / "docs" / "first_run.md"
RUN = ("sh", "python")
READ = ("yaml", "json")
SHOWN = ("", "text")
"""Output and drawings."""
IS_A_COMMAND = re.compile(
    r"^ *(?:\$ |(?:megabit|make|pip|python3?|curl|torchrun|export|\./) )", re.M
)


def here(document: Path) -> str:
    return str(document.relative_to(ROOT))


ALL = [block for document in DOCUMENTS for block in blocks(document)]
SESSIONS = [
    document
    for document in DOCUMENTS
    if document != FIRST_RUN
    and any(block.language in RUN and not block.excuse for block in blocks(document))
]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the commands that a reader has: ``megabit``, ``make`` and Python's."""
    folder = tmp_path_factory.mktemp("tools")
    (folder / "done").mkdir()
    small = f'exec {sys.executable} -m tests.small_megabit {folder / "done"} "$@"'
    # Whatever make would do is done elsewhere; here it must know the target.
    make = f'exec {shutil.which("make")} -C {ROOT} --dry-run "$@" > {folder / "make.log"}'
    for name, line in (("megabit", small), ("make", make)):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def after_the_first_run(tmp_path_factory: pytest.TempPathFactory, tools: Path) -> Path:
    """Where a reader is after docs/first_run.md, which is run here, and ``megabit examples``."""
    folder = tmp_path_factory.mktemp("reader")
    run_session(FIRST_RUN, folder, tools)
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def run_session(document: Path, folder: Path, tools: Path) -> None:
    """The blocks of a document one after another, as its reader types them in."""
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(document):
        if block.title is not None:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text)
        if block.excuse is not None:
            continue
        if block.language == "sh":
            run_shell(block, folder, tools)
        elif block.language == "python":
            # Lines are those of the document in what goes wrong.
            code = compile("\n" * (block.line - 1) + block.text, str(document), "exec")
            exec(code, names)


def run_shell(block: Block, folder: Path, tools: Path) -> None:
    script = block.text
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), str(ROOT / "kernels")]),
        "OMP_NUM_THREADS": "1",
    }
    if re.search(r"^megabit (?:serve|chat)\b.*&$", script, re.MULTILINE):
        environment[BACKGROUND] = "1"
        script = script.replace("8000", str(free_port()))
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=500)
        finally:  # also of what it has left in the background
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            log.seek(0)
            said = log.read()
            print(said)
    assert code == 0, f"{block}\n{block.text}\n{said}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_run_is_a_whole_one(after_the_first_run: Path) -> None:
    """From text to an exported model, at two layouts: all its blocks have run."""
    latest = (after_the_first_run / "runs" / "mine" / "checkpoints" / "latest").read_text().strip()
    assert latest == "step_00000004"
    rows = (after_the_first_run / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(row)["step"] for row in rows) == 4
    assert (after_the_first_run / "exported" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("document", SESSIONS, ids=here)
def test_commands_and_code_of_a_document_run(
    document: Path,
    after_the_first_run: Path,
    tools: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "reader"
    shutil.copytree(after_the_first_run, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    run_session(document, folder, tools)


@pytest.mark.parametrize("block", ALL, ids=str)
def test_a_block_is_run_or_says_why_not(block: Block) -> None:
    if block.excuse is not None:
        assert len(block.excuse) > 10
        for path in re.findall(r"\b(?:tests|examples|docs)/[\w./-]*\w", block.excuse):
            assert (ROOT / path).exists(), path
        return
    assert block.language in (*RUN, *READ, *SHOWN), "no test knows this language"
    if block.language in SHOWN:
        assert not IS_A_COMMAND.search(block.text), "commands are in a block of sh"


@pytest.mark.parametrize(
    "block", [block for block in ALL if block.language in READ and not block.excuse], ids=str
)
def test_settings_in_the_documents_are_settings(block: Block, tmp_path: Path) -> None:
    if block.language == "json":
        json.loads(block.text)
        return
    file = tmp_path / "settings.yaml"
    file.write_text(block.text)
    sections = set(yaml.safe_load(block.text))
    load = load_serving_config if sections & {"engine", "server"} else load_config
    load([str(file)])


@cache
def options_of_commands() -> dict[str, frozenset[str]]:
    """The options of all commands: of ``train``, ``bench train``, …"""

    def below(command: object, words: tuple[str, ...]) -> Iterator[tuple[str, frozenset[str]]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            parameters = getattr(command, "params", [])
            names = (name for parameter in parameters for name in parameter.opts)
            yield " ".join(words), frozenset({*names, "--help"})
            return
        for name, one in inner.items():
            yield from below(one, (*words, name))

    return dict(below(typer.main.get_command(app), ()))


def leaves() -> frozenset[str]:
    """All commands."""
    return frozenset(options_of_commands())


def test_every_command_is_shown() -> None:
    shown = {command_of(shlex.split(line)[1:]) for block in ALL for line in commands(block)}
    assert shown - {"--version", "--help"} == leaves()
    assert {*SMALL, *SERVERS} <= leaves()


def test_commands_named_in_the_text_exist() -> None:
    named: dict[str, str] = {}
    for document in DOCUMENTS:
        for words in re.findall(r"`megabit ((?:[a-z]+ ?)+)", prose(document)):
            named[command_of(words.split() or [""])] = here(document)
    known = leaves() | {leaf.split()[0] for leaf in leaves()}
    assert not {command: where for command, where in named.items() if command not in known}


def test_commands_within_sentences_have_these_options_and_settings() -> None:
    """They are fragments, with names for what the reader has, and are not run: what they consist
    of is there."""
    known = {key for config in (Config(), ServingConfig()) for key in keys_of(config)}
    wrong: dict[str, str] = {}
    for document in DOCUMENTS:
        for text in re.findall(r"`megabit ([^`]+)`", prose(document)):
            words = [word for word in text.split() if word not in "[]…|"]
            command = command_of(words)
            options = options_of_commands().get(command)
            if options is None or command == "bench kernels":  # which has a parser of its own
                continue
            for word in words:
                option, setting = word.split("=")[0], re.match(r"([a-z]+\.[a-z_0-9]+)=", word)
                if word.startswith("--") and option not in options:
                    wrong[f"megabit {text}"] = f"{here(document)}: {option}"
                if setting and setting[1] not in known:
                    wrong[f"megabit {text}"] = f"{here(document)}: {setting[1]}"
    assert not wrong


def keys_of(config: object) -> list[str]:
    """``section.key`` of all settings."""
    sections = dataclasses.fields(config)  # type: ignore[arg-type]
    return [
        f"{section.name}.{key.name}"
        for section in sections
        for key in dataclasses.fields(getattr(config, section.name))
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=here)
def test_links_lead_somewhere(document: Path) -> None:
    for path, anchor in links(document):
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{path} is not there"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{path}#{anchor}: no such heading"


def test_nothing_is_left_to_be_filled_in() -> None:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        left = re.findall(r"@@|=(?:LR|MOMENTUM)\b|\b(?:TODO|FIXME|TBD|XXX|PERCENT|BENCH)\b", text)
        left += re.findall(r"^(?:FIGURES|RATES|TABLE)$", text, re.MULTILINE)
        assert not left, document.name


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets = {name for line in targets for name in line.split()}
    for document in DOCUMENTS:
        named = re.findall(r"(?:^|`)make ([a-z-]+)", document.read_text("utf-8"), re.MULTILINE)
        assert set(named) <= targets, document.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=here)
def test_files_named_in_the_text_exist(document: Path) -> None:
    homes = [ROOT / folder for folder in ("megabit", "kernels", "kernels/megabit_kernels", "")]
    for path in set(
        re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|sh|yaml|md))(?:::\w+)?`", prose(document))
    ):
        assert any((home / path).exists() for home in (*homes, document.parent)), path


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """And needs no network: all that a page loads is a file of the site."""
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    # Links that leave docs/ lead to pages, too (docs/site_hooks.py).
    assert (site / "repository" / "kernels" / "index.html").exists()
    assert "runs/single" in (site / "repository/examples/single_process.sh.html").read_text()
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))
    for page in pages:
        loads = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?([^\s\">]+)", page.read_text()
        )
        for target in loads:
            assert not re.match(r"(?:https?:)?//", target), f"{page}: {target}"
