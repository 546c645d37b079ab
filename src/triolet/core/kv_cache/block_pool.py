"""Reference counts and states of the blocks of the KV cache: ids only, the tensors belong to the runner.

Theory of operation
-------------------
A block is always in exactly one of four states, and `check()` proves it:

    free         nothing in it is worth keeping
    in use       at least one block table names it; `ref_counts[block_id]` says how many
    cached       no table names it, but its content can be found again through the prefix cache
    quarantined  no table names it, but the step in flight may still read or write it

    allocate: free -> in use, and when nothing is free the least recently released cached block, which the
        prefix cache forgets
    share:    cached or in use -> in use
    release:  in use -> in use, until the last reference; then -> cached if its content is published, else ->
              free; or -> quarantined when the step in flight holds it
    step end: quarantined -> cached or free

Publishing (`keep`) is only possible while a block is in use: what an aborted request was writing is never
found again. Tables are released from their end, so that under pressure the beginnings, which others share
most likely, go last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from triolet.errors import InvariantViolated


class BlockPool:
    """A fixed number of blocks.

    Args:
        num_blocks: how many there are; ids are 0 .. num_blocks - 1.
        on_evict: told the id of a cached block before it is used for something else.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] = lambda block_id: None) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        # Taken from the end: the block used last is the one most likely still in the processor's caches.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the front is evicted first
        self._kept: set[int] = set()
        self._quarantined: dict[int, list[int]] = {}
        self._on_evict = on_evict
        self._num_in_use = 0

    @property
    def num_free(self) -> int:
        """Blocks with nothing in them."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content can be found again."""
        return len(self._cached)

    @property
    def num_in_use(self) -> int:
        """Blocks that some block table names."""
        return self._num_in_use

    @property
    def num_quarantined(self) -> int:
        """Blocks that wait for the end of the step in flight."""
        return sum(map(len, self._quarantined.values()))

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free ones, then cached ones."""
        return len(self._free) + len(self._cached)

    def is_cached(self, block_id: int) -> bool:
        """Return True if the block is unreferenced and the prefix cache can find its content."""
        return block_id in self._cached

    def is_quarantined(self, block_id: int) -> bool:
        """Return True if the block waits for the end of a step."""
        return any(block_id in block_ids for block_ids in self._quarantined.values())

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks with one reference each; the caller has looked at `num_available`."""
        assert num_blocks <= self.num_available, (num_blocks, self.num_available)
        block_ids = [self._take() for _ in range(num_blocks)]
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        self._num_in_use += num_blocks
        return block_ids

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block_id, _ = self._cached.popitem(last=False)
        self._kept.discard(block_id)
        self._on_evict(block_id)
        return block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks that are cached or in use."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                del self._cached[block_id]
                self._num_in_use += 1
            self.ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int], *, step_id: int | None = None) -> None:
        """Take back one reference each.

        Args:
            block_ids: a block table, in order.
            step_id: the step in flight that still works on them, if there is one.
        """
        for block_id in reversed(block_ids):
            assert self.ref_counts[block_id] > 0, f"block {block_id} released twice"
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self._num_in_use -= 1
                if step_id is None:
                    self._rest(block_id)
                else:
                    self._quarantined.setdefault(step_id, []).append(block_id)

    def end_quarantine(self, step_id: int) -> None:
        """Make the blocks that the ended step quarantined usable again."""
        for block_id in self._quarantined.pop(step_id, ()):
            self._rest(block_id)

    def _rest(self, block_id: int) -> None:
        if block_id in self._kept:
            self._cached[block_id] = None
        else:
            self._free.append(block_id)

    def keep(self, block_id: int) -> None:
        """Mark a block in use as published: the prefix cache can find it from now on."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} published while not in use"
        self._kept.add(block_id)

    def forget_cached(self) -> None:
        """Turn every cached block into a free one; the prefix cache has been emptied."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._kept.clear()

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Hold the counts against the block tables that exist.

        Raises:
            InvariantViolated: with the equation that failed and its numbers.
        """
        expected = [0] * self.num_blocks
        for block_table in block_tables:
            for block_id in block_table:
                expected[block_id] += 1
        if expected != self.ref_counts:
            wrong = [
                block_id
                for block_id, (a, b) in enumerate(zip(expected, self.ref_counts, strict=True))
                if a != b
            ]
            raise InvariantViolated(f"reference counts differ from the block tables at blocks {wrong[:8]}")
        in_use = [block_id for block_id, count in enumerate(self.ref_counts) if count]
        quarantined = [block_id for block_ids in self._quarantined.values() for block_id in block_ids]
        everything = sorted([*self._free, *self._cached, *in_use, *quarantined])
        if everything != list(range(self.num_blocks)) or len(in_use) != self._num_in_use:
            raise InvariantViolated(
                f"free {self.num_free} + cached {self.num_cached} + in use {len(in_use)} "
                f"({self._num_in_use} counted) + quarantined {len(quarantined)} "
                f"must be each block once, {self.num_blocks} together"
            )
        if not self._cached.keys() <= self._kept:
            raise InvariantViolated("a cached block is not published")
        if self._kept & set(self._free):
            raise InvariantViolated("a free block is published")

    @property
    def kept_block_ids(self) -> frozenset[int]:
        """Blocks that the prefix cache can find."""
        return frozenset(self._kept)
