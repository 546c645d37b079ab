"""A table of replicas over an empty journal, for tests that give it requests and lives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.core.make import make_request, next_token
from triolet.core.journal import Journal, JournalEntry
from triolet.core.replicas.replica_table import ReplicaTable

BLOCK = 4


class Replicas:
    """A table over an empty journal, and what it has woken."""

    def __init__(self, num_replicas: int = 2, *, num_living: int | None = None) -> None:
        self.journal = Journal()
        self.woken: list[int] = []
        self.table = ReplicaTable(self.journal, num_replicas, BLOCK, self.woken.append)
        self.shares = self.table.shares
        for replica in range(num_replicas if num_living is None else num_living):
            self.table.begin_life(replica)

    def open(self, prompt: int | Sequence[int] = 10, **fields: Any) -> JournalEntry:
        """Enter a request that is not placed yet."""
        tokens = range(1000, 1000 + prompt) if isinstance(prompt, int) else prompt
        return self.journal.open(make_request(tuple(tokens), **fields))

    def add(self, prompt: int | Sequence[int] = 10, **fields: Any) -> JournalEntry:
        """Enter a request and place it."""
        entry = self.open(prompt, **fields)
        self.table.dispatch()
        self.table.check()
        return entry

    def suspect(self, *entries: JournalEntry) -> None:
        """Let requests of one replica have been in a step that crashed, and nothing outside explains it."""
        replica = entries[0].replica
        assert replica is not None
        marks = {entry.serial: entry.num_tokens for entry in entries}
        self.table.bisection(replica).step_failed(marks, num_rows=len(marks))

    def end_life(self, replica: int) -> None:
        self.table.end_life(replica)
        self.table.check()

    def commit(self, entry: JournalEntry, now_s: float = 0.0) -> bool:
        assert entry.replica is not None
        return self.shares[entry.replica].commit(entry, next_token(entry, 5), now_s)
