"""Greedy answers and their log probabilities are those of the trainer's forward pass, at any
layout, in any company, however prompts are cut, with or without the prefix cache."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megabit.config import load_serving_config
from megabit.inference.core import CoreSettings, EngineCore
from megabit.inference.messages import AddRequest, PromptLogprobs, SamplingParams, Tokens
from megabit.inference.opening import open_stages
from megabit.interop.opening import open_source
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.tensor_parallel.cross_entropy import log_probabilities
from tests.inference.models import MAX_LENGTH, run_alone, save_served_model

NUM_IDS = 300
ANSWER = 8
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]


class Way(NamedTuple):
    """How requests are computed."""

    max_sequences: int
    max_tokens: int
    prefix_cache: bool
    num_blocks: int | None = None


WAYS = [
    *(Way(*parts) for parts in itertools.product((7, 64), (64, 512), (False, True))),
    Way(16, 24, True, num_blocks=24),
]
"""Batch sizes × chunk sizes × prefix cache; and with so few blocks that sequences give way."""
PAIRS = [WAYS[0], WAYS[3], WAYS[5], WAYS[6], WAYS[8]]
"""Each size with each of the other settings, not all three by three."""


def prompts() -> list[tuple[int, ...]]:
    """50, of 1 to 60 tokens; every third one begins as the one before it."""
    generator = torch.Generator().manual_seed(4)
    made: list[tuple[int, ...]] = []
    for number in range(50):
        length = int(torch.randint(1, 60, (), generator=generator))
        tokens = torch.randint(NUM_IDS, (length,), generator=generator).tolist()
        shared = made[-1][: len(made[-1]) * 3 // 4] if number % 3 == 2 else ()
        made.append((*shared, *tokens)[: MAX_LENGTH - ANSWER])
    return made


Answers = dict[str, list[tuple[int, float]]]


def answers(
    model: Path, tp: int, pp: int, ways: list[Way], *settings: str, count: int = 50, **core: Any
) -> Callable[[], list[Answers]]:
    """For each way, the tokens of each request and their log probabilities."""
    requests = [
        AddRequest(
            str(number), prompt, SamplingParams(max_tokens=ANSWER, temperature=0.0, logprobs=0)
        )
        for number, prompt in enumerate(prompts()[:count])
    ]

    def compute() -> list[Answers]:
        serving = load_serving_config([f"parallel.tp={tp}", f"parallel.pp={pp}", *settings])
        mesh = ParallelMesh.create(tp, pp, torch.device("cpu"))
        stages, _ = open_stages(open_source(model), serving, mesh)
        found: list[Answers] = []
        for way in ways:
            limits = {**way._asdict(), "max_batched_tokens": way.max_tokens, **core}
            del limits["max_tokens"]
            engine = EngineCore(stages, mesh, CoreSettings(MAX_LENGTH, num_ids=NUM_IDS, **limits))
            of_way: Answers = {}
            for message in run_alone(engine, requests):
                if isinstance(message, Tokens):
                    told = zip(message.tokens, message.logprobs, strict=True)
                    of_way.setdefault(message.id, []).extend((t, p.logprob) for t, p in told)
            found.append(of_way)
        return found

    return compute


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served_model(tmp_path_factory.mktemp("served") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def alone(model: Path) -> Answers:
    """On one process, one request after the other, prompts whole, nothing shared."""
    (found,) = answers(model, 1, 1, [Way(1, 512, False)])()
    assert len({tuple(t for t, _ in answer) for answer in found.values()}) > 40
    return found


def trainers_answer(model: Path, prompt: tuple[int, ...], dtype: str) -> list[tuple[int, float]]:
    """By the model's forward pass over the whole text, for each token, as evaluation has it."""
    mesh = ParallelMesh(device=torch.device("cpu"))
    serving = load_serving_config([f"engine.compute={dtype}"])
    stages, _ = open_stages(open_source(model), serving, mesh)
    tokens, found = list(prompt), []
    with torch.no_grad():
        for _ in range(ANSWER):
            logits = stages.logits(stages(torch.tensor([tokens])))
            of_last = log_probabilities(logits, stages.vocab_rows, mesh.tp)[-1]
            token = int(logits[-1, :NUM_IDS].argmax())
            found.append((token, float(of_last[token])))
            tokens.append(token)
    return found


def test_they_are_those_of_the_trainers_forward_pass(model: Path, alone: Answers) -> None:
    for number, prompt in enumerate(prompts()[:8]):
        assert alone[str(number)] == trainers_answer(model, prompt, "float32")


@pytest.mark.parametrize(
    ("tp", "pp", "ways"),
    [
        pytest.param(1, 1, WAYS, id="1-1"),
        *(pytest.param(tp, pp, PAIRS, id=f"{tp}-{pp}") for tp, pp in LAYOUTS[1:]),
        *(
            pytest.param(tp, pp, WAYS, id=f"{tp}-{pp}-all", marks=pytest.mark.exhaustive)
            for tp, pp in LAYOUTS[1:]
        ),
    ],
)
def test_they_are_the_same_in_any_company_at_any_layout(
    model: Path, alone: Answers, tp: int, pp: int, ways: list[Way]
) -> None:
    for way, found in zip(ways, run_ranks(answers(model, tp, pp, ways), tp * pp)[0], strict=True):
        assert found == alone, way


@pytest.mark.parametrize(
    ("changes", "settings", "core"),
    [
        pytest.param({"tie_word_embeddings": True}, [], {}, id="tied"),
        pytest.param({"norm_placement": "prenorm", "hidden_act": "silu"}, [], {}, id="prenorm"),
        pytest.param({"norm_placement": "per_proj"}, [], {}, id="per_proj"),
        pytest.param({"activations": "a4.8", "hadamard": True}, [], {}, id="a4.8"),
        pytest.param({"num_key_value_heads": 1}, [], {}, id="one-kv-head"),
        pytest.param({}, ["parallel.row_reduce=int32"], {}, id="int32"),
        pytest.param({}, ["engine.compute=bfloat16"], {}, id="bf16"),
        pytest.param({}, [], {"kv_dtype": torch.float16}, id="fp16-cache"),
        pytest.param({}, [], {"kv_dtype": torch.int8}, id="int8-cache"),
        pytest.param({}, [], {"block_size": 8}, id="blocks-of-8"),
    ],
)
def test_options_change_nothing_of_that(
    tmp_path: Path, changes: dict[str, Any], settings: list[str], core: dict[str, Any]
) -> None:
    model = save_served_model(tmp_path / "model", **changes)
    (first,) = answers(model, 1, 1, [Way(1, 512, False)], *settings, count=12, **core)()
    ways = [Way(64, 64, True), Way(4, 32, True, num_blocks=24)]
    if core.get("kv_dtype") is None:
        dtype = "bfloat16" if "engine.compute=bfloat16" in settings else "float32"
        assert first["3"] == trainers_answer(model, prompts()[3], dtype)
    found = run_ranks(answers(model, 2, 2, ways, *settings, count=12, **core), 4)[0]
    assert found == [first] * 2


def test_prompt_logprobs_are_those_of_the_forward_pass(model: Path) -> None:
    prompt = prompts()[5]
    request = AddRequest("a", prompt, SamplingParams(max_tokens=1, prompt_logprobs=2))

    def compute() -> list[float]:
        serving = load_serving_config(["parallel.tp=2"])
        mesh = ParallelMesh.create(2, 1, torch.device("cpu"))
        stages, _ = open_stages(open_source(model), serving, mesh)
        engine = EngineCore(stages, mesh, CoreSettings(MAX_LENGTH, max_batched_tokens=64))
        told = [m for m in run_alone(engine, [request]) if isinstance(m, PromptLogprobs)]
        return [token.logprob for m in told for token in m.logprobs]

    mesh = ParallelMesh(device=torch.device("cpu"))
    stages, _ = open_stages(open_source(model), load_serving_config([]), mesh)
    with torch.no_grad():
        logits = stages.logits(stages(torch.tensor([prompt])))
        whole = log_probabilities(logits, stages.vocab_rows, mesh.tp)
    wanted = whole[torch.arange(len(prompt) - 1), list(prompt[1:])].tolist()
    assert run_ranks(compute, 2)[0] == wanted
