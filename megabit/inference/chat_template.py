"""A chat as one prompt: jinja2 templates, as models carry them.

A template is a program of whoever made the model. It runs in jinja2's sandbox, which keeps it from
Python and from changing what it is given, and in limits of its own, which keep it from running for
ever or filling the memory: loops and calls are counted, texts are bounded. (Lists that hold
themselves many times over are not: no sandbox makes a model from a stranger safe.)

Sources: ``transformers``, ``utils/chat_template_utils.py`` (what templates may count on); jinja2,
``sandbox.py``.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from threading import Lock
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megabit.errors import UserError

MAX_TEMPLATE = 1 << 18
"""Characters of a template; those in use have less than a tenth of that."""
MAX_TEXT = 1 << 24
"""Characters of any text that a template makes."""
MAX_STEPS = 500_000
"""Turns of loops while one chat is rendered; a call counts as so many of them as it takes time."""
_CALL_STEPS = 20

DEFAULT_TEMPLATE = (
    "{% if bos_token != eos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] | trim }}{{ eot_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
"""For models without one: that of bitnet-b1.58-2B-4T, with the model's own tokens."""

_ALWAYS_THERE = {"tools": None, "documents": None}
"""In transformers; some templates ask whether they are defined."""
_PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "translate", "format", "format_map"}
"""Methods of texts that make long ones of short ones."""
_NO_FILTERS = (
    *("batch", "center", "format", "indent", "pprint", "random", "slice", "urlize", "wordwrap"),
    "xmlattr",
)
"""The same, and what is no business of a template."""


class ChatTemplate:
    """A template, compiled.

    Args:
        source: jinja2.
        name: the file that it is from, for messages.
        tokens: what it may write as ``bos_token``, ``eos_token`` and so on.

    Raises:
        UserError: it is no template, or too long.
    """

    def __init__(self, source: str, name: str, tokens: Mapping[str, str]) -> None:
        self._name = name
        self._tokens = tokens
        if len(source) > MAX_TEMPLATE:
            raise UserError(f"{name}: a chat template of more than {MAX_TEMPLATE} characters")
        self._environment = _LimitedEnvironment()
        self._lock = Lock()  # the environment counts for one at a time
        try:
            tree = _count_turns(self._environment.parse(source))
            code = self._environment.compile(tree)
            self._template = self._environment.template_class.from_code(
                self._environment, code, self._environment.make_globals(None)
            )
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise UserError(f"{name}: not a chat template ({_reason(error)})") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> str:
        """The prompt of a chat.

        Args:
            messages: each with ``role``, ``content`` and what else the template knows.
            add_generation_prompt: whether it ends where an answer begins.
            more: other variables of the template, such as ``tools``.

        Raises:
            UserError: the template refuses the chat, or fails, or goes beyond its limits.
        """
        variables = {
            **_ALWAYS_THERE,
            **self._tokens,
            **more,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with self._lock:
                self._environment.steps = 0
                return _concatenate(self._template.generate(variables))
        except _RefusedChatError as error:
            raise UserError(f"messages: {_reason(error)}") from error
        except Exception as error:  # a template may raise whatever Python does
            raise UserError(
                f"{self._name}: cannot render these messages: {_reason(error)}"
            ) from error


class _RefusedChatError(TemplateError):
    """By ``raise_exception`` of a template."""


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox, with bounds on time and memory."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self.steps = 0
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = _strftime_now
        self.globals.pop("lipsum", None)
        for name in _NO_FILTERS:
            self.filters.pop(name)
        self.filters["tojson"] = _to_json
        self.filters["join"] = self._join
        self.filters["replace"] = _replace
        self.filters[_TURNS] = self._turns
        self.filters[_CONCATENATE] = _concatenate

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """All calls of a template come here."""
        self._step(_CALL_STEPS)
        name = getattr(function, "__name__", "")
        if isinstance(owner := getattr(function, "__self__", None), str):
            if name == "replace" and len(args) > 1:
                _check_replacement(owner, str(args[0]), str(args[1]))
            if name == "join" and args:
                return _concatenate(_between(owner, self._turns(args[0])))
        return super().call(context, function, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _PADDING:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Nothing to wrap: ``format`` is one of the above."""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers have no use here")
        if operator == "%" and isinstance(left, str | bytes):
            raise SecurityError("texts have no % here")
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | bytes | list | tuple):
                    _check_length(len(one) * (other if isinstance(other, int) else 1))
                elif isinstance(one, int) and abs(one) > 1 << 64:
                    raise SecurityError("a number is too large")
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def _join(self, values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        """Jinja2's filter."""
        if attribute is not None:
            values = (self.getitem(value, attribute) for value in values)
        return _concatenate(_between(str(d), self._turns(values)))

    def _turns(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._step()
            yield value

    def _step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > MAX_STEPS:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")


_TURNS = "_turns"
_CONCATENATE = "_concatenate"


def _count_turns(tree: nodes.Template) -> nodes.Template:
    """Let ``_LimitedEnvironment`` see each turn of a loop, and each ``~``."""
    for loop in [*tree.find_all(nodes.For)]:
        loop.iter = nodes.Filter(loop.iter, _TURNS, [], [], None, None, lineno=loop.lineno)
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for name, value in parent.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(parent, name, _as_filter(value))
            elif isinstance(value, list):
                value[:] = [_as_filter(v) if isinstance(v, nodes.Concat) else v for v in value]
    return tree


def _as_filter(concat: nodes.Concat) -> nodes.Filter:
    texts = nodes.List(concat.nodes, lineno=concat.lineno)
    return nodes.Filter(texts, _CONCATENATE, [], [], None, None, lineno=concat.lineno)


def _concatenate(values: Iterable[Any]) -> str:
    length, parts = 0, []
    for value in values:
        text = str(value)
        length += len(text)
        _check_length(length)
        parts.append(text)
    return "".join(parts)


def _between(separator: str, values: Iterable[Any]) -> Iterator[str]:
    for number, value in enumerate(values):
        if number:
            yield separator
        yield str(value)


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    _check_replacement(text, old, new)
    return str(text.replace(old, new, -1 if count is None else count))


def _check_replacement(text: str, old: str, new: str) -> None:
    _check_length(len(text) + text.count(old) * len(new))


def _check_length(length: int) -> None:
    if length > MAX_TEXT:
        raise SecurityError(f"it makes a text of more than {MAX_TEXT} characters")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja2's escapes for HTML, which a model has never seen."""
    if indent is not None and indent > 16:
        raise SecurityError("tojson: the indent is too large")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:100])


def _refuse(message: Any) -> NoReturn:
    raise _RefusedChatError(str(message))


def _reason(error: BaseException) -> str:
    """One line."""
    text = " ".join(str(error).split())[:300] or type(error).__name__
    line = getattr(error, "lineno", None)
    return text if line is None else f"line {line}: {text}"
