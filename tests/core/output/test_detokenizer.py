from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise, product

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from triolet.core.output.detokenizer import (
    BROKEN,
    MAX_UNFINISHED,
    MAX_WINDOW_TOKENS,
    Decode,
    HoldBack,
    IncrementalDetokenizer,
    OutputText,
    TextDelta,
)

CORPUS = [
    "the quick brown fox  jumps\nover the lazy dog",
    "naïve café, smörgåsbord",
    "日本語の文 は 短い",
    "👩‍👩‍👧 and 👍🏽",
]
SPECIAL = "<|special|>"

Encode = Callable[[str], list[int]]


@cache
def byte_level() -> Tokenizer:
    """Every byte is a token, frequent pairs too: GPT-2, Llama 3, Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=[SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Words begin with a mark for their space, unknown characters are spelled in bytes: Llama 2, Mistral, Gemma."""
    words = [
        "▁",
        "▁the",
        "▁fox",
        "the",
        "fox",
        "quick",
        "▁caf",
        "é",
        ".",
        ",",
        "\n",
        *"abcdefghijklmnopqrstuvwxyz",
    ]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<0x3F>", ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(SPECIAL)])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """Words as above, with the decoder that goes token by token: T5."""
    tokenizer = Tokenizer.from_str(byte_fallback().to_str())
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


def token_id(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.token_to_id(name)
    assert found is not None
    return found


def decode_with(tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> Decode:
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def decode_bytes(token_ids: Sequence[int]) -> str:
    """A byte-level tokenizer whose tokens are the bytes themselves."""
    return bytes(token_ids).decode(errors="replace")


def pieces(decode: Decode, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(decode, prompt)
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.flush()]


def added_text(decode: Decode, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
    """The truth: what the tokens add to the prompt's text, all decoded at once."""
    before = decode(prompt) if prompt else ""
    after = decode([*prompt, *token_ids]) if prompt or token_ids else ""
    num_common = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    return after[num_common:]


def without_tail(text: str) -> str:
    """Without what may be the beginning of a character."""
    num_broken = min(len(text) - len(text.rstrip(BROKEN)), MAX_UNFINISHED)
    return text[: len(text) - num_broken]


texts = st.lists(
    st.one_of(
        st.sampled_from(
            [
                " the",
                " fox",
                "quick",
                " café",
                "  ",
                "\n",
                ".",
                "👩‍👩‍👧",
                "👍🏽",
                "日本語",
                "é",
                "e\u0301",
                "😀",
            ]
        ),
        st.text(max_size=4),
    ),
    max_size=12,
).map("".join)
texts_without_broken = texts.filter(lambda text: BROKEN not in text)


# ------------------------------------------------------------------------------- the law of the pieces


@given(text=texts, prompt=texts)
def test_pieces_of_a_byte_level_tokenizer_make_up_the_text(text: str, prompt: str) -> None:
    tokenizer = byte_level()
    ids, prompt_ids = tokenizer.encode(text).ids, tokenizer.encode(prompt).ids
    assert "".join(pieces(decode_with(tokenizer), ids, prompt_ids)) == text


@pytest.mark.parametrize("make", [byte_fallback, metaspace])
@given(text=texts_without_broken, prompt=texts_without_broken)
def test_pieces_of_a_sentencepiece_tokenizer_make_up_the_text(
    make: Callable[[], Tokenizer], text: str, prompt: str
) -> None:
    tokenizer = make()
    decode = decode_with(tokenizer)
    ids, prompt_ids = tokenizer.encode(text).ids, tokenizer.encode(prompt).ids
    assert "".join(pieces(decode, ids, prompt_ids)) == added_text(decode, ids, prompt_ids)


@given(
    tokens=st.lists(st.binary(min_size=1, max_size=5), max_size=60),
    prompt=st.lists(st.binary(min_size=1, max_size=3), max_size=12),
)
@settings(max_examples=300)
def test_pieces_of_any_bytes_make_up_what_they_decode_to_but_for_a_character_cut_in_two(
    tokens: list[bytes], prompt: list[bytes]
) -> None:
    vocabulary = [*prompt, *tokens]

    def decode(token_ids: Sequence[int]) -> str:
        return b"".join(vocabulary[i] for i in token_ids).decode(errors="replace")

    prompt_ids, ids = range(len(prompt)), range(len(prompt), len(vocabulary))
    assert "".join(pieces(decode, ids, prompt_ids)) == without_tail(added_text(decode, ids, prompt_ids))


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@given(
    text=texts_without_broken, places=st.lists(st.integers(0, 40), max_size=20), prompt=texts_without_broken
)
def test_tokens_that_are_skipped_change_nothing_wherever_they_stand(
    make: Callable[[], Tokenizer], text: str, places: list[int], prompt: str
) -> None:
    tokenizer = make()
    decode = decode_with(tokenizer)
    ids, prompt_ids = tokenizer.encode(text).ids, tokenizer.encode(prompt).ids
    special = token_id(tokenizer, SPECIAL)
    with_special = list(ids)
    for place in places:
        with_special.insert(min(place, len(with_special)), special)
    assert "".join(pieces(decode, with_special, prompt_ids)) == added_text(decode, ids, prompt_ids)


@given(text=texts_without_broken, prompt=texts_without_broken)
def test_no_piece_ends_inside_a_character(text: str, prompt: str) -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        ids, prompt_ids = tokenizer.encode(text).ids, tokenizer.encode(prompt).ids
        assert not any(BROKEN in piece for piece in pieces(decode_with(tokenizer), ids, prompt_ids))


# --------------------------------------------------------------------------------------- small stories


def test_a_character_is_shown_with_its_last_byte() -> None:
    assert pieces(decode_bytes, "é€😀!".encode()) == ["", "é", "", "", "€", "", "", "", "😀", "!", ""]


def test_what_is_complete_in_a_token_is_shown_at_once() -> None:
    tokens = [b"caf\xc3", b"\xa9 \xe2", b"\x82", b"\xac"]

    def decode(token_ids: Sequence[int]) -> str:
        return b"".join(tokens[i] for i in token_ids).decode(errors="replace")

    assert pieces(decode, range(4)) == ["caf", "é ", "", "€", ""]


def test_an_answer_goes_on_with_a_space_where_the_prompt_is_text() -> None:
    decode = decode_with(byte_fallback())
    fox = token_id(byte_fallback(), "▁fox")
    assert pieces(decode, [fox, fox], [fox]) == [" fox", " fox", ""]
    assert pieces(decode, [fox, fox]) == ["fox", " fox", ""]


def test_special_tokens_at_the_prompts_end_do_not_take_the_space() -> None:
    decode = decode_with(byte_fallback())
    fox, special = token_id(byte_fallback(), "▁fox"), token_id(byte_fallback(), SPECIAL)
    assert pieces(decode, [fox], [fox, *[special] * 50]) == [" fox", ""]


def test_many_special_tokens_in_the_answer_do_not_take_the_space() -> None:
    decode = decode_with(byte_fallback())
    fox, special = token_id(byte_fallback(), "▁fox"), token_id(byte_fallback(), SPECIAL)
    answer = [fox, *[special] * 100, fox]
    assert "".join(pieces(decode, answer)) == "fox fox"


def test_special_tokens_are_shown_if_the_decoder_shows_them() -> None:
    decode = decode_with(byte_fallback(), skip_special_tokens=False)
    fox, special = token_id(byte_fallback(), "▁fox"), token_id(byte_fallback(), SPECIAL)
    assert "".join(pieces(decode, [fox, special, fox])) == decode([fox, special, fox])


def test_a_run_of_spaces_longer_than_the_window_is_kept() -> None:
    tokenizer = byte_fallback()
    space, fox = token_id(tokenizer, "▁"), token_id(tokenizer, "fox")
    answer = [fox, *[space] * 100, fox]
    assert "".join(pieces(decode_with(tokenizer), answer)) == "fox" + " " * 100 + "fox"


def test_emoji_in_a_row_survive_a_decoder_that_breaks_the_whole_run() -> None:
    decode = decode_with(byte_fallback())
    emoji = "😀" * 30
    assert decode(list(emoji.encode()[:-1])) == BROKEN * 119
    assert pieces(decode, list(emoji.encode())) == ["", "", "", "😀"] * 30 + [""]


def test_a_bad_byte_behind_shown_characters_breaks_only_itself() -> None:
    decode = decode_with(byte_fallback())
    fox = token_id(byte_fallback(), "▁fox")
    assert "".join(pieces(decode, [fox, *"€".encode(), 0xFF, fox, fox])) == f"fox€{BROKEN} fox fox"


def test_the_answer_completes_a_character_that_the_prompt_began() -> None:
    assert "".join(pieces(decode_bytes, b"\xa9!", b"caf\xc3")) == "é!"
    assert "".join(pieces(decode_bytes, b"\x82\xac", b"5 \xe2")) == "€"


def test_an_unfinished_character_of_the_prompt_is_not_the_answers() -> None:
    assert pieces(decode_bytes, b"!", b"caf\xc3") == ["!", ""]
    assert pieces(decode_bytes, b"", b"caf\xc3") == [""]


def test_a_character_that_the_end_cut_in_two_is_not_shown_as_in_vllm() -> None:
    detokenizer = IncrementalDetokenizer(decode_bytes)
    assert [detokenizer.add(byte) for byte in b"a\xe2\x82"] == ["a", "", ""]
    assert [detokenizer.flush(), detokenizer.flush()] == ["", ""]


@pytest.mark.parametrize("decode", [decode_bytes, decode_with(byte_fallback())])
def test_bytes_that_never_become_a_character_are_not_held_for_ever(decode: Decode) -> None:
    detokenizer = IncrementalDetokenizer(decode)
    num_shown = 0
    for num_tokens in range(1, 200):
        num_shown += len(detokenizer.add(0xFF))
        assert num_tokens - num_shown <= MAX_UNFINISHED
    assert detokenizer.flush() == ""


def test_tokens_that_never_end_with_a_whole_character_are_shown_all_the_same() -> None:
    def decode(token_ids: Sequence[int]) -> str:
        return (b"\x82\xac\xe2" * len(token_ids)).decode(errors="replace")

    shown = pieces(decode, [0] * 200)
    assert shown[:2] == ["", BROKEN * 2 + "€"]
    assert shown[2:-1] == ["€"] * 198
    assert "".join(shown) == decode([0] * 200).removesuffix(BROKEN)


# ------------------------------------------------------------------------------------------------ cost


@attrs.define
class CountingDecode:
    decode: Decode
    num_decoded: int = 0
    longest: int = 0

    def __call__(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        self.longest = max(self.longest, len(token_ids))
        return self.decode(token_ids)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"plain text, again and again. " * 20, id="text"),
        pytest.param("日本語👍🏽".encode() * 30, id="several bytes per character"),
        pytest.param(b"\xff" * 600, id="no character at all"),
        pytest.param(b"\x82\xac\xe2" * 200, id="never whole for long"),
    ],
)
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("length", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_the_work_per_token_is_constant(make: Callable[[], Tokenizer], answer: bytes, length: int) -> None:
    answer, tokenizer = length * answer, make()
    names = [f"<0x{byte:02X}>" if make is byte_fallback else _byte_level_name(byte) for byte in answer]
    decode = CountingDecode(decode_with(tokenizer))
    detokenizer = IncrementalDetokenizer(decode, tokenizer.encode("a prompt " * 500).ids)
    for name in names:
        detokenizer.add(token_id(tokenizer, name))
    assert decode.longest <= MAX_WINDOW_TOKENS + 1
    assert decode.num_decoded / len(answer) <= 2 * MAX_WINDOW_TOKENS


def _byte_level_name(byte: int) -> str:
    """The character that stands for a byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return chr(byte if byte in printable else 256 + others.index(byte))


def test_thousands_of_skipped_tokens_do_not_lengthen_the_window() -> None:
    tokenizer = byte_fallback()
    decode = CountingDecode(decode_with(tokenizer))
    detokenizer = IncrementalDetokenizer(decode)
    for _ in range(5000):
        detokenizer.add(token_id(tokenizer, SPECIAL))
    assert decode.longest <= 2


# ------------------------------------------------------------- one request's text: the golden traces


def decode_letters(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


@attrs.frozen(kw_only=True)
class Trace:
    """One request of vLLM's, one character per token: the steps that came, and the text after each.

    Args:
        steps: tokens per step, as letters.
        shown: new text after each step; the last one holds the flushed text too, if the answer ended otherwise.
        num_tokens: tokens of each step that belong to the answer, where not all do.
    """

    steps: Sequence[str]
    shown: Sequence[str]
    stop: Sequence[str] = ("def",)
    include: bool = False
    min_tokens: int = 0
    ends_with_stop: bool = True
    num_tokens: Sequence[int] | None = None


TRACES = {
    "the stop string is cut off": Trace(steps="abcdef", shown=["", "", "a", "b", "c", ""]),
    "the stop string is included": Trace(steps="abcdef", shown=["a", "b", "c", "d", "e", "f"], include=True),
    "one step": Trace(steps=["abcdefgh"], shown=["abc"], num_tokens=[6]),
    "the answer ends by length": Trace(steps="abcde", shown=["", "", "a", "b", "cde"], ends_with_stop=False),
    "too early a stop string": Trace(steps="abcb", shown=["a", "b", "c", ""], stop=["b"], min_tokens=2),
    "several tokens in one step": Trace(steps=["abcd", "efgh"], shown=["ab", "c"], num_tokens=[4, 2]),
    "aborted while text is held": Trace(steps=["abc", ""], shown=["a", "bc"], ends_with_stop=False),
}


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES.keys())
def test_blind_hold_back_gives_vllms_traces(trace: Trace) -> None:
    deltas, flushed = outputs_of(trace, "blind")
    shown = [delta.text for delta in deltas]
    shown[-1] += flushed
    assert shown == list(trace.shown)
    assert [delta.num_tokens for delta in deltas] == list(trace.num_tokens or map(len, trace.steps))
    stop_reasons = [delta.stop_reason for delta in deltas]
    assert stop_reasons == [None] * (len(deltas) - 1) + [trace.stop[0] if trace.ends_with_stop else None]


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES.keys())
def test_exact_hold_back_gives_the_same_text_never_later(trace: Trace) -> None:
    blind, blind_rest = outputs_of(trace, "blind")
    exact, exact_rest = outputs_of(trace, "exact")
    assert text_of(exact) + exact_rest == text_of(blind) + blind_rest
    for num_steps in range(len(exact)):
        assert len(text_of(exact[:num_steps])) >= len(text_of(blind[:num_steps]))
    assert [(d.num_tokens, d.stop_reason) for d in exact] == [(d.num_tokens, d.stop_reason) for d in blind]


def outputs_of(trace: Trace, hold_back: HoldBack) -> tuple[list[TextDelta], str]:
    text = OutputText(
        decode_letters,
        stop=trace.stop,
        include_stop_str_in_output=trace.include,
        min_tokens=trace.min_tokens,
        hold_back=hold_back,
    )
    return [text.add([ord(letter) for letter in step]) for step in trace.steps], text.flush()


def text_of(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


# ----------------------------------------------------------------------------- one request's text: more


def test_the_token_that_ended_the_answer_is_counted_and_not_shown() -> None:
    text = OutputText(decode_letters)
    assert text.add([ord("a"), ord("$")], hide_last=True) == TextDelta("a", 2)
    assert text.flush() == ""


def test_the_token_that_ended_the_answer_is_shown_if_asked_for() -> None:
    text = OutputText(decode_letters, include_stop_str_in_output=True)
    assert text.add([ord("a"), ord("$")], hide_last=True) == TextDelta("a$", 2)


def test_a_stop_string_before_the_token_that_ended_the_answer_is_the_reason() -> None:
    text = OutputText(decode_letters, stop=["b"])
    assert text.add([ord(letter) for letter in "abc$"], hide_last=True) == TextDelta("a", 2, "b")


def test_an_end_token_frees_the_text_that_was_held_back() -> None:
    text = OutputText(decode_letters, stop=["def"])
    assert text.add([ord(letter) for letter in "ade$"], hide_last=True) == TextDelta("a", 4)
    assert text.flush() == "de"


def test_after_a_stop_string_nothing_counts() -> None:
    text = OutputText(decode_letters, stop=["b"])
    text.add([ord("a"), ord("b")])
    assert text.add([ord("c")]) == TextDelta("", 0, "b")
    assert text.flush() == ""
    assert (text.num_tokens, text.stop_reason) == (2, "b")


def test_a_step_without_tokens_adds_nothing() -> None:
    assert OutputText(decode_letters, stop=["ab"]).add([]) == TextDelta("", 0)


def test_a_stop_string_made_of_several_bytes_per_character_ends_the_answer() -> None:
    text = OutputText(decode_bytes, stop=["€!"])
    deltas = [text.add([byte]) for byte in "5 €!".encode()]
    assert text_of(deltas) == "5 "
    assert deltas[-1] == TextDelta("", 1, "€!")


def test_a_half_character_can_not_be_a_stop_string() -> None:
    text = OutputText(decode_bytes, stop=[BROKEN])
    assert text.add(b"a\xe2") == TextDelta("a", 2)
    assert text.flush() == ""
    assert text.stop_reason is None


@given(
    answer=texts.map(str.encode),
    cuts=st.lists(st.integers(0, 60)),
    stop=st.lists(st.sampled_from(["fox", "the f", "\n", "語", "e", "é", " "]), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_the_text_does_not_depend_on_how_tokens_are_dealt_out_to_steps(
    answer: bytes, cuts: list[int], stop: list[str], include: bool, min_tokens: int
) -> None:
    def fresh() -> OutputText:
        return OutputText(
            decode_bytes, b"a prompt", stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens
        )

    whole, stepwise = fresh(), fresh()
    bounds = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    deltas = [stepwise.add(answer[begin:end]) for begin, end in pairwise(bounds)]
    replayed = whole.add(answer)
    assert replayed.text == text_of(deltas)
    assert replayed.num_tokens == sum(delta.num_tokens for delta in deltas)
    assert (whole.num_tokens, whole.stop_reason) == (stepwise.num_tokens, stepwise.stop_reason)
    assert whole.flush() == stepwise.flush()


@given(answer=texts.map(str.encode), crash=st.integers(0, 60), stop=st.sampled_from([(), ("fox",), ("é",)]))
def test_after_a_crash_the_committed_tokens_bring_the_same_state_back(
    answer: bytes, crash: int, stop: tuple[str, ...]
) -> None:
    unbroken = OutputText(decode_bytes, stop=stop)
    before = unbroken.add(answer[:crash])
    rebuilt = OutputText(decode_bytes, stop=stop)
    assert rebuilt.add(answer[: before.num_tokens]) == before
    assert rebuilt.add(answer[crash:]) == unbroken.add(answer[crash:])
    assert rebuilt.flush() == unbroken.flush()


# ------------------------------------------------------------------------------- pieces, exhaustively

WORDS = [b" the", b" fox", b"", b"\xc3", b"\xa9"]


def decode_words(token_ids: Sequence[int]) -> str:
    return b"".join(WORDS[i] for i in token_ids).decode(errors="replace").removeprefix(" ")


def piece_of_word(token_id: int) -> str | None:
    return WORDS[token_id].decode() if token_id < 3 else None


@pytest.mark.parametrize("prompt", [(), (0,), (0, 3)])
def test_answers_of_four_tokens_have_the_same_text_with_pieces_and_without(prompt: tuple[int, ...]) -> None:
    for answer in product(range(len(WORDS)), repeat=4):
        detokenizer = IncrementalDetokenizer(decode_words, prompt, piece=piece_of_word)
        with_pieces = "".join([*map(detokenizer.add, answer), detokenizer.flush()])
        assert with_pieces == without_tail(added_text(decode_words, answer, prompt)), answer


def test_tokens_with_pieces_are_not_decoded() -> None:
    decode = CountingDecode(decode_words)
    detokenizer = IncrementalDetokenizer(decode, (0,), piece=piece_of_word)
    before = decode.num_decoded
    assert [detokenizer.add(token_id) for token_id in (0, 2, 1)] == [" the", "", " fox"]
    assert decode.num_decoded == before


WORD, MARK = 0, 1


def decode_marks(token_ids: Sequence[int]) -> str:
    """Set marks off from the words before them by a space, as slow tokenizers do with added tokens."""
    return "".join(("word", "<m>")[token_id] for token_id in token_ids).replace("d<", "d <")


def test_a_token_without_a_piece_has_the_text_that_it_has_behind_the_pieces_before_it() -> None:
    for answer in product((WORD, MARK), repeat=4):
        detokenizer = IncrementalDetokenizer(
            decode_marks, (MARK,), piece=lambda token_id: "word" if token_id == WORD else None
        )
        shown = "".join([*map(detokenizer.add, answer), detokenizer.flush()])
        assert shown == added_text(decode_marks, answer, (MARK,)), answer
