"""What parts of a model take on one rank, measured: F, B and W of embedding, layers and head, and
an update.

The parts are built as for training, with the optimizer's buckets behind them, and run as a pipeline
runs them, a microbatch at a time. A narrow rank of a TP group is built without its peers, on an
axis that sends nothing: then its numbers are wrong, and its work is right. (It has no head: the
loss would miss the others' blocks. A head of part of a vocabulary is the same work.)

On a CPU, times are of the thread, not of the clock on the wall: what others take from it in between
does not count. So they are *work*, as ``timeline`` shares it out.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles
from typing import TypeVar

import torch
from torch import Tensor

from megabit.data_parallel import ZeroOptimizer
from megabit.mesh import Axis, ParallelMesh
from megabit.model import num_parameters
from megabit.model.decoder import CausalLMStages, LayerTraining, layer_context
from megabit.model.initialize import initialize
from megabit.pipeline.layout import StageLayout
from megabit.plan.compute import embedding_work, head_work, update_work
from megabit.plan.layer_work import Work, layer_work
from megabit.plan.messages import PHASES
from megabit.tensor_parallel import ForwardPass, Noise, WeightGradientQueue
from megabit.training.shapes import RankShape

T = TypeVar("T")

LAYERS = 2
"""Of the layers' stage: more than one, so that a weight is not always in a cache."""


@dataclass(frozen=True)
class Effort:
    """How often things are done."""

    steps: int = 3
    """The first does not count: memory is claimed, moments are made."""
    microbatches: int = 3


@dataclass(frozen=True)
class Sample:
    """A measured part of one configuration in one phase."""

    what: str
    """``layer forward``, ``head weight_gradient``, …, ``update``."""
    work: Work
    """What was counted for it."""
    seconds: float


def measure_parts(shape: RankShape, device: torch.device, effort: Effort) -> list[Sample]:
    """Of rank 0 of a configuration with ``LAYERS`` layers, on this process alone; times are lower
    quartiles of all microbatches, or of all steps."""
    meter = _Meter(shape, device)
    for step in range(effort.steps):
        if step == 1:
            meter.seconds.clear()
        meter.run_step(effort.microbatches, step)
    return [*meter.samples()]


class _Meter:
    def __init__(self, shape: RankShape, device: torch.device) -> None:
        self.shape, self.device, config = shape, device, shape.config
        self.parts = [
            StageLayout(range(0), embedding=True, head=False),
            StageLayout(range(LAYERS), embedding=False, head=False),
        ]
        if shape.tp == 1:
            self.parts.append(StageLayout(range(LAYERS, LAYERS), embedding=False, head=True))
        self.mesh = ParallelMesh(tp=Axis("tp", shape.tp, 0), device=device)
        self.stages = CausalLMStages(
            config.model,
            self.parts,
            config.data.seq_length,
            layer_context(config, self.mesh),
            LayerTraining.of(config),
            has_logits=shape.tp == 1,
        )
        initialize(self.stages, config.train.seed, config.model.initializer_range)
        self.optimizer = ZeroOptimizer.create(
            self.stages, self.mesh, config, chunk_of=self.stages.chunk_of
        )
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        batch = (config.train.micro_batch_size, config.data.seq_length)
        generator = torch.Generator().manual_seed(config.train.seed)
        tokens = torch.randint(config.model.vocab_size, batch, generator=generator)
        self.tokens = tokens.to(device)
        self.mask = torch.ones_like(self.tokens, dtype=torch.bool)

    def run_step(self, microbatches: int, step: int) -> None:
        optimizer, config = self.optimizer, self.shape.config
        optimizer.gradients.begin_step(microbatches, 1, step)
        for microbatch in range(microbatches):
            self.run_microbatch(Noise(config.train.seed, step, microbatch))
        if self.shape.tp > 1:
            # No gradient comes from a head that is not there; the update is another one, too.
            return

        def update() -> None:
            optimizer.finish_gradients()
            norm = optimizer.gradient_norm(num_parameters(config.model))
            optimizer.step(min(1.0, 1 / norm), 1e-4, 0.1)
            optimizer.publisher.settle()

        self.timed("update", update)

    def run_microbatch(self, noise: Noise) -> None:
        """F of all parts, then B and W from the last to the first."""
        inputs: list[Tensor | None] = []
        outputs: list[Tensor] = []
        queues = [WeightGradientQueue() for _ in self.parts]
        x: Tensor | None = None
        for chunk, queue in enumerate(queues):
            if x is not None:
                x = x.detach().requires_grad_()
            inputs.append(x)
            y = self.timed(
                f"{self.name(chunk)} forward",
                lambda chunk=chunk, queue=queue, x=x: self.forward(  # type: ignore[misc]
                    chunk, x, ForwardPass(noise, weight_gradients=queue)
                ),
            )
            outputs.append(y)
            x = y
        gradient = torch.full_like(outputs[-1], 1 / self.tokens.numel())
        for chunk in reversed(range(len(self.parts))):
            self.timed(
                f"{self.name(chunk)} input_gradient",
                lambda chunk=chunk, gradient=gradient: torch.autograd.backward(  # type: ignore[misc]
                    outputs[chunk], gradient
                ),
            )
            self.timed(f"{self.name(chunk)} weight_gradient", queues[chunk].run)
            own = inputs[chunk]
            if own is not None:
                assert own.grad is not None
                gradient = own.grad

    def forward(self, chunk: int, x: Tensor | None, forward_pass: ForwardPass) -> Tensor:
        y = self.stages(self.tokens, x, forward_pass, chunk)
        if not self.parts[chunk].head:
            return y
        return self.stages.loss(y, self.tokens, self.mask, forward_pass)

    def name(self, chunk: int) -> str:
        return ("embedding", "layer", "head")[chunk]

    def timed(self, what: str, compute: Callable[[], T]) -> T:
        """What ``compute`` gives; its seconds are noted."""
        if self.device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            result = compute()
            after.record()
            after.synchronize()
            self.seconds[what].append(before.elapsed_time(after) / 1000)
            return result
        started = time.thread_time()
        result = compute()
        self.seconds[what].append(time.thread_time() - started)
        return result

    def samples(self) -> list[Sample]:
        works = {"layer": layer_work(self.shape), "embedding": embedding_work(self.shape)}
        if self.shape.tp == 1:
            works["head"] = head_work(self.shape)
        found = [
            Sample(
                f"{part} {phase}",
                getattr(work, phase),
                self.quartile(f"{part} {phase}") / (LAYERS if part == "layer" else 1),
            )
            for part, work in works.items()
            for phase in PHASES
            if getattr(work, phase)
        ]
        if self.shape.tp == 1:
            work = {**update_work(self.shape), "step": 1.0}
            found.append(Sample("update", work, self.quartile("update")))
        return found

    def quartile(self, what: str) -> float:
        seconds = self.seconds[what]
        return quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]
