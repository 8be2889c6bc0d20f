"""A model, its batches and a corpus, small enough for many runs in real ranks.

Ranks are forks, so what is imported here is imported once and not in each of them: torch's
optimizers and matplotlib import most of their code, for seconds, when they are first used.
"""

import random
from collections.abc import Iterable, Sequence
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
from megabit.mesh import ParallelMesh
from megabit.tensor_parallel import Shard
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

Owned = dict[str, tuple[Shard, Tensor]]
"""By logical name: where a rank's owned part of a tensor belongs, and the part."""


def tiny(*settings: str) -> Config:
    """The tiny configuration with changes such as ``parallel.tp=2``."""
    return load_config([*SETTINGS, *settings])


def make_mesh(config: Config) -> ParallelMesh:
    """The mesh of the calling rank; dp follows from the number of ranks."""
    if not dist.is_initialized():
        return ParallelMesh()
    return ParallelMesh.create(config.parallel.tp, config.parallel.pp, torch.device("cpu"))


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


def owned(state: TrainingState, tensors: Iterable[tuple[str, Tensor | None]]) -> Owned:
    """What the calling rank counts of ``tensors``; nothing on all DP ranks but the first."""
    if state.mesh.dp.rank:
        return {}
    shards = {name: parameter.shard for name, parameter in state.parameters.items()}
    return {
        name: (shards[name], shards[name].owned(tensor.detach()).clone())
        for name, tensor in tensors
        if tensor is not None
    }


def logical(ranks: Sequence[Owned]) -> dict[str, Tensor]:
    """Whole tensors from what all ranks own. Every element must come from exactly one of them."""
    wholes: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for name, (shard, part) in (item for rank in ranks for item in rank.items()):
        whole = wholes.setdefault(name, part.new_zeros(shard.shape))
        count = counts.setdefault(name, torch.zeros(shard.shape))
        start, width = shard.span.owned_start, part.shape[shard.dim]
        whole.narrow(shard.dim, start, width).copy_(part)
        count.narrow(shard.dim, start, width).add_(1)
    assert all((count == 1).all() for count in counts.values())
    return wholes


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
