"""A run that begins with a model of Hugging Face's: each rank reads its own slices, at any
layout."""

import dataclasses
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megabit.checkpoint.source import Index, logical_tensors
from megabit.config import Config
from megabit.errors import UserError
from megabit.interop.huggingface import HuggingFaceSource
from megabit.launch import run_ranks
from megabit.training.initial import begin_with, open_initial
from megabit.training.step import TrainingState, train_step
from tests.interop.hf_models import AUTO, ONLINE, quantize, save_random
from tests.training.tiny import Owned, logical, make_mesh, own_batch, owned, tiny

LAYOUTS = [
    pytest.param((), 1, id="one"),
    pytest.param(("parallel.tp=4",), 4, id="tp4"),
    pytest.param(("parallel.tp=2", "parallel.pp=2"), 4, id="tp2_pp2"),
    pytest.param((), 2, id="dp2"),
]


def begun(config: Config) -> TrainingState:
    mesh = make_mesh(config)
    source = open_initial(config, mesh)
    assert source is not None
    state = TrainingState.create(config, mesh)
    begin_with(state, source)
    return state


@pytest.mark.parametrize(("settings", "world_size"), LAYOUTS)
@pytest.mark.parametrize("architecture", ["BitNet", "Llama"])
def test_masters_are_the_files_values(
    architecture: str, settings: tuple[str, ...], world_size: int, tmp_path: Path
) -> None:
    """A dense LLaMA becomes a ternary model: its weights are masters, and SubLN gains ones."""
    settings = ("model.hidden_act=silu", f"run.init_from={tmp_path / 'theirs'}", *settings)
    config = tiny(*settings)
    save_random(tmp_path / "theirs", config.model, torch.bfloat16, architecture)
    if architecture == "BitNet":
        quantize(tmp_path / "theirs", ONLINE, torch.float32)

    def run() -> tuple[Owned, float]:
        state = begun(config)
        return owned(state.optimizer), train_step(state, own_batch(config, state.mesh, 0), 0).loss

    ranks = run_ranks(run, world_size)
    source = HuggingFaceSource(tmp_path / "theirs")
    masters = logical(parts for parts, _ in ranks)
    assert masters.keys() == logical_tensors(config.model).keys()
    for name, master in masters.items():
        assert torch.equal(master, source.values(name).float()), name
    if architecture == "Llama":
        gains = [value for name, value in masters.items() if "sub_norm" in name]
        assert len(gains) == 2 * config.model.num_hidden_layers
        assert all((gain == 1).all() for gain in gains)
    assert all(math.isfinite(loss) for _, loss in ranks)


class Counting(HuggingFaceSource):
    """Counts the elements that are read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read: Counter[str] = Counter()

    def values(self, name: str, index: Index | None = None) -> Tensor:
        values = super().values(name, index)
        self.read[name] += values.numel()
        return values


def test_a_rank_reads_its_own_part_only(tmp_path: Path) -> None:
    config = tiny("parallel.tp=2", "model.num_key_value_heads=4")
    save_random(tmp_path / "theirs", config.model, torch.float32)
    quantize(tmp_path / "theirs", ONLINE, torch.float32)

    def run() -> Counter[str]:
        state = TrainingState.create(config, make_mesh(config))
        source = Counting(tmp_path / "theirs")
        begin_with(state, source)
        return source.read

    ranks = run_ranks(run, 4)  # TP 2 × DP 2
    for name, tensor in logical_tensors(config.model).items():
        numel = math.prod(tensor.shape)
        is_whole = len(tensor.shape) == 1 and "sub_norm" not in name  # gains of replicated norms
        total = sum(rank[name] for rank in ranks)
        assert total == (2 * numel if is_whole else numel), name


def test_what_cannot_be_begun_with(tmp_path: Path) -> None:
    config = tiny(f"run.init_from={tmp_path / 'theirs'}")
    save_random(tmp_path / "theirs", config.model, torch.float32)
    quantize(tmp_path / "theirs", AUTO, torch.float32)
    with pytest.raises(UserError, match="holds codes and scales only"):
        open_initial(config, make_mesh(config))
    nothing = dataclasses.replace(config.run, init_from=str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="nothing: does not exist"):
        open_initial(dataclasses.replace(config, run=nothing), make_mesh(config))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "mlp.up_proj.weight holds a value that is not finite"),
        (0.0, "mlp.up_proj.weight is zero, or next to it, all of it"),
    ],
)
def test_values_that_no_model_has(value: float, message: str, tmp_path: Path) -> None:
    """On one rank's part: all ranks refuse them. Of zeros, only a whole matrix is a damage."""
    config = tiny(f"run.init_from={tmp_path / 'theirs'}", "parallel.tp=2")
    save_random(tmp_path / "theirs", config.model, torch.float32)
    quantize(tmp_path / "theirs", ONLINE, torch.float32)
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    weight = tensors["model.layers.1.mlp.up_proj.weight"]
    weight[: len(weight) // 2] = value
    save_file(tensors, file, {"format": "pt"})

    def run() -> str:
        with pytest.raises(UserError) as caught:
            begun(config)
        return str(caught.value)

    if value == 0:
        run_ranks(lambda: begun(config).optimizer.updates, 2)
        weight.zero_()
        save_file(tensors, file, {"format": "pt"})
    for said in run_ranks(run, 2):
        assert message in said
