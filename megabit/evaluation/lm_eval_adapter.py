"""A model as lm-evaluation-harness sees it (``lm_eval.api.model.LM``), at any layout.

Importing this file needs the extra ``megabit[lm-eval]``.

All ranks run the same evaluator with the same requests in the same order, and each gets all of the
answers: the harness knows of one process. Requests are spread over DP ranks here, so no answer
depends on the layout. How a context and a continuation become tokens is the harness' own rule
(``TemplateLM``): trailing spaces of the context go to the continuation, and both are encoded
together, as in its Hugging Face model.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer

from megabit.data.tokenizer import num_ids
from megabit.errors import UserError
from megabit.evaluation.continuations import Request, score_continuations
from megabit.evaluation.forward import ForwardRunner
from megabit.evaluation.greedy import continue_greedily
from megabit.evaluation.token_batches import Shapes
from megabit.inference.model_text import ModelTokenizer

MAX_GENERATED = 256
"""Tokens that are generated where a task does not say how many, as in the harness; but not more
than half of the model's positions."""


class Instance(Protocol):
    """A request of the harness (``lm_eval.api.instance.Instance``)."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class MegabitLM(TemplateLM):  # type: ignore[misc]  # it has no types
    """Likelihoods and greedy continuations of text; every method is collective over the mesh.

    Args:
        shapes: of the microbatches; ``shapes.max_length`` is how many tokens the model sees.
    """

    backend = "causal"

    def __init__(self, runner: ForwardRunner, tokenizer: ModelTokenizer, shapes: Shapes) -> None:
        super().__init__()
        self._runner = runner
        self._shapes = shapes
        self._ends = tokenizer
        # One of its own: in the harness' texts special tokens are what they spell.
        self._tokenizer = Tokenizer.from_str(tokenizer.tokenizer.to_str())
        self._tokenizer.encode_special_tokens = False

    @property
    def max_length(self) -> int:
        """Tokens that the model sees at once."""
        return self._shapes.max_length

    @property
    def eot_token_id(self) -> int:
        return self._ends.end_id

    @property
    def prefix_token_id(self) -> int:
        return self._ends.begin_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text. None adds what the tokenizer adds by itself, such as a first token, unless
        the text has that already."""
        if add_special_tokens is None:
            begin = self._tokenizer.id_to_token(self.prefix_token_id)
            add_special_tokens = not (begin and string.startswith(begin))
        ids: list[int] = self._tokenizer.encode(string, add_special_tokens=add_special_tokens).ids
        return ids

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Log likelihood of each continuation of a context, and whether it is the greedy one."""
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return answers

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        for text, _, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"--tasks: the continuation of {_short(text)} has {len(continuation)} tokens; "
                    f"the model can score 1 to {self.max_length}"
                )
        asked = [Request(context, continuation) for _, context, continuation in requests]
        scored = score_continuations(self._runner, asked, self._shapes)
        return [(likelihood.log, likelihood.is_greedy) for likelihood in scored]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log likelihoods of whole texts, each in windows with as much context as there is."""
        windows: list[Request] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append(Request(*make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        scored = score_continuations(self._runner, windows, self._shapes)
        for number, likelihood in zip(owners, scored, strict=True):
            totals[number] += likelihood.log
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations up to a stop sequence."""
        answers: list[str] = [""] * len(requests)
        by_settings: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(repr(request.args[1]), []).append(number)
        for numbers in by_settings.values():
            stop, max_tokens = self._limits(requests[numbers[0]].args[1])
            room = self.max_length - max_tokens
            contexts = [self.tok_encode(requests[number].args[0]) for number in numbers]
            prompts = [context[-room:] or [self.prefix_token_id] for context in contexts]
            made = continue_greedily(
                self._runner,
                prompts,
                max_tokens,
                self._is_done(stop),
                self._shapes,
                num_ids(self._tokenizer),
            )
            for number, tokens in zip(numbers, made, strict=True):
                text = self._tokenizer.decode(tokens, skip_special_tokens=True)
                answers[number] = postprocess_generated_text(text, stop, None)
        return answers

    def _limits(self, settings: dict[str, Any]) -> tuple[list[str], int]:
        """Stop sequences and the number of tokens that a task asks for."""
        found = normalize_gen_kwargs(settings, min(MAX_GENERATED, self.max_length // 2))
        if found.get("do_sample"):
            raise UserError(
                "--tasks: a task asks for sampled answers (do_sample or temperature); "
                "megabit eval answers greedily"
            )
        max_tokens = found["max_gen_toks"]
        if not 0 < max_tokens < self.max_length:
            raise UserError(
                f"--tasks: a task asks for answers of {max_tokens} tokens (max_gen_toks); use 1 to "
                f"{self.max_length - 1}, as the model sees {self.max_length}"
            )
        return handle_stop_sequences(found["until"], eos=self._ends.end_of_text), max_tokens

    def _is_done(self, stop: Sequence[str]) -> Callable[[list[int]], bool]:
        def is_done(tokens: list[int]) -> bool:
            if tokens[-1] == self.eot_token_id:
                return True
            text = self._tokenizer.decode(tokens, skip_special_tokens=False)
            return any(word in text for word in stop if word)

        return is_done


def _short(text: Any) -> str:
    shown = repr(text)
    return shown if len(shown) < 80 else shown[:77] + "..."
