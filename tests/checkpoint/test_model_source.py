"""Checkpoints as models: what is read of them is what training computed with, slice by slice."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megabit.checkpoint import latent
from megabit.checkpoint.latent import LatentWeights
from megabit.checkpoint.manifest import DamagedCheckpoint, Manifest
from megabit.checkpoint.model_source import TernarySource, TrainingSource, open_model
from megabit.checkpoint.source import Index, ModelSource, logical_tensors
from megabit.checkpoint.ternary import write_ternary, write_training
from megabit.errors import UserError
from megabit.files import describe_file
from megabit.launch import run_ranks
from megabit_kernels import numerics, packing
from tests.checkpoint.saved import save, trained
from tests.interop.random_source import RandomSource
from tests.training.tiny import tiny

STEPS = 2
EXACT = ("parallel.exact=full", "train.micro_batch_size=1")
UP = "model.layers.1.mlp.up_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ((), 1),
        (("parallel.tp=4",), 4),
        (("parallel.pp=2", "optim.zero_stage=0"), 4),
        (("parallel.tp=2", "parallel.sequence_parallel=true"), 4),
    ],
    ids=["one", "tp4", "pp2_dp2", "tp2_dp2"],
)
def test_codes_and_scales_are_those_that_training_computed_with(
    settings: tuple[str, ...], world_size: int, tmp_path: Path
) -> None:
    """From the masters of a training checkpoint as from what a snapshot holds, at any layout."""
    config = tiny(*EXACT, *settings)
    run_ranks(lambda: save(trained(config, STEPS), tmp_path, STEPS), world_size)
    single = trained(tiny(*EXACT), STEPS)
    masters, ternary = open_model(tmp_path / "checkpoints"), open_model(tmp_path / "snapshots")
    assert (masters.has_masters, ternary.has_masters) == (True, False)
    layers = single.optimizer.publisher.layers
    values = {piece.name: piece.tensors["master"] for piece in single.optimizer.pieces()}
    sources: list[ModelSource] = [masters, ternary]
    for source in sources:
        assert (source.model, source.max_length) == (config.model, config.data.seq_length)
        for name, tensor in logical_tensors(config.model).items():
            if tensor.is_ternary:
                assert torch.equal(source.codes(name), layers[name].ternary().packed())
                assert torch.equal(source.scale(name), layers[name].ternary().scale)
                assert (source.scale(name).dtype, source.scale(name).dim()) == (torch.float32, 0)
            else:
                assert torch.equal(source.values(name), values[name])
    for name in logical_tensors(config.model):
        assert torch.equal(masters.values(name), values[name])


@pytest.mark.parametrize("write", [write_training, write_ternary], ids=["masters", "codes"])
def test_a_slice_is_that_of_the_whole(write: Callable[..., object], tmp_path: Path) -> None:
    # Rows of 42 codes end inside a byte.
    source = RandomSource(replace(RandomSource().model, intermediate_size=42))
    write(source, tmp_path / "out")
    found = open_model(tmp_path / "out")
    codes = packing.unpack(source.codes(DOWN), 42)
    for rows, columns in [
        (slice(0, 32), slice(0, 42)),
        (slice(3, 17), slice(4, 12)),
        (slice(31, 32), slice(40, 42)),
        (slice(5, 6), slice(0, 4)),
    ]:
        part = found.codes(DOWN, (rows, columns))
        assert torch.equal(part, packing.pack(codes[rows, columns]))
    index = (slice(7, 200), slice(1, 6))
    assert torch.equal(found.values(EMBEDDING, index), source.values(EMBEDDING)[index])


def test_a_slice_of_codes_that_cuts_a_byte_is_an_error(tmp_path: Path) -> None:
    write_ternary(RandomSource(), tmp_path / "out")
    found = open_model(tmp_path / "out")
    for columns in (slice(2, 8), slice(4, 6)):
        with pytest.raises(ValueError, match="cut a byte"):
            found.codes(UP, (slice(0, 4), columns))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_chunks_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of γ, whose sum runs over all of them, and of codes."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(37, 50, generator=generator, dtype=torch.float64).to(dtype)
    reads = []

    def read(name: str, index: Index) -> Tensor:
        reads.append(index)
        return weight[index]

    tensors = {UP: replace(logical_tensors(tiny().model)[UP], shape=(37, 50))}
    codes, scale = numerics.absmean_ternarize(weight)
    for elements in (1, 50, 500, 10**6):
        monkeypatch.setattr(latent, "CHUNK_ELEMENTS", elements)
        reads.clear()
        weights = LatentWeights(Path("x"), tensors, read)
        assert torch.equal(weights.codes(UP), packing.pack(codes))
        assert torch.equal(weights.scale(UP), scale.float())
        largest = max((index[0].stop - index[0].start) * 50 for index in reads)
        assert largest <= max(elements, 50)
        assert len(reads) == 2 * -(-37 // max(1, elements // 50))  # γ once, however often asked for


def test_what_is_not_finite_has_no_scale() -> None:
    tensors = logical_tensors(tiny().model)
    for bad in (float("nan"), float("inf"), 1e6):
        weight = torch.zeros(tensors[UP].shape)
        weight[3, 5] = bad
        source = LatentWeights(Path("model"), tensors, lambda name, index, w=weight: w[index])
        with pytest.raises(UserError, match=r"model: .*up_proj.weight holds a value that is not"):
            source.codes(UP)


# Which checkpoint a path stands for.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with steps 2 and 3 of both kinds."""
    run = tmp_path_factory.mktemp("run")
    state = trained(tiny(), STEPS)
    for step in (STEPS, STEPS + 1):
        save(state, run, step)
    return run


def test_a_path_is_a_checkpoint_or_leads_to_the_latest(run: Path, tmp_path: Path) -> None:
    for path, kind, step in [
        (run, TrainingSource, 3),
        (run / "checkpoints", TrainingSource, 3),
        (run / "checkpoints" / "step_00000002", TrainingSource, 2),
        (run / "snapshots", TernarySource, 3),
        (run / "snapshots" / "step_00000002", TernarySource, 2),
    ]:
        found = open_model(path)
        assert isinstance(found, kind)
        assert found.manifest.step == step
    (tmp_path / "snapshots").symlink_to(run / "snapshots")
    assert isinstance(open_model(tmp_path), TernarySource)  # a run without training checkpoints


def test_a_path_without_a_checkpoint(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none: does not exist"):
        open_model(tmp_path / "none")
    with pytest.raises(UserError, match=r"holds no checkpoint; give one"):
        open_model(tmp_path)
    with pytest.raises(UserError, match=r"holds no checkpoint"):
        open_model(run / "checkpoints" / "latest")
    (tmp_path / "manifest.json").write_text('{"format": "megabit corpus"}')
    with pytest.raises(UserError, match=r"manifest.json: is not the manifest of a megabit check"):
        open_model(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step_00000009")
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"step_00000009/manifest.json: cannot read it"):
        open_model(tmp_path)


# Hashes say that a file is what was written, not that what was written makes sense.


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """``folder`` with other tensors, and with hashes that fit them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    manifest = Manifest.read(folder)
    replace(manifest, files={**manifest.files, file.name: describe_file(file)}).write(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (f"{UP}.codes", 0b11, r"up_proj.weight.codes holds code 3"),
        (f"{UP}.scale", float("nan"), r"up_proj.weight.scale is nan, not a positive number"),
        (f"{UP}.scale", float("inf"), r"up_proj.weight.scale is inf"),
        (f"{UP}.scale", -0.5, r"up_proj.weight.scale is -0.5"),
        (f"{UP}.scale", 0.0, r"up_proj.weight.scale is 0.0"),
    ],
)
def test_values_that_no_model_has(name: str, value: float, message: str, tmp_path: Path) -> None:
    write_ternary(RandomSource(), tmp_path / "out")

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[0] = value

    source = open_model(changed(tmp_path / "out", change))
    with pytest.raises(DamagedCheckpoint, match=message):
        source.codes(UP) if "codes" in name else source.scale(UP)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{UP}.scale"), r"up_proj.weight.scale is missing"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "extra is none of the model's"),
        (
            lambda tensors: tensors.update({f"{UP}.codes": tensors[f"{UP}.codes"].short()}),
            r"up_proj.weight.codes is torch.int16, not torch.uint8",
        ),
        (
            lambda tensors: tensors.update({f"{UP}.scale": tensors[f"{UP}.scale"].view(1)}),
            r"up_proj.weight.scale has shape \[1\], the model needs \[\]",
        ),
    ],
    ids=["missing", "extra", "dtype", "shape"],
)
def test_tensors_that_are_not_those_of_the_model(
    change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    write_ternary(RandomSource(), tmp_path / "out")
    with pytest.raises(DamagedCheckpoint, match=message):
        open_model(changed(tmp_path / "out", change))
