"""Stop strings in streamed text: how much text can be shown, and where the answer ends.

Theory of operation. All stop strings together make one automaton (Aho-Corasick): a node is a prefix of a stop string,
and after every character the matcher stands on the longest one that the text ends with. So the depth of the node *is*
the number of characters that must be held back: not more, because no text before them can belong to a match that is
still to be completed, and not less. A character costs constant time on average, however many stop strings there are; no
text is read twice.

Rules, those of vLLM: the stop string completed earliest wins, and of those completed by the same character the first in
the list; the text is cut where the match begins, or behind it with `include_in_output`. Text of tokens that may not end
the answer (`min_tokens`) completes no match, but a later match may begin in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import attrs

from triolet.errors import InvalidParams

HoldBack = Literal["exact", "blind"]


@attrs.define(eq=False)
class _Node:
    """Prefix of one or more stop strings.

    Args:
        depth: its length, characters.
        order: place in the list of the stop string that ends here, or in a shorter node that this one ends with.
    """

    depth: int
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
