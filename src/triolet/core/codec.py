"""What the actors ask of a tokenizer, whoever brings it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from triolet.core.detokenizer import Piece
from triolet.core.messages import Tokenize, Tokenized


class TextCodec(Protocol):
    """Text to ids and back. Its methods may be called from any thread."""

    def tokenize(self, message: Tokenize) -> Tokenized:
        """Render, if it is a conversation, and encode.

        Raises:
            InvalidRequest: the prompt can not be encoded.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        ...


@runtime_checkable
class PieceCodec(TextCodec, Protocol):
    """A tokenizer that knows which of its tokens have the same text wherever they stand."""

    def pieces(self, *, skip_special_tokens: bool) -> Piece:
        """What tells those texts; see `Piece`."""
        ...


@runtime_checkable
class SpelledCodec(Protocol):
    """A tokenizer that can be told to another program, token by token."""

    def tokenizer_json(self) -> str:
        """The whole of it, in Hugging Face's form (tokenizer.json)."""
        ...
