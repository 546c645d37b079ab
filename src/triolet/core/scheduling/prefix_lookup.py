"""Look-up of the blocks of a waiting request that were computed already, for an equal prefix or a sibling.

The answers to one prompt (n > 1) are computed from the same blocks. With prefix caching they find them like any other
request. Where the cache is off, or must not be read, they take them from the block table of the first one, as long as
it runs. Only full blocks are shared, and the last token of the prompt is always computed: the rest of a block is less
work than copying it.

Requests with the same beginning often arrive together. The first one computes it, and the others are deferred to the
next step and find it there (`PrefixesInStep`), where that saves them at least half of their work.
"""

from __future__ import annotations

import attrs

from triolet.core.journal import JournalEntry
from triolet.core.kv_cache.prefix_cache import PrefixCache
from triolet.core.scheduling.sequence import Sequence

MAX_HELD = 256
"""Most requests deferred to the end of the same step: finding the next one takes a look at each."""

Found = tuple[list[int], list[bytes]]
"""Block ids in order, and the hashes of those that have one. No reference is taken."""


def find_computed(cache: PrefixCache, sequence: Sequence, leader: Sequence | None) -> Found:
    """Find full blocks with the beginning of a request that has none; at least one token is left to compute.

    Args:
        cache: of the engine.
        sequence: the request.
        leader: first of the sequences that answer the same prompt, if it is still live.
    """
    entry = sequence.entry
    if cache.enabled and entry.reads_prefix_cache:
        tokens = entry.tokens(0, entry.num_tokens)
        return cache.find(tokens, prefix_root(cache, sequence), sequence.known_hashes)
    if leader is None or leader.row_id is None:
        return [], []
    num_shared = min(leader.num_computed_tokens, len(entry.request.prompt_token_ids), entry.num_tokens - 1)
    num_blocks = num_shared // cache.block_size
    return leader.block_table[:num_blocks], leader.block_hashes[:num_blocks]


def prefix_root(cache: PrefixCache, sequence: Sequence) -> bytes:
    """Return the parent hash of a request's first block; its namespace is hashed once."""
    if not sequence.prefix_root:
        sequence.prefix_root = cache.root(sequence.entry.request.cache_namespace)
    return sequence.prefix_root


def has_room(cache: PrefixCache, entry: JournalEntry, found: list[int]) -> bool:
    """Check whether all known tokens of a request fit now, beside the cached blocks that it would revive.

    Args:
        cache: of the engine.
        entry: of the request.
        found: ids of the blocks that need not be computed.
    """
    needed = -(-entry.num_tokens // cache.block_size) - len(found)
    revived = sum(map(cache.pool.is_cached, found))
    return needed + revived <= cache.pool.num_available


def publish_computed(cache: PrefixCache, sequence: Sequence) -> None:
    """Publish the blocks that have been filled."""
    if not cache.enabled:
        return
    size, entry = cache.block_size, sequence.entry
    for index in range(len(sequence.block_hashes), sequence.num_computed_tokens // size):
        parent = sequence.block_hashes[-1] if index else prefix_root(cache, sequence)
        content = entry.tokens(index * size, (index + 1) * size)
        sequence.block_hashes.append(cache.publish(sequence.block_table[index], parent, content))
    num_published = min(len(sequence.block_hashes), len(entry.request.prompt_token_ids) // size) * size
    entry.num_cache_creation_tokens = max(
        entry.num_cache_creation_tokens, num_published - entry.num_cached_tokens
    )


@attrs.define
class PrefixesInStep:
    """Prefixes that the step being planned computes, and the requests deferred until it has.

    Args:
        cache: of the engine.
        held: serials of the requests deferred to the end of this step.
    """

    cache: PrefixCache
    held: set[int] = attrs.field(factory=set, init=False)
    _by_next_hash: dict[bytes, tuple[Sequence, int]] = attrs.field(factory=dict, init=False)

    def begin_step(self) -> None:
        """Forget the last step."""
        self.held.clear()
        self._by_next_hash.clear()

    @property
    def is_full(self) -> bool:
        """Return whether the limit of deferred requests is reached: no other is looked at in this step."""
        return len(self.held) >= MAX_HELD

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Note how many tokens of a request the step computes."""
        size, entry, index = self.cache.block_size, sequence.entry, len(sequence.block_hashes)
        end = (sequence.num_computed_tokens + num_tokens) // size
        if self.cache.enabled and num_tokens >= size and end > index:
            parent = sequence.block_hashes[-1] if index else prefix_root(self.cache, sequence)
            next_hash = self.cache.chain(parent, entry.tokens(index * size, (index + 1) * size))
            self._by_next_hash.setdefault(next_hash, (sequence, end * size))

    def holds(self, sequence: Sequence, found: Found) -> bool:
        """Decide whether to defer a waiting request: at least half of its work is computed by this step.

        Args:
            sequence: a waiting request.
            found: blocks of it that are cached now.
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
