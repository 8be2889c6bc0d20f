"""New weights on their way to the layers, and gradients on theirs to the optimizer: who waits."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from megabit.data_parallel import publish, reduction
from megabit.data_parallel.layout import BucketLayout
from megabit.launch import run_ranks
from megabit.mesh import Axis
from megabit.reduce import Chain, Pending, Purpose, start_all_to_all
from megabit.training.step import TrainingState, forward_backward, train_step
from tests.data_parallel.small import (
    SHAPES,
    SmallRun,
    config_of,
    make_mesh,
    tokens,
)
from tests.training.tiny import own_batch, tiny

EACH_ALONE = "parallel.bucket_mb=0.000001"
Log = list[tuple[str, str]]
"""What happened, and to whom."""


def names(layout: BucketLayout) -> str:
    """A bucket is called by its tensors in the order of the forward pass."""
    return " ".join(slot.name for slot in reversed(layout.slots))


@dataclass
class Watched(Pending):
    """A collective that writes down when it is waited for, and may not be before its release."""

    name: str = ""
    log: Log = field(default_factory=list)
    is_released: bool = True

    def wait(self) -> Tensor:
        assert self.is_released, f"{self.name} was waited for while it was still travelling"
        self.log.append(("arrived", self.name))
        return super().wait()


def watch_arrivals(publisher: publish.Publisher, log: Log) -> dict[str, Watched]:
    """Replace what is on its way; by the names of the buckets, in the order of their start."""
    watched = {}
    for arrival in publisher._arrivals:
        assert arrival.values is not None
        pending, name = arrival.values.pending, names(arrival.layout)
        watched[name] = Watched(pending.axis, pending.work, pending.finish, name, log)
        arrival.values = Chain.of(watched[name])
    return watched


def watch_modules(model: nn.Module, log: Log) -> None:
    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_pre_hook(lambda *_, name=name: log.append(("enter", name)))


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_weights_are_sent_in_forward_order_and_layers_wait_for_their_own(zero_stage: int) -> None:
    def run() -> tuple[list[str], Log, Log]:
        run = SmallRun.create(config_of(zero_stage, EACH_ALONE), make_mesh())
        log: Log = []
        watch_modules(run.model, log)
        run.step(0)
        sent = list(watch_arrivals(run.optimizer.publisher, log))
        log.clear()
        inputs, targets = tokens(1)[:, 0]
        run.model(inputs, targets)
        first = list(log)
        log.clear()
        run.model(inputs, targets)
        return sent, first, log

    for sent, first, second in run_ranks(run, 2):
        # Every tensor alone, the first layer's first.
        assert sent == list(SHAPES)
        entered = ["embedding", "norm", "up", "down", "sub_norm", "head"]
        expected = [("enter", name) for name in entered]
        assert second == expected  # what is there is not waited for again
        for name in entered:
            expected.insert(expected.index(("enter", name)) + 1, ("arrived", f"{name}.weight"))
        # Two layers with one input are no modules of their own to torch.
        together = [("arrived", "seven.weight"), ("arrived", "three.weight")]
        expected[-2:-2] = together
        assert first == expected


def test_the_first_layers_run_while_later_buckets_are_travelling() -> None:
    """A decoder's embedding and first layer, with all of the second layer's weights delayed."""

    def run() -> Log:
        config = tiny(EACH_ALONE)
        state = TrainingState.create(config, make_mesh())
        batch = own_batch(config, state.mesh, 0)
        train_step(state, batch, 0)
        log: Log = []
        watched = watch_arrivals(state.optimizer.publisher, log)
        late = [pending for name, pending in watched.items() if ".layers.1." in name]
        assert len(late) == 11  # seven matrices and four gains
        for pending in late:
            pending.is_released = False
        layers = state.stages.model.layers
        rope = state.stages.model.rope.tables(config.data.seq_length, torch.float32)
        x = state.stages.model.embed_tokens(batch.inputs[0].flatten())
        x = layers["0"](x, rope, len(batch.inputs[0]))
        done = list(log)
        with pytest.raises(AssertionError, match="while it was still travelling"):
            layers["1"](x, rope, len(batch.inputs[0]))
        for pending in late:
            pending.is_released = True
        layers["1"](x, rope, len(batch.inputs[0]))
        return done

    for log in run_ranks(run, 2):
        assert log
        assert not any(".layers.1." in name for _, name in log)


def watch_gradients(state: TrainingState, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write down gradients as they are handed over, and the all-to-alls that are started."""
    for bucket in state.optimizer.gradients.buckets:
        for slot in bucket.layout.slots:
            collector = slot.parameter._collector
            assert collector is not None
            slot.parameter._collector = _logged(collector, slot.name, log)

    def start(x: Tensor, axis: Axis, purpose: Purpose) -> Pending:
        log.append(("sent", purpose))
        return start_all_to_all(x, axis, purpose)

    monkeypatch.setattr(reduction, "start_all_to_all", start)


def _logged(collector: Callable[[Tensor], None], name: str, log: Log) -> Callable[[Tensor], None]:
    def collect(gradient: Tensor) -> None:
        log.append(("gradient", name))
        collector(gradient)

    return collect


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_bucket_is_sent_with_its_last_gradient(
    zero_stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before earlier layers' backward passes run: in the last microbatch, or in all of them."""
    settings = (f"optim.zero_stage={zero_stage}", "parallel.bucket_mb=0.02")

    def run() -> tuple[Log, list[tuple[str, list[str]]]]:
        config = tiny(*settings)
        state = TrainingState.create(config, make_mesh())
        log: Log = []
        watch_gradients(state, log, monkeypatch)
        forward_backward(state, own_batch(config, state.mesh, 0), 0)
        layouts = [bucket.layout for bucket in state.optimizer.gradients.buckets]
        return log, [
            (layout.kind, [s.name for s in layout.slots for _ in range(s.parameter.uses)])
            for layout in layouts
        ]

    for log, layouts in run_ranks(run, 2):
        assert len(layouts) > 3
        microbatches = 2
        of_step = [name for what, name in log if what == "gradient"]
        per_microbatch = len(of_step) // microbatches
        expected: Log = []
        for microbatch in range(microbatches):
            missing = [(kind, list(slots)) for kind, slots in layouts]
            own = of_step[microbatch * per_microbatch : (microbatch + 1) * per_microbatch]
            for name in own:
                expected.append(("gradient", name))
                kind, slots = next((k, s) for k, s in missing if name in s)
                slots.remove(name)
                is_sent_now = zero_stage == 2 and kind != "gain"
                if not slots and (microbatch == microbatches - 1 or is_sent_now):
                    expected.append(("sent", "weight gradients"))
            assert not any(slots for _, slots in missing)
        assert log == expected
        # Most of the backward pass is still to come when the first bucket is sent.
        last = log[-log[::-1].index(("sent", "weight gradients")) - 1 :]
        assert len(last) <= 2
        tail = log[len(log) // 2 :] if zero_stage != 2 else log
        assert tail.index(("sent", "weight gradients")) < len(tail) / 3


def test_what_no_layer_has_asked_for_arrives_before_newer_weights_are_sent() -> None:
    def run() -> bool:
        run = SmallRun.create(config_of(1, EACH_ALONE), make_mesh())
        run.step(0)
        publisher = run.optimizer.publisher
        log: Log = []
        watched = watch_arrivals(publisher, log)
        run.optimizer.publish()
        assert [name for _, name in log] == list(watched)
        again = watch_arrivals(publisher, log)
        assert list(again) == list(watched)
        publisher.settle()
        assert [name for _, name in log] == [*watched, *again]
        return not publisher._arrivals

    assert all(run_ranks(run, 2))
