"""Where a report comes from and goes to: states of a run, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megabit.errors import UserError
from megabit.report import write_report
from tests.command import megabit, refused
from tests.report.pages import read_page
from tests.report.rows import evaluation, event, full_run, interval, write_run


def test_command(tmp_path: Path) -> None:
    folder = full_run(tmp_path / "run")
    code, out, err = megabit("report", folder)
    assert (code, err) == (0, [])
    size = (folder / "report.html").stat().st_size
    assert out == [f"Report: {folder / 'report.html'} ({size / 1000:.1f} kB)"]
    other = full_run(tmp_path / "other")
    code, _, _ = megabit("report", folder, "--out", tmp_path / "a.html", "--compare", other)
    assert code == 0
    assert read_page(tmp_path / "a.html").root.all("h1")[0].words.split() == ["·", "run", "other"]


def test_a_report_is_replaced_whole(tmp_path: Path) -> None:
    folder = full_run(tmp_path)
    (folder / "report.html").write_text("an older one")
    before = {path.name for path in folder.iterdir()}
    write_report(folder)
    assert {path.name for path in folder.iterdir()} == before
    assert (folder / "report.html").read_text().endswith("</html>\n")


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    """No summary yet, one interval, and a line that is being written."""
    folder = write_run(tmp_path, [interval(10)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "lo')
    page = read_page(write_report(folder))
    assert "step 10 of 100, not finished" in page.root.all("header")[0].words
    loss = page.panel("Loss")
    (dot,) = loss.all("g", "steps")[0].all("path", "dots")
    assert dot.attributes["d"] == "M2000 500h0"
    for path in loss.all("path"):
        assert "nan" not in path.attributes["d"]


def test_only_an_evaluation(tmp_path: Path) -> None:
    page = read_page(write_report(write_run(tmp_path, [evaluation(5)])))
    assert page.titles == ["Bits per byte", "Loss", "Validation texts"]


def test_only_metrics(tmp_path: Path) -> None:
    """Copied from elsewhere without the other files."""
    folder = write_run(tmp_path, [interval(5)])
    (folder / "config.yaml").unlink()
    assert "Bits per byte" in read_page(write_report(folder)).titles


def test_a_run_that_has_gone_back(tmp_path: Path) -> None:
    """Of a step that was done twice, the later row counts; abandoned rows don't."""
    rows = [interval(1, loss=5.0), interval(2, loss=9.0), interval(3, loss=9.5, abandoned=True)]
    rows += [event(3, "guard", "loss_spike", "rollback"), interval(2, loss=4.0)]
    page = read_page(write_report(write_run(tmp_path, rows)))
    panel = page.data["panels"][page.titles.index("Loss")]
    assert panel["series"][0]["y"] == [5.0, 4.0]


@pytest.mark.parametrize("step", [-1, 10**30, 10**400])
def test_what_is_no_step_is_left_out(tmp_path: Path, step: int) -> None:
    page = read_page(write_report(write_run(tmp_path, [interval(2), {"step": step, "loss": 1.0}])))
    assert page.data["axes"]["steps"] == 2
    assert page.data["panels"][page.titles.index("Loss")]["series"][0]["y"] == [4.0]


def test_a_run_that_went_on_after_its_summary(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [interval(50)], summary={"steps": 20})
    assert "step 50 of 100, not finished" in read_page(write_report(folder)).root.words


def _no_folder(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _no_metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()


def _no_rows(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 5, "event": {"kind": "alert"}}\nnonsense\n')


def _not_text(folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")


def _bad_summary(folder: Path) -> None:
    (folder / "summary.json").write_text('{"steps": ')


def _bad_config(folder: Path) -> None:
    (folder / "config.yaml").write_text("model: [")


def _list_for_config(folder: Path) -> None:
    (folder / "config.yaml").write_text("- 1\n")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (_no_folder, "run: is not a folder; give that of a run"),
        (_no_metrics, "metrics.jsonl: is not there; give the folder of a run"),
        (_no_rows, "metrics.jsonl: has no metrics yet; wait for the first train.log_interval"),
        (_not_text, "metrics.jsonl: cannot be read (it is not UTF-8)"),
        (_bad_summary, "summary.json: is not JSON"),
        (_bad_config, "config.yaml: is not YAML"),
        (_list_for_config, "config.yaml: must hold keys and values"),
    ],
)
def test_what_is_no_run_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], problem: str
) -> None:
    folder = full_run(tmp_path / "run")
    spoil(folder)
    assert problem in refused("report", folder)
    assert problem in refused("report", full_run(tmp_path / "good"), "--compare", folder)
    assert not [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.tmp")]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    folder = full_run(tmp_path / "run")
    assert refused("report", folder, "--out", tmp_path).startswith(f"{tmp_path}: is a folder")
    missing = tmp_path / "missing" / "a.html"
    assert refused("report", folder, "--out", missing).startswith(f"{missing}: cannot be written")


def test_runs_that_cannot_be_told_apart(tmp_path: Path) -> None:
    """Two runs of one name have more of their paths; the same one twice is refused."""
    first, second = (full_run(tmp_path / parent / "run") for parent in ("a", "b"))
    page = read_page(write_report(first, others=[second]))
    assert page.root.all("h1")[0].words.split() == ["·", "a/run", "b/run"]
    with pytest.raises(UserError, match="names the same run twice"):
        write_report(first, others=[first])
    with pytest.raises(UserError, match="8 runs are too many; give 7 or fewer"):
        write_report(first, others=[second] * 8)
