"""Responses that later turns may continue: bounded, the one that was not used for the longest time goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import attrs

from triolet.protocol.errors import WireError
from triolet.protocol.responses.input_items import Message

BYTES_PER_ENTRY = 4096  # what a response takes beside its texts
BYTES_PER_LOGPROB = 512  # a token, its bytes and its number, as Python keeps them


@attrs.frozen(kw_only=True)
class StoredResponse:
    """A response that is over.

    Args:
        response: the object, as its terminal event had it.
        messages: the whole chat: what it was asked in, and its answer. Without the turn's instructions, which are not
            inherited.
        num_input: of them that it was asked in; the others are its answer.
        owner: whose it is; nobody else finds it. None where there are no keys.
    """

    response: dict[str, Any]
    messages: tuple[Message, ...]
    num_input: int
    owner: str | None = None

    @property
    def id(self) -> str:
        """Of the response."""
        response_id: str = self.response["id"]
        return response_id

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes; messages that a chat's turns share are counted for each."""
        texts: int = sum(len(message["content"] or "") for message in self.messages)
        parts = (part for item in self.response["output"] for part in item.get("content", ()))
        positions: int = sum(len(part.get("logprobs", ())) for part in parts)
        num_top: int = self.response["top_logprobs"]
        return BYTES_PER_ENTRY + 2 * texts + positions * BYTES_PER_LOGPROB * (1 + num_top)


@attrs.define(eq=False)
class ResponseStore:
    """Remembers responses, within bounds.

    Args:
        max_responses: how many.
        max_bytes: how much they may take together.
    """

    max_responses: int
    max_bytes: int
    num_bytes: int = attrs.field(default=0, init=False)
    _responses: OrderedDict[str, StoredResponse] = attrs.field(factory=OrderedDict, init=False)

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, stored: StoredResponse) -> None:
        """Remember a response; older ones may be forgotten for it."""
        self._drop(stored.id)
        self._responses[stored.id] = stored
        self.num_bytes += stored.num_bytes
        while self._responses and (len(self) > self.max_responses or self.num_bytes > self.max_bytes):
            self._drop(next(iter(self._responses)))

    def get(self, response_id: str, owner: str | None = None) -> StoredResponse | None:
        """The response of that id, if it is this owner's."""
        stored = self._responses.get(response_id)
        if stored is None or stored.owner != owner:
            return None
        self._responses.move_to_end(response_id)
        return stored

    def delete(self, response_id: str, owner: str | None = None) -> bool:
        """Forget a response; whether there was one."""
        if self.get(response_id, owner) is None:
            return False
        self._drop(response_id)
        return True

    def _drop(self, response_id: str) -> None:
        if (stored := self._responses.pop(response_id, None)) is not None:
            self.num_bytes -= stored.num_bytes


def previous_messages(
    response_id: str | None, owner: str | None, *stores: ResponseStore
) -> tuple[Message, ...]:
    """The chat that a turn continues.

    Args:
        response_id: of the turn before; None begins a chat.
        owner: whose it must be.
        *stores: where it may be, in the order of asking.
    Raises:
        WireError: `previous_response_not_found`; clients begin again with the whole chat then.
    """
    if response_id is None:
        return ()
    for store in stores:
        if (stored := store.get(response_id, owner)) is not None:
            return stored.messages
    raise WireError(
        f"Previous response with id '{response_id[:80]}' not found.",
        code="previous_response_not_found",
        param="previous_response_id",
    )


def prompt_of(instructions: str | None, chat: Sequence[Message]) -> list[Message]:
    """The messages that the model is asked with.

    Raises:
        WireError: there are none.
    """
    first = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*first, *chat]
    if not messages:
        raise WireError("input must not be empty", code="invalid_value", param="input")
    return messages
