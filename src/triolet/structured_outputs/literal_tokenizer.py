"""Tokenizer for llguidance in which text is never a special token.

Where a grammar allows only one text, llguidance asks the tokenizer for its tokens and allows only these. A tokenizer
reads `<|end|>` in a text as the special token of that name, which is no text to a grammar: then no token would be
allowed. Here such a text is spelled with ordinary tokens. A grammar that means the special token names it outside of
string literals.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cached_property
from typing import Any

from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper


class LiteralTokenizer(TokenizerWrapper):
    """Tokenizer that llguidance calls for the tokens of a literal text.

    Args:
        whole: the vocabulary of the file.
        tokenizer_json: that file's text.
        vocab_size: of the model, which may have room for more tokens than the file names.
    """

    is_tokenizer_wrapper = True

    def __init__(self, whole: LLTokenizer, tokenizer_json: str, vocab_size: int) -> None:
        everything = range(whole.vocab_size)
        self.eos_token_id = whole.eos_token
        self.bos_token_id = None
        self.tokens = [whole.decode_bytes([token_id]) for token_id in everything]
        self.tokens += [b""] * (vocab_size - whole.vocab_size)
        self.special_token_ids = [token_id for token_id in everything if whole.is_special_token(token_id)]
        self._whole = whole
        self._tokenizer_json = tokenizer_json

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text, none of them special."""
        token_ids = self._whole.tokenize_str(text)
        if any(map(self._whole.is_special_token, token_ids)):
            token_ids = self._speller.tokenize_str(text)
        return token_ids

    @cached_property
    def _speller(self) -> LLTokenizer:
        """Tokenizer without special tokens."""
        # Made when first needed: it takes as long as loading the vocabulary, and hardly any text needs it.
        return LLTokenizer(_without_names(self._tokenizer_json, set(self.special_token_ids)))


def _without_names(tokenizer_json: str, token_ids: Collection[int]) -> str:
    """Return the vocabulary without the names of these tokens; all ids stay the same."""
    facts: dict[str, Any] = json.loads(tokenizer_json)
    vocab = facts["model"].get("vocab", ())
    known = set(vocab) if isinstance(vocab, dict) else {piece for piece, _ in vocab}
    kept = []
    for token in facts.get("added_tokens", ()):
        if token["id"] not in token_ids:
            kept.append(token)
        elif token["content"] not in known:  # else its place is the model's, and needs no holding
            kept.append({**token, "content": f"\U0010fffe{token['id']}"})  # that code point is no character
    return json.dumps({**facts, "added_tokens": kept})
