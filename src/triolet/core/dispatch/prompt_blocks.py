"""Blocks of a prompt's text: what a front that has no tokenizer tells beginnings by."""

from __future__ import annotations

import hashlib

BLOCK_CHARS = 256
CHARS_PER_TOKEN = 4  # of English text, about; only ratios between replicas decide


def block_hashes(text: str, salt: str = "") -> tuple[bytes, ...]:
    """Return a hash of each beginning of a text that is a whole number of blocks, the shortest first.

    Args:
        text: of a prompt.
        salt: keeps the texts of one client apart from equal ones of others, as their caches do.
    """
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16)
    hashes = []
    for start in range(0, len(text) - BLOCK_CHARS + 1, BLOCK_CHARS):
        digest.update(text[start : start + BLOCK_CHARS].encode("utf-8", "surrogatepass"))
        hashes.append(digest.digest())
    return tuple(hashes)


def num_tokens(text: str) -> int:
    """Return about how many tokens a text has, at least 1."""
    return max(1, len(text) // CHARS_PER_TOKEN)
