"""Answers followed through a grammar, token by token: what may come next, and whether anything may.

Compiling and following have limits of llguidance's own, in units of its work. They keep a step short: 200,000 units of
lexing and 50,000 items of parsing are some tens of milliseconds. What they do not bound (the size of a schema's
grammar, for instance) is bounded by the clock and the memory of the process around.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.ipc.grammar import MaskAnswer, MaskQuestion, Vocabulary
from triolet.structured_outputs.lark_source import grammar_source
from triolet.structured_outputs.literal_tokenizer import LiteralTokenizer

MAX_LEXER_STATES = 50_000  # of 1 or 2 kB each
MAX_PROBLEM_CHARS = 300
LIMITS = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


class InvalidGrammar(ValueError):
    """A grammar that says nothing, or that can not be compiled."""


class GrammarVocabulary:
    """A vocabulary, ready for grammars.

    Raises:
        ValueError: it is of a kind that grammars can not be matched with.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        # Without end-of-sequence tokens of the model's own, the library looks for one by its name; see `Grammar._mask`.
        self.has_eos = bool(vocabulary.eos_token_ids)
        self.vocab_size = vocabulary.vocab_size
        eos = list(vocabulary.eos_token_ids) or None
        try:
            self._whole = LLTokenizer(vocabulary.tokenizer_json, eos_token=eos)
            spelling = LiteralTokenizer(self._whole, vocabulary.tokenizer_json, self.vocab_size)
            self.tokenizer = LLTokenizer(spelling, eos_token=list(self._whole.eos_tokens))
        except BaseException as error:  # a panic in foreign code is no Exception
            raise ValueError(
                f"structured outputs do not work with this tokenizer: {_problem(error)}"
            ) from error
        self.eos_token_ids = tuple(self.tokenizer.eos_tokens)

    def special_token(self, text: str) -> int | None:
        """The id of a text that is one special token; None for any other text."""
        token_ids = self._whole.tokenize_str(text, parse_special=True)
        if len(token_ids) != 1 or not self._whole.is_special_token(token_ids[0]):
            return None
        return token_ids[0]


@attrs.define(eq=False)
class _Answer:
    """One answer on its way.

    Args:
        matcher: where in the grammar it is.
        num_tokens: that were followed.
    """

    matcher: LLMatcher
    num_tokens: int = 0


class Grammar:
    """One grammar, compiled, and the answers that follow it.

    Raises:
        WrongGrammar: it can not be compiled within its limits, or no text follows it.
    """

    def __init__(self, tokens: GrammarVocabulary, params: StructuredOutputsParams) -> None:
        self._tokens = tokens
        self._answers: dict[int, _Answer] = {}
        try:
            source = grammar_source(params, tokens.special_token)
        except Exception as error:  # whatever the reader of foreign notations raises
            raise InvalidGrammar(_problem(error)) from error
        self._beginning = LLMatcher(tokens.tokenizer, source, log_level=0, limits=LIMITS)
        self._check(self._beginning)
        probe = self._beginning.deep_copy()
        probe.compute_bitmask()
        self._check(probe)

    def _check(self, matcher: LLMatcher) -> None:
        if matcher.is_error():
            raise InvalidGrammar(_problem(matcher.get_error()) or "no text follows it")

    def forget(self, serials: Iterable[int]) -> None:
        """These answers will grow no more."""
        for serial in serials:
            self._answers.pop(serial, None)

    def next_mask(self, step: MaskQuestion) -> MaskAnswer:
        """Follow an answer, and say what may come next in it."""
        answer = self._answers.get(step.serial)
        if step.start == 0:
            answer = self._answers[step.serial] = _Answer(self._beginning.deep_copy())
        if answer is None or answer.num_tokens != step.start:
            position = step.start + len(step.token_ids)
            return MaskAnswer(step.serial, position, b"", False, "its beginning is not known here")
        answer.num_tokens += len(step.token_ids)
        problem, mask, is_over = "", b"", False
        if answer.matcher.consume_tokens(list(step.token_ids)):
            mask, is_over = self._mask(answer.matcher)
        if answer.matcher.is_error():
            problem = _problem(answer.matcher.get_error()) or "its grammar became too complex"
        return MaskAnswer(step.serial, answer.num_tokens, mask, is_over, problem)

    def _mask(self, matcher: LLMatcher) -> tuple[bytes, bool]:
        """A bit per token, and whether nothing but the end can follow."""
        if matcher.is_stopped():
            return b"", True
        mask = bytearray(matcher.compute_bitmask())
        del mask[(self._tokens.vocab_size + 7) // 8 :]
        without_eos = bytes(_cleared(mask, self._tokens.eos_token_ids))
        is_over = not any(without_eos) and matcher.is_accepting()
        return bytes(mask) if self._tokens.has_eos else without_eos, is_over


def _cleared(mask: bytearray, token_ids: Iterable[int]) -> bytearray:
    cleared = bytearray(mask)
    for token_id in token_ids:
        if token_id // 8 < len(cleared):
            cleared[token_id // 8] &= ~(1 << token_id % 8) & 0xFF
    return cleared


def _problem(error: object) -> str:
    """What is wrong, in a line: the beginning of what the library says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("NoExtension"):
        return "no text follows it"
    return "; ".join(line for line in lines[:3] if not line.startswith("<"))[:MAX_PROBLEM_CHARS]
