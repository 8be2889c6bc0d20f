"""The layout is not part of the model: every layout against one process.

The model is awkward on purpose: 12 heads with 3 KV heads, so that neither TP 2 nor TP 4 divides the
KV heads and ranks hold overlapping ones; feed-forward and vocabulary in blocks of unequal width;
layers that do not divide over the stages; loss masks that differ between samples
(``parity.uneven_batch``).
"""

import functools
import itertools

import pytest
import torch
from torch import Tensor

from megabit.config import Config, load_config
from megabit.data_parallel.masters import Master
from megabit.data_parallel.publish import Publisher
from megabit.training.parity import (
    Difference,
    Layout,
    Record,
    Tolerance,
    compare,
    record,
    record_each,
    sample_source,
)
from megabit_kernels import numerics

STEPS = 3
MODEL = [
    "model.vocab_size=301",
    "model.hidden_size=96",
    "model.intermediate_size=210",
    "model.num_hidden_layers=3",
    "model.num_attention_heads=12",
    "model.num_key_value_heads=3",
    "data.dir=no/such/corpus",
    "data.seq_length=16",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "train.steps=3",
    "optim.warmup_steps=1",
    "parallel.bucket_mb=0.1",  # several buckets
]
TIED = ["model.tie_word_embeddings=true", "model.hidden_act=relu2"]
UNTIED = ["model.tie_word_embeddings=false", "model.hidden_act=silu"]
FP64 = ["precision.compute=float64"]

LAYOUTS = [
    Layout(tp, pp, dp, sp)
    for tp, pp, dp, sp in itertools.product((1, 2, 4), (1, 2), (1, 2), (False, True))
    if (tp > 1 or not sp) and tp * pp * dp > 1
]
COVERED = (Layout(4, 2, 1), Layout(4, 1, 2, sequence_parallel=True))


def by_size(layout: Layout) -> object:
    marks = [pytest.mark.slow] if layout.world_size > 2 else []
    # The others have each degree of TP beside each of every other axis, and three axes at once.
    is_covered = layout.world_size > 8 or layout in COVERED
    return pytest.param(
        layout, marks=[*marks, pytest.mark.exhaustive] if is_covered else marks, id=str(layout)
    )


@functools.cache
def one_process(*settings: str) -> Record:
    return run(load_config([*MODEL, *settings]), Layout())


def run(config: Config, layout: Layout) -> Record:
    return record(layout.apply(config), layout, STEPS, sample_source(config))


@pytest.mark.parametrize("layout", [by_size(layout) for layout in LAYOUTS])
def test_every_layout_trains_the_same_model(layout: Layout) -> None:
    settings = [(*embeddings, *extra) for embeddings in (TIED, UNTIED) for extra in ([], FP64)]
    configs = [load_config([*MODEL, *each]) for each in settings]
    records = record_each(
        [layout.apply(config) for config in configs], layout, STEPS, sample_source(configs[0])
    )
    for config, each, own in zip(configs, settings, records, strict=True):
        if config.precision.compute == "float64":
            check_fp64(compare(layout, own, one_process(*each)))
        else:
            check_fp32(own, one_process(*each), compare(layout, own, one_process(*each)), config)


def check_fp64(difference: Difference) -> None:
    """Loss, every gradient, norm, weights and codes after three steps, to 1e-9.

    fp64 rounds at 1e-16, so that 1e-11 leaves room for sums over all tokens, and 1e-9 for what
    AdamW makes of them in three steps; neither does for a missing, doubled or misplaced term.
    """
    assert difference.loss < 1e-12
    assert difference.gradient < 1e-11, difference.gradient_name
    assert difference.grad_norm < 1e-12
    assert difference.last_loss < 1e-9
    assert difference.weight < 1e-9
    assert difference.codes_changed == 0


def check_fp32(own: Record, reference: Record, difference: Difference, config: Config) -> None:
    """Forward bit by bit; the rest within what ``megabit parity`` allows."""
    assert torch.equal(own.logits, reference.logits)
    assert Tolerance.of(config).allows(difference), difference


def test_pipeline_training_is_bit_equal() -> None:
    """Stages compute what one process computes, in the same order: nothing may differ."""
    layout = Layout(pp=2)
    own, reference = run(load_config([*MODEL, *UNTIED]), layout), one_process(*UNTIED)
    difference = compare(layout, own, reference)
    assert (difference.gradient, difference.weight, difference.codes_changed) == (0, 0, 0)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, layers_per_stage=(1, 2)),
        Layout(pp=2, layers_per_stage=(3, 0)),
        pytest.param(Layout(tp=2, pp=2, layers_per_stage=(0, 3)), marks=pytest.mark.slow),
        pytest.param(Layout(tp=1, pp=3), marks=pytest.mark.slow),
        pytest.param(Layout(tp=3, pp=1), marks=pytest.mark.slow),
        pytest.param(Layout(tp=6, sequence_parallel=False), marks=pytest.mark.slow),
        pytest.param(Layout(tp=12), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_uneven_stages_and_other_degrees(layout: Layout) -> None:
    """Explicit stages (an empty one too), and every other TP that divides the 12 heads."""
    own = run(load_config([*MODEL, *TIED]), layout)
    assert torch.equal(own.logits, one_process(*TIED).logits)
    difference = compare(layout, own, one_process(*TIED))
    assert Tolerance.of(load_config([*MODEL, *TIED])).allows(difference), difference


OTHER_SETTINGS = (
    ["model.linear=dense", *FP64],
    ["parallel.schedule=gpipe", *FP64],
    ["precision.compute=bfloat16"],
    ["precision.ternary_backward=bfloat16"],
    ["precision.ternary_backward=int8", "precision.gradients=bfloat16", "optim.zero_stage=2"],
    ["optim.zero_stage=0", "parallel.row_reduce=exact16", "train.recompute=full", *FP64],
    ["optim.zero_stage=2", "train.hidden_dropout=0.1", "train.recompute=selective", *FP64],
)


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2), Layout(tp=2, sequence_parallel=True), Layout(pp=2), Layout(dp=2)],
    ids=str,
)
def test_other_settings(layout: Layout) -> None:
    configs = [load_config([*MODEL, *TIED, *each]) for each in OTHER_SETTINGS]
    records = record_each(
        [layout.apply(config) for config in configs], layout, STEPS, sample_source(configs[0])
    )
    for config, each, own in zip(configs, OTHER_SETTINGS, records, strict=True):
        difference = compare(layout, own, one_process(*TIED, *each))
        assert Tolerance.of(config).allows(difference), (each, difference)


def test_the_shape_of_bitnet_2b4t() -> None:
    """20 heads over 5 KV heads, and 6912 feed-forward columns that TP 4 and 5 cut unevenly."""
    settings = [*MODEL, *TIED, "model.num_attention_heads=20", "model.num_key_value_heads=5"]
    settings += ["model.hidden_size=80", "model.intermediate_size=6912"]
    settings += ["model.num_hidden_layers=1", "train.micro_batch_size=1"]
    config = load_config(settings)
    samples = sample_source(config)
    reference = record(config, Layout(), 1, samples)
    for layout in (Layout(tp=4), Layout(tp=5)):
        own = record(layout.apply(config), layout, 1, samples)
        check_fp32(own, reference, compare(layout, own, reference), config)


def test_a_scale_of_each_shard_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: with γ of each shard alone, as rivals have it, TP 2 is refused."""

    def scales_of_shards(publisher: Publisher, masters: list[Master]) -> dict[str, Tensor]:
        return {
            slot.name: numerics.absmean_scale(master.bucket.layout.local(master.weights, slot))
            for master in masters
            for slot in master.bucket.layout.slots
            if slot.name in publisher.layers
        }

    reference = one_process(*TIED)
    monkeypatch.setattr(Publisher, "_scales", scales_of_shards)
    config = load_config([*MODEL, *TIED])
    layout = Layout(tp=2)
    difference = compare(layout, run(config, layout), reference)
    assert not difference.forward_is_bit_equal
    assert not Tolerance.of(config).allows(difference)
