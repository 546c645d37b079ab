"""How requests have ended, remembered for a while: a caller who asks late is told, and memory stays bounded."""

from __future__ import annotations

from collections import OrderedDict

import attrs

from triolet.core.outputs import RequestStatus

MAX_ENDINGS = 1024
MAX_AGE_S = 600.0


@attrs.define
class Endings:
    """The latest endings, by request id.

    Args:
        max_endings: how many are remembered.
        max_age_s: for how long, seconds.
    """

    max_endings: int = MAX_ENDINGS
    max_age_s: float = MAX_AGE_S
    _endings: OrderedDict[str, tuple[RequestStatus, float]] = attrs.field(factory=OrderedDict, init=False)

    def remember(self, request_id: str, status: RequestStatus, now_s: float) -> None:
        """A request of that id has ended; an earlier one of the same id is forgotten."""
        self._endings.pop(request_id, None)
        self._endings[request_id] = (status, now_s)
        self._forget_old(now_s)

    def get(self, request_id: str, now_s: float) -> RequestStatus | None:
        """How it has ended, if that is still known."""
        self._forget_old(now_s)
        status, _ = self._endings.get(request_id, (None, 0.0))
        return status

    def __len__(self) -> int:
        return len(self._endings)

    def _forget_old(self, now_s: float) -> None:
        while self._endings:
            oldest, (_, ended_s) = next(iter(self._endings.items()))
            if len(self._endings) <= self.max_endings and now_s - ended_s <= self.max_age_s:
                return
            del self._endings[oldest]
