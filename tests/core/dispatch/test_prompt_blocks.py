"""Blocks of a prompt's text: what two texts have in common shows in their hashes, and nothing else does."""

from __future__ import annotations

import hashlib

import pytest

from triolet.core.dispatch.prompt_blocks import block_hashes, num_tokens

BLOCK = 256  # characters
TEXT = "".join(chr(97 + number % 26) for number in range(3 * BLOCK + 10))


@pytest.mark.parametrize(
    ("length", "number"),
    [
        (0, 0),
        (1, 0),
        (BLOCK - 1, 0),
        (BLOCK, 1),
        (BLOCK + 1, 1),
        (2 * BLOCK - 1, 1),
        (2 * BLOCK, 2),
        (3 * BLOCK + 10, 3),
    ],
)
def test_a_text_has_a_hash_for_each_whole_block(length: int, number: int) -> None:
    hashes = block_hashes(TEXT[:length])
    assert len(hashes) == number
    assert len(set(hashes)) == number


def test_a_hash_is_that_of_the_salt_and_the_whole_beginning() -> None:
    expected = tuple(
        hashlib.blake2b(b"salt" + TEXT[:end].encode(), digest_size=16).digest() for end in (256, 512, 768)
    )
    assert block_hashes(TEXT, "salt") == expected


def test_texts_share_the_hashes_of_their_common_beginning_only() -> None:
    other = TEXT[:BLOCK] + "?" + TEXT[BLOCK + 1 :]
    first, second = block_hashes(TEXT), block_hashes(other)
    assert [one == another for one, another in zip(first, second, strict=True)] == [True, False, False]
    assert block_hashes(TEXT[: 2 * BLOCK + 5]) == first[:2]


def test_equal_texts_of_different_salts_share_no_hash() -> None:
    assert not set(block_hashes(TEXT, "a")) & set(block_hashes(TEXT, "b"))
    assert block_hashes(TEXT, "") == block_hashes(TEXT)


def test_texts_and_salts_that_are_no_valid_unicode_have_hashes_too() -> None:
    broken = "\ud800" * BLOCK
    assert len(block_hashes(broken, "\udfff")) == 1
    assert block_hashes(broken) != block_hashes("\ud801" * BLOCK)


@pytest.mark.parametrize(("length", "number"), [(0, 1), (1, 1), (7, 1), (8, 2), (11, 2), (4000, 1000)])
def test_a_token_is_about_four_characters_and_a_text_has_at_least_one(length: int, number: int) -> None:
    assert num_tokens("x" * length) == number
