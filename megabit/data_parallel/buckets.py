"""Gradients in flat fp32 buckets, summed over data-parallel ranks while backward still runs.

Every parameter's ``grad`` is a view into a bucket (its ``main_grad``), so autograd accumulates
microbatches straight into what is sent. Buckets are filled in the order in which backward passes
finish: last parameters first. In the last microbatch, a bucket's all-reduce starts as soon as its
last gradient is there. All ranks of a DP group hold the same parameters and run the same backward
pass, so they start the same buckets in the same order.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megabit.mesh import Axis
from megabit.reduce import start_all_reduce
from megabit.tensor_parallel import ShardedParameter

MIB = 2**20


@dataclass
class Bucket:
    """One flat buffer and the gradients in it."""

    flat: Tensor
    num_parameters: int
    waiting_for: int = 0
    """Gradients that the last microbatch has yet to complete."""
    work: dist.Work | None = None


@dataclass
class GradientBuckets:
    """The gradients of a stage. ``parameters`` are given in the order of the forward pass."""

    buckets: list[Bucket] = field(default_factory=list)
    dp: Axis = field(default_factory=lambda: Axis.single("dp"))
    _is_last_backward: bool = False

    @staticmethod
    def create(
        parameters: Iterable[ShardedParameter], dp: Axis, bucket_mb: float
    ) -> "GradientBuckets":
        """Allocate the buckets and let every parameter's ``grad`` point into one.

        Args:
            bucket_mb: MiB at which a bucket is closed; a larger parameter has one of its own.
        """
        gradients = GradientBuckets(dp=dp)
        group: list[ShardedParameter] = []
        size = 0
        for parameter in reversed(list(parameters)):
            num_bytes = parameter.numel() * parameter.element_size()
            if group and size + num_bytes > bucket_mb * MIB:
                gradients._add_bucket(group)
                group, size = [], 0
            group.append(parameter)
            size += num_bytes
        if group:
            gradients._add_bucket(group)
        return gradients

    def _add_bucket(self, parameters: list[ShardedParameter]) -> None:
        first = parameters[0]
        flat = torch.zeros(
            sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device
        )
        bucket = Bucket(flat, len(parameters))
        views = flat.split([p.numel() for p in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(lambda _, b=bucket: self._on_gradient(b))
        self.buckets.append(bucket)

    def zero(self) -> None:
        """Before the first backward pass of a step."""
        for bucket in self.buckets:
            bucket.flat.zero_()

    def expect_last_backward(self) -> None:
        """The next backward pass completes the gradients: reduce each bucket as it fills."""
        self._is_last_backward = True
        for bucket in self.buckets:
            bucket.waiting_for = bucket.num_parameters

    def finish(self) -> None:
        """Wait until every bucket holds the sum over DP."""
        if not self._is_last_backward:
            raise RuntimeError("no backward pass was announced as the last one")
        self._is_last_backward = False
        for bucket in self.buckets:
            if bucket.waiting_for:
                raise RuntimeError(
                    f"{bucket.waiting_for} parameters had no gradient in the last backward pass"
                )
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None

    def _on_gradient(self, bucket: Bucket) -> None:
        if not self._is_last_backward:
            return
        bucket.waiting_for -= 1
        if bucket.waiting_for == 0:
            bucket.work = start_all_reduce(bucket.flat, self.dp)
