"""Prefix index: knows which replicas hold the KV of a beginning.

A hash names a whole beginning, as in `kv_cache.prefix_cache`, and maps to the set of replicas that hold it, one bit
each. Its owner feeds it in one of two ways: exactly, by `add` and `discard` as caches publish and evict,
or from what was sent, by `touch`, which takes each replica's cache to be one of `max_blocks` that evicts what was used
least recently. In both, the index holds at most `max_blocks` hashes a replica, so that its size has a bound.

Of one chain the last block is taken to be the oldest: a cache that loses a beginning's first block can find nothing of
the rest, so that caches let go of ends first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

DEFAULT_MAX_BLOCKS = 65_536  # a million tokens in blocks of 16; some 10 MB a replica


class PrefixIndex:
    """Hashes of beginnings, and the replicas that hold them.

    Args:
        max_blocks: hashes a replica, at most; see `resize` for single ones.
    """

    def __init__(self, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self._default_max_blocks = max_blocks
        self._max_blocks: dict[int, int] = {}
        self._replicas_of: dict[bytes, int] = {}  # hash -> set of replicas as bits
        self._hashes_of: dict[int, OrderedDict[bytes, None]] = {}  # the one used least recently first

    def __len__(self) -> int:
        """Return the number of different hashes."""
        return len(self._replicas_of)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._replicas_of

    def num_blocks(self, replica: int) -> int:
        """Return the number of hashes of a replica."""
        return len(self._hashes_of.get(replica, ()))

    def resize(self, replica: int, max_blocks: int) -> None:
        """Bound the hashes of one replica, such as by the size of its cache."""
        self._max_blocks[replica] = max_blocks
        self._evict(replica)

    def add(self, replica: int, block_hash: bytes) -> None:
        """Note that a replica holds a block; it becomes the one used last."""
        self.touch(replica, (block_hash,))

    def touch(self, replica: int, hashes: Sequence[bytes]) -> None:
        """Note that a replica computes, or uses, all blocks of a chain."""
        held = self._hashes_of.setdefault(replica, OrderedDict())
        replicas_of, bit, move_to_end = self._replicas_of, 1 << replica, held.move_to_end
        for block_hash in reversed(hashes):
            if block_hash in held:
                move_to_end(block_hash)
            else:
                held[block_hash] = None
                replicas_of[block_hash] = replicas_of.get(block_hash, 0) | bit
        self._evict(replica)

    def discard(self, replica: int, block_hash: bytes) -> None:
        """Note that a replica no longer holds a block."""
        held = self._hashes_of.get(replica)
        if held is None or block_hash not in held:
            return
        del held[block_hash]
        self._clear_bit(replica, block_hash)

    def forget(self, replica: int) -> None:
        """Note that a replica holds nothing: its process is a new one."""
        for block_hash in self._hashes_of.pop(replica, ()):
            self._clear_bit(replica, block_hash)
        self._max_blocks.pop(replica, None)

    def leading(self, hashes: Sequence[bytes]) -> dict[int, int]:
        """Return how many leading blocks of a chain each replica holds; those that hold none are left out."""
        found: dict[int, int] = {}
        replicas_of = self._replicas_of.get
        holders = replicas_of(hashes[0], 0) if hashes else 0
        if not holders:
            return found
        for depth, block_hash in enumerate(hashes):
            remaining = replicas_of(block_hash, 0) & holders
            if remaining == holders:
                continue
            for replica in _bits(holders ^ remaining):
                found[replica] = depth
            holders = remaining
            if not holders:
                return found
        for replica in _bits(holders):
            found[replica] = len(hashes)
        return found

    def _evict(self, replica: int) -> None:
        held = self._hashes_of.get(replica)
        limit = self._max_blocks.get(replica, self._default_max_blocks)
        while held and len(held) > limit:
            self._clear_bit(replica, held.popitem(last=False)[0])

    def _clear_bit(self, replica: int, block_hash: bytes) -> None:
        remaining = self._replicas_of[block_hash] & ~(1 << replica)
        if remaining:
            self._replicas_of[block_hash] = remaining
        else:
            del self._replicas_of[block_hash]


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
