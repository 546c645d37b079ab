"""Settings beside tokenizer.json that change the tokenizer: more tokens, and a space before a text.

Source: `TokenizersBackend` of transformers, whose order and ids of added tokens these are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel

_NAMED: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


def apply_settings(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], added: Mapping[str, Any]
) -> bool:
    """Change a tokenizer as the settings beside it say.

    Args:
        backend: of tokenizer.json; changed.
        settings: of tokenizer_config.json.
        added: texts and ids of added_tokens.json.

    Returns:
        Whether anything was changed.
    """
    tokens = _missing(backend, settings, added)
    if tokens:
        backend.add_tokens(tokens)
    return _set_prefix_space(backend, settings) or bool(tokens)


def _missing(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], added: Mapping[str, Any]
) -> list[AddedToken]:
    known = list(backend.get_added_tokens_decoder().values())
    # Flags of a token are part of its repr: those of the settings go before those of the file.
    as_they_are = {repr(token) for token in known}
    special = list(_special_tokens(settings))
    listed = settings.get("added_tokens_decoder")
    numbered: Mapping[int, AddedToken | None]
    if isinstance(listed, Mapping):
        numbered = {int(key): _token(token) for key, token in listed.items() if _is_id(key)}
    else:
        texts = {token.content for token in special}
        numbered = {
            index: AddedToken(text, normalized=text not in texts, special=text in texts)
            for text, index in added.items()
            if isinstance(index, int)
        } | backend.get_added_tokens_decoder()
    missing = [
        token for _, token in sorted(numbered.items()) if token is not None and repr(token) not in as_they_are
    ]
    texts = {token.content for token in (*known, *missing)}
    for token in special:
        if token.content not in texts:
            texts.add(token.content)
            missing.append(token)
    named = {
        token.content for token in map(_token, map(settings.get, map("{}_token".format, _NAMED))) if token
    }
    for token in missing:
        token.special = token.special or token.content in named
    return missing


def _special_tokens(settings: Mapping[str, Any]) -> Iterator[AddedToken]:
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    if isinstance(more, Mapping):
        more = list(more.values())
    elif not isinstance(more, list):
        more = []
    for value in (*(settings.get(f"{name}_token") for name in _NAMED), *more):
        if (token := _token(value)) is not None:
            yield token


def _token(value: object) -> AddedToken | None:
    """Return a token from its text, then a special one, or from an object with its flags; None of anything else."""
    if isinstance(value, str) and _is_text(value):
        return AddedToken(value, special=True)
    if not isinstance(value, Mapping) or not isinstance(text := value.get("content"), str):
        return None
    if not _is_text(text):
        return None
    flags = {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
    return AddedToken(text, **flags)


def _is_text(text: str) -> bool:
    """Tell whether a token can have this text: some, without halves of surrogate pairs, which JSON may hold."""
    return bool(text) and not any("\ud800" <= char <= "\udfff" for char in text)


def _is_id(key: str) -> bool:
    # Python reads no numbers of thousands of digits.
    return key.isdecimal() and len(key) < 20


def _set_prefix_space(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> bool:
    wanted, before = settings.get("add_prefix_space"), backend.pre_tokenizer
    is_gpt2 = settings.get("tokenizer_class") in ("GPT2Tokenizer", "GPT2TokenizerFast")
    if not is_gpt2 or not isinstance(wanted, bool) or not isinstance(before, ByteLevel):
        return False
    if before.add_prefix_space == wanted:
        return False
    before.add_prefix_space = wanted
    return True
