"""Ternary checkpoints, and training checkpoints of an imported model: exact, whole or not there."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import megabit.checkpoint.new_folder as new_folder_module
from megabit.checkpoint.model_source import TernarySource, open_model
from megabit.checkpoint.source import Index, ModelSource, logical_tensors
from megabit.checkpoint.ternary import Origin, write_ternary, write_training
from megabit.checkpoint.verify import verify
from megabit.config import ModelConfig
from megabit.errors import UserError
from megabit.launch import RankError, run_ranks
from megabit_kernels import numerics
from tests.interop.random_source import TINY, RandomSource

# K = 42 is no multiple of 4: rows of codes end inside a byte.
ODD = replace(TINY, intermediate_size=42, tie_word_embeddings=False)


@dataclass(frozen=True)
class Stored:
    """``source`` with its dense matrices, and its masters, stored in another dtype."""

    source: RandomSource
    dtype: torch.dtype

    def __getattr__(self, name: str) -> object:
        return getattr(self.source, name)

    def values(self, name: str, index: Index | None = None) -> Tensor:
        return self.source.values(name, index).to(self.dtype)


def assert_same_model(a: ModelSource, b: ModelSource) -> None:
    assert (a.model, a.max_length) == (b.model, b.max_length)
    for name, tensor in logical_tensors(a.model).items():
        if tensor.is_ternary:
            assert torch.equal(a.codes(name), b.codes(name)), name
            assert torch.equal(a.scale(name), b.scale(name)), name
        else:
            assert torch.equal(a.values(name), b.values(name)), name


@pytest.mark.parametrize("has_masters", [True, False])
@pytest.mark.parametrize("model", [TINY, ODD], ids=["tied", "untied, K of 42"])
def test_a_ternary_checkpoint_has_the_codes_scales_and_dense_weights_of_its_source(
    model: ModelConfig, has_masters: bool, tmp_path: Path
) -> None:
    source = RandomSource(model, has_masters=has_masters)
    written = write_ternary(source, tmp_path / "out", Origin(7, 6, {"note": "ä"}))
    found = open_model(tmp_path / "out")
    assert_same_model(found, source)
    assert isinstance(found, TernarySource)
    assert not found.has_masters
    manifest = found.manifest
    assert (manifest.kind, manifest.step, manifest.updates) == ("ternary", 7, 6)
    assert manifest.run == {"note": "ä"}
    assert [*verify(tmp_path / "out")] == ["model.safetensors"]
    assert written.bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_file_alone_describes_itself(tmp_path: Path) -> None:
    """Read as the module's docstring says, without megabit's code."""
    source = RandomSource(ODD)
    write_ternary(source, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        about = opened.metadata()
    assert (about["format"], about["version"]) == ("megabit ternary", "1")
    assert ModelConfig(**json.loads(about["model"])) == ODD
    assert int(about["max_length"]) == source.max_length
    tensors = load_file(file)
    for name, tensor in logical_tensors(ODD).items():
        if not tensor.is_ternary:
            assert torch.equal(tensors.pop(name), source.values(name))
            continue
        codes, scale = tensors.pop(f"{name}.codes"), tensors.pop(f"{name}.scale")
        assert (codes.dtype, scale.dtype, scale.shape) == (torch.uint8, torch.float32, ())
        fields = [[int(byte) >> 2 * i & 3 for byte in row for i in range(4)] for row in codes]
        columns = tensor.shape[1]
        assert all(row[columns:] == [1] * (len(row) - columns) for row in fields)
        found = torch.tensor(fields)[:, :columns] - 1
        assert torch.equal(found, numerics.absmean_ternarize(source.values(name))[0].long())
        assert torch.equal(scale, numerics.absmean_scale(source.values(name)))
    assert not tensors


def test_ternary_weights_take_a_sixteenth_of_their_masters(tmp_path: Path) -> None:
    model = replace(TINY, hidden_size=256, intermediate_size=512)
    written = write_ternary(RandomSource(model), tmp_path / "out")
    sizes = [torch.Size(t.shape).numel() for t in logical_tensors(model).values() if t.is_ternary]
    assert written.ternary_bytes == sum(sizes) * 4 / 16 + 4 * len(sizes)  # and a scale for each


def test_the_dtype_of_dense_weights(tmp_path: Path) -> None:
    """bf16 stays; whatever holds more is fp32, unless told otherwise. Gains are fp32 always."""
    source = RandomSource()
    embedding, gain = "model.embed_tokens.weight", "model.norm.weight"
    for i, (stored, wanted, expected) in enumerate(
        [
            (torch.float32, None, torch.float32),
            (torch.bfloat16, None, torch.bfloat16),
            (torch.float16, None, torch.float32),
            (torch.float32, "bfloat16", torch.bfloat16),
            (torch.bfloat16, "float32", torch.float32),
        ]
    ):
        stored_source = Stored(source, stored)
        write_ternary(stored_source, tmp_path / str(i), dtype=wanted)
        found = open_model(tmp_path / str(i))
        assert torch.equal(found.values(embedding), stored_source.values(embedding).to(expected))
        assert found.values(embedding).dtype == expected
        assert found.values(gain).dtype == torch.float32


def test_a_training_checkpoint_of_masters(tmp_path: Path) -> None:
    """In fp32, without moments: what a run can begin with."""
    source = Stored(RandomSource(ODD), torch.bfloat16)
    write_training(source, tmp_path / "out", {"from": "elsewhere"})
    found = open_model(tmp_path / "out")
    assert found.has_masters
    assert (found.manifest.step, found.manifest.updates) == (0, 0)
    assert found.manifest.run == {"from": "elsewhere"}
    for name in logical_tensors(ODD):
        assert found.values(name).dtype == torch.float32
        assert torch.equal(found.values(name), source.values(name).float())
    assert [*verify(tmp_path / "out")] == ["model.safetensors"]


def test_small_files_travel_along(tmp_path: Path) -> None:
    tokenizer = tmp_path / "some.json"
    tokenizer.write_text("{}")
    source: ModelSource = RandomSource(assets={"tokenizer.json": tokenizer})
    for i, write in enumerate((write_training, write_ternary, write_ternary)):
        out = tmp_path / str(i)
        write(source, out)
        source = open_model(out)
        assert {n: path.read_text() for n, path in source.assets.items()} == {
            "tokenizer.json": "{}"
        }
        assert source.assets["tokenizer.json"].parent == out / "assets"
        assert [*verify(out)] == ["model.safetensors", "assets/tokenizer.json"]
    tokenizer.unlink()
    with pytest.raises(UserError, match=r"some.json: is missing"):
        write_ternary(RandomSource(assets={"tokenizer.json": tokenizer}), tmp_path / "last")


# The trap: codes and γ make each other wrong.


def test_copies_of_copies_are_the_same_bytes(tmp_path: Path) -> None:
    source: ModelSource = RandomSource()
    contents = []
    for i in range(4):
        write_ternary(source, tmp_path / str(i))
        source = open_model(tmp_path / str(i))
        contents.append((tmp_path / str(i) / "model.safetensors").read_bytes())
    assert contents == [contents[0]] * 4
    assert_same_model(source, RandomSource())


def test_ternarizing_again_would_shrink_the_scale() -> None:
    """What no function here does: γ · code taken for a master weight. The codes stay, so nothing
    looks wrong, and the model's outputs are smaller by the share of zeros each time."""
    source = RandomSource()
    name = "model.layers.0.mlp.up_proj.weight"
    codes, scale = numerics.absmean_ternarize(source.values(name))
    nonzero = float(codes.abs().float().mean())
    assert 0.5 < nonzero < 0.8
    naive = codes * scale
    for _ in range(3):
        again, smaller = numerics.absmean_ternarize(naive)
        assert torch.equal(again, codes)
        # A mean in units of 2^-62 and below; what is rounded is fp32.
        assert float(smaller / scale) == pytest.approx(nonzero, rel=1e-6)
        naive, scale = again * smaller, smaller


def test_nothing_makes_masters_of_codes(tmp_path: Path) -> None:
    write_ternary(RandomSource(), tmp_path / "codes")
    sources: list[ModelSource] = [open_model(tmp_path / "codes"), RandomSource(has_masters=False)]
    for source in sources:
        assert not source.has_masters
        with pytest.raises(UserError, match=r"Codes cannot become masters: .* smaller γ"):
            write_training(source, tmp_path / "masters")
        with pytest.raises(UserError, match=r"q_proj.weight"):
            source.values("model.layers.0.self_attn.q_proj.weight")
    assert [path.name for path in tmp_path.iterdir()] == ["codes"]


# Whole or not there.


@dataclass(frozen=True)
class Failing(RandomSource):
    """Cannot read its last tensor."""

    def values(self, name: str, index: Index | None = None) -> Tensor:
        if name == "model.norm.weight":
            raise UserError("random-model: cannot read model.norm.weight")
        return super().values(name, index)


def test_a_model_that_cannot_be_read_leaves_nothing(tmp_path: Path) -> None:
    for write in (write_ternary, write_training):
        with pytest.raises(UserError, match=r"cannot read model.norm.weight"):
            write(Failing(), tmp_path / "out")
        assert [*tmp_path.iterdir()] == []


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))
        write_ternary(RandomSource(), tmp_path / "out")

    with pytest.raises(RankError, match=r"out: cannot write it \(File too large"):
        run_ranks(run, 1)
    assert [*tmp_path.iterdir()] == []


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = sorted(path.name for path in tmp_path.iterdir())
    for name in before:
        with pytest.raises(UserError, match=rf"{name}: exists already; name a new folder"):
            write_ternary(RandomSource(), tmp_path / name)
    with pytest.raises(UserError, match=r"there is no folder .*missing"):
        write_ternary(RandomSource(), tmp_path / "missing" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "mine"


def test_a_model_of_dense_layers_has_no_codes(tmp_path: Path) -> None:
    dense = RandomSource(replace(TINY, linear="dense"))
    with pytest.raises(UserError, match="is a model of dense layers"):
        write_ternary(dense, tmp_path / "out")
    write_training(dense, tmp_path / "out")
    assert_same_model(open_model(tmp_path / "out"), dense)


# Memory.

BIG = replace(TINY, hidden_size=768, intermediate_size=3072, num_hidden_layers=6)
MEASURE = """
import re, sys
from pathlib import Path
from megabit.checkpoint.model_source import open_model
from megabit.checkpoint.ternary import write_ternary, write_training

def peak():
    status = Path("/proc/self/status").read_text()  # ru_maxrss would be that of the parent
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024

source = open_model(Path(sys.argv[1]))
source.scale("model.layers.0.self_attn.q_proj.weight")  # loads what is loaded once
before = peak()
write_ternary(source, Path(sys.argv[2]))
write_training(source, Path(sys.argv[3]))
print(peak() - before)
"""


@pytest.mark.slow
def test_a_large_model_is_never_in_memory(tmp_path: Path) -> None:
    write_training(RandomSource(BIG), tmp_path / "masters")
    paths = [str(tmp_path / name) for name in ("masters", "ternary", "again")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *paths],
        # glibc then gives back at once what is freed.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=True,
    )
    tensors = logical_tensors(BIG).values()
    largest = 4 * max(torch.Size(tensor.shape).numel() for tensor in tensors)
    size = (tmp_path / "masters" / "model.safetensors").stat().st_size
    # The largest tensor, mapped from its file, and a copy of it. With all files kept open it is the
    # size of the checkpoint.
    assert int(done.stdout) < 2.5 * largest < size / 5


def test_a_folder_is_synced_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    rename = Path.rename

    def record_rename(path: Path, target: Path) -> Path:
        done.append(f"{path.name} is renamed")
        return rename(path, target)

    monkeypatch.setattr(new_folder_module, "sync", lambda path: done.append(f"{path} is synced"))
    monkeypatch.setattr(Path, "rename", record_rename)
    with new_folder_module.new_folder(tmp_path / "out") as folder:
        inside = str(folder)
    assert done == [f"{inside} is synced", "out is renamed", f"{tmp_path} is synced"]
