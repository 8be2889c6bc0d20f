"""A model, its batches and a corpus, small enough for many runs in real ranks.

Ranks are forks, so what is imported here is imported once and not in each of them: torch's
optimizers and matplotlib import most of their code, for seconds, when they are first used.
"""

import math
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor

from megabit.config import Config, load_config
from megabit.data.batches import Batch
from megabit.data.prepare import CorpusInfo, prepare_corpus
from megabit.data_parallel import Piece, ZeroOptimizer
from megabit.mesh import ParallelMesh, Topology
from megabit.pipeline.plan import plan_stages
from megabit.tensor_parallel import ternary_layers
from megabit.training.shapes import RankShape
from megabit.training.step import TrainingState

# KV heads are fewer than query heads, so that tp=4 has to share them.
SETTINGS = (
    *("model.hidden_size=32", "model.intermediate_size=48", "model.num_hidden_layers=2"),
    *("model.num_attention_heads=4", "model.num_key_value_heads=2", "model.vocab_size=300"),
    *("data.seq_length=16", "train.global_batch_size=8", "train.micro_batch_size=2"),
    *("train.steps=6", "train.log_interval=1", "train.eval_interval=0"),
    *("optim.warmup_steps=2", "run.sample_tokens=0"),
)
SENTENCE = "the quick brown fox jumps over a lazy dog and runs away from home to see the sea"

Owned = list[tuple[str, Piece, Tensor]]
"""Logical name, where a rank's part of that tensor belongs, and the part."""


def tiny(*settings: str) -> Config:
    """The tiny configuration with changes such as ``parallel.tp=2``.

    Unless told otherwise, every stage has a layer: balanced by cost, the head would be alone.
    """
    config = load_config([*SETTINGS, *settings])
    parallel = config.parallel
    if parallel.pp == 1 or parallel.layers_per_stage or parallel.balance == "measured":
        return config
    stages = parallel.pp * parallel.chunks
    share, odd = divmod(config.model.num_hidden_layers, stages)
    layers = [share + (stage < odd) for stage in range(stages)]
    return load_config([*SETTINGS, *settings, f"parallel.layers_per_stage={layers}"])


def shape_of(config: Config, world_size: int, rank: int, dp_intra: int | None = None) -> RankShape:
    """A rank of a run, which would plan its stages so."""
    dp = world_size // (config.parallel.tp * config.parallel.pp)
    return RankShape(config, world_size, rank, plan_stages(config, dp), dp_intra)


def make_mesh(config: Config) -> ParallelMesh:
    """The mesh of the calling rank; dp follows from the number of ranks."""
    if not dist.is_initialized():
        return ParallelMesh()
    parallel, topology = config.parallel, Topology.of(config)
    return ParallelMesh.create(parallel.tp, parallel.pp, torch.device("cpu"), topology=topology)


def global_batch(config: Config, step: int) -> Batch:
    """All samples of a step as one microbatch ``[1, G, S]``, with very uneven masks."""
    size, length = config.train.global_batch_size, config.data.seq_length
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(config.model.vocab_size, (size, length + 1), generator=generator)
    share = torch.linspace(0, 1, size).unsqueeze(1)  # sample 0 has no target at all
    mask = torch.rand((size, length), generator=generator) < share
    return Batch(tokens[None, :, :-1], tokens[None, :, 1:], mask[None])


def own_batch(config: Config, mesh: ParallelMesh, step: int) -> Batch:
    """The part of ``global_batch`` that a rank computes, ``[m, B, S]``."""
    batch = global_batch(config, step)
    shape = (-1, config.train.micro_batch_size, config.data.seq_length)

    def own(x: Tensor) -> Tensor:
        return x[0].chunk(mesh.dp.size)[mesh.dp.rank].reshape(shape)

    return Batch(own(batch.inputs), own(batch.targets), own(batch.mask))


def owned(optimizer: ZeroOptimizer, kind: str = "master") -> Owned:
    """What the calling rank counts of the optimizer's ``kind`` of tensors."""
    pieces = optimizer.pieces(owned=True)
    return [(piece.name, piece, piece.tensors[kind].clone()) for piece in pieces]


def logical(ranks: Iterable[Owned]) -> dict[str, Tensor]:
    """Whole tensors from what all ranks own. Every element must come from exactly one of them."""
    wholes: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for name, piece, part in (item for rank in ranks for item in rank):
        whole = wholes.setdefault(name, part.new_zeros(piece.shard.shape))
        whole[piece.index] = part
        counts.setdefault(name, torch.zeros(piece.shard.shape))[piece.index] += 1
    assert all((count == 1).all() for count in counts.values())
    return wholes


def bits(state: TrainingState) -> list[Tensor]:
    """Masters, moments, Adam's step counts and codes, as integers, so that NaN equals itself."""
    pieces = [piece.tensors for piece in state.optimizer.pieces()]
    kinds = ("master", "exp_avg", "exp_avg_sq")
    kept = [tensors[kind] for tensors in pieces for kind in kinds if kind in tensors]
    kept += [values["step"] for values in state.optimizer.adam.state.values()]
    codes = [layer.ternary().codes() for layer in ternary_layers(state.stages)]
    return [*(tensor.clone().view(torch.int32) for tensor in kept), *(c.clone() for c in codes)]


@contextmanager
def poisoned(state: TrainingState, name: str, bad: float = math.nan) -> Iterator[None]:
    """Meanwhile the last element of each of the calling rank's gradients of ``name`` is ``bad``."""
    slots = [slot for b in state.optimizer.gradients.buckets for slot in b.layout.slots]
    (parameter,) = (slot.parameter for slot in slots if slot.name == name)
    collector = parameter._collector
    assert collector is not None

    def collect(gradient: Tensor) -> None:
        gradient = gradient.clone()
        gradient.view(-1)[-1] = bad
        collector(gradient)

    parameter._collector = collect
    yield
    parameter._collector = collector


def write_texts(folder: Path, documents: int = 12, words: int = 60) -> Path:
    """Text files that a tokenizer can learn from; the same each time."""
    folder.mkdir(parents=True, exist_ok=True)
    choose = random.Random(0)
    for number in range(documents):
        text = " ".join(choose.choices(SENTENCE.split(), k=words))
        (folder / f"{number:02}.txt").write_text(f"Chapter {number}: {text}.\n")
    return folder


def tiny_corpus(folder: Path, seed: int = 1234) -> CorpusInfo:
    """A corpus prepared in ``folder / "corpus"`` for ``tiny()``; 2 of 12 documents are held out."""
    text = write_texts(folder / "text")
    config = tiny(
        f"data.text={text}", f"data.dir={folder / 'corpus'}", "data.held_out_fraction=0.15"
    )
    return prepare_corpus(config.data, config.model.vocab_size, seed, lambda line: None)
