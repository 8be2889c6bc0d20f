"""Continue prompts by the likeliest tokens, as the engine of ``inference`` does it: with a cache of
keys and values, and prompts that begin alike computed once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megabit.checkpoint import on_all_ranks
from megabit.errors import UserError
from megabit.evaluation.forward import ForwardRunner
from megabit.evaluation.token_batches import Shapes, dealt
from megabit.inference.core import CoreSettings, EngineCore
from megabit.inference.messages import (
    AbortRequest,
    AddRequest,
    Message,
    SamplingParams,
    Tokens,
)
from megabit.reduce import all_reduce

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
        is_done: whether what was generated so far is enough.
        num_ids: ids from this one on are never chosen.

    Raises:
        UserError: on all ranks: the layout is one that only training has a use for, or the model's
            output is not a number.
    """
    _check_layout(runner)
    mesh = runner.mesh
    sequences = shapes.batch_size * runner.microbatches
    settings = CoreSettings(
        max_model_len=shapes.max_length,
        max_sequences=sequences,
        max_batched_tokens=shapes.batch_size * shapes.max_length,
        num_blocks=sequences * -(-shapes.max_length // CoreSettings.block_size),
        num_ids=num_ids,
    )
    core = EngineCore(runner.stages, mesh, settings)
    answers = _Answers({}, is_done)
    if core.relay.schedules:
        own = [number for (number,) in dealt(range(len(prompts)), 1, mesh.dp)]
        answers = _Answers({number: [] for number in own}, is_done)
        if max_tokens:
            _compute(core, {number: prompts[number] for number in own}, max_tokens, answers)
        core.end()
    else:
        core.follow()
    on_all_ranks(answers.check, mesh)
    results = torch.zeros(len(prompts), max_tokens, dtype=torch.int64, device=mesh.device)
    for number, tokens in answers.made.items():
        filled = tokens + [NONE] * (max_tokens - len(tokens))
        results[number] = torch.tensor(filled, device=mesh.device)
    # Each prompt was continued by one of the ranks that schedule; all others have zeros.
    for axis in (mesh.tp, mesh.pp, mesh.dp):
        results = all_reduce(results, axis, purpose="statistics")
    return [[token for token in row if token != NONE] for row in results.tolist()]


@dataclass
class _Answers:
    """What was generated so far."""

    made: dict[int, list[int]]
    """By the number of the prompt."""
    is_done: Callable[[list[int]], bool]
    problem: str | None = None

    def take(self, message: Message) -> AbortRequest | None:
        """A message of the engine, and what is to be answered."""
        if not isinstance(message, Tokens):
            return None
        if message.error is not None:
            self.problem = message.error
            return None
        tokens = self.made[int(message.id)]
        tokens += message.tokens
        is_over = message.finish is not None or not self.is_done(tokens)
        return None if is_over else AbortRequest(message.id)

    def check(self) -> None:
        if self.problem is not None:
            raise UserError(f"--tasks: a prompt cannot be continued: {self.problem}")


def _compute(
    core: EngineCore, prompts: Mapping[int, list[int]], max_tokens: int, answers: _Answers
) -> None:
    """Continue prompts, by their numbers."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
    for number, prompt in prompts.items():
        core.handle(AddRequest(str(number), tuple(prompt), sampling))
    while core.has_work:
        for message in core.step():
            reply = answers.take(message)
            if reply is not None:
                core.handle(reply)


def _check_layout(runner: ForwardRunner) -> None:
    if runner.stages.context.sequence_parallel:
        raise UserError(
            "parallel.sequence_parallel: answers are generated without; set it to false"
        )
    if len(runner.stages.layouts) > 1:
        raise UserError(
            "parallel.schedule: answers are generated with one stage on each rank; "
            "leave it out, and parallel.layers_per_stage"
        )
