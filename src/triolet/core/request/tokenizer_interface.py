"""What the actors ask of a tokenizer, whoever brings it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from triolet.core.output.detokenizer import Piece
from triolet.core.request.prompt import ChatPrompt


class TokenizerInterface(Protocol):
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
class ContextFreeTokenizer(TokenizerInterface, Protocol):
    """A tokenizer that knows which of its tokens have the same text wherever they stand."""

    def pieces(self, *, skip_special_tokens: bool) -> Piece:
        """What tells those texts; see `Piece`."""
        ...


@runtime_checkable
class SerializableTokenizer(Protocol):
    """A tokenizer that can be told to another program, token by token."""

    def tokenizer_json(self) -> str:
        """The whole of it, in Hugging Face's form (tokenizer.json)."""
        ...


@attrs.frozen
class Tokenize:
    """To the tokenizer, with a reply channel beside it.

    Args:
        prompt: a text, or chat messages; None where the ids are known already.
        bad_words: texts whose ids are wanted, too.
        marks: texts whose ids are wanted as they stand in an answer.
    """

    prompt: str | Sequence[Mapping[str, Any]] | ChatPrompt | None
    bad_words: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


@attrs.frozen
class Tokenized:
    """The tokenizer's answer.

    Args:
        text: what was encoded, after the chat template; None if there was no prompt to encode.
        token_ids: the prompt.
        bad_words_token_ids: ids that would write the bad words.
        marks_token_ids: ids of the marks.
    """

    text: str | None
    token_ids: tuple[int, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    marks_token_ids: tuple[tuple[int, ...], ...] = ()
