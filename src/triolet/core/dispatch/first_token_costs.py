"""Costs of a replica, learned from the times of the first tokens that came.

A prompt token takes `token_s + num_running * row_s`: requests that decode beside a prompt lengthen each of its steps.
The two are fitted to what was seen, by weighted least squares over the time per token, weighted by tokens, so that a
long prompt counts for what it is. A replica computes its queue in order; what a prompt took is therefore the time since
the one before it was done. An engine that computes several prompts in one step gives them too little and the one before
too much, and the sum is right, which is what a fit over many of them takes.

An observation weighs half as much after `HALF_LIFE` later ones: a replica whose machine became busy is learned anew.
"""

from __future__ import annotations

import attrs

HALF_LIFE = 64
"""Observations: enough to average over prompts of all lengths, few enough to notice a change within a minute."""

_KEEP: float = 0.5 ** (1 / HALF_LIFE)


@attrs.define(eq=False)
class FirstTokenCosts:
    """Seconds that a prompt's tokens take on one replica.

    Args:
        token_s: seconds a token while nothing decodes, until something was seen.
    """

    token_s: float
    row_s: float = attrs.field(
        default=0.0, init=False
    )  # seconds a token for each request that decodes beside it
    num_seen: int = attrs.field(default=0, init=False)
    # Sums over what was seen, with weight w: of w, w*r, w*r*r, w*y, w*r*y for r running and y seconds a token.
    _w: float = attrs.field(default=0.0, init=False)
    _wr: float = attrs.field(default=0.0, init=False)
    _wrr: float = attrs.field(default=0.0, init=False)
    _wy: float = attrs.field(default=0.0, init=False)
    _wry: float = attrs.field(default=0.0, init=False)

    def observe(self, num_tokens: int, num_running: int, seconds: float) -> None:
        """Learn from a prompt.

        Args:
            num_tokens: that were computed for it, at least 1.
            num_running: requests that decoded beside it.
            seconds: that it took, without its wait in the queue.
        """
        self.num_seen += 1
        self._w = _KEEP * self._w + num_tokens
        self._wr = _KEEP * self._wr + num_tokens * num_running
        self._wrr = _KEEP * self._wrr + num_tokens * num_running * num_running
        self._wy = _KEEP * self._wy + seconds
        self._wry = _KEEP * self._wry + seconds * num_running
        self._fit()

    def _fit(self) -> None:
        spread = self._w * self._wrr - self._wr * self._wr
        slope = 0.0
        if spread > 1e-9 * self._w * self._w:  # else all were seen beside equally many
            slope = max(0.0, (self._w * self._wry - self._wr * self._wy) / spread)
        constant = (self._wy - slope * self._wr) / self._w
        if constant < 0:  # then the line through the origin
            slope, constant = self._wry / self._wrr, 0.0
        self.token_s, self.row_s = constant, slope

    def per_token_s(self, num_running: int) -> float:
        """Return the seconds that a token of a prompt takes beside so many decoding requests."""
        return self.token_s + num_running * self.row_s
