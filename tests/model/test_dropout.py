"""Dropout: one mask for a microbatch whatever the layout, drawn again backward, off elsewhere."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from megabit.config import Config, load_config
from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.model import build_stages
from megabit.model.dropout import Dropout
from megabit.reduce import own_rows
from megabit.tensor_parallel import PLAIN, ForwardPass, LayerContext, Noise

T = TypeVar("T")
CPU = torch.device("cpu")
TOKENS, HIDDEN = 16, 24
NOISE = Noise(seed=3, step=4, microbatch=5)
TRAINING = ForwardPass(NOISE)


def on_axis(degree: int, function: Callable[[Axis], T]) -> list[T]:
    return run_ranks(lambda: function(ParallelMesh.create(degree, 1, CPU).tp), degree)


def dropout_of(p: float, name: str = "layers.0.mlp", axis: Axis | None = None) -> Dropout:
    context = LayerContext.single()
    if axis is not None:
        context = replace(context, tp=axis, sequence_parallel=True)
    return Dropout(p, name, context)


def test_the_mask_is_the_same_at_every_layout() -> None:
    """Own tokens of it under sequence parallelism; without, all ranks have all tokens."""
    x = torch.randn(TOKENS, HIDDEN)
    expected = dropout_of(0.3)(x, TRAINING)

    def run(axis: Axis) -> tuple[Tensor, Tensor]:
        together = Dropout(0.3, "layers.0.mlp", replace(LayerContext.single(), tp=axis))
        own = dropout_of(0.3, axis=axis)(own_rows(x, axis), TRAINING)
        assert axis.sent_bytes == 0
        return together(x, TRAINING), own

    for degree in (2, 4):
        ranks = on_axis(degree, run)
        assert all(torch.equal(whole, expected) for whole, _ in ranks)
        assert torch.equal(torch.cat([own for _, own in ranks]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_backward_draws_the_same_mask_again(dtype: torch.dtype) -> None:
    x = torch.ones(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    y = dropout_of(0.25)(x, TRAINING)
    kept = y != 0
    assert 0 < kept.sum() < kept.numel()
    assert torch.equal(y[kept], torch.full_like(y[kept], 4 / 3))
    assert y.grad_fn is not None
    assert y.grad_fn.saved_tensors == ()  # no mask is kept
    grad = torch.randn(TOKENS, HIDDEN).to(dtype)
    (dx,) = torch.autograd.grad(y, x, grad)
    assert dx.dtype == y.dtype == dtype
    assert torch.equal(dx, torch.where(kept, grad * torch.tensor(4 / 3, dtype=dtype), 0))


def test_it_is_off_outside_training_and_at_zero() -> None:
    x = torch.randn(TOKENS, HIDDEN)
    assert dropout_of(0.5)(x, PLAIN) is x
    assert dropout_of(0.0)(x, TRAINING) is x


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_a_share_p_is_zeroed_and_the_mean_stays(p: float) -> None:
    count = 256 * 256
    y = dropout_of(p)(torch.ones(256, 256), TRAINING)
    # Five standard errors of a share p of so many draws; seeds are fixed: no flakes.
    error = 5 * (p * (1 - p) / count) ** 0.5
    assert abs((y == 0).float().mean().item() - p) < error
    assert abs(y.mean().item() - 1) < error / (1 - p)
    # As often in each row and column: 5.5 standard errors, for 512 of them.
    for share in ((y == 0).float().mean(dim) for dim in (0, 1)):
        assert (share - p).abs().max() < 5.5 * (p * (1 - p) / 256) ** 0.5


def test_masks_differ_by_name_microbatch_step_and_seed() -> None:
    x = torch.ones(TOKENS, HIDDEN)
    noises = [NOISE, replace(NOISE, seed=0), replace(NOISE, step=0), replace(NOISE, microbatch=0)]
    ys = [dropout_of(0.5)(x, ForwardPass(noise)) for noise in noises]
    ys.append(dropout_of(0.5, "layers.1.mlp")(x, TRAINING))
    for i, a in enumerate(ys):
        for b in ys[:i]:
            # Of two independent masks half of the elements agree, give or take 6 standard errors.
            agree = (a == b).float().mean().item()
            assert abs(agree - 0.5) < 6 * 0.5 / (TOKENS * HIDDEN) ** 0.5


def test_no_global_generator_is_drawn_from() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    dropout_of(0.5)(torch.ones(TOKENS, HIDDEN), TRAINING)
    assert torch.equal(torch.get_rng_state(), state)


# In the model


def config_at(*settings: str) -> Config:
    return load_config(
        [
            *("model.hidden_size=32", "model.intermediate_size=48", "model.vocab_size=64"),
            *("model.num_hidden_layers=2", "data.seq_length=8", "train.micro_batch_size=2"),
            *("train.hidden_dropout=0.2", *settings),
        ]
    )


def hidden_states(config: Config, mesh: ParallelMesh, noise: Noise | None) -> Tensor:
    """What leaves a stage that is the whole model."""
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
    return build_stages(config, mesh)(tokens, None, ForwardPass(noise)).detach()


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(2, False), (2, True), (4, True)])
def test_a_training_pass_has_the_same_bits_at_every_layout(
    tp: int, sequence_parallel: bool
) -> None:
    expected = hidden_states(config_at(), ParallelMesh(), NOISE)
    config = config_at(f"parallel.tp={tp}", f"parallel.sequence_parallel={sequence_parallel}")
    ranks = run_ranks(lambda: hidden_states(config, ParallelMesh.create(tp, 1, CPU), NOISE), tp)
    if sequence_parallel:
        assert torch.equal(torch.cat(ranks), expected)
    else:
        assert all(torch.equal(hidden, expected) for hidden in ranks)


def test_an_evaluation_is_that_of_a_model_without_dropout() -> None:
    mesh = ParallelMesh()
    without = hidden_states(config_at("train.hidden_dropout=0"), mesh, None)
    assert torch.equal(hidden_states(config_at(), mesh, None), without)
    assert torch.equal(hidden_states(config_at("train.hidden_dropout=0"), mesh, NOISE), without)
    assert not torch.equal(hidden_states(config_at(), mesh, NOISE), without)


def test_a_training_pass_draws_by_its_noise_at_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, int]] = []
    mask = Dropout.mask

    def noted(dropout: Dropout, x: Tensor, seed: int) -> Tensor:
        drawn.append((dropout.name, seed))
        return mask(dropout, x, seed)

    monkeypatch.setattr(Dropout, "mask", noted)
    hidden_states(config_at(), ParallelMesh(), NOISE)
    places = [f"layers.{i}.{part}" for i in range(2) for part in ("self_attn", "mlp")]
    assert drawn == [(name, NOISE.seed_of(name)) for name in ("embed_tokens", *places)]


def test_each_place_has_a_mask_of_its_own_on_whatever_stage_it_is() -> None:
    def names(pp: int) -> list[str]:
        mesh = ParallelMesh() if pp == 1 else ParallelMesh.create(1, pp, CPU)
        stage = build_stages(config_at(f"parallel.pp={pp}"), mesh).model
        found = [stage.embedding_dropout.name] if mesh.pp.rank == 0 else []
        return found + [d.name for layer in stage.layers.values() for d in layer.dropouts]

    whole = names(1)
    assert len(set(whole)) == len(whole) == 1 + 2 * 2
    first, last = run_ranks(lambda: names(2), 2)
    assert first + last == whole
