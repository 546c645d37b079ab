"""From the vocabulary in a GGUF file to a tokenizer.

Three kinds of vocabulary are read: `gpt2`, byte-level BPE, whose pre-tokenizer the file gives by a name only; `llama`,
the BPE of sentencepiece, whose merges follow from the scores; and `gemma4`, the same with the merges in the file. A
name that is not in the table below is refused: a text that is cut in other places than in training makes other tokens,
and nothing would show it.

The conversion in transformers is not used: it takes the plain GPT-2 pre-tokenizer for every name that it does not
know, always applies merges, and comes with an import of seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from triolet.errors import ModelFileError, UnsupportedModel
from triolet.model.folder.json_fields import Fields
from triolet.model.gguf.config import CONTROL, USER_DEFINED
from triolet.model.gguf.file import GgufArray, GgufFile

UNKNOWN = 2  # type of the token for what has none
GEMMA4 = "gemma4"  # a `tokenizer.ggml.model`: that of sentencepiece, with the merges in the file
HUGGINGFACE = "huggingface"  # a `tokenizer.ggml.model` that only the tokenizer.json in the file describes
TOOL_TEMPLATE = "tokenizer.chat_template.tool_use"
_SPACE = "▁"


@attrs.frozen
class _Split:
    """Where byte-level BPE cuts a text before it merges."""

    # Regular expressions, of which each cuts the pieces that the one before has left.
    patterns: tuple[str, ...]
    then_as_gpt2: bool = False  # and last that of GPT-2, which `tokenizers` has built in
    normalizes: bool = False  # to composed characters (NFC) before
    ignores_merges: bool = False  # a piece that is a token as a whole stays one, whatever its merges
    adds_bos: bool = False  # if the file does not say


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = _Split((), then_as_gpt2=True)
_SINGLE_DIGITS = _Split((r"\p{N}",), then_as_gpt2=True)
_LLAMA3 = _Split(
    (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _ENDS,), ignores_merges=True, adds_bos=True
)
_CL100K = attrs.evolve(_LLAMA3, ignores_merges=False, adds_bos=False)
_QWEN2 = _Split((_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _ENDS,), normalizes=True)
_SEED_CODER = _Split((
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
))  # fmt: skip
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _Split(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
        + _CASED_ENDS,
    ),
    ignores_merges=True,
    adds_bos=True,
)
_GPT4O = _Split(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}" + _CASED_ENDS,
    )
)
_DEEPSEEK_CODER = _Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"))
SPLITS: dict[str, _Split] = {
    "gpt-2": _GPT2,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "smaug-bpe": _CL100K,
    "dbrx": _CL100K,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "minerva-7b": _SINGLE_DIGITS,
    "mellum": _GPT2,
    "trillion": _GPT2,
    "a.x-4.0": _GPT2,
    "seed-coder": _SEED_CODER,
    "deepseek-coder": _DEEPSEEK_CODER,
}
"""By `tokenizer.ggml.pre`. Source: llama.cpp, llama-vocab.cpp, and the tokenizer.json of these models."""


@attrs.frozen(eq=False)
class GgufTokenizer:
    """Tokenizer of a GGUF file, its chat template, and the special tokens that the template may name."""

    backend: Tokenizer
    chat_template: str | None
    tool_template: str | None  # for chats with tools; None if that is the same one
    template_tokens: dict[str, str]


def read_gguf_tokenizer(file: GgufFile) -> GgufTokenizer | None:
    """Build the tokenizer that a file's metadata describes; None if it describes none.

    Raises:
        ModelFileError: a key is missing or not what it should be.
        UnsupportedModel: another kind of vocabulary, or an unknown pre-tokenizer.
    """
    fields = Fields(file.path, file.metadata)
    kind = fields.text("tokenizer.ggml.model", "no_vocab")
    if kind in ("no_vocab", "none"):
        return None
    vocabulary = _Vocabulary.read(file, fields)
    if kind == HUGGINGFACE:
        backend = _described_in_full(fields)
    else:
        if kind == "gpt2":
            backend, adds_bos = _byte_level(vocabulary)
        elif kind == "llama":
            backend, adds_bos = _sentencepiece(vocabulary, adds_space=True), True
        elif kind == GEMMA4:
            if not vocabulary.merges:
                raise ModelFileError(file.path, "tokenizer.ggml.merges is missing")
            backend, adds_bos = _sentencepiece(vocabulary, adds_space=False), True
        else:
            raise UnsupportedModel(
                f"{file.path}: tokenizer.ggml.model must be gpt2, llama or {GEMMA4}; got {kind!r}"
            )
        strips = kind == "llama" and fields.text("general.architecture", "") == "phi3"
        _add_special_tokens(backend, vocabulary, strips=strips)
        _add_ends(backend, vocabulary, adds_bos)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    tokens = {name: vocabulary.special(key) for name, key in names.items()}
    return GgufTokenizer(
        backend,
        fields.text("tokenizer.chat_template", "") or None,
        fields.text(TOOL_TEMPLATE, "") or None,
        {name: text for name, text in tokens.items() if text is not None},
    )


def _described_in_full(fields: Fields) -> Tokenizer:
    """Return the tokenizer whose tokenizer.json is in the file."""
    key = "tokenizer.huggingface.json"
    try:
        backend = Tokenizer.from_str(fields.text(key, ""))
    except Exception as error:  # the library raises a bare Exception
        raise ModelFileError(fields.path, f"{key} is not a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


@attrs.frozen(eq=False)
class _Vocabulary:
    """Tokens of a file, by their ids."""

    fields: Fields
    tokens: Sequence[str]
    types: Sequence[float]  # as many as tokens
    scores: Sequence[float]  # as many as tokens, or none
    merges: Sequence[str]

    @classmethod
    def read(cls, file: GgufFile, fields: Fields) -> _Vocabulary:
        def array(name: str) -> GgufArray | None:
            value = file.metadata.get(f"tokenizer.ggml.{name}")
            if value is not None and not isinstance(value, GgufArray):
                raise fields.wrong(f"tokenizer.ggml.{name}", "an array")
            return value

        tokens, types, scores, merges = map(array, ("tokens", "token_type", "scores", "merges"))
        if tokens is None or not tokens.count:
            raise ModelFileError(file.path, "tokenizer.ggml.tokens is missing")
        # They are looked up by token id.
        for values in (types, scores):
            if values is not None and values.count != tokens.count:
                raise ModelFileError(
                    file.path, f"{values.key} must have {tokens.count} items; got {values.count}"
                )
        return cls(
            fields,
            tokens.texts(),
            # 1 is an ordinary token.
            [1] * tokens.count if types is None else types.numbers(),
            [] if scores is None else scores.numbers(),
            [] if merges is None else merges.texts(),
        )

    @property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def token_id(self, kind: str) -> int | None:
        """Return a special token's id, such as `bos`."""
        name = f"tokenizer.ggml.{kind}_token_id"
        token_id = self.fields.optional_integer(name, minimum=0)
        if token_id is not None and token_id >= len(self.tokens):
            raise self.fields.wrong(name, f"below the number of tokens ({len(self.tokens)})")
        return token_id

    def special(self, kind: str) -> str | None:
        token_id = self.token_id(kind)
        return None if token_id is None else self.tokens[token_id]

    def bpe(self, merges: Sequence[tuple[str, str]], **options: object) -> models.BPE:
        try:
            return models.BPE(vocab=self.ids, merges=list(merges), **options)
        except Exception as error:  # the library raises a bare Exception for merges that make no token
            raise ModelFileError(self.fields.path, f"tokenizer.ggml.merges: {error}") from error

    def split_merges(self) -> list[tuple[str, str]]:
        merges = []
        for index, merge in enumerate(self.merges):
            left, space, right = merge.partition(" ")
            if not (left and space and right) or " " in right:
                raise ModelFileError(
                    self.fields.path,
                    f"item {index} of tokenizer.ggml.merges must be two tokens; got {merge!r}",
                )
            merges.append((left, right))
        return merges


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    fields = vocabulary.fields
    name = fields.text("tokenizer.ggml.pre", "")
    if name not in SPLITS:
        raise UnsupportedModel(
            f"{fields.path}: tokenizer.ggml.pre must be one of {', '.join(SPLITS)}; got {name!r}"
        )
    split = SPLITS[name]
    backend = Tokenizer(vocabulary.bpe(vocabulary.split_merges(), ignore_merges=split.ignores_merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.then_as_gpt2)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level]) if cuts else byte_level
    if split.normalizes:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, split.adds_bos


def _sentencepiece(vocabulary: _Vocabulary, *, adds_space: bool) -> Tokenizer:
    """Return the tokenizer; `adds_space` tells whether a text begins with a space if the file does not say."""
    unknown = next(
        (i for i, kind in enumerate(vocabulary.types) if kind == UNKNOWN), vocabulary.token_id("unknown")
    )
    merges = vocabulary.split_merges() if vocabulary.merges else _merges_by_score(vocabulary)
    options = {} if unknown is None else {"unk_token": vocabulary.tokens[unknown], "fuse_unk": True}
    backend = Tokenizer(vocabulary.bpe(merges, byte_fallback=True, **options))
    replaced = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.fields.flag("tokenizer.ggml.add_space_prefix", adds_space):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replaced])
        # The space that was put in front comes off again.
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replaced
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return every way to make a token from two others, tokens with the highest scores first."""
    if not vocabulary.scores:
        raise ModelFileError(vocabulary.fields.path, "tokenizer.ggml.scores is missing")
    ids = vocabulary.ids
    mergeable = [
        index
        for index, kind in enumerate(vocabulary.types)
        # Tokens for single bytes (type 6) and control tokens are never made by a merge.
        if kind not in (UNKNOWN, CONTROL, 6) and 1 < len(vocabulary.tokens[index]) <= _MAX_MERGED_CHARS
    ]
    merges: list[tuple[str, str]] = []
    for index in sorted(mergeable, key=lambda index: -vocabulary.scores[index]):  # stable: equal scores by id
        token = vocabulary.tokens[index]
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


_MAX_MERGED_CHARS = 512
"""Longest token that merges are looked for, far above any in use: the search takes the square of the length."""


_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")


def _add_special_tokens(backend: Tokenizer, vocabulary: _Vocabulary, *, strips: bool) -> None:
    """Have special tokens found in texts.

    Args:
        strips: white space after the marks of a conversation is part of them. Phi-3 wants it, and no key says so: its
            tokenizer.json does, and llama.cpp goes by the model, too.
    """
    kinds = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    special = [token for token, kind in kinds if kind == CONTROL and token]
    # Never split, but text like any other.
    whole = [token for token, kind in kinds if kind == USER_DEFINED and token]
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True, rstrip=strips and token not in _UNSTRIPPED)
            for token in special
        ]
    )
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in whole])


def _add_ends(backend: Tokenizer, vocabulary: _Vocabulary, adds_bos: bool) -> None:
    """Have the tokens that begin and end a text added, as far as the file wants it."""
    fields, flags = vocabulary.fields, {"bos": adds_bos, "eos": False}
    added = {
        kind: token_id
        for kind, adds in flags.items()
        if (token_id := vocabulary.token_id(kind)) is not None
        and fields.flag(f"tokenizer.ggml.add_{kind}_token", adds)
    }
    if added:
        # Under names of our own: the texts of these tokens may be any, and a template has a syntax.
        backend.post_processor = processors.TemplateProcessing(
            single=[*(["bos"] if "bos" in added else []), "$A", *(["eos"] if "eos" in added else [])],
            special_tokens=[
                {"id": kind, "ids": [token_id], "tokens": [vocabulary.tokens[token_id]]}
                for kind, token_id in added.items()
            ],
        )
