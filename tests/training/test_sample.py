"""The text sample: the same at every layout, and what the logits say."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from megabit.data.corpus import CorpusInfo
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import build_stages
from megabit.pipeline.plan import plan_stages
from megabit.training.sample import sample_text
from tests.training.tiny import make_mesh, tiny, tiny_corpus

PROMPT = "the quick"
NUM_TOKENS = 24
WINDOW = 16
"""Shorter than prompt and sample together, so that it has to move."""

# Weights far from their small start, so that texts differ where logits do.
WIDE = "model.initializer_range=0.3"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def tokenizer(corpus: CorpusInfo) -> Tokenizer:
    return corpus.load_tokenizer()


def sample(
    tokenizer: Tokenizer, settings: Sequence[str] = (), world_size: int = 1, **arguments: Any
) -> list[str]:
    config = tiny(WIDE, *settings)
    arguments = {"num_tokens": NUM_TOKENS, "seed": 7, **arguments}

    def run() -> str:
        mesh = make_mesh(config)
        plan = plan_stages(config, mesh.dp.size)
        stages, placement = build_stages(config, mesh, plan), plan.schedule.placement
        return sample_text(stages, placement, tokenizer, mesh, PROMPT, window=WINDOW, **arguments)

    return run_ranks(run, world_size)


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        (("parallel.tp=2",), 2),
        (("parallel.tp=4",), 4),
        (("parallel.pp=2",), 2),
        ((), 2),
        (("parallel.tp=2", "parallel.sequence_parallel=true"), 2),
        (("parallel.tp=2", "parallel.pp=2"), 4),
        (
            # The first rank has both ends of the model, and some stages have no layer.
            (
                *("parallel.pp=2", "parallel.vpp=2", "parallel.schedule=zb-v"),
                "parallel.layers_per_stage=[0, 1, 0, 1]",
            ),
            2,
        ),
    ],
    ids=["tp2", "tp4", "pp2", "dp2", "tp2-sp", "tp2-pp2", "zb-v"],
)
def test_every_layout_and_rank_has_the_same_text(
    tokenizer: Tokenizer, settings: tuple[str, ...], world_size: int
) -> None:
    # The forward pass of a ternary fp32 model is bit-equal at every layout.
    (expected,) = sample(tokenizer)
    assert sample(tokenizer, settings, world_size) == [expected] * world_size


def test_the_prompt_is_kept_and_continued(tokenizer: Tokenizer) -> None:
    (text,) = sample(tokenizer)
    assert text.startswith(PROMPT)
    assert len(text) > len(PROMPT)
    assert sample(tokenizer, num_tokens=0) == [PROMPT]


def test_the_seed_decides(tokenizer: Tokenizer) -> None:
    (text,) = sample(tokenizer)
    assert sample(tokenizer) == [text]
    assert sample(tokenizer, seed=8) != [text]


def test_the_likeliest_tokens_equal_a_plain_loop(tokenizer: Tokenizer) -> None:
    stage = build_stages(tiny(WIDE), ParallelMesh())
    ids = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            logits = stage.logits(stage(torch.tensor([ids[-WINDOW:]])))
            ids.append(int(logits[-1, : tokenizer.get_vocab_size()].argmax()))
    assert sample(tokenizer, top_k=1) == [tokenizer.decode(ids)]


def test_ids_that_the_tokenizer_lacks_are_never_drawn(tokenizer: Tokenizer) -> None:
    """A short text may give fewer tokens than the model has rows."""
    (text,) = sample(tokenizer, ("model.vocab_size=4096",), top_k=4096, temperature=100.0)
    # Ids without a text would vanish: 13 of 14, as this temperature makes all alike.
    assert len(text) >= len(PROMPT) + NUM_TOKENS // 2
