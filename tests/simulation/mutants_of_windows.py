"""Defects of cache groups and their windows; see `mutation`."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Any

import pytest

from tests.simulation.mutation import mutant
from triolet.core.kv_cache.block_pool import BlockPool
from triolet.core.kv_cache.cache_groups import HOLE, CacheGroups
from triolet.core.kv_cache.prefix_cache import PrefixCache
from triolet.core.scheduling import admission, scheduler, step_planner
from triolet.core.scheduling.admission import find_computed, held_blocks, release_passed
from triolet.core.scheduling.sequence import Sequence


@mutant("a block is freed one token before its window has passed it")
def _freed_early(patch: pytest.MonkeyPatch) -> None:
    num_behind = CacheGroups.num_behind

    def mutated(self: CacheGroups, num_tokens: int, block_size: int) -> int:
        return min(num_behind(self, num_tokens + 1, block_size), num_tokens // block_size)

    patch.setattr(CacheGroups, "num_behind", mutated)


@mutant("blocks that a window has passed are kept")
def _never_freed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler, "release_passed", lambda cache, sequence, step_id: None)


@mutant("what a window has passed is free amid the step that names it")
def _no_quarantine(patch: pytest.MonkeyPatch) -> None:
    def mutated(cache: PrefixCache, sequence: Sequence, step_id: int | None) -> None:
        release_passed(cache, sequence, None)

    patch.setattr(scheduler, "release_passed", mutated)


@mutant("a hit is as long as that of the first group")
def _longer_than_a_group(patch: pytest.MonkeyPatch) -> None:
    def mutated(
        self: PrefixCache, token_ids: Tokens[int], root: bytes, known: list[bytes] | None = None
    ) -> tuple[list[int], list[bytes]]:
        known = [] if known is None else known
        parent, size, table, hashes = root, self.block_size, list[int](), list[bytes]()
        for start in range(0, len(token_ids) - size if self.enabled else 0, size):
            if len(known) == len(hashes):
                known.append(self.chain(parent, token_ids[start : start + size]))
            published = self._by_hash.get(parent := known[len(hashes)])
            if published is None or published.block_ids[0] == HOLE or self.pool.quarantined:
                break
            table += published.block_ids
            hashes.append(parent)
        num_behind, count = self.groups.num_behind(len(hashes) * size, size), self.groups.count
        for place in range(num_behind * count):
            if place % count >= self.groups.num_full:
                table[place] = HOLE
        return table, hashes

    patch.setattr(PrefixCache, "find", mutated)


@mutant("a hit behind a window misses its first block")
def _hole_too_far(patch: pytest.MonkeyPatch) -> None:
    table_of = PrefixCache._table

    def mutated(self: PrefixCache, found: list[list[int]]) -> list[int]:
        table, groups = table_of(self, found), self.groups
        place = (
            groups.num_behind(len(found) * self.block_size, self.block_size) * groups.count + groups.count - 1
        )
        if groups.window is not None and place < len(table):
            table[place] = HOLE
        return table

    patch.setattr(PrefixCache, "_table", mutated)


@mutant("what a window has passed is given back twice")
def _freed_twice(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def mutated(cache: PrefixCache, sequence: Sequence, step_id: int | None) -> None:
        before = [one for one in sequence.block_table if one != HOLE]
        release_passed(cache, sequence, step_id)
        passed = [one for one in before if one not in sequence.block_table]
        release(cache.pool, [one for one in passed if cache.pool.ref_counts[one]], step_id=step_id)

    patch.setattr(scheduler, "release_passed", mutated)


@mutant("the end of a request gives back holes of its table only")
def _forgotten_at_the_end(patch: pytest.MonkeyPatch) -> None:
    def mutated(sequence: Sequence) -> list[int]:
        blocks = held_blocks(sequence)
        return blocks[1:] if sequence.num_passed_blocks else blocks

    patch.setattr(admission, "held_blocks", mutated)
    patch.setattr(scheduler, "held_blocks", mutated)


@mutant("what a window has passed is given back in the first group")
def _freed_in_the_first_group(patch: pytest.MonkeyPatch) -> None:
    def mutated(cache: PrefixCache, sequence: Sequence, step_id: int | None) -> None:
        count, first = cache.groups.count, sequence.num_passed_blocks
        release_passed(cache, sequence, step_id)
        for index in range(first, sequence.num_passed_blocks):
            places = slice(index * count, (index + 1) * count)
            sequence.block_table[places] = sequence.block_table[places][::-1]

    patch.setattr(scheduler, "release_passed", mutated)


@mutant("answers to one prompt begin with what the first one's window has passed")
def _forked_behind_the_window(patch: pytest.MonkeyPatch) -> None:
    def mutated(cache: PrefixCache, sequence: Sequence, leader: Sequence | None) -> Any:
        if leader is None:
            return find_computed(cache, sequence, leader)
        num_passed, leader.num_passed_blocks = leader.num_passed_blocks, 0
        found = find_computed(cache, sequence, leader)
        leader.num_passed_blocks = num_passed
        return found

    patch.setattr(step_planner, "find_computed", mutated)
