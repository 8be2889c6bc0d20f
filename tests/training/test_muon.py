"""Training with Muon: the same bits at every layout, bytes as the formulas say, and checkpoints."""

import functools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megabit.checkpoint import CheckpointStore
from megabit.checkpoint.verify import expected_tensors, optimizer_of, verify
from megabit.config import Config
from megabit.launch import run_ranks
from megabit.pipeline.plan import plan_stages
from megabit.training.memory import resident_bytes
from megabit.training.more_state import training_parts
from megabit.training.resume import manifest_of, restore
from megabit.training.step import TrainingState, train_step
from megabit.training.traffic import Sent, StepKind, step_traffic, total_traffic
from tests.training.tiny import Owned, logical, make_mesh, own_batch, shape_of, tiny

# 52 columns and 301 rows, which neither ranks nor multiples of 64 divide; TP 4 shares KV heads.
SETTINGS = (
    *("optim.name=muon", "optim.lr=[0.02,0.01]", "optim.clip_grad_norm=0.5"),
    *("model.intermediate_size=52", "model.vocab_size=301", "data.seq_length=8"),
)
EXACT, SP = "parallel.exact=full", "parallel.sequence_parallel=true"
DENSE = ("model.linear=dense", "model.tie_word_embeddings=false", "precision.compute=bfloat16")
CPU = torch.device("cpu")
STEPS = 3


class Trained(NamedTuple):
    """What a rank has after all steps."""

    kinds: dict[str, Owned]
    losses: list[float]
    sent: Sent
    """In the first step, of Muon's."""
    nbytes: dict[str, int]


def kinds_of(state: TrainingState) -> dict[str, Owned]:
    kinds: dict[str, Owned] = {}
    for piece in state.optimizer.pieces(owned=True):
        for kind, tensor in piece.tensors.items():
            kinds.setdefault(kind, []).append((piece.name, piece, tensor.clone()))
    return kinds


def train(config: Config, steps: int = STEPS) -> Trained:
    state = TrainingState.create(config, make_mesh(config))
    losses: list[float] = []
    sent: Sent = {}
    for step in range(steps):
        losses.append(train_step(state, own_batch(config, state.mesh, step), step).loss)
        sent = sent or updates_of(state.mesh.sent())
    state.optimizer.publisher.settle()
    return Trained(kinds_of(state), losses, sent, state.optimizer.nbytes())


def updates_of(sent: Sent) -> Sent:
    """``test_traffic`` looks at everything else, which does not depend on the optimizer."""
    return {key: count for key, count in sent.items() if key[1] == "updates"}


def wholes(ranks: list[dict[str, Owned]]) -> dict[str, dict[str, torch.Tensor]]:
    kinds = {kind for rank in ranks for kind in rank}
    return {kind: logical(rank.get(kind, []) for rank in ranks) for kind in kinds}


@functools.cache
def one_process(*settings: str) -> Trained:
    return train(tiny(*SETTINGS, *settings))


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param(("parallel.tp=2",), 2, marks=pytest.mark.slow),
        (("parallel.pp=2",), 4),
        (("parallel.tp=2", "optim.zero_stage=0"), 4),
        pytest.param(("parallel.tp=4", SP), 4, marks=pytest.mark.slow),
        pytest.param((), 4, marks=pytest.mark.slow),
        pytest.param(("parallel.tp=2", "parallel.pp=2"), 8, marks=pytest.mark.slow),
    ],
    ids=["tp2", "pp2-dp2", "tp2-dp2-zero0", "tp4-sp", "dp4", "tp2-pp2-dp2"],
)
def test_exact_training_and_its_bytes(layout: tuple[str, ...], world_size: int) -> None:
    """Layout-exact training has the bits of one process; any sends and keeps what it should."""
    configs = [
        tiny(*SETTINGS, *layout, *more) for more in ((EXACT,), (), ("optim.zero_stage=2",), DENSE)
    ]
    steps = (STEPS, 1, 1, 1)
    ranks = run_ranks(lambda: [*map(train, configs, steps)], world_size)
    reference = one_process(EXACT)
    own = wholes([rank[0].kinds for rank in ranks])
    expected = wholes([reference.kinds])
    assert own.keys() == expected.keys() == {"master", "momentum", "exp_avg", "exp_avg_sq"}
    for kind, tensors in expected.items():
        assert own[kind].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(own[kind][name], tensor), (kind, name)
    assert all(rank[0].losses == reference.losses for rank in ranks)
    for number, config in enumerate(configs):
        total: Sent = {}
        for rank, results in enumerate(ranks):
            shape = shape_of(config, world_size, rank)
            assert results[number].sent == updates_of(step_traffic(shape)), (number, rank)
            assert results[number].nbytes == resident_bytes(shape, CPU), (number, rank)
            for key, count in results[number].sent.items():
                total[key] = total.get(key, 0) + count
        dp = world_size // (config.parallel.tp * config.parallel.pp)
        plan = plan_stages(config, dp)
        assert updates_of(total_traffic(config, world_size, plan)) == total
        assert not updates_of(
            step_traffic(shape_of(config, world_size, 0), StepKind(is_updated=False))
        )


def test_one_process_sends_nothing_and_keeps_one_moment_less() -> None:
    config = tiny(*SETTINGS)
    result = one_process()
    shape = shape_of(config, 1, 0)
    assert result.sent == step_traffic(shape) == {}
    assert result.nbytes == resident_bytes(shape, CPU)
    adamw = resident_bytes(shape_of(tiny(*SETTINGS, "optim.name=adamw"), 1, 0), CPU)
    matrices = sum(4 * held.part(1) for held in shape.layer_matrices())
    assert adamw["moments"] - result.nbytes["moments"] == matrices
    others = {**adamw, "moments": 0}
    assert {**result.nbytes, "moments": 0} == others


@pytest.mark.parametrize("linear", ["ternary", "dense"])
def test_it_learns(linear: str) -> None:
    config = tiny(*SETTINGS, f"model.linear={linear}", "optim.warmup_steps=0", "train.steps=12")
    state = TrainingState.create(config, make_mesh(config))
    batch = own_batch(config, state.mesh, 0)  # the same each time
    losses = [train_step(state, batch, step).loss for step in range(12)]
    assert losses[-1] < losses[0] - 1


# Checkpoints


def save(config: Config, folder: Path) -> dict[str, Owned]:
    state = TrainingState.create(config, make_mesh(config))
    for step in range(2):
        train_step(state, own_batch(config, state.mesh, step), step)
    store = CheckpointStore(folder, state.mesh)
    store.save(manifest_of(state, 2, "none"), training_parts(state), {})
    ended = store.finish()
    assert ended is not None
    assert ended.problem is None
    return kinds_of(state)


def load(config: Config, folder: Path) -> tuple[dict[str, Owned], dict[str, Owned]]:
    """What was loaded, and what the next step makes of it."""
    state = TrainingState.create(config, make_mesh(config))
    checkpoint = CheckpointStore(folder, state.mesh).find(False, print)
    assert checkpoint is not None
    assert restore(state, checkpoint) == 2
    loaded = kinds_of(state)
    train_step(state, own_batch(config, state.mesh, 2), 2)
    return loaded, kinds_of(state)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (((), 1), (("parallel.tp=2", "parallel.pp=2"), 4)),
        ((("parallel.tp=4",), 4), ((), 2)),
    ],
    ids=["one-to-tp2-pp2", "tp4-to-dp2"],
)
def test_another_layout_goes_on_from_a_checkpoint(
    saved: tuple[tuple[str, ...], int], loaded: tuple[tuple[str, ...], int], tmp_path: Path
) -> None:
    before, after = (tiny(*SETTINGS, EXACT, *layout) for layout, _ in (saved, loaded))
    parts = run_ranks(lambda: save(before, tmp_path), saved[1])
    ranks = run_ranks(lambda: load(after, tmp_path), loaded[1])
    for own, expected in (
        (wholes([first for first, _ in ranks]), wholes(parts)),
        (wholes([second for _, second in ranks]), wholes([one_process(EXACT).kinds])),
    ):
        assert own.keys() == expected.keys()
        for kind, tensors in expected.items():
            assert own[kind].keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(own[kind][name], tensor), (kind, name)


@pytest.mark.parametrize("linear", ["ternary", "dense"])
def test_a_checkpoint_has_one_moment_of_a_matrix(linear: str, tmp_path: Path) -> None:
    config = tiny(*SETTINGS, f"model.linear={linear}")
    save(config, tmp_path)
    checkpoint = CheckpointStore(tmp_path, make_mesh(config)).find(False, print)
    assert checkpoint is not None
    assert [*verify(checkpoint.path)]
    assert optimizer_of(checkpoint.manifest) == "muon"
    names = {*expected_tensors("training", config.model, optimizer="muon")}
    query = "model.layers.1.self_attn.q_proj.weight"
    assert {f"master/{query}", f"momentum/{query}", "exp_avg/model.norm.weight"} <= names
    assert not {f"exp_avg/{query}", "momentum/model.embed_tokens.weight"} & names
    adamw = {*expected_tensors("training", config.model)}
    assert f"exp_avg/{query}" in adamw
    assert len(names) == len(adamw) - 2 * 7
