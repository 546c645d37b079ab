"""Constraints on the next token of an answer: its grammar, and the reasoning before it.

    Constraint   of a request: grammar and reasoning rules, resolved once; never changes
    TokenMask    of an answer with a given number of tokens: the tokens that may come next, or that the answer is over
    Thinking     position in an answer where the reasoning ends and the grammar begins

The scheduler computes no token for a request while its `TokenMask` is older than its last token. Such a request is left
out of the steps, and the others go on; so it does not matter where masks come from or how long they take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from triolet.core.request.structured_outputs import StructuredOutputsParams


@attrs.frozen(kw_only=True)
class ThinkingRules:
    """Token ids of the marks around a model's reasoning, and the limit of its length."""

    opening_token_ids: tuple[int, ...]  # of the mark that begins it
    closing_token_ids: tuple[int, ...]  # of the mark that ends it
    is_open: bool  # True if the prompt ends amid reasoning, or the model always begins with it
    budget: int | None = None  # tokens of reasoning after which it is ended; None for no limit
    num_certain: int | None = (
        None  # tokens of the closing mark that the rest of it must follow; None if any may
    )
    lead_token_ids: tuple[
        int, ...
    ] = ()  # of what the budget writes before the closing mark, or the prompt ends with
    freeing_token_ids: tuple[
        tuple[int, ...], ...
    ] = ()  # of texts that end it too, in an answer without a form


@attrs.frozen(kw_only=True)
class Constraint:
    """Grammar and reasoning rules of a request's answer."""

    grammar: StructuredOutputsParams | None = None  # form of the answer, from where the reasoning ends
    thinking: ThinkingRules | None = None  # rules of that reasoning; None if the model gives none


@attrs.frozen
class TokenMask:
    """Tokens that may come next in an answer."""

    position: int  # tokens that the answer has
    # A bit per token id, least significant first: 1 for those that may come next; None for any token.
    mask: bytes | None = None
    is_over: bool = False  # True if the grammar allows no further token: the answer is complete
    problem: str | None = None  # why the answer cannot go on; None if it can


class Thinking:
    """Tracker of the reasoning in an answer.

    Args:
        rules: of the model and the request; None if there is no reasoning.
        is_bound: True if the answer has a form, which begins where the reasoning ends.
    """

    # The state is a function of the tokens alone, so that it can be built again at any time.

    def __init__(self, rules: ThinkingRules | None, *, is_bound: bool) -> None:
        self._rules = rules
        self._is_bound = is_bound
        self._num_tokens = 0
        self._began: int | None = 0 if rules is not None and rules.is_open else None
        self.ended: int | None = 0 if rules is None else None
        """Number of tokens that the answer had when the reasoning was over; None before."""

    @property
    def optional_token_id(self) -> int | None:
        """Token that may come next beside those of the form: at the beginning, the one that opens reasoning."""
        # An answer with a form begins with the form or with the opening mark, so the form also holds where the model
        # may skip its reasoning.
        rules = self._rules
        is_undecided = self._is_bound and self._num_tokens == 0 and self._began is None
        return rules.opening_token_ids[0] if rules is not None and is_undecided else None

    def follow(self, token_ids: Sequence[int]) -> None:
        """Update the state from an answer that has grown.

        Args:
            token_ids: all tokens of the answer.
        """
        rules = self._rules
        while rules is not None and self.ended is None and self._num_tokens < len(token_ids):
            self._num_tokens += 1
            if self._began is not None:
                endings = (rules.closing_token_ids, *(() if self._is_bound else rules.freeing_token_ids))
                if any(_ends_with(token_ids, self._num_tokens, ending) for ending in endings):
                    self.ended = self._num_tokens
            elif _ends_with(token_ids, self._num_tokens, rules.opening_token_ids):
                self._began = self._num_tokens
            elif self._is_bound and token_ids[0] != rules.opening_token_ids[0]:
                self.ended = 0

    def forced_token_id(self, token_ids: Sequence[int]) -> int | None:
        """Return the token that must come next, of a begun opening mark or of the closing mark; None if any may.

        Args:
            token_ids: all tokens of the answer, the same that `follow` got.
        """
        rules = self._rules
        if rules is None or self.ended is not None:
            return None
        if self._began is None:
            return rules.opening_token_ids[self._num_tokens] if self._is_bound and self._num_tokens else None
        if rules.budget is None or self._num_tokens - self._began < rules.budget:
            num_said = _num_said(token_ids, rules.closing_token_ids)
            is_certain = rules.num_certain is not None and num_said >= rules.num_certain
            return rules.closing_token_ids[num_said] if is_certain else None
        # The budget is spent: write the closing mark, from behind the part of it that the answer already ends with.
        closing = rules.lead_token_ids + rules.closing_token_ids
        return closing[_num_said((*rules.lead_token_ids, *token_ids), closing)]


def _num_said(token_ids: Sequence[int], mark: tuple[int, ...]) -> int:
    """Return how many tokens at the end of an answer are a beginning of the mark, less than all of it."""
    return next(n for n in range(len(mark) - 1, -1, -1) if _ends_with(token_ids, len(token_ids), mark[:n]))


def _ends_with(token_ids: Sequence[int], end: int, ending: tuple[int, ...]) -> bool:
    return end >= len(ending) and tuple(token_ids[end - len(ending) : end]) == ending


def only(token_id: int, vocab_size: int) -> bytes:
    """Return a mask that allows one token of the vocabulary."""
    mask = bytearray((vocab_size + 7) // 8)
    mask[token_id // 8] = 1 << token_id % 8
    return bytes(mask)


def all_but(token_ids: Iterable[int], vocab_size: int) -> bytes:
    """Return a mask that allows all tokens of the vocabulary but these."""
    mask = bytearray(b"\xff" * ((vocab_size + 7) // 8))
    for token_id in token_ids:
        if token_id < vocab_size:  # a config may name an end that the model never says
            mask[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(mask)


def with_token(mask: bytes, token_id: int) -> bytes:
    """Return the mask with one more token allowed."""
    changed = bytearray(mask.ljust(token_id // 8 + 1, b"\0"))
    changed[token_id // 8] |= 1 << token_id % 8
    return bytes(changed)
