"""What a chat template's statements cost, which attributes it reaches, and what a rendering is told and tells."""

from __future__ import annotations

from typing import Any

import pytest

from triolet.core.chat_template import MAX_SOURCE_CHARS, ChatTemplate
from triolet.core.chat_template.operations import Meter
from triolet.core.chat_template.program import TemplateProgram
from triolet.core.chat_template.sandbox import Sandbox
from triolet.errors import ChatTemplateError

PLENTY = 10**9
USER = {"role": "user", "content": "Hi"}
RECURSIVE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}"


def rendered(source: str, meter: Meter | None = None, **variables: Any) -> str:
    program = TemplateProgram.compile(source, Meter(PLENTY))
    return program.run(variables, meter=meter or Meter(PLENTY), max_output_chars=1_000_000)


def cost_of(source: str, **variables: Any) -> int:
    meter = Meter(PLENTY)
    rendered(source, meter, **variables)
    return meter.work


# ------------------------------------------------------------------------------------------- costs


@pytest.mark.parametrize(
    ("source", "units"),
    [
        ("only text", 0),
        ("{{ 1 }}", 1),
        ("{{ x }}", 3),
        ("{{ 1 + 2 }}", 1 + 1),
        ("{{ 1 < 2 }}", 5 + 1),
        ("{{ 1 < 2 < 3 }}", 10 + 1),
        ("{{ 'a' ~ x }}", 1 + 3 + 3),
        ("{{ (x ~ x) == 'a' }}", 3 + 3 + 4 + 5 + 1),
        ("{{ x[1:] }}", 2 + 2),
        ("{{ x[1] }}", 1),
        ("{% set d = {x: 1} %}", 3),
        ("{% set d = {'a': 1} %}", 0),
        ("{% set d = {}[(1, 2)] %}", 4),
        ("{% set d = namespace(a=1) %}", 10 + 1),
        ("{% set d = dict(a=1) %}", 10 + 1),
        ("{% set d = dict([('a', 1)]) %}", 10 + 1 + 6),
        ("{% set d = range(5) %}", 10 + 1 + 5),
        ("{% set d = range(1, 5) %}", 10 + 2 + 4),
        ("{% set d = 'ab'.upper() %}", 10 + 1 + 1),
        ("{% set d = [1, 2].index(2) %}", 10 + 1 + 5),
        ("{% set d = 'a{}'.format(5) %}", 10 + 1 + 3 + 1 + 1 + 1 + 1),
        ("{% set d = '{:64}'.format(5) %}", 10 + 1 + 5 + 1 + 1 + 2 + 2),
        # The body costs a unit for each node of the loop: its target, call, function and argument, output and text.
        ("{% for i in range(3) %}x{% endfor %}", 14 + 3 * 6),
        ("{% for i in range(3) %}" + "x" * 64 + "{% endfor %}", 14 + 3 * 7),
        ("{% for i in range(3) if i %}x{% endfor %}", 14 + 3 * 7 + 2 * 7),
        ("{% for i in range(3) if not true %}x{% endfor %}", 14 + 3 * 8),
        ("{% for i in [1] %}{% set d = loop.changed(i) %}{% endfor %}", 9 + 10 + 2 + 3),
        ("{% macro f() %}x{% endmacro %}{% set d = f() %}{% set d = f() %}", 2 * (10 + 2)),
        ("{% macro f() %}x{% endmacro %}{% set d = f(a=1) if false %}", 0),
    ],
)
def test_a_statement_costs_its_nodes_its_calls_and_what_they_read(source: str, units: int) -> None:
    assert cost_of(source, x="x" * 128) == units


def test_an_inner_loop_is_charged_for_each_of_its_rounds() -> None:
    # The body of the outer loop has ten nodes, that of the inner one six. In a loop, a call takes its variables, too.
    source = "{% for a in [1] %}{% for b in range(4) %}x{% endfor %}{% endfor %}"
    assert cost_of(source) == 10 + (10 + 2 + 4) + 4 * 6


def test_a_range_may_have_a_hundred_thousand_items_and_not_more() -> None:
    assert rendered("{{ range(100000) | length }}") == "100000"
    with pytest.raises(ChatTemplateError, match="a range passed the limit of 100000 items"):
        rendered("{{ range(100001) | length }}")


def test_calls_may_be_nested_64_levels_and_not_more() -> None:
    assert rendered(RECURSIVE + "{{ f(63) }}{{ f(63) }}") == ""
    with pytest.raises(ChatTemplateError, match="nested deeper than the limit of 64"):
        rendered(RECURSIVE + "{{ f(64) }}")


def test_a_call_that_failed_is_over() -> None:
    meter = Meter(PLENTY)
    environment = Sandbox(meter)
    context = environment.from_string("").new_context()
    for _ in range(100):
        with pytest.raises(TypeError):
            environment.call(context, len)
    assert environment.call(context, len, [1, 2]) == 2


# ------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{{ {}.missing }}", ""),
        ("{{ namespace(a=1).a }}", "1"),
        ("{{ namespace({'a': 1}, b=2).b }}", "2"),
        ("{% set n = namespace() %}{% set n.a = 5 %}{{ n.a }}{{ n }}", "5<namespace>"),
        ("{{ dict({'a': 1}.items() | list).a }}", "1"),
        ("{{ [1, 2] | map('string') | join }}", "12"),
        ("{{ [1, 2, 3] | select('odd') | list }}", "[1, 3]"),
        ("{{ 'a'.upper() }}{{ [1].copy() }}{{ (1, 2).count(1) }}{{ {'k': 1}.get('k') }}", "A[1]11"),
        ("{{ '{0}-{k}'.format(1, k=2) }}", "1-2"),
        ("{{ dict({'a': 1} | items).a }}", "1"),
    ],
)
def test_a_template_writes(source: str, text: str) -> None:
    assert rendered(source) == text


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ namespace(_a=1) }}", "takes no names that begin with an underscore"),
        ("{{ namespace({1: 2}) }}", "takes no names that begin with an underscore"),
        ("{% set n = namespace() %}{% set n._a = 1 %}", "takes no names that begin with an underscore"),
        ("{{ namespace(a=1).__class__ }}", "the attribute '__class__' of '_Namespace' is out of reach"),
        ("{{ [].append }}", "the attribute 'append' of 'list' is out of reach"),
        ("{{ 'a'.encode() }}", "the attribute 'encode' of 'str' is out of reach"),
        ("{{ {}.update }}", "the attribute 'update' of 'dict' is out of reach"),
        ("{{ range }}", "has no text"),
        ("{{ [1] | map('string') }}", "has no text"),
        ("{{ 'a' ~ ([1] | map('string')) }}", "has no text"),
        ("{{ [1] | map(5) | list }}", "the name of a filter or test must be a string"),
        ("{{ [1] | select(5) | list }}", "the name of a filter or test must be a string"),
        ("{{ '%d' is odd }}", "the test 'odd' takes a number"),
        ("{{ raise_exception(5) }}", "refused the messages: no reason given"),
        ("{{ raise_exception('why') }}", "refused the messages: why"),
        ("{{ {}[(1, 2)].y }}", "a value is undefined"),
        ("{{ unknown.y }}", "'unknown' is undefined"),
        ("{{ {}.k.y }}", "has no attribute 'k'"),
    ],
)
def test_what_is_out_of_reach_or_has_no_text_is_refused(source: str, complaint: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        rendered(source)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% extends 'a' %}",
        "{% include 'a' %}",
        "{% import 'a' as a %}",
        "{% from 'a' import b %}",
        "{% block a %}{% endblock %}",
    ],
)
def test_a_template_stands_alone(source: str) -> None:
    with pytest.raises(
        ChatTemplateError, match=r"in line 2: .*neither use other templates nor be used by them"
    ):
        rendered("\n" + source)


def test_a_closed_environment_refers_to_nothing_of_its_own() -> None:
    environment = Sandbox(Meter(PLENTY))
    environment.close()
    environment.close()
    assert not vars(environment).keys() & {"filters", "tests", "globals", "finalize", "extensions"}


def test_only_the_method_format_of_a_plain_text_is_replaced() -> None:
    environment = Sandbox(Meter(PLENTY))
    safe = environment.wrap_str_format("{:>3}".format)
    assert safe is not None and safe(5) == "  5"
    others: list[Any] = ["a".upper, 5, type("Text", (str,), {})("{}").format, [].copy]
    assert [environment.wrap_str_format(other) for other in others] == [None] * 4


# -------------------------------------------------------------------------------------- a rendering


def test_the_output_may_reach_its_limit_and_not_pass_it() -> None:
    program = TemplateProgram.compile("{{ x }}{{ x }}", Meter(PLENTY))
    assert program.run({"x": "abc"}, meter=Meter(PLENTY), max_output_chars=6) == "abcabc"
    with pytest.raises(ChatTemplateError, match="output passed the limit of 5 characters") as caught:
        program.run({"x": "abc"}, meter=Meter(PLENTY), max_output_chars=5)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("\n\n{{ 1 / 0 }}", "the chat template failed in line 3: division by zero"),
        ("\n{% macro f() %}\n{{ 1 / 0 }}{% endmacro %}\n{{ f() }}", "failed in line 3: division by zero"),
        ("\n{{ range(100001) }}", "was stopped in line 2: a range passed the limit"),
        ("{{ {}['a'][x] }}", "failed in line 1: "),
        ("{{ 'abc'.index('x') }}", "failed in line 1: ValueError"),
        ("\n{% if %}", "failed in line 2: "),
    ],
)
def test_an_error_names_the_line_of_the_template_and_what_went_wrong(source: str, complaint: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        rendered(source)
    assert complaint in str(caught.value)


def test_a_source_may_have_a_quarter_of_a_million_characters_and_not_more() -> None:
    source = "{#" + " " * (MAX_SOURCE_CHARS - 4) + "#}"
    assert ChatTemplate(source).render([USER]) == ""
    with pytest.raises(ChatTemplateError, match="no longer than 250000 characters; got 250001") as caught:
        ChatTemplate(source + "x")
    assert caught.value.field == "chat_template"


def test_a_template_knows_its_source_and_what_it_reads() -> None:
    source = "{{ bos_token }}{{ messages }}{{ tools }}{{ documents }}{{ enable_thinking }}"
    template = ChatTemplate(source)
    assert template.source == source
    assert template.reads_tools
    assert template.variables == {"documents", "enable_thinking"}
    assert not ChatTemplate("{{ messages }}").reads_tools


def test_a_template_is_told_to_begin_an_answer_unless_the_caller_says_otherwise() -> None:
    template = ChatTemplate(
        "{{ messages[0].content }}{% if add_generation_prompt %}A:{% endif %}{{ eos_token }}"
    )
    assert template.render([USER]) == "HiA:"
    assert template.render([USER], add_generation_prompt=False) == "Hi"
    assert ChatTemplate(template.source, eos_token="E").render([USER]) == "HiA:E"


def test_a_last_message_is_continued_only_if_the_caller_says_so() -> None:
    template = ChatTemplate("{{ messages[0].content }}<end>")
    assert template.render([USER]) == "Hi<end>"
    assert template.render([USER], continue_final_message=True) == "Hi"


def test_of_several_values_that_are_not_read_the_first_by_name_is_named() -> None:
    with pytest.raises(ChatTemplateError, match="reads no value named 'a'") as caught:
        ChatTemplate("x").render([USER], b=1, a=1)
    assert caught.value.field == "chat_template_kwargs"


def test_compiling_is_charged_to_no_rendering() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", max_work=30)
    assert [template.render([USER]) for _ in range(5)] == ["Hi"] * 5
