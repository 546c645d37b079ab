from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from triolet.core.kv_cache.block_pool import BlockPool, CachedBlocks
from triolet.errors import InvariantViolated

# ------------------------------------------------------------------------ against a naive model


@attrs.define
class NaivePool:
    """The same promises in lists that are searched from end to end."""

    free: list[int]
    cached: list[int] = attrs.field(factory=list)
    kept: dict[int, str] = attrs.field(factory=dict)  # with their owners
    tables: list[list[int]] = attrs.field(factory=list)
    quarantined: list[tuple[int, int]] = attrs.field(factory=list)  # (step, block)

    def allocate(self, num_blocks: int, evicted: list[int]) -> list[int]:
        owners = [self.kept[block] for block in evicted]
        taken: list[int] = []
        for _ in range(num_blocks):
            taken_next = owners.pop(0) if owners and not self.free else None
            if self.free:
                taken.append(self.free.pop())
            else:
                owner = self.owner_with_most(taken_next)
                taken.append(next(block for block in self.cached if self.kept[block] == owner))
                self.cached.remove(taken[-1])
                del self.kept[taken[-1]]
        return taken

    def owner_with_most(self, candidate: str | None) -> str:
        """The candidate, if no owner has more cached blocks; which one of several is taken is left open."""
        numbers = Counter(self.kept[block] for block in self.cached)
        assert candidate is not None and numbers[candidate] == max(numbers.values())
        return candidate

    def count(self, block_id: int) -> int:
        return sum(table.count(block_id) for table in self.tables)

    def release(self, table: list[int], step_id: int | None) -> None:
        self.tables.remove(table)
        for block_id in reversed(table):
            if self.count(block_id) == 0:
                if step_id is None:
                    self.rest(block_id)
                else:
                    self.quarantined.append((step_id, block_id))

    def rest(self, block_id: int) -> None:
        (self.cached if block_id in self.kept else self.free).append(block_id)

    def end_quarantine(self, step_id: int) -> None:
        for step, block_id in list(self.quarantined):
            if step == step_id:
                self.quarantined.remove((step, block_id))
                self.rest(block_id)


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.evicted: list[int] = []
        self.pool = BlockPool(num_blocks, on_evict=self.evicted.append)
        self.naive = NaivePool(free=list(range(num_blocks))[::-1])

    @rule(share=st.floats(0, 1))
    def allocate(self, share: float) -> None:
        num_blocks = round(share * self.pool.num_available)
        num_evicted = max(0, num_blocks - len(self.naive.free))
        self.evicted.clear()
        block_ids = self.pool.allocate(num_blocks)
        assert len(self.evicted) == num_evicted
        assert block_ids == self.naive.allocate(num_blocks, self.evicted)
        assert self.evicted == block_ids[num_blocks - num_evicted :]
        self.naive.tables.append(block_ids)

    @precondition(lambda self: self.naive.tables)
    @rule(choice=st.integers(0, 99), length=st.integers(1, 12))
    def share_a_beginning(self, choice: int, length: int) -> None:
        tables = self.naive.tables
        beginning = tables[choice % len(tables)][:length]
        self.pool.share(beginning)
        tables.append(beginning)

    @precondition(lambda self: self.naive.cached)
    @rule(choice=st.integers(0, 99))
    def revive_a_cached_block(self, choice: int) -> None:
        block_id = self.naive.cached.pop(choice % len(self.naive.cached))
        self.pool.share([block_id])
        self.naive.tables.append([block_id])

    @precondition(lambda self: any(self.naive.tables))
    @rule(choice=st.integers(0, 99), place=st.integers(0, 11), owner=st.sampled_from("abc"))
    def keep(self, choice: int, place: int, owner: str) -> None:
        tables = [table for table in self.naive.tables if table]
        table = tables[choice % len(tables)]
        block_id = table[place % len(table)]
        self.pool.keep(block_id, owner)
        self.naive.kept.setdefault(block_id, owner)  # the first to publish it is its owner

    @precondition(lambda self: self.naive.tables)
    @rule(choice=st.integers(0, 99), step_id=st.one_of(st.none(), st.integers(1, 2)))
    def release(self, choice: int, step_id: int | None) -> None:
        table = self.naive.tables[choice % len(self.naive.tables)]
        self.pool.release(table, step_id=step_id)
        self.naive.release(table, step_id)

    @rule(step_id=st.integers(1, 2))
    def end_quarantine(self, step_id: int) -> None:
        self.pool.end_quarantine(step_id)
        self.naive.end_quarantine(step_id)

    @precondition(lambda self: not any(self.naive.tables) and not self.naive.quarantined)
    @rule()
    def forget_cached(self) -> None:
        self.pool.forget_cached()
        self.naive.free += self.naive.cached
        self.naive.cached.clear()
        self.naive.kept.clear()

    @invariant()
    def both_say_the_same(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, naive = self.pool, self.naive
        pool.check(naive.tables)
        blocks = range(pool.num_blocks)
        assert pool.num_free == len(naive.free)
        assert [b for b in blocks if pool.is_cached(b)] == sorted(naive.cached)
        assert [b for b in blocks if b in pool.quarantined] == sorted(b for _, b in naive.quarantined)
        assert pool.ref_counts == [naive.count(b) for b in blocks]
        assert pool.kept_block_ids == naive.kept.keys()
        assert pool.num_free + pool.num_cached == pool.num_available
        assert pool.num_available + pool.num_in_use + pool.num_quarantined == pool.num_blocks


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, stateful_step_count=100)  # 5,000 operations


@pytest.mark.slow
class TestLongPoolMachine(TestPoolMachine):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=100, stateful_step_count=100)  # 10,000 operations


# ---------------------------------------------------------------------------------- small stories


def test_a_new_pool_is_free() -> None:
    pool = BlockPool(3)
    assert (pool.num_free, pool.num_cached, pool.num_in_use, pool.num_quarantined) == (3, 0, 0, 0)
    assert pool.allocate(3) == [0, 1, 2]


def test_the_block_released_last_is_the_first_to_be_used_again() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    pool.release(table[:1])
    pool.release(table[1:2])
    assert pool.allocate(1) == table[1:2]


def test_a_shared_block_is_back_when_its_last_holder_has_left() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.share(table)
    pool.release(table)
    assert (pool.num_in_use, pool.num_free) == (1, 1)
    pool.release(table)
    assert (pool.num_in_use, pool.num_free) == (0, 2)


def kept_table(pool: BlockPool, num_blocks: int, owner: str | None = None) -> list[int]:
    table = pool.allocate(num_blocks)
    for block_id in table:
        pool.keep(block_id, owner)
    return table


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3)
    table = kept_table(pool, 2)
    pool.release(table)
    assert (pool.num_free, pool.num_cached) == (1, 2)
    assert pool.allocate(1) not in ([table[0]], [table[1]])
    assert pool.num_cached == 2


def test_the_end_of_a_table_is_evicted_before_its_beginning() -> None:
    evicted: list[int] = []
    pool = BlockPool(3, on_evict=evicted.append)
    table = kept_table(pool, 3)
    pool.release(table)
    pool.allocate(3)
    assert evicted == table[::-1]


def test_the_least_recently_released_block_is_evicted_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(3, on_evict=evicted.append)
    first, second, third = kept_table(pool, 3)
    for block_id in (second, first, third):
        pool.release([block_id])
    pool.share([second])  # used again, so it counts as released later
    pool.release([second])
    pool.allocate(3)
    assert evicted == [first, third, second]


def test_an_owner_with_fewer_cached_blocks_than_another_one_loses_none() -> None:
    evicted: list[int] = []
    pool = BlockPool(10, on_evict=evicted.append)
    modest = kept_table(pool, 3, "modest")
    pool.release(modest)
    for _ in range(20):
        pool.release(kept_table(pool, 4, "greedy"))
    assert not set(evicted) & set(modest)
    assert all(map(pool.is_cached, modest))


def test_owners_that_compute_as_much_as_there_is_have_equal_shares_but_for_a_block() -> None:
    pool = BlockPool(12)
    tables = {"first": kept_table(pool, 12, "first")}
    pool.release(tables["first"])
    for owner in ("second", "third"):
        for _ in range(20):
            tables[owner] = kept_table(pool, 1, owner)
            pool.release(tables[owner])
    numbers = Counter(pool._kept[block_id] for block_id in range(12) if pool.is_cached(block_id))
    assert sum(numbers.values()) == 12
    assert max(numbers.values()) - min(numbers.values()) <= 2  # a table in use counts for no owner


def test_the_only_owner_may_fill_the_cache() -> None:
    pool = BlockPool(4)
    pool.release(kept_table(pool, 4, "alone"))
    assert pool.num_cached == 4


def test_an_evicted_block_is_published_no_more() -> None:
    pool = BlockPool(1)
    pool.release(kept_table(pool, 1))
    pool.release(pool.allocate(1))
    assert (pool.num_free, pool.num_cached) == (1, 0)
    assert not pool.kept_block_ids


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_block_in_quarantine_is_not_free_until_the_step_ends(is_kept: bool) -> None:
    pool = BlockPool(1)
    table = kept_table(pool, 1) if is_kept else pool.allocate(1)
    pool.release(table, step_id=7)
    assert (pool.num_quarantined, pool.num_in_use, pool.num_available) == (1, 0, 0)
    pool.end_quarantine(6)
    assert pool.num_available == 0
    pool.end_quarantine(7)
    assert (pool.num_quarantined, pool.num_cached, pool.num_free) == (0, int(is_kept), int(not is_kept))


def test_a_block_that_another_still_holds_needs_no_quarantine() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1)
    pool.share(table)
    pool.release(table, step_id=7)
    assert (pool.num_quarantined, pool.num_in_use) == (0, 1)


# --------------------------------------------------------------------------- our own mistakes


def test_more_than_there_is_is_not_given() -> None:
    with pytest.raises(AssertionError):
        BlockPool(2).allocate(3)


def test_a_block_is_not_released_twice() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="block 0 released twice"):
        pool.release(table)


@pytest.mark.parametrize("step_id", [None, 7])
def test_a_block_not_in_use_is_not_published(step_id: int | None) -> None:
    pool = BlockPool(2)
    pool.release(pool.allocate(1), step_id=step_id)
    with pytest.raises(AssertionError, match="block 0 published while not in use"):
        pool.keep(0)


def test_a_block_that_holds_nothing_is_not_shared() -> None:
    with pytest.raises(KeyError):
        BlockPool(2).share([0])


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda pool: pool.share([0]), r"reference counts differ from the block tables at blocks \[0\]"),
        (lambda pool: pool.release([1]), r"reference counts differ from the block tables at blocks \[1\]"),
        (lambda pool: pool._free.append(0), "must be each block once, 6 together"),
        (lambda pool: pool._free.pop(), "free 0 [+] cached 1 [+] in use 3 .* must be each block once"),
        (lambda pool: pool._cached.add(0, None), "must be each block once"),
        (lambda pool: pool._cached.pop(), "must be each block once"),
        (lambda pool: setattr(pool._cached, "_num_blocks", 2), "cached blocks by owner"),
        (lambda pool: pool._quarantined.clear(), "must be each block once"),
        (lambda pool: setattr(pool, "_num_in_use", 4), "4 counted"),
        (lambda pool: pool._kept.clear(), "a cached block is not published"),
        (lambda pool: pool._kept.update({5: None}), "a free block is published"),
    ],
)
def test_a_count_that_is_wrong_is_found(corrupt: Callable[[BlockPool], object], message: str) -> None:
    pool = BlockPool(6)
    table = pool.allocate(3)  # 0, 1, 2
    pool.release(kept_table(pool, 1))  # 3
    pool.release(pool.allocate(1), step_id=1)  # 4; 5 stays free
    pool.check([table])
    corrupt(pool)
    with pytest.raises(InvariantViolated, match=message):
        pool.check([table])


def test_a_block_is_cached_while_it_is_published_and_no_table_names_it() -> None:
    pool = BlockPool(3)
    table = kept_table(pool, 2, "a")
    assert [pool.is_cached(block_id) for block_id in range(3)] == [False] * 3
    pool.release(table[1:])
    assert [pool.is_cached(block_id) for block_id in (*table, 2)] == [False, True, False]
    pool.share(table[1:])
    assert (pool.is_cached(table[1]), pool.num_cached, pool.num_in_use) == (False, 0, 2)


def test_counts_by_owner_are_right_while_owners_come_and_go() -> None:
    pool = BlockPool(6)
    first, second = kept_table(pool, 2, "first"), kept_table(pool, 1, "second")
    pool.release(first)
    pool.release(second)
    pool.check([])
    pool.share(second)  # one owner is left, and then two again
    pool.check([second])
    pool.release(second)
    pool.check([])
    pool.forget_cached()
    pool.check([])
    assert (pool.num_free, pool.num_cached) == (6, 0)
    for owner in ("second", "first"):
        pool.release(kept_table(pool, 2, owner))
        pool.check([])
    assert pool.num_cached == 4


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda cached: setattr(cached, "_max_count", 1),
        lambda cached: setattr(cached, "_max_count", 3),
        lambda cached: setattr(cached, "_num_blocks", 4),
        lambda cached: cached._by_count.clear(),
        lambda cached: cached._by_count[2].clear(),
        lambda cached: cached._by_owner.update(third=OrderedDict()),
    ],
)
def test_counts_by_owner_that_are_wrong_are_found(corrupt: Callable[[CachedBlocks], object]) -> None:
    pool = BlockPool(3)
    tables = [kept_table(pool, 2, "first"), kept_table(pool, 1, "second")]
    for table in tables:
        pool.release(table)
    pool.check([])
    corrupt(pool._cached)
    with pytest.raises(InvariantViolated, match="cached blocks by owner"):
        pool.check([])
