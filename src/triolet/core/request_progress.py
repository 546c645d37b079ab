"""How far a request has come on its way to its first token."""

from __future__ import annotations

import attrs

from triolet.core.outputs import RequestStatus


@attrs.frozen(kw_only=True)
class RequestProgress:
    """A look at a request. Two looks at the same one, one after the other, never show it going back.

    Args:
        status: where it is.
        queue_position: how many requests go before it; 0 once it has been let in.
        num_prompt_tokens: length of the prompt.
        num_computed_tokens: tokens of the prompt that have been computed, or were found in the prefix cache.
    """

    status: RequestStatus
    queue_position: int
    num_prompt_tokens: int
    num_computed_tokens: int

    def after(self, earlier: RequestProgress | None) -> RequestProgress:
        """The same, but not behind what was shown before: who is overtaken, or preempted, stays where it was."""
        if earlier is None or self._is_ahead_of(earlier):
            return self
        return attrs.evolve(
            self,
            queue_position=min(self.queue_position, earlier.queue_position),
            num_computed_tokens=max(self.num_computed_tokens, earlier.num_computed_tokens),
        )

    def _is_ahead_of(self, earlier: RequestProgress) -> bool:
        is_nearer = self.queue_position <= earlier.queue_position
        return is_nearer and self.num_computed_tokens >= earlier.num_computed_tokens
