from __future__ import annotations

import contextlib
import enum
import gc
import os
import subprocess
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scale import one_in
from triolet.core.chat_template import DEFAULT_MAX_WORK, MAX_SOURCE_CHARS, ChatTemplate
from triolet.core.chat_template.messages import MAX_NESTING
from triolet.errors import ChatTemplateError, InvalidPrompt

Chat = list[dict[str, Any]]

SYSTEM = {"role": "system", "content": "Be brief.\nBe kind. "}
USER = {"role": "user", "content": "  What is <2 & 3>?\n"}
ANSWER = {"role": "assistant", "content": '<think>hm</think>\n\nFive, "I think".'}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}},
        },
        {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": {}}},
    ],
}
RESULTS = [{"role": "tool", "content": '{"sky": "grey"}'}, {"role": "tool", "content": "12:00"}]
AGAIN = {"role": "user", "content": "日本語で 👍🏽"}

CHATS: dict[str, Chat] = {
    "one question": [USER],
    "system": [SYSTEM, USER],
    "two turns": [SYSTEM, USER, ANSWER, AGAIN],
    "tools": [SYSTEM, USER, CALL, *RESULTS, ANSWER, AGAIN],
    "reasoning": [USER, {"role": "assistant", "content": "5", "reasoning": "2+3"}, AGAIN],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells <the> weather & more",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "array", "items": {"type": "integer"}},
                    "unit": {"enum": ["°C", "°F"]},
                },
                "required": ["city"],
            },
        },
    },
]

# Written for these tests in the manner of the templates that models come with.
CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {%- if message.content is not none %}
<|im_start|>{{ message['role'] }}
{{ message.content | trim }}<|im_end|>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""

SYSTEM_MERGED = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = '<<SYS>>\\n' + messages[0]['content'].strip() + '\\n<</SYS>>\\n\\n' %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if message.role == 'tool' or message.tool_calls %}{% continue %}{% endif %}
    {%- set content = system_message ~ message['content'] if loop.index0 == 0 else message.content %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + content.split('</think>')[-1].strip() + ' ' + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""

TOOL_LOOP = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- macro render_type(spec, depth=0) -%}
    {%- if spec.enum is defined -%}{{ spec.enum | map('tojson') | join(' | ') }}
    {%- elif spec.type == 'array' -%}{{ render_type(spec['items'], depth + 1) }}[]
    {%- elif spec.type == 'object' -%}
        { {%- for name, property in spec.properties | dictsort %} {{ name }}
            {{- '?' if name not in (spec.required or []) }}: {{ render_type(property, depth + 1) }}
            {{- ',' if not loop.last }}{% endfor %} }
    {%- else -%}{{ spec.type | default('any') }}@{{ depth }}{% endif -%}
{%- endmacro %}
{%- set ns = namespace(last_user=-1, calls=0) %}
{%- for message in messages if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endfor %}
{%- if tools is not none %}
    {{- '# Tools (' ~ tools | length ~ '), ' + date_string + '\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + '\\n' }}
        {{- tool.function.name ~ ': ' ~ render_type(tool.function.parameters) ~ '\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages[::-1] | reverse %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- set ns.calls = ns.calls + 1 %}
            {{- '<tool_call id=%03d>' | format(ns.calls) }}
            {{- {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
            {%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role in ['tool', 'ipython'] %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{ '<results>' }}{% endif %}
        {{- message.content | string | indent(2, first=true) }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '</results>' }}{% endif %}
    {%- else %}
        {%- if message.reasoning_content is string %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
        {%- generation %}{{ '<|' + message.role | upper + '|>' + message.content | trim }}{% endgeneration %}
    {%- endif %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|ASSISTANT|>' ~ ('<think>' if enable_thinking | default(true)) }}{% endif %}
"""

PICKED = """\
{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list %}
{%- set rest = messages | rejectattr('role', 'in', ['system', 'tool']) | list %}
{{- system | first | default('none', true) | replace('Be', 'Stay') }}|{{ rest | length }}
{%- macro frame(mark) %}{{ mark }}{{ caller(mark * 3) }}{{ mark }}{% endmacro %}
{%- call(text) frame('#') %}{{ text }}{% endcall %}
{%- for role, group in rest | groupby('role') %}{{ role }}:{{ group | length }} {% else %}nobody{% endfor %}
{%- for message in rest %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    {{- loop.cycle('odd', 'even') }}{{ message.content is string and message.content | length }}
{%- endfor %}
{{- documents is none }}{{ tools is defined }}{{ pad_token is defined }}{{ missing }}
"""

TEMPLATES = {"chatml": CHATML, "system merged": SYSTEM_MERGED, "tool loop": TOOL_LOOP, "picked": PICKED}


@pytest.fixture(scope="session")
def truth() -> Any:
    """What transformers' `apply_chat_template(tokenize=False)` comes down to."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(source: str, messages: Chat, **values: Any) -> str:
        # `apply_chat_template` does so.
        messages = [
            {name: value for name, value in message.items() if value is not None} for message in messages
        ]
        return str(render_jinja_template([messages], chat_template=source, **values)[0][0])

    return render


# ---------------------------------------------------------------------------- the same as transformers


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_the_prompt_is_that_of_transformers(
    source: str, chat: Chat, add_generation_prompt: bool, truth: Any
) -> None:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    for tools in (None, TOOLS):
        expected = truth(
            source,
            chat,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            bos_token="<s>",
            eos_token="</s>",
        )
        assert template.render(chat, tools=tools, add_generation_prompt=add_generation_prompt) == expected


HALVES = {
    "a word": "Once upon",
    "a space at its end": "Once upon ",
    "spaces around it": "\n  Once upon a  \n",
    "nothing": "",
    "thoughts": "<think>hm</think>\n\nFive, ",
    "the same twice": "  What is <2 & 3>?",
}
KEEPS, TRIMS = (
    "{% for m in messages %}<" + content + ">{% endfor %}{{ 'A:' if add_generation_prompt }}"
    for content in ("{{ m.role }}: {{ m.content }}", "{{ m.role }}: {{ m.content | trim }}")
)
REWRITES = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
LAST_LEFT_OUT = "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES.keys())
@pytest.mark.parametrize("source", [*TEMPLATES.values(), KEEPS, TRIMS], ids=[*TEMPLATES, "keeps", "trims"])
def test_a_last_message_is_continued_where_transformers_continues_it(
    source: str, half: str, truth: Any
) -> None:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    for chat in ([USER, {"role": "assistant", "content": half}], [SYSTEM, {"role": "user", "content": half}]):
        asked = {"add_generation_prompt": False, "continue_final_message": True}
        try:
            expected = truth(source, chat, tools=None, bos_token="<s>", eos_token="</s>", **asked)
        except ValueError:
            with pytest.raises(ChatTemplateError, match="the last message"):
                template.render(chat, **asked)
        else:
            assert template.render(chat, **asked) == expected


@pytest.mark.parametrize("source", [REWRITES, LAST_LEFT_OUT])
def test_a_message_that_the_template_does_not_show_is_not_continued(source: str, truth: Any) -> None:
    chat = [USER, {"role": "assistant", "content": 'a "quoted" word'}]
    with pytest.raises(ValueError, match="does not appear in the chat"):
        truth(source, chat, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="changes the last message, so that it cannot be continued"):
        ChatTemplate(source).render(chat, add_generation_prompt=False, continue_final_message=True)


def test_a_message_without_a_text_is_not_continued(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"no .content. to continue"):
        truth(CHATML, [USER, {**CALL, "content": None}], continue_final_message=True)
    for content in (None, ""):
        with pytest.raises(InvalidPrompt, match="the last message must have a text"):
            ChatTemplate(CHATML).render(
                [USER, {**CALL, "content": content}], add_generation_prompt=False, continue_final_message=True
            )


def test_values_reach_the_template_as_in_transformers(truth: Any) -> None:
    values: dict[str, Any] = {"enable_thinking": False, "date_string": "1 Jan 2025"}
    template = ChatTemplate(TOOL_LOOP, eos_token="</s>")
    expected = truth(TOOL_LOOP, [USER], tools=TOOLS, add_generation_prompt=True, eos_token="</s>", **values)
    assert template.render([USER], tools=TOOLS, **values) == expected


EXPRESSIONS = [
    "[3, 1, 2] | sort | join(',')",
    "['b', 'A', 'c'] | sort(reverse=true, case_sensitive=true) | list",
    "messages | map(attribute='role') | unique | list",
    "messages | map(attribute='role') | join(' ')",
    "[1, 2, 3, 4, 5] | batch(2, 0) | list",
    "[1, 2, 3, 4, 5] | slice(2) | list",
    "[1, 2, 3] | sum",
    "[[1], [2, 3]] | sum(start=[])",
    "[1, 5, 3] | max ~ [1, 5, 3] | min",
    "'some words here' | title | center(30) | length",
    "'a long sentence about nothing' | truncate(12)",
    "3.14159 | round(2) ~ (7 / 2) | round(method='ceil') | int",
    "'42' | int + '4.5' | float | int",
    "['a', 'b'] | last ~ ['a', 'b'] | first",
    "'abc' | reverse ~ [1, 2] | reverse | list",
    "'<b>' | e",
    "('<b>' | safe) + '<i>'",
    "{'b': 1, 'a': [1, {'c': none}]} | tojson(sort_keys=true, separators=(',', ':'))",
    "'äöü' | tojson(ensure_ascii=true) ~ 'äöü' | tojson",
    "{'a': 1}.items() | list",
    "{'a': 1} | items | list",
    "'%s is %05.2f%%' | format('x', 3.14159)",
    "'%(a)s' % {'a': 1}",
    "'{} {0!r}'.replace('{}', '') ~ '{:>5}|{name}'.format('x', name='y')",
    "'a-b-c'.split('-', 1) ~ 'a-b-c'.rsplit('-')[-1] ~ 'abc'.partition('b')[2]",
    "'a b c'.split(maxsplit=1) ~ 'a\nb'.splitlines(keepends=true) ~ 'a-b'.rsplit('-', maxsplit=1)",
    "'hello'.startswith(('x', 'h')) and 'hello'.endswith('o') and 'hello'.find('l') == 2",
    "'x'.join(['1', '2']) ~ 'xXx'.strip('x') ~ 'abc'.removeprefix('a') ~ 'abc'.upper().isupper()",
    "1 < 2 < 3 and not 1 > 2 and 3 >= 3 and 2 <= 2 and 1 != 2",
    "'a' in 'abc' and 'x' not in ['y'] and 'k' in {'k': 1} and 3 in range(5)",
    "5 is odd and 4 is even and 9 is divisibleby 3 and 'a' is lower and 'A' is upper and 1 is eq 1 and 2 is ge 1",
    "x is undefined and none is none and 1 is number and 'a' is string and [] is iterable and {} is mapping",
    "true is boolean and 1.5 is float and 1 is integer and [] is sequence and 1 is sameas 1 and range is callable",
    "2 ** 10 // 3 % 7 - -1 * 2.5",
    "[1, 2, 3, 4][1:] ~ [1, 2, 3, 4][::-2] ~ 'hello'[:-1] ~ (1, 2, 3)[1]",
    "[1] + [2] * 2",
    "dict(a=1, **{'b': 2}) ~ dict([('c', 3)])",
    "namespace(a=1, self=2).self",
    "'yes' if none else 'no'",
    "'' ~ none ~ true ~ 1.0 ~ [] ~ {} ~ ('a',)",
    "messages[0]['role'] ~ messages[-1].role ~ messages[0].missing ~ messages[0]['missing']",
    "messages | selectattr('content', 'string') | list | length",
    "messages | select('mapping') | list | count ~ messages | reject('mapping') | list | count",
    "none | selectattr('a') | list ~ none | map('upper') | list ~ [] | reject | list",
    "range(3) | list ~ range(1, 10, 4) | list",
    "'\u00e9' | upper | lower | capitalize",
    "[1, 2] | abs if false else -3 | abs",
    "'a\nb\n\nc' | indent(4) ~ 'a\nb' | indent('> ', true, true)",
    "{'z': 1, 'y': 2} | dictsort(by='value') ~ ({'a': 1} | length)",
    "[{'a': 1}, {'a': 2}] | map(attribute='a') | list ~ [{'a': 1}] | map(attribute='b', default=0) | list",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_writes_what_it_writes_in_transformers(expression: str, truth: Any) -> None:
    source = "{{ " + expression + " }}"
    assert ChatTemplate(source).render([SYSTEM, USER]) == truth(source, [SYSTEM, USER])


STATEMENTS = [
    "{% for i in range(9) if i is odd %}{{ i }}{% if loop.last %}!{% endif %}{% endfor %}",
    "{% for x in [[1, [2]], [3]] recursive %}{{ x if x is number else loop(x) }},{% endfor %}",
    "{% set text %}a{{ 1 }}b{% endset %}{{ text | upper }}{% filter upper %}c{% endfilter %}",
    "{% set text | upper %}abc{% endset %}{{ text }}",
    "{% with a = 1 %}{{ a }}{% endwith %}{{ a }}",
    "{% macro f(x, y='d') %}{{ x }}{{ y }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1) }}{{ f(1, 2, 3, z=4) }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}",
    "{% set j = joiner('+') %}{{ j() }}1{{ j() }}2",
    "{% for x in [1, 1, 2] %}{{ loop.changed(x) }}{{ loop.revindex }}{% endfor %}",
    "{% set a, b = (1, 2) %}{{ a }}{{ b }}{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{% endfor %}",
    "  {% if true %}\n  x\n  {% endif %}\n  y  {#- note -#}  \n",
    "{% for x in [] %}{% else %}none{% endfor %}{% raw %}{{ raw }}{% endraw %}",
    "{% autoescape true %}{{ '<' }}{{ messages[0].content ~ ('>' | safe) }}{% endautoescape %}{{ '<' }}",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
]


@pytest.mark.parametrize("source", STATEMENTS)
def test_a_statement_writes_what_it_writes_in_transformers(source: str, truth: Any) -> None:
    assert ChatTemplate(source).render([USER]) == truth(source, [USER])


def test_a_special_token_that_is_missing_is_undefined() -> None:
    template = ChatTemplate(
        "{{ bos_token is defined }}{{ eos_token }}{{ pad_token }}", special_tokens={"pad_token": "P"}
    )
    assert template.render([USER]) == "FalseP"


def test_the_present_time_comes_from_the_caller() -> None:
    source = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}no clock{% endif %}"
    assert ChatTemplate(source).render([USER]) == "no clock"
    assert ChatTemplate(source, strftime_now=lambda form: f"<{form}>").render([USER]) == "<%d %b %Y>"


def test_renderings_share_no_state_and_may_run_in_threads() -> None:
    source = "{% set c = cycler(1, 2) %}{% for m in messages %}{{ c.next() }}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source)
    chats = [[{"role": "user", "content": f"{i}-{j}"} for j in range(20)] for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        rendered = list(pool.map(template.render, chats))
    assert rendered == [template.render(chat) for chat in chats]
    assert rendered[3].startswith("13-023-113-2")


# ------------------------------------------------------------------------------ what the caller hands in


class Role(enum.StrEnum):
    USER = "user"


def test_the_callers_messages_are_copied_to_plain_data() -> None:
    chat = (OrderedDict(role=Role.USER, content=Role.USER, extra=(1, True, 1.5, None)),)
    template = ChatTemplate("{{ messages }}")
    assert template.render(chat) == str([{"role": "user", "content": "user", "extra": [1, True, 1.5, None]}])


TEXT_PARTS = [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]
EVERY = "{% for m in messages %}<{{ m.role }}>"
ONLY_PARTS = (
    EVERY
    + "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
# As in Gemma 3, with parts of a list as they are, and a macro in between.
PARTS_OR_TEXT = (
    "{% macro said(c) %}{% if c is string %}{{ c | trim }}{% else %}"
    "{% for p in c %}{{ p.text | trim }}{% endfor %}{% endif %}{% endmacro %}"
    + EVERY
    + "{{ said(m.content) }}{% endfor %}"
)
FIRST_PART = EVERY + "{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"


@pytest.mark.parametrize("source", [KEEPS, TRIMS, FIRST_PART, "{{ messages[0].content }}"])
def test_text_parts_are_joined_for_a_template_that_cannot_write_all_of_them(source: str) -> None:
    joined = ChatTemplate(source).render([{"role": "user", "content": " a \nb"}])
    assert ChatTemplate(source).render([{"role": "user", "content": TEXT_PARTS}]) == joined
    assert "b" in joined


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
@pytest.mark.parametrize("source", [ONLY_PARTS, PARTS_OR_TEXT], ids=["only parts", "parts or text"])
def test_a_template_that_reads_parts_gets_them_as_in_transformers(source: str, role: str, truth: Any) -> None:
    chat = [{"role": role, "content": TEXT_PARTS}]
    assert ChatTemplate(source).render(chat) == truth(source, chat)


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_a_template_that_reads_only_parts_gets_a_text_as_one(role: str) -> None:
    template = ChatTemplate(ONLY_PARTS)
    assert template.render([{"role": role, "content": "What?"}]) == f"<{role}>What?"


def test_a_template_that_reads_parts_and_texts_gets_a_text_as_it_is() -> None:
    source = PARTS_OR_TEXT.replace("c | trim", "'text: ' ~ c")
    assert ChatTemplate(source).render([{"role": "user", "content": "What?"}]) == "<user>text: What?"


@pytest.mark.parametrize("source", [ONLY_PARTS, PARTS_OR_TEXT], ids=["only parts", "parts or text"])
def test_the_last_part_of_a_message_is_continued_as_in_transformers(source: str, truth: Any) -> None:
    chat = [
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "Once upon "}],
        }
    ]
    asked = {"add_generation_prompt": False, "continue_final_message": True}
    assert ChatTemplate(source).render(chat, **asked) == truth(source, chat, **asked)


def test_a_field_that_is_null_is_not_there() -> None:
    source = (
        "{{ messages[0].keys() | list }}{{ messages[0].name is defined }}{{ 'tool_calls' in messages[0] }}"
    )
    message = {"role": "user", "content": "x", "name": None, "tool_calls": None, "refusal": None}
    assert ChatTemplate(source).render([message]) == "['role', 'content']FalseFalse"
    assert ChatTemplate(source).render([{**message, "tool_calls": []}]) == "['role', 'content']FalseFalse"


@pytest.mark.parametrize("missing", [{}, {"content": None}], ids=["missing", "null"])
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '<' + messages[0].content + '>' }}", "<>"),
        ("{{ messages[0]['content'] | trim }}", ""),
        ("{{ messages[0].content is none }}", "False"),
    ],
)
def test_a_content_that_is_missing_beside_tool_calls_is_an_empty_text(
    source: str, expected: str, missing: dict[str, Any]
) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    message = {"role": "assistant", "tool_calls": calls, **missing}
    assert ChatTemplate(source).render([message]) == expected


CALLED = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
CALLED_END = "{% endfor %}{% endfor %}"
AS_JSON = CALLED + "{{ c.function.arguments | tojson }}" + CALLED_END
ADDED = CALLED + "{{ c.function.name + ': ' + c.function.arguments }}" + CALLED_END
EITHER = CALLED + "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}" + CALLED_END
WRITTEN = CALLED + "{{ c.function.arguments }}" + CALLED_END
REFUSED = "{{ raise_exception('no calls') if messages | length < 3 }}" + AS_JSON


def called(arguments: object) -> Chat:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, AGAIN]


@pytest.mark.parametrize("arguments", ['{"city":"K\\u00f6ln"}', {"city": "Köln"}], ids=["text", "mapping"])
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (AS_JSON, '{"city": "Köln"}'),
        (EITHER, '{"city": "Köln"}'),
        (REFUSED, '{"city": "Köln"}'),
        (ADDED, 'f: {"city": "Köln"}'),
        (WRITTEN, '{"city": "Köln"}'),
    ],
    ids=["as JSON", "either", "refused", "added", "written"],
)
def test_arguments_of_a_call_are_json_once_whatever_form_the_template_takes(
    source: str, expected: str, arguments: object
) -> None:
    assert ChatTemplate(source).render(called(arguments)) == expected


@pytest.mark.parametrize("arguments", ["", None], ids=["empty", "null"])
def test_a_call_without_arguments_has_none(arguments: object) -> None:
    assert ChatTemplate(AS_JSON).render(called(arguments)) == "{}"
    assert ChatTemplate(ADDED).render(called(arguments)) == "f: {}"


@pytest.mark.parametrize("arguments", ['{"city": "Kö', "[1]", '"x"', "[" * 100 + "]" * 100])
def test_arguments_that_are_no_object_are_left_as_they_are(arguments: str) -> None:
    assert ChatTemplate(ADDED).render(called(arguments)) == f"f: {arguments}"


DEEPEST: list[Any] = []
for _ in range(MAX_NESTING - 1):  # and the message around it
    DEEPEST = [DEEPEST]
TOO_DEEP = [[DEEPEST]]


def test_values_may_be_nested_up_to_the_limit() -> None:
    template = ChatTemplate("{{ messages[0].extra is sequence }}")
    assert template.render([{"role": "user", "content": "x", "extra": DEEPEST}]) == "True"
    with pytest.raises(InvalidPrompt, match="no deeper than"):
        template.render([{"role": "user", "content": "x", "extra": [DEEPEST]}])


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "messages cannot be empty"),
        ("hello", "messages must be a list of messages; got str"),
        (None, "messages must be a list of messages; got NoneType"),
        ({"role": "user", "content": "x"}, "messages must be a list of messages; got dict"),
        ([USER, "hello"], "messages[1] must be a mapping; got str"),
        ([{"content": "x"}], "messages[0].role must be a non-empty string; got NoneType"),
        ([{"role": 1, "content": "x"}], "messages[0].role must be a non-empty string; got int"),
        ([{"role": "", "content": "x"}], "messages[0].role must be a non-empty string; got str"),
        (
            [USER, {"role": "user"}],
            "messages[1].content must be a string or a list of text parts; got NoneType",
        ),
        (
            [{"role": "user", "content": 5}],
            "messages[0].content must be a string or a list of text parts; got int",
        ),
        (
            [{"role": "user", "content": None, "tool_calls": []}],
            "messages[0].content must be a string or a list",
        ),
        (
            [{"role": "user", "content": "x", "tool_calls": {}}],
            "messages[0].tool_calls must be a list of mappings",
        ),
        (
            [{"role": "user", "content": "x", "tool_calls": [{"type": "function"}, "f"]}],
            "messages[0].tool_calls must be a list of mappings; got list",
        ),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0] must be a mapping; got str"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].type must be 'text'; got 'image",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text must be a string; got NoneType",
        ),
        ([{"role": "user", "content": "x", "when": object()}], "messages[0].when must be plain data"),
        ([{"role": "user", "content": "x", 1: 2}], "messages[0] must have strings as keys; got int"),
        ([{"role": "user", "content": "x", "deep": TOO_DEEP}], "must be nested no deeper than 64 levels"),
    ],
)
def test_a_wrong_message_is_named_with_field_rule_and_what_came(messages: Any, complaint: str) -> None:
    with pytest.raises(InvalidPrompt) as caught:
        ChatTemplate("{{ messages }}").render(messages)
    assert complaint in str(caught.value)
    assert caught.value.field is not None and caught.value.field.startswith("messages")


@pytest.mark.parametrize("tools", ["weather", [1], [{"f": 1}, 1], {"a": 1}, [{"f": print}]])
def test_wrong_tools_are_refused(tools: Any) -> None:
    with pytest.raises(InvalidPrompt, match="tools"):
        ChatTemplate("{{ tools }}").render([USER], tools=tools)


def test_a_value_that_the_template_does_not_read_is_refused() -> None:
    template = ChatTemplate(TOOL_LOOP)
    assert template.variables == {"date_string", "enable_thinking"}
    with pytest.raises(ChatTemplateError, match="reads no value named 'enable_thinkin'"):
        template.render([USER], enable_thinkin=True)


@pytest.mark.parametrize("name", ["bos_token", "strftime_now", "range", "namespace", "messages", "self"])
def test_values_can_not_take_the_place_of_what_the_template_relies_on(name: str) -> None:
    template = ChatTemplate("{{ " + name + " }}")
    with pytest.raises(ChatTemplateError, match="reads no value named"):
        template.render([USER], **{name: object()})  # type: ignore[arg-type]


def test_values_must_be_plain_data() -> None:
    with pytest.raises(InvalidPrompt, match="effort must be plain data"):
        ChatTemplate("{{ effort }}").render([USER], effort=print)


# ------------------------------------------------------------------------------------ what goes wrong


def test_the_templates_own_refusal_is_passed_on() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate: ' ~ messages[0].role) }}")
    with pytest.raises(ChatTemplateError, match=r"refused the messages: Roles must alternate: user$"):
        template.render([USER])


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("\n\n{% if %}", "line 3"),
        ("{{ a b }}", "expected token"),
        ("{% for x in y %}", "Unexpected end of template"),
        ("{{ 'x' | nonesuch }}", "No filter named 'nonesuch'"),
        ("{{ 'x' is nonesuch }}", "No test named 'nonesuch'"),
        ("{% include 'other' %}", "neither use other templates"),
        ("{% import 'os' as os %}", "neither use other templates"),
        ("{% from 'os' import path %}", "neither use other templates"),
        ("{% block x %}{% endblock %}", "neither use other templates"),
        ("{% extends 'other' %}", "neither use other templates"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
        ("{% if 1 %}" * 150 + "{% endif %}" * 150, "line"),
        ("{{ " + "9" * 5000 + " }}", "the chat template failed"),
        ("x" * (MAX_SOURCE_CHARS + 1), "must be no longer than"),
    ],
)
def test_what_is_no_template_is_refused_when_it_is_compiled(source: str, complaint: str) -> None:
    with pytest.raises(ChatTemplateError, match=complaint):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("\n{{ messages[0].a.b }}", "failed in line 2: 'dict object' has no attribute 'a'"),
        ("{{ nobody.name }}", "'nobody' is undefined"),
        ("{{ 'a' + 1 }}", 'can only concatenate str (not "int") to str'),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a'() }}", "'str' object is not callable"),
        ("{{ {}.get('a').strip() }}", "has no attribute 'strip'"),
        ("{{ [1] | first | tojson(indent='x', nonesuch=1) }}", "nonesuch"),
        ("{{ messages | tojson(separators=1) }}", "failed in line 1"),
        ("{{ [1, 'a'] | sort }}", "not supported between instances of"),
        ("{{ raise_exception(messages) }}", "no reason given"),
        ("{{ messages | map('upper') }}", "a value of type generator has no text"),
        ("{{ 'x' ~ range }}", "has no text"),
    ],
)
def test_a_template_that_fails_says_where_and_how(source: str, complaint: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source).render([USER])
    assert complaint in str(caught.value)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ {}[range].x }}",
        "{{ {}[messages | map('upper')].x }}",
        "{% macro f() %}{% endmacro %}{{ f(1, 2, 3) }}",
        "{{ [1] | map(range) | list }}",
        "{{ [1] | select(namespace) | list }}",
        "{{ raise_exception(range) }}",
        "{{ raise_exception(messages | map('upper')) }}",
        "{{ range | tojson }}",
        "{{ range(range) }}",
        "{{ [range, 1] | sort }}",
        "{{ dict(range) }}",
        "{{ range | int | abs | nonesuch if false }}{{ messages[0] | round }}",
        "{{ (1, namespace()) | join | float | round('x') }}",
        "{{ cycler(**{'x': 1}) }}",
        "{{ '%d' % range }}",
    ],
)
def test_errors_never_show_the_insides_of_the_program(source: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source).render([USER])
    text = str(caught.value)
    assert " at 0x" not in text
    assert not any(
        word in text for word in ("<bound", "<function", "<class", "<generator", "<triolet", "<jinja2")
    )


def test_a_long_message_of_a_template_is_cut() -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate("{{ raise_exception('x' * 100000) }}").render([USER])
    assert len(str(caught.value)) == 1000


# ------------------------------------------------------------------------------------------ ways out


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a template has run of the things that ways out lead to."""
    calls: list[str] = []
    for module, name in ((os, "system"), (os, "popen"), (os, "listdir"), (subprocess, "Popen")):
        monkeypatch.setattr(module, name, lambda *args, name=name, **kwargs: calls.append(name))
    return calls


WAYS_OUT = [
    "''.__class__.__mro__[1].__subclasses__()",
    "''['__class__']['__mro__'][1]['__subclasses__']()",
    "[].__class__.__base__.__subclasses__()[100]",
    "messages[0].__class__.__init__.__globals__",
    "messages[0]['role'].__class__",
    "(1).__class__",
    "1.5.__class__",
    "none.__class__",
    "nobody.__init__.__globals__['os'].system('true')",
    "self.__init__.__globals__.__builtins__.__import__('os').popen('id').read()",
    "self._TemplateReference__context.cycler.__init__.__globals__.os.system('true')",
    "cycler.__init__.__globals__.os.popen('id').read()",
    "joiner.__init__.__globals__.os.system('true')",
    "namespace.__init__.__globals__.os.system('true')",
    "namespace().__class__",
    "namespace()['__class__']",
    "namespace(__class__=1)",
    "lipsum.__globals__['os'].system('true')",
    "range.__self__",
    "range.__func__.__globals__",
    "dict.__func__.__globals__",
    "raise_exception.__globals__['os']",
    "strftime_now.__globals__",
    "''.join.__self__.__class__",
    "''.format.__globals__",
    "''.format.__closure__",
    "'{0.__class__}'.format('')",
    "'{0.__class__.__init__.__globals__}'.format(cycler)",
    "'{0[__class__]}'.format('')",
    "'{x.__class__}'.format_map({'x': 1})",
    "'{0.__class__}' | attr('format')",
    "('' | attr('__class__'))",
    "['{0.__class__}'] | map('format', '') | map(attribute='__class__') | list",
    "[''] | map(attribute='__class__') | list",
    "[''] | map(attribute='__class__.__mro__') | list",
    "[''] | map('attr', '__class__') | list",
    "[''] | selectattr('__class__') | list",
    "[{'a': ''}] | groupby('a.__class__')",
    "[{'a': ''}] | sort(attribute='a.__class__')",
    "[''] | sum(attribute='__class__')",
    "[''] | join(attribute='__class__')",
    "(messages | map('upper')).gi_frame.f_globals",
    "(messages | map('upper')).gi_code",
    "'' | xmlattr",
    "'%s' | format | attr('__class__')",
    "('<b>' | safe).__class__",
    "('<b>' | safe).__html__()",
    "('{0.__class__}' | safe).format('')",
    "messages.append(1)",
    "messages[0].update({'role': 'system'})",
    "messages[0].pop('role')",
    "messages.clear()",
    "messages.__iadd__([1])",
    "[1].sort()",
    "'x'.encode().__class__",
    "'x'.translate({120: 'y'})",
    "(5).to_bytes(8, 'big')",
    "url_for.__globals__",
    "get_flashed_messages.__globals__",
    "config.items()",
    "environment.loader",
    "context.environment",
    "_.__class__",
]


@pytest.mark.parametrize("expression", WAYS_OUT)
def test_no_way_leads_out_of_the_sandbox(expression: str, executed: list[str]) -> None:
    chat = [dict(USER)]
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ " + expression + " }}", strftime_now=lambda form: form).render(chat)
    assert executed == []
    assert chat == [USER]


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in messages %}{{ loop._iterable }}{% endfor %}",
        "{% for x in messages %}{{ loop.__class__ }}{% endfor %}",
        "{% for x in messages recursive %}{{ loop._recurse.__globals__ }}{% endfor %}",
        "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
        "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
        "{% macro m() %}{{ caller.__init__ }}{% endmacro %}{% call m() %}{% endcall %}",
        "{% macro m() %}{{ varargs.__class__ }}{{ kwargs.__class__ }}{% endmacro %}{{ m() }}",
        "{% if self.__class__ %}{% endif %}",
        "{% set f = '{0.__class__}'.format %}{{ f('') }}",
        "{% set ns = namespace() %}{% set ns.__class__ = dict %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{% set messages.x = 1 %}",
        "{% set x = cycler('a') %}{{ x.__init__.__globals__ }}",
        "{% with x = ''.__class__ %}{{ x }}{% endwith %}",
        "{% if ''.__class__ %}{% endif %}",
        "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
        "{% filter attr('__class__') %}x{% endfilter %}",
        "{% set x %}{{ ''.__class__ }}{% endset %}",
        "{% generation %}{{ ''.__class__ }}{% endgeneration %}",
    ],
)
def test_no_statement_leads_out_of_the_sandbox(source: str, executed: list[str]) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render([USER])
    assert executed == []


# -------------------------------------------------------------------------------------------- limits


LONG = "{% set s = 'abcdefgh' * 10000 %}"
WIDE = "{% set w = ['x'] * 50000 %}"
# A value that is small in memory and endless as text.
TWICE = "{% for i in range(60) %}{% set ns.v = [ns.v, ns.v] %}{% endfor %}{% set d = ns.v %}"
DAG = "{% set ns = namespace(v=['x']) %}" + TWICE
TUPLES = DAG.replace("['x']", "('x',)").replace("[ns.v, ns.v]", "(ns.v, ns.v)")
DICTS = DAG.replace("['x']", "{}").replace("[ns.v, ns.v]", "{'a': ns.v, 'b': ns.v}")
EVER = "{% for i in range(100000) %}{% for j in range(100000) %}"
END = "{% endfor %}{% endfor %}"

ENDLESS = {
    "loops in loops": EVER + END,
    "loops that leave everything out": "{% for i in range(99999) %}{% for j in range(99999) if false %}"
    + END,
    "a recursive loop": "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(50) }}",
    "macros that call each other": "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}"
    "{{ a() }}",
    "a caller in a caller": "{% macro f() %}{% call f() %}{% endcall %}{% endmacro %}{{ f() }}",
    "plain text in loops": EVER + "text" * 1000 + END,
    "captured text in loops": "{% set x %}" + EVER + "text" * 1000 + END + "{% endset %}",
    "a long text in loops": LONG + EVER + "{{ s }}" + END,
    "a captured long text in loops": LONG + "{% set x %}" + EVER + "{{ s }}" + END + "{% endset %}",
    "a text that doubles": "{% set ns = namespace(s='x') %}" + EVER + "{% set ns.s = ns.s ~ ns.s %}" + END,
    "a text added to itself": "{% set ns = namespace(s='x') %}" + EVER + "{% set ns.s = ns.s + ns.s %}" + END,
    "a list that doubles": "{% set ns = namespace(s=[1]) %}" + EVER + "{% set ns.s = ns.s + ns.s %}" + END,
    "a long range": "{{ range(10 ** 9) | list }}",
    "a long range, many times": EVER + "{{ range(100000) | length }}" + END,
    "a text many times": "{{ 'x' * 10 ** 10 }}",
    "many times a text": "{{ 10 ** 10 * 'x' }}",
    "a list many times": "{{ [0] * 10 ** 10 }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a product that grows": "{% set ns = namespace(n=3) %}" + EVER + "{% set ns.n = ns.n * ns.n %}" + END,
    "a wide %-format": "{{ '%10000000000d' % 1 }}",
    "a precise %-format": "{{ '%.1000000000f' % 1.5 }}",
    "a %-format that takes its width": "{{ '%*d' % (10 ** 9, 1) }}",
    "a filter format": "{{ '%1000000000s' | format('x') }}",
    "a format that repeats": LONG + "{{ ('%(s)s' * 10000) % {'s': s} }}",
    "a wide str.format": "{{ '{:1000000000}'.format(1) }}",
    "a str.format that takes its width": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "a str.format in other digits": "{{ '{:１００００００００}'.format(1) }}",
    "a str.format that repeats": LONG + "{{ ('{0}' * 10000).format(s) }}",
    "a test that formats": "{{ '%1000000000d' is divisibleby 1 }}",
    "a test that formats too": "{{ '%1000000000d' is odd }}",
    "center": "{{ 'x' | center(10 ** 9) }}",
    "indent": "{{ 'x\n\ny' | indent(10 ** 9) }}",
    "indent by a text": LONG + "{{ ('x\n' * 10000) | indent(s) }}",
    "replace by a long text": LONG + "{{ s | replace('', s) }}",
    "the method replace": LONG + "{{ s.replace('', s) }}",
    "join with a long text": LONG + WIDE + "{{ w | join(s) }}",
    "the method join": LONG + WIDE + "{{ s.join(w) }}",
    "tojson with a wide indent": "{{ [1] | tojson(indent=10 ** 9) }}",
    "tojson with long separators": LONG + WIDE + "{{ w | tojson(separators=(s, s)) }}",
    "batch with filling": "{{ [1] | batch(10 ** 9, 0) | list }}",
    "slice into many": "{{ [1] | slice(10 ** 9) | list }}",
    "round to many digits": "{{ 1 | round(-10 ** 9, 'floor') }}",
    "round an integer": "{{ 5 | round(-10 ** 9) }}",
    "sum of lists": WIDE + "{{ [w] * 50000 | sum(start=[]) }}",
    "attributes of attributes": "{{ range(100000) | map(attribute='a.' * 10000) | list }}",
    "trim with many characters": LONG + EVER + "{{ s.strip(s) }}" + END,
    "search from the end": "{% set s = 'a' * 100000 %}{{ s.rfind('ab' ~ 'a' * 50000) }}",
    "search in loops": LONG + EVER + "{{ 'x' in s }}" + END,
    "comparison in loops": LONG + "{% set t = s ~ '' %}" + EVER + "{{ s == t }}" + END,
    "chained comparison": LONG + "{% set t = s ~ '' %}" + EVER + "{{ 'a' < s < t }}" + END,
    "comparison of lists": WIDE + "{% set v = ['x'] * 50000 %}" + EVER + "{{ w == v }}" + END,
    "membership in a list": WIDE + EVER + "{{ 'y' in w }}" + END,
    "slices in loops": LONG + EVER + "{{ s[1:] | length }}" + END,
    "slices of lists in loops": WIDE + EVER + "{{ w[1:] | length }}" + END,
    "methods in loops": LONG + EVER + "{{ s.upper().isupper() }}" + END,
    "split in loops": LONG + EVER + "{{ s.split('a') | length }}" + END,
    "sorting in loops": WIDE + EVER + "{{ w | sort | length }}" + END,
    "list in loops": WIDE + EVER + "{{ w | list | length }}" + END,
    "select in loops": WIDE + EVER + "{{ w | select('none') | list | length }}" + END,
    "selectattr in loops": WIDE + EVER + "{{ w | rejectattr('x', 'undefined') | first }}" + END,
    "batch in loops": WIDE + EVER + "{{ w | batch(100000) | first | length }}" + END,
    "items in loops": WIDE
    + "{% set d = dict(w | map('list')) %}"
    + EVER
    + "{{ d | items | list | length }}"
    + END,
    "title in loops": LONG + EVER + "{{ s | title | length }}" + END,
    "indent by nothing": "{% set s = '\n' * 80000 %}" + EVER + "{{ s | indent(0) | length }}" + END,
    "str.format of many pieces": "{% set s = '{{' * 80000 %}" + EVER + "{{ s.format() | length }}" + END,
    "text of numbers in loops": WIDE + EVER + "{{ w | string | length }}" + END,
    "loop.changed": WIDE + EVER + "{{ loop.changed(w) }}" + END,
    "written": DAG + "{{ d }}",
    "joined to text": DAG + "{{ '' ~ d }}",
    "as string": DAG + "{{ d | string | length }}",
    "as JSON": DAG + "{{ d | tojson }}",
    "dicts as JSON": DICTS + "{{ d | tojson }}",
    "dicts written": DICTS + "{{ d }}",
    "views written": DICTS + "{{ d.values() }}{{ d.items() }}",
    "in a %-format": DAG + "{{ '%s' % (d,) }}",
    "in str.format": DAG + "{{ '{}'.format(d) }}",
    "in str.format's conversion": DAG + "{{ '{!r}'.format(d) }}",
    "compared": DAG + "{% set e = d %}" + DAG + "{{ d == e }}",
    "compared by a test": DAG + "{% set e = d %}" + DAG + "{{ d is eq e }}",
    "selected by": DAG + "{% set e = d %}" + DAG + "{{ [{'a': d}] | selectattr('a', 'equalto', e) | list }}",
    "searched": DAG + "{% set e = d %}" + DAG + "{{ d in [e] }}{{ [e].index(d) }}",
    "hashed as a key": TUPLES + "{{ {d: 1} }}",
    "hashed to look up": TUPLES + "{{ {}[d] }}",
    "hashed to get": TUPLES + "{{ {}.get(d) }}",
    "hashed by in": TUPLES + "{{ d in {} }}",
    "hashed by dict": TUPLES + "{{ dict([(d, 1)]) }}",
    "hashed by dict, later": TUPLES + "{{ dict([(d, 1)] | map('list')) }}",
    "hashed by namespace": TUPLES + "{{ namespace([(d, 1)]) }}",
    "hashed by unique": TUPLES + "{{ [d] | unique | list }}",
    "hashed by map": TUPLES + "{{ [1] | map(d) | list }}",
    "sorted": DAG + "{% set e = d %}" + DAG + "{{ [d, e] | sort }}",
    "undefined by its name": DAG + "{{ {}[d].x }}",
    "made safe": DAG + "{{ d | safe }}",
    "made upper": DAG + "{{ d is upper }}",
    "made a number": DAG + "{{ d | int }}{{ d | upper }}",
    "escaped while folding constants": "{% autoescape 'x' | center(10 ** 9) %}{% endautoescape %}{{ 10 ** (10 ** 9) }}",
    "refunds": "{% for i in range(999) %}{{ [-10 ** 9] | map('charge!') | list }}{{ range(99999) | last }}{% endfor %}",
}


@pytest.mark.parametrize(
    "source",
    one_in(5, (pytest.param(source, id=name) for name, source in ENDLESS.items())),
)
def test_a_template_without_end_is_stopped_before_it_costs_much(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError):
            ChatTemplate(source, max_work=200_000, max_output_chars=1_000_000).render([USER, AGAIN])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 30_000_000


def test_output_is_cut_off_while_it_is_written() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", max_output_chars=100)
    assert len(template.render([{"role": "user", "content": "x" * 100}])) == 100
    with pytest.raises(ChatTemplateError, match="output passed the limit of 100 characters"):
        template.render([{"role": "user", "content": "x" * 101}])


def test_an_undefined_value_holding_itself_is_written_shortly() -> None:
    source = "{% set ns = namespace() %}{% set ns.a = ns %}{% set ns.b = ns %}{{ ns }}"
    assert ChatTemplate(source).render([USER]) == "<namespace>"


def test_the_same_template_always_costs_the_same() -> None:
    def passes(max_work: int) -> bool:
        try:
            ChatTemplate(TOOL_LOOP, max_work=max_work).render(CHATS["tools"], tools=TOOLS)
        except ChatTemplateError:
            return False
        return True

    low, high = 0, 100_000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    assert [passes(high), passes(high - 1)] * 5 == [True, False] * 5
    assert high < DEFAULT_MAX_WORK / 100


def test_a_long_chat_stays_far_below_the_limit() -> None:
    chat = [SYSTEM, *([USER, {"role": "assistant", "content": "word " * 400}] * 1000)]
    for source in (CHATML, SYSTEM_MERGED, TOOL_LOOP):
        template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", max_work=DEFAULT_MAX_WORK // 3)
        assert len(template.render(chat)) > 2_000_000


# ---------------------------------------------------------------------------------------- any template


def sources() -> Iterator[st.SearchStrategy[str]]:
    yield st.sampled_from(EXPRESSIONS).map(lambda text: "{{ " + text + " }}")
    yield st.sampled_from(WAYS_OUT).map(lambda text: "{{ " + text + " }}")
    yield st.sampled_from(STATEMENTS + list(TEMPLATES.values()) + list(ENDLESS.values()))
    yield st.text("{}%-#|()[]'\"., =xyz0123~+*", max_size=20)


@given(parts=st.lists(st.one_of(*sources()), max_size=4), cut=st.integers(0, 200))
def test_any_source_gives_text_or_the_one_error(parts: list[str], cut: int) -> None:
    source = "".join(parts)
    with contextlib.suppress(ChatTemplateError):
        template = ChatTemplate(source[cut:], max_work=20_000, max_output_chars=100_000)
        assert isinstance(template.render([SYSTEM, USER]), str)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content | trim | upper }}{% endfor %}",
        "{% macro big(m) %}{{ m.content | upper }}{% endmacro %}{% for m in messages %}{{ big(m) }}{% endfor %}",
        "{% macro f(n) %}{% if n %}B{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(messages | length) }}",
        (
            "{% macro a(n) %}{{ caller(n) }}{% endmacro %}{% for m in messages %}"
            "{% call(n) a(m) %}{{ n.content | upper }}{% endcall %}{% endfor %}"
        ),
        (
            "{% macro f(m) %}{{ m.content | upper }}{% endmacro %}{% set ns = namespace(f=f) %}"
            "{% for m in messages %}{{ ns.f(m) }}{% endfor %}"
        ),
        (
            "{% macro f(m) %}{{ m.content | upper }}{% endmacro %}{% set held = [f] %}{% set f = none %}"
            "{% for m in messages %}{{ held[0](m) }}{% endfor %}"
        ),
    ],
    ids=["no macro", "macro", "recursive macro", "call block", "macro in a namespace", "macro in a list"],
)
def test_a_rendering_leaves_nothing_for_the_garbage_collector(source: str) -> None:
    template = ChatTemplate(source)
    template.render([{"role": "user", "content": "a"}])
    gc.collect()
    gc.disable()
    try:
        assert template.render([{"role": "user", "content": "b"}] * 5) == "BBBBB"
        assert gc.collect() == 0
    finally:
        gc.enable()
