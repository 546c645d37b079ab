"""What a router reads of a client's request, and what it changes in it before an engine gets it.

A long request is parsed in the parse thread, within the limits of JSON, and is never encoded again: a field that an
engine must have otherwise is appended.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from triolet.core.dispatch.prompt_blocks import block_hashes, num_tokens
from triolet.core.json_text import between_windows, release
from triolet.protocol.errors import WireError, unsupported
from triolet.protocol.json.parsing import JsonLimits, parse_object
from triolet.protocol.responses.response_items import is_reference
from triolet.server.transport.parse_thread import LONG_INPUT_BYTES, parse_in_thread

PROMPT_FIELDS: Final = ("instructions", "messages", "prompt", "input")
ITEMS_AT_ONCE: Final = 16  # of a list that is encoded
OPERATIONS: Final = ("/v1/responses/input_tokens", "/v1/responses/compact")  # no ids of responses

CONTROLS: Final = ("response.cancel", "response.steer")  # messages that are sent on with all their fields

# Fields that are looked at again while an engine answers. The others are in the text, which is kept for its next
# engine: parsed they take several times its memory.
KEPT_FIELDS: Final = (
    "type", "stream", "stream_id", "store", "seed", "response_id", "previous_response_id",
)  # fmt: skip


@attrs.frozen
class RoutedPrompt:
    """What the choice of an engine goes by."""

    hashes: tuple[bytes, ...] = ()  # of its beginnings; see `prompt_blocks`
    num_tokens: int = 1  # about

    @classmethod
    def of(cls, text: str, salt: str = "") -> RoutedPrompt:
        """Return that of a text.

        Args:
            text: of a prompt.
            salt: of the client whose prefixes are not others'.
        """
        return cls(block_hashes(text, salt), num_tokens(text))


@attrs.frozen
class ClientRequest:
    """Request of a client over HTTP, whole."""

    method: str
    path: str  # without the encoding of URLs
    target: str  # path and query as the client has sent them
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    payload: Mapping[str, Any]  # fields of the body that are looked at; empty if it is no JSON object
    prompt: RoutedPrompt

    @property
    def is_stream(self) -> bool:
        return self.method == "POST" and self.payload.get("stream") is True

    @property
    def is_bound(self) -> bool:
        """True if it continues a response, which one engine alone has."""
        return bool(self.payload.get("previous_response_id"))

    @property
    def response_id(self) -> str | None:
        """Id in the path; None if it has none."""
        has_id = self.path.startswith("/v1/responses/") and self.path not in OPERATIONS
        return self.path.split("/")[3] if has_id else None

    @property
    def api_key(self) -> str | None:
        """Key of the client; None without one."""
        given = next((value for name, value in self.headers if name.lower() == b"authorization"), b"")
        return given.decode("latin-1").removeprefix("Bearer ") or None


@attrs.frozen
class ParsedRequest:
    """Fields of a request, and its prompt."""

    fields: Mapping[str, Any] = attrs.field(factory=dict)  # empty if it is no JSON object
    prompt: RoutedPrompt = RoutedPrompt()
    refusal: WireError | None = None  # why no engine can answer it, if that is so

    @property
    def kept(self) -> Mapping[str, Any]:
        """Fields that are looked at again."""
        return {name: self.fields[name] for name in KEPT_FIELDS if name in self.fields}


async def parsed_request(raw: str | bytes, limits: JsonLimits, client: str, salt: str = "") -> ParsedRequest:
    """Parse a body or a message; a long one in the parse thread.

    Args:
        raw: the text; what is no JSON object has no fields here, and is refused by the engine that gets it.
        limits: on its shape.
        client: API key or address; takes the turns of the parse thread.
        salt: of the client; see `RoutedPrompt.of`.
    Raises:
        WireError: `json_too_large`.
        ResourceShortage: no thread can be started now.
    """
    if len(raw) < LONG_INPUT_BYTES:
        return _parsed(raw, limits, salt)
    return await parse_in_thread(lambda: _parsed(raw, limits, salt), client)


def _parsed(raw: str | bytes, limits: JsonLimits, salt: str) -> ParsedRequest:
    try:
        fields = parse_object(raw, limits)
    except WireError as error:
        if error.code == "json_too_large":
            raise
        return ParsedRequest()
    prompt = RoutedPrompt.of("".join(_prompt_pieces(fields)), salt)
    parsed = ParsedRequest(fields, prompt, _refusal(fields))
    if len(raw) < LONG_INPUT_BYTES or fields.get("type") in CONTROLS:
        return parsed
    # The rest is freed here, and not in the event loop, which would wait for it.
    parsed, owned = attrs.evolve(parsed, fields=parsed.kept), [fields]
    del fields
    release(owned)
    return parsed


def _refusal(fields: Mapping[str, Any]) -> WireError | None:
    """Return the error for a reference to an item, of which the router does not know the engine."""
    items = fields.get("input")
    if fields.get("previous_response_id") or not isinstance(items, list):
        return None
    give_way = between_windows.get()
    for place, item in enumerate(items):
        if place % ITEMS_AT_ONCE == 0:
            give_way()
        if isinstance(item, dict) and is_reference(item):
            return unsupported(
                f"input[{place}].type",
                "item_reference is not supported by a router without previous_response_id, which names the engine "
                "that has the item; send the item itself",
            )
    return None


def _prompt_pieces(fields: Mapping[str, Any]) -> Iterator[str]:
    give_way = between_windows.get()
    for value in filter(None, map(fields.get, PROMPT_FIELDS)):
        if isinstance(value, list):
            for start in range(0, len(value), ITEMS_AT_ONCE):
                give_way()
                yield json.dumps(value[start : start + ITEMS_AT_ONCE])
        else:
            yield value if isinstance(value, str) else json.dumps(value)


def with_field(raw: bytes, name: str, value: str | int) -> bytes:
    """Return a JSON object that has fields with one more, which counts in place of an earlier one of its name."""
    return b"%s,%s}" % (raw.rstrip().removesuffix(b"}"), json.dumps({name: value})[1:-1].encode())


def is_without_seed(fields: Mapping[str, Any]) -> bool:
    """Return True for a request whose seed the engine would draw."""
    return fields.get("seed") in (None, -1)


def new_seed() -> int:
    """Return a seed for a request without one: the same for all engines that compute it, and for no other request."""
    return secrets.randbits(62)
