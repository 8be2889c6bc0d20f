"""Layout-exact training (``parallel.exact=full``): nothing of a run tells its layout.

The model has everything that makes layouts differ: tied embeddings, KV heads that ranks share,
blocks of unequal width, dropout, clipping, weight decay, stages of unequal size and masks that
differ between samples (``parity.uneven_batch``).
"""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megabit import reduce
from megabit.config import Config, load_config
from megabit.data.batches import Batch
from megabit.data_parallel import reduction
from megabit.mesh import ParallelMesh
from megabit.model import kv_heads, norm
from megabit.tensor_parallel import logits, row_sums, ternary_backward
from megabit.training import parity
from megabit.training.parity import (
    Layout,
    Record,
    Tolerance,
    compare,
    record,
    sample_source,
)

STEPS = 20
SETTINGS = (
    *("model.hidden_size=32", "model.intermediate_size=52", "model.num_hidden_layers=3"),
    *("model.num_attention_heads=4", "model.num_key_value_heads=2", "model.vocab_size=101"),
    *("data.dir=no/such/corpus", "data.seq_length=8"),
    *("train.global_batch_size=8", "train.micro_batch_size=2", f"train.steps={STEPS}"),
    *("optim.warmup_steps=2", "optim.lr=[4e-3,2e-3]", "optim.weight_decay=[0.1,0.05]"),
    *("optim.clip_grad_norm=2.5", "parallel.bucket_mb=0.01", "parallel.exact=full"),
)
TIED = ("model.tie_word_embeddings=true", "train.hidden_dropout=0.1")
UNTIED = (
    *("model.tie_word_embeddings=false", "model.hidden_act=silu", "model.num_key_value_heads=1"),
    *("train.recompute=full", "optim.zero_stage=0", "parallel.row_reduce=exact16"),
)


@functools.cache
def one_process(*settings: str) -> Record:
    return run(Layout(), *settings)


def run(layout: Layout, *settings: str, steps: int = STEPS) -> Record:
    config = layout.apply(load_config([*SETTINGS, *settings]))
    return record(config, layout, steps, sample_source(config))


def test_the_run_is_a_hard_one() -> None:
    """Codes change and gradients are clipped, so that equality says something."""
    first, last = run(Layout(), *TIED, steps=1), one_process(*TIED)
    assert min(last.grad_norms) < 2.5 < max(last.grad_norms)
    changed = {n: (c != last.codes[n]).float().mean().item() for n, c in first.codes.items()}
    assert min(changed.values()) > 0.02


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (Layout(tp=2), TIED),
        (Layout(dp=2), UNTIED),
        (Layout(pp=2, layers_per_stage=(1, 2)), TIED),
        # More ranks than KV heads; fewer microbatches, for many ranks on few cores take long.
        pytest.param(
            *(Layout(tp=4, sequence_parallel=True), (*TIED, "train.global_batch_size=4")),
            marks=pytest.mark.slow,
        ),
        (Layout(dp=4), TIED),
        pytest.param(*(Layout(tp=2, dp=2, sequence_parallel=True), UNTIED), marks=pytest.mark.slow),
        pytest.param(
            *(Layout(tp=2, pp=2, layers_per_stage=(3, 0)), UNTIED), marks=pytest.mark.slow
        ),
        (Layout(pp=2, dp=2, layers_per_stage=(0, 3)), TIED),
    ],
    ids=lambda value: str(value) if isinstance(value, Layout) else "",
)
def test_a_layout_changes_no_bit(layout: Layout, settings: tuple[str, ...]) -> None:
    own, reference = run(layout, *settings), one_process(*settings)
    difference = compare(layout, own, reference)
    # Compared here once more, without ``parity``'s own idea of identity.
    assert own.losses == reference.losses
    assert own.grad_norms == reference.grad_norms
    for found, expected in (
        (own.gradients, reference.gradients),
        (own.weights, reference.weights),
        (own.moments, reference.moments),
        (own.codes, reference.codes),
    ):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    assert torch.equal(own.logits, reference.logits)
    assert difference.is_identical
    assert (difference.codes_changed, difference.weight, difference.gradient) == (0, 0, 0)
    assert Tolerance.of(load_config([*SETTINGS, *settings])).allows(difference)


def left_to_right(terms: Tensor) -> Tensor:
    """A sum in place of ``tree_sum``, as innocent as it looks."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def rotated(batch: Callable[..., Batch]) -> Callable[..., Batch]:
    """The same samples in the step, the first microbatch last."""

    def uneven_batch(config: Config, mesh: ParallelMesh, step: int, samples: object) -> Batch:
        own = batch(config, mesh, step, samples)
        return Batch(*(x.roll(-1, 0) for x in (own.inputs, own.targets, own.mask)))

    return uneven_batch


def check_is_caught(layout: Layout, own: Record, reference: Record) -> None:
    difference = compare(layout, own, reference)
    assert not difference.is_identical
    assert not Tolerance.of(load_config([*SETTINGS, *TIED])).allows(difference)
    # Yet it is only the order of a sum: as close as layouts are that promise nothing.
    forward = load_config([*SETTINGS, *TIED, "parallel.exact=forward"])
    assert difference.gradient <= Tolerance.of(forward).gradient


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=4)], ids=str)
def test_a_sum_in_another_order_is_caught(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process adds four blocks in the same wrong order; ranks begin with their own two."""
    for module in (reduce, reduction, kv_heads, norm, logits, row_sums, ternary_backward):
        monkeypatch.setattr(module, "tree_sum", left_to_right)
    own = run(layout, *TIED, steps=3)
    check_is_caught(layout, own, run(Layout(), *TIED, steps=3))


def test_microbatches_in_another_order_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    still = "train.hidden_dropout=0"  # else the noise of a sample would be another one's
    reference = run(Layout(), *TIED, still, steps=3)
    monkeypatch.setattr(parity, "uneven_batch", rotated(parity.uneven_batch))
    check_is_caught(Layout(), run(Layout(), *TIED, still, steps=3), reference)
