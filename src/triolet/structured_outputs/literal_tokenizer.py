"""A vocabulary in which text is never a special token.

Where a grammar leaves but one text, llguidance asks the tokenizer for its tokens, and lets nothing else come next. A
tokenizer takes `<|end|>` in a text for the special token of that name, which to a grammar is no text: then nothing at
all could come next. Here such a text is spelled. A grammar that wants the special token itself names it outside of
texts, and gets it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cached_property
from typing import Any

from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper


class LiteralTokenizer(TokenizerWrapper):
    """What llguidance asks for the tokens of a text.

    Args:
        whole: the vocabulary as its file has it.
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
        """The text's tokens, none of them special."""
        token_ids = self._whole.tokenize_str(text)
        if any(map(self._whole.is_special_token, token_ids)):
            token_ids = self._speller.tokenize_str(text)
        return token_ids

    @cached_property
    def _speller(self) -> LLTokenizer:
        """Made when it is needed: it takes as long as reading the vocabulary, and hardly any text needs it."""
        return LLTokenizer(_without_names(self._tokenizer_json, set(self.special_token_ids)))


def _without_names(tokenizer_json: str, token_ids: Collection[int]) -> str:
    """The same vocabulary, but no text has the names of these tokens, and all keep their places."""
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
