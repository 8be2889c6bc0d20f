"""``megabit generate``: continue a prompt on the terminal."""

import json
import sys
import time
import unicodedata
from typing import TYPE_CHECKING, Annotated

import typer

from megabit.cli.arguments import ModelPath, ServingSettings
from megabit.cli.exit_codes import INTERRUPTED
from megabit.errors import UserError

if TYPE_CHECKING:
    from megabit.inference.engine import Engine
    from megabit.inference.messages import SamplingParams


def generate(
    ckpt: ModelPath,
    prompt: Annotated[
        str, typer.Argument(help="Text to continue; - reads standard input.", show_default=False)
    ],
    settings: ServingSettings = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", min=1)] = 128,
    temperature: Annotated[
        float, typer.Option(help="0: always the likeliest token.", min=0, max=100)
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(help="Draw from the so many likeliest tokens; 0: all.", min=0)
    ] = 0,
    top_p: Annotated[
        float, typer.Option(help="Draw from the fewest tokens with this probability.", max=1)
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="The same one gives the same text.", show_default=False)
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="A text that ends the answer; may be given again.", show_default=False),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message in a chat with the model.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON at the end instead.")
    ] = False,
) -> None:
    """Continue a prompt with a model, printing the text as it comes.

    SETTINGS are those of megabit serve: parallel.tp, parallel.pp, engine.\\*.

    Example: megabit generate runs/default "Once upon a time" --seed 1 parallel.tp=2
    """
    from megabit.inference.engine import Engine
    from megabit.inference.messages import SamplingParams

    if top_p <= 0:
        raise UserError(f"--top-p: must be more than 0, not {top_p:g}")
    if stop and not all(stop):
        raise UserError("--stop: must not be empty")
    text = _standard_input() if prompt == "-" else prompt
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    with Engine.open(ckpt, settings or []) as engine:
        ids = (
            engine.text.encode_chat([{"role": "user", "content": text}])
            if chat
            else engine.text.encode(text)
        )
        if as_json:
            _print_json(engine, ids, sampling)
            return
        is_terminal = sys.stdout.isatty()
        try:
            for piece in engine.stream(ids, sampling):
                print(_harmless(piece) if is_terminal else piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print()
            sys.exit(INTERRUPTED)


def _harmless(text: str) -> str:
    """Without what a terminal obeys: a model may have learnt escape sequences."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


def _print_json(engine: "Engine", ids: list[int], sampling: "SamplingParams") -> None:
    start = time.perf_counter()
    (done,) = engine.generate(ids, sampling)
    answer = done.answers[0]
    result = {
        "model": engine.text.name,
        "text": answer.text,
        "finish_reason": answer.finish,
        "prompt_tokens": len(ids),
        "completion_tokens": len(answer.tokens),
        "seconds": round(time.perf_counter() - start, 4),
    }
    print(json.dumps(result, ensure_ascii=False))


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"standard input: not UTF-8 ({error.reason} at byte {error.start})"
        ) from error
