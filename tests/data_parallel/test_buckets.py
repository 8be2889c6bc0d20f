"""Gradient buckets: what they add up and in which order, when they are sent, what they hold."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megabit.data_parallel import GradientBuckets, reduction
from megabit.data_parallel.buckets import MAX_IN_FLIGHT, Bucket
from megabit.data_parallel.layout import lay_out
from megabit.data_parallel.reduction import GradientReduction
from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.reduce import Pending, Purpose, start_all_to_all
from megabit.tensor_parallel import Shard, ShardedParameter, whole
from tests.data_parallel.small import make_mesh

H, LAYERS, MICROBATCHES = 6, 5, 3
MIB = 2**20
ONE_EACH = 1e-6
"""A bucket size, in MiB, that is smaller than any parameter."""
TWO_EACH = 2 * H * H * 4 / MIB
ALL_IN_ONE = 1.0
SIZES = (ONE_EACH, TWO_EACH, ALL_IN_ONE)
FP32, BF16 = torch.float32, torch.bfloat16


def make_parameters(count: int = LAYERS, size: int = H) -> list[ShardedParameter]:
    """A chain of matrices, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for _ in range(count):
        shard = Shard((size, size), 0, whole(size, owned=True))
        parameters.append(ShardedParameter(shard, FP32, torch.device("cpu")))
        parameters[-1].data.normal_(generator=generator)
    return parameters


def make_buckets(
    parameters: Sequence[ShardedParameter],
    mesh: ParallelMesh,
    bucket_mb: float = ALL_IN_ONE,
    zero_stage: int = 1,
    wire_dtype: torch.dtype = FP32,
) -> GradientBuckets:
    """Buckets that have taken over the gradients."""
    named = [(str(number), parameter, "matrix") for number, parameter in enumerate(parameters)]
    gradients = GradientBuckets(
        [Bucket(layout) for layout in lay_out(named, mesh.dp.size, bucket_mb)],  # type: ignore[arg-type]
        mesh,
        FP32,
        GradientReduction(mesh, FP32, wire_dtype),
        reduces_each_microbatch=zero_stage == 2,
        gathers_sums=zero_stage == 0,
    )
    gradients.collect()
    return gradients


def loss(parameters: Sequence[Tensor], sample: int) -> Tensor:
    """Of a microbatch, by its number in the global batch."""
    size = len(parameters[0])
    x = torch.randn(4, size, generator=torch.Generator().manual_seed(sample))
    for weight in parameters:
        x = torch.tanh(x @ weight)
    return x.square().sum()


def samples(rank: int, microbatches: int) -> range:
    return range(rank * microbatches, (rank + 1) * microbatches)


def gradients_of(sample: int) -> list[Tensor]:
    parameters = make_parameters()
    return [*torch.autograd.grad(loss(parameters, sample), parameters)]


def tree(terms: list[Tensor]) -> Tensor:
    """A balanced tree of a power of two of terms."""
    half = len(terms) // 2
    return terms[0] if not half else tree(terms[:half]) + tree(terms[half:])


def one_by_one(terms: list[Tensor]) -> Tensor:
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total


def expected_sums(ranks: int, zero_stage: int, wire_dtype: torch.dtype) -> list[Tensor]:
    """Microbatches one after the other and ranks in a tree; in stage 2 ranks first. In fp32, each
    rank's part rounded to ``wire_dtype`` once."""
    by_rank = [[gradients_of(s) for s in samples(rank, MICROBATCHES)] for rank in range(ranks)]
    sums = []
    for i in range(LAYERS):
        own = [[gradients[i] for gradients in of_rank] for of_rank in by_rank]  # [rank][microbatch]
        if zero_stage == 2:
            columns = zip(*own, strict=True)
            sums.append(one_by_one([tree([g.to(wire_dtype).float() for g in c]) for c in columns]))
        else:
            sums.append(tree([one_by_one(terms).to(wire_dtype).float() for terms in own]))
    return sums


class Step(NamedTuple):
    """What one rank saw in a step."""

    totals: dict[str, Tensor]
    """By name: ``[rows of this rank, H]``."""
    started: list[list[bool]]
    """After each gradient of the step: which buckets had been sent in it."""
    travelling: list[list[bool]]
    """Which were still under way; what has come may have been added up already."""
    sent_bytes: float


def run_step(
    mesh: ParallelMesh, bucket_mb: float, zero_stage: int, wire_dtype: torch.dtype = FP32
) -> Step:
    """A step of several microbatches on the calling rank."""
    parameters = make_parameters()
    gradients = make_buckets(parameters, mesh, bucket_mb, zero_stage, wire_dtype)
    started: list[list[bool]] = []
    travelling: list[list[bool]] = []

    def look(_: Tensor) -> None:
        under_way = [bucket.travelling is not None for bucket in gradients.buckets]
        come = [bucket.total is not None for bucket in gradients.buckets]
        travelling.append(under_way)
        started.append([a or b for a, b in zip(under_way, come, strict=True)])

    for parameter in parameters:  # these run after the hooks of the buckets
        parameter.register_post_accumulate_grad_hook(look)
    before = mesh.dp.sent["weight gradients"]
    gradients.begin_step(MICROBATCHES)
    for sample in samples(mesh.dp.rank, MICROBATCHES):
        loss(parameters, sample).backward()
    gradients.finish()
    assert all(parameter.grad is None for parameter in parameters)
    return Step(totals(gradients), started, travelling, mesh.dp.sent["weight gradients"] - before)


def totals(gradients: GradientBuckets) -> dict[str, Tensor]:
    """This rank's rows of the sums by name."""
    rank, found = gradients.mesh.dp.rank, {}
    for bucket in gradients.buckets:
        assert bucket.total is not None
        held = range(bucket.layout.ranks) if len(bucket.total) > 1 else [rank]
        for slot in bucket.layout.slots:
            parts = [
                slot.rows_in(bucket.total, i, slot.rows_of(part), part)
                for i, part in enumerate(held)
            ]
            found[slot.name] = torch.cat(parts).clone()
    return found


@pytest.mark.parametrize(
    ("bucket_mb", "sizes"),
    [(ONE_EACH, [1] * LAYERS), (TWO_EACH, [2, 2, 1]), (ALL_IN_ONE, [LAYERS])],
)
def test_buckets_are_filled_from_the_last_parameter_on(bucket_mb: float, sizes: list[int]) -> None:
    gradients = make_buckets(make_parameters(), ParallelMesh(), bucket_mb)
    slots = [[slot.name for slot in bucket.layout.slots] for bucket in gradients.buckets]
    assert [len(names) for names in slots] == sizes
    assert [name for names in slots for name in names] == [*map(str, reversed(range(LAYERS)))]


def test_sums_stay_where_they_are() -> None:
    """No buffer is made anew in each step, and no parameter keeps a gradient beside it."""
    parameters = make_parameters()
    gradients = make_buckets(parameters, ParallelMesh(), TWO_EACH)
    places = set()
    for step in range(3):
        gradients.begin_step(2)
        for sample in samples(step, 2):
            loss(parameters, sample).backward()
            assert all(parameter.grad is None for parameter in parameters)
        gradients.finish()
        expected = [
            one_by_one([*g]) for g in zip(*map(gradients_of, samples(step, 2)), strict=True)
        ]
        found = totals(gradients)
        assert all(torch.equal(found[str(i)], total) for i, total in enumerate(expected))
        sums = [bucket.sums for bucket in gradients.buckets if bucket.sums is not None]
        places.add(tuple(x.data_ptr() for x in sums))
    assert [len(place) for place in places] == [3]


@pytest.mark.parametrize("world_size", [2, 4])
def test_sums_over_ranks_and_what_they_cost(world_size: int) -> None:
    """To the bit, in the order that is promised, at every size of buckets and in every stage."""
    cases = [(mb, stage, FP32) for mb in SIZES for stage in (0, 1, 2)]
    cases += [(TWO_EACH, stage, BF16) for stage in (0, 1, 2)]

    def run() -> list[Step]:
        mesh = make_mesh()
        return [run_step(mesh, *case) for case in cases]

    ranks = run_ranks(run, world_size)
    rows = -(-H // world_size)
    for i, (bucket_mb, stage, wire) in enumerate(cases):
        expected = expected_sums(world_size, stage, wire)
        part = 64  # rows of H elements of one rank, padded
        for rank, steps in enumerate(ranks):
            own = slice(None) if stage == 0 else slice(rank * rows, (rank + 1) * rows)
            for number, total in enumerate(expected):
                assert torch.equal(steps[i].totals[str(number)], total[own]), (bucket_mb, stage)
            # A part to each other rank: once, in stage 2 for each microbatch; in stage 0 each
            # rank's fp32 sums to all others as well.
            to_others = (world_size - 1) * part * LAYERS
            times = MICROBATCHES if stage == 2 else 1
            expected_bytes = to_others * wire.itemsize * times + (
                to_others * 4 if stage == 0 else 0
            )
            assert steps[i].sent_bytes == expected_bytes


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_buckets_are_sent_with_their_last_gradient_in_backward_order(zero_stage: int) -> None:
    def run() -> list[Step]:
        mesh = make_mesh()
        return [run_step(mesh, size, zero_stage) for size in SIZES]

    for steps in run_ranks(run, 2):
        for step, per_bucket in zip(steps, (1, 2, LAYERS), strict=True):
            count = -(-LAYERS // per_bucket)
            # Most buckets are on their way before the last gradient has come.
            filled = [*(done // per_bucket for done in range(1, LAYERS)), count]
            last = [[bucket < full for bucket in range(count)] for full in filled]
            if zero_stage == 1:
                nothing = [[False] * count] * LAYERS * (MICROBATCHES - 1)
                assert step.started == nothing + last
                continue
            # In each microbatch, of which the first is seen here; no more than so many at a time.
            assert step.started[:LAYERS] == last
            for microbatch in range(MICROBATCHES):
                seen = step.travelling[microbatch * LAYERS : (microbatch + 1) * LAYERS]
                newest = [[i for i, is_sent in enumerate(sent) if is_sent][-1:] for sent in last]
                for travelling, new in zip(seen, newest, strict=True):
                    assert all(travelling[i] for i in new)
                    assert sum(travelling) <= MAX_IN_FLIGHT


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_blocks_of_microbatches_are_a_tree_at_every_number_of_ranks(blocks: int) -> None:
    """Layout-exact training: the order of sums does not tell how many ranks there are."""
    microbatches = 8
    terms = [gradients_of(sample) for sample in range(microbatches)]
    expected = []
    for of_parameter in zip(*terms, strict=True):
        size = microbatches // blocks
        starts = range(0, microbatches, size)
        expected.append(tree([one_by_one([*of_parameter[s : s + size]]) for s in starts]))

    def run() -> list[dict[str, Tensor]]:
        mesh, steps = make_mesh(), []
        parameters = make_parameters()
        own_blocks, own = blocks // mesh.dp.size, microbatches // mesh.dp.size
        gradients = make_buckets(parameters, mesh, TWO_EACH, 0)
        for _ in range(2):  # what is left of one step does not get into the next
            gradients.begin_step(own, own_blocks)
            for sample in samples(mesh.dp.rank, own):
                loss(parameters, sample).backward()
            gradients.finish()
            steps.append(totals(gradients))
        return steps

    for world_size in (size for size in (1, 2, 4) if size <= blocks):
        for steps in run_ranks(run, world_size):
            for found in steps:
                assert all(torch.equal(found[str(i)], x) for i, x in enumerate(expected))


class Held(NamedTuple):
    """Bytes of gradients on a rank."""

    largest: int
    after: int
    whole: int
    """Of all gradients."""
    bucket: int
    totals: int
    """Of this rank's sums."""


def measure_held(zero_stage: int, monkeypatch: pytest.MonkeyPatch) -> Held:
    """Sums, and what is sent and received for each collective that is held on to, after each
    gradient of a step. (gloo's threads may free a finished one a moment later.)"""
    mesh = make_mesh()
    parameters = make_parameters(count=12, size=32)
    travelling: list[tuple[weakref.ref[Pending], int]] = []

    def start(x: Tensor, axis: Axis, purpose: Purpose) -> Pending:
        pending = start_all_to_all(x, axis, purpose)
        travelling.append((weakref.ref(pending), x.nbytes + pending.finish().nbytes))
        return pending

    monkeypatch.setattr(reduction, "start_all_to_all", start)
    gradients = make_buckets(parameters, mesh, ONE_EACH, zero_stage)

    def held() -> int:
        tensors = [x for bucket in gradients.buckets for x in (bucket.sums, bucket.total)]
        own = sum(x.nbytes for x in tensors if x is not None)
        return own + sum(size for pending, size in travelling if pending() is not None)

    seen: list[int] = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(held()))
    gradients.begin_step(MICROBATCHES)
    for sample in samples(mesh.dp.rank, MICROBATCHES):
        loss(parameters, sample).backward()
    gradients.finish()
    sizes = [parameter.nbytes for parameter in parameters]
    of_totals = sum(b.total.nbytes for b in gradients.buckets if b.total is not None)
    return Held(max(seen), held(), sum(sizes), max(sizes), of_totals)


def test_stage_2_never_holds_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside this rank's sums: one bucket that is being filled, and those that travel, with what
    comes in for them."""
    for held in run_ranks(lambda: measure_held(2, monkeypatch), 4):
        assert held.totals == held.whole / 4
        assert held.largest <= held.totals + (1 + 2 * MAX_IN_FLIGHT) * held.bucket
        assert held.after == held.totals
        assert held.largest < held.whole
    for held in run_ranks(lambda: measure_held(1, monkeypatch), 4):  # the measure sees full sums
        assert held.largest >= held.whole
        assert held.after == held.whole + held.totals


def test_a_parameter_without_a_gradient_is_an_error() -> None:
    parameters = make_parameters()
    gradients = make_buckets(parameters, ParallelMesh(), ONE_EACH)
    gradients.begin_step(1)
    loss(parameters[1:], 0).backward()
    with pytest.raises(RuntimeError, match="0 of 1 gradients were handed over to the bucket of 0"):
        gradients.finish()


def test_a_backward_pass_that_was_not_announced_is_an_error() -> None:
    parameters = make_parameters()
    gradients = make_buckets(parameters, ParallelMesh(), ALL_IN_ONE)
    for announced, done in ((1, 2), (2, 1), (1, 0)):
        gradients.begin_step(announced)
        for sample in range(done):
            loss(parameters, sample).backward()
        message = f"{done * LAYERS} of {announced * LAYERS} gradients were handed over"
        with pytest.raises(RuntimeError, match=message):
            gradients.finish()
    gradients.begin_step(1)
    loss(parameters, 0).backward()
    gradients.finish()
