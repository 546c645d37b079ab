"""How a chat's text ends: with what an answer begins with, without it, or amid its last message."""

from __future__ import annotations

from typing import Any

import pytest

from tests.actors.harness import LetterTokenizer
from tests.server.routes import harness
from tests.server.routes.harness import MODEL, serving
from triolet.core.chat_template import ChatTemplate
from triolet.core.request.prompt import ChatPrompt
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized

TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.content }}Z{% endfor %}{{ 'A' if add_generation_prompt }}"
)
MESSAGES = [{"role": "user", "content": "HE"}, {"role": "assistant", "content": "LLO"}]


class TemplateTokenizer(LetterTokenizer):
    """Chats in letters, by a template that ends each message with a Z and begins an answer with an A."""

    def tokenize(self, message: Tokenize) -> Tokenized:
        prompt = message.prompt
        if isinstance(prompt, ChatPrompt):
            prompt = TEMPLATE.render(
                prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
            )
        return super().tokenize(Tokenize(prompt, message.bad_words))


@pytest.fixture(autouse=True)
def _template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "ChatTokenizer", TemplateTokenizer)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "HEZLLOZA"),
        ({"add_generation_prompt": False}, "HEZLLOZ"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "HEZLLO"),
    ],
)
async def test_a_chat_ends_as_it_is_asked_to(asked: dict[str, Any], text: str) -> None:
    async with serving() as scene:
        tokens = (await scene.post("/tokenize", {"messages": MESSAGES, **asked})).json["tokens"]
        assert tokens == [ord(letter) - ord("A") for letter in text]
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, **asked}
        answer = (await scene.post("/v1/chat/completions", body)).json
        assert answer["usage"]["prompt_tokens"] == len(text)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "asked",
    [{"continue_final_message": True}, {"add_generation_prompt": True, "continue_final_message": True}],
)
async def test_a_chat_can_not_both_go_on_and_begin_an_answer(path: str, asked: dict[str, Any]) -> None:
    async with serving() as scene:
        refused = await scene.post(path, {"model": MODEL, "messages": MESSAGES, **asked})
        assert refused.error == (400, "invalid_value", "continue_final_message")


async def test_another_template_is_for_programs_and_not_for_clients() -> None:
    async with serving() as scene:
        for path in ("/tokenize", "/v1/chat/completions"):
            refused = await scene.post(
                path, {"model": MODEL, "messages": MESSAGES, "chat_template": "{{ 1 }}"}
            )
            assert refused.error == (400, "unsupported_parameter", "chat_template")
