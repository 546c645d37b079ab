"""Ids of requests and of what answers them."""

from __future__ import annotations

import re
import secrets
from typing import Final

REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


def new_id(prefix: str) -> str:
    """Return an unguessable id."""
    # Where there are no keys, an id is all that protects a stored response.
    return f"{prefix}_{secrets.token_hex(16)}"


def request_id_of(given: str | None) -> str:
    """Return the client's own request id if it is valid, otherwise a new one."""
    # It goes into headers and logs, so line breaks and the like are refused.
    return given if given is not None and REQUEST_ID.fullmatch(given) else new_id("req")
