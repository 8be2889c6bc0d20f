"""``megabit import`` and ``export``: what they print and write, and their exit codes."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megabit.checkpoint.folder import find_checkpoint
from megabit.checkpoint.model_source import open_model
from megabit.checkpoint.progress import Report
from megabit.checkpoint.source import logical_tensors
from megabit.checkpoint.ternary import write_ternary, write_training
from megabit.config import load_config
from megabit.interop.gguf_export import export_gguf
from megabit.interop.huggingface import export_huggingface
from tests.checkpoint.saved import save_run
from tests.command import megabit, refused
from tests.interop.gguf_tokenizers import own_tokenizer
from tests.interop.hf_models import save_random
from tests.interop.random_source import TINY, RandomSource


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("saved"))


def test_export_safetensors(saved_run: Path, tmp_path: Path) -> None:
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
    saved_run: Path, tmp_path: Path, linear_class: str
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


def test_master_weights_there_and_back(saved_run: Path, tmp_path: Path) -> None:
    online, back = tmp_path / "online", tmp_path / "back"
    options = ("--mode", "online", "--dtype", "float32")
    code, out, _ = megabit("export", "hf", saved_run, online, *options)
    assert (code, len(out)) == (0, 1)
    code, out, _ = megabit("import", "hf", online, back)
    assert code == 0
    assert re.match(rf"Wrote {back}: training, 24 tensors", out[1])
    settings, tokenizer = (back / "assets" / name for name in ("model.yaml", "tokenizer.json"))
    assert out[2:] == [
        f"To train it further: megabit train {settings} run.init_from={back} …",
        f"Its tokenizer, for a text of yours: data.tokenizer={tokenizer}",
    ]
    assert load_config([str(settings)]).model == open_model(saved_run).model
    masters, found = open_model(saved_run), open_model(back)
    for name in logical_tensors(masters.model):
        assert torch.equal(found.values(name), masters.values(name))


def test_import_compares_logits_if_asked_to(saved_run: Path, tmp_path: Path) -> None:
    for mode in ("offline", "online"):
        folder = tmp_path / mode
        megabit("export", "hf", saved_run, folder, "--mode", mode)
        code, out, err = megabit(
            "import", "hf", folder, tmp_path / f"{mode}-in", "--check-tokens", 16
        )
        assert (code, err) == (0, [])
        match = re.match(
            r"Beside transformers: logits differ by (\S+) on average, \S+ at most \(they spread by "
            r"(\S+)\); the most likely token is the same at [\d.]+% of positions",
            out[-1],
        )
        assert match is not None, out
        # bf16 has 8 bits, and int8 activations as many; another model would differ by the spread.
        assert 0 < float(match[1]) < float(match[2]) / 10
    save_random(tmp_path / "llama", replace(TINY, hidden_act="silu"), torch.bfloat16, "Llama")
    for name, tokens, message in [
        ("llama", 8, r"--check-tokens: .*llama: is a dense"),
        ("offline", 17, r"--check-tokens: must be 16 at most"),
    ]:
        out = tmp_path / "out"
        line = refused("import", "hf", tmp_path / name, out, "--check-tokens", tokens)
        assert re.match(message, line)
        assert not out.exists()


def test_codes_that_bf16_changes_are_counted(saved_run: Path, tmp_path: Path) -> None:
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


def test_import_of_a_dense_model(tmp_path: Path) -> None:
    """A start for conversion: a run inserts the norms that it lacks."""
    save_random(tmp_path / "llama", replace(TINY, hidden_act="silu"), torch.bfloat16, "Llama")
    code, out, err = megabit("import", "hf", tmp_path / "llama", tmp_path / "out")
    assert (code, err) == (0, [])
    assert ": training, 20 tensors" in out[1]
    assert "Train it before use" in out[2]
    found = open_model(tmp_path / "out")
    assert found.model.linear == "ternary"
    assert found.model.norm_placement == "prenorm"
    stored = load_file(tmp_path / "llama" / "model.safetensors")
    for name in logical_tensors(found.model):
        assert torch.equal(found.values(name), stored[name].float())
    code, out, _ = megabit("export", "safetensors", tmp_path / "llama", tmp_path / "codes")
    assert code == 0
    assert out[0].startswith(f"warning: {tmp_path / 'llama'} was not trained as a ternary model")


def test_export_gguf(saved_run: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader

    model = replace(TINY, hidden_size=256, intermediate_size=256)
    write_training(RandomSource(model, assets=open_model(saved_run).assets), tmp_path / "wide")
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


def test_what_cannot_be_exported(saved_run: Path, tmp_path: Path) -> None:
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


def test_what_cannot_be_imported(saved_run: Path, tmp_path: Path) -> None:
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
def test_help_has_an_example(command: tuple[str, ...]) -> None:
    code, out, _ = megabit(*command, "--help")
    assert code == 0
    assert f"Example: megabit {' '.join(command)} " in " ".join(" ".join(out).split())


def test_writers_tell_how_far_they_are(tmp_path: Path) -> None:
    """Every tensor once, and a share of all that grows from 0 to nearly 1."""
    source = RandomSource()
    own_tokenizer().save(str(tmp_path / "tokenizer.json"))
    wide = replace(TINY, vocab_size=400, hidden_size=256, intermediate_size=256)
    with_tokenizer = RandomSource(wide, assets={"tokenizer.json": tmp_path / "tokenizer.json"})
    writers: list[Callable[[Path, Report], object]] = [
        lambda out, report: write_ternary(source, out, report=report),
        lambda out, report: write_training(source, out, report=report),
        lambda out, report: export_huggingface(source, out, report=report),
        lambda out, report: export_gguf(with_tokenizer, out, "TQ2_0", report=report),
    ]
    for number, write in enumerate(writers):
        told: list[tuple[str, float]] = []
        write(tmp_path / f"{number}", lambda name, share, told=told: told.append((name, share)))
        names, shares = zip(*told, strict=True)
        assert len({*names}) == len(names) > 20
        assert shares[0] == 0
        assert list(shares) == sorted(shares)
        assert 0.8 < shares[-1] < 1


@pytest.mark.parametrize("kind", ["hf", "gguf", "safetensors"])
def test_a_damaged_model_is_not_exported(kind: str, saved_run: Path, tmp_path: Path) -> None:
    """Its copy would be in order, with hashes of its own."""
    run = tmp_path / "run"
    shutil.copytree(saved_run, run)
    file = find_checkpoint(run) / "rank_00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    message = refused("export", kind, run, tmp_path / "out")
    assert message == f"{file}: is not what was saved: its SHA-256 differs"
    assert not (tmp_path / "out").exists()


def test_without_latest_the_newest_training_checkpoint_is_exported(
    saved_run: Path, tmp_path: Path
) -> None:
    """Not the snapshot beside it: training goes on from that checkpoint, too."""
    run = tmp_path / "run"
    shutil.copytree(saved_run, run)
    (run / "checkpoints" / "latest").unlink()
    code, _, _ = megabit("export", "hf", run, tmp_path / "out", "--mode", "online")
    assert code == 0
    assert megabit("ckpt", "verify", run)[0] == 0


def test_a_dense_model_is_warned_of_until_it_was_trained(tmp_path: Path) -> None:
    """Its codes are those of weights that never were ternary, whatever they were copied through."""
    theirs, imported = tmp_path / "theirs", tmp_path / "imported"
    save_random(theirs, replace(TINY, hidden_act="silu"), torch.float32, "Llama")
    assert megabit("import", "hf", theirs, imported)[0] == 0
    for number, source in enumerate((theirs, imported)):
        _, out, _ = megabit("export", "hf", source, tmp_path / f"{number}")
        assert any("was not trained as a ternary model" in line for line in out), source


def test_a_file_beside_the_output_is_left_alone(tmp_path: Path) -> None:
    own_tokenizer().save(str(tmp_path / "tokenizer.json"))
    wide = replace(TINY, vocab_size=400, hidden_size=256, intermediate_size=256)
    source = RandomSource(wide, assets={"tokenizer.json": tmp_path / "tokenizer.json"})
    (tmp_path / "out.gguf.tmp").write_text("mine")
    export_gguf(source, tmp_path / "out.gguf", "TQ2_0")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"out.gguf", "out.gguf.tmp", "tokenizer.json"}
    assert (tmp_path / "out.gguf.tmp").read_text() == "mine"
