"""Prompts in vLLM's forms, among them mappings that carry a `cache_salt`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triolet.errors import InvalidPrompt


def split_prompt(
    prompt: Any, prompt_token_ids: Sequence[int] | None = None, cache_salt: str | None = None
) -> tuple[Any, str | None]:
    """Return the prompt as `Engine.generate` takes it, and its salt.

    Args:
        prompt: of any form; None beside `prompt_token_ids`.
        prompt_token_ids: the ids, if they were given as an argument of their own.
        cache_salt: the salt, if it was given as an argument of its own.
    Raises:
        InvalidPrompt: two salts, a salt that is no string, or a prompt beside ids that is no text.
    """
    if isinstance(prompt, Mapping) and "cache_salt" in prompt:
        if cache_salt is not None:
            raise InvalidPrompt("cache_salt must be given once", field="cache_salt", got=cache_salt)
        prompt, cache_salt = {k: v for k, v in prompt.items() if k != "cache_salt"}, prompt["cache_salt"]
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise InvalidPrompt("cache_salt must be a string", field="cache_salt", got=cache_salt)
    if prompt_token_ids is None:
        return prompt, cache_salt
    if prompt is not None and not isinstance(prompt, str):
        raise InvalidPrompt("prompt must be a text beside prompt_token_ids", field="prompt", got=type(prompt))
    beside = {} if prompt is None else {"prompt": prompt}
    return {"prompt_token_ids": prompt_token_ids, **beside}, cache_salt
