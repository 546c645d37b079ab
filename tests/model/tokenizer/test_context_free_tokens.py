"""What is known of single tokens must change nothing: with pieces and without them, the same text at the same time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders

from tests.core.output.test_detokenizer import (
    SPECIAL,
    CountingDecode,
    byte_fallback,
    byte_level,
    decode_with,
    metaspace,
    token_id,
)
from triolet.core.output.detokenizer import IncrementalDetokenizer, no_piece
from triolet.model.tokenizer.context_free_tokens import puts_side_by_side, token_pieces

MAKERS = [byte_level, byte_fallback, metaspace]
BEYOND = 10**6

# Not evenly: bytes of characters and special tokens matter, and are rare among all.
ids = st.lists(
    st.one_of(st.integers(0, 420), st.sampled_from([*range(0xC2, 0xF5), 0, 1, 256, BEYOND])), max_size=40
)
characters = st.lists(st.sampled_from("é€😀日 ") | st.characters(codec="utf-8"), max_size=8).map("".join)


def with_decoder(decoder: decoders.Decoder | None) -> Tokenizer:
    tokenizer = Tokenizer.from_str(byte_fallback().to_str())
    tokenizer.decoder = decoder
    return tokenizer


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("make", MAKERS)
@given(prompt=ids, answer=ids, text=characters)
def test_with_pieces_the_same_text_comes_at_the_same_time(
    make: Callable[[], Tokenizer], skip: bool, prompt: list[int], answer: list[int], text: str
) -> None:
    tokenizer = make()
    decode = decode_with(tokenizer, skip_special_tokens=skip)
    piece = token_pieces(tokenizer, skip_special_tokens=skip)
    plain = IncrementalDetokenizer(decode, prompt)
    quick = IncrementalDetokenizer(decode, prompt, piece=piece)
    tokens = [*answer, *tokenizer.encode(text).ids, *answer[:3]]
    assert [quick.add(token) for token in tokens] == [plain.add(token) for token in tokens]
    assert quick.flush() == plain.flush()


@pytest.mark.parametrize("make", MAKERS)
def test_a_word_is_decoded_once_however_often_it_is_said(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    decode = CountingDecode(decode_with(tokenizer))
    detokenizer = IncrementalDetokenizer(
        decode, tokenizer.encode("fox").ids, piece=token_pieces(tokenizer, skip_special_tokens=True)
    )
    num_decoded = decode.num_decoded
    words = tokenizer.encode(" fox" * 50).ids
    assert "".join(map(detokenizer.add, words)) == " fox" * 50
    assert decode.num_decoded == num_decoded


def test_a_word_has_its_space_and_a_special_token_is_nothing_where_it_is_skipped() -> None:
    tokenizer = byte_fallback()
    skipping = token_pieces(tokenizer, skip_special_tokens=True)
    showing = token_pieces(tokenizer, skip_special_tokens=False)
    assert skipping(token_id(tokenizer, "▁fox")) == " fox"
    assert skipping(token_id(tokenizer, "▁")) == " "
    assert skipping(token_id(tokenizer, SPECIAL)) == ""
    assert showing(token_id(tokenizer, SPECIAL)) == SPECIAL
    assert skipping(BEYOND) == ""


def test_parts_of_characters_have_no_piece() -> None:
    assert token_pieces(byte_level(), skip_special_tokens=True)(token_id(byte_level(), "Ã")) is None
    assert token_pieces(byte_fallback(), skip_special_tokens=True)(0xC3) is None


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Replace(Regex("^a"), "b"),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
        decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
    ids=[
        "none",
        "WordPiece",
        "CTC",
        "BPE with suffix",
        "replaces all",
        "replaces patterns",
        "bytes of all",
        "levels all",
        "strips the end",
    ],
)
def test_of_decoders_that_look_at_neighbours_nothing_is_known(decoder: decoders.Decoder | None) -> None:
    tokenizer = with_decoder(decoder)
    assert not puts_side_by_side(tokenizer)
    assert token_pieces(tokenizer, skip_special_tokens=True) is no_piece


@pytest.mark.parametrize("make", MAKERS)
def test_the_common_decoders_put_tokens_side_by_side(make: Callable[[], Tokenizer]) -> None:
    assert puts_side_by_side(make())
