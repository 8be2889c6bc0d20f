"""Results as JSON and as Markdown: nothing is lost or mixed up, and the committed page is that of
the committed results."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megabit.benchmark.document import MAX_RAW, Document, Part, Row, Sample
from megabit.benchmark.environment import commit_of, describe_place, versions
from megabit.benchmark.parts import kernels_part
from megabit.benchmark.render import NO_CARD, QUICK, render
from megabit.errors import UserError
from tests.command import megabit, refused

ROOT = Path(__file__).resolve().parent.parent.parent
COMMITTED = sorted((ROOT / "docs" / "results" / "benchmarks").glob("*.json"))
PAGE = ROOT / "docs" / "benchmarks.md"

OURS = Sample.of("megabit", [2.0, 4.0, 3.0], amount=60)
THEIRS = Sample.of("other", [6.0, 10.0, 12.0], amount=60)
ROW = Row("a step", OURS, THEIRS, "tokens", {"peak_memory_bytes": 5e6})
MACHINE = {
    "device": "cpu",
    "name": "A CPU",
    "isa": "avx2",
    "cores": 2,
    "system": "Linux",
    "load": 0.5,
    "host_memory_bytes": 2**34,
}
DOCUMENT = Document(
    commit="0123456789abcdef",
    is_dirty=False,
    date="2026-01-02T03:04:05+00:00",
    machine=MACHINE,
    versions={"python": "3.12.1", "torch": "2.13.0"},
    parts=(
        Part("train", "Training", {"layers": 4, "x_share": 0.5}, (ROW,), ("x: too large",)),
        Part("saves", "Saves", {}, (Row("a save", OURS, THEIRS),), command="megabit bench x"),
    ),
    failed={"engine": "needs transformers"},
)


def test_a_ratio_says_how_many_times_as_fast() -> None:
    assert ROW.ratio == pytest.approx(10 / 3)
    # 6 against 2 at best; at the 90th percentile, 11.6 against 3.8, it lies between.
    assert list(ROW.ratio_range) == pytest.approx([3.0, 10 / 3])
    half = replace(ROW, ours=Sample.of("megabit", [2.0, 4.0, 3.0], amount=30))
    assert half.ratio == pytest.approx(ROW.ratio / 2)


def test_of_many_times_there_is_the_summary() -> None:
    assert Sample.of("x", [1.0] * MAX_RAW).seconds == (1.0,) * MAX_RAW
    many = Sample.of("x", [1.0] * (MAX_RAW + 1))
    assert (many.seconds, many.timing.runs) == ((), MAX_RAW + 1)


def test_a_document_comes_back(tmp_path: Path) -> None:
    DOCUMENT.write(tmp_path / "results.json")
    assert Document.read(tmp_path / "results.json") == DOCUMENT
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"results.json: is not JSON"),
        ("[]", r"results.json: is not a file of megabit benchmarks, version 1; measure anew"),
        (json.dumps({"format": "megabit benchmarks", "version": 2}), r"version 1; measure anew"),
        (json.dumps({"format": "megabit benchmarks", "version": 1}), r"missing or wrong"),
    ],
)
def test_another_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match=message) as refusal:
        Document.read(tmp_path / "results.json")
    assert len(refusal.value.problems) == 1


def test_a_page() -> None:
    page = render([DOCUMENT])
    for line in (
        "## A CPU",
        "| device | 2 cores, avx2, 16 GiB of memory |",
        "| versions | python 3.12.1, torch 2.13.0 |",
        "| commit | `0123456789ab` |",
        "layers 4; x 50%",
        "| what | ours | baseline | ratio | peak memory |",
        "| a step | megabit: 20.0 tokens/s (−33 +27 % of 3) "
        "| other: 6.00 tokens/s (−40 +16 % of 3) | **3.33** (3.00–3.33) | 5 MB |",
        "| a save | megabit: 3.00 s (−33 +27 % of 3) | other: 10.0 s (−40 +16 % of 3) "
        "| **3.33** (3.00–3.33) |",
        "- x: too large",
        "Repeat: `megabit bench x`",
        "- engine: needs transformers",
    ):
        assert line in page.splitlines()
    assert NO_CARD.rstrip() in page
    assert QUICK not in page
    assert "Other programs" not in page
    busy = render([replace(DOCUMENT, machine={**MACHINE, "load": 7.5})])
    assert "**Other programs were running (load 7.5 on 2 cores): " in busy
    assert QUICK in render([replace(DOCUMENT, is_quick=True)])
    dirty = render([replace(DOCUMENT, is_dirty=True)])
    assert "| commit | `0123456789ab`, with changes that are not in it |" in dirty


def test_a_card_comes_last_and_tells_what_its_driver_says() -> None:
    card = {
        **MACHINE,
        "device": "cuda",
        "name": "A card",
        "isa": "sm_90",
        "card_memory_bytes": 80 * 2**30,
        "driver": "999.1",
        "clock_mhz": "1980",
        "memory_clock_mhz": "2619",
        "temperature_c": "40",
        "power_w": "300.5",
        "power_limit_w": "700.0",
    }
    page = render([replace(DOCUMENT, machine=card), DOCUMENT])
    assert page.index("## A CPU") < page.index("## A card")
    assert "| device | A card (sm_90), 80 GiB, driver 999.1 |" in page
    assert "| card before | 1980 MHz, memory 2619 MHz, 40 °C, 300.5 of 700.0 W |" in page
    assert NO_CARD.rstrip() not in page
    without = {name: value for name, value in card.items() if name not in ("driver", "clock_mhz")}
    assert "| device | A card (sm_90), 80 GiB |" in render([replace(DOCUMENT, machine=without)])


def test_kernels_stand_beside_what_they_replace() -> None:
    def row(contestant: str, median_us: float, caches: str = "cold") -> dict[str, object]:
        return {
            "model": "2b4t",
            "layer": "q, o",
            "n": 8,
            "k": 4,
            "m": 1,
            "threads": 1,
            "caches": caches,
            "contestant": contestant,
            "implementation": "native",
            "median_us": median_us,
            "min_us": median_us,
            "p90_us": median_us,
            "runs": 3,
            "roof_percent": 50.0,
        }

    whole = {
        "rows": [
            *(row("default", 1), row("bf16", 4), row("int_mm", 2), row("default", 9, "hot")),
            *(row("bitlinear", 2), row("fake_quantized", 30), row("fp32", 7)),
        ],
        "left_out": [],
    }
    part = kernels_part(whole)
    assert [(one.what, one.baseline.name, round(one.ratio, 6)) for one in part.rows] == [
        ("q, o (8 × 4), M = 1, product", "torch.mm, bf16", 4),
        ("q, o (8 × 4), M = 1, product", "torch._int_mm", 2),
        ("q, o (8 × 4), M = 1, layer", "fake-quantized layer", 15),
    ]


def test_where_it_was_measured(tmp_path: Path) -> None:
    document = describe_place(torch.device("cpu"))
    assert document.machine["cores"] >= 1
    assert document.machine["host_memory_bytes"] > 2**28
    assert {"python", "megabit", "torch"} <= document.versions.keys() == versions().keys()
    assert commit_of(tmp_path) == ("", False)
    assert "| commit | not a checkout |" in render([replace(document, commit="")])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    DOCUMENT.write(tmp_path / "a.json")
    (tmp_path / "page.md").write_text("an old one")
    assert megabit("bench", "render", "a.json", "--out", "page.md") == (0, [], [])
    assert (tmp_path / "page.md").read_text() == render([DOCUMENT])
    assert (
        refused("bench", "render", "b.json") == "b.json: cannot read it (No such file or directory)"
    )
    assert refused("bench", "render", "a.json", "--out", "no/x.md") == "--out: no is not a folder"


def test_the_page_is_that_of_the_results() -> None:
    """``make bench-docs`` writes it anew."""
    assert COMMITTED
    assert PAGE.read_text(encoding="utf-8") == render([Document.read(path) for path in COMMITTED])


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_results_name_no_place(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for place in ("/work", "/tmp", "/home", "/root"):
        assert place not in text
