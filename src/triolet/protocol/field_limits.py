"""Limits of fields that bodies of several kinds have, as OpenAI's specification gives them.

Some fields have a fixed set of values, most of them hints. Others label a request: metadata and identifiers, which are
stored, echoed or hashed, and so have longest lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

from triolet.core.request.param_validation import ApiFamily
from triolet.core.tools.answer import EFFORTS
from triolet.protocol.errors import wrong

VERBOSITIES: Final = ("low", "medium", "high")
SUMMARIES: Final = ("auto", "concise", "detailed")
INCLUDABLE: Final = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_OF_BOTH: Final = {
    "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
    "service_tier": ("auto", "default", "flex", "scale", "priority", "fast"),
}
# Completions have none of these fields, and ignore them.
CHOICES: Final[Mapping[ApiFamily, Mapping[str, tuple[str, ...]]]] = MappingProxyType(
    {
        ApiFamily.CHAT: {**_OF_BOTH, "reasoning_effort": tuple(EFFORTS), "verbosity": VERBOSITIES},
        ApiFamily.RESPONSES: _OF_BOTH,
        ApiFamily.COMPLETIONS: {},
    }
)
"""Values of such fields at the top of a body."""

MAX_METADATA_ENTRIES = 16
MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS = 64, 512
MAX_IDENTIFIER_CHARS = 64
# Not OpenAI's: for names that the scheduler looks up and hashes in the event loop.
MAX_NAME_CHARS = 512


def check_choices(payload: Mapping[str, Any], family: ApiFamily) -> None:
    """Refuse a value that a field at the top of a body does not have.

    Raises:
        WireError: names the field and its values.
    """
    for name, allowed in CHOICES[family].items():
        check_choice(name, payload.get(name), allowed)


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not allowed; None is no value.

    Raises:
        WireError: names the field and its values.
    """
    if value is not None and value not in allowed:
        raise wrong(name, "one of " + ", ".join(allowed), value)


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
