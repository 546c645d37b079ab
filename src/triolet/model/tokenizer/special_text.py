"""Special tokens in the texts of users: kept from becoming control tokens of the prompt, where the engine is told so.

Where a text of the user holds the text of a special token, a *mark* is put into the middle of it: one character that
occurs nowhere in the prompt. The chat template renders it as it renders any character. The rendered text is encoded in
the parts between the marks, of which none holds that token any more, and the marks are gone; so every character of the
text reaches the model, and only the template writes special tokens.

A tokenizer of the sentencepiece kind puts a space before the first part of a text. That is no part after a mark: it is
encoded behind a special token, the *anchor*, which is taken away again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import StringIO
from itertools import chain
from typing import Any

import attrs
import tokenizers

from triolet.core.chat_template import with_parsed_arguments
from triolet.core.json_text import giving_way
from triolet.core.request.prompt import ChatPrompt
from triolet.errors import InvalidPrompt

# Characters without a meaning: templates do not look for them.
_PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))

_PROBE = "a"

WINDOW = 2**16
"""Characters that are searched at once: a search holds the GIL, and so long a one for a millisecond."""

Encode = Callable[[str], Sequence[int]]
"""Encoder of one text, without the special tokens around a prompt."""


@attrs.frozen
class MarkedText:
    """Text with a mark in every special token that it must not become."""

    text: str
    mark: str | None = None  # None if nothing is marked

    @property
    def unmarked(self) -> str:
        """The text as the user knows it."""
        if self.mark is None:
            return self.text
        text = StringIO()
        for part in self.parts():
            text.write(part)
        return text.getvalue()

    def parts(self) -> Iterator[str]:
        """Yield the parts between the marks; `split` would make all of them, perhaps a million, in one C call."""
        start = 0
        while self.mark is not None and (end := self.text.find(self.mark, start)) >= 0:
            yield self.text[start:end]
            start = end + len(self.mark)
        yield self.text[start:]


@attrs.frozen
class MarkedChat:
    """Chat with a mark in every special token that its texts must not become."""

    prompt: Sequence[Mapping[str, Any]] | ChatPrompt
    mark: str | None = None  # None if nothing is marked


class SpecialTexts:
    """Texts of a tokenizer's special tokens.

    Args:
        backend: the tokenizer. Special tokens of a single character cannot be marked, and are left as they are.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        special = [token for token in backend.get_added_tokens_decoder().values() if token.special]
        texts = sorted({token.content for token in special if len(token.content) > 1}, key=len, reverse=True)
        # A look-ahead, so that special tokens that overlap are found, too.
        self._found = re.compile(f"(?=({'|'.join(map(re.escape, texts))}))") if texts else None
        self._longest = len(texts[0]) if texts else 0  # characters
        # One that takes away no space beside it.
        self._anchor = next((one.content for one in special if not (one.lstrip or one.rstrip)), None)
        # What the tokenizer puts around texts is seen around this one.
        probe = backend.encode(_PROBE, add_special_tokens=False)
        one, two = backend.post_process(probe), backend.post_process(probe, probe)
        [self._before, self._after] = _around(one.ids, probe.ids)
        [begin, rest] = _around(two.ids, probe.ids)
        self._pair = (begin, *_around(rest, probe.ids))
        # Position of the first token of type 1, counted from the end of the first text.
        self._second_type = two.type_ids.index(1) - len(begin) - len(probe.ids) if 1 in two.type_ids else None

    def mark_text(self, text: str) -> MarkedText:
        """Mark the special tokens in a text."""
        mark = self._mark_for([text])
        return MarkedText(text) if mark is None else MarkedText(self._marked(text, mark), mark)

    def mark_chat(self, prompt: Sequence[Mapping[str, Any]] | ChatPrompt) -> MarkedChat:
        """Mark the special tokens in the values that a chat gives to the template.

        Raises:
            InvalidPrompt: the chat brings a template of its own, which could write any special token.
        """
        chat = prompt if isinstance(prompt, ChatPrompt) else ChatPrompt(messages=prompt)
        if chat.chat_template is not None:
            raise InvalidPrompt(
                "chat_template must be left out: allow_special_tokens is false here, and a template writes them",
                field="chat_template",
            )
        # Parsed here and not in the template: escapes of JSON can hide the text of a special token.
        chat = attrs.evolve(chat, messages=with_parsed_arguments(chat.messages))
        values = {name: getattr(chat, name) for name in ("messages", "tools", "chat_template_kwargs")}
        mark = self._mark_for(_texts(values))
        if mark is None:
            return MarkedChat(chat)
        return MarkedChat(attrs.evolve(chat, **self._marked_values(values, mark)), mark)

    def encode(
        self, marked: MarkedText, encode: Encode, *, add_special_tokens: bool
    ) -> Iterator[Sequence[int]]:
        """Encode a text, so that no special token is read across a mark.

        Args:
            marked: the text.
            encode: the tokenizer's, without the special tokens around a prompt.
            add_special_tokens: whether those are added.
        Returns:
            The token ids, part by part, each encoded when it is asked for.
        """
        parts = self._encode(marked, encode)
        return chain([self._before], parts, [self._after]) if add_special_tokens else parts

    def encode_pair(
        self, first: MarkedText, second: MarkedText, encode: Encode
    ) -> tuple[Iterator[Sequence[int]], Iterator[Sequence[int]]]:
        """Encode two texts to one prompt, with the special tokens around them.

        Returns:
            The token ids up to the end of the first text, and those after it, part by part.
        """
        begin, between, end = self._pair
        rest = chain([between], self._encode(second, encode), [end])
        return chain([begin], self._encode(first, encode)), rest

    def second_type_after(self, num_tokens: int) -> int | None:
        """Return the position of the first token of type 1; None if there is no such type.

        Args:
            num_tokens: up to the end of the first text.
        """
        return None if self._second_type is None else num_tokens + self._second_type

    def _encode(self, marked: MarkedText, encode: Encode) -> Iterator[Sequence[int]]:
        parts = marked.parts()
        yield encode(next(parts))
        for part in parts:
            yield self._behind_anchor(part, encode)

    def _behind_anchor(self, part: str, encode: Encode) -> Sequence[int]:
        return encode(part) if self._anchor is None else encode(self._anchor + part)[1:]

    def _places(self, text: str) -> Iterator[int]:
        """Yield where special tokens begin in a text."""
        if self._found is None:
            return
        for start in _window_starts(text):
            end = start + WINDOW
            for match in self._found.finditer(text, start, end + self._longest - 1):
                if match.start() < end:  # else the next window's
                    yield match.start()

    def _mark_for(self, texts: Iterable[str]) -> str | None:
        """Return a character that is in none of these texts; None if they hold no special token."""
        kept = list(texts)
        if not any(True for text in kept for _ in self._places(text)):
            return None
        used: set[str] = set()
        for text in kept:
            for start in _window_starts(text):
                used.update(text[start : start + WINDOW])
        return next(char for char in map(chr, _PRIVATE_USE) if char not in used)

    def _marked(self, text: str, mark: str) -> str:
        # Joined as it is made: a list of all parts would be joined in one C call.
        marked, start = StringIO(), 0
        for place in self._places(text):
            marked.write(text[start : place + 1] + mark)
            start = place + 1
        marked.write(text[start:])
        return marked.getvalue()

    def _marked_values(self, value: Any, mark: str) -> Any:
        match value:
            case str():
                return self._marked(value, mark)
            case Mapping():
                return {
                    self._marked_values(name, mark): self._marked_values(one, mark)
                    for name, one in giving_way(value.items())
                }
            case list() | tuple():
                return [self._marked_values(one, mark) for one in giving_way(value)]
        return value


def _around(ids: Sequence[int], text_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return what stands before and behind the first occurrence of a text's tokens."""
    size = len(text_ids)
    place = next(place for place in range(len(ids)) if list(ids[place : place + size]) == list(text_ids))
    return list(ids[:place]), list(ids[place + size :])


def _window_starts(text: str) -> range:
    return range(0, len(text), WINDOW)


def _texts(value: Any) -> Iterable[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for one in giving_way((*value.keys(), *value.values())):
                yield from _texts(one)
        case list() | tuple():
            for one in giving_way(value):
                yield from _texts(one)
