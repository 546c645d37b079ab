"""Soft prompts: what a caller names, what a request is admitted with, and the shapes of a model that they must fit."""

from __future__ import annotations

import attrs

from triolet.errors import InvalidRequest


@attrs.frozen
class PromptAdapterRequest:
    """Soft prompt that a caller names: virtual tokens before the prompt, trained by peft.

    Args:
        prompt_adapter_name: name of the soft prompt.
        prompt_adapter_id: number of it, at least 1; no other soft prompt of the engine has it.
        prompt_adapter_local_path: folder with adapter_config.json and adapter_model.safetensors.
        prompt_adapter_num_virtual_tokens: length that the folder must have; None for any.
    Raises:
        InvalidRequest: an argument of the wrong type or out of its range.
    """

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str
    prompt_adapter_num_virtual_tokens: int | None = None

    def __attrs_post_init__(self) -> None:
        for field in ("prompt_adapter_name", "prompt_adapter_local_path"):
            text = getattr(self, field)
            if text == "" or not isinstance(text, str):
                raise InvalidRequest(
                    f"{field} must be a non-empty string; got {text!r}", field=field, got=text
                )
        for field in ("prompt_adapter_id", "prompt_adapter_num_virtual_tokens"):
            number = getattr(self, field)
            if number is None and field == "prompt_adapter_num_virtual_tokens":
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise InvalidRequest(
                    f"{field} must be a whole number, at least 1; got {number!r}", field=field, got=number
                )


@attrs.frozen(kw_only=True)
class SoftPrompt:
    """Soft prompt whose files were read and checked; part of a request, because its answer depends on it."""

    name: str
    int_id: int
    path: str  # its folder
    digest: str  # of the contents of its files: two soft prompts of one digest compute the same
    num_virtual_tokens: int

    @property
    def prompt_adapter_request(self) -> PromptAdapterRequest:
        """Soft prompt as a caller names it."""
        return PromptAdapterRequest(self.name, self.int_id, self.path, self.num_virtual_tokens)


@attrs.frozen
class SoftPromptSupport:
    """Shapes of a model that takes soft prompts."""

    hidden_size: int
    kv_shapes: tuple[tuple[int, int], ...]  # KV heads and numbers of a head, by layer
