"""A tokenizer built from a GGUF file cuts texts as the one that the file was made from."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import attrs
import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import generate_merges
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from tests.model.gguf.tiny_gguf import write_byte_tokenizer
from tests.model.tiny import BOS_ID, EOS_ID, write_tokenizer
from triolet.core.request.prompt import ChatPrompt
from triolet.core.request.tokenizer_interface import Tokenize
from triolet.errors import ModelFileError, UnsupportedModel
from triolet.model.gguf.config import read_gguf_defaults
from triolet.model.gguf.file import GgufFile
from triolet.model.gguf.tokenizer import SPLITS
from triolet.model.tokenizer.tokenizer import TextTokenizer, load_tokenizer

DOCS = Path(__file__).parents[3] / "docs"
SPECIAL = ["<s>", "</s>", "<|im_end|>"]


@cache
def texts() -> list[str]:
    """Some hundred lines of prose and code, and as many of whatever Unicode has."""
    generator = random.Random(0)
    lines = [
        line for page in ("models.md", "faults.md") for line in (DOCS / page).read_text().splitlines() if line
    ]
    alphabet = (
        "aZéñ ßΩж中文字かな한글😀👍🏽123٣٤½  \n\r\t.,!?'\"-_/()[]{}<>=+*&^%$#@~`|\\:;’“”\u0301\u200d\u00a0"
    )
    words = [
        "Don't",
        "WE'LL",
        "camelCase",
        "XMLHttp",
        "12345",
        "3.14",
        "  ",
        "\n\n",
        "naïve",
        "日本語",
        "\r\n",
    ]
    mixed = [
        "".join(
            generator.choice([generator.choice(words), generator.choice(alphabet)]) for _ in range(length)
        )
        for length in range(1, 60)
        for _ in range(4)
    ]
    return [*lines[:250], *mixed, "", " ", "  two", "the end </s> of <|im_end|>it"]


def written(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def loaded(path: Path) -> TextTokenizer:
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    return tokenizer


def ids_of(tokenizer: TextTokenizer, text: str, *, special: bool = False) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=special)


# ------------------------------------------------------------------------------- byte-level BPE


@cache
def byte_level_bpe() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tokens and merges of a small vocabulary; the special tokens come last."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator(texts() * 2, trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet))
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return (*tokens, *SPECIAL), tuple(" ".join(merge) for merge in model["merges"])


def add_byte_level(writer: gguf.GGUFWriter, pre: str) -> None:
    tokens, merges = byte_level_bpe()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(len(tokens) - 3)
    writer.add_eos_token_id(len(tokens) - 2)


def of_transformers(pre: str) -> Tokenizer:
    tokens, merges = byte_level_bpe()
    described = {
        "tokenizer_type": "gpt2",
        "pre_tokenizer_type": pre,
        "tokens": list(tokens),
        "merges": list(merges),
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
    }
    return convert_gguf_tokenizer("llama", described)[0]


@pytest.mark.parametrize(
    "pre",
    ["gpt-2", "llama-bpe", "llama3", "pixtral", "dbrx", "qwen2", "deepseek-r1-qwen", "megrez", "tekken", "gpt-4o"],
)  # fmt: skip
def test_byte_level_bpe_makes_the_tokens_of_transformers_own_conversion(pre: str, tmp_path: Path) -> None:
    ours = loaded(written(tmp_path / "model.gguf", lambda writer: add_byte_level(writer, pre)))
    theirs = of_transformers(pre)
    composed = [text for text in texts() if SPLITS[pre].normalizes is False or "\u0301" not in text]
    for text in composed:
        ids = ids_of(ours, text)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_pre_tokenizers_differ_so_that_a_wrong_one_would_show(tmp_path: Path) -> None:
    cut = {}
    for pre in ("gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o"):
        path = written(tmp_path / "model.gguf", partial(add_byte_level, pre=pre))
        tokenizer = loaded(path)
        cut[pre] = [ids_of(tokenizer, text) for text in texts()]
    assert len({str(ids) for ids in cut.values()}) == len(cut)


def test_qwen_composes_characters_first(tmp_path: Path) -> None:
    ours = loaded(written(tmp_path / "model.gguf", lambda writer: add_byte_level(writer, "qwen2")))
    assert ids_of(ours, "e\u0301") == ids_of(ours, "é")


def test_llama_3_keeps_a_word_that_is_a_token_whatever_its_merges(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter, pre: str) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([*alphabet, "ab", "bc", "abc"])
        writer.add_token_merges(["a b", "b c"])

    llama = loaded(written(tmp_path / "llama.gguf", lambda writer: fill(writer, "llama-bpe")))
    gpt = loaded(written(tmp_path / "gpt.gguf", lambda writer: fill(writer, "gpt-2")))
    assert ids_of(llama, "abc") == [258]
    assert ids_of(gpt, "abc") == [256, gpt.backend.token_to_id("c")]


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", lambda writer: add_byte_level(writer, "chameleon"))
    with pytest.raises(
        UnsupportedModel, match=r"tokenizer\.ggml\.pre must be one of gpt-2, .*; got 'chameleon'"
    ):
        load_tokenizer(path)


def test_another_kind_of_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list(["a"])

    with pytest.raises(
        UnsupportedModel, match=r"tokenizer\.ggml\.model must be gpt2, .* or gemma4; got 'bert'"
    ):
        load_tokenizer(written(tmp_path / "model.gguf", fill))


@pytest.mark.parametrize("whole", [None, "", "{}", '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_a_tokenizer_json_in_a_file_that_is_none_is_refused(whole: str | None, tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("huggingface")
        writer.add_token_list(["a", "b"])
        if whole is not None:
            writer.add_string("tokenizer.huggingface.json", whole)

    with pytest.raises(ModelFileError, match=r"tokenizer\.huggingface\.json is not a tokenizer"):
        load_tokenizer(written(tmp_path / "model.gguf", fill))


def test_the_tokenizer_of_a_file_is_that_of_its_folder(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    folder, file = loaded(tmp_path), loaded(written(tmp_path / "model.gguf", write_byte_tokenizer))
    conversation = [{"role": "user", "content": "Hé 👍"}, {"role": "assistant", "content": "no"}]
    for prompt in ("Hé <|eos|> 👍", conversation):
        message = Tokenize(prompt=prompt)
        assert file.tokenize(message) == folder.tokenize(message)
    assert file.template_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


@pytest.mark.parametrize(("pre", "flag", "adds"), [
    ("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False),
])  # fmt: skip
def test_a_text_begins_with_bos_as_the_file_or_else_its_kind_says(
    pre: str, flag: bool | None, adds: bool, tmp_path: Path
) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, pre)
        if flag is not None:
            writer.add_add_bos_token(flag)

    ours = loaded(written(tmp_path / "model.gguf", fill))
    bos = len(byte_level_bpe()[0]) - 3
    assert (ids_of(ours, "x", special=True)[0] == bos) == adds


@cache
def many_texts() -> list[str]:
    """5,000 short strings: pieces of prose and code, and whatever Unicode has, surrogates left out."""
    dice = random.Random(1)
    pages = "\n".join((DOCS / page).read_text() for page in ("models.md", "faults.md", "performance.md"))
    pieces = [pages[at : at + dice.randrange(1, 80)] for at in dice.choices(range(len(pages)), k=2500)]
    points = [*range(0x20, 0xD800), *range(0xE000, 0x30000)]
    chosen = [dice.choices(points[: dice.choice((96, 400, 9000, len(points)))], k=30) for _ in range(2500)]
    return [*pieces, *("".join(map(chr, some[: dice.randrange(1, 30)])) for some in chosen)]


# Of their tokenizer.json.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")
SEED_CODER = LLAMA_3.replace("{1,3}", "{1}").replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+")


def original_byte_level(pre: str) -> Tokenizer:
    """A tokenizer like that of GPT-2, Llama 3 or Qwen2, with a small vocabulary."""
    tokens, merges = byte_level_bpe()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    made = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe"))
    if pre == "gpt-2":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        made.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre == "deepseek-coder":
        cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in DEEPSEEK_CODER]
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, digits, byte_level])
    elif pre == "seed-coder":
        split = pre_tokenizers.Split(Regex(SEED_CODER), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        split = pre_tokenizers.Split(Regex(LLAMA_3 if pre == "llama-bpe" else QWEN_2), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if pre == "qwen2":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return made


def original_sentencepiece() -> Tokenizer:
    """A tokenizer as transformers makes it of the sentencepiece model of Llama 2, with a small vocabulary."""
    tokens, scores, _ = sentencepiece()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, dict(zip(tokens[259:], scores[259:], strict=True)))
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


@pytest.mark.parametrize(
    "kind", ["gpt-2", "llama-bpe", "qwen2", "smollm", "seed-coder", "deepseek-coder", "sentencepiece"]
)
def test_5000_texts_get_the_tokens_of_the_original_and_come_back(kind: str, tmp_path: Path) -> None:
    is_byte_level = kind != "sentencepiece"
    fill = partial(add_byte_level, pre=kind) if is_byte_level else add_sentencepiece
    ours = loaded(written(tmp_path / "model.gguf", fill))
    original = original_byte_level(kind) if is_byte_level else original_sentencepiece()
    expected = original.encode_batch(many_texts(), add_special_tokens=False)
    assert [ids_of(ours, text) for text in many_texts()] == [each.ids for each in expected]
    back = [ours.decode(each.ids, skip_special_tokens=False) for each in expected]
    # What the originals lose: Qwen2 composes characters, and sentencepiece takes its mark for a space.
    compose: dict[str, Callable[[str], str]] = {
        "qwen2": normalizers.NFC().normalize_str, "sentencepiece": normalizers.Replace("▁", " ").normalize_str,
    }  # fmt: skip
    assert back == [compose.get(kind, str)(text) for text in many_texts()]
    assert len(many_texts()) == 5000


# -------------------------------------------------------------------------------- sentencepiece


@cache
def sentencepiece() -> tuple[tuple[str, ...], tuple[float, ...], tuple[int, ...]]:
    """Tokens, scores and types of a vocabulary with byte tokens, as sentencepiece's BPE trainer leaves them."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.decoder = decoders.Metaspace()
    trained.train_from_iterator(texts()[:250], trainers.BpeTrainer(vocab_size=700, limit_alphabet=90))
    vocab = json.loads(trained.to_str())["model"]["vocab"]
    learnt = sorted(vocab, key=vocab.get)
    whole = [token for token in learnt if len(token) > 1]
    single = [token for token in learnt if len(token) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *whole, *single]
    scores = [0.0] * 259 + [-float(index) for index in range(len(whole) + len(single))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(whole) + len(single))
    return tuple(tokens), tuple(scores), tuple(types)


def add_sentencepiece(writer: gguf.GGUFWriter, **flags: bool) -> None:
    tokens, scores, types = sentencepiece()
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(tokens))
    writer.add_token_scores(list(scores))
    writer.add_token_types(list(types))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)


def by_definition(text: str, *, prefix: str = " ") -> list[int]:
    """Sentencepiece's BPE as it is defined: join the neighbours whose token scores highest, the first of equals."""
    tokens, scores, _ = sentencepiece()
    ids = {token: index for index, token in enumerate(tokens)}
    pieces = list((prefix + text).replace(" ", "▁")) if text else []
    while True:
        joined = [
            (-scores[ids[a + b]], at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ids
        ]
        if not joined:
            break
        _, at = min(joined)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [
        token_id
        for piece in pieces
        for token_id in ([ids[piece]] if piece in ids else [3 + byte for byte in piece.encode()])
    ]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_makes_the_tokens_of_its_definition(prefix: bool, tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", lambda writer: add_sentencepiece(writer, add_space_prefix=prefix))
    ours = loaded(path)
    for text in texts():
        if "</s>" in text:
            continue
        ids = ids_of(ours, text)
        assert ids == by_definition(text, prefix=" " if prefix else ""), repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_the_text_of_a_token_that_begins_prompts_may_be_any(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        write_byte_tokenizer(writer)
        tokens = writer.kv_data[0].pop("tokenizer.ggml.tokens").value
        writer.add_token_list([*tokens[:BOS_ID], "<bos:1>", *tokens[BOS_ID + 1 :]])
        writer.kv_data[0].pop("tokenizer.ggml.add_bos_token")
        writer.add_add_bos_token(True)

    ours = loaded(written(tmp_path / "model.gguf", fill))
    assert ids_of(ours, "a", special=True) == [BOS_ID, *ids_of(ours, "a")]


def test_sentencepiece_begins_texts_with_bos_and_keeps_special_tokens_whole(tmp_path: Path) -> None:
    ours = loaded(written(tmp_path / "model.gguf", add_sentencepiece))
    assert ids_of(ours, "a", special=True) == [1, *by_definition("a")]
    assert 2 in ids_of(ours, "the end</s>")


def test_phi_3_takes_white_space_after_a_mark_for_a_part_of_it(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        add_sentencepiece(writer)
        writer.kv_data[0].pop("general.architecture")
        writer.add_string("general.architecture", "phi3")

    phi, llama = (loaded(written(tmp_path / "model.gguf", each)) for each in (fill, add_sentencepiece))
    assert (
        ids_of(phi, "</s>\na") == ids_of(phi, "</s>a") == ids_of(llama, "</s>a") != ids_of(llama, "</s>\na")
    )
    assert ids_of(phi, "<s>\na") == ids_of(llama, "<s>\na")


def test_the_vocabulary_of_gemma_4_makes_the_tokens_of_transformers_own_conversion(tmp_path: Path) -> None:
    tokens, scores, types = sentencepiece()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = generate_merges(vocabulary, dict(zip(tokens[259:], scores[259:], strict=True)))
    merges = [" ".join(pair) for pair in pairs]

    def fill(writer: gguf.GGUFWriter) -> None:
        # Its converter writes scores that mean nothing, and no name of a pre-tokenizer.
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(list(tokens))
        writer.add_token_scores([-1000.0] * len(tokens))
        writer.add_token_types(list(types))
        writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_add_bos_token(True)

    ours = loaded(written(tmp_path / "model.gguf", fill))
    described = {
        "tokenizer_type": "gemma4", "tokens": list(tokens), "merges": merges, "token_type": list(types)
    }  # fmt: skip
    theirs = convert_gguf_tokenizer("gemma4", described)[0]
    for text in texts():
        ids = ids_of(ours, text)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ids_of(ours, "a", special=True) == [1, *ids_of(ours, "a")]


def test_chats_with_tools_have_the_template_that_the_file_has_for_them(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, "llama-bpe")
        templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].name }}{{ bos_token }}"}
        writer.add_chat_template([{"name": name, "template": text} for name, text in templates.items()])

    ours = loaded(written(tmp_path / "model.gguf", fill))
    chat = ChatPrompt(messages=[{"role": "user", "content": "Hi"}])
    assert ours.render(chat) == "Hi"
    assert ours.render(attrs.evolve(chat, tools=[{"name": "clock"}])) == "clock<s>"


# ------------------------------------------------------------------------------- ends of answers


def test_answers_end_with_the_named_tokens_and_with_special_ones_that_end_a_turn(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", lambda writer: add_byte_level(writer, "qwen2"))
    count = len(byte_level_bpe()[0])
    assert read_gguf_defaults(GgufFile.open(path)).eos_token_ids == (count - 2, count - 1)


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        # The channels of gpt-oss: a message ends, and the answer goes on.
        (["<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"], {2, 3, 4}),
        (["<|user|>", "<|end|>", "<|endoftext|>"], {1, 2}),
        (["<eos>", "<turn|>", "<|tool_response>", "<|tool_call>"], {0, 1, 2}),
    ],
    ids=["gpt-oss", "phi-3", "gemma-4"],
)
def test_the_end_of_a_message_is_the_end_of_an_answer_unless_others_are_that(
    texts: list[str], ends: set[int], tmp_path: Path
) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(texts)
        writer.add_token_types([3] * len(texts))

    found = read_gguf_defaults(GgufFile.open(written(tmp_path / "model.gguf", fill)))
    assert set(found.eos_token_ids) == ends


def test_recommended_sampling_becomes_the_default(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_eos_token_id(EOS_ID)

    defaults = read_gguf_defaults(GgufFile.open(written(tmp_path / "model.gguf", fill)))
    assert (defaults.temperature, defaults.top_k, defaults.eos_token_ids) == (0.5, 20, (EOS_ID,))


def test_sampling_out_of_range_is_refused_by_key(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", lambda writer: writer.add_float32("general.sampling.top_p", 7.0))
    with pytest.raises(ModelFileError, match=r"general\.sampling: top_p must be"):
        read_gguf_defaults(GgufFile.open(path))


# --------------------------------------------------------------------------------------- refused


def test_a_file_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(written(tmp_path / "model.gguf", lambda writer: None)) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda writer: writer.add_token_merges(["a b c"]), "item 0 of tokenizer.ggml.merges must be two tokens"),
        (lambda writer: writer.add_token_merges(["a zz"]), "tokenizer.ggml.merges: "),
        (lambda writer: writer.add_token_types([1]), "tokenizer.ggml.token_type must have 261 items; got 1"),
        (lambda writer: writer.add_bos_token_id(261), "tokenizer.ggml.bos_token_id must be below the number of tokens"),
        (lambda writer: writer.add_string("tokenizer.ggml.tokens", "abc"), "tokenizer.ggml.tokens must be an array"),
        (lambda writer: writer.add_array("tokenizer.ggml.tokens", [1] * 261), "tokens must be an array of strings"),
        (lambda writer: writer.add_bool("tokenizer.ggml.tokens", True), "tokenizer.ggml.tokens must be an array"),
        (lambda writer: writer.add_tokenizer_model("gemma4"), "tokenizer.ggml.merges is missing"),
    ],
)  # fmt: skip
def test_a_wrong_vocabulary_is_refused_by_key(change: Any, message: str, tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        write_byte_tokenizer(writer)
        replaced = gguf.GGUFWriter(None, "llama")
        change(replaced)
        writer.kv_data[0].update(
            {key: value for key, value in replaced.kv_data[0].items() if key[:3] == "tok"}
        )

    with pytest.raises(ModelFileError, match="tokenizer") as raised:
        load_tokenizer(written(tmp_path / "model.gguf", fill))
    assert message in str(raised.value)
