"""The baselines compute what megabit computes: the same model, the same recipe."""

from dataclasses import replace

import pytest
import torch

from megabit.benchmark.baselines import DenseLinear, FakeQuantizedLinear, PlainTrainer
from megabit.benchmark.contestants import PLAIN, Plain
from megabit.config import Config
from megabit.model import build_stages
from megabit.tensor_parallel import sharded_parameters
from megabit.training.step import TrainingState, train_step
from megabit_kernels import numerics
from tests.training.tiny import make_mesh, own_batch, tiny

LINEAR = {"dense": DenseLinear, "ternary": FakeQuantizedLinear}
STEPS = 4


def losses_of_both(config: Config, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """Losses of megabit's and of the baseline's first steps, from the same weights."""
    mesh = make_mesh(config)
    plain = PlainTrainer(config, LINEAR[config.model.linear], dtype)
    weights = dict(plain.model.named_parameters())
    expected_weights = sharded_parameters(build_stages(config, mesh))
    assert weights.keys() == expected_weights.keys()
    for name, expected_weight in expected_weights.items():
        assert torch.equal(weights[name], expected_weight)
    state = TrainingState.create(config, mesh)
    batches = [own_batch(config, mesh, step) for step in range(STEPS)]
    expected = [train_step(state, batch, step).loss for step, batch in enumerate(batches)]
    return expected, [plain.train_step(batch, step) for step, batch in enumerate(batches)]


@pytest.mark.parametrize("linear", ["dense", "ternary"])
@pytest.mark.parametrize(
    "model",
    [
        ["model.hidden_act=silu", "model.tie_word_embeddings=false"],
        ["model.hidden_act=relu2", "model.tie_word_embeddings=true"],
        ["model.num_key_value_heads=4", "train.seed=2"],
    ],
    ids=["swiglu", "tied", "no groups"],
)
def test_they_train_like_megabit_in_fp64(linear: str, model: list[str]) -> None:
    """Where nothing is near enough to a boundary to be rounded to another value.

    With some seeds something lies right on one: at the first position attention gives the value
    itself, integers times a scale, and a quotient of those may end in a half.
    """
    config = tiny(f"model.linear={linear}", "precision.compute=float64", *model)
    expected, losses = losses_of_both(config, torch.float64)
    assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("linear", "compute", "tolerance"),
    [
        ("dense", "float32", 1e-6),
        ("dense", "bfloat16", 5e-4),
        # An input whose rounding falls to another integer changes a product by 1/127 of it.
        ("ternary", "float32", 1e-4),
        ("ternary", "bfloat16", 2e-3),
    ],
)
def test_losses_are_those_of_megabit(linear: str, compute: str, tolerance: float) -> None:
    config = tiny(f"model.linear={linear}", f"precision.compute={compute}")
    expected, losses = losses_of_both(config, getattr(torch, compute))
    assert losses == pytest.approx(expected, rel=tolerance)
    assert losses[0] != losses[-1]


def test_a_fake_quantized_layer_is_the_textbook_one() -> None:
    torch.manual_seed(0)
    layer = FakeQuantizedLinear(24, 16, torch.float64)
    x = torch.randn(5, 24, dtype=torch.float64, requires_grad=True)
    reference_x = x.detach().clone().requires_grad_()
    reference_w = layer.weight.detach().clone().requires_grad_()
    y, expected = layer(x), numerics.fake_quantized_linear(reference_x, reference_w)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(x.grad, reference_x.grad)
    torch.testing.assert_close(layer.weight.grad, reference_w.grad)


def test_bf16_keeps_fp32_weights_and_multiplies_in_bf16() -> None:
    config = tiny("model.linear=dense")
    plain = Plain(config, *PLAIN["dense bf16"])
    seen = []
    for module in plain.module.modules():
        if isinstance(module, DenseLinear):
            module.register_forward_hook(lambda module, inputs, y: seen.append(y.dtype))
    plain.step(own_batch(config, make_mesh(config), 0), 0)
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in plain.module.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in plain.module.parameters() if p.grad is not None} == {
        torch.float32
    }


def test_gradients_are_clipped_where_megabit_clips() -> None:
    """Adam's first update does not depend on their size, later ones do."""
    config = tiny("precision.compute=float64", "optim.clip_grad_norm=0.01", "optim.eps=1e-4")
    expected, losses = losses_of_both(config, torch.float64)
    # torch divides by the norm + 1e-6.
    assert losses == pytest.approx(expected, rel=1e-5)
    unclipped = replace(config, optim=replace(config.optim, clip_grad_norm=0.0))
    assert losses_of_both(unclipped, torch.float64)[1][1:] != pytest.approx(losses[1:], rel=1e-4)


def test_dropout_drops() -> None:
    config = tiny("train.hidden_dropout=0.5", "model.linear=dense")
    module = Plain(config, *PLAIN["dense fp32"]).module
    batch = own_batch(config, make_mesh(config), 0)
    first, second = (module(batch.inputs[0], batch.targets[0]).item() for _ in range(2))
    assert first != second
