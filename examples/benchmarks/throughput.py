"""Training throughput on the CPU: dense and ternary layers at several layouts, one thread per rank.

Prints tokens per second (median over steps) and the ratio to the dense model on one process, which
is measured in the same run. Random tokens; the model is 4 layers × 256, vocabulary 4096, untied.

    python examples/benchmarks/throughput.py [key=value …]
"""

import statistics
import sys
import time

import numpy as np
import torch

from megabit.config import Config, load_config
from megabit.data.batches import Batch
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.training.step import TrainingState, train_step

MODEL = [
    "model.vocab_size=4096",
    "model.num_hidden_layers=4",
    "model.hidden_size=256",
    "model.intermediate_size=768",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=4",
    "model.hidden_act=silu",
    "model.tie_word_embeddings=false",
    "data.seq_length=256",
    "train.global_batch_size=16",
    "train.micro_batch_size=4",
]
KINDS = {
    "dense": ["model.linear=dense"],
    "ternary": ["model.linear=ternary"],
    "ternary, bf16 backward": ["model.linear=ternary", "precision.ternary_backward=bfloat16"],
}
LAYOUTS = {
    "1 process": (1, []),
    "TP 2": (2, ["parallel.tp=2"]),
    "PP 2": (2, ["parallel.pp=2"]),
    "DP 2": (2, []),
}
WARMUP, STEPS = 2, 8


def main() -> None:
    baseline = None
    print(f"{'tokens/s':<24}" + "".join(f"{layout:>18}" for layout in LAYOUTS))
    for kind, kind_settings in KINDS.items():
        cells = []
        for world_size, layout_settings in LAYOUTS.values():
            settings = [*MODEL, *kind_settings, *layout_settings, *sys.argv[1:]]
            rate = tokens_per_s(load_config(settings, world_size), world_size)
            baseline = baseline or rate
            cells.append(f"{rate:>10,.0f} {rate / baseline:>5.2f}x ")
        print(f"{kind:<24}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def tokens_per_s(config: Config, world_size: int) -> float:
    """Median over steps, as the slowest rank sees it."""

    def train() -> list[float]:
        parallel = config.parallel
        mesh = ParallelMesh.create(parallel.tp, parallel.pp, torch.device("cpu"))
        state = TrainingState.create(config, mesh)
        rng = np.random.default_rng(mesh.dp.rank)
        seconds = []
        for step in range(WARMUP + STEPS):
            batch = _random_batch(config, mesh, rng)
            started = time.perf_counter()
            train_step(state, batch, step)
            seconds.append(time.perf_counter() - started)
        return seconds[WARMUP:]

    slowest = [max(step) for step in zip(*run_ranks(train, world_size), strict=True)]
    tokens = config.train.global_batch_size * config.data.seq_length
    return tokens / statistics.median(slowest)


def _random_batch(config: Config, mesh: ParallelMesh, rng: np.random.Generator) -> Batch:
    batch = config.train.micro_batch_size
    microbatches = config.train.global_batch_size // mesh.dp.size // batch
    shape = (microbatches, batch, config.data.seq_length)
    tokens = torch.from_numpy(rng.integers(config.model.vocab_size, size=shape))
    return Batch(tokens, tokens.roll(-1, -1), torch.ones(shape, dtype=torch.bool))


if __name__ == "__main__":
    main()
