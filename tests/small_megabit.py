"""The ``megabit`` that documents are run with: the command as it is written, made small enough for
a test by what is added to its end.

``python small_megabit.py DONE ARGUMENTS``. What reads and writes nothing of the reader's is run
once, also if several documents show it: DONE is a folder that remembers. A server that is not in
the background is ended when it is ready.
"""

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from tests.documents import command_of

SMALL = {
    "train": "model.vocab_size=300 model.num_hidden_layers=4 data.seq_length=96 run.sample_tokens=2"
    " train.eval_samples=4",
    "prepare": "model.vocab_size=300",
    "parity": "model.num_hidden_layers=4 train.global_batch_size=4 train.micro_batch_size=2",
    "bench kernels": "--shapes trainer --m 1 --implementations default",
    "bench engine": "model.num_hidden_layers=1 model.hidden_size=64 model.vocab_size=300 "
    "model.intermediate_size=96 --new-tokens 2 --requests 2",
    "bench serve": "--requests 4 --prompt-tokens 8 --answer-tokens 4 engine.kv_cache_mb=8",
    "bench train": "model.vocab_size=300 model.num_hidden_layers=1 data.seq_length=16",
    "bench checkpoint": "model.vocab_size=300 model.num_hidden_layers=1 model.hidden_size=48",
    "bench pipeline": "model.vocab_size=300 model.num_hidden_layers=4 data.seq_length=16 --steps 1",
    "doctor": "--quick",
    "chat": "engine.kv_cache_mb=8 server.port=0",
    "eval": "--limit 4",
    "generate": "engine.kv_cache_mb=8",
    "serve": "engine.kv_cache_mb=8 server.port=0",
}
PURE = {"bench", "config", "doctor", "inject", "parity", "schedule"}
"""Commands whose result depends on their arguments alone."""
SERVERS = ("chat", "serve")
BACKGROUND = "MEGABIT_TEST_BACKGROUND"
"""Set where the document itself ends its servers."""


def small(words: list[str]) -> list[str]:
    """What is run for ``megabit WORDS``."""
    command = command_of(words)
    added = shlex.split(SMALL.get(command, ""))
    if command == "train":
        steps = [re.fullmatch(r"train\.steps=(\d+)", word) for word in words]
        given = [int(match[1]) for match in steps if match]
        added.append(f"train.steps={max(2, given[-1] // 50) if given else 2}")
    if command in SERVERS and BACKGROUND in os.environ:
        added = [word for word in added if word != "server.port=0"]
    return [sys.executable, "-m", "megabit", *words, *added]


def serve(command: list[str]) -> int:
    """It becomes ready, and ends when it is told to."""
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    said = ""
    for line in server.stdout:
        said += line
        if "Ready" in line:
            server.send_signal(signal.SIGTERM)
    print(said)
    return server.wait(120) or ("http://127.0.0.1:" not in said)


def main() -> int:
    done, words = Path(sys.argv[1]), sys.argv[2:]
    if not words or words[0].startswith("-"):
        return subprocess.call([sys.executable, "-m", "megabit", *words])
    command = small(words)
    if words[0] in SERVERS and BACKGROUND in os.environ:
        os.execv(command[0], command)
    if words[0] in SERVERS:
        return serve(command)
    if words[0] not in PURE:
        return subprocess.call(command)
    mark = done / hashlib.sha256(json.dumps(words).encode()).hexdigest()
    if mark.exists():
        return 0
    code = subprocess.call(command)
    if code == 0:
        mark.touch()
    return code


if __name__ == "__main__":
    sys.exit(main())
