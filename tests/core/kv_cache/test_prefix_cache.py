from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from triolet.core.kv_cache.prefix_cache import CacheNamespace, PrefixCache
from triolet.errors import InvariantViolated

SIZE = 2
KEY = b"secret"

Beginning = tuple[str | None, tuple[int, ...]]  # a salt, and tokens from the first on


def make_cache(num_blocks: int = 8, *, key: bytes = KEY, enabled: bool = True) -> PrefixCache:
    return PrefixCache(num_blocks, SIZE, key=key, enabled=enabled)


def root_of(cache: PrefixCache, salt: str | None = None) -> bytes:
    return cache.root(CacheNamespace(salt=salt))


def compute(cache: PrefixCache, token_ids: Sequence[int], salt: str | None = None) -> list[int]:
    """Let a request compute its tokens, and publish what is full; returns its block table."""
    found, hashes = cache.find(token_ids, root_of(cache, salt))
    cache.pool.share(found)
    table = found + cache.pool.allocate(-(-len(token_ids) // SIZE) - len(found))
    parent = hashes[-1] if hashes else root_of(cache, salt)
    for index in range(len(found), len(token_ids) // SIZE):
        parent = cache.publish([table[index]], parent, tuple(token_ids[index * SIZE : (index + 1) * SIZE]))
    return table


# ------------------------------------------------------------------------ against a naive model


@attrs.define(eq=False)
class Held:
    """A request that holds blocks: what it has computed and published of its tokens."""

    salt: str | None
    token_ids: tuple[int, ...]
    table: list[int]
    hashes: list[bytes]

    def beginning(self, num_blocks: int) -> Beginning:
        return self.salt, self.token_ids[: num_blocks * SIZE]


class CacheMachine(RuleBasedStateMachine):
    """The model is a dictionary from whole beginnings, without any hash, to the block that holds their end."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.cache = make_cache(num_blocks)
        self.known: dict[Beginning, int] = {}
        self.held: list[Held] = []
        self.quarantined: dict[int, set[int]] = {1: set(), 2: set()}

    def findable(self, salt: str | None, token_ids: tuple[int, ...]) -> list[int]:
        out_of_reach = self.quarantined[1] | self.quarantined[2]
        blocks: list[int] = []
        for end in range(SIZE, len(token_ids), SIZE):  # one token at least is left to compute
            block_id = self.known.get((salt, token_ids[:end]))
            if block_id is None or block_id in out_of_reach:
                break
            blocks.append(block_id)
        return blocks

    # Two token ids, two salts: most requests begin like another.
    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple),
        salt=st.sampled_from([None, "a"]),
    )
    def look_up_and_take(self, token_ids: tuple[int, ...], salt: str | None) -> None:
        pool = self.cache.pool
        found, hashes = self.cache.find(token_ids, root_of(self.cache, salt))
        assert found == self.findable(salt, token_ids)
        assert len(hashes) == len(found)
        num_new = -(-len(token_ids) // SIZE) - len(found)
        if num_new + sum(map(pool.is_cached, found)) > pool.num_available:
            return
        pool.share(found)
        new = pool.allocate(num_new)
        self.known = {beginning: block for beginning, block in self.known.items() if block not in new}
        self.held.append(Held(salt, token_ids, found + new, hashes))

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0, 99))
    def publish_the_next_block(self, choice: int) -> None:
        held = self.held[choice % len(self.held)]
        place = len(held.hashes)
        if place < len(held.token_ids) // SIZE:
            parent = held.hashes[-1] if held.hashes else root_of(self.cache, held.salt)
            content = held.token_ids[place * SIZE : (place + 1) * SIZE]
            held.hashes.append(self.cache.publish([held.table[place]], parent, content))
            self.known.setdefault(held.beginning(place + 1), held.table[place])

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0, 99), step_id=st.one_of(st.none(), st.integers(1, 2)))
    def leave(self, choice: int, step_id: int | None) -> None:
        held = self.held.pop(choice % len(self.held))
        self.cache.pool.release(held.table, step_id=step_id)
        if step_id is not None:
            still_held = {block_id for other in self.held for block_id in other.table}
            self.quarantined[step_id] |= set(held.table) - still_held

    @rule(step_id=st.integers(1, 2))
    def end_the_step(self, step_id: int) -> None:
        self.cache.pool.end_quarantine(step_id)
        self.quarantined[step_id].clear()

    @rule()
    def reset(self) -> None:
        is_idle = not self.held and not any(self.quarantined.values())
        assert self.cache.reset() is is_idle
        if is_idle:
            self.known.clear()

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            self.cache.pool.check(held.table for held in self.held)
            assert self.cache.pool.kept_block_ids == set(self.known.values())


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=50, stateful_step_count=100)  # 5,000 operations


@pytest.mark.slow
class TestLongCacheMachine(TestCacheMachine):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=100, stateful_step_count=100)  # 10,000 operations


# -------------------------------------------------------------------------------- what is found


@pytest.mark.parametrize(
    ("token_ids", "num_found"),
    [
        ([], 0),
        ([1], 0),
        ([1, 2], 0),  # the whole prompt is there, but one token must be computed to go on from
        ([1, 2, 3], 1),
        ([1, 2, 3, 4], 1),
        ([1, 2, 3, 4, 5], 2),
        ([1, 2, 3, 4, 5, 6, 7], 2),  # the third block was never full
        ([1, 2, 9, 4, 5], 1),
        ([9, 2, 3, 4, 5], 0),
        ([2, 1, 3, 4, 5], 0),
        ([3, 4, 5], 0),  # a block is found only behind what it was computed behind
    ],
)
def test_the_longest_beginning_is_found_and_one_token_left(token_ids: list[int], num_found: int) -> None:
    cache = make_cache()
    table = compute(cache, [1, 2, 3, 4, 5])
    assert cache.find(token_ids, root_of(cache, None))[0] == table[:num_found]


def test_blocks_are_found_while_in_use_and_after() -> None:
    cache = make_cache()
    table = compute(cache, [1, 2, 3])
    assert cache.find([1, 2, 3], root_of(cache, None))[0] == table[:1]
    cache.pool.release(table)
    assert cache.find([1, 2, 3], root_of(cache, None))[0] == table[:1]


def test_looking_up_takes_nothing() -> None:
    cache = make_cache()
    cache.pool.release(compute(cache, [1, 2, 3]))
    cache.find([1, 2, 3], root_of(cache, None))
    assert (cache.pool.num_in_use, cache.pool.num_cached) == (0, 1)


@pytest.mark.parametrize("salt", ["", "a", "b", "\x01", "\x01a", "\ud800"])
def test_requests_of_different_salts_never_meet(salt: str) -> None:
    cache = make_cache(16)
    for other in (None, "", "a", "b", "\x01", "\x01a", "\ud800"):
        if other != salt:
            compute(cache, [1, 2, 3], other)
    assert cache.find([1, 2, 3], root_of(cache, salt))[0] == []
    table = compute(cache, [1, 2, 3], salt)
    assert cache.find([1, 2, 3], root_of(cache, salt))[0] == table[:1]


def test_of_two_equal_blocks_the_first_is_found_and_the_second_freed() -> None:
    cache = make_cache(4)
    first, second = cache.pool.allocate(1), cache.pool.allocate(1)
    hashes = [cache.publish([table[0]], root_of(cache, None), (1, 2)) for table in (first, second)]
    assert hashes[0] == hashes[1]
    assert cache.find([1, 2, 3], root_of(cache, None))[0] == first
    cache.pool.release(second)
    assert (cache.pool.num_cached, cache.pool.num_free) == (0, 3)


def test_behind_a_second_copy_new_blocks_are_published_all_the_same() -> None:
    cache = make_cache(4)
    first, second, third = cache.pool.allocate(3)
    cache.publish([first], root_of(cache, None), (1, 2))
    parent = cache.publish([second], root_of(cache, None), (1, 2))
    cache.publish([third], parent, (3, 4))
    assert cache.find([1, 2, 3, 4, 5], root_of(cache, None))[0] == [first, third]


def test_a_block_used_for_something_else_is_found_no_more() -> None:
    cache = make_cache(2)
    cache.pool.release(compute(cache, [1, 2, 3, 4]))
    compute(cache, [7, 8])
    assert len(cache.find([1, 2, 3, 4, 5], root_of(cache, None))[0]) == 1  # the end of the table went first
    compute(cache, [7, 9])
    assert cache.find([1, 2, 3], root_of(cache, None))[0] == []
    cache.check()


@pytest.mark.parametrize("num_published", [1, 2])
def test_a_block_in_quarantine_is_not_found_until_the_step_has_ended(num_published: int) -> None:
    cache = make_cache()
    table = compute(cache, [1, 2, 3, 4][: num_published * SIZE])
    cache.pool.release(table, step_id=5)
    assert cache.find([1, 2, 3, 4, 5], root_of(cache, None))[0] == []
    cache.pool.end_quarantine(5)
    assert cache.find([1, 2, 3, 4, 5], root_of(cache, None))[0] == table


def test_switched_off_nothing_is_published_and_nothing_found() -> None:
    cache = make_cache(enabled=False)
    table = compute(cache, [1, 2, 3, 4, 5])
    assert cache.find([1, 2, 3, 4, 5], root_of(cache, None)) == ([], [])
    cache.pool.release(table)
    assert (cache.pool.num_cached, cache.pool.num_free) == (0, 8)


@pytest.mark.parametrize(("step_id", "is_released"), [(None, False), (5, True)])
def test_a_reset_waits_for_blocks_in_use_or_quarantine(step_id: int | None, is_released: bool) -> None:
    cache = make_cache()
    table = compute(cache, [1, 2, 3])
    if is_released:
        cache.pool.release(table, step_id=step_id)
    assert cache.reset() is False
    cache.check()


def test_after_a_reset_nothing_is_found() -> None:
    cache = make_cache()
    cache.pool.release(compute(cache, [1, 2, 3]))
    assert cache.reset() is True
    assert cache.find([1, 2, 3], root_of(cache, None)) == ([], [])
    assert cache.pool.num_free == 8
    cache.check()


def test_a_published_block_keeps_no_object_for_each_of_its_tokens() -> None:
    cache, token_ids = make_cache(), (10**6, 10**6 + 1)  # numbers that are objects of their own
    kept = sys.getrefcount(token_ids)
    cache.publish(cache.pool.allocate(1), root_of(cache), token_ids)
    assert sys.getrefcount(token_ids) == kept
    assert len(cache.find([*token_ids, 0], root_of(cache))[0]) == 1


# --------------------------------------------------------------------------------------- hashes


def test_a_hash_depends_on_the_key_the_salt_the_parent_and_every_token() -> None:
    one, other = make_cache(key=b"one"), make_cache(key=b"other")
    root = root_of(one, None)
    hashes = [
        one.chain(root, [1, 2]),
        other.chain(root_of(other, None), [1, 2]),
        other.chain(root, [1, 2]),
        one.chain(root_of(one, "a"), [1, 2]),
        one.chain(one.chain(root, [1, 2]), [1, 2]),
        one.chain(root, [1, 3]),
        one.chain(root, [2, 1]),
        one.chain(root, [1, 2 + 2**32]),  # ids are not cut to 32 bits
        one.chain(root, [-1, 2]),
        one.chain(root, [1, 2, 0]),
    ]
    assert len(set(hashes)) == len(hashes)
    assert all(len(block_hash) == 16 for block_hash in hashes)


def test_the_same_key_gives_the_same_hash() -> None:
    assert make_cache().chain(root_of(make_cache(), "a"), [1, 2]) == make_cache().chain(
        root_of(make_cache(), "a"), [1, 2]
    )


class Colliding(PrefixCache):
    """All full blocks have one hash: the worst that a forger could reach."""

    def chain(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        return b"the same for all"


def colliding(num_blocks: int = 8) -> Colliding:
    return Colliding(num_blocks, SIZE, key=KEY)


@pytest.mark.parametrize(
    ("token_ids", "salt"),
    [
        ([3, 4, 5], None),  # other tokens
        ([1, 2, 3], "a"),  # another salt
        ([1, 3, 2], None),
    ],
)
def test_a_forged_collision_is_a_miss(token_ids: list[int], salt: str | None) -> None:
    cache = colliding()
    table = compute(cache, [1, 2, 3])
    assert cache.find([1, 2, 3], root_of(cache, None))[0] == table[:1]
    assert cache.find(token_ids, root_of(cache, salt))[0] == []


def test_a_forged_collision_behind_another_parent_is_a_miss() -> None:
    cache = colliding()
    table = compute(cache, [1, 2, 1, 2, 3])
    assert cache.find([1, 2, 1, 2, 3], root_of(cache, None))[0] == table[:1]
    cache.check()


# -------------------------------------------------------------------------------- our own mistakes


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda cache: cache._by_hash.clear(),
        lambda cache: cache._hash_of.clear(),
        lambda cache: cache.pool._kept.clear(),
        lambda cache: cache.pool._kept.update({7: None}),
        lambda cache: cache._hash_of.update({0: b"another"}),
    ],
)
def test_a_book_that_disagrees_is_found(corrupt: Callable[[PrefixCache], object]) -> None:
    cache = make_cache()
    compute(cache, [1, 2, 3])
    cache.check()
    corrupt(cache)
    with pytest.raises(InvariantViolated, match="published blocks must agree"):
        cache.check()


def test_hashes_that_are_known_are_not_worked_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache(8, 2, key=b"k")
    known: list[bytes] = []
    block_ids = cache.pool.allocate(2)
    first = cache.publish([block_ids[0]], root_of(cache, None), (1, 2))
    cache.publish([block_ids[1]], first, (3, 4))
    assert cache.find((1, 2, 3, 4, 5), root_of(cache, None), known) == cache.find(
        (1, 2, 3, 4, 5), root_of(cache, None)
    )
    assert len(known) == 2
    monkeypatch.setattr(cache, "chain", lambda parent, token_ids: pytest.fail("worked out again"))
    assert cache.find((1, 2, 3, 4, 5), root_of(cache, None), known)[0] == block_ids


# ------------------------------------------------------------------------------------ namespaces


TEXTS = st.none() | st.text(max_size=3)
NAMESPACES = st.builds(
    CacheNamespace, salt=TEXTS, adapter=TEXTS, weights_version=st.integers(min_value=0, max_value=2)
)


@given(NAMESPACES, NAMESPACES)
def test_equal_namespaces_share_blocks_and_no_two_others_do(
    one: CacheNamespace, other: CacheNamespace
) -> None:
    cache = make_cache()
    table = cache.pool.allocate(1)
    cache.publish([table[0]], cache.root(one), (1, 2))
    assert (cache.find([1, 2, 3], cache.root(other))[0] == table) == (one == other)


def test_a_part_of_one_text_is_not_taken_for_a_part_of_the_next() -> None:
    pairs = [(None, "ab"), ("ab", None), ("a", "b"), ("", "ab"), ("ab", ""), ("a\x01b", None)]
    namespaces = [CacheNamespace(salt=salt, adapter=adapter) for salt, adapter in pairs]
    assert len({make_cache().root(namespace) for namespace in namespaces}) == len(namespaces)


def test_found_blocks_come_with_their_hashes_in_order() -> None:
    cache = make_cache()
    table = compute(cache, (1, 2, 3, 4, 5))
    block_ids, hashes = cache.find((1, 2, 3, 4, 6), root_of(cache))
    first = cache.chain(root_of(cache), (1, 2))
    assert (block_ids, hashes) == (table[:2], [first, cache.chain(first, (3, 4))])
