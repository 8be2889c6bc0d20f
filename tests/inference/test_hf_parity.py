"""The engine in hf mode gives the tokens that transformers' ``generate`` gives.

It multiplies and attends one sequence after the other, in the shapes of ``generate`` with a batch
of one. What may differ is the order of sums in the head's product, whose rows are those of the
batch; and all that follows a prompt which is computed in parts, so none is here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megabit.config import EngineConfig, ServingConfig
from megabit.inference.core import EngineCore
from megabit.inference.messages import AddRequest, SamplingParams, Tokens
from megabit.inference.start import start_core
from megabit.interop.huggingface import Quantization, export_huggingface
from megabit.mesh import ParallelMesh
from tests.inference.models import run_alone, served_model
from tests.interop.hf_models import FORMS, load
from tests.interop.random_source import RandomSource

NEW_TOKENS = 32


@pytest.fixture(autouse=True)
def _not_compiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(320, (length,), generator=generator).tolist()
        for length in (1, 2, 5, 9, 16, 17, 23, 40)
    ]


def engine_core(path: Path) -> EngineCore:
    # 8 requests, 4 at a time: batches hold prompts, single tokens, and both.
    settings = EngineConfig(arithmetic="hf", max_batched_tokens=128, max_sequences=4)
    return start_core(path, ServingConfig(engine=settings), ParallelMesh()).core


def generated(network: Any, prompt: list[int]) -> list[int]:
    found = network.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", FORMS)
def test_greedy_tokens_are_those_of_transformers(
    tmp_path: Path, quantization: Quantization, dtype: Any
) -> None:
    source = RandomSource(served_model(), seed=7, max_length=128)
    form = (quantization.mode, quantization.linear_class)
    export_huggingface(source, tmp_path / "model", *form, dtype)
    network = load(tmp_path / "model")
    asked = prompts()
    theirs = [generated(network, prompt) for prompt in asked]

    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)
    requests = [AddRequest(str(i), tuple(p), sampling) for i, p in enumerate(asked)]
    ours: list[list[int]] = [[] for _ in asked]
    for message in run_alone(engine_core(tmp_path / "model"), requests):
        assert isinstance(message, Tokens)
        ours[int(message.id)] += message.tokens
    assert len({tuple(tokens) for tokens in theirs}) > 4  # answers are not all alike
    assert ours == theirs
