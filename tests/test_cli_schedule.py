"""``megabit schedule``: what it prints and writes, and what it refuses."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from matplotlib.image import imread

from megabit.cli import main as command
from megabit.config import SCHEDULE_CHUNKS
from megabit.pipeline.catalog import GENERATORS, make_schedule

EXAMPLE = (
    "megabit schedule --pp 4 --microbatches 8 --schedule zb-h1 --forward 1 --backward 1 --weight 1 "
    "--p2p 0.1 --png out.png"
)
SMALL = "megabit schedule --pp 4 --microbatches 8"


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def rows(self) -> dict[str, list[str]]:
        """The table: the cells of each schedule's row, peaks of ranks as one."""
        rows = [re.split(r"  +", line.strip()) for line in self.out.splitlines()]
        return {row[0]: row[1:] for row in rows if len(row) >= 6 and row[1].isdigit()}


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], Done]:
    """Runs a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> Done:
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as end:
            command.main()
        return Done(end.value.code or 0, *capsys.readouterr())

    return run


def test_the_example(run: Callable[[str], Done], tmp_path: Path) -> None:
    done = run(EXAMPLE)
    assert (done.code, done.err) == (0, "")
    # 27, and 12 messages on the longest path.
    assert done.rows == {"zb-h1": ["1", "28.2", "17.5%", "4", "4 4 4 4"]}
    assert "rank 0  F0-F1-F2-F3-  " in done.out
    assert "Best" not in done.out
    assert [path.name for path in tmp_path.iterdir()] == ["out.png"]
    assert imread(tmp_path / "out.png").shape[1] > 1000


def test_all_schedules_are_compared(run: Callable[[str], Done]) -> None:
    done = run(f"{SMALL} --vpp 2")
    assert list(done.rows) == list(GENERATORS) == list(SCHEDULE_CHUNKS)
    assert done.rows["gpipe"] == ["1", "33", "37.5%", "8", "8 8 8 8"]
    assert done.rows["1f1b"] == ["1", "33", "37.5%", "4", "4 3 2 1"]
    assert done.rows["interleaved"] == ["2", "28.5", "18.8%", "5.5", "5.5 4.5 3.5 2.5"]
    assert done.rows["zb-h1"][1:4] == ["27", "12.5%", "4"]
    assert done.rows["zb-v"][:4] == ["2", "25.5", "6.2%", "4"]
    assert done.rows["v-half"][3] == "3"
    assert done.rows["v-min"][3] == "2"
    assert "Best: zb-v, time 25.5, peak 4\n" in done.out
    assert done.out.count("rank 3  ") == len(GENERATORS)


def test_of_equally_quick_ones_the_smallest_is_best(run: Callable[[str], Done]) -> None:
    """Also where their times differ in the last bit."""
    done = run(f"{SMALL} --schedule gpipe --schedule 1f1b --forward 0.1 --backward 0.7")
    assert list(done.rows) == ["gpipe", "1f1b"]
    assert done.rows["gpipe"][1] == done.rows["1f1b"][1]
    assert "Best: 1f1b" in done.out
    done = run(f"{SMALL} --schedule gpipe --schedule 1f1b --schedule gpipe --p2p 0.1")
    assert list(done.rows) == ["gpipe", "1f1b"]
    assert "Best: gpipe" in done.out  # waits for fewer messages


def test_more_stages_for_interleaved_only(run: Callable[[str], Done]) -> None:
    rows = run(f"{SMALL} --vpp 4").rows
    assert rows["interleaved"][:2] == ["4", "26.25"]
    assert [row[0] for name, row in rows.items() if name != "interleaved"] == list("111222")


def test_memory_decides(run: Callable[[str], Done]) -> None:
    done = run(f"{SMALL} --memory 3")
    assert "Best with --memory 3: v-half" in done.out
    assert "Does not fit: gpipe (needs 8), 1f1b (needs 4), interleaved (needs 5.5)," in done.out
    assert [name for name, row in done.rows.items() if row[-1] == "yes"] == ["v-half", "v-min"]
    assert "Best with --memory 2.9: v-min" in run(f"{SMALL} --memory 2.9").out
    done = run(f"{SMALL} --memory 5.5")
    assert "Does not fit: gpipe (needs 8)\n" in done.out


def test_nothing_fits(run: Callable[[str], Done], tmp_path: Path) -> None:
    done = run(f"{SMALL} --memory 1.5 --png out.png")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "error: --memory: 1.5 is too little for any of these schedules; v-min needs least, 2\n"
    )
    assert not [*tmp_path.iterdir()]


def test_fused_backward_takes_both(run: Callable[[str], Done]) -> None:
    rows = run(f"{SMALL} --forward 2 --backward 3 --weight 4 --schedule 1f1b").rows
    assert rows["1f1b"][1] == f"{(8 + 3) * (2 + 3 + 4)}"


def test_actions_are_those_of_the_schedule(run: Callable[[str], Done]) -> None:
    done = run("megabit schedule --pp 2 --microbatches 3 --schedule interleaved --actions")
    assert f"interleaved, actions\n{make_schedule('interleaved', 2, 3, 2)}\n" in done.out
    assert "[send a0→1] F1" in done.out


def test_timelines_only_where_they_fit(run: Callable[[str], Done]) -> None:
    narrow = f"{SMALL} --schedule zb-h1 --schedule zb-v --width"
    done = run(f"{narrow} 61")
    assert "rank 0" not in done.out
    assert "The timelines need 62 columns: --width 62 prints them" in done.out
    done = run(f"{narrow} 62")
    rows = [line for line in done.out.splitlines() if line.startswith("rank ")]
    assert len(rows) == 8
    # One scale for both: zb-h1 takes 27, zb-v 25.5.
    assert [max(map(len, rows[:4])), max(map(len, rows[4:]))] == [62, 8 + 51]


def test_trace(run: Callable[[str], Done], tmp_path: Path) -> None:
    assert run(f"{SMALL} --schedule zb-h1 --schedule zb-v --trace out.json").code == 0
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["zb-h1", "zb-v"]
    ends = {
        process: max(e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["pid"] == process)
        for process in (1, 2)
    }
    assert ends == {1: 27_000, 2: 25_500}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_schedule_of_ones_own(run: Callable[[str], Done], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from megabit.pipeline.schedules import gpipe\n"
        "def all_forward(ranks, microbatches, chunks):\n"
        "    assert chunks == 1\n"
        "    return gpipe(ranks, microbatches, chunks)\n"
    )
    done = run(f"{SMALL} --schedule mine.py:all_forward --schedule 1f1b")
    assert done.rows["mine.py:all_forward"][1] == "33"
    done = run(f"{SMALL} --schedule mine.py:all_forward --vpp 2")
    assert done.code == 2
    assert done.err.startswith("error: --schedule: mine.py:all_forward: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--pp 0", "--pp: must be 1 or more, not 0"),
        ("--microbatches -1", "--microbatches: must be 1 or more, not -1"),
        ("--forward -1", "--forward: must be a time of 0 or more, not -1"),
        ("--weight nan", "--weight: must be a time of 0 or more, not nan"),
        ("--p2p inf", "--p2p: must be a time of 0 or more, not inf"),
        (
            "--forward 0 --backward 0 --weight 0",
            "--forward, --backward, --weight: one of them must take time",
        ),
        ("--memory 0", "--memory: must be more than 0, not 0"),
        ("--width 0", "--width: must be 1 or more, not 0"),
        ("--schedule zb-h2", "--schedule: unknown schedule 'zb-h2'; did you mean 'zb-h1'?"),
        (
            "--schedule pony",
            "--schedule: unknown schedule 'pony'; known: " + ", ".join(SCHEDULE_CHUNKS),
        ),
        ("--schedule no.py:f", "--schedule: no.py:f: there is no file {folder}/no.py"),
        ("--vpp 0", "--vpp: must be 1 or more, not 0"),
        ("--vpp 1", "--vpp: interleaved needs 2 or more stages on each rank; or use 1f1b"),
        (
            "--vpp 3 --schedule zb-v",
            "--vpp: is for interleaved; zb-v has 2 stages on each rank",
        ),
        (
            "--png no/out.png",
            "--png: no/out.png cannot be written: there is no folder no",
        ),
        ("--png .", "--png: . is a folder, not a file"),
        ("--trace /proc/out.json", "--trace: /proc/out.json cannot be written: "),
        ("--png out --trace ./out", "--png and --trace: name the same file"),
    ],
)
def test_refused(run: Callable[[str], Done], tmp_path: Path, options: str, message: str) -> None:
    done = run(f"{SMALL} {options}")
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith("error: " + message.format(folder=tmp_path))
    assert not [*tmp_path.iterdir()]


def test_all_mistakes_are_told_at_once(run: Callable[[str], Done]) -> None:
    done = run("megabit schedule --pp 0 --microbatches 0 --schedule zb-h --p2p -1 --png no/out.png")
    options = [line.split(":")[1].strip() for line in done.err.splitlines()]
    assert options == ["--pp", "--microbatches", "--p2p", "--schedule", "--png"]


def test_it_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, megabit.cli.main\n"
        f"sys.argv = {shlex.split(SMALL)}\n"
        "try:\n"
        "    megabit.cli.main.main()\n"
        "finally:\n"
        "    print({'torch', 'matplotlib'} & set(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"
