"""Small models on disk with random weights, quick to make and to serve."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megabit.checkpoint.ternary import write_training
from megabit.config import Config, DataConfig, ModelConfig, PrecisionConfig
from megabit.data.tokenizer import train_tokenizer
from megabit.inference.core import EngineCore
from megabit.inference.messages import AddRequest, Message
from tests.interop.random_source import RandomSource

TEXT = (
    "the quick brown fox jumps over the lazy dog; what the king has said to the queen is known "
    "to all of the court, and nobody speaks of it. naïve café, 北京 and 🙂 are words as well."
)
MAX_LENGTH = 128


def served_model(**changes: Any) -> ModelConfig:
    """Four heads, of which two KV heads; so TP 1, 2 and 4."""
    shape = ModelConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,  # a tied one with random weights says its input again
    )
    return dataclasses.replace(shape, **changes)


def save_served_model(
    out: Path, compute: str = "float32", max_length: int = MAX_LENGTH, **changes: Any
) -> Path:
    """A training checkpoint with a byte-level tokenizer of its own."""
    out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = out.parent / "tokenizer.json"
    train_tokenizer([TEXT], 300).save(str(tokenizer))
    model = served_model(**changes)
    config = Config(
        model=model,
        data=DataConfig(seq_length=max_length),
        precision=PrecisionConfig(compute=compute),  # type: ignore[arg-type]
    )
    source = RandomSource(
        model, seed=7, max_length=max_length, assets={"tokenizer.json": tokenizer}
    )
    write_training(source, out, {"config": dataclasses.asdict(config)})
    return out


def run_alone(core: EngineCore, requests: Sequence[AddRequest]) -> list[Message]:
    """All that ``requests`` bring; all ranks call it, and those that do not schedule get
    nothing."""
    if not core.relay.schedules:
        core.follow()
        return []
    messages: list[Message] = []
    for request in requests:
        messages += core.handle(request)
    while core.has_work:
        messages += core.step()
    core.end()
    return messages
