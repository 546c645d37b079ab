"""Settings that lie beside a tokenizer: tokenizer_config.json, and the special tokens of older folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

TEMPLATES: Final = "additional_chat_templates"
"""Folder of the chat templates beside the usual one."""


def tokenizer_settings(folder: Path, read: Callable[[Path], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the settings of a folder's tokenizer.

    Args:
        folder: of the model.
        read: returns the object in a JSON file, an empty one if there is no such file.

    Source: transformers, in which special_tokens_map.json counts, and goes before tokenizer_config.json, only where
        that has no `added_tokens_decoder`.
    """
    settings = read(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        return settings
    return {**settings, **read(folder / "special_tokens_map.json")}
