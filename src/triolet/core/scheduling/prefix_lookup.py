"""What of a waiting request has been computed already: by whoever had the same beginning, or by its sibling.

The answers to one prompt (n > 1) are computed from the same blocks. With prefix caching they find them like anybody
else. Where the cache is off, or must not be read, they take them from the first one's table, as long as it runs.
Only full blocks are shared, and the last token of the prompt is always computed: the rest of a block is less work than
copying it would be trouble.

Requests with the same beginning often come together. Of these the first one computes it, and the others are let in a
step later and find it (`PrefixesInStep`), where that saves them at least half of their work.
"""

from __future__ import annotations

import attrs

from triolet.core.journal import JournalEntry
from triolet.core.kv_cache.prefix_cache import PrefixCache
from triolet.core.scheduling.sequence import Sequence

MAX_HELD = 256
"""Requests that wait at most for the end of the same step; to find the next one costs a look at each."""

Found = tuple[list[int], list[bytes]]
"""Block ids in order, and their hashes as far as there are any. No reference is taken."""


def find_computed(cache: PrefixCache, sequence: Sequence, leader: Sequence | None) -> Found:
    """Full blocks with the beginning of a request that has none; at least one token is left to compute.

    Args:
        cache: of the engine.
        sequence: the request.
        leader: the first of those that answer the same prompt, if it is still there.
    """
    entry = sequence.entry
    if cache.enabled and entry.reads_prefix_cache:
        tokens = entry.tokens(0, entry.num_tokens)
        return cache.find(tokens, entry.request.cache_salt, sequence.known_hashes)
    if leader is None or leader.row_id is None:
        return [], []
    num_shared = min(leader.num_computed_tokens, len(entry.request.prompt_token_ids), entry.num_tokens - 1)
    num_blocks = num_shared // cache.block_size
    return leader.block_table[:num_blocks], leader.block_hashes[:num_blocks]


def has_room(cache: PrefixCache, entry: JournalEntry, found: list[int]) -> bool:
    """Whether all known tokens of the request fit now, beside the cached blocks that it would revive.

    Args:
        cache: of the engine.
        entry: of the request.
        found: ids of the blocks that need not be computed.
    """
    needed = -(-entry.num_tokens // cache.block_size) - len(found)
    revived = sum(map(cache.pool.is_cached, found))
    return needed + revived <= cache.pool.num_available


def publish_computed(cache: PrefixCache, sequence: Sequence) -> None:
    """Let others find the blocks that have been filled."""
    if not cache.enabled:
        return
    size, entry = cache.block_size, sequence.entry
    for index in range(len(sequence.block_hashes), sequence.num_computed_tokens // size):
        parent = sequence.block_hashes[-1] if index else cache.root(entry.request.cache_salt)
        content = entry.tokens(index * size, (index + 1) * size)
        sequence.block_hashes.append(cache.publish(sequence.block_table[index], parent, content))
    num_published = min(len(sequence.block_hashes), len(entry.request.prompt_token_ids) // size) * size
    entry.num_cache_creation_tokens = max(
        entry.num_cache_creation_tokens, num_published - entry.num_cached_tokens
    )


@attrs.define
class PrefixesInStep:
    """The beginnings that the step which is being planned computes, and who had better wait for them.

    Args:
        cache: of the engine.
        held: serials of the requests that wait for the end of this step.
    """

    cache: PrefixCache
    held: set[int] = attrs.field(factory=set, init=False)
    _by_next_hash: dict[bytes, tuple[Sequence, int]] = attrs.field(factory=dict, init=False)

    def begin_step(self) -> None:
        """A step is being planned."""
        self.held.clear()
        self._by_next_hash.clear()

    @property
    def is_full(self) -> bool:
        """Whether so many wait that nobody else is looked at in this step."""
        return len(self.held) >= MAX_HELD

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """A request gets so many tokens computed in the step."""
        size, entry, index = self.cache.block_size, sequence.entry, len(sequence.block_hashes)
        end = (sequence.num_computed_tokens + num_tokens) // size
        if self.cache.enabled and num_tokens >= size and end > index:
            parent = sequence.block_hashes[-1] if index else self.cache.root(entry.request.cache_salt)
            next_hash = self.cache.chain(parent, entry.tokens(index * size, (index + 1) * size))
            self._by_next_hash.setdefault(next_hash, (sequence, end * size))

    def holds(self, sequence: Sequence, found: Found) -> bool:
        """Whether a request had better wait: then at least half of what it has to compute is there after this step.

        Args:
            sequence: a waiting one.
            found: what is there of it now.
        """
        entry, index = sequence.entry, len(found[0])
        begin = index * self.cache.block_size
        if not (self._by_next_hash and entry.reads_prefix_cache and index < len(sequence.known_hashes)):
            return False
        other, end = self._by_next_hash.get(sequence.known_hashes[index], (None, 0))
        if other is None:
            return False
        end = min(end, (entry.num_tokens - 1) // self.cache.block_size * self.cache.block_size)
        pairs = zip(other.entry.tokens(begin, end), entry.tokens(begin, end), strict=True)
        num_same = next((i for i, (a, b) in enumerate(pairs) if a != b), end - begin)
        num_saved = num_same // self.cache.block_size * self.cache.block_size
        if 2 * num_saved < entry.num_tokens - begin:
            return False
        self.held.add(entry.serial)
        return True
