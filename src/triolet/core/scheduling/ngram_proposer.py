"""N-gram proposer: guesses the next tokens of a text from an earlier occurrence of its last tokens.

Theory of operation
-------------------
The hash chains of deflate, over tokens: `_latest` names, for each n-gram of `shortest` tokens, where it ended last, and
`_before` for every place where the n-gram that ends there ended the time before. A guess walks a few steps along the
chain of the n-gram that ends the text, takes the place whose tokens before it agree the furthest, up to `LONGEST`, and
says what came after it. Where the two overlap, the text is going round in a circle, and the guess goes on around it.

Only the last `window` tokens are remembered, in rings: what a token costs, in time and in memory, does not depend on
the length of the text.

Source: prompt lookup decoding (Saxena, 2023; vLLM's `ngram` method), RFC 1951 section 4 for the chains.
"""

from __future__ import annotations

from collections.abc import Iterable

WINDOW = 2**15  # deflate's; at most 7 MB, beside a row whose KV takes a hundred times as much
LONGEST = 32  # where a whole line has agreed, more of it says nothing new
MAX_CANDIDATES = 8
Ngram = tuple[int, ...]


class NgramIndex:
    """A text and its n-grams.

    Args:
        shortest: tokens that must agree before a guess is made.
        window: tokens that are remembered; more than `LONGEST`.
    """

    def __init__(self, shortest: int, window: int = WINDOW) -> None:
        self.num_tokens = 0
        self._shortest, self._window = shortest, window
        self._tokens: list[int] = []
        self._before: list[int] = []  # an end is the number of tokens up to it; 0 is none
        self._latest: dict[Ngram, int] = {}

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token_id in token_ids:
            self._add(token_id)

    def _add(self, token_id: int) -> None:
        if self.num_tokens < self._window:
            self._tokens.append(token_id)
            self._before.append(0)
        else:
            self._forget_first()
            self._tokens[self.num_tokens % self._window] = token_id
        self.num_tokens += 1
        if self.num_tokens >= self._shortest:
            ngram = self._ngram(self.num_tokens)
            self._before[(self.num_tokens - 1) % self._window] = self._latest.get(ngram, 0)
            self._latest[ngram] = self.num_tokens

    def _forget_first(self) -> None:
        """Remove the n-gram that begins with the oldest token of the window."""
        end = self.num_tokens - self._window + self._shortest
        ngram = self._ngram(end)
        if self._latest[ngram] == end:
            del self._latest[ngram]

    def _ngram(self, end: int) -> Ngram:
        first = (end - self._shortest) % self._window
        found = self._tokens[first : first + self._shortest]
        return (*found, *self._tokens[: self._shortest - len(found)])

    def _token(self, position: int) -> int:
        return self._tokens[position % self._window]

    def guess(self, num_tokens: int) -> Ngram:
        """Return this many tokens that may come next; none if the last n-gram is new."""
        end = self.num_tokens
        best, most = 0, 0
        at = self._before[(end - 1) % self._window] if end else 0
        for _ in range(MAX_CANDIDATES):
            if at - self._shortest < max(0, end - self._window) or most == LONGEST:
                break
            if (length := self._agreement(at)) > most:
                best, most = at, length
            at = self._before[(at - 1) % self._window]
        return tuple(self._token(best + i % (end - best)) for i in range(num_tokens)) if best else ()

    def _agreement(self, at: int) -> int:
        """Return how many tokens before `at` equal those at the end of the text; at least `shortest`."""
        end, length = self.num_tokens, self._shortest
        most = min(LONGEST, at - max(0, end - self._window))
        while length < most and self._token(at - 1 - length) == self._token(end - 1 - length):
            length += 1
        return length
