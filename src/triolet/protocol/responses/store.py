"""Store of finished responses that later turns may continue: bounded, least recently used ones evicted first.

A short response is kept as one block of JSON. As objects it would be some 25 small ones, which lie between those of
the requests that ran at the same time, and Python's allocator gives back memory only where nothing lies any more.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import attrs

from triolet.core.json_text import giving_way
from triolet.protocol.errors import WireError, wrong
from triolet.protocol.json.encoding import EncodedItems, EncodedList, EncodedObject, EncodedText, encode
from triolet.protocol.responses.input_items_page import InputItems
from triolet.protocol.responses.response_items import Input, Item, ItemReference, Message, item_of

BYTES_PER_RESPONSE = 4096  # of Python's objects, beside what is counted
BYTES_PER_VALUE = 64  # of any JSON value, as a Python object with its place in a dict or list
BYTES_PER_CHARACTER = 2  # between 1 (Latin) and 4 (emoji)
BYTES_PER_MESSAGE = 576  # of a chat, beside its texts
BYTES_PER_LOGPROB = 512  # of a token with its text, bytes and log-probability
BYTES_PER_ITEM = 256  # of the id of an output item, and its place in the index
BYTES_PER_TOOL = 512  # of the copy of a tool in one response object; its schema is shared
# Estimated memory up to which a response is kept as JSON: packing it takes the event loop some 0.1 ms. A longer
# one is a few long texts, for the most part, which are blocks of their own.
MAX_PACKED_BYTES: Final = 2**15
# Items that one input may refer to: the response of each may have to be unpacked.
MAX_REFERENCES: Final = 512
MAX_REFERENCED_BYTES: Final = 2**24  # of their chat messages, estimated: a few bytes of a body stand for each


def size_of(value: Any) -> int:
    """Estimate the memory of a JSON value, bytes."""
    if isinstance(value, str):
        num_chars = len(value) + (len(value.json) if isinstance(value, EncodedText) else 0)
        return BYTES_PER_VALUE + BYTES_PER_CHARACTER * num_chars
    if isinstance(value, EncodedObject):
        return BYTES_PER_VALUE + BYTES_PER_CHARACTER * len(value.json)
    if isinstance(value, EncodedItems):
        return BYTES_PER_VALUE * (1 + len(value)) + BYTES_PER_CHARACTER * value.num_chars
    if isinstance(value, Mapping):
        return BYTES_PER_VALUE + sum(size_of(key) + size_of(item) for key, item in giving_way(value.items()))
    if isinstance(
        value, EncodedList
    ):  # log-probabilities, which several events share: counted where they are made
        return BYTES_PER_VALUE + 16 * len(value)
    if isinstance(value, list | tuple):
        return BYTES_PER_VALUE + sum(map(size_of, giving_way(value)))
    return BYTES_PER_VALUE


def size_of_chat(messages: Sequence[Message]) -> int:
    """Estimate the memory of chat messages, bytes."""
    num_chars = sum(len(message["content"] or "") for message in messages)
    # Most messages have no calls, and a chat may have thousands.
    calls = sum(size_of(message["tool_calls"]) for message in messages if "tool_calls" in message)
    return BYTES_PER_MESSAGE * len(messages) + BYTES_PER_CHARACTER * num_chars + calls


def size_of_event(event: Mapping[str, Any]) -> int:
    """Estimate the memory of a logged event, bytes, less what it shares with the request and with earlier events."""
    if (response := event.get("response")) is None:
        return size_of(event)
    return BYTES_PER_RESPONSE + BYTES_PER_TOOL * len(response["tools"]) + size_of(response["output"])


@attrs.frozen
class StoredItems:
    """Items of a finished response, by id."""

    _input: InputItems
    _output: Mapping[str, dict[str, Any]]

    def get(self, item_id: str) -> dict[str, Any] | None:
        """Return the item of an id; None if there is none."""
        if (item := self._output.get(item_id)) is not None:
            return item
        place = self._input.place_of(item_id)
        return None if place is None else self._input[place]


@attrs.frozen(kw_only=True)
class StoredResponse:
    """A finished response."""

    id: str
    num_input: int  # number of input messages; the others are the answer
    owner: str | None  # name of the key that it belongs to; None where there are no keys
    num_bytes: int  # estimated memory; messages that the turns of a chat share are counted for each turn
    item_ids: tuple[str, ...]  # of its output
    _content: dict[str, Any] | bytes  # response and messages; or JSON of that

    @classmethod
    def of(
        cls,
        response: dict[str, Any],
        messages: tuple[Message, ...],
        num_input: int,
        owner: str | None = None,
    ) -> Self:
        """Return what is to be stored of a response.

        Args:
            response: the response object of its terminal event.
            messages: the whole chat, input and answer, without the turn's instructions, which later turns do not
                inherit.
            num_input: number of input messages; the others are the answer.
            owner: name of the key that it belongs to; None where there are no keys.
        """
        num_bytes = _size_of_response(response, messages)
        content = {"response": response, "messages": messages}
        return cls(
            id=response["id"],
            num_input=num_input,
            owner=owner,
            num_bytes=num_bytes,
            item_ids=tuple(item["id"] for item in response["output"] if "id" in item),
            content=encode(content).encode() if num_bytes <= MAX_PACKED_BYTES else content,
        )

    @property
    def response(self) -> dict[str, Any]:
        """Return the response object."""
        response: dict[str, Any] = self._unpacked()["response"]
        return response

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the whole chat, as `of` takes it."""
        return tuple(self._unpacked()["messages"])

    def items(self) -> StoredItems:
        """Return the items of its output and of its input."""
        content = self._unpacked()
        output = {item["id"]: item for item in content["response"]["output"] if "id" in item}
        return StoredItems(InputItems(self.id, content["messages"][: self.num_input]), output)

    def _unpacked(self) -> dict[str, Any]:
        content = self._content
        unpacked: dict[str, Any] = json.loads(content) if isinstance(content, bytes) else content
        return unpacked


def _size_of_response(response: Mapping[str, Any], messages: Sequence[Message]) -> int:
    echoed = {name: value for name, value in response.items() if name != "output"}
    parts = [part for item in response["output"] for part in item.get("content", ())]
    # Counted, since `logprob_token_ids` and the whole vocabulary are more than `top_logprobs` says.
    num_logprobs: int = sum(
        1 + len(position["top_logprobs"]) for part in parts for position in part.get("logprobs", ())
    )
    return (
        BYTES_PER_RESPONSE
        + size_of(echoed)
        + size_of_chat(messages)
        + BYTES_PER_ITEM * len(response["output"])
        + num_logprobs * BYTES_PER_LOGPROB
    )


@attrs.define(eq=False)
class StoreBudget:
    """Memory that several stores share, in bytes."""

    max_bytes: int
    num_bytes: int = attrs.field(default=0, init=False)


@attrs.define(eq=False)
class ResponseStore:
    """Store of finished responses, bounded in number and in bytes.

    Over a bound, the owner that holds most loses the response that was not used for the longest time. So the responses
    of an owner that holds no more than an equal share are never evicted because of another one.
    """

    max_responses: int  # most responses
    max_bytes: int  # most memory
    # Memory that this store shares with others; it evicts only its own responses for it.
    shared: StoreBudget | None = None
    num_bytes: int = attrs.field(default=0, init=False)
    _owner_of: dict[str, str | None] = attrs.field(factory=dict, init=False)
    _response_of: dict[str, str] = attrs.field(factory=dict, init=False)  # by id of an output item
    _by_owner: dict[str | None, OrderedDict[str, StoredResponse]] = attrs.field(factory=dict, init=False)
    _bytes_by_owner: Counter[str | None] = attrs.field(factory=Counter, init=False)

    def __len__(self) -> int:
        return len(self._owner_of)

    def put(self, stored: StoredResponse) -> None:
        """Store a response; older ones may be evicted for it."""
        self._drop(stored.id)
        self._owner_of[stored.id] = stored.owner
        self._response_of.update(dict.fromkeys(stored.item_ids, stored.id))
        self._by_owner.setdefault(stored.owner, OrderedDict())[stored.id] = stored
        self._count(stored, 1)
        while len(self) > self.max_responses:
            self._evict(max(self._by_owner, key=lambda owner: len(self._by_owner[owner])))
        while self._owner_of and self._is_over():
            self._evict(max(self._by_owner, key=lambda owner: self._bytes_by_owner[owner]))

    def _is_over(self) -> bool:
        is_shared_over = self.shared is not None and self.shared.num_bytes > self.shared.max_bytes
        return self.num_bytes > self.max_bytes or is_shared_over

    def _evict(self, owner: str | None) -> None:
        self._drop(next(iter(self._by_owner[owner])))

    def get(self, response_id: str, owner: str | None = None) -> StoredResponse | None:
        """Return the response of that id, if it belongs to this owner."""
        owned = self._by_owner.get(owner)
        if owned is None or response_id not in owned:
            return None
        owned.move_to_end(response_id)
        return owned[response_id]

    def response_with(self, item_id: str, owner: str | None = None) -> StoredResponse | None:
        """Return the response that an item belongs to, if it belongs to this owner."""
        if (response_id := self._response_of.get(item_id)) is None:
            # The id of an input item is made of that of its response, see `InputItems`.
            _, _, rest = item_id.partition("_")
            response_id = f"resp_{rest.rpartition('_')[0]}"
        return self.get(response_id, owner)

    def delete(self, response_id: str, owner: str | None = None) -> bool:
        """Delete a response; return whether there was one."""
        if self.get(response_id, owner) is None:
            return False
        self._drop(response_id)
        return True

    def clear(self) -> None:
        """Delete everything."""
        for response_id in tuple(self._owner_of):
            self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        if response_id not in self._owner_of:
            return
        owner = self._owner_of.pop(response_id)
        dropped = self._by_owner[owner].pop(response_id)
        for item_id in dropped.item_ids:
            self._response_of.pop(item_id, None)
        self._count(dropped, -1)
        if not self._by_owner[owner]:
            del self._by_owner[owner], self._bytes_by_owner[owner]

    def _count(self, stored: StoredResponse, sign: int) -> None:
        num_bytes = sign * stored.num_bytes
        self.num_bytes += num_bytes
        self._bytes_by_owner[stored.owner] += num_bytes
        if self.shared is not None:
            self.shared.num_bytes += num_bytes


def previous_messages(
    response_id: str | None, owner: str | None, *stores: ResponseStore
) -> tuple[Message, ...]:
    """Return the chat that a turn continues.

    Args:
        response_id: of the previous turn; None begins a chat.
        owner: name of the key that it must belong to.
        *stores: are searched in this order.
    Raises:
        WireError: `previous_response_not_found`; clients then send the whole chat.
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


def with_items(given: Input, owner: str | None, *stores: ResponseStore) -> Input:
    """Return an input with stored items in place of the references to them.

    Args:
        given: as the client wrote it.
        owner: name of the key that the items' responses must belong to.
        *stores: are searched in this order.
    Raises:
        WireError: 404, there is no such item; or there are too many references, or two to one item.
    """
    ids = [item.id for item in given.items if isinstance(item, ItemReference)]
    if not ids:
        return given
    if len(ids) > MAX_REFERENCES:
        raise wrong("input", f"of at most {MAX_REFERENCES} items of type item_reference", len(ids))
    if len(set(ids)) < len(ids):
        twice = next(one for place, one in enumerate(ids) if one in ids[:place])[:80]
        raise WireError(
            f"Duplicate item found with id {twice}. Remove duplicate items from your input and try again.",
            code="invalid_value",
            param="input",
        )
    found = _stored_items(ids, owner, stores)
    if sum(size_of_chat(item.messages()) for item in found.values()) > MAX_REFERENCED_BYTES:
        raise wrong("input", f"of items whose texts take at most {MAX_REFERENCED_BYTES} bytes", len(ids))
    return Input(tuple(found[item.id] if isinstance(item, ItemReference) else item for item in given.items))


def _stored_items(ids: Sequence[str], owner: str | None, stores: Sequence[ResponseStore]) -> dict[str, Item]:
    unpacked: dict[str, StoredItems] = {}  # by the id of the response
    found: dict[str, Item] = {}
    for item_id in ids:
        holders = (store.response_with(item_id, owner) for store in stores)
        stored = next((one for one in holders if one is not None), None)
        if stored is not None and stored.id not in unpacked:
            unpacked[stored.id] = stored.items()
        item = None if stored is None else unpacked[stored.id].get(item_id)
        if item is None:
            raise WireError(
                f"Item with id '{item_id[:80]}' not found. Items are kept as long as their response is, and not "
                "where `store` is false: remove it from your input, or send the item itself.",
                code="item_not_found",
                status=404,
                param="input",
            )
        found[item_id] = item_of(item)
    return found


def prompt_of(instructions: str | None, chat: Sequence[Message]) -> list[Message]:
    """Return the messages for the model: the instructions, then the chat.

    Raises:
        WireError: there are none.
    """
    first = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*first, *chat]
    if not messages:
        raise WireError("input must not be empty", code="invalid_value", param="input")
    return messages
