"""Defects of pooled requests; see `mutation`."""

from __future__ import annotations

import pytest

from tests.simulation.mutation import mutant
from triolet.core.journal import Journal, JournalEntry
from triolet.core.scheduling.scheduler import Scheduler
from triolet.core.step_plan import PooledVectors


@mutant("a pooled request is counted twice after a crash")
def _counted_twice(patch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add

    def mutated(self: Scheduler, entry: JournalEntry) -> None:
        entry.pooled.clear()  # so that it is computed, and its result committed, once more
        add(self, entry)

    patch.setattr(Scheduler, "add", mutated)


@mutant("the result of a pooled request that came before a crash does not end it")
def _never_ends(patch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add

    def mutated(self: Scheduler, entry: JournalEntry) -> None:
        kept, entry.pooled = entry.pooled, []
        add(self, entry)
        entry.pooled = kept

    patch.setattr(Scheduler, "add", mutated)


@mutant("a result of an earlier life is taken for that of a pooled request")
def _late_result(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: Journal, entry: JournalEntry, part: PooledVectors) -> bool:
        entry.pooled.append(part)
        if part.is_last:
            self.stats.pooled(len(entry.request.prompt_token_ids), entry.num_cached_tokens)
        return True

    patch.setattr(Journal, "commit_pooled", mutated)
