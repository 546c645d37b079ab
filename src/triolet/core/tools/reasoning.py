"""Reasoning that a model writes before its answer, and its split from the answer; `REASONING_FORMATS` has the markers.

qwen3        <think>...</think> at the beginning of the answer, or no reasoning at all; Qwen3 and many others
deepseek_r1  everything up to </think>; the opening marker is part of the prompt, or left out; no reasoning where the
             prompt ends it
mistral      [THINK]...[/THINK] at the beginning of the answer
gpt_oss      everything before the message in the channel `final`; `harmony` splits such an answer
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

import attrs

from triolet.core.tools.events import AnswerEvent, ReasoningPiece, TextPiece
from triolet.core.tools.harmony import CHANNEL, ENDINGS, MESSAGE, PROMPTED, START, opens_final
from triolet.core.tools.scanning import WHITESPACE, split_at_marker

_TURN_MARK = re.compile(r"<[|｜][^<>]{1,40}[|｜]>|<(?:start|end)_of_turn>|\[/?INST\]|</?s>")
"""What templates write between turns."""


class ReasoningState(Enum):
    """Place of an answer's beginning in the reasoning."""

    BEFORE = auto()  # reasoning or text may follow
    INSIDE = auto()
    BEHIND = auto()  # the prompt has ended it, or left it out


@attrs.frozen
class ReasoningFormat:
    """Markers around reasoning."""

    opening: str  # the text that begins it
    closing: str  # the text that ends it
    certain: str  # beginning of the closing mark behind which the rest of it must follow
    is_implied: bool = False  # it has begun where the answer begins, whether or not the opening mark is there
    lead: str = ""  # text that stands before the closing mark where reasoning is broken off
    freeing: tuple[str, ...] = ()  # texts that end it as well, in an answer without a form

    @property
    def marks(self) -> tuple[str, ...]:
        """Both markers."""
        return self.opening, self.closing

    def state_after(self, prompt: str) -> ReasoningState:
        """Return where an answer begins: some templates write the opening marker, and some both or the closing one.

        A marker in an earlier turn is only spoken of.
        """
        opened, closed = prompt.rfind(self.opening), prompt.rfind(self.closing)
        if max(opened, closed) < 0 or _TURN_MARK.search(prompt, max(opened, closed)):
            return ReasoningState.INSIDE if self.is_implied else ReasoningState.BEFORE
        if opened > closed:
            return ReasoningState.INSIDE
        is_last = not prompt[closed + len(self.closing) :].strip()
        # The pattern does not know the turn marks of all templates: the reasoning may be that of an earlier turn.
        return ReasoningState.BEHIND if is_last or self.is_implied else ReasoningState.BEFORE

    def is_decided_by(self, end: str) -> bool:
        """Return True if `state_after` is the same for every prompt with this end."""
        return any(mark in end for mark in self.marks) or _TURN_MARK.search(end) is not None


@attrs.frozen
class HarmonyReasoning(ReasoningFormat):
    """Messages before the final one, in the format of gpt-oss."""

    def state_after(self, prompt: str) -> ReasoningState:
        return ReasoningState.BEHIND if opens_final(prompt) else ReasoningState.INSIDE

    def is_decided_by(self, end: str) -> bool:
        return START in end


HARMONY: Final = "gpt_oss"
"""Name of the format of gpt-oss, both of reasoning and of calls."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    # Where the marks are no tokens of their own, the last character may be one with the line break behind it.
    "qwen3": ReasoningFormat("<think>", "</think>", certain="</think"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", is_implied=True, certain="</think"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", certain="[/THINK"),
    HARMONY: HarmonyReasoning(
        f"{CHANNEL}analysis{MESSAGE}",
        f"{CHANNEL}final{MESSAGE}",
        is_implied=True,
        certain=f"{CHANNEL}final",
        lead=f"{ENDINGS[0]}{PROMPTED}",
        freeing=(f"{CHANNEL}final", f"{CHANNEL}commentary"),
    ),
}


class ReasoningSplitter:
    """Splitter of an answer into reasoning and the rest, the same however the text is cut into pieces.

    Args:
        marks: around the reasoning.
        prompt: its text; reasoning may begin or end there.
    """

    def __init__(self, marks: ReasoningFormat, prompt: str = "") -> None:
        self._marks = marks
        self._is_at_beginning = True
        self._is_inside = marks.state_after(prompt) is ReasoningState.INSIDE
        self._held = ""
        self._spacing: list[str] = []  # whitespace before all else

    def feed(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of text."""
        self._held += text
        if self._is_at_beginning and not self._has_begun():
            return []
        events: list[AnswerEvent] = []
        if self._is_inside:
            reasoning, closing, self._held = split_at_marker(self._held, [self._marks.closing])
            self._is_inside = closing is None
            events += [ReasoningPiece(reasoning)] if reasoning else []
        if not self._is_inside and self._held:
            events.append(TextPiece(self._held))
            self._held = ""
        return events

    def _has_begun(self) -> bool:
        """Look for the opening marker after optional whitespace; return False if it may still be coming."""
        opening, bare = self._marks.opening, self._held.lstrip(WHITESPACE)
        self._spacing.append(self._held[: len(self._held) - len(bare)])
        self._held = bare
        if len(bare) < len(opening) and opening.startswith(bare):
            return False
        if bare.startswith(opening):
            self._is_inside, self._held = True, bare[len(opening) :]
        else:
            self._held = "".join([*self._spacing, bare])
        self._spacing.clear()
        self._is_at_beginning = False
        return True

    def finish(self) -> list[AnswerEvent]:
        """End the answer: return the text held back."""
        held, self._held = "".join([*self._spacing, self._held]), ""
        self._spacing.clear()
        return [ReasoningPiece(held) if self._is_inside else TextPiece(held)] if held else []
