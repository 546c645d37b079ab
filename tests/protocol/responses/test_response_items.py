from __future__ import annotations

from typing import Any

from triolet.protocol.responses.response_items import Input


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "add", "arguments": "{}"}


def test_the_messages_of_an_input_are_made_once_where_it_is_structured() -> None:
    given = Input.of([{"role": "user", "content": "Hi"}, call("a")])
    assert given.messages() is given.messages()


def test_calls_one_after_the_other_are_one_message_and_those_apart_are_not() -> None:
    said = {"role": "assistant", "content": "Let me see."}
    output = {"type": "function_call_output", "call_id": "b", "output": "2"}
    given = Input.of([said, call("a"), call("b"), output, call("c"), {"role": "user", "content": "Hi"}])
    messages = given.messages()
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant", "user"]
    assert [[one["id"] for one in message.get("tool_calls", [])] for message in messages] == [
        ["a", "b"],
        [],
        ["c"],
        [],
    ]
    assert messages[0]["content"] == "Let me see."


def test_each_of_two_inputs_of_the_same_items_has_its_own_calls() -> None:
    items = [call(str(number)) for number in range(3)]
    [one], [other] = Input.of(items).messages(), Input(Input.of(items).items).messages()
    assert len(one["tool_calls"]) == len(other["tool_calls"]) == 3
