"""What an answer may go on with: its grammar, and the thinking before it.

    Constraint   of a request: what was asked for, resolved; never changes
    Guidance     of an answer of so many tokens: which tokens may come next, or that none may
    Thinking     where in an answer the reasoning ends, and with it the model's freedom from the grammar

The scheduler computes no token for a request whose `Guidance` is older than its last token. It does not matter to it
where guidance comes from, nor how long that takes: such a request sits steps out, and the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from triolet.core.structured_outputs import StructuredOutputsParams


@attrs.frozen(kw_only=True)
class ThinkingRules:
    """How a model marks its reasoning, in tokens.

    Args:
        opening_token_ids: of the mark that begins it.
        closing_token_ids: of the mark that ends it.
        is_open: the prompt ends amid reasoning, or the model always begins with it.
        budget: tokens of reasoning after which it is ended; None for as many as it likes.
    """

    opening_token_ids: tuple[int, ...]
    closing_token_ids: tuple[int, ...]
    is_open: bool
    budget: int | None = None


@attrs.frozen(kw_only=True)
class Constraint:
    """What bounds a request's answer.

    Args:
        grammar: the form of the answer, from where the reasoning ends.
        thinking: about that reasoning; None if the model gives none.
    """

    grammar: StructuredOutputsParams | None = None
    thinking: ThinkingRules | None = None


@attrs.frozen
class Guidance:
    """What may come next in an answer.

    Args:
        position: tokens that the answer has.
        mask: a bit per token id, least significant first: 1 for those that may come next; None for any token.
        is_over: nothing may: the answer is all that it can be.
        problem: why the answer can not go on; None if it can.
    """

    position: int
    mask: bytes | None = None
    is_over: bool = False
    problem: str | None = None


class Thinking:
    """Follows an answer through its reasoning. A function of the tokens alone, so it can be made anew at any time.

    Args:
        rules: of the model and the request; None if there is no reasoning.
    """

    def __init__(self, rules: ThinkingRules | None) -> None:
        self._rules = rules
        self._num_tokens = 0
        self._began: int | None = 0 if rules is not None and rules.is_open else None
        self.ended: int | None = 0 if rules is None else None
        """How many tokens the answer had when the reasoning was over; None before."""

    def follow(self, token_ids: Sequence[int]) -> None:
        """Look at an answer that has grown.

        Args:
            token_ids: all of its tokens.
        """
        rules = self._rules
        while rules is not None and self.ended is None and self._num_tokens < len(token_ids):
            self._num_tokens += 1
            if self._began is None and _ends_with(token_ids, self._num_tokens, rules.opening_token_ids):
                self._began = self._num_tokens
            elif _ends_with(token_ids, self._num_tokens, rules.closing_token_ids):
                self.ended = self._num_tokens

    def forced_token_id(self, token_ids: Sequence[int]) -> int | None:
        """The token that must come next because the budget is spent: one of the closing mark; None if any may.

        Args:
            token_ids: all tokens of the answer, the same as were followed.
        """
        rules = self._rules
        if rules is None or rules.budget is None or self._began is None or self.ended is not None:
            return None
        num_over = self._num_tokens - self._began - rules.budget
        if num_over < 0:
            return None
        closing = rules.closing_token_ids
        num_said = next(
            n for n in range(len(closing) - 1, -1, -1) if _ends_with(token_ids, len(token_ids), closing[:n])
        )
        return closing[num_said]


def _ends_with(token_ids: Sequence[int], end: int, ending: tuple[int, ...]) -> bool:
    return end >= len(ending) and tuple(token_ids[end - len(ending) : end]) == ending


def only(token_id: int, vocab_size: int) -> bytes:
    """The mask that leaves one token to choose from."""
    mask = bytearray((vocab_size + 7) // 8)
    mask[token_id // 8] = 1 << token_id % 8
    return bytes(mask)
