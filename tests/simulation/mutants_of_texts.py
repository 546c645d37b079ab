"""Defects of the detokenizer and of the stop matcher; see `mutation`.

The oracle of texts (`text_oracle`) shares no code with either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.simulation.mutation import mutant
from triolet.core.output import detokenizer
from triolet.core.output.detokenizer import IncrementalDetokenizer, OutputText, StopMatcher


@mutant("an unfinished character is shown")
def _unfinished_shown(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(detokenizer, "_without_tail", lambda text, *, keep=0: text)


@mutant("an unfinished character of the prompt is the answer's")
def _prompts_half_shown(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IncrementalDetokenizer, "_without_prompt", lambda self, new: new)


@mutant("a character that the prompt began is not the answer's")
def _completed_character_lost(patch: pytest.MonkeyPatch) -> None:
    original = IncrementalDetokenizer._without_prompt

    def mutated(self: IncrementalDetokenizer, new: str) -> str:
        was_broken = self._num_broken_of_prompt
        shown = original(self, new)
        return shown[1:] if was_broken and new and not new.startswith(detokenizer.BROKEN) else shown

    patch.setattr(IncrementalDetokenizer, "_without_prompt", mutated)


@mutant("the text of a token that ends the answer is shown")
def _ending_shown(patch: pytest.MonkeyPatch) -> None:
    add = OutputText.add

    def mutated(self: OutputText, token_ids: Sequence[int], *, hide_last: bool = False) -> Any:
        return add(self, token_ids, hide_last=False)

    patch.setattr(OutputText, "add", mutated)


@mutant("the text of a token that ends the answer is hidden where it is to be shown")
def _ending_hidden(patch: pytest.MonkeyPatch) -> None:
    init = OutputText.__init__

    def mutated(self: OutputText, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self._shows_stop = False

    patch.setattr(OutputText, "__init__", mutated)


@mutant("a stop string counts one token before min_tokens")
def _stops_too_early(patch: pytest.MonkeyPatch) -> None:
    init = OutputText.__init__

    def mutated(self: OutputText, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self._min_tokens = max(0, self._min_tokens - 1)

    patch.setattr(OutputText, "__init__", mutated)


@mutant("what was held back is lost at the end")
def _held_back_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StopMatcher, "flush", lambda self: "")


@mutant("a stop string is shown in part")
def _stop_shown_in_part(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StopMatcher, "_num_to_hold", lambda self: 0)


@mutant("the stop string is cut although it is to be shown")
def _stop_cut(patch: pytest.MonkeyPatch) -> None:
    init = StopMatcher.__init__

    def mutated(self: StopMatcher, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self._include_in_output = False

    patch.setattr(StopMatcher, "__init__", mutated)


@mutant("of two stop strings that end together the last in the list wins")
def _last_stop_wins(patch: pytest.MonkeyPatch) -> None:
    automaton = detokenizer._automaton

    def mutated(stop: Sequence[str]) -> Any:
        return automaton(stop) if len(stop) < 2 else _reordered(automaton(stop[::-1]), len(stop))

    patch.setattr(detokenizer, "_automaton", mutated)


def _reordered(root: Any, num_stops: int) -> Any:
    """Number the stop strings of a reversed list as they stand in the list itself."""
    nodes, seen = [root], set()
    while nodes:
        node = nodes.pop()
        if id(node) not in seen:
            seen.add(id(node))
            node.order = None if node.order is None else num_stops - 1 - node.order
            nodes += node.children.values()
    return root


@mutant("a stop string that began in an earlier piece is missed")
def _begun_match_missed(patch: pytest.MonkeyPatch) -> None:
    feed = StopMatcher.feed

    def mutated(self: StopMatcher, text: str, *, may_stop: bool = True) -> str:
        while self._node.fallback is not None:
            self._node = self._node.fallback
        return feed(self, text, may_stop=may_stop)

    patch.setattr(StopMatcher, "feed", mutated)
