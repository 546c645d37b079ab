"""Interface of a tokenizer as the actors use it, and the messages to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

import attrs

from triolet.core.output.detokenizer import Piece
from triolet.core.request.prompt import ChatPrompt, TextPair


class TokenizerInterface(Protocol):
    """Tokenizer with methods that any thread may call."""

    def tokenize(self, message: Tokenize) -> Tokenized:
        """Encode a prompt, after rendering it with the chat template if it is a chat.

        Raises:
            InvalidRequest: the prompt cannot be encoded.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        ...


@runtime_checkable
class ContextFreeTokenizer(TokenizerInterface, Protocol):
    """Tokenizer that can name the tokens with the same text in every context."""

    def pieces(self, *, skip_special_tokens: bool) -> Piece:
        """Return the function from a token id to its text in every context; see `Piece`."""
        ...


@runtime_checkable
class SerializableTokenizer(Protocol):
    """Tokenizer that can be written out for another program."""

    def tokenizer_json(self) -> bytes:
        """Return the tokenizer in Hugging Face's format (tokenizer.json), UTF-8; takes no time."""
        ...


MAX_LISTED_TOKENS: Final = 2**17
"""Longest text whose ids are listed where the model's longest sequence sets no limit, tokens.

The list is made by one call that holds the GIL, for 25 ns a token, and a text of so many takes 20 MiB meanwhile.
"""


@attrs.frozen
class Tokenize:
    """Message to the tokenizer; a reply channel is sent with it."""

    # A text, two texts, or chat messages; None where the ids are known already.
    prompt: str | Sequence[Mapping[str, Any]] | ChatPrompt | TextPair | None
    bad_words: tuple[str, ...] = ()  # texts to encode in the forms that a bad word may take
    marks: tuple[str, ...] = ()  # texts to encode as they stand in an answer
    # False to leave out the special tokens that the tokenizer puts around a text; a chat says it in `ChatPrompt`.
    add_special_tokens: bool = True
    # Longest prompt whose ids are wanted, tokens; of a longer one their number is told, or an estimate. None for no
    # limit.
    max_tokens: int | None = None


@attrs.frozen
class Tokenized:
    """Reply of the tokenizer."""

    text: str | None  # the encoded text, after the chat template; None if there was no prompt to encode
    token_ids: tuple[int, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...]  # sequences of ids that write the bad words
    marks_token_ids: tuple[tuple[int, ...], ...] = ()  # ids of each mark
    # Position of the first token of the type that marks the second text of a pair; None for no such token.
    token_type_start: int | None = None
    # Length of a prompt that is longer than `Tokenize.max_tokens`: it has no `token_ids`.
    num_unlisted: int = 0
    is_estimate: bool = False  # whether `num_unlisted` is about the length only

    @property
    def num_tokens(self) -> int:
        """Length of the prompt, tokens; about, if it is an estimate."""
        return len(self.token_ids) + self.num_unlisted

    @property
    def shown_num_tokens(self) -> str:
        """Length of the prompt as an error says it."""
        return f"about {self.num_tokens}" if self.is_estimate else str(self.num_tokens)
