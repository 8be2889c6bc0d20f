"""Chat templates: what they render, and what those that mean harm cannot do."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from megabit.errors import UserError
from megabit.inference.chat_template import DEFAULT_TEMPLATE, MAX_TEMPLATE, ChatTemplate

TOKENS = {"bos_token": "<bos>", "eos_token": "<end>", "eot_token": "<eot>"}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " <b>Hi</b> & 'you' \n"},
    {"role": "assistant", "content": "Hello 👋"},
    {"role": "user", "content": "1+1?"},
]
FEATURES = """\
{%- set ns = namespace(seen=0) %}
{% macro turn(m) -%}
    <|{{ m.role }}|>{{ m['content'] | trim }}
{%- endmacro %}
{% if messages[0]['role'] == 'system' %}
    {%- set system, rest = messages[0]['content'], messages[1:] %}
    {{- bos_token + system ~ '\\n' }}
{% endif %}
{% for message in rest %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
{{ loop.index0 }}/{{ loop.length }}{{ turn(message) }}{{ eos_token if loop.last else ',' }}
    {%- set ns.seen = ns.seen + message.content | length %}
{% endfor %}
{{ ns.seen }} {{ messages | tojson }} {{ tools | tojson(indent=2) if tools is defined }}
{{ messages | map(attribute='role') | join('|') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ 7 % 4 }}
{{ 'a-b'.split('-') | last }} {{ 'x' * 3 }} {{ (1, 2) + (3,) }}
{%- for key, value in messages[0].items() %}
 {{ key | upper }}={{ value.replace('B', 'b') }}{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, "model/chat.jinja", TOKENS)


def test_the_default_is_that_of_2b4t() -> None:
    assert template(DEFAULT_TEMPLATE).render(CHAT[1:]) == (
        "<bos>User: <b>Hi</b> & 'you'<eot>Assistant: Hello 👋<eot>User: 1+1?<eot>Assistant: "
    )
    assert template(DEFAULT_TEMPLATE).render(CHAT[:1], False) == "<bos>System: Be brief.<eot>"


def test_a_text_that_is_begun_by_what_ends_it_is_not_begun_twice() -> None:
    one = ChatTemplate(DEFAULT_TEMPLATE, "x", dict.fromkeys(TOKENS, "<end>"))
    assert one.render(CHAT[3:]) == "User: 1+1?<end>Assistant: "


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("source", [DEFAULT_TEMPLATE, FEATURES])
def test_they_render_as_in_transformers(source: str, add_generation_prompt: bool) -> None:
    tools = [{"name": "sum", "parameters": {"ä": [1, None, 2.5]}}]
    (theirs,), _ = render_jinja_template(
        [CHAT], chat_template=source, add_generation_prompt=add_generation_prompt, x=1, **TOKENS
    )
    assert template(source).render(CHAT, add_generation_prompt) == theirs
    (theirs,), _ = render_jinja_template([CHAT], tools=tools, chat_template=source, **TOKENS)
    assert template(source).render(CHAT, False, tools=tools) == theirs


def test_a_template_may_refuse_a_chat() -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system\nhere') }}{% endif %}"
    )
    with pytest.raises(UserError, match=r"^messages: no system here$"):
        template(source).render(CHAT)
    assert template(source).render(CHAT[1:]) == ""


def test_the_date_is_there() -> None:
    assert template("{{ strftime_now('%Y') }}").render(CHAT).isdecimal()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for %}", "line 1"),
        ("{{ 'open", "line 1"),
        ("{% if x %}", "end of template"),
        ("x" * (MAX_TEMPLATE + 1), "characters"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "chat template"),
    ],
)
def test_what_is_no_template_is_refused(source: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"^model/chat\.jinja: .*{reason}"):
        template(source)


GROW = (
    "{% set ns = namespace(x='aaaaaaaa') %}"
    "{% for i in range(90) %}{% set ns.x = EXPR %}{% endfor %}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
        GROW.replace("EXPR", "ns.x ~ ns.x"),
        GROW.replace("EXPR", "ns.x + ns.x"),
        GROW.replace("EXPR", "ns.x * 2"),
        GROW.replace("EXPR", "ns.x | replace('a', ns.x)"),
        GROW.replace("EXPR", "ns.x.replace('a', ns.x)"),
        GROW.replace("EXPR", "ns.x | join(ns.x)"),
        GROW.replace("EXPR", "ns.x.join(ns.x)"),
        GROW.replace("'aaaaaaaa'", "9").replace("EXPR", "ns.x * ns.x"),
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * 'a' }}",
        "{{ [1] * 10000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ 'a' | center(10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ [1] | batch(10000000000, 1) | list }}",
        "{{ [1] | tojson(indent=10000000000) }}",
        "{% for i in range(9999) %}{{ messages * 100 }}{% endfor %}",
    ],
)
def test_time_and_memory_have_limits(source: str) -> None:
    with pytest.raises(UserError, match=r"^model/chat\.jinja: ") as error:
        template(source).render(CHAT)
    assert len(error.value.problems) == 1
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ strftime_now.__globals__['os'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].clear() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}",
        "{{ undefined_thing.x }}",
        "{{ 1 / 0 }}",
    ],
)
def test_python_and_the_messages_are_out_of_reach(source: str) -> None:
    chat = [dict(message) for message in CHAT]
    with pytest.raises(UserError, match=r"^model/chat\.jinja: cannot render"):
        template(source).render(chat)
    assert chat == CHAT


def test_a_render_that_failed_does_not_count_for_the_next() -> None:
    both = template("{% for i in range(n) %}{% for j in range(9000) %}{% endfor %}{% endfor %}ok")
    with pytest.raises(UserError, match="steps"):
        both.render(CHAT, n=9000)
    assert [both.render(CHAT, n=40) for _ in range(3)] == ["ok"] * 3
