"""Evaluation: the loss over all held-out text, as a plain loop over it computes it."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from megabit.data.corpus import HELD_OUT, CorpusInfo, SplitInfo
from megabit.data.tokenizer import END_OF_TEXT
from megabit.evaluation.text_loss import bits_per_byte
from megabit.evaluation.text_sets import held_out_set
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import build_stages
from megabit.telemetry import EvaluationMetrics
from megabit.training.evaluate import evaluate
from megabit.training.step import TrainingState
from tests.training.tiny import make_mesh, tiny, tiny_corpus

S = 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


def end_of_text(corpus: CorpusInfo) -> int:
    token = corpus.load_tokenizer().token_to_id(END_OF_TEXT)
    assert token is not None
    return token


@pytest.fixture(scope="module")
def plain_losses(corpus: CorpusInfo) -> list[torch.Tensor]:
    """Of each window of S predictions, the losses of its tokens, straight from the token stream."""
    dataset = corpus.open_held_out()
    stream = [end_of_text(corpus), *dataset.tokens(0, dataset.num_tokens).tolist()]
    stage = build_stages(tiny("precision.compute=float64"), ParallelMesh())
    losses = []
    with torch.no_grad():
        for start in range(0, len(stream) - 1, S):
            window = torch.tensor(stream[start : start + S + 1])
            logits = stage.logits(stage(window[None, :-1]))
            losses.append(F.cross_entropy(logits, window[1:], reduction="none"))
    return losses


def evaluate_in_ranks(
    corpus: CorpusInfo, settings: Sequence[str], world_size: int, limit: int | None = None
) -> list[EvaluationMetrics]:
    config = tiny("precision.compute=float64", *settings)

    def run() -> EvaluationMetrics:
        state = TrainingState.create(config, make_mesh(config))
        return evaluate(state, {HELD_OUT: held_out_set(corpus, S)}, 0, limit)

    return run_ranks(run, world_size)


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ((), 1),
        (("train.micro_batch_size=4",), 1),
        ((), 2),
        (("parallel.tp=2",), 2),
        (("parallel.pp=2",), 2),
        (("parallel.tp=2", "parallel.sequence_parallel=true"), 4),
    ],
    ids=["one", "one-large-microbatch", "dp2", "tp2", "pp2", "tp2-sp-dp2"],
)
def test_all_held_out_text(
    corpus: CorpusInfo,
    plain_losses: list[torch.Tensor],
    settings: tuple[str, ...],
    world_size: int,
) -> None:
    losses = torch.cat(plain_losses)
    assert len(losses) == corpus.open_held_out().num_tokens
    assert len(losses) % S  # the last window is padded
    for result in evaluate_in_ranks(corpus, settings, world_size):
        assert result.held_out_tokens == len(losses)
        # fp64 sums in another order: a few units of 2^-53.
        assert result.held_out_loss == pytest.approx(losses.mean().item(), rel=1e-12)
        bits = losses.sum().item() / math.log(2)
        assert result.held_out_bits_per_byte == pytest.approx(
            bits / corpus.held_out.bytes, rel=1e-12
        )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("limit", [1, 5, 10_000])
def test_some_windows_spread_evenly(
    corpus: CorpusInfo, plain_losses: list[torch.Tensor], limit: int, world_size: int
) -> None:
    count = min(limit, len(plain_losses))
    chosen = torch.cat([plain_losses[i * len(plain_losses) // count] for i in range(count)])
    for result in evaluate_in_ranks(corpus, (), world_size, limit):
        assert result.held_out_tokens == len(chosen)
        assert result.held_out_loss == pytest.approx(chosen.mean().item(), rel=1e-12)  # as above


def test_held_out_bytes_are_those_of_the_text(corpus: CorpusInfo) -> None:
    text = corpus.dir.parent / "text"
    sizes = [len((text / Path(name).name).read_bytes()) for name in corpus.held_out_names]
    assert corpus.held_out.bytes == sum(sizes)
    assert len(sizes) == 2


def test_bits_per_byte() -> None:
    # One nat is 1/ln 2 bits; 3 tokens of 2 nats each over 12 bytes.
    split = SplitInfo(documents=1, tokens=3, bytes=12)
    assert bits_per_byte(2.0, split) == pytest.approx(6 / math.log(2) / 12, rel=1e-15)
