"""Defects of engines with several replicas; see `mutation`."""

from __future__ import annotations

import pytest

from tests.simulation.mutation import mutant
from triolet.core.journal import JournalEntry
from triolet.core.recovery.recovery_state import PoisonBisection
from triolet.core.replicas.replica_table import JournalShare, ReplicaTable
from triolet.core.replicas.replicated_core import ReplicaCore


@mutant("a request that moves is in two queues")
def _in_two_queues(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: JournalShare, entry: JournalEntry) -> None:
        entry.replica = None

    patch.setattr(JournalShare, "remove", mutated)


@mutant("a request that moves keeps its epoch")
def _keeps_epoch(patch: pytest.MonkeyPatch) -> None:
    take_back = ReplicaTable._take_back

    def mutated(self: ReplicaTable, replica: int, entries: list[JournalEntry]) -> None:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(self.journal, "begin_stay", lambda entry: entry.epoch)
            take_back(self, replica, entries)

    patch.setattr(ReplicaTable, "_take_back", mutated)


@mutant("what a dead replica says late is applied")
def _late_result(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: ReplicaCore) -> None:
        if not self.is_runner_alive:  # and perhaps its scheduler lives
            self._whole.table.end_life(self.replica)

    patch.setattr(ReplicaCore, "_settle", mutated)


@mutant("suspects go to other replicas at once")
def _suspects_move(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PoisonBisection, "suspects", frozenset[int]())


@mutant("a dead replica gets requests")
def _dead_gets_requests(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: ReplicaTable, replica: int) -> None:
        suspects = self._bisections[replica].suspects
        self._take_back(replica, [entry for entry in self.shares[replica] if entry.serial not in suspects])

    patch.setattr(ReplicaTable, "end_life", mutated)


@mutant("what no replica takes is forgotten")
def _unplaced_forgotten(patch: pytest.MonkeyPatch) -> None:
    dispatch = ReplicaTable.dispatch

    def mutated(self: ReplicaTable) -> None:
        dispatch(self)
        self._unplaced.clear()

    patch.setattr(ReplicaTable, "dispatch", mutated)
