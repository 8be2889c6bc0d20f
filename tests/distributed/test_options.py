"""Norm placements, transforms and activation quantizers in training: bit-equal at every layout with
``parallel.exact: full``, also across a checkpoint; and the bytes that they send and keep."""

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megabit.checkpoint import CheckpointStore
from megabit.config import Config, find_problems
from megabit.launch import run_ranks
from megabit.model import num_parameters
from megabit.training.memory import resident_bytes
from megabit.training.more_state import training_parts
from megabit.training.resume import manifest_of, restore
from megabit.training.step import TrainingState, train_step
from megabit.training.traffic import Sent, step_traffic
from tests.training.tiny import Owned, logical, make_mesh, own_batch, owned, shape_of, tiny

STEPS = 4
KINDS = ("master", "exp_avg", "exp_avg_sq")
# 52 columns are blocks of unequal width.
SIZES = ("model.intermediate_size=52", "model.vocab_size=301", "parallel.exact=full")
IN_LINEAR = ("model.norm_placement=in_linear", "model.hadamard=true")
PER_PROJ = ("model.norm_placement=per_proj", "optim.clip_grad_norm=0.1")
PRENORM = ("model.norm_placement=prenorm", "model.activations=a4.8", "train.recompute=full")
OPTIONS = {"in_linear": IN_LINEAR, "per_proj": PER_PROJ, "prenorm": PRENORM}

ONE = ((), 1)
TP2_SP = (("parallel.tp=2", "parallel.sequence_parallel=true"), 2)
TP4 = (("parallel.tp=4",), 4)
PP2 = (("parallel.pp=2",), 2)
TP2_PP2 = (("parallel.tp=2", "parallel.pp=2"), 4)
DP2_ZERO0 = (("optim.zero_stage=0",), 2)

SLOW = pytest.mark.slow

Layout = tuple[tuple[str, ...], int]
Report = tuple[dict[str, Owned], list[float]]


def run_steps(
    layout: Layout, settings: tuple[str, ...], steps: range, folder: Path | None = None
) -> tuple[dict[str, dict[str, Tensor]], list[float]]:
    """Whole masters and moments after ``steps``, and norms of the steps' gradients.

    Args:
        folder: of a checkpoint, from which steps after the first go on, and which they end with.
    """
    config = tiny(*SIZES, *settings, *layout[0])
    assert find_problems(config, layout[1]) == []

    def run() -> Report:
        state = TrainingState.create(config, make_mesh(config))
        if steps.start > 0:
            assert folder is not None
            checkpoint = CheckpointStore(folder, state.mesh).find(False, print)
            assert checkpoint is not None
            assert restore(state, checkpoint) == steps.start
        norms = [
            train_step(state, own_batch(config, state.mesh, step), step).grad_norm for step in steps
        ]
        if folder is not None:
            store = CheckpointStore(folder, state.mesh)
            store.save(manifest_of(state, steps.stop, "none"), training_parts(state), {})
            ended = store.finish()
            assert ended is not None
            assert ended.problem is None
        return {kind: owned(state.optimizer, kind) for kind in KINDS}, norms

    ranks = run_ranks(run, layout[1])
    wholes = {kind: logical(parts[kind] for parts, _ in ranks) for kind in KINDS}
    return wholes, ranks[0][1]


@functools.cache
def one_process(option: str) -> tuple[dict[str, dict[str, Tensor]], list[float]]:
    return run_steps(ONE, OPTIONS[option], range(STEPS))


@pytest.mark.parametrize(
    ("option", "saved", "loaded"),
    [
        pytest.param("per_proj", TP4, PP2, id="per_proj-tp4-to-pp2"),
        pytest.param("in_linear", TP2_SP, DP2_ZERO0, id="in_linear-tp2_sp-to-dp2"),
        pytest.param("prenorm", PP2, TP2_SP, id="prenorm-pp2-to-tp2_sp"),
        pytest.param("prenorm", TP2_PP2, TP4, id="prenorm-tp2_pp2-to-tp4", marks=SLOW),
        pytest.param("per_proj", TP2_SP, TP2_PP2, id="per_proj-tp2_sp-to-tp2_pp2", marks=SLOW),
    ],
)
def test_training_is_bit_equal_at_every_layout(
    option: str, saved: Layout, loaded: Layout, tmp_path: Path
) -> None:
    """Half of the steps at one layout, and the rest from its checkpoint at another one."""
    settings, half = OPTIONS[option], STEPS // 2
    _, first = run_steps(saved, settings, range(half), tmp_path)
    found, second = run_steps(loaded, settings, range(half, STEPS), tmp_path)
    expected, norms = one_process(option)
    assert first + second == norms
    for kind in KINDS:
        assert found[kind].keys() == expected[kind].keys()
        for name, whole in expected[kind].items():
            assert torch.equal(found[kind][name], whole), f"{kind}/{name}"
    assert num_parameters(tiny(*SIZES, *settings).model) == sum(
        whole.numel() for whole in expected["master"].values()
    )


COUNTED = (
    *((f"model.norm_placement={name}",) for name in ("prenorm", "in_linear", "per_proj")),
    ("model.norm_placement=per_proj", "parallel.exact=full", "train.recompute=full"),
    ("model.norm_placement=in_linear", "model.hadamard=true", "parallel.exact=full"),
    ("model.norm_placement=prenorm", "model.hadamard=true", "model.activations=a4.8"),
    ("model.activations=a4.8", "train.recompute=full", "precision.compute=bfloat16"),
    ("model.norm_placement=prenorm", "model.activations=full"),
    ("model.norm_placement=prenorm", "model.linear=dense", "train.recompute=selective"),
    ("model.norm_placement=prenorm", "train.recompute=full", "precision.compute=float64"),
)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((2, 1), id="tp2"),
        pytest.param((4, 1), id="tp4", marks=SLOW),
        pytest.param((2, 2), id="tp2_pp2", marks=SLOW),
    ],
)
def test_what_is_sent_and_kept_is_what_the_formulas_say(layout: tuple[int, int]) -> None:
    tp, pp = layout
    sizes = ("data.seq_length=8", "train.global_batch_size=8", "train.micro_batch_size=2")
    configs = [
        tiny(*SIZES[:2], *sizes, *chosen, f"parallel.tp={tp}", f"parallel.pp={pp}", split)
        for chosen in COUNTED
        for split in ("parallel.sequence_parallel=false", "parallel.sequence_parallel=true")
    ]

    def run() -> list[tuple[Sent, dict[str, int]]]:
        return [run_step(config) for config in configs]

    def run_step(config: Config) -> tuple[Sent, dict[str, int]]:
        mesh = make_mesh(config)
        state = TrainingState.create(config, mesh)
        batch, before = own_batch(config, mesh, 0), mesh.sent()
        train_step(state, batch, 0)
        sent = {key: total - before.get(key, 0) for key, total in mesh.sent().items()}
        return of_interest(sent), state.optimizer.nbytes()

    def of_interest(sent: Sent) -> Sent:
        """Not what ranks agree on in a step, which is the same with all options."""
        return {key: count for key, count in sent.items() if count and key[1] != "control"}

    for rank, results in enumerate(run_ranks(run, tp * pp)):
        for config, (sent, kept) in zip(configs, results, strict=True):
            shape = shape_of(config, tp * pp, rank)
            assert sent == of_interest(step_traffic(shape)), (config.model, config.parallel, rank)
            expected = resident_bytes(shape, torch.device("cpu"))
            assert {**expected, **kept} == expected, (config.model, rank)
