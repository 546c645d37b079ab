from __future__ import annotations

import pytest

from triolet.errors import PromptTooLong
from triolet.protocol.responses.response_items import Message
from triolet.protocol.truncation import without_oldest


def said(*roles: str, num_chars: int = 100) -> list[Message]:
    return [{"role": role, "content": str(place) + "x" * (num_chars - 2)} for place, role in enumerate(roles)]


def places(messages: list[Message]) -> list[int]:
    return [int(message["content"][0]) for message in messages]


def test_as_many_of_the_oldest_messages_are_left_out_as_the_chat_is_too_long_by() -> None:
    chat = said("system", "user", "assistant", "user", "assistant", "user")
    assert places(without_oldest(chat, PromptTooLong(600, 410))) == [0, 3, 4, 5]
    assert places(without_oldest(chat, PromptTooLong(600, 600))) == [0, 2, 3, 4, 5]
    assert places(without_oldest(chat, PromptTooLong(60_000, 100))) == [0, 5]


def test_system_messages_stay_wherever_they_are() -> None:
    chat = said("user", "assistant", "system", "user", "assistant", "user")
    assert places(without_oldest(chat, PromptTooLong(600, 400))) == [2, 4, 5]
    assert places(without_oldest(chat, PromptTooLong(60_000, 100))) == [2, 5]


def test_a_result_does_not_stay_without_its_call() -> None:
    chat = said("user", "assistant", "tool", "tool", "assistant", "user")
    assert places(without_oldest(chat, PromptTooLong(600, 450))) == [4, 5]


@pytest.mark.parametrize(
    "chat", [said("user"), said("system", "user"), said("system"), said("system", "system", "user")]
)
def test_what_can_not_be_shortened_is_too_long(chat: list[Message]) -> None:
    error = PromptTooLong(100, 50)
    with pytest.raises(PromptTooLong) as raised:
        without_oldest(chat, error)
    assert raised.value is error


def test_shortening_again_and_again_comes_to_an_end() -> None:
    chat = said(*["user", "assistant"] * 4, "user")
    for _ in range(20):
        try:
            chat = without_oldest(chat, PromptTooLong(1001, 1000))
        except PromptTooLong:
            break
    assert places(chat) == [8]
