"""Incremental detokenization: token ids in, text out, while the answer is still growing, up to a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import attrs

from triolet.errors import InvalidParams

HoldBack = Literal["exact", "blind"]


# Stop strings decide how much text can be shown, and where the answer ends. All stop strings together make
# one automaton (Aho-Corasick): a node is a prefix of a stop string, and after every character the matcher
# stands on the longest one that the text ends with. So the depth of the node *is* the number of characters
# that must be held back: not more, because no text before them can belong to a match that is still to be
# completed, and not less. A character costs constant time on average, however many stop strings there are; no
# text is read twice.
#
# Rules, those of vLLM: the stop string completed earliest wins, and of those completed by the same character
# the first in the list; the text is cut where the match begins, or behind it with `include_in_output`. Text
# of tokens that may not end the answer (`min_tokens`) completes no match, but a later match may begin in it.
@attrs.define(eq=False)
class _Node:
    """Prefix of one or more stop strings."""

    depth: int  # its length, characters
    # Place in the list of the stop string that ends here, or in a shorter node that this one ends with.
    order: int | None = None
    children: dict[str, _Node] = attrs.field(factory=dict)
    fallback: _Node | None = None  # the longest other node that this one ends with; None for the root

    def after(self, char: str) -> _Node:
        """Return the longest node that the text ends with once `char` has followed."""
        node = self
        while (child := node.children.get(char)) is None:
            if node.fallback is None:
                return node
            node = node.fallback
        return child

    def unfinished(self) -> _Node:
        """Return the longest node, this one or a fallback, that a further character can continue."""
        node = self
        while not node.children and node.fallback is not None:
            node = node.fallback
        return node


def _automaton(stop: Sequence[str]) -> _Node:
    """Return the root of the automaton for these stop strings. Source: Aho and Corasick, CACM 18(6), 1975."""
    root = _Node(0)
    for order, text in enumerate(stop):
        node = root
        for char in text:
            node = node.children.setdefault(char, _Node(node.depth + 1))
        if node.order is None:
            node.order = order
    reached = deque([root])
    while reached:
        node = reached.popleft()
        for char, child in node.children.items():
            child.fallback = root if node.fallback is None else node.fallback.after(char)
            child.order = min((o for o in (child.order, child.fallback.order) if o is not None), default=None)
            reached.append(child)
    return root


class StopMatcher:
    """Filter that passes text on, and ends it at the first stop string.

    Args:
        stop: the stop strings, none of them empty; none at all is fine.
        include_in_output: show the stop string too. Nothing needs to be held back then.
        hold_back: `exact` holds back only a tail that is a beginning of a stop string; `blind` always holds the
            longest stop string's length less one, as vLLM does. The whole text is the same, its pieces differ.

    Raises:
        InvalidParams: a stop string is empty.
    """

    def __init__(
        self, stop: Sequence[str], *, include_in_output: bool = False, hold_back: HoldBack = "exact"
    ) -> None:
        if not all(stop):
            raise InvalidParams("stop cannot contain an empty string.", field="stop", got=stop)
        self._stop = tuple(stop)
        self._include_in_output = include_in_output
        self._blind_length = max(map(len, stop), default=1) - 1 if hold_back == "blind" else None
        self._node = _automaton(stop)
        self._held = ""
        self.matched: str | None = None
        """Stop string that ended the text, or None."""

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """Add the next piece; return the text that can be shown now. After a match all text is dropped.

        Args:
            text: what follows all earlier pieces.
            may_stop: whether a stop string completed by this piece ends the text.
        """
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        for length, char in enumerate(text, 1):
            self._node = self._node.after(char)
            if self._node.order is not None and may_stop:
                return self._end(self._held + text[:length], self._stop[self._node.order])
            self._node = self._node.unfinished()
        return self._release(self._held + text)

    def flush(self) -> str:
        """End the text without a match; return the text held back."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, matched: str) -> str:
        self.matched, self._held = matched, ""
        return text if self._include_in_output else text[: len(text) - len(matched)]

    def _release(self, text: str) -> str:
        shown = max(0, len(text) - self._num_to_hold())
        self._held = text[shown:]
        return text[:shown]

    def _num_to_hold(self) -> int:
        """Return how many characters at the end must not be shown yet."""
        if self._include_in_output:
            return 0
        return self._node.depth if self._blind_length is None else self._blind_length


# A token alone has no text: it may be a third of a character, and a sentencepiece token loses its leading
# space at the start of a text. So tokens are decoded together with a few before them, the *window*, and the
# new text is the part of the window's text that was not shown yet. Text that ends in U+FFFD may be the
# beginning of a character; it is held back until it is known to be one, or known not to be.
#
# Three properties of decoders, and their consequences:
#
# * A byte-level decoder shows an unfinished character as one U+FFFD, a byte-fallback decoder shows one for each of its
#   bytes. A character has at most 4 bytes, so at most the last 3 U+FFFD are held back; any before them are genuine.
# * A byte-fallback decoder shows a whole run of bytes as U+FFFD while its last character is unfinished, so text that
#   was shown long ago can look broken for some tokens. That is waited for; if it does not pass, the tokens that were
#   not shown yet are decoded without those before them.
# * Tokens without text (skipped special tokens) are removed from the window. So the window always has some text, and
#   the space before the next word is never taken for the first one.
#
# A long window is cut where whole characters begin, so the work per token is constant.
#
# Most tokens need no window: after whole characters their text is always the same, their *piece*. If the
# tokenizer knows pieces, they are used, and a window is made only for a token that has none.
#
# Source: the two offsets of vLLM's `detokenize_incrementally`, which waits without bound for a character's
# end.
BROKEN = "\N{REPLACEMENT CHARACTER}"

MAX_UNFINISHED = 3
"""Most bytes of an unfinished character; so also the most tokens, and the most U+FFFD, that it can make up."""

PROMPT_TOKENS = 6
"""Tokens at the end of the prompt that the first window begins with; more, if these have no text."""

WINDOW_TOKENS = 8
"""A window longer than this is cut as soon as its text is whole. Shorter windows cost more cuts, longer ones more
decoding per token."""

MAX_WINDOW_TOKENS = 32
"""A window longer than this is cut even if no token has ended with a whole character."""

Decode = Callable[[Sequence[int]], str]

Piece = Callable[[int], str | None]
"""Text that a token adds after any text of whole characters; None if that is not known, or depends on that text."""


def no_piece(token_id: int) -> None:
    """Return None for every token: nothing is known of this decoder."""


class IncrementalDetokenizer:
    """Decoder of one answer's tokens into pieces of text, none of which ends inside a character.

    All pieces together, that of `flush` included, are the text that the answer's tokens add to the prompt's. A
    character that the end of the answer cuts in two is left out, as in vLLM.

    Args:
        decode: the tokenizer's decoder, a pure function. It may skip special tokens or show them; it must not change
    the
            spaces around punctuation (`clean_up_tokenization_spaces`), since that changes text already shown.
        prompt_token_ids: the prompt; its end decides, for instance, whether the answer begins with a space.
        piece: text of single tokens under this decoder, where it is known.
    """

    def __init__(
        self, decode: Decode, prompt_token_ids: Sequence[int] = (), *, piece: Piece = no_piece
    ) -> None:
        self._decode, self._piece = decode, piece
        self._tokens = _last_tokens_with_text(decode, prompt_token_ids)
        self._text = decode(self._tokens) if self._tokens else ""  # of the window
        self._shown = _without_tail(self._text)  # its beginning that was shown
        self._first_unshown = len(self._tokens)  # a window may begin here
        # A prompt may end inside a character. If the answer completes it, the character is the answer's.
        self._num_broken_of_prompt = len(self._text) - len(self._shown)
        self._is_whole = self._ends_with_character()
        self._last_piece: int | None = (
            None  # the last token that was no more than its piece, since the window's
        )

    def add(self, token_id: int) -> str:
        """Add the next token; return the text that is complete with it, often none."""
        if self._is_whole and (piece := self._piece(token_id)) is not None:
            if piece:
                self._last_piece = token_id
            return piece
        if self._last_piece is not None:
            self._begin_behind(self._last_piece)
        new = self._add_to_window(token_id)
        self._is_whole = self._ends_with_character()
        return new

    def _ends_with_character(self) -> bool:
        """Return True if all of the window was shown, so that no later token can change its text."""
        return self._text == self._shown != "" and not self._text.endswith(BROKEN)

    def _begin_behind(self, token_id: int) -> None:
        """Begin a window after that token, which had a piece: no earlier token can change the text after it."""
        self._tokens, self._last_piece = (
            [token_id, token_id],
            None,
        )  # twice, for one of them may lose its space
        self._text = self._shown = self._decode(self._tokens)
        self._first_unshown = len(self._tokens)

    def _add_to_window(self, token_id: int) -> str:
        self._tokens.append(token_id)
        text = self._decode(self._tokens)
        if text == self._text and self._has_no_text(token_id):
            self._tokens.pop()
            return ""
        self._text = text
        if not text.startswith(self._shown):
            if text.endswith(BROKEN) and len(self._tokens) - self._first_unshown <= MAX_UNFINISHED:
                return ""
            self._begin_anew()
        return self._show(_without_tail(self._text, keep=len(self._shown)))

    def flush(self) -> str:
        """End the answer; return the text that waited for the end of a character. The unfinished character itself is
        dropped: its tokens belong to the answer, and have no text.
        """
        if not self._text.startswith(self._shown):
            self._begin_anew()
        return self._show(_without_tail(self._text, keep=len(self._shown)))

    def _has_no_text(self, token_id: int) -> bool:
        """Return True if a token that changed nothing is no byte inside a character and no dropped leading space."""
        if self._text and self._text == self._shown:
            return True
        return self._decode([token_id, token_id]) == ""  # twice, for one of them may lose its space

    def _begin_anew(self) -> None:
        """Drop the tokens that were shown from the window."""
        self._tokens = self._tokens[self._first_unshown :]
        self._first_unshown = 0
        self._text, self._shown = self._decode(self._tokens), ""

    def _show(self, shown: str) -> str:
        """Mark `shown` as the part of the window's text that was shown; return the new text in it."""
        new, self._shown = shown[len(self._shown) :], shown
        num_unfinished = len(self._text) - len(shown)
        is_whole = num_unfinished == 0 and len(self._tokens) > WINDOW_TOKENS
        if not (is_whole and self._cut(self._first_unshown)) and len(self._tokens) > MAX_WINDOW_TOKENS:
            self._cut(len(self._tokens) - WINDOW_TOKENS)
        if new or not num_unfinished:
            self._first_unshown = max(0, len(self._tokens) - num_unfinished)
        return self._without_prompt(new)

    def _cut(self, first: int) -> bool:
        """Drop the tokens before `first` from the window, unless too little text would be left."""
        num_unfinished = len(self._text) - len(self._shown)
        text = self._decode(self._tokens[first:])
        if len(text) <= num_unfinished:
            return False
        self._tokens = self._tokens[first:]
        self._first_unshown = max(0, self._first_unshown - first)
        self._text, self._shown = text, text[: len(text) - num_unfinished]
        return True

    def _without_prompt(self, new: str) -> str:
        """Remove the unfinished character at the end of the prompt, if the answer did not complete it."""
        while new and self._num_broken_of_prompt:
            self._num_broken_of_prompt = self._num_broken_of_prompt - 1 if new.startswith(BROKEN) else 0
            new = new.removeprefix(BROKEN)
        return new


def _last_tokens_with_text(decode: Decode, token_ids: Sequence[int]) -> list[int]:
    """Return the last tokens, as many as needed for a text that begins with a whole character."""
    num_tokens = PROMPT_TOKENS
    while num_tokens < len(token_ids):
        text = decode(token_ids[-num_tokens:])
        if text and not text.startswith(BROKEN):
            break
        num_tokens *= 2
    return list(token_ids[-num_tokens:])


def _without_tail(text: str, *, keep: int = 0) -> str:
    """Return the text without a possibly unfinished character at its end, but at least `keep` characters."""
    tail = text[max(keep, len(text) - MAX_UNFINISHED) :]
    return text[: len(text) - len(tail) + len(tail.rstrip(BROKEN))]


@attrs.frozen
class TextDelta:
    """Text that one step's tokens added to an answer."""

    text: str  # the text that can be shown now; the first one that is shown follows the last that was
    # How many of the tokens belong to the answer. Fewer than came if a stop string was completed before the
    # last of them.
    num_tokens: int
    stop_reason: str | None = None  # the stop string that ended the answer, or None


class OutputText:
    """Text of one answer: detokenized, and ended at the first stop string.

    The text depends on the tokens alone, not on how they are distributed over steps. So after a crash of the
    detokenizer a new object is made, the tokens whose text was delivered are added again, and that text is dropped.

    Args:
        stop: the stop strings.
        include_stop_str_in_output: show the stop string or stop token that ended the answer.
        min_tokens: the text of the first `min_tokens` tokens does not end the answer.
    """

    def __init__(
        self,
        decode: Decode,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        hold_back: HoldBack = "exact",
        piece: Piece = no_piece,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(decode, prompt_token_ids, piece=piece)
        self._matcher = StopMatcher(stop, include_in_output=include_stop_str_in_output, hold_back=hold_back)
        self._shows_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens that belong to the answer so far."""
        return self._num_tokens

    @property
    def stop_reason(self) -> str | None:
        """Stop string that ended the answer, or None."""
        return self._matcher.matched

    def add(self, token_ids: Sequence[int], *, hide_last: bool = False) -> TextDelta:
        """Add the tokens of one step, in order.

        Args:
            token_ids: none, one or several. Those behind the one that completes a stop string are dropped.
            hide_last: the last one ended the answer (end of sequence, stop token), so it is no text, unless
                what ended the answer is to be shown.
        """
        text, matcher, num_before = "", self._matcher, self._num_tokens
        num_read = len(token_ids) - (hide_last and not self._shows_stop)
        for place, token_id in enumerate(token_ids):
            if matcher.matched is not None:
                break
            self._num_tokens += 1
            if place < num_read:
                may_stop = self._num_tokens > self._min_tokens
                text += matcher.feed(self._detokenizer.add(token_id), may_stop=may_stop)
        return TextDelta(text, self._num_tokens - num_before, matcher.matched)

    def flush(self) -> str:
        """End the answer; return the text held back, which is empty after a stop string."""
        return self._matcher.feed(self._detokenizer.flush(), may_stop=False) + self._matcher.flush()


# Texts of single tokens, which log-probabilities show. The texts of an answer's tokens, concatenated, are the
# text of the answer. So a token keeps its leading space, although decoders drop the space at the start of a
# text; and a token that is part of a character has no text, unless it completes the character: then it has
# all of it. The tokens before it decide, and these are the answer's (or prompt's) own, also for a token that
# was not chosen.
#
# Source: vLLM's `LogprobsProcessor` and `convert_ids_list_to_tokens`.
MAX_BEFORE = 4
"""Tokens that can have begun a character: it has at most 4 bytes."""

MAX_KEPT = 4_096

DecodeToken = Callable[[int, Sequence[int]], str | None]
"""Text of a token, from its id and those before it. None where texts are not wanted."""


def no_text(token_id: int, before: Sequence[int]) -> None:
    """Return None for every token: the request wants no texts."""


def token_decoder(decode: Decode) -> DecodeToken:
    """Return a function that gives tokens their texts.

    Args:
        decode: of the tokenizer; shows special tokens.
    """

    @lru_cache(MAX_KEPT)
    def text_alone(token_id: int) -> str:
        text = decode([token_id])
        if text.endswith(BROKEN):
            return text
        return decode([token_id, token_id])[len(text) :]  # where it does not come first, it keeps its space

    def text_after(token_id: int, before: Sequence[int]) -> str:
        text = text_alone(token_id)
        is_part = text.startswith(BROKEN) or text.endswith(BROKEN)
        return _completed(decode, token_id, text, before[-MAX_BEFORE:]) if is_part else text

    return text_after


def _completed(decode: Decode, token_id: int, alone: str, before: Sequence[int]) -> str:
    """Return the text of a token with a part of a character: with the character that it completes, or nothing.

    Args:
        alone: its text by itself.
        before: the tokens before it.
    """
    broken = "" if alone.endswith(BROKEN) else alone
    for first in range(len(before) - 1, -1, -1):
        whole = decode([*before[first:], token_id])
        if BROKEN not in whole:
            return whole  # from the token in which the character begins on: none of them has been shown
        if not broken and not whole.endswith(BROKEN):
            broken = whole
    return broken
