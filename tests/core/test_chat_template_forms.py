"""Forms of contents, reasoning and arguments: each template gets the one that it takes, found by short trial chats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triolet.core.chat_template import ChatTemplate, with_parsed_arguments
from triolet.core.chat_template.forms import MAX_PARSED_CHARS, parsed_arguments
from triolet.errors import ChatTemplateError

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}
PARTS = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
USER = {"role": "user", "content": "Hi"}

# ------------------------------------------------------------------------------------- text and reasoning

SHOWN = "<{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.content }}|{{ m.tool_calls | length }}>{% endfor %}"
TAKES_BOTH = "{% for m in messages if m.role == 'assistant' %}" + SHOWN
# As in gpt-oss.
REFUSES_BOTH = (
    "{% for m in messages if m.role == 'assistant' %}"
    "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}" + SHOWN
)
REFUSES_TEXT = (
    "{% for m in messages if m.role == 'assistant' %}"
    "{% if m.tool_calls and m.content %}{{ raise_exception('no text') }}{% endif %}" + SHOWN
)


def answer(content: Any, **fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": content, "tool_calls": [CALL], **fields}]


@pytest.mark.parametrize(
    ("content", "said"), [("Said.", "Said."), ([{"type": "text", "text": "Said."}], "Said."), (PARTS, "One.\nTwo.")]
)  # fmt: skip
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_the_text_is_the_end_of_the_reasoning_where_a_template_refuses_both_beside_calls(
    content: Any, said: str, name: str
) -> None:
    chat = answer(content, **{name: "Thought."})
    assert ChatTemplate(REFUSES_BOTH).render(chat) == f"<Thought.\n{said}|Thought.\n{said}||1>"


def test_text_and_reasoning_stay_what_they_are_where_a_template_takes_both() -> None:
    chat = answer("Said.", reasoning="Thought.")
    assert ChatTemplate(TAKES_BOTH).render(chat) == "<Thought.|Thought.|Said.|1>"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"content": "Said."}, "<||Said.|1>"),
        ({"content": "", "thinking": "Thought."}, "<Thought.|Thought.||1>"),
        ({"content": "Said.", "thinking": "Thought.", "tool_calls": []}, "<Thought.|Thought.|Said.|0>"),
    ],
    ids=["no reasoning", "no text", "no calls"],
)
def test_text_or_reasoning_alone_and_both_without_calls_stay_what_they_are(
    message: dict[str, Any], shown: str
) -> None:
    chat = [USER, {"role": "assistant", "tool_calls": [CALL], **message}]
    assert ChatTemplate(REFUSES_BOTH).render(chat) == shown


def test_a_template_that_refuses_any_text_beside_calls_says_so_itself() -> None:
    with pytest.raises(ChatTemplateError, match="no text"):
        ChatTemplate(REFUSES_TEXT).render(answer("Said.", thinking="Thought."))


# --------------------------------------------------------------------------------------- parts of a text

READS_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
)
READS_NONE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("role", "rule"),
    [
        ("assistant", "messages[0].role != 'user'"),
        ("assistant", "messages[1].role != 'assistant'"),
        ("system", "messages[-1].role != 'user'"),
        ("tool", "messages[0].role != 'user' or not messages[1].tool_calls"),
        ("tool", "messages[-1].name != messages[1].tool_calls[0].function.name"),
        ("tool", "messages[-1].tool_call_id != messages[1].tool_calls[0].id"),
        ("tool", "messages[1].tool_calls[0].id | length != 9"),
    ],
)
def test_the_chat_of_a_trial_is_one_that_a_strict_template_takes(role: str, rule: str) -> None:
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "content": PARTS, "tool_calls": [call]}
    result = {"role": "tool", "content": PARTS, "tool_call_id": "123456789", "name": "f"}
    chats: dict[str, list[dict[str, Any]]] = {
        "assistant": [{"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS}],
        "system": [{"role": "system", "content": PARTS}, {"role": "user", "content": PARTS}],
        "tool": [{"role": "user", "content": PARTS}, calling, result],
    }
    source = "{% if " + rule + " %}{{ raise_exception('refused') }}{% endif %}"
    source += "{% for m in messages if m.role == '" + role + "' %}{% for p in m.content %}"
    source += "{{ p.text if p is mapping else p }};{% endfor %}{% endfor %}"
    assert ChatTemplate(source).render(chats[role]) == "One.;Two.;"


@pytest.mark.parametrize(("content", "shown"), [(PARTS, "One.\nTwo."), ("Hm.", "Hm.")], ids=["parts", "text"])
def test_a_content_of_a_role_that_is_not_known_is_a_text(content: object, shown: str) -> None:
    source = "{% for m in messages %}{{ m.content if m.content is string else 'text of parts' }}{% endfor %}"
    assert ChatTemplate(source).render([{"role": "critic", "content": content}]) == shown


def test_a_template_that_writes_the_parts_as_data_gets_one_text() -> None:
    source = "{% for m in messages %}{{ m.content }}{{ '' if m.content is string else 'text' }}{% endfor %}"
    assert ChatTemplate(source).render([{"role": "user", "content": PARTS}]) == "One.\nTwo."


@pytest.mark.parametrize(
    ("source", "content", "num_trials"),
    [(READS_PARTS, PARTS, 1), (READS_PARTS, "One.", 2), (READS_NONE, PARTS, 0), (READS_NONE, "One.", 0)],
)
def test_each_form_is_tried_once_and_parts_only_where_the_source_names_their_text(
    source: str, content: Any, num_trials: int
) -> None:
    template = ChatTemplate(source)
    trials: list[object] = []
    render = template._forms._render

    def count(chat: Any) -> str:
        trials.append(chat)
        return render(chat)

    template._forms._render = count
    for _ in range(3):
        template.render([{"role": "user", "content": content}])
    assert len(trials) == num_trials


# ------------------------------------------------------------------------------------ arguments of calls


def test_arguments_of_calls_are_parsed_wherever_a_call_has_them() -> None:
    beside = {"type": "function", "name": "g", "arguments": '{"b": 2}'}
    within = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    [message] = with_parsed_arguments([{"role": "assistant", "content": "x", "tool_calls": (within, beside)}])
    assert message == {
        "role": "assistant",
        "content": "x",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
            {"type": "function", "name": "g", "arguments": {"b": 2}},
        ],
    }


def test_arguments_that_would_hold_up_the_interpreter_are_left_as_text() -> None:
    longest = json.dumps({"a": "x" * (MAX_PARSED_CHARS - len('{"a": ""}'))})
    assert parsed_arguments(longest) == json.loads(longest)
    assert parsed_arguments(f"{longest} ") == f"{longest} "


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        (None, {}),
        ("", {}),
        ("{}", {}),
        (' {"a": [1]} ', {"a": [1]}),
        ({"a": 1}, {"a": 1}),
        ([1], [1]),
        ("[1]", "[1]"),
        ("null", "null"),
        ('{"a": ', '{"a": '),
        ("{" * 9_999, "{" * 9_999),
        ('{"a": ' + "[" * 99 + "]" * 99 + "}", '{"a": ' + "[" * 99 + "]" * 99 + "}"),
    ],
)
def test_arguments_are_a_mapping_where_they_are_the_json_of_one(arguments: object, parsed: object) -> None:
    function = {"name": "f", "arguments": arguments}
    [message] = with_parsed_arguments([{"role": "assistant", "tool_calls": [{"function": function}]}])
    assert message["tool_calls"] == [{"function": {"name": "f", "arguments": parsed}}]


def test_a_call_without_arguments_gets_none() -> None:
    [message] = with_parsed_arguments([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}])
    assert message["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize(
    "message",
    [
        "text",
        None,
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": None},
        {"role": "assistant", "tool_calls": "calls"},
        {"role": "assistant", "tool_calls": {"function": {"name": "f"}}},
        {"role": "assistant", "tool_calls": ["f", None, {"function": "f"}]},
    ],
)
def test_a_message_that_is_not_what_it_must_be_is_left_to_be_refused(message: object) -> None:
    assert with_parsed_arguments([message]) == [message]
