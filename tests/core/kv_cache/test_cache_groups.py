"""Groups of layers: what a window has passed, what is kept, and how long a sequence can be; all by counting."""

from __future__ import annotations

import itertools

import pytest

from triolet.core.kv_cache.cache_groups import HOLE, UNLIMITED, CacheGroups
from triolet.core.kv_cache.prefix_cache import DEFAULT_NAMESPACE, PrefixCache

WINDOWS = [(None,), (1,), (4,), (5,), (None, 3), (None, None, 6), (None, 2, 2)]


def kept(window: int | None, num_tokens: int, size: int) -> list[int]:
    """The blocks that the token at this index, or a later one, sees, with its own: looked at token by token."""
    first = 0 if window is None else max(0, num_tokens - window + 1)
    return [index for index in range(num_tokens // size + 1) if (index + 1) * size > first]


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("windows", WINDOWS)
def test_a_sequence_holds_what_its_next_tokens_see(windows: tuple[int | None, ...], size: int) -> None:
    groups, most = CacheGroups(windows), 0
    for num_tokens in range(60):
        num_behind = groups.num_behind(num_tokens, size)
        for window in windows:
            first = 0 if window is None else num_behind
            assert kept(window, num_tokens, size) == [*range(first, num_tokens // size + 1)]
        most = max(most, sum(len(kept(window, num_tokens, size)) for window in windows))
        assert groups.num_needed(num_tokens + 1, size) == most
    if groups.window is not None:
        assert groups.num_kept(size) <= groups.window / size + 2


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("windows", WINDOWS)
def test_the_longest_sequence_is_the_last_one_that_fits(windows: tuple[int | None, ...], size: int) -> None:
    groups, most = CacheGroups(windows), 100
    held = [sum(len(kept(window, token, size)) for window in windows) for token in range(most)]
    for num_blocks in range(len(windows), 20):
        fitting = next((token for token in range(most) if held[token] > num_blocks), UNLIMITED)
        assert groups.longest(num_blocks, size) == fitting


def test_windows_of_one_model_are_the_same() -> None:
    with pytest.raises(ValueError, match="all the same"):
        CacheGroups((3, 4))
    assert CacheGroups((4, None)).windows == (None, 4)


@pytest.mark.parametrize("windows", [(None,), (3,), (None, 3), (None, 5, 5)])
def test_a_hit_is_the_longest_beginning_of_which_every_group_has_what_it_reads(
    windows: tuple[int | None, ...],
) -> None:
    """Whichever blocks of whichever group were evicted, against every length, tried one by one."""
    groups = CacheGroups(windows)
    size, length = 2, 5 if groups.count == 1 else 4 if groups.count == 2 else 3
    token_ids = tuple(range(size * length + 1))
    places = range(length * groups.count)
    for evicted in itertools.product((False, True), repeat=len(places)):
        cache = PrefixCache(len(places), size, key=b"key", groups=groups)
        parent = cache.root(DEFAULT_NAMESPACE)
        table = cache.pool.allocate(len(places))
        for index in range(length):
            block_ids = table[index * groups.count : (index + 1) * groups.count]
            parent = cache.publish(block_ids, parent, token_ids[index * size : (index + 1) * size])
        gone = {table[place] for place, is_evicted in enumerate(evicted) if is_evicted}
        cache.pool.release([one for one in reversed(table) if one in gone])
        cache.pool.allocate(len(gone))
        cache.check()

        def is_there(end: int, gone: set[int] = gone, table: list[int] = table) -> bool:
            return not any(
                table[index * groups.count + group] in gone
                for group, window in enumerate(groups.windows)
                for index in kept(window, end * size, size)[:-1]
            )

        best = max(end for end in range(length + 1) if is_there(end))
        found, hashes = cache.find(token_ids, cache.root(DEFAULT_NAMESPACE))
        expected = [
            table[index * groups.count + group] if index in kept(window, best * size, size) else HOLE
            for index in range(best)
            for group, window in enumerate(groups.windows)
        ]
        assert (found, len(hashes)) == (expected, best)
