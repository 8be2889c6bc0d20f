"""The engine's speed beside ``transformers``' ``generate``, on one model and in one process.

Both have the same imported model, threads, prompts and numbers of tokens, and take turns, so that
whatever slows the machine down for a while slows both down. Prompts are new in each turn: nothing
is in the engine's prefix cache. Times are of whole answers, their prompts included.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from megabit.config import EngineConfig, ModelConfig, ServingConfig
from megabit.errors import UserError
from megabit.inference.core import EngineCore
from megabit.inference.messages import AddRequest, SamplingParams, Tokens
from megabit.inference.start import start_core
from megabit.mesh import ParallelMesh
from megabit_kernels.allocator import keep_freed_memory

Dtype = Literal["bfloat16", "float32"]
MEGABIT, TRANSFORMERS, ONE_BY_ONE = "megabit", "transformers", "megabit, one at a time"

Generate = Callable[[Tensor, int], int]
"""From prompts ``[B, S]`` and a number of tokens for each: how many were generated."""


@dataclass(frozen=True)
class Load:
    """What is generated."""

    batch_sizes: tuple[int, ...] = (1, 16)
    prompt_tokens: int = 32
    new_tokens: int = 64
    turns: int = 3

    @property
    def max_length(self) -> int:
        return self.prompt_tokens + self.new_tokens

    @property
    def concurrent(self) -> int:
        """Requests in the comparison with one at a time."""
        return max(self.batch_sizes)


@dataclass(frozen=True)
class Speeds:
    """Of one number of requests: seconds of each turn, by contestant."""

    requests: int
    tokens: int
    """Generated in a turn."""
    seconds: Mapping[str, list[float]]

    def tokens_per_s(self, name: str) -> float:
        """Of the median turn."""
        return self.tokens / median(self.seconds[name])

    def ratio(self, other: str) -> float:
        """How many times as fast as another contestant megabit is: the median over turns."""
        pairs = zip(self.seconds[MEGABIT], self.seconds[other], strict=True)
        return median(theirs / ours for ours, theirs in pairs)


def measure(
    folder: Path,
    load: Load,
    threads: int,
    dtype: Dtype,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Speeds]:
    """The speeds for each batch size, and for requests that come together against one at a time.

    Args:
        folder: a model of transformers, ``offline``; see ``random_model``.
        threads: of each contestant.

    Raises:
        UserError: transformers is not installed.
    """
    progress("loading the model")
    theirs, model = _load_transformers(folder, dtype)
    torch.set_num_threads(threads)
    keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    results = []
    for batch in load.batch_sizes:
        contestants = {
            MEGABIT: _engine(folder, load, batch, dtype),
            TRANSFORMERS: theirs,
        }
        if batch == load.concurrent > 1:
            contestants[ONE_BY_ONE] = _engine(folder, load, 1, dtype)
        results.append(race(contestants, batch, load, model, generator, progress))
    return results


def race(
    contestants: Mapping[str, Generate],
    batch: int,
    load: Load,
    model: ModelConfig,
    generator: torch.Generator,
    progress: Callable[[str], None],
) -> Speeds:
    """Answers to the same prompts by all contestants, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(load.turns + 1):
        shape = (batch, load.prompt_tokens)
        prompts = torch.randint(model.vocab_size, shape, generator=generator)
        for name, generate in contestants.items():
            progress(f"{name}, batch of {batch}, turn {turn} of {load.turns}")
            started = time.perf_counter()
            made = generate(prompts, load.new_tokens)
            taken = time.perf_counter() - started
            if made != batch * load.new_tokens:
                raise RuntimeError(f"{name} has generated {made} tokens")
            if turn:  # the first one warms up, and compiles
                seconds[name].append(taken)
    return Speeds(batch, batch * load.new_tokens, seconds)


def _engine(folder: Path, load: Load, sequences: int, dtype: Dtype) -> Generate:
    """Megabit's engine, with so many sequences side by side."""
    settings = EngineConfig(
        max_model_len=load.max_length,
        max_sequences=sequences,
        max_batched_tokens=max(512, sequences),
        compute=dtype,
    )
    core = start_core(folder, ServingConfig(engine=settings), ParallelMesh()).core

    def generate(prompts: Tensor, new_tokens: int) -> int:
        return generated(core, prompts, new_tokens)

    return generate


def generated(core: EngineCore, prompts: Tensor, new_tokens: int) -> int:
    """How many tokens ``core`` has generated after ``prompts``, greedily."""
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0)
    for number, prompt in enumerate(prompts.tolist()):
        core.handle(AddRequest(str(number), tuple(prompt), sampling))
    made = 0
    while core.has_work:
        made += sum(len(m.tokens) for m in core.step() if isinstance(m, Tokens))
    return made


def _load_transformers(folder: Path, dtype: Dtype) -> tuple[Generate, ModelConfig]:
    from megabit.interop.huggingface import HuggingFaceSource

    try:
        import_module("accelerate")  # transformers loads ternary models with it only
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise UserError(
            f"megabit bench engine: needs {error.name}, which is not among what megabit installs; "
            "pip install transformers accelerate"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    network: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype)
    )
    network.eval()

    @torch.inference_mode()
    def generate(prompts: Tensor, new_tokens: int) -> int:
        found = network.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            eos_token_id=None,
        )
        return int(found.numel() - prompts.numel())

    return generate, HuggingFaceSource(folder).model
