"""Fields of OpenAI's bodies with a fixed set of values, most of them hints: another value is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

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
