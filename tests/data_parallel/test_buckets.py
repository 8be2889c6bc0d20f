"""Gradient buckets: where gradients live, when they are sent, and that their sum is right."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabit.data_parallel import GradientBuckets
from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.tensor_parallel import Shard, ShardedParameter, whole

H, LAYERS, MICROBATCHES = 6, 5, 3
MIB = 2**20
ONE_EACH = 1e-6
"""A bucket size, in MiB, that is smaller than any parameter."""
TWO_EACH = 2 * H * H * 4 / MIB
ALL_IN_ONE = 1.0


def make_parameters(count: int = LAYERS) -> list[ShardedParameter]:
    """A chain of matrices, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for _ in range(count):
        shard = Shard((H, H), 0, whole(H, owned=True))
        parameters.append(ShardedParameter(shard, torch.float32, torch.device("cpu")))
        parameters[-1].data.normal_(generator=generator)
    return parameters


def loss(parameters: Sequence[Tensor], rank: int, microbatch: int) -> Tensor:
    x = torch.randn(4, H, generator=torch.Generator().manual_seed(100 * rank + microbatch))
    for weight in parameters:
        x = torch.tanh(x @ weight)
    return x.square().sum()


def expected_gradients(ranks: int) -> list[Tensor]:
    """Of all ranks and microbatches, in the order in which a rank and then a sum adds them."""
    parameters = make_parameters()
    own = []
    for rank in range(ranks):
        total = [torch.zeros(H, H) for _ in parameters]
        for microbatch in range(MICROBATCHES):
            grads = torch.autograd.grad(loss(parameters, rank, microbatch), parameters)
            total = [t + g for t, g in zip(total, grads, strict=True)]
        own.append(total)
    return [torch.stack(of_ranks).sum(0) for of_ranks in zip(*own, strict=True)]


class Step(NamedTuple):
    """What one rank saw in a step."""

    gradients: list[Tensor]
    started: list[list[bool]]
    """After each gradient of the step: which buckets' reductions had been started."""
    sent_bytes: float


def run_step(bucket_mb: float) -> Step:
    """A step of several microbatches, on the calling rank of a job that is all data-parallel."""
    mesh = ParallelMesh.create(1, 1, torch.device("cpu"))
    parameters = make_parameters()
    gradients = GradientBuckets.create(parameters, mesh.dp, bucket_mb)
    started: list[list[bool]] = []
    for parameter in parameters:  # these run after the hooks of the buckets
        parameter.register_post_accumulate_grad_hook(
            lambda _: started.append([bucket.work is not None for bucket in gradients.buckets])
        )
    gradients.zero()
    for microbatch in range(MICROBATCHES):
        if microbatch == MICROBATCHES - 1:
            gradients.expect_last_backward()
        loss(parameters, dist.get_rank(), microbatch).backward()
    gradients.finish()
    return Step(
        [p.grad.clone() for p in parameters if p.grad is not None], started, mesh.dp.sent_bytes
    )


@pytest.mark.parametrize(
    ("bucket_mb", "sizes"),
    [(ONE_EACH, [1] * LAYERS), (TWO_EACH, [2, 2, 1]), (ALL_IN_ONE, [LAYERS])],
)
def test_buckets_are_filled_from_the_last_parameter_on(bucket_mb: float, sizes: list[int]) -> None:
    parameters = make_parameters()
    gradients = GradientBuckets.create(parameters, Axis.single("dp"), bucket_mb)
    assert [bucket.num_parameters for bucket in gradients.buckets] == sizes
    waiting = list(reversed(parameters))
    for bucket in gradients.buckets:
        held, waiting = waiting[: bucket.num_parameters], waiting[bucket.num_parameters :]
        bucket.flat.copy_(torch.arange(bucket.flat.numel()))
        joined = torch.cat([p.grad.flatten() for p in held if p.grad is not None])
        assert torch.equal(joined, bucket.flat)


def test_gradients_stay_views_of_their_buckets() -> None:
    parameters = make_parameters()
    gradients = GradientBuckets.create(parameters, Axis.single("dp"), TWO_EACH)
    storages = {bucket.flat.untyped_storage().data_ptr() for bucket in gradients.buckets}
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    places = None
    for step in range(3):
        gradients.zero()
        assert all(p.grad is not None and not p.grad.any() for p in parameters)
        for microbatch in range(2):
            if microbatch == 1:
                gradients.expect_last_backward()
            loss(parameters, step, microbatch).backward()
        gradients.finish()
        optimizer.step()
        grads = [p.grad for p in parameters if p.grad is not None]
        assert {grad.untyped_storage().data_ptr() for grad in grads} == storages
        places = places or [grad.data_ptr() for grad in grads]
        assert places == [grad.data_ptr() for grad in grads]


@pytest.mark.parametrize("bucket_mb", [ONE_EACH, TWO_EACH, ALL_IN_ONE])
def test_sum_over_ranks(bucket_mb: float) -> None:
    expected = expected_gradients(2)
    for step in run_ranks(lambda: run_step(bucket_mb), 2):
        # Two terms have one sum, whatever the order and the size of the buckets.
        assert all(map(torch.equal, step.gradients, expected))
        # Ring volume: each rank sends (d − 1)/d of the data twice, once a step.
        assert step.sent_bytes == LAYERS * H * H * 4


def test_sum_over_four_ranks() -> None:
    expected = expected_gradients(4)
    for step in run_ranks(lambda: run_step(TWO_EACH), 4):
        for own, reference in zip(step.gradients, expected, strict=True):
            # Four fp32 terms in another order: a few units of 2^-24.
            torch.testing.assert_close(own, reference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bucket_mb", [ONE_EACH, TWO_EACH, ALL_IN_ONE])
def test_buckets_are_reduced_in_backward_order_in_the_last_backward(bucket_mb: float) -> None:
    per_bucket = {ONE_EACH: 1, TWO_EACH: 2, ALL_IN_ONE: LAYERS}[bucket_mb]
    num_buckets = -(-LAYERS // per_bucket)
    nothing = [[False] * num_buckets] * LAYERS * (MICROBATCHES - 1)
    # Most buckets are on their way before the last gradient has come.
    filled = [*(done // per_bucket for done in range(1, LAYERS)), num_buckets]
    last = [[bucket < count for bucket in range(num_buckets)] for count in filled]
    for step in run_ranks(lambda: run_step(bucket_mb), 2):
        assert step.started == nothing + last


def test_a_parameter_without_a_gradient_is_an_error() -> None:
    parameters = make_parameters()
    gradients = GradientBuckets.create(parameters, Axis.single("dp"), ALL_IN_ONE)
    gradients.expect_last_backward()
    loss(parameters[1:], 0, 0).backward()
    with pytest.raises(RuntimeError, match="1 parameters had no gradient in the last backward"):
        gradients.finish()


def test_a_last_backward_that_was_not_announced_is_an_error() -> None:
    parameters = make_parameters()
    gradients = GradientBuckets.create(parameters, Axis.single("dp"), ALL_IN_ONE)
    loss(parameters, 0, 0).backward()
    with pytest.raises(RuntimeError, match="no backward pass was announced"):
        gradients.finish()
    gradients.expect_last_backward()
    loss(parameters, 0, 1).backward()
    gradients.finish()
    with pytest.raises(RuntimeError, match="no backward pass was announced"):
        gradients.finish()
