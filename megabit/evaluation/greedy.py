"""Continue prompts by the likeliest tokens.

Each token is a forward pass over the whole text so far, without a cache of keys and values: fine
for short answers of an evaluation, slow for long ones.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from megabit.evaluation.argmax import vocab_parallel_argmax
from megabit.evaluation.forward import ForwardRunner
from megabit.evaluation.token_batches import Shapes, by_length, dealt
from megabit.model import CausalLMStages
from megabit.reduce import all_reduce
from megabit.tensor_parallel import ForwardPass

NONE = -1
"""In place of a token that was not generated."""


def continue_greedily(
    runner: ForwardRunner,
    prompts: Sequence[list[int]],
    max_tokens: int,
    is_done: Callable[[list[int]], bool],
    shapes: Shapes,
    num_ids: int | None = None,
) -> list[list[int]]:
    """The tokens after each prompt, at most ``max_tokens``, on every rank; collective over the
    mesh. All ranks have the same prompts.

    Args:
        prompts: not empty, and short enough for all to fit into ``shapes.max_length``.
        is_done: whether what was generated so far is enough; the same on all ranks.
        num_ids: ids from this one on are never chosen.
    """
    mesh = runner.mesh
    results = torch.zeros(len(prompts), max_tokens, dtype=torch.int64, device=mesh.device)
    for numbers in (
        numbers
        for group in dealt(by_length(prompts, shapes.batch_size), 1, mesh.dp)
        for numbers in group
    ):
        texts = [[*prompts[number]] for number in numbers]
        made = _continue(runner, texts, max_tokens, is_done, shapes, num_ids)
        for number, tokens in zip(numbers, made, strict=True):
            filled = tokens + [NONE] * (max_tokens - len(tokens))
            results[number] = torch.tensor(filled, device=mesh.device)
    # Each prompt was continued on one DP rank; the others have zeros.
    rows: list[list[int]] = all_reduce(results, mesh.dp, purpose="statistics").tolist()
    return [[token for token in row if token != NONE] for row in rows]


def _continue(
    runner: ForwardRunner,
    texts: list[list[int]],
    max_tokens: int,
    is_done: Callable[[list[int]], bool],
    shapes: Shapes,
    num_ids: int | None,
) -> list[list[int]]:
    """One microbatch of texts; collective over TP and PP."""
    made: list[list[int]] = [[] for _ in texts]
    active = [*range(len(texts))] if max_tokens else []
    while active:
        seen = [text + tokens for text, tokens in zip(texts, made, strict=True)]
        # Rows that are done stay, so that no shape depends on when others are.
        inputs = shapes.pad(seen, runner.mesh.device)
        last = [len(text) - 1 for text in seen] + [0] * (shapes.batch_size - len(seen))
        (chosen,) = runner.values(
            [inputs],
            partial(_likeliest, runner.stages, last, num_ids),
            (shapes.batch_size,),
        ).tolist()
        for row in active:
            made[row].append(int(chosen[row]))
        active = [row for row in active if len(made[row]) < max_tokens and not is_done(made[row])]
    return made


def _likeliest(
    stages: CausalLMStages,
    places: Sequence[int],
    num_ids: int | None,
    hidden: Tensor,
    microbatch: int,
    forward_pass: ForwardPass,
) -> Tensor:
    """After the last stage: of each row, the likeliest token behind a place; ``[B]``."""
    logits = stages.logits(hidden, forward_pass).unflatten(0, (len(places), -1))
    own = logits[torch.arange(len(places)), torch.tensor(places)]
    return vocab_parallel_argmax(own, stages.vocab_rows, stages.context.tp, num_ids)
