"""A run that begins with a model of Hugging Face's: each rank reads its own slices, at any
layout."""

import dataclasses
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megabit.checkpoint.model_source import open_model
from megabit.checkpoint.source import Index, ModelSource, logical_tensors
from megabit.checkpoint.ternary import write_training
from megabit.config import Config
from megabit.errors import UserError
from megabit.interop.huggingface import HuggingFaceSource
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import build_stages
from megabit.tensor_parallel import sharded_parameters
from megabit.training.initial import begin_with, initial_values, open_initial
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
    inserted = masters.keys() - logical_tensors(source.model).keys()
    assert len(inserted) == (2 * config.model.num_hidden_layers if architecture == "Llama" else 0)
    for name, master in masters.items():
        if name in inserted:
            assert "sub_norm" in name
            assert (master == 1).all()
        else:
            assert torch.equal(master, source.values(name).float()), name
    assert all(math.isfinite(loss) for _, loss in ranks)


LLAMA = "model.hidden_act=silu", "model.tie_word_embeddings=false"
QUANTIZED = "model.activations=a4.8", "model.hadamard=true", "model.scale_mult=0.866"


@pytest.mark.parametrize("placement", ["prenorm", "subln", "in_linear", "per_proj"])
@pytest.mark.parametrize("is_checkpoint", [False, True], ids=["llama", "checkpoint"])
def test_norms_are_inserted(placement: str, is_checkpoint: bool, tmp_path: Path) -> None:
    """A model without norms before o_proj and down_proj becomes one that has them. ``in_linear``
    has no gains between layers: they are in the columns of the matrices behind the norms."""
    theirs, corpus = tmp_path / "theirs", tmp_path / "corpus"
    prenorm = tiny(*LLAMA, "model.norm_placement=prenorm", f"data.dir={corpus}")
    save_random(theirs, prenorm.model, torch.float32, "Llama")
    source: ModelSource = HuggingFaceSource(theirs)
    if is_checkpoint:
        write_training(source, tmp_path / "checkpoint")
        theirs = tmp_path / "checkpoint"
        source = open_model(theirs)
    assert source.model.norm_placement == "prenorm"
    own = f"model.norm_placement={placement}", f"run.init_from={theirs}", *LLAMA, *QUANTIZED
    config = tiny(*own, "parallel.tp=2")
    ranks = run_ranks(lambda: owned(begun(config).optimizer), 4)
    masters = logical(ranks)
    assert masters.keys() == logical_tensors(config.model).keys()
    kept = logical_tensors(source.model)
    ones = 0
    for name, master in masters.items():
        if name not in kept:
            assert (master == 1).all()
            ones += 1
            continue
        expected = source.values(name)
        reads = re.fullmatch(r"(.*)(self_attn\.[qkv]|mlp\.(gate|up))_proj\.weight", name)
        if placement == "in_linear" and reads is not None:
            norm = "input" if "attn" in name else "post_attention"
            expected = expected * source.values(f"{reads[1]}{norm}_layernorm.weight")
        assert torch.equal(master, expected), name
    assert ones == 2 * {"prenorm": 0, "subln": 2, "in_linear": 0, "per_proj": 7}[placement]


def test_folded_gains_keep_the_function(tmp_path: Path) -> None:
    """A dense ``prenorm`` model whose gains are in the matrices: the same logits but for what the
    inserted norms do, which are left out here."""
    config = tiny("model.norm_placement=prenorm", "model.linear=dense", *LLAMA)
    save_random(tmp_path / "theirs", config.model, torch.float32, "Llama")
    source = HuggingFaceSource(tmp_path / "theirs")
    folded = dataclasses.replace(config.model, norm_placement="in_linear")
    tokens = torch.arange(16)[None] % config.model.vocab_size
    logits = []
    for model in (config.model, folded):
        stages = build_stages(config, ParallelMesh())
        with torch.no_grad():
            for name, parameter in sharded_parameters(stages).items():
                whole = tuple(slice(0, size) for size in parameter.shape)
                if model is folded and name.endswith("layernorm.weight"):
                    parameter.fill_(1)
                else:
                    parameter.copy_(initial_values(source, model, name, whole))
            logits.append(stages.logits(stages(tokens)))
    # fp32: products are rounded before, not after, the gain.
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(logits[0], logits[1])


def test_norms_are_not_taken_away(tmp_path: Path) -> None:
    save_random(tmp_path / "theirs", tiny().model, torch.float32)
    quantize(tmp_path / "theirs", ONLINE, torch.float32)
    config = tiny(f"run.init_from={tmp_path / 'theirs'}", "model.norm_placement=prenorm")
    with pytest.raises(UserError, match=r"norm_placement: the model in .* has 'subln', not"):
        open_initial(config, make_mesh(config))


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
