"""What has been said: a system prompt and exchanges, of which the last may still wait for its reply."""

from __future__ import annotations

import attrs


@attrs.define
class Exchange:
    """A question and what was answered; None while nothing is."""

    question: str
    answer: str | None = None


@attrs.define
class ChatHistory:
    """One conversation with a model.

    Args:
        system: the system prompt; None for none.
    """

    system: str | None = None
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
        """Everything up to the last question, for the model to answer."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in self.exchanges:
            messages.append({"role": "user", "content": exchange.question})
            messages.append({"role": "assistant", "content": exchange.answer or ""})
        return messages[:-1]
