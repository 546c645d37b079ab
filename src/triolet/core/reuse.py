"""What of a waiting request has been computed already: by whoever had the same beginning, or by its sibling.

The answers to one prompt (n > 1) are computed from the same blocks. With prefix caching they find them like anybody
else. Where the cache is off, or must not be read, they take them from the first one's table, as long as it runs.
Only full blocks are shared, and the last token of the prompt is always computed: the rest of a block is less work than
copying it would be trouble.
"""

from __future__ import annotations

from triolet.core.journal import JournalEntry
from triolet.core.prefix_cache import PrefixCache
from triolet.core.sequence import Sequence

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
