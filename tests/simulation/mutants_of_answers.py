"""Defects of several answers to one prompt, which wait for the first of them and share its blocks; see `mutation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from tests.simulation.mutation import mutant
from triolet.core.journal import Journal, JournalEntry
from triolet.core.kv_cache.block_pool import BlockPool
from triolet.core.kv_cache.prefix_cache import PrefixCache
from triolet.core.request import request_builder
from triolet.core.request.request import FinishReason, Request, fan_out
from triolet.core.scheduling import step_planner
from triolet.core.scheduling.admission import RequestQueues, find_computed
from triolet.core.scheduling.sequence import Sequence
from triolet.engine.submission import Submission
from triolet.engine.token_stream import RequestTable


@mutant("an abort ends the first answer only")
def _first_aborted(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: RequestTable, request_id: str) -> None:
        if (submission := self.submissions.get(request_id)) is not None:
            submission.was_aborted = True
            for entry in submission.entries[:1]:
                self._core.finish(entry.serial, FinishReason.ABORT)

    patch.setattr(RequestTable, "abort", mutated)


@mutant("leaving ends the first answer only")
def _first_left(patch: pytest.MonkeyPatch) -> None:
    leave = RequestTable.leave

    def mutated(self: RequestTable, submission: Submission) -> None:
        submission.outputs = submission.outputs[:1]
        leave(self, submission)

    patch.setattr(RequestTable, "leave", mutated)


@mutant("answers that wait for the first one do not end with it")
def _held_for_ever(patch: pytest.MonkeyPatch) -> None:
    close = Journal.close

    def mutated(self: Journal, entry: JournalEntry) -> list[int]:
        self._held.pop(entry.serial, None)
        return close(self, entry)

    patch.setattr(Journal, "close", mutated)


@mutant("all answers have the same noise")
def _same_noise(patch: pytest.MonkeyPatch) -> None:
    def mutated(request: Request, draw_seed: Callable[[], int]) -> tuple[Request, ...]:
        return tuple(attrs.evolve(one, seed=request.seed) for one in fan_out(request, draw_seed))

    patch.setattr(request_builder, "fan_out", mutated)


@mutant("the blocks of the prompt are freed with the first answer")
def _freed_with_first(patch: pytest.MonkeyPatch) -> None:
    admit, share = RequestQueues.admit, BlockPool.share

    def mutated(self: RequestQueues, sequence: Sequence, *found: Any) -> None:
        is_first = not sequence.entry.leader_serial
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockPool, "share", share if is_first else lambda self, block_ids: None)
            admit(self, sequence, *found)

    patch.setattr(RequestQueues, "admit", mutated)


@mutant("answers share the block that they write their first tokens to")
def _last_block_shared(patch: pytest.MonkeyPatch) -> None:
    def mutated(cache: PrefixCache, sequence: Sequence, leader: Sequence | None) -> Any:
        block_ids, hashes = find_computed(cache, sequence, leader)
        is_shared = leader is not None and leader.block_table[: len(block_ids)] == block_ids
        if leader is None or not is_shared or len(leader.block_table) <= len(block_ids):
            return block_ids, hashes
        num_tokens = (len(block_ids) + 1) * cache.block_size
        if num_tokens >= sequence.entry.num_tokens:
            return block_ids, hashes
        return leader.block_table[: len(block_ids) + 1], hashes

    patch.setattr(step_planner, "find_computed", mutated)
