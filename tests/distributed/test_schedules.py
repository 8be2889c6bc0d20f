"""The schedule is not part of the model: every one against one process and against 1F1B.

All schedules add gradients in the same order, so to the same bits. One thing alone tells a pipeline
from one process: a tied embedding's two gradients are added after the last microbatch, not after
each. In layout-exact training nothing does.

Layers do not divide over the stages, and some stages have none; feed-forward and vocabulary are in
blocks of unequal width; masks differ between samples (``parity.uneven_batch``).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megabit.config import Config, find_problems, load_config
from megabit.data_parallel.buckets import Bucket, GradientBuckets
from megabit.data_parallel.layout import Slot
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.pipeline.actions import Backward, Compute, InputGradient, WeightGradient
from megabit.pipeline.placement import Placement
from megabit.training.parity import (
    Layout,
    Record,
    Tolerance,
    compare,
    record_each,
    sample_source,
    uneven_batch,
)
from megabit.training.step import TrainingState, forward_backward
from tests.pipeline.schedules import ONE_F_ONE_B, SCHEDULES, Named, counts, spread, watched

STEPS, LAYERS = 3, 4
MODEL = [
    "model.vocab_size=67",
    "model.hidden_size=32",
    "model.intermediate_size=50",
    f"model.num_hidden_layers={LAYERS}",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "data.dir=no/such/corpus",
    "data.seq_length=8",
    "train.micro_batch_size=2",
    f"train.steps={STEPS}",
    "optim.warmup_steps=1",
    "parallel.bucket_mb=0.02",  # several buckets
]
TIED, UNTIED = "model.tie_word_embeddings=true", "model.tie_word_embeddings=false"
FP64 = "precision.compute=float64"
EXACT = "parallel.exact=full"


class Case(NamedTuple):
    """A schedule and the settings that every layout has; ``microbatches`` on each DP rank."""

    schedule: Named
    microbatches: int
    settings: tuple[str, ...]
    layers: tuple[int, ...] | None = None
    """On each stage; the rest goes to the last one. Default: ``spread``."""

    def config(self, layout: Layout) -> Config:
        stages = layout.pp * self.schedule.chunks
        layers = [*self.layers, *[0] * stages][:stages] if self.layers else spread(LAYERS, stages)
        layers[-1] += LAYERS - sum(layers)
        config = load_config(
            [
                *MODEL,
                *self.schedule.settings(),
                *self.settings,
                f"train.global_batch_size={2 * self.microbatches * layout.dp}",
                f"parallel.tp={layout.tp}",
                f"parallel.pp={layout.pp}",
                f"parallel.sequence_parallel={layout.sequence_parallel}",
                f"parallel.layers_per_stage={layers}",
            ]
        )
        assert find_problems(config, layout.world_size) == []
        return config


def train(cases: Sequence[Case], layout: Layout) -> list[Record]:
    configs = [case.config(layout) for case in cases]
    return record_each(configs, layout, STEPS, sample_source(configs[0]))


@functools.cache
def one_process(microbatches: int, *settings: str) -> Record:
    (record,) = train([Case(ONE_F_ONE_B, microbatches, settings)], Layout())
    return record


def assert_same_bits(own: Record, reference: Record, case: Case) -> None:
    """Gradients of the first step; after the last one masters, moments and codes, and on the way
    losses and norms."""
    assert own.gradients.keys() == reference.gradients.keys()
    for name, gradient in reference.gradients.items():
        assert torch.equal(own.gradients[name], gradient), (case, name)
    assert compare(Layout(), own, reference).is_identical, case


def at_degrees(fast: int) -> pytest.MarkDecorator:
    """Pipelines of 2 ranks, and of 3 and 4 in slow tests."""
    slow = [pytest.param(pp, marks=pytest.mark.slow) for pp in (3, 4)]
    return pytest.mark.parametrize("pp", [fast, *slow])


# One process


@at_degrees(2)
def test_exact_training_is_that_of_one_process(pp: int) -> None:
    """``parallel.exact=full``: to the bit, with every schedule; all that could tell them apart."""
    others = ("train.hidden_dropout=0.1", "optim.clip_grad_norm=0.1", "train.recompute=selective")
    cases = [
        Case(schedule, 2 * pp, (EXACT, tied, *others))
        for tied in (TIED, UNTIED)
        for schedule in SCHEDULES
    ]
    for case, own in zip(cases, train(cases, Layout(pp=pp)), strict=True):
        reference = one_process(case.microbatches, *case.settings)
        assert_same_bits(own, reference, case)
        assert min(reference.grad_norms) > 0.1  # all steps are clipped


@pytest.mark.parametrize(
    ("pp", "ties"),
    [
        pytest.param(2, (TIED, UNTIED), id="2"),
        # The harder one, where ranks are many.
        *(pytest.param(pp, (TIED,), id=str(pp), marks=pytest.mark.slow) for pp in (3, 4)),
        *(
            pytest.param(pp, (UNTIED,), id=f"{pp}-untied", marks=pytest.mark.exhaustive)
            for pp in (3, 4)
        ),
    ],
)
def test_every_schedule_at_every_number_of_microbatches(pp: int, ties: Sequence[str]) -> None:
    """fp64: to 1e-9 of one process, in fact to rounding; and to the bit of 1F1B."""
    cases = [
        Case(schedule, count, (FP64, tied, "train.recompute=full", "optim.clip_grad_norm=0.1"))
        for count in counts(pp)
        for tied in ties
        for schedule in SCHEDULES
    ]
    layout = Layout(pp=pp)
    records = train(cases, layout)
    for number, (case, own) in enumerate(zip(cases, records, strict=True)):
        reference = one_process(case.microbatches, *case.settings)
        difference = compare(layout, own, reference)
        assert Tolerance.of(case.config(layout)).allows(difference), (case, difference)
        assert difference.gradient < 1e-9, (case, difference.gradient_name)
        assert_same_bits(own, records[number - number % len(SCHEDULES)], case)


# Other settings


SETTINGS: dict[str, Case] = {
    name: Case(ONE_F_ONE_B, 3, settings, layers)
    for name, (settings, layers) in {
        "empty last stage, selective, clipped": (
            ("train.recompute=selective", "optim.clip_grad_norm=0.1"),
            (3, 1),
        ),
        "empty first stage, full, int8, dropout": (
            (
                "train.recompute=full",
                "precision.ternary_backward=int8",
                "train.hidden_dropout=0.1",
            ),
            (0, 3),
        ),
        "bf16, not clipped": (("precision.compute=bfloat16", "optim.clip_grad_norm=0"), None),
        "dense": (("model.linear=dense",), None),
    }.items()
}


@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings(name: str) -> None:
    """To the bit: of one process where the embedding is not tied, and of 1F1B where it is."""
    pattern = SETTINGS[name]
    cases = [
        pattern._replace(schedule=schedule, settings=(*pattern.settings, tied))
        for tied in (TIED, UNTIED)
        for schedule in SCHEDULES
    ]
    records = train(cases, Layout(pp=2))
    of_one_process = one_process(pattern.microbatches, *pattern.settings, UNTIED)
    for case, own in zip(cases, records, strict=True):
        reference = of_one_process if UNTIED in case.settings else records[0]
        assert_same_bits(own, reference, case)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [(4,), (0, 4), (0, 0, 1), (2, 0, 1), (1, 2)], ids=str)
def test_uneven_stages(layers: tuple[int, ...]) -> None:
    """Empty ones at either end and in between; what is left over is on the last one."""
    # A rank needs something to hold, which all layers on the first stage of a V don't leave it.
    schedules = [s for s in SCHEDULES if layers != (4,) or s.make(2, 1).placement != Placement.v(2)]
    cases = [Case(schedule, 3, (UNTIED,), layers) for schedule in schedules]
    for case, own in zip(cases, train(cases, Layout(pp=2)), strict=True):
        assert_same_bits(own, one_process(3, UNTIED), case)


# Other axes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        pytest.param(
            layout,
            (*settings, tied),
            # Each of these is tried with one of the two; in exact training with both.
            marks=pytest.mark.exhaustive if tied != own and EXACT not in settings else (),
        )
        for layout, settings, own in [
            (Layout(pp=2, tp=2), (), TIED),
            (Layout(pp=2, tp=2, sequence_parallel=True), (EXACT,), TIED),
            (Layout(pp=2, dp=2), ("optim.zero_stage=0",), UNTIED),
            (Layout(pp=2, dp=2), ("optim.zero_stage=1", "precision.gradients=bfloat16"), TIED),
            (Layout(pp=2, dp=2), ("optim.zero_stage=2", "train.hidden_dropout=0.1"), TIED),
            (Layout(pp=2, dp=2), (EXACT,), TIED),
        ]
        for tied in (TIED, UNTIED)
    ],
    ids=str,
)
def test_with_other_axes(layout: Layout, settings: tuple[str, ...]) -> None:
    """To the bit of 1F1B at the same layout; in layout-exact training, of one process."""
    cases = [Case(schedule, 4, settings) for schedule in SCHEDULES]
    records = train(cases, layout)
    for case, own in zip(cases, records, strict=True):
        assert_same_bits(own, records[0], case)
        if EXACT in settings:
            reference = one_process(case.microbatches * layout.dp, *case.settings)
            assert_same_bits(own, reference, case)


# When gradients leave


class Sent(NamedTuple):
    """A bucket on its way."""

    bucket: int
    during: Compute
    gradients: int
    """That the rank had handed over by then, of all buckets."""


class Watched(NamedTuple):
    """What a rank did with its gradients in a step."""

    kinds: list[str]
    """Of its buckets."""
    chunks: list[int]
    """Whose tensors they have."""
    is_often: list[bool]
    """Whether they are sent in each microbatch."""
    sent: list[Sent]
    gradients: int
    last: dict[int, Sent]
    """By bucket: as if each had been sent when it was handed its last gradient."""


def watch_step(config: Config, mesh: ParallelMesh) -> Watched:
    sent: list[Sent] = []
    handed_over: list[Sent] = []
    now: list[Compute] = []
    add, send = GradientBuckets._add, GradientBuckets._send

    def seen(gradients: GradientBuckets, bucket: Bucket) -> Sent:
        number = [other is bucket for other in gradients.buckets].index(True)
        return Sent(number, now[-1], len(handed_over))

    def adding(gradients: GradientBuckets, bucket: Bucket, slot: Slot, gradient: Tensor) -> None:
        before = seen(gradients, bucket)
        handed_over.append(before._replace(gradients=before.gradients + 1))
        add(gradients, bucket, slot, gradient)

    def sending(gradients: GradientBuckets, bucket: Bucket) -> None:
        sent.append(seen(gradients, bucket))
        send(gradients, bucket)

    with (
        patch.object(GradientBuckets, "_add", adding),
        patch.object(GradientBuckets, "_send", sending),
        watched(before=now.append),
    ):
        state = TrainingState.create(config, mesh)
        forward_backward(state, uneven_batch(config, mesh, 0, sample_source(config)), step=0)
    gradients = state.optimizer.gradients
    layouts = [bucket.layout for bucket in gradients.buckets]
    return Watched(
        [layout.kind for layout in layouts],
        [state.stages.chunk_of(layout.slots[0].name) for layout in layouts],
        [gradients._is_reduced_now(bucket) for bucket in gradients.buckets],
        sent,
        len(handed_over),
        {each.bucket: each for each in handed_over},
    )


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_each_bucket_leaves_with_its_last_gradient(pp: int, zero_stage: int) -> None:
    """In the W (or BW) that completes it, while the rank computes on."""
    layout, count = Layout(pp=pp, dp=2), 3
    settings = (TIED, f"optim.zero_stage={zero_stage}")
    cases = [Case(schedule, count, settings) for schedule in SCHEDULES]

    def run() -> list[Watched]:
        mesh = ParallelMesh.create(1, pp, torch.device("cpu"))
        return [watch_step(case.config(layout), mesh) for case in cases]

    for number, found in enumerate(run_ranks(run, layout.world_size)):
        for case, seen in zip(cases, found, strict=True):
            computes = case.schedule.make(pp, count).computes(number // layout.dp)
            check_sends(seen, computes)
            assert any(seen.is_often) == (zero_stage == 2)


def check_sends(seen: Watched, computes: list[Compute]) -> None:
    expected = []
    buckets = zip(seen.kinds, seen.chunks, seen.is_often, strict=True)
    for bucket, (kind, chunk, is_often) in enumerate(buckets):
        # Gains are given their gradients with those of activations.
        kinds = Backward | (InputGradient if kind == "gain" else WeightGradient)
        those = [c for c in computes if isinstance(c, kinds) and c.chunk == chunk]
        expected += [(bucket, compute) for compute in (those if is_often else those[-1:])]
    order = {compute: place for place, compute in enumerate(computes)}
    assert sorted((s.bucket, order[s.during]) for s in seen.sent) == sorted(
        (bucket, order[compute]) for bucket, compute in expected
    )
    # Not at its end: as soon as the last gradient is there.
    assert {s.bucket: s for s in seen.sent} == seen.last
    # The first one leaves when there is still something to compute: in another compute, unless
    # the last one is the only one that completes buckets.
    assert len(seen.sent) > 1
    assert seen.sent[0].gradients < seen.gradients
    if len({compute for _, compute in expected}) > 1:
        assert seen.sent[0].during != computes[-1]
