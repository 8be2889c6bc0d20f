"""A program of somebody else's, who has installed megabit: ``mypy --strict`` checks it against the
wheel (tests/test_release.py), and some of it runs (tests/test_public_api.py)."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import megabit
import megabit_kernels
from megabit.checkpoint import CheckpointFolder
from megabit.config import Config, ModelConfig, find_problems, load_config, to_yaml
from megabit.errors import RunError, UserError
from megabit.inference import Answer, Engine, Generation, SamplingParams
from megabit.mesh import ParallelMesh
from megabit.pipeline.actions import Backward, Compute, Forward, Schedule
from megabit.pipeline.catalog import make_schedule
from megabit.pipeline.placement import Placement
from megabit.pipeline.simulate import Costs, peak_activations, simulate
from megabit.pipeline.validate import ScheduleError, validate
from megabit.telemetry import EvaluationMetrics, Event, IntervalMetrics
from megabit.tensor_parallel import BitLinear
from megabit_kernels import TernaryWeight, quantize_activation, ternary_linear, ternary_matmul


class Mixer(nn.Module):
    """Ternary layers in a model of one's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = BitLinear(width, 2 * width)
        self.down = BitLinear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.relu(self.up(x)))
        return x + hidden


def train(steps: int) -> list[float]:
    model = Mixer(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in range(steps):
        loss = model(torch.ones(4, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def product(x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    weight: TernaryWeight = TernaryWeight.from_codes(codes, torch.tensor(0.5))
    x_q, scale = quantize_activation(x)
    exact: Tensor = ternary_matmul(x_q, weight)
    return exact, ternary_linear(x_q, scale, weight, torch.float32)


def one_by_one(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """A schedule without any overlap."""
    order: list[Compute] = []
    for i in range(microbatches):
        order += [Forward(i), Backward(i)]
    return Schedule(Placement.loop(ranks, chunks), microbatches, [order] * ranks)


def idle(name: str, ranks: int, microbatches: int) -> tuple[float, list[float]]:
    schedule = make_schedule(name, ranks, microbatches)
    try:
        validate(schedule)
    except ScheduleError as error:
        raise SystemExit(str(error)) from error
    timeline = simulate(schedule, Costs.even(schedule.placement, message=0.1))
    return timeline.bubble, peak_activations(schedule)


def settings(arguments: Sequence[str]) -> tuple[Config, str]:
    try:
        config = load_config(arguments, world_size=4)
    except UserError as error:
        raise SystemExit("\n".join(error.problems)) from error
    model: ModelConfig = config.model
    problems: list[str] = find_problems(config, 4)
    return config, to_yaml(config) + f"# {model.hidden_size} wide, {len(problems)} problems\n"


def newest(run: Path) -> Path | None:
    return CheckpointFolder(run / "checkpoints").latest()


def ask(checkpoint: Path, prompts: list[str]) -> list[str]:
    sampling = SamplingParams(max_tokens=8, temperature=0, stop=("\n",))
    try:
        with Engine.open(checkpoint, ["parallel.tp=2"]) as engine:
            generations: list[Generation] = engine.generate(prompts, sampling)
            answers: list[Answer] = [found.answers[0] for found in generations]
            pieces: list[str] = list(engine.stream(prompts[0], sampling))
    except RunError as error:
        return [str(error)]
    return [*(answer.text for answer in answers), "".join(pieces)]


class LossSink:
    """Collects held-out losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def interval(self, metrics: IntervalMetrics) -> None:
        self.losses.append(metrics.loss)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        self.losses.append(metrics.held_out_loss)

    def event(self, event: Event) -> None:
        print(event)


def who_am_i(mesh: ParallelMesh) -> str:
    versions: tuple[str, str] = (megabit.__version__, megabit_kernels.__version__)
    return f"rank {mesh.world.rank} of {mesh.world.size}, megabit {versions[0]}"
