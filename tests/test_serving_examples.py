"""The examples for serving: settings that load, and a script that serves."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from megabit.config import load_serving_config
from tests.inference.models import save_served_model

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "serving"
SETTINGS = ("int8_sums", "laptop", "tp2_pp2")
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
}


def test_every_example_is_read_here() -> None:
    for_prometheus = {"alerts"}
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} - for_prometheus == set(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_load(name: str) -> None:
    config = load_serving_config([str(EXAMPLES / f"{name}.yaml")])
    assert config.server.host == "127.0.0.1"
    ranks = {"int8_sums": 2, "laptop": 1, "tp2_pp2": 4}
    assert config.parallel.tp * config.parallel.pp == ranks[name]


def test_settings_say_how_they_are_used() -> None:
    for name in SETTINGS:
        text = (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")
        (command,) = re.findall(r"^# {5}(megabit serve \S+) (\S+)(.*)$", text, re.MULTILINE)
        assert command[1] == f"examples/serving/{name}.yaml"
        load_serving_config([str(ROOT / command[1]), *command[2].split()])


def answer(url: str, **request: object) -> Any:
    """What the server answers, once it has loaded the model."""
    data = json.dumps(request).encode()
    while True:
        post = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(post, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(0.2)


def start(**environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(ROOT / "examples" / "serve.sh"), "server.port=0", "engine.kv_cache_mb=1"],
        cwd="/",  # the script finds its own files
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_script_serves(tmp_path: Path) -> None:
    model = save_served_model(tmp_path / "model")
    with start(CKPT=str(model)) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert url, line + process.stdout.read()
            request = {"prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}
            usage = answer(f"{url[0]}/v1/completions", **request)["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 2)
            process.terminate()
            assert process.wait(60) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def test_the_script_says_what_is_missing(tmp_path: Path) -> None:
    with start(CKPT=str(tmp_path / "nothing")) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output == (
        f"error: {tmp_path}/nothing: there is no model; run examples/quickstart.sh first, or name "
        "one with CKPT=...\n"
    )
