"""Training while a λ ramp fades quantization in, with other scales, and with full-precision
activations: against plain torch, and at other layouts against one process."""

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megabit.config import Config
from megabit.launch import run_ranks
from megabit.tensor_parallel import ForwardPass, Quantization, ternary_layers
from megabit.training.step import TrainingState, train_step
from megabit_kernels import numerics
from tests.data_parallel.small import (
    CLIP,
    EPS,
    MICROBATCHES,
    NUM_ELEMENTS,
    TOKENS,
    PlainRun,
    SmallRun,
    config_of,
    hyperparameters,
    make_mesh,
    plain_ternary,
    tokens,
)
from tests.training.tiny import Owned, bits, logical, own_batch, owned, tiny
from tests.training.tiny import make_mesh as mesh_of

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0)
"""λ of each step, and of the one after the last."""
STEPS = len(SHARES) - 1


def small_loss(run: SmallRun, inputs: Tensor, targets: Tensor, share: float) -> Tensor:
    """As ``Small.forward``, with λ."""
    model, carried = run.model, ForwardPass(quantization=Quantization(share))
    x = model.norm(model.embedding(inputs)).values
    x = model.down(F.silu(model.up(x, None, carried)), None, carried)
    x = model.sub_norm(x).values
    x = torch.cat(model.seven.forward_together([model.seven, model.three], x, None, carried), -1)
    return F.cross_entropy(model.head(x), targets, reduction="sum") / (MICROBATCHES * TOKENS)


def small_step(run: SmallRun, step: int) -> float:
    own = tokens(step).chunk(run.mesh.dp.size, dim=1)[run.mesh.dp.rank]
    run.optimizer.gradients.begin_step(own.shape[1])
    for inputs, targets in own.unbind(1):
        small_loss(run, inputs, targets, SHARES[step]).backward()
    run.optimizer.finish_gradients()
    norm = run.optimizer.gradient_norm(NUM_ELEMENTS)
    run.optimizer.step(min(1.0, CLIP / norm), *hyperparameters(step), share=SHARES[step + 1])
    return norm


def small_run(zero_stage: int, *settings: str) -> SmallRun:
    config = config_of(zero_stage, *settings)
    run = SmallRun.create(config, make_mesh())
    run.optimizer.publish(SHARES[0])
    return run


def plain_loss(
    weights: Mapping[str, Tensor], inputs: Tensor, targets: Tensor, share: float
) -> Tensor:
    """The same with ``detach`` in place of a straight-through function."""

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x * gain * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)

    def layer(x: Tensor, name: str) -> Tensor:
        weight = weights[f"{name}.weight"]
        s = x.detach().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
        x_hat = (x.detach() / s).round().clamp(-128, 127) * s
        x = x + (share * (x_hat - x)).detach()
        return x @ (weight + (mixed(weight.detach(), share) - weight).detach()).t()

    x = norm(weights["embedding.weight"][inputs], weights["norm.weight"])
    x = norm(layer(F.silu(layer(x, "up")), "down"), weights["sub_norm.weight"])
    x = torch.cat([layer(x, "seven"), layer(x, "three")], dim=-1)
    loss = F.cross_entropy(x @ weights["head.weight"].t(), targets, reduction="sum")
    return loss / (MICROBATCHES * TOKENS)


def mixed(weight: Tensor, share: float) -> Tensor:
    gamma, code = plain_ternary(weight)
    return weight + share * (gamma * code - weight)


def plain_step(run: PlainRun, step: int) -> float:
    run.adam.zero_grad()
    for inputs, targets in tokens(step).unbind(1):
        plain_loss(run.weights, inputs, targets, SHARES[step]).backward()
    gradients = [w.grad for w in run.weights.values() if w.grad is not None]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    for gradient in gradients:
        gradient.mul_(min(1.0, CLIP / norm))
    lr, weight_decay = hyperparameters(step)
    for group in run.adam.param_groups:
        group["lr"] = lr
    run.adam.param_groups[0]["weight_decay"] = weight_decay
    run.adam.step()
    return norm


def held_weights(run: SmallRun) -> dict[str, Tensor]:
    """What the ternary layers compute with."""
    held = {}
    for name, layer in run.layers().items():
        share = 1.0 if layer.mixed is None else layer.mixed.share
        held[f"{name}.weight"] = layer.values(share)(torch.float64)
    return held


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_ramp_is_a_straight_through_estimator_and_adamw(world_size: int) -> None:
    def train() -> list[tuple[list[float], list[dict[str, Tensor]], Owned]]:
        found = []
        for zero_stage in (0, 1, 2):
            run = small_run(zero_stage, "precision.compute=float64")
            norms, held = [], [held_weights(run)]
            for step in range(STEPS):
                norms.append(small_step(run, step))
                held.append(held_weights(run))
            found.append((norms, held, owned(run.optimizer)))
        return found

    ranks = run_ranks(train, world_size)
    plain = PlainRun.create(torch.float64)
    norms, weights = [], [{n: w.detach().clone() for n, w in plain.weights.items()}]
    for step in range(STEPS):
        norms.append(plain_step(plain, step))
        weights.append({n: w.detach().clone() for n, w in plain.weights.items()})
    # Sums in another order, rounded to 2^-53, over a few steps.
    for number in range(3):
        of_ranks = [rank[number] for rank in ranks]
        masters = logical(own for *_, own in of_ranks)
        for name, weight in weights[-1].items():
            torch.testing.assert_close(masters[name], weight, rtol=1e-11, atol=1e-12)
        for own_norms, held, _ in of_ranks:
            assert own_norms == pytest.approx(norms, rel=1e-11)
            for share, of_step, expected in zip(SHARES, held, weights, strict=True):
                for name, value in of_step.items():
                    wanted = mixed(expected[name], share)
                    torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12)
    # The ramp says something: each λ gives other weights.
    first = weights[0]["up.weight"]
    assert (mixed(first, 0.2) - mixed(first, 0.4)).abs().max() > 1e-2


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_what_travels_is_rounded_to_the_compute_dtype_once(compute: str) -> None:
    """W̃ is made in fp32, and the same on all ranks, sharded or not."""
    dtype = getattr(torch, compute)

    def run() -> list[tuple[dict[str, Tensor], Owned]]:
        found = []
        for zero_stage in (0, 1):
            config = tiny(f"precision.compute={compute}", f"optim.zero_stage={zero_stage}")
            state = TrainingState.create(config, mesh_of(config))
            state.optimizer.publish(0.3)
            held = {}
            for layer in ternary_layers(state.stages):
                assert layer.mixed is not None
                held[f"{layer.name}.weight"] = layer.mixed.values.clone()
            found.append((held, owned(state.optimizer)))
        return found

    ranks = run_ranks(run, 2)
    for number in range(2):
        masters = logical(rank[number][1] for rank in ranks)
        for rank in ranks:
            held = rank[number][0]
            assert len(held) == 14
            for name, values in held.items():
                gamma = numerics.absmean_scale(masters[name])
                effective = numerics.ternarize(masters[name], gamma) * gamma
                weight = masters[name]
                assert torch.equal(values, (weight + 0.3 * (effective - weight)).to(dtype)), name


def test_after_a_ramp_a_run_is_like_one_that_never_had_it() -> None:
    """λ = 1 leaves nothing behind: restored masters and moments go on with the same bits."""

    def run() -> bool:
        first, second = small_run(1), small_run(1)
        for step in range(5):
            assert all(layer.mixed is not None for layer in first.layers().values())
            small_step(first, step)
        assert all(layer.mixed is None for layer in first.layers().values())
        second.optimizer.begin_restore(first.optimizer.updates)
        pairs = zip(first.optimizer.pieces(), second.optimizer.pieces(), strict=True)
        for ours, theirs in pairs:
            assert ours.tensors.keys() == theirs.tensors.keys() > {"master"}
            for kind, values in ours.tensors.items():
                theirs.tensors[kind].copy_(values)
        second.optimizer.publish()
        for step in (5, 6):
            assert small_step(first, step) == small_step(second, step)
        equal = [
            torch.equal(values, theirs.tensors[kind])
            for ours, theirs in zip(
                first.optimizer.pieces(), second.optimizer.pieces(), strict=True
            )
            for kind, values in ours.tensors.items()
        ]
        ours, theirs = first.codes(), second.codes()
        return all(equal) and all(torch.equal(ours[name], theirs[name]) for name in ours)

    assert all(run_ranks(run, 2))


def test_a_pass_with_another_share_than_was_published_is_refused() -> None:
    run = small_run(1)
    inputs, targets = tokens(0)[:, 0]
    small_loss(run, inputs, targets, SHARES[0])
    for wrong in (0.2, 1.0):
        with pytest.raises(RuntimeError, match="λ = 0"):
            small_loss(run, inputs, targets, wrong)
    run.optimizer.publish()
    small_loss(run, inputs, targets, 1.0)
    with pytest.raises(RuntimeError, match="is codes, and the forward pass has λ = 0"):
        small_loss(run, inputs, targets, 0.0)


# Other layouts

SHORT = (
    *("train.steps=4", "train.global_batch_size=4", "train.micro_batch_size=1"),
    *("data.seq_length=8", "precision.compute=float64"),
)
OPTIONS = (
    ("train.quantization_ramp=0.5",),
    ("train.quantization_ramp=0.5", "train.recompute=full", "model.scale_mult=0.866"),
    ("model.activations=full", "train.recompute=selective", "model.weight_scale=absmedian"),
)
SEQUENCE_PARALLEL = "parallel.sequence_parallel=true"


def train(config: Config) -> TrainingState:
    state = TrainingState.create(config, mesh_of(config))
    for step in range(config.train.steps):
        train_step(state, own_batch(config, state.mesh, step), step)
    return state


@functools.cache
def one_process(option: int) -> dict[str, Tensor]:
    return logical([owned(train(tiny(*SHORT, *OPTIONS[option])).optimizer)])


@pytest.mark.parametrize(
    ("tp", "dp", "settings"),
    [
        (2, 1, (SEQUENCE_PARALLEL,)),
        (2, 2, ()),
        pytest.param(1, 2, ("optim.zero_stage=2",), marks=pytest.mark.slow),
        pytest.param(4, 1, (), marks=pytest.mark.slow),  # shares KV heads
        pytest.param(4, 2, ("optim.zero_stage=0",), marks=pytest.mark.slow),
    ],
)
def test_a_ramp_at_other_layouts(tp: int, dp: int, settings: tuple[str, ...]) -> None:
    """In fp64, where no weight comes so near to where rounding changes that a sum in another order
    could move it; so what is left is the rounding of 2^-53, over some steps of AdamW."""

    def run() -> list[Owned]:
        configs = [tiny(*SHORT, *option, *settings, f"parallel.tp={tp}") for option in OPTIONS]
        return [owned(train(config).optimizer) for config in configs]

    references = [one_process(number) for number in range(len(OPTIONS))]
    ranks = run_ranks(run, tp * dp)
    for number, wanted in enumerate(references):
        masters = logical(rank[number] for rank in ranks)
        for name, weight in wanted.items():
            torch.testing.assert_close(masters[name], weight, rtol=1e-9, atol=1e-10)


SCALES = [
    ("model.weight_scale=absmedian", "model.scale_mult=1.1547"),
    ("model.weight_scale=absmean", "model.scale_mult=0.866"),
]


Exact = tuple[Owned, dict[str, Tensor]]
"""Masters, and γ by name of weight."""


def train_exact(*settings: str) -> list[Exact]:
    """With each of ``SCALES``."""
    found = []
    for scale in SCALES:
        more = ("parallel.exact=full", "train.steps=2", "data.seq_length=8")
        state = train(tiny(*scale, *more, *settings))
        found.append((owned(state.optimizer), dict(state.optimizer.publisher.scales)))
    return found


@functools.cache
def exact_alone() -> list[Exact]:
    return train_exact()


@pytest.mark.parametrize(
    ("tp", "dp", "zero_stage"),
    [
        (4, 1, 1),
        (2, 2, 1),
        pytest.param(1, 2, 0, marks=pytest.mark.slow),
        pytest.param(2, 1, 1, marks=pytest.mark.slow),
        pytest.param(4, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_other_scales_are_exact_at_every_layout(tp: int, dp: int, zero_stage: int) -> None:
    """Layout-exact training with them: each γ and master weight, bit by bit."""
    alone = exact_alone()
    settings = (f"parallel.tp={tp}", f"optim.zero_stage={zero_stage}")
    ranks = run_ranks(lambda: train_exact(*settings), tp * dp)
    for number, (scale_of, multiplier) in enumerate(
        ((numerics.absmedian_scale, 1.1547), (numerics.absmean_scale, 0.866))
    ):
        wanted, scales = logical([alone[number][0]]), alone[number][1]
        masters = logical(rank[number][0] for rank in ranks)
        assert all(torch.equal(masters[name], weight) for name, weight in wanted.items())
        for rank in ranks:
            assert len(rank[number][1]) == 14
        for name, gamma in scales.items():
            assert torch.equal(gamma, scale_of(wanted[name], multiplier))
            assert all(torch.equal(rank[number][1][name], gamma) for rank in ranks)
    assert not torch.equal(bits_of(alone[0][0]), bits_of(alone[1][0]))


def bits_of(own: Owned) -> Tensor:
    return torch.cat([part.flatten() for _, _, part in own])


# What an update does to codes


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (4, 1), (2, 2)])
def test_flips_are_counted_once_each(tp: int, dp: int) -> None:
    def run() -> list[Any]:
        found = []
        for zero_stage in (0, 1):
            config = tiny(
                f"parallel.tp={tp}", f"optim.zero_stage={zero_stage}", "optim.lr=[0.02,0.02]"
            )
            state = TrainingState.create(config, mesh_of(config))
            before = owned(state.optimizer)
            report = train_step(state, own_batch(config, state.mesh, 0), 0, is_probed=True)
            assert report.probe is not None
            found.append((before, owned(state.optimizer), report.probe.weights))
            unwatched = bits(state)
            again = TrainingState.create(config, mesh_of(config))
            report = train_step(again, own_batch(config, again.mesh, 0), 0)
            assert report.probe is None
            # Watching changes nothing.
            assert all(map(torch.equal, bits(again), unwatched))
        return found

    ranks = run_ranks(run, tp * dp)
    for number in range(2):
        before, after = (logical(rank[number][i] for rank in ranks) for i in (0, 1))
        names = ranks[0][number][2].keys()
        assert len(names) == 14
        flips = 0
        for name in names:
            counts = [rank[number][2][name] for rank in ranks]
            old, new = (
                (weights[name] / numerics.absmean_scale(weights[name])).round().clamp(-1, 1)
                for weights in (before, after)
            )
            assert sum(c.codes for c in counts) == new.numel()
            assert sum(c.flips for c in counts) == int((old != new).sum())
            assert sum(c.zeros for c in counts) == int((new == 0).sum())
            gamma = numerics.absmean_scale(after[name])
            distance = (after[name].abs() / gamma - 0.5).abs().double().sum().item()
            assert sum(c.distance for c in counts) == pytest.approx(distance, rel=1e-12)
            flips += int((old != new).sum())
        assert flips > 100
