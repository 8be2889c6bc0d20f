"""A model on disk in a forward pass: the bits of the run that saved it, at every layout."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megabit.checkpoint.model_source import open_model
from megabit.checkpoint.source import Index, ModelSource, logical_tensors
from megabit.config import Config
from megabit.errors import UserError
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages, build_stages
from megabit.model.load import load_stages
from megabit.pipeline.catalog import make_forward_schedule
from megabit.pipeline.execute import run_schedule
from megabit.pipeline.plan import plan_stages
from megabit.tensor_parallel import ForwardPass, ternary_layers
from tests.checkpoint.saved import save, trained
from tests.interop.random_source import RandomSource
from tests.training.tiny import make_mesh, tiny

STEPS = 2
TOKENS = torch.arange(32).view(2, 16) * 7 % 300
V = ("parallel.pp=2", "parallel.schedule=zb-v", "model.num_hidden_layers=4")


def logits(stages: CausalLMStages, config: Config, mesh: ParallelMesh) -> Tensor | None:
    """This rank's part of them, where it has the head."""
    placement = plan_stages(config, mesh.dp.size).schedule.placement

    def head(hidden: Tensor, microbatch: int, forward_pass: ForwardPass) -> Tensor:
        return stages.logits(hidden)

    with torch.no_grad():
        result = run_schedule(make_forward_schedule(placement, 1), stages, [TOKENS], head, mesh.pp)
    return result.outputs[0] if result.outputs else None


def loaded_logits(config: Config, source: Path) -> Tensor | None:
    """Of stages that had other weights before."""
    mesh = make_mesh(config)
    stages = build_stages(config, mesh)
    load_stages(stages, open_model(source))
    return logits(stages, config, mesh)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("load")


def saved_run(folder: Path, model: tuple[str, ...]) -> tuple[Path, Tensor]:
    """A run of one process with both kinds of checkpoint, and its logits."""
    run = folder / "_".join(sorted(model)).replace(".", "_")
    state = trained(tiny(*model), STEPS)
    expected = logits(state.stages, state.config, state.mesh)
    assert expected is not None
    if not run.exists():
        save(state, run, STEPS)
    return run, expected


@pytest.mark.parametrize(
    "model", [(), ("model.tie_word_embeddings=false",)], ids=["tied", "untied"]
)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ((), 1),
        (("parallel.tp=2", "parallel.sequence_parallel=true"), 2),
        (("parallel.tp=4",), 4),  # shares KV heads
        (("parallel.pp=2",), 2),
        (("parallel.tp=2", "parallel.pp=2"), 4),
    ],
    ids=["one", "tp2-sp", "tp4", "pp2", "tp2_pp2"],
)
def test_logits_are_those_of_the_run(
    folder: Path, layout: tuple[str, ...], world_size: int, compute: str, model: tuple[str, ...]
) -> None:
    """From masters, and from codes and scales."""
    model = (*model, f"precision.compute={compute}")
    run, expected = saved_run(folder, model)
    config = tiny(*model, *layout, "train.seed=99")
    for source in (run / "checkpoints", run / "snapshots"):
        parts = run_ranks(partial(loaded_logits, config, source), world_size)
        by_rank = [part for part in parts if part is not None]
        assert torch.equal(torch.cat(by_rank, 1), expected)


def test_both_ends_of_a_pipeline_on_a_rank(folder: Path) -> None:
    """There the tied head is a second parameter with the embedding's values."""
    run, expected = saved_run(folder, V[2:])
    parts = run_ranks(partial(loaded_logits, tiny(*V, "train.seed=99"), run), 2)
    assert torch.equal(next(part for part in parts if part is not None), expected)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_model_of_dense_layers(folder: Path, compute: str) -> None:
    model = ("model.linear=dense", f"precision.compute={compute}")
    run, expected = saved_run(folder, model)
    config = tiny(*model, "train.seed=99")
    assert torch.equal(run_ranks(partial(loaded_logits, config, run), 1)[0], expected)
    split = run_ranks(partial(loaded_logits, tiny(*model, "parallel.tp=2"), run), 2)
    # Row-parallel products of dense layers are added over ranks in another order.
    tolerance = 1e-5 if compute == "float32" else 0.05
    torch.testing.assert_close(torch.cat(split, 1), expected, atol=tolerance, rtol=tolerance)


def test_a_run_in_fp64(folder: Path) -> None:
    model = ("precision.compute=float64",)
    run, expected = saved_run(folder, model)
    found = loaded_logits(tiny(*model, "train.seed=99"), run)
    assert found is not None
    # γ of a source is fp32.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_no_latent_weights_are_left() -> None:
    config = tiny()
    stages = build_stages(config, ParallelMesh())
    load_stages(stages, RandomSource(config.model))
    assert all(layer.weight.is_meta for layer in ternary_layers(stages))


@dataclass(frozen=True)
class Recorded(RandomSource):
    """Notes how many elements of each tensor are read."""

    reads: dict[str, int] = field(default_factory=dict)

    def values(self, name: str, index: Index | None = None) -> Tensor:
        return self._noted(name, index) or super().values(name, index)

    def codes(self, name: str, index: Index | None = None) -> Tensor:
        return self._noted(name, index) or super().codes(name, index)

    def _noted(self, name: str, index: Index | None) -> None:
        parts = index or logical_tensors(self.model)[name].whole
        size = prod(part.stop - part.start for part in parts)
        self.reads[name] = self.reads.get(name, 0) + size


def test_a_rank_reads_its_own_slices_only() -> None:
    """Of a model that is on disk as codes."""
    config = tiny("parallel.tp=2", "parallel.pp=2", "model.tie_word_embeddings=false")

    def reads() -> dict[str, int]:
        source = Recorded(config.model, has_masters=False)
        load_stages(build_stages(config, make_mesh(config)), source)
        return source.reads

    total: Counter[str] = Counter()
    for rank in run_ranks(reads, 4):
        total.update(rank)
    for name, tensor in logical_tensors(config.model).items():
        is_split = "norm" not in name or "sub_norm" in name
        assert total[name] == prod(tensor.shape) * (1 if is_split else 2), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.hidden_size=64",), r"embed_tokens.weight is dense \[300, 32\], .* \[300, 64\]"),
        (("model.num_hidden_layers=3",), r"layers.2.input_layernorm.weight is missing"),
        (("model.linear=dense",), r"q_proj.weight is ternary .* has dense \[32, 32\]"),
        (("model.tie_word_embeddings=false",), "lm_head.weight is missing"),
    ],
)
def test_another_model_is_refused_before_anything_is_changed(
    settings: tuple[str, ...], message: str
) -> None:
    source: ModelSource = RandomSource(tiny().model)
    stages = build_stages(tiny(*settings), ParallelMesh())
    before = {name: p.detach().clone() for name, p in stages.named_parameters()}
    with pytest.raises(UserError, match=message):
        load_stages(stages, source)
    assert all(torch.equal(p, before[name]) for name, p in stages.named_parameters())
