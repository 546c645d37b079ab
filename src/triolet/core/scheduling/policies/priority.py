"""The policy `priority`: lower numbers first, with aging.

The order of all requests, waiting and running, is that of

    priority + arrival / aging

so that of two requests the one with the lower priority goes first, unless the other arrived so much earlier that its
waiting makes up for the difference: every `aging` seconds count as much as one step of priority. All waiting requests
age at the same pace, so the order of two requests never changes, and none starves: a request waits for better ones only
if they arrived less than (difference * aging) seconds after it.

Running requests are not interrupted for their equals. A waiting request takes the row and the blocks of a running one
that has a worse priority and stands behind it in that order.
"""

from __future__ import annotations

from triolet.core.journal import JournalEntry
from triolet.core.scheduling.policies.base import MayRun, Overtaking, WaitingQueue
from triolet.core.scheduling.sequence import Order, Sequence


class PriorityQueue(WaitingQueue):
    """Waiting requests by priority and age; a better one takes the row of a worse running one."""

    summary = "lower numbers first"

    def order(self, entry: JournalEntry) -> Order:
        return (
            entry.request.priority + entry.request.arrival_s / self._config.priority_aging_s,
            entry.serial,
        )

    def overtaking(self, running: list[Sequence], may_run: MayRun) -> Overtaking | None:
        if (first := self.next(may_run)) is None:
            return None
        worst = next((other for other in reversed(running) if other.is_unserved), None)
        if worst is None or worst.order < first.order:
            return None
        # An equal priority that is merely older does not interrupt.
        return (first, worst) if first.entry.request.priority < worst.entry.request.priority else None
