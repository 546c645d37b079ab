"""Cache groups: layers of one model that share a block table.

Theory of operation
-------------------
A layer with a sliding window never reads a token that is behind it, so the blocks there can be given back while the
sequence goes on; a layer with full attention reads them to the end. So the layers are divided into groups: those of a
group have the same window, or none, and one block table.

All groups have as many layers as each other (a last one may be short of a few), and therefore blocks of as many bytes.
That makes one pool with one space of ids enough: a block is `block_size` tokens of the layers of one group, whichever
group takes it. Nothing has to be divided between the groups beforehand. How much each one needs depends on how long the
sequences are, which nothing knows at the start: short ones need as many blocks behind windows as anywhere, of long ones
a window keeps a few. In one pool, what windows free is what full attention gets.

A block table holds, for each `block_size` tokens in turn, a block of every group: first those of full attention, then
those with a window. A model with one group has a table of plain blocks, and nothing is done twice for it. Where a
window has passed, a table has `HOLE` instead of a block, so that all others keep their places.

How many blocks a sequence holds: with full attention, all. Behind a window of w tokens, where the next token is the one
at index n, the tokens before n - w + 1 are not read any more; blocks wholly before it are given back. What is left
for a step of one token are at most 1 + ceil((w - 1) / block_size) blocks: the token's own, and those that the w - 1
tokens before it touch, if it is the first of its block.

A model with windows in all layers can hold any length in these. A prompt is computed in chunks, whose blocks are
allocated chunk by chunk, and a chunk is as long as there are blocks for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import attrs

HOLE = -1
"""Stands in a block table for a block that a window has passed."""
UNLIMITED = 2**62
"""Tokens of the longest sequence, if the cache sets no limit."""


@attrs.frozen(kw_only=True)
class CacheGroup:
    """Layers that share a block table."""

    layers: tuple[int, ...]  # indices of attention layers, in order
    window: int | None = (
        None  # tokens that the last one of them sees at most, itself among them; None for all
    )


def _full_first(windows: Iterable[int | None]) -> tuple[int | None, ...]:
    return tuple(sorted(windows, key=lambda window: window is not None))


@attrs.frozen
class CacheGroups:
    """Windows of the groups of one model, and what follows from them.

    Args:
        windows: of each group, tokens, those without a window first; all that have one have the same.
    """

    windows: tuple[int | None, ...] = attrs.field(default=(None,), converter=_full_first)
    count: int = attrs.field(init=False)  # groups: blocks that each `block_size` tokens of a sequence take
    num_full: int = attrs.field(init=False)  # groups with full attention; they come first
    window: int | None = attrs.field(init=False)  # of the others, tokens; None if there are none

    @count.default
    def _count(self) -> int:
        return len(self.windows)

    @num_full.default
    def _num_full(self) -> int:
        return self.windows.count(None)

    @window.default
    def _window(self) -> int | None:
        return self.windows[-1] if self.windows else None

    def __attrs_post_init__(self) -> None:
        known = {window for window in self.windows if window is not None}
        if not self.windows or len(known) > 1 or min(known, default=1) < 1:
            raise ValueError(f"windows must be those of at least one group, all the same; got {self.windows}")

    def num_behind(self, num_tokens: int, block_size: int) -> int:
        """Return how many leading blocks no token from index `num_tokens` on reads through the window."""
        return 0 if self.window is None else max(0, num_tokens - self.window + 1) // block_size

    def num_kept(self, block_size: int) -> int:
        """Return the most blocks that a group with the window keeps of a sequence for a step of one token."""
        return UNLIMITED if self.window is None else 1 + math.ceil((self.window - 1) / block_size)

    def num_needed(self, num_tokens: int, block_size: int) -> int:
        """Return the blocks of all groups that a sequence of so many tokens holds, if it gets longer token by token."""
        num_blocks = -(-num_tokens // block_size)
        num_windowed = self.count - self.num_full
        return self.num_full * num_blocks + num_windowed * min(num_blocks, self.num_kept(block_size))

    @cache  # noqa: B019  # for the few caches of one program
    def longest(self, num_blocks: int, block_size: int) -> int:
        """Return the tokens of the longest sequence that a pool of so many blocks can hold."""
        plain = num_blocks // self.count
        num_windowed, kept = self.count - self.num_full, self.num_kept(block_size)
        if num_blocks < self.count * kept:
            return plain * block_size
        if not self.num_full:
            return UNLIMITED
        return (num_blocks - num_windowed * kept) // self.num_full * block_size


ONE_GROUP = CacheGroups()
"""Groups of a model with full attention only, or of one whose windows are not made use of."""
