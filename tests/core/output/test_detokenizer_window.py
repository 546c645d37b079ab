"""Window of the tokens that are decoded together: how long it is, and that it costs no more decoding than it must."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest

from triolet.core.output.detokenizer import BROKEN, IncrementalDetokenizer, token_decoder

NOTHING = 0  # a token without text, such as a special token that is skipped
# Tokens of several bytes that end inside a character, and the one that ends it.
BEGINS, GOES_ON, ENDS, SPACE_BEGINS = 1, 2, 3, 4
WORDS = {
    NOTHING: b"",
    BEGINS: b"a\xe6",
    GOES_ON: b"\x97\xa5\xe6",
    ENDS: b"\x97\xa5",
    SPACE_BEGINS: b" \xe6",
}


@attrs.define
class ByteDecode:
    """Decoder of a tokenizer whose tokens are bytes, but for a few words; notes how many tokens each call decodes."""

    drops_leading_spaces: bool = False
    asked: list[int] = attrs.field(factory=list)

    def __call__(self, token_ids: Sequence[int]) -> str:
        self.asked.append(len(token_ids))
        text = b"".join(WORDS.get(one, bytes([one])) for one in token_ids).decode(errors="replace")
        return text.lstrip(" ") if self.drops_leading_spaces else text


def added(decode: ByteDecode, answer: bytes, prompt: bytes = b"") -> list[str]:
    """The pieces of an answer; of the calls of the decoder only those after the prompt are kept."""
    detokenizer = IncrementalDetokenizer(decode, prompt)
    decode.asked.clear()
    return [detokenizer.add(token_id) for token_id in answer]


@pytest.mark.parametrize(
    ("prompt", "most"),
    [
        (b"prompt" * 20, 6),
        (b"prompt" * 20 + bytes(7), 12),
        (b"prompt" * 20 + bytes(13), 24),
        (b"prompt" * 20 + "日".encode() + b"....", 12),  # its last six begin inside a character
    ],
)
def test_of_the_prompt_no_more_than_twice_the_needed_tokens_are_decoded(prompt: bytes, most: int) -> None:
    decode = ByteDecode()
    assert IncrementalDetokenizer(decode, prompt).add(ord("!")) == "!"
    assert max(decode.asked) == most + 1  # with the token that was added


def test_a_short_window_is_decoded_once_per_token() -> None:
    decode = ByteDecode()
    assert added(decode, b"abcdefgh") == [*"abcdefgh"]
    assert decode.asked == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_token_without_text_behind_whole_characters_is_decoded_with_the_window_alone() -> None:
    decode = ByteDecode()
    assert added(decode, b"ab" + bytes(3) + b"c") == ["a", "b", "", "", "", "c"]
    assert decode.asked == [1, 2, 3, 3, 3, 3]


def test_a_window_that_is_cut_begins_with_the_newest_character() -> None:
    decode = ByteDecode()
    assert added(decode, b"abcdefghijk") == [*"abcdefghijk"]
    assert decode.asked == [*range(1, 10), 1, 2, 3]


def test_a_window_that_is_cut_keeps_all_bytes_of_the_newest_character() -> None:
    decode = ByteDecode()
    assert "".join(added(decode, "abcdefg日x".encode())) == "abcdefg日x"
    # the second byte changes no text, and is decoded by itself to see that it has none
    assert decode.asked == [*range(1, 10), 2, 10, 3, 4]


def test_a_window_that_is_cut_keeps_the_token_that_began_the_newest_character() -> None:
    decode = ByteDecode()
    answer = b"abcdefgh" + bytes([BEGINS, ENDS]) + b"x"
    assert added(decode, answer)[-3:] == ["a", "日", "x"]
    assert decode.asked == [*range(1, 11), 2, 3]


def test_a_window_is_cut_at_the_newest_character_even_if_it_was_cut_inside_of_it() -> None:
    decode = ByteDecode()
    answer = bytes([BEGINS, *[GOES_ON] * 31]) + b"\x97\xa5x"
    assert "".join(added(decode, answer)) == "a" + "日" * 32 + "x"
    # 33 tokens are cut to 8 before the last byte comes, and then to those that hold the character
    assert decode.asked == [*range(1, 34), 2, 8, 9, 3, 4]


def test_a_window_is_not_cut_down_to_spaces_that_the_decoder_drops() -> None:
    decode = ByteDecode(drops_leading_spaces=True)
    assert "".join(added(decode, b"abcdefgh  i   j")) == "abcdefgh  i   j"


def test_a_window_that_never_ends_with_a_whole_character_is_cut_behind_32_tokens() -> None:
    decode = ByteDecode()
    shown = added(decode, b"\xff" * 100)
    assert "".join(shown) == BROKEN * 97
    assert max(decode.asked) == 33


def test_text_that_looks_broken_is_waited_for_so_that_its_space_is_kept() -> None:
    def decode(token_ids: Sequence[int]) -> str:
        """Shows all bytes as broken while the last character is unfinished, and drops a leading space."""
        data = b"".join(WORDS.get(one, bytes([one])) for one in token_ids)
        try:
            return data.decode().removeprefix(" ")
        except UnicodeDecodeError:
            return BROKEN * len(data)

    detokenizer = IncrementalDetokenizer(decode)
    assert [detokenizer.add(one) for one in (ord("x"), SPACE_BEGINS, ENDS)] == ["x", "", " 日"]


def test_the_character_of_a_token_is_looked_for_from_the_nearest_token_before_it() -> None:
    decode = ByteDecode()
    assert token_decoder(decode)(0xAC, b"xy\xe2\x82") == "€"
    assert decode.asked[:3] == [1, 2, 3]
