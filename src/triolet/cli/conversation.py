"""History of a chat: a system prompt and exchanges, of which the last may still wait for its reply."""

from __future__ import annotations

import attrs


@attrs.define
class Exchange:
    """Question and its answer, which is None until it is complete."""

    question: str
    answer: str | None = None


@attrs.define
class ChatHistory:
    """History of one conversation with a model."""

    system: str | None = None  # the system prompt; None for none
    exchanges: list[Exchange] = attrs.field(factory=list)

    def ask(self, question: str) -> None:
        """Begin an exchange."""
        self.exchanges.append(Exchange(question))

    def answer(self, text: str) -> None:
        """Complete the last exchange, or replace its answer."""
        self.exchanges[-1].answer = text

    def take_back(self) -> Exchange | None:
        """Forget the last exchange and return it; None if there was none."""
        return self.exchanges.pop() if self.exchanges else None

    def messages(self) -> list[dict[str, str]]:
        """Return the chat messages up to the last question, for the model to answer."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in self.exchanges:
            messages.append({"role": "user", "content": exchange.question})
            messages.append({"role": "assistant", "content": exchange.answer or ""})
        return messages[:-1]
