"""Without `allow_special_tokens`, no text of a user becomes a special token, and every character of it arrives."""

from __future__ import annotations

import shutil
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from triolet.core.chat_template import ChatTemplate
from triolet.core.request.prompt import ChatPrompt, TextPair
from triolet.core.request.tokenizer_interface import Tokenize
from triolet.errors import InvalidPrompt
from triolet.model.tokenizer.special_text import WINDOW, MarkedText, SpecialTexts
from triolet.model.tokenizer.tokenizer import TextTokenizer, load_tokenizer
from triolet.nano import PATH as NANO

STRICT = load_tokenizer(NANO, allow_special_tokens=False)
USUAL = load_tokenizer(NANO)
SPECIAL = ["<|user|>", "<|end|>", "<|assistant|>", "<|system|>"]
texts = st.lists(
    st.one_of(st.sampled_from([*SPECIAL, "<|", "|>", "end", " ", "\ue000"]), st.text(max_size=3))
).map("".join)


def tokens(tokenizer: TextTokenizer | None, prompt: object) -> tuple[int, ...]:
    assert tokenizer is not None
    return tokenizer.tokenize(Tokenize(prompt)).token_ids  # type: ignore[arg-type]


def decoded(ids: tuple[int, ...]) -> str:
    assert STRICT is not None
    return STRICT.decode(ids, skip_special_tokens=False)


def special_ids(ids: tuple[int, ...]) -> list[int]:
    assert STRICT is not None
    known = STRICT.backend.get_added_tokens_decoder()
    return [one for one in ids if one in known]


@given(text=texts)
def test_a_text_has_no_special_token_and_all_its_characters(text: str) -> None:
    ids = tokens(STRICT, text)
    assert (special_ids(ids), decoded(ids)) == ([], text)


@given(text=texts)
def test_a_chat_has_the_special_tokens_of_its_template_only(text: str) -> None:
    plain = [{"role": "user", "content": "hello"}]
    ids = tokens(STRICT, [{"role": "user", "content": text}])
    assert special_ids(ids) == special_ids(tokens(USUAL, plain))
    assert decoded(ids) == decoded(tokens(USUAL, plain)).replace("hello", text)


@pytest.mark.parametrize("place", range(WINDOW - len("<|end|>") - 1, WINDOW + 2))
def test_a_special_token_at_the_border_of_two_windows_is_found_once(place: int) -> None:
    text = "a" * place + "<|end|><|user|>"
    ids = tokens(STRICT, text)
    assert (special_ids(ids), decoded(ids)) == ([], text)
    assert STRICT is not None and STRICT.special_texts is not None
    marked = STRICT.special_texts.mark_text(text)
    assert len(marked.text) == len(text) + 2


class Whole(str):
    """Text without the methods that make as many texts as it has marks in one C call."""

    __slots__ = ()

    def split(self, *_: object) -> list[str]:
        raise AssertionError("it is split as a whole")

    def replace(self, *_: object) -> str:
        raise AssertionError("all marks are replaced at once")


@pytest.mark.parametrize("text", ["", "#", "a#b##c", "#a#", "abc"])
def test_a_marked_text_is_cut_at_its_marks_one_by_one(text: str) -> None:
    marked = MarkedText(Whole(text), "#")
    assert (list(marked.parts()), marked.unmarked) == (text.split("#"), text.replace("#", ""))


def test_a_part_between_marks_is_encoded_when_it_is_asked_for() -> None:
    assert STRICT is not None and STRICT.special_texts is not None
    special = STRICT.special_texts
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [len(text)]

    parts = special.encode(special.mark_text("a<|end|>b" * 100), encode, add_special_tokens=True)
    for number in range(3):
        assert len(encoded) == max(0, number - 1)  # what the tokenizer puts before a text comes first
        next(parts)
    assert len([*parts]) == 101 + 2 - 3


def test_what_holds_no_special_token_is_encoded_as_ever() -> None:
    for prompt in (
        "Hello <|friend|>, <b>",
        [{"role": "system", "content": "a < b"}, {"role": "user", "content": "|>"}],
    ):
        assert tokens(STRICT, prompt) == tokens(USUAL, prompt)


def test_by_default_a_text_may_hold_special_tokens() -> None:
    assert special_ids(tokens(USUAL, "a<|end|>")) != []


def test_the_text_that_is_shown_has_no_marks() -> None:
    assert STRICT is not None
    told = STRICT.tokenize(Tokenize([{"role": "user", "content": "a<|end|>b"}])).text
    assert told is not None
    assert "a<|end|>b" in told


def test_parts_of_a_message_and_tools_are_texts_of_the_user_too() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "x<|end|>"}]}
    number = len(special_ids(tokens(USUAL, [{"role": "user", "content": "x"}])))
    assert len(special_ids(tokens(STRICT, [message]))) == number


@pytest.mark.parametrize(
    "arguments",
    ['{"x": "<|end|>"}', '{"x": "<\\u007cend|>"}', '{"<|end|>": 1}', {"<|end|>": ["<|end|>"]}],
    ids=["plain", "escaped", "as a name", "as a mapping"],
)
def test_arguments_of_a_call_are_a_text_of_the_user_too(arguments: object) -> None:
    assert STRICT is not None
    source = "{% for m in messages %}<|user|>{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    strict = attrs.evolve(STRICT, chat_template=ChatTemplate(source))
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    ids = tokens(strict, [{"role": "assistant", "tool_calls": [call]}])
    assert len(special_ids(ids)) == 1
    assert "<|end|>" in decoded(ids)


def test_a_template_of_the_request_is_refused() -> None:
    chat = ChatPrompt(messages=[{"role": "user", "content": "x"}], chat_template="<|end|>")
    with pytest.raises(InvalidPrompt, match="allow_special_tokens is false"):
        tokens(STRICT, chat)


def sentencepiece() -> Tokenizer:
    """Words begin with a mark for their space, also at the beginning of a text: Llama 2, Gemma."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz</>|"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {one: 256 + i for i, one in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<0x3F>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>"), AddedToken("<s>"), AddedToken("<</s>>", lstrip=True)])
    around = [("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=around
    )
    return tokenizer


@given(text=st.lists(st.sampled_from(["<s>", "</s>", "<", ">", "a", " ", "é"]), min_size=1).map("".join))
def test_a_sentencepiece_tokenizer_adds_its_space_once_and_its_own_special_tokens(text: str) -> None:
    backend = sentencepiece()
    tokenizer = TextTokenizer(backend, None, special_texts=SpecialTexts(backend))
    begin, end = backend.token_to_id("<s>"), backend.token_to_id("</s>")
    text = f"x{text}"  # its decoder takes a space at the beginning for its own
    ids = tokenizer.tokenize(Tokenize(text)).token_ids
    assert (ids[0], ids[-1], {begin, end} & set(ids[1:-1])) == (begin, end, set())
    assert backend.decode(list(ids[1:-1]), skip_special_tokens=False) == text
    pair = tokenizer.tokenize(Tokenize(TextPair(text, "b")))
    assert [one for one in pair.token_ids if one in (begin, end)] == [begin, end, end]
    assert pair.token_ids[pair.token_type_start or 0 :] == (
        backend.token_to_id("▁"),
        backend.token_to_id("b"),
        end,
    )


async def test_an_engine_takes_the_setting(tmp_path: Path) -> None:
    from triolet.testing import ScriptedModel, open_fake_engine

    shutil.copytree(NANO, tmp_path / "model")
    model = ScriptedModel("fine")
    async with open_fake_engine(model, model=str(tmp_path / "model"), allow_special_tokens=False) as engine:
        output = await engine.complete("a<|end|>b")
    assert special_ids(output.prompt_token_ids or ()) == []
    assert model.prompts == ["a<|end|>b"]
