"""Draw tokens from logits, each row by itself: what else is in the batch changes nothing.

A row's probabilities are integers, ``floor(exp((logit - largest) / temperature) * 2**bits)``, so
that sums over the vocabulary are exact and have no order. A draw is one number of the row's own
``noise``, looked up in their running sum. Filters go in vLLM's order: penalties, temperature,
min-p, top-k, top-p. Equal logits are ordered by id, so that "the k likeliest" are always k.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megabit.inference.messages import SamplingParams, TokenLogprobs
from megabit.inference.noise import NOISE_BITS

_SUM_BITS = 62
_TOP_P_FIRST = 1024
"""Top-p rarely needs more tokens than so many; to sort a whole vocabulary is slow."""
_ELEMENTS = 1 << 22
"""Of a batch whose probabilities are held at once."""


@dataclass(frozen=True)
class RowSampling:
    """How the next token of one sequence is drawn."""

    sampling: SamplingParams
    noise: int = 0
    """Uniform below ``2**NOISE_BITS``, as of ``noise.noise_seed``; not used at temperature 0."""
    prompt_tokens: Sequence[int] = ()
    """What a repetition penalty is for; may be left out where there is none."""
    answer_tokens: Sequence[int] = ()
    """What penalties are for, so far."""


def sample(
    logits: Tensor,
    rows: Sequence[RowSampling],
    num_ids: int | None = None,
) -> list[int | None]:
    """One token for each row; None where logits of it are not numbers.

    Args:
        logits: fp32 ``[m, V]``, of the whole vocabulary; not changed.
        rows: m of them.
        num_ids: ids from this one on are never drawn; default: all may be.
    """
    if not rows:
        return []
    raw = logits[:, :num_ids]
    scores = _penalized(raw, rows)
    largest, tokens = scores.max(-1)
    # max() gives NaN if there is one. An infinity has no probability either.
    is_sound = largest.isfinite()
    chosen: list[int] = tokens.tolist()
    sound: list[bool] = is_sound.tolist()
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0 and sound[i]]
    plain = [i for i in drawn if not _is_filtered(rows[i].sampling)]
    for start in range(0, len(plain), step := max(1, _ELEMENTS // raw.shape[1])):
        part = plain[start : start + step]
        for i, token in zip(part, _draw(scores, largest, part, rows), strict=True):
            chosen[i] = token
    for i in set(drawn).difference(plain):
        chosen[i] = _draw_filtered(scores[i], largest[i], rows[i])
    return [token if ok else None for token, ok in zip(chosen, sound, strict=True)]


def logprobs_of(
    logprobs: Tensor, tokens: Sequence[int], top: int, num_ids: int | None = None
) -> list[TokenLogprobs]:
    """Log probabilities of given tokens, and the ``top`` likeliest ones of each row.

    Args:
        logprobs: fp32 ``[m, V]``, of all tokens; tokens: m ids below V.
        num_ids: ids from this one on are never drawn, and so not among the likeliest.
    """
    columns = torch.tensor(tokens, dtype=torch.int64, device=logprobs.device).unsqueeze(-1)
    own: list[float] = logprobs.gather(-1, columns).squeeze(-1).tolist()
    if not top:
        return [TokenLogprobs(t, p) for t, p in zip(tokens, own, strict=True)]
    candidates = logprobs[:, :num_ids]
    best = _likeliest(candidates, min(top, candidates.shape[-1]))
    values = logprobs.gather(-1, best).tolist()
    pairs = (tuple(zip(i, v, strict=True)) for i, v in zip(best.tolist(), values, strict=True))
    return [TokenLogprobs(t, p, b) for t, p, b in zip(tokens, own, pairs, strict=True)]


def _penalized(raw: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """``raw`` if no row has a penalty."""
    scores = raw
    for i, row in enumerate(rows):
        s = row.sampling
        if s.repetition_penalty == 1 and s.presence_penalty == 0 and s.frequency_penalty == 0:
            continue
        if scores is raw:
            scores = raw.clone()
        if s.repetition_penalty != 1:
            ids = _ids({*row.prompt_tokens, *row.answer_tokens}, scores)
            values = scores[i, ids]
            penalty = s.repetition_penalty
            scores[i, ids] = torch.where(values > 0, values / penalty, values * penalty)
        counts = Counter(row.answer_tokens)
        if counts and (s.presence_penalty or s.frequency_penalty):
            ids = _ids(counts, scores)
            amounts = [
                s.frequency_penalty * count + s.presence_penalty
                for token, count in counts.items()
                if 0 <= token < scores.shape[1]
            ]
            scores[i, ids] -= torch.tensor(amounts, dtype=scores.dtype, device=scores.device)
    return scores


def _ids(tokens: Iterable[int], scores: Tensor) -> Tensor:
    """Those that have a column."""
    return torch.tensor(
        [t for t in tokens if 0 <= t < scores.shape[1]], dtype=torch.int64, device=scores.device
    )


def _is_filtered(s: SamplingParams) -> bool:
    return s.top_k > 0 or s.top_p < 1 or s.min_p > 0


def _draw(
    scores: Tensor, largest: Tensor, part: Sequence[int], rows: Sequence[RowSampling]
) -> list[int]:
    """Tokens of rows that have no filter."""
    temperature = [rows[i].sampling.temperature for i in part]
    weights = _weights(scores[part], largest[part], temperature)
    sums = weights.cumsum(-1)
    totals: list[int] = sums[:, -1].tolist()
    places = [_place(rows[i].noise, total) for i, total in zip(part, totals, strict=True)]
    wanted = torch.tensor(places, dtype=torch.int64, device=scores.device).unsqueeze(-1)
    found: list[int] = torch.searchsorted(sums, wanted, right=True).squeeze(-1).tolist()
    return found


def _draw_filtered(scores: Tensor, largest: Tensor, row: RowSampling) -> int:
    """The token of one row, from its likeliest tokens, best first."""
    s = row.sampling
    vocab = scores.shape[0]
    limit = min(s.top_k or vocab, vocab)
    all_weights = _weights(scores.unsqueeze(0), largest.unsqueeze(0), [s.temperature])[0]
    if s.min_p > 0:
        # The likeliest token's probability is 1 before they are normalized, so this is its share.
        all_weights = all_weights.masked_fill(all_weights < int(s.min_p * _one(vocab)), 0)
    if s.top_p >= 1 and not s.top_k:
        ids, weights = None, all_weights
    else:
        total = int(all_weights.sum()) if limit == vocab else None
        first = limit if total is None else min(limit, _TOP_P_FIRST)
        ids = _likeliest(scores.unsqueeze(0), first)[0]
        weights = all_weights[ids]
        total = int(weights.sum()) if total is None else total
        needed = min(total, max(1, math.ceil(s.top_p * total)))
        if int(weights.sum()) < needed:
            ids = _likeliest(scores.unsqueeze(0), limit)[0]
            weights = all_weights[ids]
        # A token stays if those before it do not have the probability yet.
        before = weights.cumsum(0) - weights
        weights = weights.masked_fill(before >= needed, 0)
    sums = weights.cumsum(0)
    place = torch.tensor([_place(row.noise, int(sums[-1]))], device=sums.device)
    found = int(torch.searchsorted(sums, place, right=True))
    return found if ids is None else int(ids[found])


def _weights(scores: Tensor, largest: Tensor, temperature: Sequence[float]) -> Tensor:
    """int64 ``[m, V]``: probabilities, not normalized; the largest is ``_one(V)``."""
    divisor = torch.tensor(temperature, dtype=torch.float64, device=scores.device).unsqueeze(-1)
    shifted = scores.double() - largest.double().unsqueeze(-1)
    return shifted.div_(divisor).exp_().mul_(_one(scores.shape[-1])).long()


def _one(vocab: int) -> int:
    """So that a sum over the vocabulary fits int64."""
    return 1 << (_SUM_BITS - vocab.bit_length())


def _place(noise: int, total: int) -> int:
    """Uniform below ``total``."""
    return noise * total >> NOISE_BITS


def _likeliest(scores: Tensor, count: int) -> Tensor:
    """int64 ``[m, count]``: ids of the largest, best first, equal ones by id."""
    vocab = scores.shape[-1]
    if count == vocab:
        return scores.sort(dim=-1, descending=True, stable=True).indices
    # One more than wanted: it tells whether what is left out equals what is not.
    values, ids = scores.topk(count + 1, dim=-1)
    is_tied = (values[:, 1:] == values[:, :-1]).any(-1)
    best = ids[:, :count]
    for i in is_tied.nonzero().flatten().tolist():
        candidates = (scores[i] >= values[i, count - 1]).nonzero().flatten()
        order = scores[i, candidates].sort(descending=True, stable=True).indices
        best[i] = candidates[order][:count]
    return best
