"""Prefix cache: finds the KV of a beginning that was computed before.

Full blocks only. A block's hash is a keyed BLAKE2b over its parent's hash and its own token ids, so that a hash names a
whole beginning. The parent of a first block is the hash of the namespace (`CacheNamespace`), so that requests of
different namespaces never share a block. The key is secret to the process: a caller who chooses prompts cannot choose
collisions. And a hash is only a hint: a hit compares the token ids and the parent again (vLLM's CVE-2025-25183 and
CVE-2025-46570 are the precedents for all three).

A model has one or several cache groups (`core.kv_cache.cache_groups`), and what is published together are the blocks of
all groups for the same tokens. Each of them may be evicted alone. A beginning of n tokens is found if a request that
goes on from there has all that it reads: in a group with full attention every block, behind a window only those that
the token at index n sees. The other places of the table that is returned are holes. Blocks in front of them were not
compared: what names them is the hash of the first one that was.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from itertools import chain

import attrs

from triolet.core.kv_cache.block_pool import BlockPool
from triolet.core.kv_cache.cache_groups import HOLE, ONE_GROUP, CacheGroups
from triolet.core.step_plan import BlockSave
from triolet.errors import InvariantViolated


@attrs.frozen(kw_only=True)
class CacheNamespace:
    """Everything but the tokens that the KV of a request depends on, or that keeps it from others."""

    # Chosen by the caller, so that the timing of other requests tells nothing of its prompts.
    salt: str | None = None
    # Digest of the contents of the adapter that the KV is computed with; None for none. A name would not do: the files
    # behind it may change.
    adapter: str | None = None
    weights_version: int = 0  # counts the changes of the model's weights

    def to_bytes(self) -> bytes:
        """Return bytes that differ for any two namespaces, to be hashed."""
        parts = [
            b"" if text is None else b"\x01" + text.encode("utf-8", "surrogatepass")
            for text in (self.salt, self.adapter)
        ]
        # The length of each text stands before it: ("ab", "c") and ("a", "bc") differ.
        framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return framed + self.weights_version.to_bytes(8, "big")


DEFAULT_NAMESPACE = CacheNamespace()


@attrs.frozen
class _Published:
    block_ids: list[int]  # of each group; a hole where it was evicted
    parent: bytes
    # As bytes: a number is an object of its own, and so many that live long would keep much of the memory around them.
    content: bytes


def _content(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()


OnHash = Callable[[bytes], None]


def _ignore(block_hash: bytes) -> None:
    pass


class PrefixCache:
    """Published blocks of one pool.

    Attributes:
        on_publish: called with the hash of each block that can be found from now on.
        on_forget: called with the hash of each block that can be found no longer.

    Args:
        num_blocks: size of the pool that is made together with it.
        block_size: tokens in a block.
        key: secret of the hashes, at most 64 bytes.
        enabled: without it nothing is published, so nothing is ever found.
        weight_version: part of every namespace.
        remembers_saves: whether published blocks are remembered for `take_saves`.
        groups: cache groups of the model.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        key: bytes,
        enabled: bool = True,
        weight_version: int = 0,
        remembers_saves: bool = False,
        groups: CacheGroups = ONE_GROUP,
    ) -> None:
        self.pool = BlockPool(num_blocks, on_evict=self._forget)
        self.block_size, self.groups = block_size, groups
        self.enabled = enabled
        self.on_publish: OnHash = _ignore
        self.on_forget: OnHash = _ignore
        self._key = key
        self._weight_version = weight_version
        self._by_hash: dict[bytes, _Published] = {}
        self._hash_of: dict[int, bytes] = {}
        self._saves: list[BlockSave] | None = [] if remembers_saves else None

    def root(self, namespace: CacheNamespace) -> bytes:
        """Return the parent hash of first blocks in a namespace."""
        # Not the version of the time at which the request came: its KV is computed with the weights of now.
        if self._weight_version:
            namespace = attrs.evolve(namespace, weights_version=self._weight_version)
        return self._digest(b"namespace", namespace.to_bytes())

    def chain(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Return the hash of a full block that follows `parent`."""
        return self._digest(parent, _content(token_ids))

    def _digest(self, parent: bytes, content: bytes) -> bytes:
        return hashlib.blake2b(parent + content, digest_size=16, key=self._key).digest()

    def find(
        self, token_ids: Sequence[int], root: bytes, known: list[bytes] | None = None
    ) -> tuple[list[int], list[bytes]]:
        """Look up the longest cached beginning that leaves at least one token to compute.

        Args:
            token_ids: prompt and, after a preemption, the answer so far.
            root: parent hash of the request's first block; see `root`.
            known: hashes of its leading blocks that an earlier call computed; this one adds to them. A request that
                waits for room is looked up in every step, and its tokens only ever grow at the end.
        Returns:
            Block table, and the hashes of its blocks. No reference is taken.
        """
        known = [] if known is None else known
        if not self.enabled:
            return [], []
        found: list[list[int]] = []  # of each block of tokens, those of the groups
        # Of each group, the blocks in a row up to here that are there.
        num_there, groups, longest = [0] * self.groups.count, self.groups, 0
        nothing = [HOLE] * groups.count
        num_full, quarantined = groups.num_full, self.pool.quarantined
        parent, size = root, self.block_size
        for index, start in enumerate(range(0, len(token_ids) - size, size)):
            of_block = token_ids[start : start + size]
            if index == len(known):
                known.append(self.chain(parent, of_block))
            block_hash = known[index]
            published = self._by_hash.get(block_hash)
            if published is None or published.content != _content(of_block) or published.parent != parent:
                there = nothing
            elif quarantined:
                there = [HOLE if one in quarantined else one for one in published.block_ids]
            else:
                there = published.block_ids
            if num_full and HOLE in there[:num_full]:
                break
            found.append(there)
            parent = block_hash
            if groups.window is None:
                longest += 1
                continue
            num_there = [
                0 if one == HOLE else number + 1 for number, one in zip(num_there, there, strict=True)
            ]
            if min(num_there) >= index + 1 - groups.num_behind((index + 1) * size, size):
                longest = index + 1
        return self._table(found[:longest]), known[:longest]

    def _table(self, found: list[list[int]]) -> list[int]:
        """Return the block table of what was found, with holes where no window reaches."""
        groups = self.groups
        if groups.window is None:
            return list(chain.from_iterable(found))
        num_behind = groups.num_behind(len(found) * self.block_size, self.block_size)
        holes = [HOLE] * (groups.count - groups.num_full)
        table: list[int] = []
        for index, block_ids in enumerate(found):
            table += block_ids[: groups.num_full] + holes if index < num_behind else block_ids
        return table

    def publish(
        self, block_ids: Sequence[int], parent: bytes, token_ids: tuple[int, ...], owner: str | None = None
    ) -> bytes:
        """Let others find full blocks in use that have been computed.

        Args:
            block_ids: of these tokens, one of each group.
            owner: name of the key that computed it, see `BlockPool`.
        Returns:
            Its hash, the parent of the next block.
        """
        block_hash = self.chain(parent, token_ids)
        if not self.enabled:
            return block_hash
        published = self._by_hash.get(block_hash)
        if published is None:
            holes = [HOLE] * self.groups.count
            published = self._by_hash[block_hash] = _Published(holes, parent, _content(token_ids))
            self.on_publish(block_hash)
            if self._saves is not None:
                self._saves.append(BlockSave(tuple(block_ids), block_hash))
        # The first block of a content stays the one that is found: a second is not published, and becomes
        # free when released.
        for group, block_id in enumerate(block_ids):
            if published.block_ids[group] == HOLE:
                published.block_ids[group] = block_id
                self._hash_of[block_id] = block_hash
                self.pool.keep(block_id, owner)
        return block_hash

    def take_saves(self) -> tuple[BlockSave, ...]:
        """Return the blocks published since the last call, for the next plan: until then their content is there."""
        if not self._saves:
            return ()
        saves = tuple(self._saves)
        self._saves.clear()
        return saves

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id)
        left = self._by_hash[block_hash].block_ids
        left[left.index(block_id)] = HOLE
        if left.count(HOLE) == len(left):
            del self._by_hash[block_hash]
            self.on_forget(block_hash)

    def reset(self) -> bool:
        """Forget everything; False, and nothing done, while any block is in use or quarantined."""
        if self.pool.num_in_use or self.pool.num_quarantined:
            return False
        for block_hash in self._by_hash:
            self.on_forget(block_hash)
        self._by_hash.clear()
        self._hash_of.clear()
        if self._saves is not None:
            self._saves.clear()
        self.pool.forget_cached()
        return True

    def check(self) -> None:
        """Check that hashes and blocks name each other, and that the pool knows the same blocks.

        Raises:
            InvariantViolated: they do not.
        """
        there = {
            block_id: block_hash
            for block_hash, published in self._by_hash.items()
            for block_id in published.block_ids
            if block_id != HOLE
        }
        if there != self._hash_of or self.pool.kept_block_ids != self._hash_of.keys():
            raise InvariantViolated(
                f"published blocks must agree: {len(there)} by hash, {len(self._hash_of)} by block, "
                f"{len(self.pool.kept_block_ids)} in the pool"
            )
