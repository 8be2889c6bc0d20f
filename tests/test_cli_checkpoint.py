"""``megabit ckpt``, ``import`` and ``export``: what they print and find, and their exit codes."""

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megabit.checkpoint import Manifest
from megabit.checkpoint.diagnose import diagnose
from megabit.checkpoint.model_source import open_model
from megabit.checkpoint.source import logical_tensors
from megabit.checkpoint.ternary import write_ternary, write_training
from megabit.cli.main import main
from megabit.cli.progress import watched
from megabit.cli.words import size_text
from megabit.files import describe_file
from megabit.launch import run_ranks
from tests.checkpoint.saved import save, trained
from tests.interop.hf_models import save_random
from tests.interop.random_source import TINY, RandomSource
from tests.training.tiny import tiny, tiny_corpus

UP = "model.layers.1.mlp.up_proj.weight"
Megabit = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def megabit(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Megabit:
    """Runs a command in this process; gives its exit code and the lines of stdout and stderr."""

    def run(*arguments: str | Path) -> tuple[int, list[str], list[str]]:
        monkeypatch.setattr(sys, "argv", ["megabit", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out.splitlines(), err.splitlines()

    return run


@pytest.fixture
def refused(megabit: Megabit) -> Callable[..., str]:
    """The line with which a command that must end with 2 says why."""

    def run(*arguments: str | Path) -> str:
        code, _, err = megabit(*arguments)
        assert (code, len(err)) == (2, 1), err
        assert err[0].startswith("error: ")
        return err[0].removeprefix("error: ")

    return run


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_corpus(tmp_path_factory.mktemp("text")).tokenizer_path


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """Steps 1 and 2 of a run at TP 2, with both kinds of checkpoint."""
    run = tmp_path_factory.mktemp("saved") / "run"

    def write() -> None:
        for step in (1, 2):
            save(trained(tiny("parallel.tp=2"), step), run, step, {"tokenizer.json": tokenizer})

    run_ranks(write, 2)
    return run


@pytest.fixture
def run(saved_run: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(saved_run, tmp_path / "run")
    return tmp_path / "run"


# What is in a checkpoint.


def test_show_lists_the_checkpoints_of_a_run(megabit: Megabit, run: Path) -> None:
    code, out, err = megabit("ckpt", "show", run)
    assert (code, err) == (0, [])
    rows = [line.split() for line in out if re.match(r" \d", line)]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("1", "training", "1"),  # of DP 1
        ("2", "training", "latest"),
        ("1", "ternary", "1"),
        ("2", "ternary", "latest"),
    ]
    assert all("TP 2 × PP 1 × DP 1" in " ".join(row) for row in rows)
    assert megabit("ckpt", "show", run / "snapshots")[1] == out[len(out) // 2 :]


def test_show_lists_damaged_checkpoints_too(megabit: Megabit, run: Path) -> None:
    (run / "checkpoints" / "step_00000001" / "manifest.json").write_text("{}")
    code, out, _ = megabit("ckpt", "show", run / "checkpoints")
    assert code == 0
    (line,) = [line for line in out if line.startswith(" 1")]
    assert re.search(r"damaged .*step_00000001/manifest.json: is not the manifest", line)


def test_show_says_what_a_checkpoint_is(megabit: Megabit, run: Path) -> None:
    code, out, err = megabit("ckpt", "show", run / "checkpoints" / "step_00000002")
    assert (code, err) == (0, [])
    text = "\n".join(out)
    for expected in (
        r"kind +training: masters and moments",
        r"step +2, 2 updates",
        r"model +0.03 M parameters, ternary, 2 layers × 32, 4 heads \(2 of keys and values\), feed",
        r"saved by +TP 2 × PP 1 × DP 1",
        r"settings .*parallel.tp=2 .*data.seq_length=16",
        r"rank_00001.safetensors +\d+.\d kB +[0-9a-f]{16}",
        r"assets/tokenizer.json",
        r"master +24 +float32 +101.1 kB",
    ):
        assert re.search(expected, text), expected
    assert UP not in text
    _, out, _ = megabit("ckpt", "show", run / "snapshots" / "step_00000002")
    text = "\n".join(out)
    assert "it cannot resume a run" in text
    assert re.search(r"codes, four to a byte +14 +uint8 +3.8 kB", text)
    assert re.search(r"scale +14 +float32 +56 B", text)
    assert re.search(r"dense +10 +float32", text)


def test_show_lists_tensors_in_the_order_of_the_model(megabit: Megabit, run: Path) -> None:
    _, out, _ = megabit("ckpt", "show", run / "snapshots", "--tensors")  # of the latest
    rows = [line.split() for line in out if line.startswith(" model.")]
    names = [row[0].removesuffix(".codes").removesuffix(".scale") for row in rows]
    assert [*dict.fromkeys(names)] == [*logical_tensors(tiny().model)]
    assert [f"{UP}.codes", "uint8", "[48,", "8]", "2"] in rows
    assert [f"{UP}.scale", "float32", "[]", "1"] in rows


# Is it what was saved?


def test_checkpoints_in_order(megabit: Megabit, run: Path) -> None:
    code, out, err = megabit("ckpt", "verify", run)
    assert (code, err) == (0, [])
    assert len(out) == 4
    for line in out:
        assert re.fullmatch(
            r"in order: \S+/step_0000000\d, (training|ternary), step \d, 4 files, [\d.]+ kB", line
        )
    one = run / "snapshots" / "step_00000001"
    assert megabit("ckpt", "verify", one)[1] == [line for line in out if str(one) in line]
    assert len(megabit("ckpt", "verify", run / "checkpoints")[1]) == 2


def flip(path: Path, position: float) -> None:
    """A bit, at a share of the file's length."""
    content = bytearray(path.read_bytes())
    content[min(int(position * len(content)), len(content) - 1)] ^= 0x10
    path.write_bytes(content)


def rewrite(folder: Path, file: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Other tensors in a rank's file, and hashes that fit them: who does so is not found by a hash.

    Where parts belong stays as it was.
    """
    path = folder / file
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, {key: value for key, value in metadata.items() if tensors})
    manifest = Manifest.read(folder)
    replace(manifest, files={**manifest.files, file: describe_file(path)}).write(folder)


def in_other_dtype(tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        tensors[name] = tensors[name].half()


def cut_rows(tensors: dict[str, Tensor]) -> None:
    tensors[f"master/{UP}"] = tensors[f"master/{UP}"][:-1].clone()


RANK_1 = "rank_00001.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda c: (c / RANK_1).write_bytes((c / RANK_1).read_bytes()[:-100]),
        rf"{RANK_1}: has \d+ bytes, but \d+ were saved",
    ),
    "longer": (
        lambda c: (c / RANK_1).write_bytes((c / RANK_1).read_bytes() + b"\0"),
        rf"{RANK_1}: has \d+ bytes",
    ),
    "bit of a shard": (lambda c: flip(c / RANK_1, 0.9), rf"{RANK_1}: is not what was saved"),
    "bit of a header": (lambda c: flip(c / RANK_1, 0.001), rf"{RANK_1}: is not what was saved"),
    "bit of the tokenizer": (
        lambda c: flip(c / "assets" / "tokenizer.json", 0.5),
        r"assets/tokenizer.json: is not what was saved",
    ),
    "bit of the manifest": (lambda c: flip(c / "manifest.json", 0.5), r"manifest.json: "),
    "manifest cut": (
        lambda c: (c / "manifest.json").write_bytes((c / "manifest.json").read_bytes()[:-9]),
        r"manifest.json: cannot read it",
    ),
    "no manifest": (lambda c: (c / "manifest.json").unlink(), r"manifest.json: cannot read it"),
    "no shard": (lambda c: (c / RANK_1).unlink(), rf"{RANK_1}: is missing"),
    "no tokenizer": (
        lambda c: (c / "assets" / "tokenizer.json").unlink(),
        r"assets/tokenizer.json: is missing",
    ),
    "extra file": (
        lambda c: (c / "rank_00002.safetensors").write_bytes(b""),
        r"rank_00002.safetensors: is not part of the checkpoint",
    ),
    "extra tensor": (
        lambda c: add_file(c, {"master/extra": torch.zeros(2)}),
        r"step_00000002: master/extra is none of the model's tensors",
    ),
    "another dtype": (
        lambda c: [rewrite(c, f"rank_0000{i}.safetensors", in_other_dtype) for i in (0, 1)],
        r"step_00000002: master/\S+ is torch.float16, not torch.float32",
    ),
    "another dtype on a rank": (
        lambda c: rewrite(c, RANK_1, in_other_dtype),
        r"step_00000002: .* is torch.float32 in one file and torch.float16 in another",
    ),
    "not all rows": (
        lambda c: rewrite(c, RANK_1, cut_rows),
        rf"step_00000002: master/{UP} has shape \[47, 32\], the model needs \[48, 32\]",
    ),
    "a shard of another step": (
        lambda c: shutil.copy(c.with_name("step_00000001") / RANK_1, c / RANK_1),
        rf"{RANK_1}: ",
    ),
}


def add_file(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / "rank_00002.safetensors"
    save_file(tensors, path)
    manifest = Manifest.read(folder)
    replace(manifest, files={**manifest.files, path.name: describe_file(path)}).write(folder)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(megabit: Megabit, run: Path, damage: str) -> None:
    """Of the checkpoint that is damaged, and of no other."""
    spoil, message = DAMAGES[damage]
    checkpoint = run / "checkpoints" / "step_00000002"
    spoil(checkpoint)
    code, out, err = megabit("ckpt", "verify", run)
    assert code == 2
    assert err
    assert all(line.startswith(f"error: {checkpoint}") for line in err)
    assert re.search(message, err[0]), err[0]
    if "dtype" not in damage:  # which all tensors have
        assert len(err) == 1
    assert len(out) == 3
    assert not any(str(checkpoint) in line for line in out)
    assert megabit("ckpt", "verify", checkpoint.with_name("step_00000001"))[0] == 0


@pytest.mark.parametrize("kind", ["checkpoints", "snapshots"])
def test_a_flipped_bit_is_found_wherever_it_is(run: Path, kind: str) -> None:
    checkpoint = run / kind / "step_00000001"
    for path in [path for path in checkpoint.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        for position in [i / 13 for i in range(14)]:
            flip(path, position)
            problems = diagnose(checkpoint)
            assert len(problems) == 1, (path, position)
            assert problems[0].startswith(str(path))
            path.write_bytes(content)
    assert diagnose(checkpoint) == []


def test_all_problems_are_told(megabit: Megabit, run: Path) -> None:
    first, second = (run / "checkpoints" / f"step_0000000{step}" for step in (1, 2))
    flip(first / RANK_1, 0.9)
    (first / "assets" / "tokenizer.json").unlink()
    (second / "manifest.json").write_text("{")
    code, out, err = megabit("ckpt", "verify", run / "checkpoints")
    assert (code, out) == (2, [])
    assert sorted(line.split(":")[1].strip() for line in err) == [
        f"{first}/assets/tokenizer.json",
        f"{first}/{RANK_1}",
        f"{second}/manifest.json",
    ]


def test_a_latest_that_is_not_there(megabit: Megabit, run: Path) -> None:
    (run / "checkpoints" / "latest").write_text("step_00000009\n")
    code, out, err = megabit("ckpt", "verify", run)
    assert (code, len(out), len(err)) == (2, 4, 1)
    assert "step_00000009/manifest.json: cannot read it" in err[0]


@pytest.mark.parametrize("command", [("show",), ("verify",)])
def test_a_folder_without_a_checkpoint(
    refused: Callable[..., str], tmp_path: Path, command: tuple[str]
) -> None:
    assert "holds no checkpoint" in refused("ckpt", *command, tmp_path)
    assert "does not exist" in refused("ckpt", *command, tmp_path / "none")


# Models of other tools.


def test_export_safetensors(megabit: Megabit, saved_run: Path, tmp_path: Path) -> None:
    """Of a run, of its snapshot, and of the result: the same codes, scales and step."""
    sources = [saved_run, saved_run / "snapshots" / "step_00000002", tmp_path / "0"]
    for i, source in enumerate(sources):
        out = tmp_path / str(i)
        code, lines, err = megabit("export", "safetensors", source, out)
        assert (code, err) == (0, [])
        assert re.fullmatch(
            rf"Wrote {out}: 38 tensors, [\d.]+ kB, of which codes and scales are 3.9 kB", *lines
        )
        found = open_model(out)
        assert found.manifest.step == found.manifest.updates == 2
        assert found.manifest.run["layout"] == {"tp": 2, "pp": 1, "dp": 1}
        assert [*found.assets] == ["tokenizer.json"]
    files = [(tmp_path / str(i) / "model.safetensors").read_bytes() for i in range(3)]
    assert files == [files[0]] * 3
    megabit("export", "safetensors", saved_run, tmp_path / "half", "--dtype", "bfloat16")
    assert open_model(tmp_path / "half").values("model.embed_tokens.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("linear_class", ["autobitlinear", "bitlinear"])
def test_there_and_back_is_the_same_file(
    megabit: Megabit, saved_run: Path, tmp_path: Path, linear_class: str
) -> None:
    """Of codes, through Hugging Face's format: nothing is rounded, and γ does not shrink."""
    megabit("export", "safetensors", saved_run, tmp_path / "direct")
    source = tmp_path / "direct"
    for i in range(2):
        packed, back = tmp_path / f"packed{i}", tmp_path / f"back{i}"
        options = ("--dtype", "float32", "--linear-class", linear_class)
        assert megabit("export", "hf", source, packed, *options)[0] == 0
        code, out, err = megabit("import", "hf", packed, back)
        assert (code, err) == (0, [])
        assert re.match(rf"Read {packed}: 0.03 M parameters, ternary", out[0])
        assert re.match(rf"Wrote {back}: ternary, 38 tensors", out[1])
        assert out[2].endswith("not trained further.")
        source = back
    files = [tmp_path / name / "model.safetensors" for name in ("direct", "back0", "back1")]
    assert [file.read_bytes() for file in files] == [files[0].read_bytes()] * 3


def test_master_weights_there_and_back(megabit: Megabit, saved_run: Path, tmp_path: Path) -> None:
    online, back = tmp_path / "online", tmp_path / "back"
    options = ("--mode", "online", "--dtype", "float32")
    code, out, _ = megabit("export", "hf", saved_run, online, *options)
    assert (code, len(out)) == (0, 1)
    code, out, _ = megabit("import", "hf", online, back)
    assert code == 0
    assert re.match(rf"Wrote {back}: training, 24 tensors", out[1])
    assert out[2] == f"To train it further: megabit train run.init_from={back} …"
    masters, found = open_model(saved_run), open_model(back)
    for name in logical_tensors(masters.model):
        assert torch.equal(found.values(name), masters.values(name))


def test_codes_that_bf16_changes_are_counted(
    megabit: Megabit, saved_run: Path, tmp_path: Path
) -> None:
    code, out, _ = megabit("export", "hf", saved_run, tmp_path / "out", "--mode", "online")
    assert code == 0
    match = re.match(r"note: (\d+) of 15360 codes \(0.\d+%\) change", out[1])
    assert match is not None
    old, new = open_model(saved_run), load_file(tmp_path / "out" / "model.safetensors")
    changed = 0
    for name, tensor in logical_tensors(old.model).items():
        if tensor.is_ternary:
            codes = [torch.empty(0)] * 2
            for i, values in enumerate((old.values(name), new[name].float())):
                scale = values.double().abs().mean().float()
                codes[i] = (values / scale).round().clamp(-1, 1)
            changed += int((codes[0] != codes[1]).sum())
    assert int(match[1]) == changed


def test_import_of_a_dense_model(megabit: Megabit, tmp_path: Path) -> None:
    """A start for conversion: what it lacks are gains of one."""
    save_random(tmp_path / "llama", replace(TINY, hidden_act="silu"), torch.bfloat16, "Llama")
    code, out, err = megabit("import", "hf", tmp_path / "llama", tmp_path / "out")
    assert (code, err) == (0, [])
    assert ": training, 24 tensors" in out[1]
    assert "Train it before use" in out[2]
    found = open_model(tmp_path / "out")
    assert found.model.linear == "ternary"
    stored = load_file(tmp_path / "llama" / "model.safetensors")
    for name in logical_tensors(found.model):
        expected = stored[name].float() if name in stored else torch.ones_like(found.values(name))
        assert torch.equal(found.values(name), expected)
        assert (name in stored) != name.endswith("_sub_norm.weight")
    code, out, _ = megabit("export", "safetensors", tmp_path / "llama", tmp_path / "codes")
    assert code == 0
    assert out[0].startswith(f"warning: {tmp_path / 'llama'} was not trained as a ternary model")


def test_export_gguf(megabit: Megabit, tokenizer: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader

    model = replace(TINY, hidden_size=256, intermediate_size=256)
    write_training(RandomSource(model, assets={"tokenizer.json": tokenizer}), tmp_path / "wide")
    for i, kind in enumerate(("TQ2_0", "TQ1_0", "I2_S")):
        out = tmp_path / f"{kind}.gguf"
        code, lines, err = megabit("export", "gguf", tmp_path / "wide", out, "--type", kind)
        assert (code, err) == (0, [])
        assert re.match(rf"Wrote {out}: \d+ tensors, [\d.]+ [kM]B", lines[0])
        assert out.is_file()
        assert any(line.startswith("note: scales are fp16") for line in lines) == (i < 2)
        # ReLU², and a type that only one fork reads.
        assert any(line.startswith("warning: ") for line in lines)
    assert len(GGUFReader(tmp_path / "TQ2_0.gguf").tensors) > 20


def test_what_cannot_be_exported(
    refused: Callable[..., str], saved_run: Path, tmp_path: Path
) -> None:
    snapshot = saved_run / "snapshots"
    (tmp_path / "there").mkdir()
    for arguments, message in [
        (("hf", snapshot, tmp_path / "out", "--mode", "online"), "needs master weights"),
        (("hf", saved_run, tmp_path / "there"), "there: exists"),
        (("safetensors", saved_run, tmp_path / "there"), "there: exists"),
        (("gguf", saved_run, tmp_path / "there"), "there: exists"),
        (("safetensors", saved_run, tmp_path / "no" / "out"), "there is no folder"),
        (("safetensors", tmp_path / "there", tmp_path / "out"), "holds no checkpoint"),
    ]:
        assert message in refused("export", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_what_cannot_be_imported(
    refused: Callable[..., str], saved_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    write_ternary(RandomSource(), tmp_path / "ours")
    for path in ("empty", "none", "ours"):
        assert path in refused("import", "hf", tmp_path / path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# What they have in common.


@pytest.mark.parametrize(
    "command",
    [
        ("ckpt", "show"),
        ("ckpt", "verify"),
        ("import", "hf"),
        ("export", "hf"),
        ("export", "gguf"),
        ("export", "safetensors"),
    ],
    ids=" ".join,
)
def test_help_has_an_example(megabit: Megabit, command: tuple[str, ...]) -> None:
    code, out, _ = megabit(*command, "--help")
    assert code == 0
    assert f"Example: megabit {' '.join(command)} " in " ".join(" ".join(out).split())


@pytest.mark.parametrize("has_masters", [True, False])
def test_a_watched_model_is_the_model_and_is_seen_whole(
    has_masters: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Progress adds up to the model's size, whatever is read of it and however often."""
    source = RandomSource(has_masters=has_masters)
    done: dict[str, float] = {}
    with watched(source) as model:
        advance = model.advance  # type: ignore[attr-defined]

        def counted(name: str, more: float) -> None:
            done[name] = done.get(name, 0) + more
            advance(name, more)

        object.__setattr__(model, "advance", counted)
        write_ternary(model, tmp_path / "out")
        write_ternary(model, tmp_path / "again")
    sizes = {n: torch.Size(t.shape).numel() for n, t in logical_tensors(source.model).items()}
    assert done == sizes
    plain = tmp_path / "plain"
    write_ternary(source, plain)
    files = [folder / "model.safetensors" for folder in (plain, tmp_path / "out")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_sizes_in_words() -> None:
    assert [size_text(size) for size in (0, 999, 1000, 999_949, 999_950, 12_345_678, 3e15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "999.9 kB",
        "1.0 MB",
        "12.3 MB",
        "3000.0 TB",
    ]
