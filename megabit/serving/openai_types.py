"""Bodies of requests, as the OpenAI API has them and vLLM adds to them.

A field that would change the answer and is not supported is refused, and so is one that nobody
knows: silence would look like an effect. Types are strict, numbers are finite.
"""

import difflib
import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from megabit.inference.sampling_problems import MAX_ANSWERS
from megabit.serving.api_error import ApiError

MAX_PROMPTS = 1024
MAX_LOGPROBS = 20
MAX_STOPS = 16
_MAX_STOP_CHARS = 1024
_SMALLEST_TEMPERATURE = 1e-4
_SUBJECT = re.compile(r"^(Input|String|List|Dictionary|Value) should ")

Finite = Annotated[float, Field(allow_inf_nan=False)]

_IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("parallel_tool_calls", "prompt_cache_retention", "prompt_cache_options", "do_sample"),
    }
)
"""Change no answer here."""

_UNSUPPORTED = frozenset(
    {
        *("suffix", "logit_bias", "tools", "tool_choice", "functions", "function_call", "audio"),
        *("modalities", "prediction", "web_search_options", "guided_json", "guided_regex"),
        *("guided_choice", "guided_grammar", "structured_outputs", "use_beam_search"),
        *("reasoning_effort", "verbosity"),
    }
)
"""Known, and not to be had; fine if they ask for nothing."""


def _as_list(value: Any) -> Any:
    """One stop text is as good as a list of one."""
    return [] if value is None else [value] if isinstance(value, str) else value


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool | None = False


class SamplingFields(BaseModel):
    """What both kinds of request have."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]],
        Field(max_length=MAX_STOPS),
        BeforeValidator(_as_list),
    ] = []
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    first_token_timeout: Annotated[Finite, Field(gt=0)] | None = None
    """Seconds; shorter than ``server.first_token_timeout_s``, if it is to have an effect."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        """Leave out what has no effect, refuse what has one that is not to be had."""
        if not isinstance(body, dict):
            raise ValueError("must be an object")
        kept = {}
        for key, value in body.items():
            if key in _UNSUPPORTED:
                if value not in (None, [], {}, "", "none", "auto", ["text"]):
                    raise ApiError(
                        400, f"{key} is not supported.", param=key, code="unsupported_parameter"
                    )
            elif key not in _IGNORED:
                kept[key] = value
        return kept

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def drawn_at(self) -> float:
        """The temperature; what is next to 0 is 0, as logits divided by it are no numbers."""
        wanted = 1.0 if self.temperature is None else self.temperature
        return 0.0 if wanted < _SMALLEST_TEMPERATURE else wanted


class CompletionRequest(SamplingFields):
    """``POST /v1/completions``."""

    prompt: list[str] | list[list[int]]
    """One or several; one may come without its list."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, prompt: Any) -> list[str] | list[list[int]]:
        if isinstance(prompt, str):
            return [prompt]
        wrong = "must be a text, a list of texts, a list of token ids, or a list of such lists"
        if not isinstance(prompt, list) or not prompt:
            raise ValueError(wrong)
        if type(prompt[0]) is int:
            prompt = [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise ValueError(f"has {len(prompt)} prompts; at most {MAX_PROMPTS} in one request")
        if all(isinstance(p, str) for p in prompt):
            return prompt
        if all(isinstance(p, list) and all(type(i) is int for i in p) for p in prompt):
            return prompt
        raise ValueError(wrong)

    @model_validator(mode="after")
    def _consistent(self) -> "CompletionRequest":
        answers = len(self.prompt) * (self.n or 1)
        if answers > MAX_PROMPTS:
            text = f"prompt and n: {answers} answers; at most {MAX_PROMPTS} in one request."
            raise ApiError(400, text, param="n", code="invalid_value")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(
                400,
                "best_of is not supported, unless it is n.",
                param="best_of",
                code="unsupported_parameter",
            )
        return self


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ResponseFormat(BaseModel):
    type: Literal["text"]


class ChatRequest(SamplingFields):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs takes logprobs: true.", param="top_logprobs")
        return self

    @property
    def longest_answer(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def parse(kind: type[SamplingFields], body: bytes) -> Any:
    """The request in ``body``. Raises ApiError: 400, naming the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _explained(kind, error) from None


def _explained(kind: type[SamplingFields], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=True)[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"The body is not valid JSON: {reason}.", code="invalid_json")
    place = [part for part in first["loc"] if not _is_branch(part)]
    path = ".".join(str(part) for part in place)
    if not place:
        return ApiError(400, "The body must be a JSON object.", code="invalid_type")
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(place[-1]), list(kind.model_fields), n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        text = f"{path} is not a field of this request.{hint}"
        return ApiError(400, text, param=path, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{path}: is missing.", param=path, code="missing")
    return ApiError(400, f"{path}: {_grammar(first['msg'])}.", param=path, code="invalid_value")


def _grammar(told: str) -> str:
    """What pydantic says of a value, as the rest of a sentence that begins with its name."""
    text = _SUBJECT.sub("must ", told.removeprefix("Value error, "))
    text = text.replace("must be a valid", "must be a").replace(" after validation", "")
    return text.replace("must be a integer", "must be an integer")


def _is_branch(part: str | int) -> bool:
    """Names that pydantic gives to the members of a union."""
    return isinstance(part, str) and (
        part in {"str", "int", "float", "bool"} or part.startswith(("list[", "constrained-"))
    )
