"""What of a waiting request has been computed already: by whoever had the same beginning, or by its sibling.

The answers to one prompt (n > 1) are computed from the same blocks. With prefix caching they find them like anybody
else. Where the cache is off, or must not be read, they take them from the first one's table, as long as it runs.
Only full blocks are shared, and the last token of the prompt is always computed: the rest of a block is less work than
copying it would be trouble.
"""

from __future__ import annotations

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
