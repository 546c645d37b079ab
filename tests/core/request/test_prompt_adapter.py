"""Soft prompts that a caller may name, and what is kept of one that was read."""

from __future__ import annotations

from typing import Any

import pytest

from triolet.core.request.prompt_adapter import PromptAdapterRequest, SoftPrompt
from triolet.errors import InvalidRequest

FIELDS: dict[str, Any] = {
    "prompt_adapter_name": "a",
    "prompt_adapter_id": 1,
    "prompt_adapter_local_path": "/a",
}


def named(**fields: Any) -> PromptAdapterRequest:
    return PromptAdapterRequest(**(FIELDS | fields))


def refusal(field: str, value: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        named(**{field: value})
    assert (caught.value.field, caught.value.got) == (field, value)
    return caught.value


def test_a_soft_prompt_may_have_any_length_unless_the_caller_names_one() -> None:
    assert named().prompt_adapter_num_virtual_tokens is None
    assert named(prompt_adapter_num_virtual_tokens=1).prompt_adapter_num_virtual_tokens == 1


@pytest.mark.parametrize("field", ["prompt_adapter_name", "prompt_adapter_local_path"])
@pytest.mark.parametrize("value", ["", None, 5, b"a", ["a"]], ids=repr)
def test_name_and_folder_are_texts_and_not_empty(field: str, value: object) -> None:
    assert str(refusal(field, value)) == f"{field} must be a non-empty string; got {value!r}"


@pytest.mark.parametrize("field", ["prompt_adapter_id", "prompt_adapter_num_virtual_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "1", True, False], ids=repr)
def test_numbers_are_whole_and_at_least_one(field: str, value: object) -> None:
    assert str(refusal(field, value)) == f"{field} must be a whole number, at least 1; got {value!r}"
    assert getattr(named(**{field: 1}), field) == 1


def test_a_soft_prompt_has_a_number() -> None:
    assert "prompt_adapter_id must be a whole number" in str(refusal("prompt_adapter_id", None))


def test_a_soft_prompt_that_was_read_is_named_with_its_length() -> None:
    soft_prompt = SoftPrompt(name="a", int_id=7, path="/a", digest="digest", num_virtual_tokens=20)
    assert soft_prompt.prompt_adapter_request == PromptAdapterRequest("a", 7, "/a", 20)
