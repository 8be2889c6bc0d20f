"""The layout is not part of the model: every layout against one process.

The model is awkward on purpose: 12 heads with 3 KV heads, so that neither TP 2 nor TP 4 divides the KV
heads and ranks hold overlapping ones; feed-forward and vocabulary in blocks of unequal width; layers
that do not divide over the stages; loss masks that differ between samples (``parity.uneven_batch``).
"""

import functools
import itertools

import pytest
import torch

from megabit import numerics
from megabit.config import Config, load_config
from megabit.mesh import Axis
from megabit.model import decoder
from megabit.tensor_parallel import TernaryLayer, TernaryWeight, bitlinear
from megabit.training.parity import Layout, Record, Tolerance, compare, record, sample_source

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
    Layout(tp, pp, dp, sequence_parallel)
    for tp, pp, dp, sequence_parallel in itertools.product((1, 2, 4), (1, 2), (1, 2), (False, True))
    if (tp > 1 or not sequence_parallel) and tp * pp * dp > 1
]


def by_size(layout: Layout) -> object:
    marks = [pytest.mark.slow] if layout.world_size > 2 else []
    return pytest.param(layout, marks=marks, id=str(layout))


every_layout = pytest.mark.parametrize("layout", [by_size(layout) for layout in LAYOUTS])


@functools.cache
def one_process(*settings: str) -> Record:
    return run(load_config([*MODEL, *settings]), Layout())


def run(config: Config, layout: Layout) -> Record:
    return record(layout.apply(config), layout, STEPS, sample_source(config))


@every_layout
@pytest.mark.parametrize("embeddings", [TIED, UNTIED], ids=["tied", "untied"])
def test_fp64_training_agrees_to_rounding(layout: Layout, embeddings: list[str]) -> None:
    """Loss, every gradient, norm, weights and codes after three steps, to 1e-9.

    fp64 rounds at 1e-16; AdamW divides by gradients of 1e-4 and more, so that 1e-9 leaves room for the
    growth of rounding over three steps and none for a missing, doubled or misplaced term.
    """
    settings = [*embeddings, *FP64]
    own = run(load_config([*MODEL, *settings]), layout)
    difference = compare(layout, own, one_process(*settings))
    assert difference.loss < 1e-12
    assert difference.gradient < 1e-11, difference.gradient_name
    assert difference.grad_norm < 1e-12
    assert difference.last_loss < 1e-9
    assert difference.weight < 1e-9
    assert difference.codes_changed == 0


@every_layout
@pytest.mark.parametrize("embeddings", [TIED, UNTIED], ids=["tied", "untied"])
def test_fp32_forward_is_bit_equal(layout: Layout, embeddings: list[str]) -> None:
    own = run(load_config([*MODEL, *embeddings]), layout)
    reference = one_process(*embeddings)
    assert torch.equal(own.logits, reference.logits)
    difference = compare(layout, own, reference)
    tolerance = Tolerance.of(load_config([*MODEL, *embeddings]))
    assert tolerance.forward_is_bit_equal
    assert tolerance.allows(difference), difference


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


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2), Layout(tp=2, sequence_parallel=True), Layout(pp=2), Layout(dp=2)],
    ids=str,
)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["model.linear=dense", *FP64], id="dense-fp64"),
        pytest.param(["parallel.schedule=gpipe", *FP64], id="gpipe-fp64"),
        pytest.param(["precision.compute=bfloat16"], id="bf16"),
        pytest.param(["precision.ternary_backward=bfloat16"], id="bf16-backward"),
    ],
)
def test_other_settings(layout: Layout, settings: list[str]) -> None:
    config = load_config([*MODEL, *TIED, *settings])
    difference = compare(layout, run(config, layout), one_process(*TIED, *settings))
    assert Tolerance.of(config).allows(difference), difference


def test_a_scale_of_each_shard_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: with γ taken of each shard alone, as rivals do, TP 2 is refused."""

    def ternarize_shards(layers: list[TernaryLayer], tp: Axis) -> None:
        for layer in layers:
            layer._ternary = TernaryWeight(*numerics.absmean_ternarize(layer.weight.detach()))
            layer._ternary_source = bitlinear._version(layer.weight)

    reference = one_process(*TIED)
    monkeypatch.setattr(decoder, "ternarize_layers", ternarize_shards)
    config = load_config([*MODEL, *TIED])
    layout = Layout(tp=2)
    difference = compare(layout, run(config, layout), reference)
    assert not difference.forward_is_bit_equal
    assert not Tolerance.of(config).allows(difference)
