from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import tokenizers
import transformers

from tests.model.tiny import SPECIAL_TOKENS, change_json, make_model
from triolet.config.server import GatewayConfig
from triolet.core.request.prompt import ChatPrompt, TextPair
from triolet.core.request.tokenizer_interface import Tokenize
from triolet.core.tools.answer import tool_parser_named
from triolet.errors import ChatTemplateError, InvalidPrompt, ModelFileError, UnsupportedFeature
from triolet.ipc.grammar import Vocabulary
from triolet.model.folder.generation_config import read_generation_defaults
from triolet.model.tokenizer.tokenizer import (
    LONG_TEXT_CHARS,
    MAX_CUT_TOKENS,
    WHOLE_TEXT_CHARS,
    WINDOW_CHARS,
    TextTokenizer,
    load_tokenizer,
)
from triolet.structured_outputs.compiler import GrammarVocabulary

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüß Gott 👋"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model("llama-plain", tmp_path / "model", with_tokenizer=True)


def load(folder: Path) -> TextTokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def test_text_and_conversations_become_the_ids_that_transformers_gives(folder: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load(folder)
    assert list(ours.tokenize(Tokenize("Hello, Wörld")).token_ids) == theirs("Hello, Wörld")["input_ids"]
    answer = ours.tokenize(Tokenize(MESSAGES))
    assert answer.text == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert list(answer.token_ids) == expected


@pytest.mark.parametrize(
    "allowed", [True, False], ids=["special texts are tokens", "special texts are texts"]
)
def test_special_tokens_are_put_around_a_text_unless_they_are_not_wanted(folder: Path, allowed: bool) -> None:
    file, bos = str(folder / "tokenizer.json"), SPECIAL_TOKENS[0]
    written = tokenizers.Tokenizer.from_file(file)
    written.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, written.token_to_id(bos))]
    )
    written.save(file)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder, allow_special_tokens=allowed)
    assert ours is not None
    expected = [theirs("Hello, Wörld", add_special_tokens=adds)["input_ids"] for adds in (False, True)]
    assert len(expected[0]) < len(expected[1])
    for adds in (False, True):
        answer = ours.tokenize(Tokenize("Hello, Wörld", add_special_tokens=adds))
        assert list(answer.token_ids) == expected[adds]


def test_special_tokens_are_added_to_those_of_a_template_if_they_are_asked_for(folder: Path) -> None:
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load(folder)
    for adds in (False, True):
        chat = ChatPrompt.parse({"messages": MESSAGES, "add_special_tokens": adds})
        answer = ours.tokenize(Tokenize(chat))
        assert list(answer.token_ids) == theirs(answer.text, add_special_tokens=adds)["input_ids"]


def test_the_text_of_a_special_token_in_a_message_is_that_token(folder: Path) -> None:
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load(folder)

    def count(content: str) -> int:
        answer = ours.tokenize(
            Tokenize(ChatPrompt.parse({"messages": [{"role": "user", "content": content}]}))
        )
        return list(answer.token_ids).count(theirs.eos_token_id)

    assert count(f"one{theirs.eos_token} two") == count("one two") + 1


def test_a_conversation_says_how_it_is_written(folder: Path) -> None:
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load(folder)
    half = [*MESSAGES, {"role": "assistant", "content": "Once upon "}]
    other = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{{ 'A' if add_generation_prompt }}"
    for asked in (
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"add_generation_prompt": True, "chat_template": other},
        {"add_generation_prompt": False, "continue_final_message": True, "chat_template": other},
    ):
        answer = ours.tokenize(Tokenize(ChatPrompt.parse({"messages": half, **asked})))
        assert answer.text == theirs.apply_chat_template(half, tokenize=False, **asked)
        expected = theirs.apply_chat_template(half, return_dict=False, **asked)
        assert list(answer.token_ids) == expected


def test_a_model_without_a_template_takes_that_of_a_conversation(folder: Path) -> None:
    ours = attrs.evolve(load(folder), chat_template=None)
    with pytest.raises(UnsupportedFeature, match="the model has no chat template"):
        ours.render(MESSAGES)
    asked = ChatPrompt(messages=MESSAGES, chat_template="{{ messages[0].content }}{{ eos_token }}")
    assert ours.render(asked) == f"Be brief.{SPECIAL_TOKENS[1]}"
    with pytest.raises(ChatTemplateError):
        ours.render(attrs.evolve(asked, chat_template="{% if %}"))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"continue_final_message": True},
            "^continue_final_message must be false where add_generation_prompt",
        ),
        ({"add_generation_prompt": 1}, "^add_generation_prompt must be true or false; got 1"),
        ({"continue_final_message": "yes"}, "^continue_final_message must be true or false"),
        ({"chat_template": 3}, "^chat_template must be a text; got 3"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "has a place of its own"),
        ({"documents": []}, "must have no fields but"),
    ],
)
def test_a_conversation_that_contradicts_itself_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPrompt, match=message):
        ChatPrompt.parse({"messages": MESSAGES, **asked})


def test_special_tokens_are_shown_or_skipped(folder: Path) -> None:
    tokenizer = load(folder)
    ids = tokenizer.encode(f"a{SPECIAL_TOKENS[1]}b", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"a{SPECIAL_TOKENS[1]}b"


def test_ids_beyond_the_tokenizer_have_no_text(folder: Path) -> None:
    assert load(folder).decode([65, 319], skip_special_tokens=True) == load(folder).decode(
        [65], skip_special_tokens=True
    )


def test_a_bad_word_is_meant_with_and_without_a_space(folder: Path) -> None:
    answer = load(folder).tokenize(Tokenize(None, ("ab",)))
    assert answer.token_ids == ()
    assert answer.text is None
    assert answer.bad_words_token_ids == (tuple(load(folder).encode("ab", add_special_tokens=False)),)


def test_other_threads_run_while_a_long_text_is_encoded(folder: Path) -> None:
    """One tick of another thread amid the work is proof; a busy machine may need another try to give it a processor.

    While the interpreter's lock is held there is no such tick, however often it is tried.
    """
    tokenizer = load(folder)
    assert any(is_ticked_amid_encoding(tokenizer) for _ in range(20))


def is_ticked_amid_encoding(tokenizer: TextTokenizer) -> bool:
    is_done = threading.Event()
    ticks: list[float] = []

    def tick() -> None:
        while not is_done.wait(0.0005):
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    began_s = time.perf_counter()
    ids = tokenizer.encode("Once upon a time. " * 20_000, add_special_tokens=False)
    ended_s = time.perf_counter()
    is_done.set()
    ticker.join()
    assert len(ids) == 20_000 * len("Once upon a time. ")
    quarter_s = (ended_s - began_s) / 4
    return any(began_s + quarter_s < tick_s < ended_s - quarter_s for tick_s in ticks)


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_a_long_text_is_encoded_as_a_short_one_is(folder: Path, add_special_tokens: bool) -> None:
    tokenizer = load(folder)
    text = f"Grüß Gott 👋{SPECIAL_TOKENS[1]}" * LONG_TEXT_CHARS
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    assert ids == tokenizer.backend.encode(text, add_special_tokens=add_special_tokens).ids


@pytest.mark.parametrize(
    "allowed", [True, False], ids=["special texts are tokens", "special texts are texts"]
)
@pytest.mark.parametrize(
    "prompt", ["Grüß " * 2000, "a <|im_end|> b " * 700, MESSAGES, TextPair("ab " * 9, "c")]
)
def test_of_a_prompt_that_is_too_long_only_the_number_of_tokens_is_told(
    folder: Path, prompt: Any, allowed: bool
) -> None:
    ours = load_tokenizer(folder, allow_special_tokens=allowed)
    assert ours is not None
    whole = ours.tokenize(Tokenize(prompt))
    num_tokens = len(whole.token_ids)
    assert ours.tokenize(Tokenize(prompt, max_tokens=num_tokens)) == whole
    assert whole.num_tokens == num_tokens
    for most in (0, num_tokens - 1):
        told = ours.tokenize(Tokenize(prompt, max_tokens=most))
        assert (told.num_tokens, told.token_ids, told.text) == (num_tokens, (), whole.text)


class Recorder:
    """A backend that keeps the lengths of the texts that it encodes."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.lengths: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> list[tokenizers.Encoding]:
        self.lengths += map(len, texts)
        return self._backend.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize(
    "make",
    [lambda text: text, lambda text: TextPair(text, text), lambda text: [{"role": "user", "content": text}]],
)
def test_a_text_that_is_much_too_long_is_never_encoded_as_a_whole(
    folder: Path, make: Callable[[str], Any], allowed: bool
) -> None:
    ours = load_tokenizer(folder, allow_special_tokens=allowed)
    assert ours is not None
    recorder: Any = Recorder(ours.backend)
    prompt = make("Once upon a time, Grüß Gott. " * (WHOLE_TEXT_CHARS // 20))
    num_tokens = ours.tokenize(Tokenize(prompt)).num_tokens
    watched = attrs.evolve(ours, backend=recorder)
    told = watched.tokenize(Tokenize(prompt, max_tokens=num_tokens // 4))
    assert told.token_ids == ()
    assert told.num_tokens == pytest.approx(num_tokens, rel=0.001)
    assert told.is_estimate
    assert 0 < max(recorder.lengths) <= WINDOW_CHARS


def test_the_cuts_of_the_longest_body_add_no_more_tokens_than_are_allowed_for() -> None:
    assert GatewayConfig().max_body_bytes / WINDOW_CHARS <= MAX_CUT_TOKENS


def test_a_long_text_near_the_limit_is_counted_exactly(folder: Path) -> None:
    ours = load(folder)
    text = "Once upon a time, Grüß Gott. " * (WHOLE_TEXT_CHARS // 20)
    whole = ours.tokenize(Tokenize(text))
    assert ours.tokenize(Tokenize(text, max_tokens=whole.num_tokens)) == whole
    told = ours.tokenize(Tokenize(text, max_tokens=whole.num_tokens - 1))
    assert (told.token_ids, told.num_tokens, told.is_estimate) == ((), whole.num_tokens, False)


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("in_front", ["", "</s>"])
def test_a_number_of_tokens_is_called_an_estimate_if_and_only_if_a_text_was_counted_in_windows(
    folder: Path, allowed: bool, in_front: str
) -> None:
    ours = load_tokenizer(folder, allow_special_tokens=allowed)
    assert ours is not None
    for num_chars, is_estimate in ((WHOLE_TEXT_CHARS // 2, False), (2 * WHOLE_TEXT_CHARS, True)):
        told = ours.tokenize(Tokenize(in_front + "a b " * (num_chars // 4), max_tokens=1))
        assert (told.token_ids, told.is_estimate) == ((), is_estimate)
        about = "about " if is_estimate else ""
        assert told.shown_num_tokens == f"{about}{told.num_unlisted}"


def test_many_tokens_are_decoded_as_few_are(folder: Path) -> None:
    tokenizer = load(folder)
    ids = tokenizer.encode("Grüß Gott 👋", add_special_tokens=False) * LONG_TEXT_CHARS
    for skips in (False, True):
        assert tokenizer.decode(ids, skip_special_tokens=skips) == tokenizer.backend.decode(ids, skips)


@pytest.mark.parametrize("prompt", ["half \ud83d", [{"role": "user", "content": "half \ud83d"}]])
def test_a_lone_surrogate_in_a_prompt_is_named(folder: Path, prompt: str | list[dict[str, str]]) -> None:
    with pytest.raises(InvalidPrompt, match=r"prompt must be Unicode text; got the lone surrogate '\\ud83d'"):
        load(folder).tokenize(Tokenize(prompt))


def test_a_lone_surrogate_in_a_bad_word_is_not_blamed_on_the_prompt(folder: Path) -> None:
    with pytest.raises(InvalidPrompt, match="bad_words must be Unicode text") as caught:
        load(folder).tokenize(Tokenize("fine", ("half \ud83d",)))
    assert caught.value.field == "bad_words"


def test_a_grammar_gets_the_tokenizer_as_it_lies_in_its_file_and_nothing_is_written_out_for_it(
    folder: Path,
) -> None:
    tokenizer, content = load(folder), (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").unlink()
    assert tokenizer.tokenizer_json() == content
    assert tokenizer.tokenizer_json() is tokenizer.tokenizer_json()


def test_a_grammar_gets_a_tokenizer_that_cuts_and_pads_nothing(folder: Path) -> None:
    file = folder / "tokenizer.json"
    cutting = tokenizers.Tokenizer.from_file(str(file))
    cutting.enable_truncation(4)
    cutting.enable_padding(length=9)
    cutting.save(str(file))
    written = load(folder).tokenizer_json()
    assert json.loads(written)["truncation"] is None
    assert json.loads(written)["padding"] is None
    text = "count from one to a hundred"
    cutting.no_truncation()
    cutting.no_padding()
    assert tokenizers.Tokenizer.from_buffer(written).encode(text).ids == cutting.encode(text).ids


def test_a_tokenizer_with_parts_in_python_encodes_and_has_no_form_for_grammars(folder: Path) -> None:
    class Words:
        def pre_tokenize(self, text: Any) -> None:
            """Leave the text whole."""

    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.PreTokenizer.custom(Words())
    tokenizer = TextTokenizer(backend, None)
    assert tokenizer.tokenizer_json() == b""
    assert tokenizer.encode("abc", add_special_tokens=False)
    with pytest.raises(ValueError, match="structured outputs do not work with this tokenizer"):
        GrammarVocabulary(Vocabulary(tokenizer.tokenizer_json(), 100, ()))


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(make_model("llama-plain", tmp_path / "model")) is None


def test_a_file_that_is_no_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: is not a tokenizer"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("chat_template.jinja", b"\xff", "cannot be read"),
        ("tokenizer_config.json", b"\xff", "cannot be read"),
        ("tokenizer_config.json", b'{"a": ' + b"[" * 100_000, "is not JSON"),
    ],
)
def test_a_broken_file_beside_a_tokenizer_is_named(
    name: str, content: bytes, what: str, folder: Path
) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ModelFileError, match=rf"{name}: {what}"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"extra_special_tokens": 5},
        {"extra_special_tokens": "abc"},
        {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}},
        {"added_tokens_decoder": {"7": {"content": "\ud800"}}, "eos_token": "\udfff"},
    ],
    ids=["number", "text", "long-id", "surrogates"],
)
def test_settings_that_can_be_no_tokens_add_none(settings: dict[str, Any], folder: Path) -> None:
    before = load(folder).backend.get_vocab_size()
    change_json(folder / "tokenizer_config.json", **settings)
    assert load(folder).backend.get_vocab_size() == before
    read_generation_defaults(folder)


def test_a_model_without_a_template_takes_no_conversation(folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", chat_template=...)
    with pytest.raises(UnsupportedFeature, match="no chat template"):
        load(folder).render(MESSAGES)


def test_a_broken_template_fails_conversations_and_not_texts(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for")
    tokenizer = load(folder)
    assert tokenizer.tokenize(Tokenize("text")).token_ids
    with pytest.raises(ChatTemplateError, match="line 1"):
        tokenizer.render(MESSAGES)


def test_the_default_of_several_templates_is_used(folder: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    change_json(folder / "tokenizer_config.json", chat_template=templates)
    assert load(folder).render(MESSAGES) == "plain"


TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
FOR_TOOLS = "<tool_call> {{ tools[0]['function']['name'] }}"


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_chat_with_tools_has_the_template_for_them_as_in_transformers(
    folder: Path, tools: Any, in_files: bool
) -> None:
    if in_files:
        (folder / "chat_template.jinja").write_text("plain")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(FOR_TOOLS)
    else:
        templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": FOR_TOOLS}]
        change_json(folder / "tokenizer_config.json", chat_template=templates)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load(folder)
    expected = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
    assert ours.render(ChatPrompt(messages=MESSAGES, tools=tools)) == expected
    assert expected == ("<tool_call> now" if tools else "plain")
    assert tool_parser_named("auto", ours) == "hermes"


def test_a_template_in_a_json_file_of_its_own_is_used_where_the_settings_have_none(folder: Path) -> None:
    (folder / "chat_template.json").write_text('{"chat_template": "from the file"}')
    assert load(folder).render(MESSAGES) != "from the file"
    change_json(folder / "tokenizer_config.json", chat_template=...)
    assert load(folder).render(MESSAGES) == "from the file"


FLAGS = {"lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
TEXT = "a <extra> b<extra>c <|user|> d <more>"


@pytest.mark.parametrize(
    ("settings", "added"),
    [
        ({"added_tokens_decoder": {"9999": {"content": "<extra>", "special": True, **FLAGS}}}, {}),
        (
            {"added_tokens_decoder": {"9999": {"content": "<extra>", "special": False, **FLAGS}}},
            {"<more>": 7},
        ),
        (
            {
                "additional_special_tokens": [
                    "<extra>",
                    {"__type": "AddedToken", "content": "<more>", **FLAGS},
                ]
            },
            {},
        ),
        ({"extra_special_tokens": ["<extra>"], "mask_token": "<more>"}, {}),
        ({}, {"<extra>": 9999, "<more>": 9998}),
        ({"additional_special_tokens": ["<extra>"]}, {"<extra>": 9999, "<more>": 9998}),
        ({"additional_special_tokens": ["<|user|>"]}, {}),
        ({}, {}),
    ],
)
def test_tokens_beside_the_tokenizer_are_added_as_in_transformers(
    folder: Path, settings: dict[str, Any], added: dict[str, int]
) -> None:
    change_json(folder / "tokenizer_config.json", **settings)
    (folder / "added_tokens.json").write_text(json.dumps(added))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load(folder)
    ids = theirs(TEXT)["input_ids"]
    assert ours.encode(TEXT, add_special_tokens=True) == ids
    for skips in (False, True):
        assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips)
    assert tokenizers.Tokenizer.from_str(ours.tokenizer_json().decode()).encode(TEXT).ids == ids


@pytest.mark.parametrize("wanted", [True, False, ...])
def test_a_gpt2_tokenizer_adds_the_space_that_its_settings_ask_for(folder: Path, wanted: object) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    change_json(folder / "tokenizer.json", pre_tokenizer=byte_level, normalizer=None, post_processor=None)
    settings = folder / "tokenizer_config.json"
    change_json(settings, tokenizer_class="GPT2Tokenizer", add_prefix_space=wanted)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load(folder)
    assert ours.encode("the day", add_special_tokens=False) == theirs("the day")["input_ids"]
    spaced = ours.encode(" the day", add_special_tokens=False)
    assert (ours.encode("the day", add_special_tokens=False) == spaced) == (wanted is True)


def test_a_tokenizer_of_vocabulary_and_merges_is_converted(tmp_path: Path) -> None:
    vocab = {chr(97 + index): index for index in range(26)} | {"ab": 26, "<|endoftext|>": 27}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert load(tmp_path).encode("abc", add_special_tokens=False) == [26, 2]


@pytest.mark.parametrize("map_counts", [True, False])
def test_special_tokens_in_a_file_of_their_own_count_as_in_transformers(
    folder: Path, map_counts: bool
) -> None:
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}{{ eos_token }}"
    settings = folder / "tokenizer_config.json"
    change_json(settings, chat_template=template, bos_token=..., eos_token=SPECIAL_TOKENS[1])
    if not map_counts:
        change_json(settings, added_tokens_decoder={})
    special = {"bos_token": SPECIAL_TOKENS[0], "eos_token": {"content": SPECIAL_TOKENS[2], "lstrip": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    rendered = load(folder).render(MESSAGES)
    assert rendered == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(SPECIAL_TOKENS[0]) == map_counts
