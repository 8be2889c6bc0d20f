"""Decoding on one device: the engine's core beside a dense bf16 model of that shape in PyTorch.

Both have random weights and the same prompts, and take turns. Times are of whole answers, prompts
included. Neither uses CUDA graphs: the engine has none, and the baseline is an eager loop.
"""

import torch
from torch import Tensor

from megabit.benchmark.dense_generation import DenseGenerator
from megabit.benchmark.document import Row, Sample
from megabit.benchmark.engine import Generate, Load, generated, race
from megabit.benchmark.gpu_findings import Findings, Place
from megabit.benchmark.random_model import RandomModel
from megabit.config import EngineConfig, ModelConfig, ServingConfig
from megabit.inference.core import CoreSettings, EngineCore
from megabit.inference.opening import open_stages
from megabit.mesh import ParallelMesh
from megabit_kernels.benchmark.machine import counted

OURS, DENSE = "megabit", "dense bf16 PyTorch"
BATCHED_TOKENS = 2048


def measure_decoding(findings: Findings, place: Place, model: ModelConfig, load: Load) -> None:
    """Tokens a second at each batch size of ``load``."""
    place.told("making a random ternary model")
    ours = _engine(model, load, place.device)
    place.told("making a random dense model")
    dense = DenseGenerator(model, max(load.batch_sizes), load.max_length, place.device)
    generator = torch.Generator().manual_seed(0)
    for batch in load.batch_sizes:
        contestants: dict[str, Generate] = {OURS: ours, DENSE: dense.generate}
        speeds = race(contestants, batch, load, model, generator, place.told)
        samples = {
            name: Sample.of(name, seconds, speeds.tokens)
            for name, seconds in speeds.seconds.items()
        }
        what = counted(batch, "sequence")
        findings.rows.append(Row(what, samples[OURS], samples[DENSE], "tokens"))


def _engine(model: ModelConfig, load: Load, device: torch.device) -> Generate:
    sequences = max(load.batch_sizes)
    engine = EngineConfig(
        max_model_len=load.max_length,
        max_sequences=sequences,
        max_batched_tokens=BATCHED_TOKENS,
        compute="bfloat16",
    )
    mesh = ParallelMesh(device=device)
    source = RandomModel(model, load.max_length)
    stages, _ = open_stages(source, ServingConfig(engine=engine), mesh)
    settings = CoreSettings(
        load.max_length,
        sequences,
        BATCHED_TOKENS,
        num_blocks=sequences * -(-load.max_length // engine.block_size),
        prefix_cache=False,
    )
    core = EngineCore(stages, mesh, settings)

    def generate(prompts: Tensor, new_tokens: int) -> int:
        return generated(core, prompts, new_tokens)

    return generate
