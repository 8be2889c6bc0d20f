"""How likely continuations of contexts are: what tasks with several choices, and perplexities of
documents, are made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megabit.evaluation.forward import ForwardRunner
from megabit.evaluation.token_batches import Shapes, by_length, dealt
from megabit.model import CausalLMStages
from megabit.reduce import all_reduce
from megabit.tensor_parallel import ForwardPass, vocab_parallel_cross_entropy
from megabit.tensor_parallel.argmax import vocab_parallel_argmax


class Request(NamedTuple):
    """Ids; both have at least one."""

    context: list[int]
    continuation: list[int]


class Likelihood(NamedTuple):
    """Of a continuation, given its context."""

    log: float
    """Natural logarithm of its probability."""
    is_greedy: bool
    """Whether each token of it is the likeliest one at its place."""


@dataclass(frozen=True)
class _Microbatch:
    numbers: list[int]
    """Of the requests, in the order of the rows."""
    inputs: Tensor
    targets: Tensor
    mask: Tensor
    """All ``[B, S]``."""


def score_continuations(
    runner: ForwardRunner, requests: Sequence[Request], shapes: Shapes
) -> list[Likelihood]:
    """The likelihood of each continuation, on every rank; collective over the mesh.

    All ranks have the same requests. Contexts that do not fit are cut at their beginning.

    Raises:
        ValueError: a continuation alone is too long, or a request has nothing to score.
    """
    limit = shapes.max_length
    for context, continuation in requests:
        if not context or not 0 < len(continuation) <= limit:
            raise ValueError(
                f"a context of {len(context)} tokens and a continuation of {len(continuation)} "
                f"cannot be scored in windows of {limit}"
            )
    sequences = [(context + continuation)[-(limit + 1) :] for context, continuation in requests]
    mesh = runner.mesh
    results = torch.zeros(len(requests), 2, dtype=torch.float64, device=mesh.device)
    for group in dealt(by_length(sequences, shapes.batch_size), runner.microbatches, mesh.dp):
        batches = [_stack(numbers, sequences, requests, shapes, mesh.device) for numbers in group]
        values = runner.values(
            [batch.inputs for batch in batches],
            partial(_score, runner.stages, batches),
            (shapes.batch_size, 2),
        )
        for batch, value in zip(batches, values, strict=True):
            results[batch.numbers] = value[: len(batch.numbers)]
    # Each request is a value on one DP rank and zero on the others.
    scored = all_reduce(results, mesh.dp, purpose="statistics").tolist()
    return [Likelihood(log, is_greedy == 1) for log, is_greedy in scored]


def _stack(
    numbers: list[int],
    sequences: Sequence[Sequence[int]],
    requests: Sequence[Request],
    shapes: Shapes,
    device: torch.device,
) -> _Microbatch:
    inputs = shapes.pad([sequences[number][:-1] for number in numbers], device)
    targets = torch.zeros_like(inputs)
    mask = torch.zeros_like(inputs, dtype=torch.bool)
    for row, number in enumerate(numbers):
        stop = len(sequences[number]) - 1
        continuation = requests[number].continuation
        places = slice(stop - len(continuation), stop)
        targets[row, places] = torch.tensor(continuation, device=device)
        mask[row, places] = True
    return _Microbatch(numbers, inputs, targets, mask)


def _score(
    stages: CausalLMStages,
    batches: Sequence[_Microbatch],
    hidden: Tensor,
    microbatch: int,
    forward_pass: ForwardPass,
) -> Tensor:
    """After the last stage: log likelihood and greediness of each row, fp64 ``[B, 2]``."""
    batch, rows, tp = batches[microbatch], stages.vocab_rows, stages.context.tp
    logits = stages.logits(hidden, forward_pass)
    of_tokens = vocab_parallel_cross_entropy(logits, batch.targets.flatten(), rows, tp)
    likeliest = vocab_parallel_argmax(logits, rows, tp).view_as(batch.targets)
    losses = of_tokens.cross_entropy.double().view_as(batch.targets)
    log = -losses.masked_fill(~batch.mask, 0).sum(-1)
    is_greedy = ((likeliest == batch.targets) | ~batch.mask).all(-1)
    return torch.stack([log, is_greedy.double()], -1)
