"""How much of the gradients' reduction over DP is hidden behind the backward pass.

Two DP ranks train on two hosts joined by a slow link (``link``). It is set so that the
reduction alone takes a given share of the time of a microbatch's backward pass: more could not be
hidden, and on a fast link there is nothing to hide. Then

    hidden = 1 − (time that a step is blocked on gradients) / (time of the reduction alone)

Each host is a process of this module, ``python -m megabit.benchmark.overlap HOST STEPS SETTINGS…``,
which prints its measurements as JSON.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from megabit.benchmark.link import Network, network
from megabit.config import Config, load_config
from megabit.data.batches import Batch
from megabit.errors import RunError, UserError
from megabit.mesh import ParallelMesh, open_mesh
from megabit.reduce import start_all_to_all
from megabit.training.step import TrainingState, train_step

MODEL = (
    "model.vocab_size=1024",
    "model.hidden_size=512",
    "model.intermediate_size=1408",
    "model.num_hidden_layers=8",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=8",
    "data.seq_length=256",
    "train.micro_batch_size=4",
    "train.global_batch_size=16",
    "parallel.bucket_mb=4",
)
WARMUP = 2
PORT = 29517


@dataclass(frozen=True)
class Measured:
    """Medians over steps, in seconds."""

    step_s: float
    blocked_s: float
    """In which a step waited for gradients: in each step of the rank that waited less. The other
    one waited for that rank as well, which computed longer."""
    weights_s: float
    """In which a step waited for codes and dense weights, and for all else that is agreed over DP:
    on a slow link small messages queue behind them."""
    compute_s: float
    """CPU time of a step, of all threads of the rank."""
    alone_s: float
    """The same reduction with nothing to hide behind."""
    backward_s: float
    """Of one microbatch."""
    sent_bytes: int
    """Of the reduction, by each rank."""

    @property
    def hidden(self) -> float:
        """Share of the reduction that steps did not wait for."""
        return 1 - self.blocked_s / self.alone_s


def measure_overlap(
    share: float, steps: int, settings: Sequence[str] = MODEL
) -> tuple[float, Measured, Measured]:
    """(Mbit/s of the slow link, times over an unlimited link, times over the slow one).

    Args:
        share: of a microbatch's backward pass that the reduction alone is to take.
        steps: to measure, after ``WARMUP``.

    Raises:
        UserError: this machine does not allow network namespaces.
    """
    with network(hosts=2) as hosts:
        unlimited = _measure(hosts, steps, settings)
        mbit_per_s = 8e-6 * unlimited.sent_bytes / (share * unlimited.backward_s)
        hosts.limit(mbit_per_s)
        return mbit_per_s, unlimited, _measure(hosts, steps, settings)


def report(share: float, steps: int) -> None:
    """Measure and print; says so where this machine does not allow it."""
    try:
        mbit_per_s, unlimited, limited = measure_overlap(share, steps)
    except UserError as error:
        print(f"skipped: {error}")
        return
    print(
        f"Two DP ranks, {unlimited.sent_bytes / 1e6:.1f} MB of gradients from each, "
        f"backward of a microbatch {unlimited.backward_s:.3f} s"
    )
    print(
        f"{'link':<16} {'step':>9} {'CPU time':>9} {'reduction alone':>17} {'blocked on it':>14} "
        f"{'hidden':>8} {'blocked on others':>18}"
    )
    for name, found in (("unlimited", unlimited), (f"{mbit_per_s:.0f} Mbit/s", limited)):
        print(
            f"{name:<16} {found.step_s:>7.3f} s {found.compute_s:>7.3f} s "
            f"{found.alone_s:>15.3f} s {found.blocked_s:>12.3f} s {found.hidden:>8.0%} "
            f"{found.weights_s:>16.3f} s"
        )


def _measure(over: Network, steps: int, settings: Sequence[str]) -> Measured:
    """Run both hosts; the times of the first."""
    environment = ["env", f"GLOO_SOCKET_IFNAME={over.device}", "OMP_NUM_THREADS=1"]
    program = [sys.executable, "-m", "megabit.benchmark.overlap"]
    hosts = [
        subprocess.Popen(
            over.run_on(host, [*environment, *program, str(host), str(steps), *settings]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in (0, 1)
    ]
    outputs = [host.communicate() for host in hosts]
    for host, (_, errors) in zip(hosts, outputs, strict=True):
        if host.returncode:
            raise RunError(f"a rank of the benchmark failed:\n{errors}")
    (first, first_blocked), (_, other_blocked) = (
        json.loads(output.splitlines()[-1]) for output, _ in outputs
    )
    blocked = [min(pair) for pair in zip(first_blocked, other_blocked, strict=True)]
    return Measured(**{**first, "blocked_s": statistics.median(blocked)})


def _run_host(
    rank: int, count: int, settings: Sequence[str]
) -> tuple[dict[str, float], list[float]]:
    """Train ``count`` steps as one of the ranks; its ``Measured``, and ``blocked_s`` of each."""
    torch.set_num_threads(1)
    config = load_config(settings, world_size=2)
    address = f"tcp://{Network.address(0)}:{PORT}"
    cpu_device, timeout = torch.device("cpu"), timedelta(minutes=5)
    with open_mesh(1, 1, rank, 2, cpu_device, address, timeout) as mesh:
        state = TrainingState.create(config, mesh)
        optimizer = state.optimizer
        steps, blocked, weights, cpu, alone, backwards = [], [], [], [], [], []
        finish = optimizer.finish_gradients

        def timed_finish() -> None:
            before = mesh.dp.waited_s
            finish()
            blocked.append(mesh.dp.waited_s - before)

        optimizer.finish_gradients = timed_finish  # type: ignore[method-assign]
        for step in range(WARMUP + count):
            batch = _batch(config, step, rank)
            waited, used, started = _waited(mesh), time.process_time(), time.perf_counter()
            report = train_step(state, batch, step)
            steps.append(time.perf_counter() - started)
            cpu.append(time.process_time() - used)
            weights.append(_waited(mesh) - waited - blocked[-1])
            # Backward takes about two thirds of a microbatch.
            backwards.append(report.pipeline.seconds / len(batch.inputs) * 2 / 3)
            started = time.perf_counter()
            buffers = [b.sums for b in optimizer.gradients.buckets if b.sums is not None]
            swaps = [start_all_to_all(buffer, mesh.dp) for buffer in buffers]
            for swap in swaps:
                swap.wait()
            alone.append(time.perf_counter() - started)
        measured = Measured(
            step_s=statistics.median(steps[WARMUP:]),
            blocked_s=statistics.median(blocked[WARMUP:]),
            weights_s=statistics.median(weights[WARMUP:]),
            compute_s=statistics.median(cpu[WARMUP:]),
            alone_s=statistics.median(alone[WARMUP:]),
            backward_s=statistics.median(backwards[WARMUP:]),
            sent_bytes=sum(buffer.nbytes for buffer in buffers) // 2,
        )
        return dataclasses.asdict(measured), blocked[WARMUP:]


def _waited(mesh: ParallelMesh) -> float:
    return sum(mesh.waited_s().values())


def _batch(config: Config, step: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(2 * step + rank)
    micro = config.train.micro_batch_size
    shape = (config.train.global_batch_size // 2 // micro, micro, config.data.seq_length)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
    return Batch(tokens, tokens.roll(-1, -1), torch.ones(shape, dtype=torch.bool))


if __name__ == "__main__":
    host, count, *settings = sys.argv[1:]
    print(json.dumps(_run_host(int(host), int(count), settings)))
