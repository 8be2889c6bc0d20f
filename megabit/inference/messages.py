"""What goes to an engine and what comes from it: token ids in, token ids out.

The same messages whether the engine is in this process or in others: then they are lines of JSON
on a socket. An engine knows nothing of text; whoever talks to it has the tokenizer.
"""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

Finish = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How an answer is drawn. Names and defaults are those of the OpenAI API and of vLLM."""

    max_tokens: int = 16
    temperature: float = 1.0
    """0 is greedy: the likeliest token, the lowest id of equals."""
    top_k: int = 0
    """Draw from the so many likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Leave out tokens with less than this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or answer (CTRL, arXiv
    1909.05858)."""
    presence_penalty: float = 0.0
    """Taken from logits of tokens in the answer so far."""
    frequency_penalty: float = 0.0
    """The same, times how often they are in it."""
    seed: int | None = None
    """With one, the answer depends on nothing but the prompt and these settings."""
    n: int = 1
    """Answers to one prompt."""
    logprobs: int | None = None
    """Log probabilities, before any of the above, of the tokens drawn and of so many likeliest."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, and are not part of it; for whoever has the tokenizer."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Whether the model's end-of-text token is a token like others."""


@dataclass(frozen=True)
class AddRequest:
    """A prompt to continue."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    end_ids: tuple[int, ...] = ()
    """Tokens that end an answer, ``sampling.stop_token_ids`` among them."""
    is_exact: bool = False
    """Whether sums over TP are exact for it even where others' are rounded; it shares no blocks
    then."""


@dataclass(frozen=True)
class AbortRequest:
    """Forget a request; answered with ``finish="abort"``, unless it is done already."""

    id: str
    index: int | None = None
    """Of the answer; None: all of them."""


@dataclass(frozen=True)
class Stop:
    """End the engine; whatever is under way is lost."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one token: its own, and those of the likeliest ones, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Tokens:
    """New tokens of an answer, or its end."""

    id: str
    index: int
    """Of the answer, below ``n``."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    stop_token: int | None = None
    """The token of ``end_ids`` that ended it; the last of ``tokens``."""
    error: str | None = None
    cached_tokens: int = 0
    """Of the prompt, those that another request had computed."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Of all of a prompt's tokens but the first; before any of its ``Tokens``."""

    id: str
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class Ready:
    """The model is loaded."""

    max_model_len: int
    num_blocks: int
    block_size: int
    tp: int
    pp: int
    layers_per_stage: tuple[int, ...]
    description: str
    """For people."""


@dataclass(frozen=True)
class Stats:
    """How the engine is; sent about once a second, whatever happens, so that its absence says that
    the engine is stuck. Counters are since its start."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    """Prompt tokens of those."""
    blocks_used: int = 0
    """By running sequences; a block that only the prefix cache keeps is free."""
    blocks_total: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    batch_tokens: tuple[int, ...] = ()
    """Tokens of each forward pass since the last report."""
    comm_bytes: dict[str, float] = field(default_factory=dict)
    """Bytes that all ranks have sent, by axis and codec: ``tp/exact16``, ``pp/hidden``."""
    comm_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that ranks waited in collectives, the longest of them, by axis."""
    comm_calls: dict[str, int] = field(default_factory=dict)
    """Collectives of a rank, by axis."""
    comm_fallbacks: dict[str, int] = field(default_factory=dict)
    """Lossy sums that were sent exactly, by reason: size, crest, nonfinite, guard."""
    is_lossy: bool = False
    """Whether sums over TP are rounded at present."""
    accuracy_loss: float | None = None
    """Of the held-out text, as lossy sums have it; null before the first check."""
    accuracy_exact_loss: float | None = None
    rank_memory: tuple[int, ...] = ()
    """Resident bytes (on a GPU: allocated), by rank."""
    rank_memory_limit: tuple[int, ...] = ()
    stage_seconds: tuple[float, ...] = ()
    """Seconds that each stage has computed, without waiting."""
    proposed_layers: tuple[int, ...] | None = None
    """A layout of layers that would be faster by these times, if there is one."""


@dataclass(frozen=True)
class Failed:
    """The engine has ended; what was under way is lost."""

    error: str
    is_input_error: bool = False
    """Whether the model or the settings are wrong, so that no other start would do better."""


Message = AddRequest | AbortRequest | Stop | Tokens | PromptLogprobs | Ready | Stats | Failed
_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (AddRequest, AbortRequest, Stop, Tokens, PromptLogprobs, Ready, Stats, Failed)
}


def encode(message: Message) -> bytes:
    """One line."""
    content = {"type": type(message).__name__, **vars(message)}
    # Not dataclasses.asdict, which copies all there is: this is done for each token.
    return json.dumps(content, separators=(",", ":"), default=vars).encode() + b"\n"


def decode(line: bytes) -> Message:
    """What ``encode`` made the line of."""
    content: dict[str, Any] = json.loads(line)
    kind = _TYPES[content.pop("type")]
    if kind is AddRequest:
        content["sampling"] = SamplingParams(**_with_tuples(content["sampling"]))
    if kind in (Tokens, PromptLogprobs):
        content["logprobs"] = [
            TokenLogprobs(t["token"], t["logprob"], tuple((i, p) for i, p in t["top"]))
            for t in content["logprobs"]
        ]
    message: Message = kind(**_with_tuples(content))
    return message


def _with_tuples(content: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
