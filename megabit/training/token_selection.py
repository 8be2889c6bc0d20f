"""Which target tokens count, if not all do: in each sample, those with the highest scores.

A score is a token's loss (online hard example mining) or what it exceeds a reference model's loss
by (Rho-1, arXiv 2404.07965). Both are biased, and so is a perplexity of what they select. How many
tokens are selected follows from the masks alone, so a step can count them before it runs; and a
sample is judged by itself, so no layout changes the selection.
"""

from fractions import Fraction

import torch
from torch import Tensor


def num_selected(mask: Tensor, ratio: float) -> Tensor:
    """How many tokens of each sample are selected: ceil(ratio · targets).

    The ratio is taken for the decimal number that was written: 0.1 of 30 tokens are 3.

    Args:
        mask: bool ``[…, S]``, the targets that may count.

    Returns:
        int64 ``[…]``.
    """
    share = Fraction(str(ratio))
    targets = mask.sum(-1, dtype=torch.int64)
    return (targets * share.numerator + share.denominator - 1) // share.denominator


def select_tokens(scores: Tensor, mask: Tensor, ratio: float) -> Tensor:
    """The tokens with the highest scores, ``num_selected`` of each sample.

    Of equal scores the earlier one is taken; one that is not a number counts as the highest.

    Args:
        scores: ``[…, S]``, anything where ``mask`` is false.
        mask: bool ``[…, S]``.

    Returns:
        bool ``[…, S]``, true where ``mask`` is at most.
    """
    by_score = scores.argsort(dim=-1, descending=True, stable=True)
    # A sort of its own: no score can stand for "not a target", since -inf may be one.
    targets_first = mask.gather(-1, by_score).long().argsort(dim=-1, descending=True, stable=True)
    order = by_score.gather(-1, targets_first)
    rank = torch.arange(mask.shape[-1], device=mask.device)
    chosen = rank < num_selected(mask, ratio).unsqueeze(-1)
    return torch.zeros_like(mask).scatter(-1, order, chosen)
