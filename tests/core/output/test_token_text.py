"""Texts of single tokens; the recorded ones are vLLM 0.32.0's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations, pairwise

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from triolet.core.output.detokenizer import token_decoder
from triolet.model.tokenizer.tokenizer import load_tokenizer
from triolet.nano import PATH


def nano(token_ids: Sequence[int]) -> str:
    tokenizer = load_tokenizer(PATH)
    assert tokenizer is not None
    return tokenizer.decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("token_ids", "texts"),
    [
        ([167, 250, 103], ["", "", "日"]),
        ([225, 167, 250, 103], [" ", "", "", "日"]),
        ([313, 145, 125], ["st", "", "м"]),
        ([174, 248, 255, 171, 118, 260], ["", "", "한", "", "", "국"]),
        ([130, 1460], ["", " crab"]),
        ([124, 1075], ["", "ung"]),
        ([4, 800], ["<|end|>", "do"]),
    ],
)
def test_texts_of_tokens_are_those_of_vllm(token_ids: list[int], texts: list[str]) -> None:
    text_of = token_decoder(nano)
    assert [text_of(one, token_ids[:place]) for place, one in enumerate(token_ids)] == texts


def test_a_character_that_began_more_than_four_tokens_before_is_not_looked_for() -> None:
    asked: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        asked.append(len(token_ids))
        return "\ufffd" * len(token_ids)

    assert token_decoder(decode)(1, [1] * 50) == ""
    assert max(asked) == 5


def test_a_token_keeps_the_space_that_a_text_loses_at_its_beginning() -> None:
    vocabulary = {"▁the": 0, "ing": 1, "▁": 2, "▁▁x": 3}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="ing"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    text_of = token_decoder(lambda token_ids: backend.decode(list(token_ids)))
    assert backend.decode([0]) == "the"
    assert [text_of(token_id, ()) for token_id in range(4)] == [" the", "ing", " ", "  x"]


def test_a_token_is_decoded_by_itself_once() -> None:
    asked: list[tuple[int, ...]] = []

    def decode(token_ids: Sequence[int]) -> str:
        asked.append(tuple(token_ids))
        return " a" * len(token_ids)

    text_of = token_decoder(decode)
    assert [text_of(7, ()) for _ in range(3)] == [" a"] * 3
    assert asked == [(7,), (7, 7)]


def test_however_tokens_cut_characters_their_texts_together_are_the_text() -> None:
    text = "a\u4f60\u597db\U0001f600"
    written = text.encode()
    for cuts in chain.from_iterable(combinations(range(1, len(written)), number) for number in range(4)):
        pieces = [written[a:b] for a, b in pairwise([0, *cuts, len(written)])]

        def decode(token_ids: Sequence[int], pieces: list[bytes] = pieces) -> str:
            return b"".join(pieces[token_id] for token_id in token_ids).decode(errors="replace")

        token_ids = list(range(len(pieces)))
        text_of = token_decoder(decode)
        assert "".join(text_of(one, token_ids[:one]) or "" for one in token_ids) == text, pieces


def test_a_part_of_a_character_that_nothing_began_is_shown_as_the_text_shows_it() -> None:
    pieces = [b"a", b"\xa0\xe5", b"\xa5\xbd", b"\xbdb"]

    def decode(token_ids: Sequence[int]) -> str:
        return b"".join(pieces[token_id] for token_id in token_ids).decode(errors="replace")

    text_of = token_decoder(decode)
    assert [text_of(one, range(one)) for one in range(4)] == ["a", "", "\ufffd\u597d", "\ufffdb"]
