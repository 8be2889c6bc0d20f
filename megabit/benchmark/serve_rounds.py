"""A server under many clients beside the same server with one: ``megabit bench all`` has it.

The loads take turns on one server of a random model, so that whatever slows the machine down slows
both. Prompts are new in every round: nothing of them is in the prefix cache.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from megabit.benchmark.document import Part, Row, Sample
from megabit.benchmark.random_model import save_random_model
from megabit.benchmark.serve import Limits, Load, Result, run
from megabit.benchmark.server_process import served
from megabit.config import ModelConfig
from megabit.data.corpus import TOKENIZER
from megabit.data.tokenizer import train_tokenizer
from megabit.errors import RunError
from megabit.model import num_parameters
from megabit_kernels.benchmark.machine import counted


def measure_serving(
    model: ModelConfig,
    clients: int,
    load: Load,
    rounds: int,
    settings: Sequence[str],
    progress: Callable[[str], None] = lambda what: None,
) -> Part:
    """Rounds of ``load.requests`` requests by one client and by ``clients`` of them.

    Args:
        settings: of the server.

    Raises:
        RunError: the server did not start, or a request failed.
    """
    counts = (clients, 1)
    found: dict[int, list[Result]] = {count: [] for count in counts}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        length = load.prompt_tokens + load.answer_tokens
        save_random_model(path, model, length, "bfloat16")
        # Any that has the ids of the prompts: a server turns tokens into text.
        train_tokenizer(["."], model.vocab_size).save(str(path / TOKENIZER))
        with served(path, settings) as url:
            for round_ in range(rounds):
                for count in counts:
                    progress(f"{count} at a time, round {round_ + 1} of {rounds}")
                    own = replace(load, clients=count, seed=load.seed + len(counts) * round_)
                    own = replace(own, seed=own.seed + counts.index(count))
                    found[count].append(_answered(url, own))
    tokens = float((load.requests or 0) * load.answer_tokens)
    samples = {
        count: Sample.of(
            counted(count, "client"),
            [result.seconds for result in results],
            tokens,
        )
        for count, results in found.items()
    }
    also = {
        f"{name}_{measure}": median(
            value for result in found[count] for value in result.values(measure)
        )
        for name, count in (("p50", clients), ("p50_of_1_client", 1))
        for measure in ("ttft_s", "tpot_s")
    }
    row = Row(f"{load.requests} requests", samples[clients], samples[1], "tokens", also)
    return Part(
        "serve",
        f"Serving, {counted(model.num_hidden_layers, 'layer')} of {model.hidden_size}",
        {
            "parameters": num_parameters(model),
            "settings": " ".join(settings),
            "prompt_tokens": load.prompt_tokens,
            "answer_tokens": load.answer_tokens,
            "requests_a_round": load.requests,
            "rounds": rounds,
        },
        (row,),
    )


def _answered(url: str, load: Load) -> Result:
    result = asyncio.run(run(url, load, Limits()))
    if result.failures:
        reason, count = next(iter(result.failures.items()))
        raise RunError(f"{count} of {len(result.replies)} requests failed: {reason}")
    return result
