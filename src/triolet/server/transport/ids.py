"""Ids of requests and of what answers them."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from typing import Final

REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")

# What the chat templates of Mistral's models take as the id of a call; they refuse a chat with any other.
MISTRAL_CALL_ID_CHARS: Final = 9


def new_id(prefix: str) -> str:
    """Return an unguessable id."""
    # Where there are no keys, an id is all that protects a stored response.
    return f"{prefix}_{secrets.token_hex(16)}"


def id_maker(tool_parser: str | None) -> Callable[[str], str]:
    """Return `new_id`, with ids of calls that a model of this tool-call format takes in its history."""
    return _new_id_for_mistral if tool_parser == "mistral" else new_id


def _new_id_for_mistral(prefix: str) -> str:
    if prefix != "call":
        return new_id(prefix)
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(MISTRAL_CALL_ID_CHARS))


def request_id_of(given: str | None) -> str:
    """Return the client's own request id if it is valid, otherwise a new one."""
    # It goes into headers and logs, so line breaks and the like are refused.
    return given if given is not None and REQUEST_ID.fullmatch(given) else new_id("req")
