"""What the event loop writes, looks up or hashes of a request is bounded where it is read."""

from __future__ import annotations

from typing import Any

import pytest

from tests.protocol.test_known_fields import BODIES, CLASSES
from triolet.core.request.param_validation import ApiFamily
from triolet.protocol.errors import WireError
from triolet.protocol.field_limits import MAX_NAME_CHARS
from triolet.protocol.pooling import EmbeddingsRequest
from triolet.protocol.responses.requests import MAX_ECHO_CHARS, CreateResponse
from triolet.protocol.scoring import RerankRequest

RESPONSES = ApiFamily.RESPONSES
READERS: list[tuple[Any, dict[str, Any]]] = [
    *((CLASSES[family], BODIES[family]) for family in ApiFamily),
    (EmbeddingsRequest, {"input": "hi"}),
    (RerankRequest, {"query": "hi", "documents": ["ho"]}),
]


@pytest.mark.parametrize("name", ["client", "cache_salt"])
@pytest.mark.parametrize(("reader", "body"), READERS)
def test_a_name_that_the_scheduler_uses_has_a_longest_length(
    reader: Any, body: dict[str, Any], name: str
) -> None:
    longest = "é" * MAX_NAME_CHARS
    assert getattr(reader.of({**body, name: longest}), name) == longest
    with pytest.raises(WireError, match=f"{name} must be at most 512 characters long") as refused:
        reader.of({**body, name: longest + "é"})
    assert refused.value.param == name


def form(**fields: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "schema": {}, **fields}}}


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (form(name="n" * MAX_ECHO_CHARS), "text.format"),
        (form(other=[{} for _ in range(MAX_ECHO_CHARS)]), "text.format"),
        (form(**{"k" * MAX_ECHO_CHARS: 1}), "text.format"),
        # A schema counts only where it is one, which is checked by itself.
        ({"text": {"format": {"type": "text", "schema": "s" * MAX_ECHO_CHARS}}}, "text.format"),
        ({"text": {"format": {"other": "o" * MAX_ECHO_CHARS}}}, "text.format"),
        ({"tool_choice": {"other": "o" * MAX_ECHO_CHARS}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f", "x": [1] * MAX_ECHO_CHARS}}, "tool_choice"),
    ],
)
def test_what_every_event_of_a_response_repeats_has_a_longest_length(
    asked: dict[str, Any], field: str
) -> None:
    with pytest.raises(WireError, match=f"{field} must have at most {MAX_ECHO_CHARS} characters") as refused:
        CreateResponse.of({**BODIES[RESPONSES], **asked})
    assert refused.value.param == field


def test_forms_and_choices_of_tools_in_use_are_short_enough() -> None:
    names = [{"type": "function", "name": f"{number:064}"} for number in range(128)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": names}
    asked = {**form(name="n" * 64, description="d" * 1000), "tool_choice": choice}
    asked["text"]["format"]["schema"] = {"description": "d" * MAX_ECHO_CHARS}  # which has a limit of its own
    request = CreateResponse.of({**BODIES[RESPONSES], **asked})
    assert (request.tool_choice, request.text.format) == (choice, asked["text"]["format"])
