"""Format `gpt_oss`, OpenAI's harmony: an answer is a series of messages in channels. gpt-oss writes it.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

The prompt ends with `<|start|>assistant`. The recipient of a call may also stand before the channel, and the type may
be left out. A commentary without a recipient is text for the user, said before calls.

Marks that no header follows or precedes are text, as in an answer about the format. A call of a function that may not
be called, or of anything else, is text with its header.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar, Final

from triolet.core.tools.automaton import Automaton
from triolet.core.tools.calls import CallWriter
from triolet.core.tools.events import AnswerEvent, ReasoningPiece, TextPiece
from triolet.core.tools.scanning import WHITESPACE, ValueScanner, split_at_marker

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDINGS: Final = ("<|end|>", "<|return|>", "<|call|>")
FUNCTIONS: Final = "functions."  # the namespace of the request's tools
PROMPTED: Final = f"{START}assistant"
CHANNELS: Final = ("analysis", "commentary", "final")
MAX_HEADER_CHARS = 256  # a name has at most 64

_OPENINGS = (PROMPTED, *(CHANNEL + name for name in CHANNELS))
_BEHIND_ROLE = ("to=", *_OPENINGS[1:], MESSAGE, *ENDINGS)
# Possessive throughout: a long run of spaces must not be tried in all its parts.
_RECIPIENT = r"(?:\s++to=(?P<{}>[^\s<]++))?"
_HEADER = re.compile(
    rf"\s*+(?:{re.escape(PROMPTED)}{_RECIPIENT.format('early')}\s*+)?"
    rf"(?P<shown>{re.escape(CHANNEL)}(?P<channel>{'|'.join(CHANNELS)}){_RECIPIENT.format('late')}"
    rf"\s*+(?:{re.escape(CONSTRAIN)})?\w*+\s*+)?"
)
_BODILESS = re.compile(rf"(?P<header>{_HEADER.pattern})(?P<ending>{'|'.join(map(re.escape, ENDINGS))})")


def opens_final(prompt: str) -> bool:
    """Return True if a prompt ends within the text for the user, which an answer then continues."""
    turn = prompt[prompt.rfind(START) :]
    header, found, body = turn.partition(MESSAGE)
    is_open = bool(found) and not any(ending in body for ending in ENDINGS)
    match = _HEADER.fullmatch(header)
    return is_open and match is not None and match["channel"] == "final"


class HarmonyFormat(Automaton):
    """Parser of an answer in harmony: finds the reasoning, the text and the calls, however the text is cut.

    Args:
        names: of the functions that may be called; every name is one that is not barred.
        barred: names of those that may not.
        prompt: its text; the answer may continue a message of it.
        finds_calls: False leaves calls in the text.
        splits_reasoning: False leaves the reasoning in the text.
        has_preambles: False makes reasoning of what is said before calls, for answers whose text has a form.
    """

    MARKS: ClassVar[tuple[str, ...]] = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDINGS)

    def __init__(
        self,
        names: Collection[str] = (),
        barred: Collection[str] = (),
        *,
        prompt: str = "",
        finds_calls: bool = True,
        splits_reasoning: bool = False,
        has_preambles: bool = True,
    ) -> None:
        super().__init__(self._in_header)
        self._barred = frozenset(barred)
        self._finds_calls, self._has_preambles = finds_calls, has_preambles
        self._reasoning: type[TextPiece | ReasoningPiece] = ReasoningPiece if splits_reasoning else TextPiece
        self._kind: type[TextPiece | ReasoningPiece] = TextPiece  # of the open message
        self._writer: CallWriter | None = None  # of the open call
        self._value = ValueScanner()  # of its arguments
        self._num_calls = 0
        self._ending = ""  # the mark that announced a header, text of the open message if none follows
        self._prompted = PROMPTED  # what the prompt holds of the header
        self._is_new = False  # nothing of the open message was returned
        self._said: set[type] = set()  # kinds of messages since the last call
        self._continue(prompt)

    def _continue(self, prompt: str) -> None:
        """Begin where the prompt ends."""
        if (place := prompt.rfind(START)) < 0:
            return
        turn = prompt[place:]
        # It may also end with the turn of another, if the model is to write its own header.
        is_open = turn.startswith(PROMPTED) and not any(ending in turn for ending in ENDINGS)
        header, found, _ = turn.partition(MESSAGE)
        self._prompted = header if is_open else ""
        if is_open and found:
            self.feed(MESSAGE)

    def finish(self) -> list[AnswerEvent]:
        """End the answer: return the text held back, and end the call that is open."""
        # A header that was cut short says nothing, and arguments have no beginning of a mark behind them.
        is_text = self._state != self._in_header and self._writer is None
        held, self._held, self._ending = self._held, "", ""
        return [*(self._piece(held) if is_text else []), *self._end_call()]

    # --------------------------------------------------------------------------------------- headers

    def _in_header(self) -> list[AnswerEvent] | None:
        header = self._prompted + self._held
        if not _may_be_header(header):
            return self._give_back()
        end = header.find(MESSAGE, 0, MAX_HEADER_CHARS)
        if end >= 0 and (match := _HEADER.fullmatch(header, 0, end)):
            self._held = header[end + len(MESSAGE) :]
            return self._begin(match)
        if match := _BODILESS.match(header, 0, MAX_HEADER_CHARS):
            self._ending, self._prompted = match["ending"], ""
            self._held = header[match.end() :]
            return []
        return self._give_back() if end >= 0 or len(header) >= MAX_HEADER_CHARS else None

    def _give_back(self) -> list[AnswerEvent]:
        """Read on in the open message, since what looked like a header is none."""
        self._state = self._in_body
        mark, self._ending = self._ending, ""
        if not mark and not self._prompted:
            mark = next((mark for mark in (START, CHANNEL) if self._held.startswith(mark)), "")
            self._held = self._held[len(mark) :]
        self._prompted = ""
        return self._piece(mark)

    def _begin(self, header: re.Match[str]) -> list[AnswerEvent]:
        """Begin the message of this header."""
        self._state, self._ending, self._prompted = self._in_body, "", ""
        recipient = header["late"] or header["early"]
        self._kind = TextPiece
        if header["channel"] == "analysis" or (header["channel"] == "commentary" and not self._has_preambles):
            self._kind = self._reasoning
        self._is_new = True
        if recipient is None:
            return []
        name = recipient.removeprefix(FUNCTIONS)
        if self._finds_calls and name and name != recipient and name not in self._barred:
            self._writer, self._value = CallWriter(self._num_calls, name), ValueScanner()
            self._num_calls += 1
            self._said.clear()
            return self._writer.begin()
        early = f" to={header['early']}" if header["early"] else ""
        return self._piece(f"{early}{header['shown'] or ''}{MESSAGE}")

    # ---------------------------------------------------------------------------------------- bodies

    def _in_body(self) -> list[AnswerEvent] | None:
        if self._writer is not None and not (self._value.is_over or self._value.is_broken):
            # A string of the arguments may hold anything, marks too.
            end = self._value.take(self._held, 0)
            arguments, self._held = self._held[:end], self._held[end:]
            return self._piece(arguments)
        body, mark, rest = split_at_marker(self._held, (*ENDINGS, START, CHANNEL))
        self._held = rest
        events = self._piece(body)
        if mark is None:
            return events or None
        self._state = self._in_header
        if self._writer is not None:
            events += self._end_call()
        elif mark in ENDINGS:
            self._ending = mark
        if mark not in ENDINGS:  # a model may leave the end of a message out
            self._held = mark + rest
        return events

    def _piece(self, text: str) -> list[AnswerEvent]:
        """Return a piece of the open message; messages of a kind are lines of their own."""
        if not text:
            return []
        if self._writer is not None:
            return self._writer.arguments(text)
        begin = "\n" if self._is_new and self._kind in self._said else ""
        self._is_new = False
        self._said.add(self._kind)
        return [self._kind(begin + text)]

    def _end_call(self) -> list[AnswerEvent]:
        writer, self._writer, self._kind = self._writer, None, TextPiece
        return writer.end() if writer is not None else []


def _may_be_header(text: str) -> bool:
    """Return True if this is a header, or the beginning of one, as far as its first words tell."""
    text = text.lstrip(WHITESPACE)
    if not _are_alike(text, _OPENINGS):
        return False
    rest = text.removeprefix(PROMPTED)
    return rest == text or _are_alike(rest.lstrip(WHITESPACE), _BEHIND_ROLE)


def _are_alike(text: str, beginnings: Collection[str]) -> bool:
    return any(text.startswith(beginning) or beginning.startswith(text) for beginning in beginnings)
