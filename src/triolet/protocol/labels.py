"""Limits of what a client labels its requests with: metadata and identifiers, which are stored, echoed or hashed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from triolet.protocol.errors import wrong

# OpenAI's limits.
MAX_METADATA_ENTRIES = 16
MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS = 64, 512
MAX_IDENTIFIER_CHARS = 64
# Our own, for names that the scheduler looks up and hashes in the event loop.
MAX_NAME_CHARS = 512


class Named(Protocol):
    """Request with names for the scheduler."""

    @property
    def client(self) -> str | None: ...

    @property
    def cache_salt(self) -> str | None: ...


class Labelled(Named, Protocol):
    """Request with labels."""

    @property
    def metadata(self) -> Mapping[str, str]: ...

    @property
    def user(self) -> str | None: ...

    @property
    def safety_identifier(self) -> str | None: ...

    @property
    def prompt_cache_key(self) -> str | None: ...


def check_labels(request: Labelled) -> None:
    """Check the lengths of a request's labels.

    Raises:
        WireError: names the field, the rule and the value.
    """
    metadata = request.metadata
    if len(metadata) > MAX_METADATA_ENTRIES:
        raise wrong("metadata", f"at most {MAX_METADATA_ENTRIES} entries", len(metadata))
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS:
            rule = f"an object with keys of at most {MAX_METADATA_KEY_CHARS} characters"
            raise wrong("metadata", rule, key)
        if len(value) > MAX_METADATA_VALUE_CHARS:
            raise wrong(f"metadata.{key}", f"at most {MAX_METADATA_VALUE_CHARS} characters long", value)
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        identifier: str | None = getattr(request, name)
        if identifier is not None and len(identifier) > MAX_IDENTIFIER_CHARS:
            raise wrong(name, f"at most {MAX_IDENTIFIER_CHARS} characters long", identifier)
    check_names(request)


def check_names(request: Named) -> None:
    """Check the lengths of the names that the scheduler uses.

    Raises:
        WireError: names the field, the rule and the value.
    """
    for field, name in (("client", request.client), ("cache_salt", request.cache_salt)):
        if name is not None and len(name) > MAX_NAME_CHARS:
            raise wrong(field, f"at most {MAX_NAME_CHARS} characters long", name)
