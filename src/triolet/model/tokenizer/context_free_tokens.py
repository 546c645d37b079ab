"""Texts of context-free tokens, which are the same whatever the tokens before them.

Most decoders put one token's text behind the other's, and take something away only where the text begins: `▁the` is
` the` but there. Then decoding a token twice shows it in both places. Of the decoders that `tokenizers` has, those are
named here of which that is known; of all others (WordPiece, which moves spaces before punctuation, CTC, which drops
what is repeated) nothing is.

Not even these have a piece for each token: what a part of a character becomes depends on its neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import tokenizers

from triolet.core.output.detokenizer import BROKEN, Piece, no_piece

MAX_KEPT = 2**16
"""Most tokens with a cached piece, some 150 bytes each: the larger part of any vocabulary."""

FUSING = ("ByteFallback", "Fuse", "Strip")
"""Steps that may follow the replacements in a sentencepiece decoder: in this order, each optional."""


def token_pieces(backend: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> Piece:
    """Return the context-free texts of this tokenizer's tokens.

    Args:
        backend: its decoder must not change after this call.
        skip_special_tokens: whether special tokens have no text.
    """
    if not puts_side_by_side(backend):
        return no_piece

    def decode(*token_ids: int) -> str:
        text: str = backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    @lru_cache(MAX_KEPT)
    def piece(token_id: int) -> str | None:
        # The second one shows the text after the beginning, where many decoders strip a space.
        at_beginning, twice = decode(token_id), decode(token_id, token_id)
        if BROKEN in twice or not twice.startswith(at_beginning):
            return None
        return twice[len(at_beginning) :]

    return piece


def puts_side_by_side(backend: tokenizers.Tokenizer) -> bool:
    """Tell whether the decoder decodes token by token after the beginning of a text."""
    if backend.decoder is None:
        return False
    spec = json.loads(backend.decoder.__getstate__())
    parts = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    if [part["type"] for part in parts] in (["ByteLevel"], ["Metaspace"]):
        return True
    while parts and _replaces_text(parts[0]):
        parts = parts[1:]
    kinds = [part["type"] for part in parts]
    return kinds == [kind for kind in FUSING if kind in kinds] and all(
        part.get("stop", 0) == 0 for part in parts
    )


def _replaces_text(part: Mapping[str, Any]) -> bool:
    return part["type"] == "Replace" and "String" in part["pattern"]
