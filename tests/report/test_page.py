"""What a report shows of a run."""

import base64
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from megabit.config import Config, ModelConfig, RunConfig
from megabit.report import write_report
from megabit.report.panels import LAYER_PANELS, SECTIONS
from tests.report.pages import Page, read_page
from tests.report.rows import TOKENS, evaluation, event, full_run, interval, write_run


def page_of(folder: Path, *rows: dict[str, Any], **files: Any) -> Page:
    return read_page(write_report(write_run(folder, list(rows), **files)))


def points(page: Page, title: str, name: str = "line", scale: str = "steps") -> list[str]:
    """The paths of a plot as drawn, from the last line that is painted on top to the first."""
    groups = page.panel(title).all("g", scale)
    return [path.attributes["d"] for path in groups[0].all("path", name)][::-1]


def legend(page: Page, title: str) -> dict[str, str]:
    items = page.panel(title).all("ul", "legend")[0].all("li")
    return {item.all("span")[0].text: item.all("b")[0].text for item in items if item.all("b")}


def test_every_plot_has_numbers_that_telemetry_makes(tmp_path: Path) -> None:
    page = read_page(write_report(full_run(tmp_path)))
    expected = [panel.title for section in SECTIONS for panel in section.panels]
    assert page.titles == expected + [panel.title for panel in LAYER_PANELS]
    for panel in (panel for section in SECTIONS for panel in section.panels):
        lines = legend(page, panel.title)
        plain = [line for line in panel.lines if "*" not in line.metric]
        assert {line.label or line.metric for line in plain} <= lines.keys()
    assert list(legend(page, "Exposed communication")) == ["tp", "pp", "dp", "world"]


def test_lines_are_where_the_numbers_are(tmp_path: Path) -> None:
    rows = [interval(5, loss=4.0), interval(10, loss=2.0)]
    rows += [interval(20, loss=3.0), evaluation(20, held_out_loss=2.5)]
    page = page_of(tmp_path, *rows)
    # 2000 × 1000, from step 0 to 20, from loss 2 − 6 % to 4 + 6 % of the range.
    (line, held_out) = points(page, "Loss")
    assert line == "M500 54L1000 946L2000 500"
    assert held_out == ""  # one point is a dot
    assert points(page, "Loss", "dots") == ["M2000 723h0"]
    assert legend(page, "Loss") == {"training": "3", "held out": "2.5"}
    panel = page.data["panels"][page.titles.index("Loss")]
    assert panel["series"][0]["y"] == [4.0, 2.0, 3.0]
    assert panel["scales"]["linear"] == [1.88, 4.12]
    assert page.data["xs"][panel["series"][0]["x"]] == {
        "steps": [5, 10, 20],
        "tokens": [5 * TOKENS, 10 * TOKENS, 20 * TOKENS],
    }


def test_tokens_are_another_axis(tmp_path: Path) -> None:
    """A batch that grows: half of the steps are a quarter of the tokens."""
    rows = [interval(10, consumed_tokens=100, loss=4.0), interval(20, consumed_tokens=400)]
    page = page_of(tmp_path, *rows, evaluation(15))
    assert points(page, "Loss", scale="tokens")[0].startswith("M500 ")
    assert points(page, "Loss", "dots", "tokens") == ["M1250 946h0"]
    without = [{k: v for k, v in row.items() if k != "consumed_tokens"} for row in rows]
    page = page_of(tmp_path, *without)
    assert page.data["axes"] == {"steps": 20}
    assert not page.root.all("g", "tokens")


def test_a_gap_is_left_open(tmp_path: Path) -> None:
    values = [3.0, None, 3.0, 2.0, float("nan"), 2.0]
    page = page_of(tmp_path, *(interval(n + 1, loss=value) for n, value in enumerate(values)))
    assert re.findall("[ML]", points(page, "Loss")[0]) == ["M", "L"]
    assert points(page, "Loss", "dots")[0].count("M") == 2
    assert page.data["panels"][1]["series"][0]["y"] == [3.0, None, 3.0, 2.0, None, 2.0]


def test_parts_of_a_step_are_stacked(tmp_path: Path) -> None:
    times = {"forward_backward": 3.0, "gradients": 0.5, "update": 0.5}
    page = page_of(tmp_path, interval(1, time_s=times), interval(2, time_s=times))
    # Of 4 s and 6 %: 1 s is 236 units. Each lies on the one before.
    assert points(page, "Time of a step", "area")[::-1] == [
        "M1000 292L2000 292L2000 1000L1000 1000Z",
        "M1000 175L2000 175L2000 292L1000 292Z",
        "M1000 57L2000 57L2000 175L1000 175Z",
    ]


def test_published_reference_of_code_flips(tmp_path: Path) -> None:
    page = page_of(tmp_path, interval(1, code_flips=0.001), interval(2, code_flips=0.001))
    # 0.05 % is half of 0.1 %, which is at 1/1.06 of the height.
    (line,) = page.panel("Code flips").all("path", "reference")
    assert line.attributes["d"] == "M0 528H2000"
    assert "published reference 0.05 %" in page.panel("Code flips").words


def test_what_says_nothing_is_left_out(tmp_path: Path) -> None:
    quiet = {
        "objective": 2.0,
        "loss": 2.0,
        "quantization_share": 1.0,
        "skipped": 0,
        "loss_scale": 1.0,
        "bubble": 0.0,
        "mfu": None,
        "exposed_s": {"tp": 0.0, "dp": 0.5},
        "sent_mb": {"tp": 0.0, "dp": 0.0},
        "layers": None,
    }
    page = page_of(tmp_path, interval(1, **quiet), interval(2, **quiet))
    hidden = {"Objective", "Quantization share λ", "Skipped steps", "Loss scale", "MFU"}
    hidden |= {"Pipeline bubble", "Sent in a step", "Validation texts"}
    assert not hidden & set(page.titles)
    assert list(legend(page, "Exposed communication")) == ["dp"]


def test_layers(tmp_path: Path) -> None:
    """Rows by number; the pixel's strength is the value, from the step before to the interval's."""
    layer = {"zero_fraction": 0.25}
    other = {"zero_fraction": 0.5}
    rows = [
        interval(10, layers={"layers.10.o": layer, "layers.9.o": other}),
        interval(20, layers={"layers.10.o": other}),
    ]
    page = page_of(tmp_path, *rows)
    assert page.data["heats"] == [
        {"unit": "share", "rows": ["layers.9.o", "layers.10.o"], "range": [0.25, 0.5], "log": False}
    ]
    panel = page.root.all("figure", "heat")[0]
    assert [label.text for label in panel.all("div", "rows")[0].all("span")] == ["9.o", "10.o"]
    source = panel.all("img", "steps")[0].attributes["src"].removeprefix("data:image/png;base64,")
    alpha = np.rint(imread(io.BytesIO(base64.b64decode(source)))[:, :, 3] * 255)
    expected = np.zeros((2, 200))
    expected[0, :100] = 255
    expected[1, :100], expected[1, 100:] = 15, 255
    np.testing.assert_array_equal(alpha, expected)


def test_events(tmp_path: Path) -> None:
    page = read_page(write_report(full_run(tmp_path)))
    (table,) = [s for s in page.root.all("section") if s.attributes["id"] == "events"]
    rows = [[cell.words for cell in row.all("td")] for row in table.all("tr")][1:]
    assert rows[0][:4] == ["40", "saved", "training", "saved"]
    (rollback,) = [row for row in rows if row[1] == "rolled back"]
    assert rollback[:4] == ["12", "rolled back", "loss_spike", "rollback"]
    assert rollback[4].startswith("loss_spike at 12")
    evidence = table.all("ul", "evidence")
    shown = [{i.all("span")[0].text: i.text.strip() for i in e.all("li")} for e in evidence]
    assert shown == [{"grad_norm": "11"}, {"z": "14.25", "loss": "9.5"}]
    # Marked once for all plots, each of which shows the marks.
    marks = {
        path.classes[1]: path.attributes["d"]
        for group in page.root.all("g")
        if group.attributes.get("id") == "marks-steps"
        for path in group.all("path")
    }
    assert marks == {
        "checkpoint": "".join(f"M{x} 1000V950" for x in (500, 1000, 1500, 2000)),
        "rollback": "M600 1000V0",
        "guard": "M800 1000V0",
        "alert": "M1000 1000V0",
    }
    for figure in page.root.all("figure"):
        uses = [use.attributes["href"] for use in figure.all("use")]
        assert uses == ["#marks-steps", "#marks-tokens"]
    assert [e["mark"] for e in page.data["events"]] == ["rollback", "guard", "alert"]


def test_very_many_events_leave_those_that_matter(tmp_path: Path) -> None:
    rows = [interval(1000)]
    rows += [event(step, "checkpoint", "training", "saved") for step in range(1, 1000)]
    page = page_of(tmp_path, *rows, event(3, "alert", "early", "alert"))
    (table,) = [s for s in page.root.all("section") if s.attributes["id"] == "events"]
    kinds = [row.all("td")[1].words for row in table.all("tr")[1:]]
    assert (len(kinds), kinds.count("alert")) == (300, 1)
    assert "700 older ones are not shown" in table.words


def test_head_and_evaluations(tmp_path: Path) -> None:
    page = read_page(write_report(full_run(tmp_path / "my-run")))
    head = page.root.all("header")[0]
    assert head.all("h1")[0].words.split() == ["my-run", "finished,", "40", "steps"]
    tiles = {t.all("dt")[0].text: t.all("dd")[0].text for t in head.all("div", "tile")}
    assert tiles == {
        "Held-out bits per byte": "1.1",
        "Training loss": "2.1",
        "Tokens": "2,560",
        "Tokens per second": "12.35k",
        "FLOP/s of a rank": "1.5 TFLOP/s",
        "MFU": "37.5 %",
        "Peak memory": "2 GiB",
    }
    assert "TP 2 × PP 1 × DP 1" in head.words
    assert "5.25 M parameters" in head.words
    (table,) = [s for s in page.root.all("section") if s.attributes["id"] == "evaluations"]
    rows = [[cell.words for cell in row.all("td")] for row in table.all("tr")][1:3]
    assert rows[0] == ["40", "held out", "2.2", "1.1", "9.025"]
    assert rows[1] == ["40", "plays.txt", "2.5", "1.25", "12.18"]
    assert "ROMEO: what" in page.root.words


def test_runs_are_compared(tmp_path: Path) -> None:
    wide = write_run(
        tmp_path / "wide",
        [interval(10, loss=2.0), interval(30, loss=1.0), evaluation(30)],
        config=Config(model=ModelConfig(hidden_size=512), run=RunConfig(dir="elsewhere")),
    )
    narrow = write_run(tmp_path / "narrow", [interval(10, loss=3.0), interval(20, loss=2.0)])
    page = read_page(write_report(narrow, tmp_path / "both.html", [wide]))
    assert legend(page, "Gradient norm") == {"narrow": "0.5", "wide": "0.5"}
    names = ["narrow · training", "wide · training", "wide · held out"]
    assert list(legend(page, "Loss")) == names
    # One horizontal axis, to the end of the longer one.
    first, second, _ = points(page, "Loss")
    assert first.startswith("M667 ")
    assert "L1333 " in first
    assert second.startswith("M667 ")
    assert "L2000 " in second
    (differences,) = [s for s in page.root.all("section") if s.attributes["id"] == "differences"]
    rows = [[cell.words for cell in row.all("td")] for row in differences.all("tr")][1:]
    assert rows == [["model.hidden_size", "256", "512"]]
    assert {"Time of a step · narrow", "Time of a step · wide"} <= set(page.titles)
    assert not (narrow / "report.html").exists()


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    """The greatest and the least are kept: a spike is seen."""
    values = {"loss": 2.0, "layers": None}
    rows = [interval(step, **values) for step in range(1, 2001)]
    rows[1234]["loss"] = 77.0
    rows[1900]["loss"] = 0.5
    path = write_report(write_run(tmp_path, rows))
    assert path.stat().st_size < 1_000_000
    panel = read_page(path).data["panels"][1]
    assert len(panel["series"][0]["y"]) < 700
    assert {77.0, 0.5} <= set(panel["series"][0]["y"])


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    path = write_report(full_run(tmp_path))
    page = read_page(path)
    for element in page.root.all():
        for key in ("src", "href"):
            value = element.attributes.get(key, "#")
            assert value.startswith(("#", "data:image/png;base64,")), element
        assert not {key for key in element.attributes if key.startswith("on")}
    assert "url(" not in path.read_text()
    assert "@import" not in path.read_text()
    assert "http:" not in path.read_text().replace('http-equiv="', "")
    assert "https:" not in path.read_text()
    # Those who don't see it get words.
    for plot in page.root.all("div", "plot"):
        assert plot.attributes["role"] == "img"
        assert len(plot.attributes["aria-label"]) > 10


HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;"


def test_text_of_a_run_is_text(tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "∕")
    layers = {HOSTILE: {"zero_fraction": 0.5}}
    rows = [
        interval(1, exposed_s={HOSTILE: 1.0}, layers=layers),
        evaluation(2, validation={HOSTILE: {"loss": 1.0, "bits_per_byte": 1.0}}),
        {
            "step": 2,
            "event": {"kind": HOSTILE, "name": HOSTILE, "action": HOSTILE, "text": HOSTILE},
        },
        event(2, "guard", HOSTILE, HOSTILE, **{HOSTILE: HOSTILE}),
    ]
    summary = {"steps": HOSTILE, "sample": HOSTILE, "parameters": HOSTILE, "layout": {HOSTILE: 1}}
    config = Config(run=RunConfig(dir=HOSTILE, sample_prompt=HOSTILE))
    one = write_run(tmp_path / name, rows, summary, config)
    (one / "accounting.json").write_text(json.dumps({"memory_mib": {HOSTILE: 1.0}}))
    two = write_run(tmp_path / "two", rows, summary, Config())
    for path in (write_report(one), write_report(one, tmp_path / "both.html", [two])):
        page = read_page(path)
        script_tags = page.root.all("script")
        assert [tag.attributes.get("type") for tag in script_tags] == ["application/json", None]
        assert not set("<>&") & set(script_tags[0].text)
        images = page.root.all("img")
        assert images
        assert all(image.attributes["src"].startswith("data:image/png") for image in images)
        assert not any(key.startswith("on") for e in page.root.all() for key in e.attributes)
        assert page.data["heats"][0]["rows"] == [HOSTILE]
        assert page.root.words.count("onerror=alert(1)") > 5  # as text
        # And the browser is told to run no script but the page's own.
        digest = base64.b64encode(hashlib.sha256(script_tags[1].text.encode()).digest()).decode()
        (policy,) = [
            meta.attributes["content"]
            for meta in page.root.all("meta")
            if meta.attributes.get("http-equiv") == "Content-Security-Policy"
        ]
        assert f"script-src 'sha256-{digest}'" in policy
        assert policy.startswith("default-src 'none'")


@pytest.mark.parametrize("value", ["text", True, [1], {"a": 1}, 10**400, None])
def test_what_is_no_number_is_a_gap(tmp_path: Path, value: Any) -> None:
    page = page_of(tmp_path, interval(1, loss=value), interval(2, loss=2.0))
    assert legend(page, "Loss") == {"training": "2"}
    assert page.data["panels"][1]["series"][0]["y"] == [None, 2.0]
