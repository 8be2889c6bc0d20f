"""Losses, likelihoods and greedy answers, against a plain loop over the model's own logits."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megabit.data.corpus import CorpusInfo, SplitInfo
from megabit.errors import UserError
from megabit.evaluation.continuations import Request, score_continuations
from megabit.evaluation.forward import ForwardRunner
from megabit.evaluation.greedy import continue_greedily
from megabit.evaluation.text_loss import Evaluation, bits_per_byte, evaluate_text
from megabit.evaluation.text_sets import held_out_set
from megabit.evaluation.token_batches import Shapes, by_length, dealt
from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.tensor_parallel import BlockPartition
from megabit.tensor_parallel.argmax import vocab_parallel_argmax
from tests.evaluation.saved_models import LENGTH, load, save_model, settings_of
from tests.training.tiny import tiny_corpus

# The same tokens in microbatches of other shapes: fp32 sums in another order, of logits of size 1.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def loaded(
    tmp_path_factory: pytest.TempPathFactory, corpus: CorpusInfo
) -> tuple[ForwardRunner, Shapes]:
    model = save_model(tmp_path_factory.mktemp("model") / "saved", corpus)
    return load(model, settings_of(model))


def log_probabilities(runner: ForwardRunner, tokens: list[int]) -> Tensor:
    """Of the token after each of ``tokens``: fp64 ``[T, V]``; one sequence, no padding."""
    with torch.no_grad():
        hidden = runner.stages(torch.tensor([tokens]))
        return runner.stages.logits(hidden).double().log_softmax(-1)


def test_a_text(loaded: tuple[ForwardRunner, Shapes], corpus: CorpusInfo) -> None:
    runner, shapes = loaded
    dataset = corpus.open_held_out()
    stream = [0, *dataset.tokens(0, dataset.num_tokens).tolist()]  # 0 is the end of text
    total = 0.0
    for start in range(0, len(stream) - 1, LENGTH):
        window = stream[start : start + LENGTH + 1]
        log = log_probabilities(runner, window[:-1])
        total -= log[range(len(log)), window[1:]].sum().item()
    result = evaluate_text(runner, held_out_set(corpus, LENGTH), shapes.batch_size)
    assert result.num_tokens == dataset.num_tokens == len(stream) - 1
    assert result.loss == pytest.approx(total / result.num_tokens, rel=TOLERANCE)
    assert result.perplexity == pytest.approx(math.exp(result.loss), rel=1e-12)
    bits = total / math.log(2) / corpus.held_out.bytes
    assert result.bits_per_byte == pytest.approx(bits, rel=TOLERANCE)


def test_a_loss_that_is_too_large_for_a_perplexity() -> None:
    assert Evaluation(1e4, 1, 1.0).perplexity == math.inf
    assert math.isnan(Evaluation(math.nan, 1, 1.0).perplexity)


def test_bits_per_byte() -> None:
    # One nat is 1/ln 2 bits; 3 tokens of 2 nats each over 12 bytes.
    split = SplitInfo(documents=1, tokens=3, bytes=12)
    assert bits_per_byte(2.0, split) == pytest.approx(6 / math.log(2) / 12, rel=1e-15)


def test_likelihoods(loaded: tuple[ForwardRunner, Shapes]) -> None:
    runner, shapes = loaded
    generator = torch.Generator().manual_seed(1)
    asked = []
    for context, continuation in [(1, 1), (5, 3), (LENGTH - 2, 3), (30, 2), (2, LENGTH), (9, 1)]:
        ids = torch.randint(300, (context + continuation,), generator=generator).tolist()
        asked.append(Request(ids[:context], ids[context:]))
    greedy = [3, 4]
    for _ in range(3):
        greedy.append(int(log_probabilities(runner, greedy)[-1].argmax()))
    asked.append(Request(greedy[:2], greedy[2:]))
    asked.append(Request(greedy[:2], [*greedy[2:4], (greedy[4] + 1) % 300]))
    scored = score_continuations(runner, asked, shapes)
    for (context, continuation), found in zip(asked, scored, strict=True):
        seen = (context + continuation)[-LENGTH - 1 :][:-1]  # cut at its beginning
        log = log_probabilities(runner, seen)[-len(continuation) :]
        expected = log[range(len(continuation)), continuation].sum().item()
        assert found.log == pytest.approx(expected, abs=TOLERANCE * len(continuation))
        assert found.is_greedy == log.argmax(-1).eq(torch.tensor(continuation)).all()
    assert [found.is_greedy for found in scored[-2:]] == [True, False]


@pytest.mark.parametrize(
    "request_", [Request([], [1]), Request([1], []), Request([1], [2] * (LENGTH + 1))]
)
def test_what_cannot_be_scored(loaded: tuple[ForwardRunner, Shapes], request_: Request) -> None:
    with pytest.raises(ValueError, match="cannot be scored"):
        score_continuations(loaded[0], [Request([1], [2]), request_], loaded[1])


def test_greedy_answers(loaded: tuple[ForwardRunner, Shapes]) -> None:
    runner, shapes = loaded
    prompts = [[5], [7, 8, 9], [1] * 16, [250, 3]]

    def is_done(tokens: list[int]) -> bool:
        return tokens[-1] % 5 == 0

    expected = []
    for prompt in prompts:
        made: list[int] = []
        while len(made) < 8 and not (made and is_done(made)):
            made.append(int(log_probabilities(runner, prompt + made)[-1, :200].argmax()))
        expected.append(made)
    found = continue_greedily(runner, prompts, 8, is_done, shapes, num_ids=200)
    assert found == expected
    assert len({len(tokens) for tokens in found}) > 1


def test_a_model_that_is_not_a_number(tmp_path: Path, corpus: CorpusInfo) -> None:
    model = save_model(tmp_path / "saved", corpus)
    runner, shapes = load(model, settings_of(model))
    runner.stages.model.norm.weight.data.fill_(math.nan)
    with pytest.raises(UserError, match="cannot be continued: the model's output is not a number"):
        continue_greedily(runner, [[1, 2]], 3, lambda tokens: False, shapes)


def test_the_lowest_of_equal_logits_is_the_likeliest() -> None:
    logits = torch.tensor([[1, 3, 0, 3, 2, 3, 0, 3], [0] * 8, [0, 0, 0, 0, 0, 0, 0, 9]]).repeat(
        1, 2
    )

    def run() -> tuple[list[int], list[int]]:
        mesh = ParallelMesh.create(2, 1, torch.device("cpu"))
        rows = BlockPartition(16, 4).span(mesh.tp.rank, 2)
        own = logits[:, rows.start : rows.stop].float()
        some = vocab_parallel_argmax(own, rows, mesh.tp, num_ids=7)
        return vocab_parallel_argmax(own, rows, mesh.tp).tolist(), some.tolist()

    assert run_ranks(run, 2) == [([1, 0, 7], [1, 0, 0])] * 2


def test_microbatches_are_those_of_any_layout() -> None:
    sequences = [[1] * n for n in (3, 9, 1, 4, 4, 7, 2)]
    batches = by_length(sequences, 2)
    assert batches == [[1, 5], [3, 4], [0, 6], [2]]
    for ranks in (1, 2, 3, 5):
        axes = [Axis("dp", ranks, rank) for rank in range(ranks)]
        all_dealt = [batch for axis in axes for group in dealt(batches, 2, axis) for batch in group]
        assert sorted(all_dealt) == sorted(batches)


def test_padding_is_behind_each_sequence() -> None:
    padded = Shapes(3, 10, 4).pad([[1, 2, 3, 4, 5], [6]], torch.device("cpu"))
    assert padded.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [6] + [0] * 7, [0] * 8]
    assert Shapes(1, 10, 4).pad([[1] * 9], torch.device("cpu")).shape == (1, 10)
