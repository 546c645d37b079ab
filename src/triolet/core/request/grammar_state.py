"""What an answer may go on with: its grammar, and the thinking before it.

    Constraint   of a request: what was asked for, resolved; never changes
    Guidance     of an answer of so many tokens: which tokens may come next, or that none may
    Thinking     where in an answer the reasoning ends, and with it the model's freedom from the grammar

The scheduler computes no token for a request whose `TokenMask` is older than its last token. It does not matter to it
where guidance comes from, nor how long that takes: such a request sits steps out, and the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from triolet.core.request.structured_outputs import StructuredOutputsParams


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
class TokenMask:
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

    An answer that is bound to a form begins with the form or with the mark that opens reasoning; so a model that need
    not think keeps to the form, too.

    Args:
        rules: of the model and the request; None if there is no reasoning.
        is_bound: the answer has a form, which begins where the reasoning ends.
    """

    def __init__(self, rules: ThinkingRules | None, *, is_bound: bool) -> None:
        self._rules = rules
        self._is_bound = is_bound
        self._num_tokens = 0
        self._began: int | None = 0 if rules is not None and rules.is_open else None
        self.ended: int | None = 0 if rules is None else None
        """How many tokens the answer had when the reasoning was over; None before."""

    @property
    def optional_token_id(self) -> int | None:
        """The token that may come next beside those of the form: at the beginning, the one that begins reasoning."""
        rules = self._rules
        is_undecided = self._is_bound and self._num_tokens == 0 and self._began is None
        return rules.opening_token_ids[0] if rules is not None and is_undecided else None

    def follow(self, token_ids: Sequence[int]) -> None:
        """Look at an answer that has grown.

        Args:
            token_ids: all of its tokens.
        """
        rules = self._rules
        while rules is not None and self.ended is None and self._num_tokens < len(token_ids):
            self._num_tokens += 1
            if self._began is not None:
                if _ends_with(token_ids, self._num_tokens, rules.closing_token_ids):
                    self.ended = self._num_tokens
            elif _ends_with(token_ids, self._num_tokens, rules.opening_token_ids):
                self._began = self._num_tokens
            elif self._is_bound and token_ids[0] != rules.opening_token_ids[0]:
                self.ended = 0

    def forced_token_id(self, token_ids: Sequence[int]) -> int | None:
        """The token that must come next: the rest of a mark that was begun, or the closing mark when the budget is
        spent; None if any may.

        Args:
            token_ids: all tokens of the answer, the same as were followed.
        """
        rules = self._rules
        if rules is None or self.ended is not None:
            return None
        if self._began is None:
            return rules.opening_token_ids[self._num_tokens] if self._is_bound and self._num_tokens else None
        if rules.budget is None or self._num_tokens - self._began < rules.budget:
            return None
        closing, num_tokens = rules.closing_token_ids, len(token_ids)
        num_said = next(
            n for n in range(len(closing) - 1, -1, -1) if _ends_with(token_ids, num_tokens, closing[:n])
        )
        return closing[num_said]


def _ends_with(token_ids: Sequence[int], end: int, ending: tuple[int, ...]) -> bool:
    return end >= len(ending) and tuple(token_ids[end - len(ending) : end]) == ending


def only(token_id: int, vocab_size: int) -> bytes:
    """The mask that leaves one token to choose from."""
    mask = bytearray((vocab_size + 7) // 8)
    mask[token_id // 8] = 1 << token_id % 8
    return bytes(mask)


def with_token(mask: bytes, token_id: int) -> bytes:
    """A mask that allows one token more."""
    changed = bytearray(mask.ljust(token_id // 8 + 1, b"\0"))
    changed[token_id // 8] |= 1 << token_id % 8
    return bytes(changed)
