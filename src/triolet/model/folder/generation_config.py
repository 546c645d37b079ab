"""What a model folder says about ending and sampling: EOS ids and the defaults of generation_config.json.

As in vLLM the tokenizer's own end of sequence comes first, and ends answers whether or not the other files name it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triolet.core.request.model_info import GenerationDefaults
from triolet.errors import InvalidParams, ModelFileError
from triolet.model.folder.json_fields import Fields, read_json_object
from triolet.model.folder.tokenizer_settings import tokenizer_settings

# What transformers' config classes say where a config.json says nothing, by model_type.
_CLASS_EOS = {
    "llama": 2,
    "mistral": 2,
    "mixtral": 2,
    "phi3": 32000,
    "gemma": 1,
    "gemma2": 1,
    "gemma3_text": 1,
    "gpt2": 50256,
}


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Read generation_config.json, which may be absent; EOS ids it lacks come from config.json, and the tokenizer's.

    Raises:
        ModelFileError: config.json is missing, or a file or one of its fields is not what it should be.
    """
    config = Fields(folder / "config.json", read_json_object(folder / "config.json"))
    path = folder / "generation_config.json"
    fields = Fields(path, read_json_object(path) if path.exists() else {})
    eos = _eos_ids(fields)
    if eos is None:
        eos = _eos_of_config(config)
    defaults = GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys([*_eos_of_tokenizer(folder), *eos])),
        temperature=fields.optional_number("temperature"),
        top_p=fields.optional_number("top_p"),
        top_k=fields.optional_integer("top_k", minimum=-1),
        min_p=fields.optional_number("min_p"),
        repetition_penalty=fields.optional_number("repetition_penalty"),
        max_new_tokens=fields.optional_integer("max_new_tokens"),
    )
    try:
        defaults.sampling_params()
    except InvalidParams as error:
        raise ModelFileError(path, str(error).rstrip(".")) from error
    return defaults


def _eos_of_config(config: Fields) -> tuple[int, ...]:
    section = config.section("text_config") or config  # the language part of a multimodal model
    for fields in (config, section):
        if (ids := _eos_ids(fields)) is not None:
            return ids
    class_eos = _CLASS_EOS.get(config.text("model_type", ""))
    return () if class_eos is None or "eos_token_id" in config else (class_eos,)


def _eos_of_tokenizer(folder: Path) -> list[int]:
    settings = tokenizer_settings(folder, _object)
    eos = settings.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(text, str):
        return []
    listed = settings.get("added_tokens_decoder")
    if isinstance(listed, dict):  # a small file, where the whole tokenizer is a large one
        # Python reads no numbers of thousands of digits.
        numbers = {key: token for key, token in listed.items() if key.isdecimal() and len(key) < 20}
        found = [int(key) for key, token in numbers.items() if _content(token) == text]
        if found:
            return found[:1]
    added = _object(folder / "tokenizer.json").get("added_tokens")
    entries = added if isinstance(added, list) else []
    ids = [entry["id"] for entry in entries if _content(entry) == text and type(entry.get("id")) is int]
    return ids[:1]


def _object(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; empty if the file is missing or is no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    # Not an error here: the code that needs the file reports it.
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _content(token: object) -> object:
    return token.get("content") if isinstance(token, dict) else None


def _eos_ids(fields: Fields) -> tuple[int, ...] | None:
    value = fields.values.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise fields.wrong("eos_token_id", "a token id or a list of them")
    return tuple(dict.fromkeys(ids))
