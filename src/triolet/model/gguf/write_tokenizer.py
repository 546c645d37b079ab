"""Tokenizer metadata of a GGUF file, made from a model folder's tokenizer.

The format names a pre-tokenizer and does not describe it. So each form that a vocabulary could have in a file is
written, read back by the program's own reader, and compared with the tokenizer on texts that tell pre-tokenizers apart.
Where no form gives its tokens, the file carries the whole tokenizer.json under the key that the format has for it. This
program reads it; programs that know the named forms only refuse the file instead of cutting texts in other places.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import tokenizers

from triolet.errors import ModelFileError, UnsupportedModel
from triolet.model.gguf.config import CONTROL, USER_DEFINED, turn_ends
from triolet.model.gguf.file import GgufFile
from triolet.model.gguf.library import gguf_library
from triolet.model.gguf.tokenizer import HUGGINGFACE, SPLITS, TOOL_TEMPLATE, UNKNOWN, read_gguf_tokenizer
from triolet.model.tokenizer.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import gguf

NORMAL, UNUSED, BYTE = 1, 5, 6
"""Types of tokens in the metadata, beside those of `config` and `tokenizer`."""

_PROBES = (
    "Hello, world!", "a", " a", "  two  spaces ",
    "it's we'll I'M don't 'Tis 'quoted'", "1 12 123 1234 12345678 3.14",
    "camelCase XMLHttpRequest ÉCOLE école", "tab\tand\nlines\r\n\n\n  indented",
    "x = [i**2 for i in range(10)]  # why\n",
    "https://example.org/a?b=c&d=%20", "naïve café e\u0301 \u212b \ufb01", "日本語のテキスト。中文 한국어",
    "Привет, мир! שלום مرحبا",
    "👍🏽 👨‍👩‍👧 €5 ½ ²", "!!! ... ---- //// ### $$", "ab, 12, 3",
    "\u00a0\u3000\u200b", "(a)(b){c};", "A/B/C\n/path", "\n",
    "the quick brown fox jumps over the lazy dog", "<s> </s> [INST] <|x|> <0x0A>",
)  # fmt: skip

_MAX_PROBED = 32  # special tokens that are looked at within texts


@attrs.frozen(eq=False, kw_only=True)
class WrittenTokenizer:
    """Metadata of a tokenizer, ready to be added to a file."""

    model: str  # `gpt2`, `llama`, or `HUGGINGFACE`
    pre: str | None
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float] | None
    merges: Sequence[str] | None
    special_ids: dict[str, int]  # bos, eos, eot, eom, unk, pad
    adds_bos: bool
    adds_eos: bool
    adds_space: bool | None
    chat_template: str | None
    tool_template: str | None
    whole: str | None  # the tokenizer.json itself, where no named form gives its tokens

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        """Add the keys of this tokenizer to a file."""
        writer.add_tokenizer_model(self.model)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(self.merges)
        adders = {
            "bos": writer.add_bos_token_id,
            "eos": writer.add_eos_token_id,
            "eot": writer.add_eot_token_id,
            "eom": writer.add_eom_token_id,
            "unk": writer.add_unk_token_id,
            "pad": writer.add_pad_token_id,
        }
        for name, token_id in self.special_ids.items():
            adders[name](token_id)
        writer.add_add_bos_token(self.adds_bos)
        writer.add_add_eos_token(self.adds_eos)
        if self.adds_space is not None:
            writer.add_add_space_prefix(self.adds_space)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)
        if self.tool_template:
            writer.add_array("tokenizer.chat_templates", ["tool_use"])
            writer.add_string(TOOL_TEMPLATE, self.tool_template)
        if self.whole is not None:
            writer.add_string("tokenizer.huggingface.json", self.whole)


def written_tokenizer(
    tokenizer: TextTokenizer, *, vocab_size: int, eos_token_ids: Sequence[int], architecture: str
) -> WrittenTokenizer:
    """Return the metadata that gives a tokenizer's own tokens when it is read.

    Args:
        tokenizer: of the folder.
        vocab_size: rows of the embedding; ids without a token get a name.
        eos_token_ids: what ends an answer.
        architecture: `general.architecture` of the file, by which readers tell some vocabularies.

    Raises:
        UnsupportedModel: there are more tokens than rows, or more ids that end an answer than keys for them.
    """
    spec = json.loads(tokenizer.backend.to_str())
    by_id = {index: text for text, index in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
    if by_id and max(by_id) >= vocab_size:
        raise UnsupportedModel(
            f"the tokenizer must have at most {vocab_size} tokens, as the embedding; got id {max(by_id)}"
        )
    added = {token["id"]: token for token in spec["added_tokens"]}
    byte_fallback = bool(spec["model"].get("byte_fallback"))
    unknown = tokenizer.backend.token_to_id(spec["model"].get("unk_token") or "")
    types = []
    for index in range(vocab_size):
        text = by_id.get(index)
        if text is None:
            types.append(UNUSED)
        elif index == unknown and byte_fallback:
            types.append(UNKNOWN)
        elif index in added:
            types.append(CONTROL if added[index]["special"] else USER_DEFINED)
        elif byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            types.append(BYTE)
        else:
            types.append(NORMAL)
    adds_bos, adds_eos, bos_id = _ends_of(tokenizer)
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(vocab_size)]
    plain = WrittenTokenizer(
        model=HUGGINGFACE,
        pre=None,
        tokens=tokens,
        types=types,
        scores=None,
        merges=None,
        special_ids=_special_ids(tokenizer, tokens, types, eos_token_ids, bos_id),
        adds_bos=adds_bos,
        adds_eos=adds_eos,
        adds_space=None,
        chat_template=tokenizer.template_source or None,
        tool_template=tokenizer.tool_template_source or None,
        whole=tokenizer.tokenizer_json().decode(),
    )
    for candidate in _named_forms(plain, spec):
        if _gives_the_same(candidate, tokenizer.backend, architecture):
            return candidate
    return plain


def _ends_of(tokenizer: TextTokenizer) -> tuple[bool, bool, int | None]:
    """Return whether a text begins with a special token and ends with one, and the id of the first."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=adds) for adds in (False, True))
    extra = len(whole) - len(bare)
    adds_bos = extra > 0 and whole[1 : 1 + len(bare)] == bare
    adds_eos = extra - adds_bos > 0
    return adds_bos, adds_eos, whole[0] if adds_bos else None


def _special_ids(
    tokenizer: TextTokenizer,
    tokens: Sequence[str],
    types: Sequence[int],
    eos_token_ids: Sequence[int],
    bos_id: int | None,
) -> dict[str, int]:
    ids = {"bos": bos_id}
    for name, key in (("bos", "bos_token"), ("unk", "unk_token"), ("pad", "pad_token")):
        if ids.get(name) is None and (text := tokenizer.template_tokens.get(key)):
            ids[name] = tokenizer.backend.token_to_id(text)
    # Readers find these by their texts.
    told = set(turn_ends(tokens, types))
    named = [index for place, index in enumerate(eos_token_ids) if place == 0 or index not in told]
    keys = ("eos", "eot", "eom")
    if len(named) > len(keys):
        raise UnsupportedModel(
            f"a GGUF file can name {len(keys)} tokens that end an answer; this model has {len(named)}"
        )
    ids |= dict(zip(keys, named, strict=False))
    return {name: index for name, index in ids.items() if index is not None}


def _named_forms(plain: WrittenTokenizer, spec: dict[str, Any]) -> Iterator[WrittenTokenizer]:
    """Yield the forms without a tokenizer.json that a vocabulary may have."""
    model = spec["model"]
    if model["type"] != "BPE":
        return
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if model.get("byte_fallback"):
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(pairs):
            ranks.setdefault("".join(pair), rank)
        # Readers merge by score: a token's is the place of the first merge that makes it.
        scores = [float(-ranks.get(token, len(pairs))) for token in plain.tokens]
        for adds_space in (True, False):
            yield attrs.evolve(
                plain, model="llama", pre="default", scores=scores, adds_space=adds_space, whole=None
            )
        return
    cut = _cut_of(spec)
    for name, split in SPLITS.items():
        if cut == (split.patterns, split.then_as_gpt2, split.normalizes, split.ignores_merges):
            merges = [" ".join(pair) for pair in pairs]
            yield attrs.evolve(plain, model="gpt2", pre=name, merges=merges, whole=None)
            return


def _cut_of(spec: dict[str, Any]) -> tuple[tuple[str, ...], bool, bool, bool] | None:
    """Return the patterns of byte-level BPE, whether GPT-2's is the last, whether it normalises, and ignores merges."""
    pre = spec["pre_tokenizer"] or {"type": None}
    *cuts, last = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    normalizer = spec["normalizer"]
    if normalizer is not None and normalizer["type"] != "NFC":
        return None
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    patterns = tuple(map(_pattern_of, cuts))
    if None in patterns:
        return None
    known = tuple(pattern for pattern in patterns if pattern is not None)
    return known, last["use_regex"], normalizer is not None, bool(spec["model"].get("ignore_merges"))


def _pattern_of(cut: dict[str, Any]) -> str | None:
    """Return the regular expression of a step that cuts texts; None for one that has none."""
    if cut["type"] == "Digits" and cut["individual_digits"]:
        return r"\p{N}"
    pattern = cut["pattern"] if cut["type"] == "Split" else {}
    found: str | None = pattern.get("Regex")
    return found


def _gives_the_same(candidate: WrittenTokenizer, backend: tokenizers.Tokenizer, architecture: str) -> bool:
    """Write a candidate, read it back, and compare its tokens of the probes."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tokenizer.gguf"
        writer = gguf_library().GGUFWriter(None, architecture)
        candidate.add_to(writer)
        writer.add_tensor("none", np.zeros(1, dtype=np.float32))
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        try:
            found = read_gguf_tokenizer(GgufFile.open(path))
        except ModelFileError:
            return False
    assert found is not None
    special = [
        token for token, kind in zip(candidate.tokens, candidate.types, strict=True) if kind == CONTROL
    ]
    for text in (*_PROBES, *(f"x {token} y{token}z{token}\n" for token in special[:_MAX_PROBED])):
        for adds in (False, True):
            ids = backend.encode(text, add_special_tokens=adds).ids
            if found.backend.encode(text, add_special_tokens=adds).ids != ids:
                return False
            if found.backend.decode(ids) != backend.decode(ids):
                return False
    return True
