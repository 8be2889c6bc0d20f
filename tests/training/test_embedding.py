"""Sentence embeddings: loss and gradient at every layout, and what a model learns from it.

The reference is transformers' model with the same weights, autograd, and triplets one by one.
"""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megabit.checkpoint.model_source import open_model
from megabit.config import Config
from megabit.data.batches import Batch
from megabit.data.indexed import IndexedDataset, IndexedDatasetWriter
from megabit.data.sampler import HeldOutWindows
from megabit.evaluation.forward import ForwardRunner
from megabit.interop.opening import open_source
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import build_stages
from megabit.model.load import load_stages
from megabit.tensor_parallel import sharded_parameters
from megabit.training.embedding import EmbeddingEvaluation, evaluate_embeddings, judge
from megabit.training.initial import begin_with
from megabit.training.step import TrainingState, forward_backward, train_step
from tests.checkpoint.saved import save, trained
from tests.interop import hf_models
from tests.training.tiny import Owned, global_batch, logical, make_mesh, own_batch, owned, tiny

EMBEDDING = ("loss.objective=embedding", "train.micro_batch_size=4", "run.sample_tokens=0")
RATIO = 0.3  # of 12 triplets: 4 count
DENSE = ("model.linear=dense", "model.hidden_act=silu", "precision.compute=float64")
THEIRS = 1e-6
"""Relative: transformers takes norms, rotary positions and softmax in fp32, whatever the model's
dtype; the rest is fp64 on both sides."""
TP2, PP2, SP = "parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true"
ZB_V = (PP2, "parallel.schedule=zb-v", "model.num_hidden_layers=4")
LAYOUTS = [
    pytest.param((), 1, id="one"),
    pytest.param((), 2, id="dp2"),
    pytest.param((TP2,), 2, id="tp2"),
    pytest.param((TP2, SP), 2, id="tp2-sp"),
    pytest.param((PP2,), 2, id="pp2"),
    pytest.param(ZB_V, 2, id="both-ends-on-one-rank"),
    pytest.param((TP2, SP, PP2), 4, id="tp2-sp-pp2"),
]


def config_of(*settings: str) -> Config:
    return tiny(*EMBEDDING, f"loss.mining_ratio={RATIO}", *settings)


def alone(settings: tuple[str, ...]) -> tuple[str, ...]:
    """Of these, what one process has as well."""
    return tuple(s for s in settings if s.startswith("model"))


def reference(
    config: Config, path: Path, batch: Batch
) -> tuple[float, float, dict[str, Tensor], Tensor]:
    """Loss, objective and gradients of a global batch ``[1, G, S]``, and its embeddings."""
    model = hf_models.load(path, dtype=torch.float64)
    size, half = config.train.micro_batch_size, config.data.seq_length // 2
    everything: list[Tensor] = []
    hardest: list[Tensor] = []
    embeddings = []
    for samples in batch.inputs[0].split(size):
        pairs = []
        for sample in samples:
            passages = [model.model(x[None]).last_hidden_state[0] for x in sample.split(half)]
            means = [hidden.mean(0) for hidden in passages]
            pairs.append([mean / mean.norm() for mean in means])
        losses = []
        for i, (anchor, positive) in enumerate(pairs):
            for j, (_, negative) in enumerate(pairs):
                if i != j:
                    near, far = (1 - torch.dot(anchor, x) for x in (positive, negative))
                    losses.append(torch.clamp(near - far + config.loss.triplet_margin, min=0))
        everything += losses
        hardest += sorted(losses, key=Tensor.item, reverse=True)[: math.ceil(RATIO * len(losses))]
        embeddings.append(torch.stack([torch.stack(pair) for pair in pairs]))
    objective = torch.stack(hardest).mean()
    objective.backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    loss = torch.stack(everything).mean().item()
    return loss, objective.item(), gradients, torch.cat(embeddings).detach()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Dense models of transformers by their layers."""
    paths = {layers: tmp_path_factory.mktemp("models") / str(layers) for layers in (2, 4)}
    for layers, path in paths.items():
        config = config_of(*DENSE, f"model.num_hidden_layers={layers}")
        hf_models.save_random(path, config.model, torch.float32)
    return paths


def begun(config: Config, path: Path) -> TrainingState:
    state = TrainingState.create(config, make_mesh(config))
    begin_with(state, open_source(path, to_train=True))
    return state


@pytest.mark.parametrize(("settings", "world_size"), LAYOUTS)
def test_loss_and_gradient(
    settings: tuple[str, ...], world_size: int, models: dict[int, Path]
) -> None:
    config = config_of(*DENSE, *settings)
    path = models[config.model.num_hidden_layers]

    def run() -> tuple[float, float, int, Owned]:
        state = begun(config, path)
        batch = own_batch(config, state.mesh, 0)
        result = forward_backward(state, batch, 0)
        gradients = owned(state.optimizer, "gradient")
        return *result.sums(state.mesh), result.objective.num_tokens, gradients

    expected_loss, expected_objective, expected, _ = reference(
        config_of(*DENSE, *alone(settings)), path, global_batch(config, 0)
    )
    assert 0 < expected_loss < expected_objective
    ranks = run_ranks(run, world_size)
    for loss, objective, num_tokens, _ in ranks:
        assert loss == pytest.approx(expected_loss, rel=THEIRS)
        assert objective == pytest.approx(expected_objective, rel=THEIRS)
        assert num_tokens == config.train.global_batch_size * config.data.seq_length
    gradients = logical(parts for *_, parts in ranks)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (gradients[name] - gradient).abs().max()
        assert difference <= 10 * THEIRS * gradient.abs().max(), name


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_ternary_model_has_the_same_loss_at_every_layout(compute: str) -> None:
    """The same bits: all ranks pool the same tokens, whoever computed them."""

    def run(config: Config) -> tuple[float, float]:
        mesh = make_mesh(config)
        state = TrainingState.create(config, mesh)
        loss, objective = forward_backward(state, own_batch(config, mesh, 0), 0).sums(mesh)
        return loss, objective

    option = f"precision.compute={compute}"
    (expected,) = run_ranks(lambda: run(config_of(option)), 1)
    assert 0 < expected[0] < expected[1]
    for settings, world_size in (((TP2,), 2), ((TP2, SP), 2), ((PP2,), 2), ((), 2)):
        ranks = run_ranks(lambda s=settings: run(config_of(option, *s)), world_size)
        assert ranks == [expected] * world_size, settings


@pytest.mark.parametrize("stages", [(), (PP2,)], ids=["one", "pp2"])
def test_there_is_no_output_head(stages: tuple[str, ...], tmp_path: Path) -> None:
    """Nor the copy of a tied embedding that would be one; and what is saved is a whole model."""
    config = config_of(*stages)

    def run() -> tuple[set[str], list[Tensor]]:
        state = trained(config, 2)
        save(state, tmp_path, 2)
        masters = {name: part for name, _, part in owned(state.optimizer)}
        names = set(sharded_parameters(state.stages))
        return names, [masters["model.norm.weight"]] if "model.norm.weight" in masters else []

    ranks = run_ranks(run, 2 if stages else 1)
    holders = [names for names, _ in ranks if "model.embed_tokens.weight" in names]
    assert len(holders) == 1
    assert not any("lm_head" in name for names, _ in ranks for name in names)
    whole = build_stages(tiny(), ParallelMesh())
    load_stages(whole, open_model(tmp_path))  # refuses what is not all there
    gain = next(gains[0] for _, gains in ranks if gains)
    assert torch.equal(whole.model.norm.weight.detach(), gain)
    assert not torch.equal(gain, torch.ones_like(gain))  # it was trained


def dataset(folder: Path, samples: Tensor) -> HeldOutWindows:
    """Samples ``[N, S]`` as held-out text; windows begin one token later than they do."""
    with IndexedDatasetWriter(folder / "held_out", "uint16") as writer:
        writer.add_document(samples.flatten().numpy())
    return HeldOutWindows(IndexedDataset(folder / "held_out"), samples.shape[1], end_of_text=0)


@pytest.mark.parametrize(("settings", "world_size"), [LAYOUTS[0], LAYOUTS[1], LAYOUTS[-1]])
def test_evaluation(
    settings: tuple[str, ...], world_size: int, models: dict[int, Path], tmp_path: Path
) -> None:
    """Of 9 whole windows and one that is padded, at micro-batches of 4: some are filled up."""
    config = config_of(*DENSE, *settings)
    generator = torch.Generator().manual_seed(3)
    samples = torch.randint(1, 300, (10, 16), generator=generator)
    windows = dataset(tmp_path, samples)
    whole = torch.cat([torch.zeros(1, dtype=torch.int64), samples.flatten()[:-1]]).view(1, 10, 16)

    def run() -> EmbeddingEvaluation:
        state = begun(config, models[config.model.num_hidden_layers])
        runner = ForwardRunner(state.stages, state.plan.schedule.placement, state.mesh)
        return evaluate_embeddings(runner, windows, 4, config.loss.triplet_margin)

    batch = Batch(whole, whole, torch.ones_like(whole, dtype=torch.bool))
    path = models[config.model.num_hidden_layers]
    *_, pairs = reference(config_of(*DENSE, *alone(settings)), path, batch)
    hits, losses = [], []
    for i, (anchor, positive) in enumerate(pairs):
        distances = [float(1 - torch.dot(anchor, other)) for _, other in pairs]
        hits.append(min(range(10), key=distances.__getitem__) == i)
        losses += [max(0.0, distances[i] - d + 0.3) for j, d in enumerate(distances) if j != i]
        assert distances[i] == pytest.approx(float(1 - torch.dot(anchor, positive)))
    for result in run_ranks(run, world_size):
        assert result.num_pairs == 10
        assert result.recall_at_1 == sum(hits) / 10
        assert result.loss == pytest.approx(sum(losses) / 90, rel=THEIRS)


def test_a_padded_window_is_no_pair(tmp_path: Path) -> None:
    config = config_of()
    samples = torch.arange(1, 55)[None]  # 3 windows of 16 tokens, and 6 tokens more
    windows = dataset(tmp_path, samples)
    windows.seq_length = 16
    state = TrainingState.create(config, ParallelMesh())
    runner = ForwardRunner(state.stages, state.plan.schedule.placement, state.mesh)
    assert evaluate_embeddings(runner, windows, 4, 0.3).num_pairs == 3
    assert evaluate_embeddings(runner, windows, 4, 0.3, limit=2).num_pairs == 2
    assert math.isnan(evaluate_embeddings(runner, windows, 4, 0.3, limit=1).recall_at_1)


def test_judge() -> None:
    """Two anchors find their own; the third one's is as far as can be."""
    x, y, z = torch.eye(3, dtype=torch.float64)
    pairs = torch.stack([torch.stack([x, x]), torch.stack([y, y]), torch.stack([z, -z])])
    result = judge(pairs, margin=0.3)
    assert result.recall_at_1 == 2 / 3
    # x and y: own distance 0, others' 1: nothing to lose. z: 2, others' 1: 1.3 each.
    assert result.loss == pytest.approx(2.6 / 6)


def test_pairs_that_share_no_word_are_learned(tmp_path: Path) -> None:
    """Of 16 topics, anchors use words of one kind and positives of another, so that a model which
    has learned nothing finds no more than chance lets it."""
    config = config_of(
        *("train.global_batch_size=16", "train.micro_batch_size=16", "train.steps=60"),
        *("optim.lr=[0.01,0.01]", "optim.warmup_steps=5", "loss.mining_ratio=0.5"),
    )
    generator = torch.Generator().manual_seed(7)

    def samples() -> Tensor:
        """One of each topic, which has 8 words for each kind: ``[16, 16]``."""
        topics = torch.arange(16).view(-1, 1, 1)
        words = torch.randint(8, (16, 2, 8), generator=generator)
        kinds = torch.tensor([0, 128]).view(1, 2, 1)
        return (1 + topics * 8 + kinds + words).flatten(1)

    windows = dataset(tmp_path, samples())
    state = TrainingState.create(config, ParallelMesh())
    runner = ForwardRunner(state.stages, state.plan.schedule.placement, state.mesh)
    before = evaluate_embeddings(runner, windows, 4, 0.3)
    for step in range(config.train.steps):
        tokens = samples()[None]
        train_step(state, Batch(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool)), step)
    after = evaluate_embeddings(runner, windows, 4, 0.3)
    print(before, after)
    assert before.recall_at_1 < 0.4  # chance is 1/16; here 4 of 16, and 16 of 16 in the end
    assert after.recall_at_1 >= 0.75
    assert after.loss < before.loss / 2
