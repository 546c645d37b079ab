"""What a prefix cache tells of the blocks that can be found, of several groups and of changed weights."""

from __future__ import annotations

import pytest

from triolet.core.kv_cache.cache_groups import UNLIMITED, CacheGroups
from triolet.core.kv_cache.prefix_cache import DEFAULT_NAMESPACE, CacheNamespace, PrefixCache
from triolet.core.step_plan import BlockSave

ROOT = b"root"
TWO_GROUPS = CacheGroups((None, 3))


def published(cache: PrefixCache, *contents: tuple[int, ...]) -> tuple[list[int], list[bytes]]:
    """Publish blocks of these tokens behind each other; return the block table and the hashes."""
    table, hashes, parent = [], [], ROOT
    for content in contents:
        block_ids = cache.pool.allocate(cache.groups.count)
        parent = cache.publish(block_ids, parent, content)
        table += block_ids
        hashes.append(parent)
    return table, hashes


def told(cache: PrefixCache) -> list[tuple[str, bytes]]:
    """A list that gets what the cache tells of its blocks from now on."""
    events: list[tuple[str, bytes]] = []
    cache.on_publish = lambda block_hash: events.append(("publish", block_hash))
    cache.on_forget = lambda block_hash: events.append(("forget", block_hash))
    return events


def test_each_block_is_told_once_when_it_can_be_found_and_once_when_no_longer() -> None:
    cache = PrefixCache(2, 2, key=b"k")
    events = told(cache)
    table, [first, second] = published(cache, (1, 2), (3, 4))
    cache.publish([table[0]], ROOT, (1, 2))
    assert events == [("publish", first), ("publish", second)]
    cache.pool.release(table)  # the end of a table goes first
    cache.pool.allocate(1)
    assert events[2:] == [("forget", second)]
    cache.check()


def test_a_reset_tells_of_every_block() -> None:
    cache = PrefixCache(3, 2, key=b"k")
    table, hashes = published(cache, (1, 2), (3, 4))
    events = told(cache)
    assert cache.reset() is False
    assert events == []
    cache.pool.release(table)
    assert cache.reset() is True
    assert events == [("forget", block_hash) for block_hash in hashes]
    assert cache.find((1, 2, 3), ROOT) == ([], [])


def test_blocks_to_save_are_taken_once_and_only_where_they_are_remembered() -> None:
    cache = PrefixCache(4, 2, key=b"k", remembers_saves=True)
    assert cache.take_saves() == ()
    table, [first, second] = published(cache, (1, 2), (3, 4))
    cache.publish([table[0]], ROOT, (1, 2))
    assert cache.take_saves() == (BlockSave((table[0],), first), BlockSave((table[1],), second))
    assert cache.take_saves() == ()
    forgetful = PrefixCache(4, 2, key=b"k")
    published(forgetful, (1, 2))
    assert forgetful.take_saves() == ()


def test_a_reset_forgets_what_was_to_be_saved() -> None:
    cache = PrefixCache(4, 2, key=b"k", remembers_saves=True)
    table, _ = published(cache, (1, 2))
    cache.pool.release(table)
    cache.reset()
    assert cache.take_saves() == ()


def test_a_save_names_the_blocks_of_all_groups() -> None:
    cache = PrefixCache(4, 2, key=b"k", remembers_saves=True, groups=TWO_GROUPS)
    table, [block_hash] = published(cache, (1, 2))
    assert cache.take_saves() == (BlockSave(tuple(table), block_hash),)
    assert len(table) == 2


def test_blocks_of_changed_weights_are_another_beginning() -> None:
    old, new, newer = (PrefixCache(4, 2, key=b"k", weight_version=version) for version in (0, 1, 2))
    assert old.root(DEFAULT_NAMESPACE) == PrefixCache(4, 2, key=b"k").root(CacheNamespace(weights_version=0))
    assert new.root(DEFAULT_NAMESPACE) == old.root(CacheNamespace(weights_version=1))
    assert new.root(CacheNamespace(weights_version=7)) == old.root(CacheNamespace(weights_version=1))
    assert len({one.root(DEFAULT_NAMESPACE) for one in (old, new, newer)}) == 3


def test_a_block_is_forgotten_when_that_of_the_last_group_is_gone() -> None:
    cache = PrefixCache(2, 2, key=b"k", groups=TWO_GROUPS)
    events = told(cache)
    table, [block_hash] = published(cache, (1, 2))
    cache.pool.release(table)
    cache.pool.allocate(1)
    assert events == [("publish", block_hash)]
    cache.check()
    cache.pool.allocate(1)
    assert events == [("publish", block_hash), ("forget", block_hash)]
    cache.check()


def test_the_block_of_one_group_that_was_evicted_is_published_again_in_its_place() -> None:
    cache = PrefixCache(3, 2, key=b"k", groups=TWO_GROUPS)
    [full, windowed], _ = published(cache, (1, 2))
    cache.pool.release([windowed])
    [spare] = cache.pool.allocate(1)
    [other] = cache.pool.allocate(1)
    assert {spare, other} >= {windowed}
    events = told(cache)
    cache.publish([other, spare], ROOT, (1, 2))
    assert events == []
    assert cache.find((1, 2, 3), ROOT)[0] == [full, spare]
    cache.check()


def test_a_block_of_a_window_in_quarantine_is_not_found() -> None:
    cache = PrefixCache(4, 2, key=b"k", groups=TWO_GROUPS)
    [full, windowed], _ = published(cache, (1, 2))
    assert cache.find((1, 2, 3), ROOT)[0] == [full, windowed]
    cache.pool.release([windowed], step_id=1)
    assert cache.find((1, 2, 3), ROOT) == ([], [])
    cache.pool.end_quarantine(1)
    assert cache.find((1, 2, 3), ROOT)[0] == [full, windowed]


def test_where_a_window_has_passed_the_table_has_holes() -> None:
    cache = PrefixCache(8, 2, key=b"k", groups=TWO_GROUPS)
    table, hashes = published(cache, (1, 2), (3, 4), (5, 6))
    # The token at index 6 sees those from index 4 on.
    assert cache.find((1, 2, 3, 4, 5, 6, 7), ROOT) == (
        [table[0], -1, table[2], -1, table[4], table[5]],
        hashes,
    )


def test_the_owner_with_most_cached_blocks_loses_one_first() -> None:
    cache = PrefixCache(3, 2, key=b"k")
    mine, theirs, more = cache.pool.allocate(3)
    cache.publish([mine], ROOT, (1, 2), "a")
    cache.publish([theirs], ROOT, (3, 4), "b")
    cache.publish([more], ROOT, (5, 6), "b")
    for block_id in (mine, theirs, more):
        cache.pool.release([block_id])
    assert cache.pool.allocate(1) == [theirs]


def test_a_hash_that_is_not_enabled_is_the_same_and_published_nowhere() -> None:
    cache = PrefixCache(4, 2, key=b"k", enabled=False, remembers_saves=True)
    events = told(cache)
    _, [block_hash] = published(cache, (1, 2))
    assert block_hash == PrefixCache(4, 2, key=b"k").chain(ROOT, (1, 2))
    assert (events, cache.take_saves()) == ([], ())


# -------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("windows", [(), (0,), (3, 4), (None, 0), (-1,)])
def test_windows_that_no_model_has_are_refused(windows: tuple[int | None, ...]) -> None:
    with pytest.raises(ValueError, match="at least one group, all the same"):
        CacheGroups(windows)


def test_groups_are_counted_and_those_without_a_window_come_first() -> None:
    groups = CacheGroups((5, None, 5, None))
    assert groups.windows == (None, None, 5, 5)
    assert (groups.count, groups.num_full, groups.window) == (4, 2, 5)
    plain = CacheGroups()
    assert (plain.windows, plain.count, plain.num_full, plain.window) == ((None,), 1, 1, None)


@pytest.mark.parametrize(
    ("window", "num_tokens", "num_behind"),
    [(None, 100, 0), (3, 0, 0), (3, 2, 0), (3, 5, 0), (3, 6, 1), (3, 9, 1), (3, 10, 2), (1, 4, 1), (1, 3, 0)],
)
def test_blocks_behind_a_window_are_those_that_end_before_its_first_token(
    window: int | None, num_tokens: int, num_behind: int
) -> None:
    assert CacheGroups((window,)).num_behind(num_tokens, 4) == num_behind


@pytest.mark.parametrize(("window", "num_kept"), [(None, UNLIMITED), (1, 1), (2, 2), (5, 2), (6, 3), (9, 3)])
def test_a_window_keeps_the_block_of_a_token_and_those_that_the_tokens_before_it_touch(
    window: int | None, num_kept: int
) -> None:
    assert CacheGroups((window,)).num_kept(4) == num_kept


@pytest.mark.parametrize(
    ("windows", "num_blocks", "longest"),
    [
        ((None,), 5, 20),
        ((None, None), 5, 8),
        ((5,), 1, 4),
        ((5,), 2, UNLIMITED),
        ((None, 5), 3, 4),
        ((None, 5), 4, 8),
        ((None, 5), 9, 28),
        ((None, None, 5), 6, 8),
        ((None, None, 5), 9, 12),
    ],
)
def test_the_longest_sequence_has_its_windows_and_all_the_rest(
    windows: tuple[int | None, ...], num_blocks: int, longest: int
) -> None:
    assert CacheGroups(windows).longest(num_blocks, 4) == longest
