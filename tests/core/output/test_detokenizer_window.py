"""Window of the tokens that are decoded together: how long it is, and that it costs no more decoding than it must."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest

from triolet.core.output.detokenizer import BROKEN, IncrementalDetokenizer, token_decoder

NOTHING = 0  # a token without text, such as a special token that is skipped


@attrs.define
class ByteDecode:
    """Decoder of a tokenizer whose tokens are bytes; notes how many tokens each call decodes."""

    drops_leading_spaces: bool = False
    asked: list[int] = attrs.field(factory=list)

    def __call__(self, token_ids: Sequence[int]) -> str:
        self.asked.append(len(token_ids))
        text = bytes(one for one in token_ids if one != NOTHING).decode(errors="replace")
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


def test_a_window_is_not_cut_down_to_spaces_that_the_decoder_drops() -> None:
    decode = ByteDecode(drops_leading_spaces=True)
    assert "".join(added(decode, b"abcdefgh  i   j")) == "abcdefgh  i   j"


def test_a_window_that_never_ends_with_a_whole_character_is_cut_behind_32_tokens() -> None:
    decode = ByteDecode()
    shown = added(decode, b"\xff" * 100)
    assert "".join(shown) == BROKEN * 97
    assert max(decode.asked) == 33


def test_the_character_of_a_token_is_looked_for_from_the_nearest_token_before_it() -> None:
    decode = ByteDecode()
    assert token_decoder(decode)(0xAC, b"xy\xe2\x82") == "€"
    assert decode.asked[:3] == [1, 2, 3]
