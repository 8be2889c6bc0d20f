"""What is wrong with how an answer is to be drawn, before an engine hears of it."""

import math

from megabit.inference.messages import SamplingParams

MAX_ANSWERS = 64
MAX_LOGPROBS = 100


def sampling_problems(sampling: SamplingParams) -> list[str]:
    """One line each; none if all is well."""
    s = sampling
    ranges: dict[str, tuple[float | None, float, float]] = {
        "max_tokens": (s.max_tokens, 0, math.inf),
        "temperature": (s.temperature, 0, 100),
        "top_k": (s.top_k, 0, math.inf),
        "min_p": (s.min_p, 0, 1),
        "repetition_penalty": (s.repetition_penalty, 0.01, 100),
        "presence_penalty": (s.presence_penalty, -100, 100),
        "frequency_penalty": (s.frequency_penalty, -100, 100),
        "n": (s.n, 1, MAX_ANSWERS),
        "logprobs": (s.logprobs, 0, MAX_LOGPROBS),
        "prompt_logprobs": (s.prompt_logprobs, 0, MAX_LOGPROBS),
    }
    problems = [
        f"{name}: must be {low:g} to {high:g}, not {value:g}"
        if math.isfinite(high)
        else f"{name}: must be {low:g} or more, not {value:g}"
        for name, (value, low, high) in ranges.items()
        if value is not None and not low <= value <= high  # NaN is in no range
    ]
    if not 0 < s.top_p <= 1:
        problems.append(f"top_p: must be more than 0 and at most 1, not {s.top_p:g}")
    stop: object = s.stop  # a text by itself is a sequence of texts to a type checker
    if isinstance(stop, str) or not all(s.stop):
        problems.append(f"stop: must be a tuple of texts that are not empty, not {s.stop!r}")
    return problems
