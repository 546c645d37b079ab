"""A chat or a pair of texts as a prompt: what each may hold, and what is refused by name."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest

from triolet.core.request.prompt import ChatPrompt, ParsedPrompt, TextPair, check_prompt, parse_prompt
from triolet.errors import InvalidPrompt, PromptTooLong

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def chat(**fields: Any) -> ChatPrompt:
    """The chat of a mapping with messages and further fields."""
    content = parse_prompt({"messages": MESSAGES, **fields}).content
    assert isinstance(content, ChatPrompt)
    return content


def refusal(prompt: object) -> InvalidPrompt:
    with pytest.raises(InvalidPrompt) as caught:
        parse_prompt(prompt)
    return caught.value


def test_a_chat_ends_with_the_beginning_of_an_answer_and_the_template_writes_special_tokens() -> None:
    assert chat() == ChatPrompt(
        messages=MESSAGES,
        tools=None,
        chat_template=None,
        chat_template_kwargs={},
        add_generation_prompt=True,
        continue_final_message=False,
        add_special_tokens=False,
    )
    assert chat(add_generation_prompt=None, tools=None, chat_template_kwargs=None) == chat()


def test_what_a_chat_holds_is_kept() -> None:
    found = chat(
        tools=TOOLS,
        chat_template="{{ messages }}",
        chat_template_kwargs={"enable_thinking": False},
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
    )
    assert (found.messages, found.tools, found.chat_template) == (MESSAGES, TOOLS, "{{ messages }}")
    assert found.chat_template_kwargs == {"enable_thinking": False}
    assert (found.add_generation_prompt, found.continue_final_message) == (False, True)
    assert found.add_special_tokens is True


def test_a_chat_may_end_neither_open_nor_with_the_beginning_of_an_answer() -> None:
    found = chat(add_generation_prompt=False)
    assert (found.add_generation_prompt, found.continue_final_message) == (False, False)


def test_a_field_that_a_chat_does_not_have_is_refused() -> None:
    error = refusal({"messages": MESSAGES, "tool_choice": "auto"})
    assert str(error).startswith("prompt must have no fields but messages, tools, chat_template, ")
    assert str(error).endswith("; got 'tool_choice'")
    assert (error.field, error.got) == ("prompt", "tool_choice")


@pytest.mark.parametrize(
    "name", ["tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"]
)
def test_a_value_with_a_place_of_its_own_is_refused_among_those_for_the_template(name: str) -> None:
    error = refusal({"messages": MESSAGES, "chat_template_kwargs": {name: True, "other": 1}})
    assert str(error) == f"chat_template_kwargs must not hold {name!r}, which has a place of its own"
    assert error.field == "chat_template_kwargs"


@pytest.mark.parametrize("values", [[("a", 1)], ["a"], "a", {1: "a"}, {"a": 1, 2: 1}], ids=repr)
def test_values_for_the_template_are_a_mapping_with_texts_as_keys(values: object) -> None:
    error = refusal({"messages": MESSAGES, "chat_template_kwargs": values})
    assert str(error) == f"chat_template_kwargs must be a mapping with texts as keys; got {values!r}"
    assert (error.field, error.got) == ("chat_template_kwargs", values)


def test_values_for_the_template_may_be_in_any_mapping() -> None:
    values: UserDict[str, Any] = UserDict({"a": 1})
    assert chat(chat_template_kwargs=values).chat_template_kwargs == {"a": 1}


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message", "add_special_tokens"])
@pytest.mark.parametrize("value", [0, 1, "true", []], ids=repr)
def test_a_flag_of_a_chat_is_true_or_false(name: str, value: object) -> None:
    error = refusal({"messages": MESSAGES, name: value})
    assert str(error) == f"{name} must be true or false; got {value!r}"
    assert (error.field, error.got) == (name, value)


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": True}])
def test_a_chat_does_not_end_open_and_with_the_beginning_of_an_answer(fields: dict[str, bool]) -> None:
    error = refusal({"messages": MESSAGES, "continue_final_message": True, **fields})
    assert str(error) == "continue_final_message must be false where add_generation_prompt is true"
    assert (error.field, error.got) == ("continue_final_message", True)


@pytest.mark.parametrize("template", [5, ["{{ messages }}"], b"", {}], ids=repr)
def test_a_chat_template_is_a_text(template: object) -> None:
    error = refusal({"messages": MESSAGES, "chat_template": template})
    assert str(error) == f"chat_template must be a text; got {template!r}"
    assert (error.field, error.got) == ("chat_template", template)


# ------------------------------------------------------------------------------- pairs, and keys


def test_a_pair_of_texts_is_one_prompt() -> None:
    assert parse_prompt({"prompt": "a", "text_pair": "b"}) == ParsedPrompt(content=TextPair("a", "b"))


@pytest.mark.parametrize("pair", [5, ["b"]], ids=repr)
def test_the_second_text_of_a_pair_is_a_text(pair: object) -> None:
    assert "got 'text_pair'" in str(refusal({"prompt": "a", "text_pair": pair}))


def test_another_key_beside_a_pair_is_refused() -> None:
    error = refusal({"prompt": "a", "text_pair": "b", "other": 1})
    assert str(error).endswith("got 'other'")
    assert (error.field, error.got) == ("prompt", ["other"])


def test_three_of_the_keys_that_are_refused_are_named() -> None:
    error = refusal({"prompt": "a", "k1": 1, "k2": 2, "k3": 3, "k4": 4})
    assert str(error).endswith("got 'k1', 'k2', 'k3'")
    assert error.got == ["k1", "k2", "k3", "k4"]


def test_token_ids_may_come_with_a_text_that_is_none() -> None:
    assert parse_prompt({"prompt_token_ids": [1], "prompt": None}) == ParsedPrompt((1,))


def test_a_text_beside_token_ids_that_is_no_text_is_refused_by_name() -> None:
    error = refusal({"prompt_token_ids": [1], "prompt": ["hi"]})
    assert (error.field, error.got) == ("prompt", list)


def test_the_first_id_that_is_no_integer_is_shown() -> None:
    error = refusal([1, "first", "second"])
    assert (error.field, error.got) == ("prompt_token_ids", "first")


# ------------------------------------------------------------------------------- without an answer


def test_a_prompt_without_an_answer_may_fill_the_whole_context() -> None:
    check_prompt([0] * 8, vocab_size=10, max_model_len=8, has_answer=False)
    with pytest.raises(PromptTooLong) as caught:
        check_prompt([0] * 9, vocab_size=10, max_model_len=8, has_answer=False)
    assert "no room for an answer" not in str(caught.value)
    assert (caught.value.num_prompt_tokens, caught.value.max_model_len) == (9, 8)


def test_an_id_that_is_negative_is_named_before_one_that_is_too_high() -> None:
    with pytest.raises(InvalidPrompt) as caught:
        check_prompt([12, -3], vocab_size=10, max_model_len=8)
    assert caught.value.got == -3
    with pytest.raises(InvalidPrompt) as caught:
        check_prompt([10, 12, 0], vocab_size=10, max_model_len=8)
    assert caught.value.got == 12
    with pytest.raises(InvalidPrompt) as caught:
        check_prompt([0, -1, -2], vocab_size=10, max_model_len=8)
    assert caught.value.got == -2


def test_an_empty_prompt_is_refused_by_name() -> None:
    with pytest.raises(InvalidPrompt, match="cannot be empty") as caught:
        check_prompt([], vocab_size=10, max_model_len=8)
    assert (caught.value.field, caught.value.got) == ("prompt", ())
