"""The forward pass of a batch on one rank: hidden states in, hidden states or an answer out."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from megabit.inference.batch import Batch, Wanted
from megabit.inference.kv_cache import KVCache
from megabit.inference.messages import SamplingParams
from megabit.inference.sampling import RowSampling, logprobs_of, sample
from megabit.mesh import Axis
from megabit.model import CausalLMStages
from megabit.tensor_parallel import ForwardPass
from megabit.tensor_parallel.argmax import vocab_parallel_argmax
from megabit.tensor_parallel.cross_entropy import log_probabilities
from megabit.tensor_parallel.logits import whole_logits
from megabit.tensor_parallel.partition import BlockPartition

LOGIT_ROWS = 64
"""Rows whose logits are there at a time: the log probabilities of a long prompt take many."""
NO_TOKEN = float("nan")
NOTHING = -1
"""In place of a token that is not among the likeliest, as there are not so many."""
NOT_PARAMS = ("noise", "prompt_tokens", "answer_tokens")
"""Of ``Wanted.sampling``, what is not of ``SamplingParams``."""


class StageRunner:
    """Computes batches with the stages of a rank.

    Args:
        num_ids: ids from this one on are never drawn; None: all are.
    """

    def __init__(self, stages: CausalLMStages, cache: KVCache, num_ids: int | None) -> None:
        self.stages, self.cache, self.num_ids = stages, cache, num_ids
        self.seconds = 0.0
        """Of computing so far, without what was waited for others."""

    @torch.inference_mode()
    def hidden(self, batch: Batch, hidden: Tensor | None) -> Tensor | None:
        """Hidden states ``[T, H]`` after the rank's layers, of those after the stage before; none
        of an empty batch. Communicates over TP."""
        if not batch.num_tokens:
            return None
        started, waited = time.perf_counter(), self._tp.waited_s
        lossy = self.stages.context.lossy_sums
        if lossy is not None:
            lossy.enabled = batch.is_lossy
        tokens = torch.from_numpy(batch.tokens).to(self.cache.device).unsqueeze(0)
        hidden = self.stages(tokens, hidden, ForwardPass(cache=self.cache.view(batch)))
        self.seconds += time.perf_counter() - started - (self._tp.waited_s - waited)
        return hidden

    @torch.inference_mode()
    def answer(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        """After the last stage: fp64 as ``Batch.result_shape`` says. Communicates over TP; only the
        first rank of it has all of the answer."""
        started, waited = time.perf_counter(), self._tp.waited_s
        result = torch.zeros(
            batch.result_shape, dtype=torch.float64, device=self.stages.context.device
        )
        result[:, 2:] = NOTHING
        if hidden is not None:
            for start in range(0, len(batch.wanted), LOGIT_ROWS):
                wanted = batch.wanted[start : start + LOGIT_ROWS]
                rows = torch.tensor([want.row for want in wanted], device=hidden.device)
                logits = self.stages.logits(hidden[rows])
                self._answer(logits, wanted, result[start : start + LOGIT_ROWS])
        self.seconds += time.perf_counter() - started - (self._tp.waited_s - waited)
        return result

    @property
    def _tp(self) -> Axis:
        return self.stages.context.tp

    def _answer(self, logits: Tensor, wanted: Sequence[Wanted], result: Tensor) -> None:
        """Fill ``result [m, 2 + 2k]`` from ``logits [m, v]`` of this rank's vocabulary."""
        rows, tp = self.stages.vocab_rows, self._tp
        if all(want.sampling is None and want.logprobs is None for want in wanted):
            likeliest = vocab_parallel_argmax(logits, rows, tp, self.num_ids).double()
            result[:, 0] = likeliest.masked_fill(likeliest < 0, NO_TOKEN)
            return
        logits = whole_logits(logits, rows, tp).float()
        if tp.rank:
            return
        tokens = [want.target for want in wanted]
        drawn = [i for i, want in enumerate(wanted) if want.target is None]
        found = sample(logits[drawn], [_row(wanted[i]) for i in drawn], self.num_ids)
        for i, token in zip(drawn, found, strict=True):
            tokens[i] = token
        result[:, 0] = torch.tensor([NO_TOKEN if t is None else t for t in tokens])
        told = [
            (i, token, want.logprobs)
            for i, (token, want) in enumerate(zip(tokens, wanted, strict=True))
            if token is not None and want.logprobs is not None
        ]
        if told:
            numbers, known, tops = zip(*told, strict=True)
            everything = BlockPartition(rows.size, rows.num_blocks).span(0, 1)
            logprobs = log_probabilities(logits[[*numbers]], everything, Axis.single("tp"))
            found_logprobs = logprobs_of(logprobs, known, max(tops), self.num_ids)
            for i, of_token in zip(numbers, found_logprobs, strict=True):
                values = [of_token.logprob, *(x for pair in of_token.top for x in pair)]
                result[i, 1 : 1 + len(values)] = torch.tensor(values, dtype=result.dtype)


def _row(wanted: Wanted) -> RowSampling:
    fields = dict(wanted.sampling or {"temperature": 0.0})
    own = {key: fields.pop(key) for key in NOT_PARAMS if key in fields}
    return RowSampling(SamplingParams(**fields), **own)
