"""Reference counts and states of the blocks of the KV cache: ids only, the tensors belong to the runner.

Theory of operation
-------------------
A block is always in exactly one of four states, and `check()` proves it:

    free         nothing in it is worth keeping
    in use       at least one block table names it; `ref_counts[block_id]` says how many
    cached       no table names it, but its content can be found again through the prefix cache
    quarantined  no table names it, but the step in flight may still read or write it

    allocate: free -> in use, and when nothing is free a cached block, which the prefix cache forgets: of the
        owner that has most of them, the least recently released one
    share:    cached or in use -> in use
    release:  in use -> in use, until the last reference; then -> cached if its content is published, else ->
              free; or -> quarantined when the step in flight holds it
    step end: quarantined -> cached or free

Publishing (`keep`) is only possible while a block is in use: what an aborted request was writing is never
found again.

The owner of a cached block is the server's key whose request published it, and without keys there is only one.
An owner loses a block only while no other one has more. In one LRU list of all, the key that computes most would
evict the blocks of all others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from triolet.errors import InvariantViolated


class CachedBlocks:
    """Cached blocks in the order in which they are evicted; every operation takes constant time."""

    def __init__(self) -> None:
        # Of each owner that has any: the front was released least recently.
        self._by_owner: dict[str | None, OrderedDict[int, None]] = {}
        # Owners by their number of blocks, kept only while there are several: most servers have one.
        self._by_count: dict[int, dict[str | None, None]] = {}
        self._max_count = 0
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._by_owner.values())

    def add(self, block_id: int, owner: str | None) -> None:
        """Add a block that was released just now."""
        blocks = self._by_owner.get(owner)
        if blocks is None:
            if len(self._by_owner) == 1:
                self._count_first()
            blocks = self._by_owner[owner] = OrderedDict()
        blocks[block_id] = None
        self._num_blocks += 1
        if self._by_count:
            self._move(owner, len(blocks) - 1, len(blocks))

    def holds(self, block_id: int, owner: str | None) -> bool:
        """Return True if this block of an owner is there."""
        blocks = self._by_owner.get(owner)
        return blocks is not None and block_id in blocks

    def remove(self, block_id: int, owner: str | None) -> None:
        """Remove a block, which is in use again.

        Raises:
            KeyError: it is not there.
        """
        blocks = self._by_owner[owner]
        del blocks[block_id]
        self._removed_from(owner, blocks)

    def pop(self) -> int:
        """Remove and return the block to evict next: the oldest one of the owner with most."""
        owners = self._by_count[self._max_count] if self._by_count else self._by_owner
        owner = next(iter(owners))
        blocks = self._by_owner[owner]
        block_id, _ = blocks.popitem(last=False)
        self._removed_from(owner, blocks)
        return block_id

    def clear(self) -> None:
        """Remove all blocks."""
        self._by_owner.clear()
        self._by_count.clear()
        self._num_blocks = 0

    def _removed_from(self, owner: str | None, blocks: OrderedDict[int, None]) -> None:
        self._num_blocks -= 1
        if self._by_count:
            self._move(owner, len(blocks) + 1, len(blocks))
        if not blocks:
            del self._by_owner[owner]
            if len(self._by_owner) == 1:
                self._by_count.clear()

    def _count_first(self) -> None:
        [(owner, blocks)] = self._by_owner.items()
        self._max_count = len(blocks)
        self._by_count[self._max_count] = {owner: None}

    def _move(self, owner: str | None, before: int, after: int) -> None:
        """Move an owner to the next or the previous number of blocks."""
        if before:
            del self._by_count[before][owner]
            if not self._by_count[before]:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, {})[owner] = None
        # The number changes by one, so that no search is needed.
        if after > self._max_count or self._max_count not in self._by_count:
            self._max_count = after

    def check(self) -> None:
        """Check that the numbers by owner are those of the blocks.

        Raises:
            InvariantViolated: they are not.
        """
        counts = {owner: len(blocks) for owner, blocks in self._by_owner.items()}
        by_count = {owner: count for count, owners in self._by_count.items() for owner in owners}
        is_counted = len(counts) > 1
        if (
            sum(counts.values()) != self._num_blocks
            or 0 in counts.values()
            or by_count != (counts if is_counted else {})
            or (is_counted and self._max_count != max(counts.values()))
        ):
            raise InvariantViolated(
                f"cached blocks by owner {list(counts.values())} must be those counted: "
                f"{list(by_count.values())}, the most {self._max_count}, together {self._num_blocks}"
            )


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
        self._cached = CachedBlocks()
        self._kept: dict[int, str | None] = {}  # published blocks, with their owners
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
        return block_id in self._kept and self._cached.holds(block_id, self._kept[block_id])

    @property
    def quarantined(self) -> frozenset[int]:
        """Blocks that wait for the end of a step."""
        return frozenset(chain.from_iterable(self._quarantined.values()))

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
        block_id = self._cached.pop()
        del self._kept[block_id]
        self._on_evict(block_id)
        return block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks that are cached or in use."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                self._cached.remove(block_id, self._kept[block_id])
                self._num_in_use += 1
            self.ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int], *, step_id: int | None = None) -> None:
        """Take back one reference each.

        Args:
            block_ids: a block table, in order.
            step_id: the step in flight that still works on them, if there is one.
        """
        # From its end, so that beginnings, which others share most likely, are evicted last.
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
            self._cached.add(block_id, self._kept[block_id])
        else:
            self._free.append(block_id)

    def keep(self, block_id: int, owner: str | None = None) -> None:
        """Mark a block in use as published: the prefix cache can find it from now on.

        Args:
            owner: name of the key that it is counted for while it is cached.
        """
        assert self.ref_counts[block_id] > 0, f"block {block_id} published while not in use"
        self._kept.setdefault(block_id, owner)

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
        if not self._kept.keys() >= set(self._cached):
            raise InvariantViolated("a cached block is not published")
        self._cached.check()
        if self._kept.keys() & set(self._free):
            raise InvariantViolated("a free block is published")

    @property
    def kept_block_ids(self) -> frozenset[int]:
        """Blocks that the prefix cache can find."""
        return frozenset(self._kept)
