"""Learning from another model: its logits at every layout, and the gradient of the distillation.

The teacher is transformers' LLaMA, which computes its own logits; the student's gradient comes from
torch's own loss functions over one forward pass of all samples.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megabit.checkpoint.manifest import NEVER_TERNARY
from megabit.checkpoint.ternary import write_training
from megabit.config import Config, ModelConfig
from megabit.data.batches import Batch
from megabit.data.corpus import CorpusInfo
from megabit.interop.huggingface import HuggingFaceSource
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import build_stages
from megabit.training.step import TrainingState, forward_backward, train_step
from megabit.training.teacher import open_teacher
from tests.checkpoint.saved import save, trained
from tests.interop import hf_models
from tests.training.runs import config_of, refused
from tests.training.tiny import (
    Owned,
    global_batch,
    logical,
    make_mesh,
    own_batch,
    owned,
    tiny,
    tiny_corpus,
)

FP64, KD = "precision.compute=float64", ("loss.distill_weight=2.5", "loss.distill_temperature=3")
THEIRS = 1e-5
"""Relative: transformers takes norms, rotary positions and softmax in fp32, whatever the model's
dtype; the rest is fp64 on both sides."""
TP2, PP2, SP = "parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true"
LAYOUTS = [
    pytest.param((), 1, id="one"),
    pytest.param((), 2, id="dp2"),
    pytest.param((TP2,), 2, id="tp2"),
    pytest.param((PP2,), 2, id="pp2"),
    pytest.param(
        (PP2, "parallel.schedule=zb-v", "model.num_hidden_layers=4"), 2, id="both-ends-on-one-rank"
    ),
    pytest.param((TP2, SP, PP2), 4, id="tp2-sp-pp2"),
]
ENDS = (LAYOUTS[0], LAYOUTS[-1])
LLAMA = ModelConfig(
    vocab_size=300,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=4,
    num_attention_heads=6,  # so that the vocabulary is cut into other blocks than the student's
    num_key_value_heads=3,
    hidden_act="silu",
    tie_word_embeddings=False,
    initializer_range=0.5,  # for logits that differ from token to token
    linear="dense",
    norm_placement="prenorm",
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "llama"
    hf_models.save_random(path, LLAMA, torch.float32, "Llama")
    return path


@pytest.fixture(scope="module")
def theirs(llama: Path) -> dict[int, Tensor]:
    """What transformers gives for all samples of steps 0 and 1: ``[G·S, V]``."""
    model = hf_models.load(llama, dtype=torch.float64)
    batches = {step: global_batch(tiny(), step).inputs[0] for step in (0, 1)}
    return {step: hf_models.logits(model, x).flatten(0, 1) for step, x in batches.items()}


def of_rank(config: Config, mesh: ParallelMesh, theirs: Tensor, microbatch: int) -> Tensor:
    """Their logits for a microbatch of a rank, all of the vocabulary."""
    tokens = config.train.micro_batch_size * config.data.seq_length
    return theirs.chunk(mesh.dp.size)[mesh.dp.rank].split(tokens)[microbatch]


def assert_theirs(logits: Tensor, expected: Tensor) -> None:
    difference = (logits - expected).abs().max()
    assert difference <= THEIRS * expected.abs().max()


@pytest.mark.parametrize(("settings", "world_size"), LAYOUTS)
def test_logits_are_those_of_transformers(
    settings: tuple[str, ...], world_size: int, llama: Path, theirs: dict[int, Tensor]
) -> None:
    config = tiny(FP64, f"loss.teacher={llama}", *KD, *settings)

    def run() -> int:
        mesh = make_mesh(config)
        teacher = open_teacher(config, mesh)
        assert teacher is not None
        logits = teacher.logits(own_batch(config, mesh, 0))
        rows = build_stages(config, mesh).vocab_rows
        for number, part in enumerate(logits):
            expected = of_rank(config, mesh, theirs[0], number)[:, rows.start : rows.stop]
            assert_theirs(part, expected)
            assert not part.requires_grad
        return len(logits)

    counts = run_ranks(run, world_size)
    microbatches = config.train.global_batch_size // config.train.micro_batch_size
    holders = world_size // config.parallel.pp
    assert sum(counts) == microbatches * config.parallel.tp
    assert sum(count > 0 for count in counts) == holders  # on the last stage only


def plain(config: Config, step: int, theirs: Tensor) -> tuple[float, float, Mapping[str, Tensor]]:
    """Loss, objective and gradients of all samples of a step, by torch's own functions."""
    stage = build_stages(config, ParallelMesh())
    batch = global_batch(config, step)
    logits = stage.logits(stage(batch.inputs[0]))
    targets, keep = batch.targets.flatten(), batch.mask.flatten()
    losses = F.cross_entropy(logits, targets, reduction="none")
    counted = keep
    if config.loss.select == "excess":
        excess = losses.detach() - F.cross_entropy(theirs, targets, reduction="none")
        counted = torch.zeros_like(keep)
        for row, mask in enumerate(batch.mask[0]):
            scores = excess.view_as(batch.mask[0])[row].masked_fill(~mask, -torch.inf)
            best = scores.argsort(descending=True)[: -(-int(mask.sum()) // 2)]
            counted[row * len(mask) + best] = True
    tau = config.loss.distill_temperature
    divergence = F.kl_div(
        (logits / tau).log_softmax(-1), (theirs / tau).softmax(-1), reduction="none"
    ).sum(-1)
    objective = losses[counted].mean()
    objective = objective + config.loss.distill_weight * tau**2 * divergence[keep].mean()
    names, parameters = zip(*stage.named_parameters(), strict=True)
    gradients = torch.autograd.grad(objective, parameters)
    return losses[keep].mean().item(), objective.item(), dict(zip(names, gradients, strict=True))


@pytest.mark.parametrize(
    ("select", "settings", "world_size"),
    [
        *(pytest.param("all", *layout.values, id=str(layout.id)) for layout in LAYOUTS),
        *(pytest.param("excess", *layout.values, id=f"excess-{layout.id}") for layout in ENDS),
    ],
)
def test_distillation(
    select: str,
    settings: tuple[str, ...],
    world_size: int,
    llama: Path,
    theirs: dict[int, Tensor],
) -> None:
    options = (FP64, f"loss.teacher={llama}", f"loss.select={select}", *KD)
    config = tiny(*options, *settings)
    alone = tiny(*options, *(s for s in settings if s.startswith("model")))

    def run() -> tuple[float, float, Owned]:
        mesh = make_mesh(config)
        state = TrainingState.create(config, mesh)
        result = forward_backward(state, own_batch(config, mesh, 0), 0)
        return *result.sums(mesh), owned(state.optimizer, "gradient")

    expected_loss, expected_objective, expected = plain(alone, 0, theirs[0])
    assert abs(expected_objective - expected_loss) > 0.1
    ranks = run_ranks(run, world_size)
    for loss, objective, _ in ranks:
        assert loss == pytest.approx(expected_loss, rel=1e-10)  # fp64 sums in another order
        assert objective == pytest.approx(expected_objective, rel=THEIRS)
    gradients = logical(part for _, _, part in ranks)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (gradients[name] - gradient).abs().max()
        assert difference <= 10 * THEIRS * gradient.abs().max(), name


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("checkpoints", ()), ("checkpoints", (PP2,)), ("snapshots", ()), ("snapshots", (TP2,))],
    ids=["masters-one", "masters-pp2", "codes-one", "codes-tp2"],
)
def test_a_model_has_nothing_to_learn_from_itself(
    kind: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    """From a checkpoint of megabit's, masters or codes, its logits have the bits of the run's."""
    save(trained(tiny(), 2), tmp_path, 2)
    path = next((tmp_path / kind).glob("step_*"))
    config = tiny(f"loss.teacher={path}", *KD, *settings)

    def run() -> bool:
        mesh = make_mesh(config)
        state = trained(dataclasses.replace(config, loss=tiny().loss), 2)
        teacher = open_teacher(config, mesh)
        assert teacher is not None
        batch = own_batch(config, mesh, 2)
        logits = teacher.logits(batch)
        if settings == ():
            own = state.stages.logits(state.stages(batch.inputs[1]))
            assert torch.equal(logits[1], own.detach())
        state.teacher, state.config = teacher, config
        loss, objective = forward_backward(state, batch, 2).sums(mesh)
        # Another layout's gradients differ in the last bits, which two steps of AdamW make 1e-4.
        return objective == pytest.approx(loss, rel=1e-6 if settings == () else 1e-3)

    assert all(run_ranks(run, 2 if settings else 1))


def test_an_import_of_a_dense_model_teaches_as_a_dense_one(
    llama: Path, theirs: dict[int, Tensor], tmp_path: Path
) -> None:
    """Elsewhere it counts as the ternary model that it may become."""
    source = HuggingFaceSource(llama)
    write_training(source, tmp_path / "import", {NEVER_TERNARY: True}, {}, lambda *_: None)
    config = tiny(FP64, f"loss.teacher={tmp_path / 'import'}", *KD)
    teacher = open_teacher(config, ParallelMesh())
    assert teacher is not None
    first, *_ = teacher.logits(own_batch(config, teacher.runner.mesh, 0))
    assert_theirs(first, of_rank(config, teacher.runner.mesh, theirs[0], 0))


def test_training_leaves_the_teacher_as_it_is(llama: Path) -> None:
    config = tiny(f"loss.teacher={llama}", *KD, "optim.lr=[0.02,0.02]", "optim.warmup_steps=0")
    state = TrainingState.create(config, ParallelMesh())
    assert state.teacher is not None
    assert not any(p.requires_grad for p in state.teacher.runner.stages.parameters())
    batch = own_batch(config, state.mesh, 0)
    before = state.teacher.logits(batch)
    divergences = []
    for step in range(3):
        report = train_step(state, batch, step)
        divergences.append(report.objective - report.loss)
    assert divergences == sorted(divergences, reverse=True)
    assert all(map(torch.equal, before, state.teacher.logits(batch)))


def test_a_step_may_have_another_number_of_microbatches(
    llama: Path, theirs: dict[int, Tensor]
) -> None:
    """As while the batch grows."""
    config = tiny(FP64, f"loss.teacher={llama}", *KD, PP2)

    def run() -> list[int]:
        mesh = make_mesh(config)
        teacher = open_teacher(config, mesh)
        assert teacher is not None
        counts = []
        for count in (1, 3):
            batch = own_batch(config, mesh, 1)
            fewer = Batch(batch.inputs[:count], batch.targets[:count], batch.mask[:count])
            logits = teacher.logits(fewer)
            for number, part in enumerate(logits):
                expected = of_rank(config, mesh, theirs[1], number)
                assert_theirs(part, expected)
            counts.append(len(logits))
        return counts

    assert run_ranks(run, 2) == [[0, 0], [1, 3]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    ("theirs", "settings", "message"),
    [
        (
            {"vocab_size": 320},
            (),
            "has a vocabulary of 320 tokens, and the model to be trained one of 300",
        ),
        ({"num_hidden_layers": 1}, (PP2,), "2 stages (parallel.pp · parallel.vpp) for"),
        ({"num_attention_heads": 3}, (TP2,), "2 does not divide model.num_attention_heads=3"),
        ({}, ("data.seq_length=80",), "was made for 64 positions, fewer than data.seq_length=80"),
        ({}, ("parallel.exact=full",), "adds floats over TP, being dense"),
    ],
    ids=["vocabulary", "layers", "heads", "length", "exact"],
)
def test_who_cannot_teach_is_refused_before_anything_is_written(
    theirs: dict[str, int],
    settings: tuple[str, ...],
    message: str,
    corpus: CorpusInfo,
    tmp_path: Path,
) -> None:
    model = dataclasses.replace(LLAMA, **theirs)
    hf_models.save_random(tmp_path / "llama", model, torch.float32, "Llama")
    run = tmp_path / "run"
    config = config_of(corpus, run, f"loss.teacher={tmp_path / 'llama'}", *KD, *settings)
    line = refused(config, 2)
    assert line.startswith(f"loss.teacher: {tmp_path / 'llama'} ")
    assert message in line
    assert not run.exists()


def test_what_is_no_model(corpus: CorpusInfo, tmp_path: Path) -> None:
    config = config_of(corpus, tmp_path / "run", f"loss.teacher={tmp_path / 'nothing'}", *KD)
    assert "nothing: does not exist" in refused(config, 2)
    assert not (tmp_path / "run").exists()
