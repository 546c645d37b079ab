"""The policy `fcfs`: first come, first served."""

from __future__ import annotations

from triolet.core.journal import JournalEntry
from triolet.core.scheduling.policies.base import WaitingQueue
from triolet.core.scheduling.sequence import Order


class FcfsQueue(WaitingQueue):
    """Waiting requests in order of arrival; none takes the row of a running one."""

    summary = "first come, first served"

    def order(self, entry: JournalEntry) -> Order:
        return (0.0, entry.serial)
