"""The manifest: what it says comes back, and whatever else the file holds is one clear error."""

import hashlib
import json
import sys
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megabit.checkpoint import DamagedCheckpoint, Manifest
from megabit.checkpoint.verify import verify
from megabit.config import ModelConfig
from megabit.errors import UserError
from megabit.files import FileInfo
from tests.checkpoint.stored import MODEL, dies_before, manifest, names_in, write_checkpoint

FILES = {"rank_00000.safetensors": FileInfo(12, "a" * 64), "assets/tokenizer.json": FileInfo(0, "")}
Tree = dict[str, Any]


def read_tree(folder: Path) -> Tree:
    return json.loads((folder / "manifest.json").read_text())


def write_tree(folder: Path, tree: object) -> None:
    (folder / "manifest.json").write_text(json.dumps(tree))


def sign(tree: Tree) -> Tree:
    """With the right checksum, as anyone can compute it."""
    text = json.dumps({**tree, "checksum": None}, sort_keys=True, separators=(",", ":"))
    return {**tree, "checksum": hashlib.sha256(text.encode()).hexdigest()}


def assert_clear(error: UserError, folder: Path) -> None:
    """Each problem is one line that names the file."""
    assert error.problems
    for problem in error.problems:
        assert problem.startswith(f"{folder / 'manifest.json'}: ")
        assert problem.isprintable()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    replace(manifest(7), files=FILES).write(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", ["training", "ternary"])
@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        ModelConfig(),
        replace(MODEL, hidden_act="silu", linear="dense", tie_word_embeddings=False),
        replace(MODEL, rope_theta=5e5, rms_norm_eps=1e-6, initializer_range=0.1 + 0.2),
    ],
)
def test_a_manifest_comes_back(kind: Any, model: ModelConfig, tmp_path: Path) -> None:
    run = {"config": {"a": [1, 2.5, None, True]}, "γ": "\n\ud800", "none": {}}
    written = Manifest(kind, 10, 9, model, 2048, FILES, run)
    written.write(tmp_path)
    assert Manifest.read(tmp_path) == written
    assert names_in(tmp_path) == {"manifest.json"}


def test_the_same_manifest_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    before = (folder / "manifest.json").read_bytes()
    Manifest.read(folder).write(tmp_path)
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_a_kill_while_it_is_written_leaves_none_or_all(tmp_path: Path) -> None:
    kills = 0
    while dies_before(kills + 1, lambda: manifest(7).write(tmp_path)):
        kills += 1
        if (tmp_path / "manifest.json").exists():
            assert Manifest.read(tmp_path) == manifest(7)
            (tmp_path / "manifest.json").unlink()
    assert kills >= 8
    assert Manifest.read(tmp_path) == manifest(7)


def test_no_bit_flips_unnoticed(folder: Path) -> None:
    """One bit of each byte, another one from byte to byte: either the file is refused, or it says
    the same (``1e-05`` and ``1E-05``)."""
    path = folder / "manifest.json"
    content, expected = path.read_bytes(), Manifest.read(folder)
    assert b"1e-05" in content
    refused = same = 0
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            found = Manifest.read(folder)
        except UserError as error:
            assert_clear(error, folder)
            refused += 1
        else:
            assert found == expected, place
            same += 1
    assert refused + same == len(content)
    assert same <= 1  # of a float's E


def test_no_cut_is_unnoticed(folder: Path) -> None:
    path = folder / "manifest.json"
    content = path.read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 2):
        path.write_bytes(content[:length])
        with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: cannot read it"):
            Manifest.read(folder)
    path.write_bytes(content + b"{}")
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: cannot read it"):
        Manifest.read(folder)


def test_a_folder_without_one(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: cannot read it"):
            Manifest.read(folder)
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: cannot read it"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("version", [1, 3, "2", None, True])
def test_another_version_is_no_damage(version: object, folder: Path) -> None:
    """Nothing is wrong with it: to fall back from it would lose steps in silence."""
    write_tree(folder, sign({**read_tree(folder), "version": version}))
    with pytest.raises(
        UserError, match=r"is of version .*; this megabit reads version 2"
    ) as caught:
        Manifest.read(folder)
    assert not isinstance(caught.value, DamagedCheckpoint)


@pytest.mark.parametrize("tree", [[], "x", 1, None, {}, {"format": "zip"}])
def test_what_is_no_manifest(tree: object, tmp_path: Path) -> None:
    write_tree(tmp_path, tree)
    with pytest.raises(DamagedCheckpoint, match="is not the manifest of a megabit checkpoint"):
        Manifest.read(tmp_path)


def test_a_checksum_of_something_else(folder: Path) -> None:
    for change in ({"step": 8}, {"checksum": None}, {"checksum": 1}, {"extra": 1}):
        write_tree(folder, {**read_tree(folder), **change})
        with pytest.raises(DamagedCheckpoint, match="its checksum differs"):
            Manifest.read(folder)


def changed(key: str, value: object) -> Callable[[Tree], Tree]:
    """``key`` is a path such as ``model.hidden_size``."""

    def change(tree: Tree) -> Tree:
        *path, last = key.split(".")
        node = tree
        for name in path:
            node = node[name]
        node[last] = value
        return tree

    return change


def without(key: str) -> Callable[[Tree], Tree]:
    return lambda tree: {k: v for k, v in tree.items() if k != key}


INFO = {"bytes": 1, "sha256": "a" * 64}
HOSTILE = {
    **{f"no {key}": without(key) for key in ("kind", "step", "model", "files", "run")},
    **{f"kind {value!r}": changed("kind", value) for value in ("other", None, [], {}, 1)},
    **{
        f"{key} {value!r}": changed(key, value)
        for key in ("step", "updates", "max_length", "model.hidden_size")
        for value in (-1, 1.5, "x", None, [1], {"a": 1})
    },
    **{f"step {value!r}": changed("step", value) for value in ("1", True, 1 << 63)},
    **{f"files {value!r}": changed("files", value) for value in (None, [], "x", 1, [["a", INFO]])},
    **{f"run {value!r}": changed("run", value) for value in (None, 1, "xyz", [1])},
    **{f"model {value!r}": changed("model", value) for value in ([], "x", 1, {"": 1}, {"a.b": 1})},
    "infinite": changed("model.rope_theta", float("inf")),
    "not a number": changed("model.rms_norm_eps", float("nan")),
    "no heads": changed("model.num_attention_heads", 0),
    "interpolation": changed("model.hidden_size", "${model.vocab_size}"),
    "unknown": changed("model.surprise", 1),
    **{
        f"file {name!r}": changed("files", {name: INFO})
        for name in (
            *("/etc/passwd", "../latest", "a/../../b", "..", ".", "", "a//b", "a/./b", "a/"),
            *("a\nb", "a\0b", "a\ud800", "\x1b[2J"),
        )
    },
    **{
        f"info {value!r}": changed("files", {"rank_00000.safetensors": value})
        for value in (
            *(None, 1, "x", [], {}, {"bytes": 1}, {"sha256": ""}, {**INFO, "bytes": -1}),
            *({**INFO, "bytes": "1"}, {**INFO, "bytes": 1.0}, {**INFO, "bytes": 1 << 64}),
        )
    },
}
"""Each with a right checksum."""


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_content_is_one_clear_error(change: Callable[[Tree], Tree], folder: Path) -> None:
    write_tree(folder, sign(change(read_tree(folder))))
    with pytest.raises(UserError) as caught:
        Manifest.read(folder)
    assert_clear(caught.value, folder)


@pytest.mark.parametrize("place", ["model", "model.hidden_act", "files", "run", "kind"])
def test_deep_nesting_is_one_clear_error(place: str, folder: Path) -> None:
    """With a right checksum: each part of the reading has a depth of its own at which Python gives
    up, and these are close to each other."""
    tree, limit = read_tree(folder), sys.getrecursionlimit()

    def refused(depth: int) -> str:
        sys.setrecursionlimit(20_000)  # to make what cannot be read
        try:
            nested = json.loads('{"a":' * depth + "1" + "}" * depth)
            write_tree(folder, sign(changed(place, nested)(tree)))
        finally:
            sys.setrecursionlimit(limit)
        try:
            Manifest.read(folder)
        except UserError as error:
            assert_clear(error, folder)
            return str(error)
        return ""

    assert (refused(2) == "") == (place == "run")  # which holds anything
    deepest = bisect_left(range(5000), True, key=lambda depth: "cannot read it" in refused(depth))
    assert deepest > 100
    for depth in range(deepest - 5, deepest):
        assert (refused(depth) == "") == (place == "run")


def test_nesting_that_no_parser_takes(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 1_000_000)
    with pytest.raises(DamagedCheckpoint, match="cannot read it"):
        Manifest.read(folder)


def test_a_manifest_that_is_too_large_is_not_read(folder: Path) -> None:
    with (folder / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)  # takes no room on disk
    with pytest.raises(DamagedCheckpoint, match="too large"):
        Manifest.read(folder)


def test_a_number_of_too_many_digits(folder: Path) -> None:
    content = (folder / "manifest.json").read_text().replace('"step": 7', '"step": ' + "7" * 10_000)
    (folder / "manifest.json").write_text(content)
    with pytest.raises(DamagedCheckpoint, match="cannot read it"):
        Manifest.read(folder)


@pytest.mark.parametrize(
    "change",
    [
        changed("model.num_hidden_layers", 10**12),
        changed("model.num_hidden_layers", 40),
        changed("model.vocab_size", 10**15),
        changed("model.linear", "dense"),
        changed("updates", 0),
        changed("kind", "ternary"),
    ],
    ids=["no end", "layers", "large", "dense", "updates", "kind"],
)
def test_a_model_that_the_files_do_not_hold(change: Callable[[Tree], Tree], tmp_path: Path) -> None:
    """Sizes that nothing fits are no reason to run out of memory."""
    path = write_checkpoint(tmp_path / "checkpoint", 1)
    write_tree(path, sign(change(read_tree(path))))
    if read_tree(path)["model"]["linear"] == "dense":
        assert [*verify(path)]  # masters are masters
        return
    with pytest.raises(DamagedCheckpoint) as caught:
        [*verify(path)]
    assert 1 <= len(caught.value.problems) <= 10
    assert all(problem.startswith(str(path)) for problem in caught.value.problems)
