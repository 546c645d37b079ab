"""Token masks of a grammar: which tokens may come next in an answer.

Compiling and matching have llguidance's own limits, in units of its work. They keep a step short: 200,000 units of
lexing and 50,000 items of parsing take some tens of milliseconds. Work that they do not bound (such as the size of a
schema's grammar) is bounded by the time and memory limits of the process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import attrs
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.tools.call_schema import pattern_that_looks_around
from triolet.ipc.grammar import MaskAnswer, MaskQuestion, Vocabulary
from triolet.structured_outputs.lark_source import grammar_source
from triolet.structured_outputs.literal_tokenizer import LiteralTokenizer

MAX_LEXER_STATES = 50_000  # of 1 or 2 kB each
MAX_PROBLEM_CHARS = 300
LIMITS = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


class InvalidGrammar(ValueError):
    """Grammar that matches no text, or cannot be compiled."""


class GrammarVocabulary:
    """Vocabulary prepared for llguidance.

    Raises:
        ValueError: grammars do not work with this kind of tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        # Without end-of-sequence tokens of the model's own, the library looks for one by its name; see `Grammar._mask`.
        self.has_eos = bool(vocabulary.eos_token_ids)
        self.vocab_size = vocabulary.vocab_size
        eos = list(vocabulary.eos_token_ids) or None
        try:
            tokenizer_json = vocabulary.tokenizer_json.decode()
            self._whole = LLTokenizer(tokenizer_json, eos_token=eos)
            spelling = LiteralTokenizer(self._whole, tokenizer_json, self.vocab_size)
            self.tokenizer = LLTokenizer(spelling, eos_token=list(self._whole.eos_tokens))
        except BaseException as error:  # a panic in foreign code is no Exception
            raise ValueError(
                f"structured outputs do not work with this tokenizer: {_problem(error)}"
            ) from error
        self.eos_token_ids = tuple(self.tokenizer.eos_tokens)

    def special_token(self, text: str) -> int | None:
        """Return the id of a text that is one special token; None for any other text."""
        token_ids = self._whole.tokenize_str(text, parse_special=True)
        if len(token_ids) != 1 or not self._whole.is_special_token(token_ids[0]):
            return None
        return token_ids[0]


@attrs.define(eq=False)
class _MatcherState:
    """Matching state of one answer."""

    matcher: LLMatcher  # position in the grammar
    num_tokens: int = 0  # matched tokens


class Grammar:
    """Compiled grammar, with the matching states of its answers.

    Raises:
        InvalidGrammar: it cannot be compiled within the limits, or matches no text.
    """

    def __init__(self, tokens: GrammarVocabulary, params: StructuredOutputsParams) -> None:
        self._tokens = tokens
        self._answers: dict[int, _MatcherState] = {}
        try:
            self._beginning = self._compiled(params)
        except InvalidGrammar as error:
            raise InvalidGrammar(_of_pattern(params) or str(error)) from error

    def _compiled(self, params: StructuredOutputsParams) -> LLMatcher:
        try:
            source = grammar_source(params, self._tokens.special_token)
        except Exception as error:  # the parsers of llguidance raise various exceptions
            raise InvalidGrammar(_problem(error)) from error
        beginning = LLMatcher(self._tokens.tokenizer, source, log_level=0, limits=LIMITS)
        self._check(beginning)
        probe = beginning.deep_copy()
        probe.compute_bitmask()
        self._check(probe)
        return beginning

    def _check(self, matcher: LLMatcher) -> None:
        if matcher.is_error():
            raise InvalidGrammar(_problem(matcher.get_error()) or "no text follows it")

    def forget(self, serials: Iterable[int]) -> None:
        """Drop the state of finished answers."""
        for serial in serials:
            self._answers.pop(serial, None)

    def next_mask(self, step: MaskQuestion) -> MaskAnswer:
        """Match the next tokens of an answer, and return the mask for the one after."""
        answer = self._answers.get(step.serial)
        if step.start == 0:
            answer = self._answers[step.serial] = _MatcherState(self._beginning.deep_copy())
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
        """Return a bit per token, and whether the answer must end here."""
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


def _of_pattern(params: StructuredOutputsParams) -> str:
    """Return what is wrong with a pattern of a refused schema, which llguidance does not name; empty for nothing."""
    found = None if params.json is None else pattern_that_looks_around(json.loads(params.json))
    return "" if found is None else f"{found[0]} must not look around or refer back, got {found[1]!r}"


def _problem(error: object) -> str:
    """Return one line with the beginning of the library's message."""
    text = str(error)
    if "coerce_one_of" in text:  # an option of the library that requests do not have
        return "oneOf must have schemas that exclude each other; anyOf takes others"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and lines[0].startswith("NoExtension"):
        return "no text follows it"
    return "; ".join(line for line in lines[:3] if not line.startswith("<"))[:MAX_PROBLEM_CHARS]
