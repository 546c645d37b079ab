"""Small vocabularies for grammars: bytes, and some longer tokens."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.ipc.grammar import MaskQuestion, Vocabulary
from triolet.structured_outputs.compiler import Grammar, GrammarVocabulary

EOS = "<|eos|>"


def small_tokenizer(merges: list[tuple[str, str]] | None = None) -> Tokenizer:
    """All bytes, what the merges add to them, and an end of sequence."""
    merges = merges or []
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


def vocabulary(tokenizer: Tokenizer, *, vocab_size: int | None = None, has_eos: bool = True) -> Vocabulary:
    """As the engine tells it."""
    eos = tokenizer.token_to_id(EOS)
    assert eos is not None
    size = tokenizer.get_vocab_size() if vocab_size is None else vocab_size
    return Vocabulary(tokenizer.to_str().encode(), size, (eos,) if has_eos else ())


def tokens(tokenizer: Tokenizer, *, has_eos: bool = True) -> GrammarVocabulary:
    """As a process of grammars has it."""
    return GrammarVocabulary(vocabulary(tokenizer, has_eos=has_eos))


def bits(mask: bytes) -> set[int]:
    """The token ids that a mask allows."""
    return {8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


def follows(form: StructuredOutputsParams, text: str) -> bool:
    """Whether a text is a whole answer of this form."""
    tokenizer, known = _bytes_alone()
    answer = MaskQuestion(0, 0, tuple(tokenizer.encode(text).ids))
    guided = Grammar(known, form).next_mask(answer)
    return not guided.problem and (guided.is_over or tokenizer.token_to_id(EOS) in bits(guided.mask))


@functools.cache
def _bytes_alone() -> tuple[Tokenizer, GrammarVocabulary]:
    tokenizer = small_tokenizer()
    return tokenizer, tokens(tokenizer)
