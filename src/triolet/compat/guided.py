"""Structured outputs without Trio: the same grammars, compiled and followed by whoever calls `step()`.

`Engine` compiles them in processes of their own, which can be killed; here the library's own limits must do.
"""

from __future__ import annotations

from triolet.config.engine import EngineConfig
from triolet.core.journal import Journal
from triolet.core.request.grammar_state import Constraint, TokenMask
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.params import SamplingParams
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.request.tokenizer_interface import SerializableTokenizer, TokenizerInterface
from triolet.core.scheduling.scheduler import Scheduler
from triolet.core.tools.detection import reasoning_parser_named
from triolet.errors import InvalidParams, UnsupportedFeature
from triolet.ipc.grammar import MaskQuestion, Vocabulary
from triolet.structured_outputs.compiler import Grammar, GrammarVocabulary, InvalidGrammar


class InProcessGrammars:
    """The grammars of one `LLMEngine`.

    Args:
        config: of the engine.
        info: of its model.
        tokenizer: its tokenizer.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo, tokenizer: TokenizerInterface | None) -> None:
        self._config, self._info, self._tokenizer = config, info, tokenizer
        self._tokens: GrammarVocabulary | None = None
        self._grammars: dict[StructuredOutputsParams, Grammar] = {}
        self._num_told: dict[int, int] = {}  # tokens that the grammar of an answer knows of, by serial

    def constrain(self, params: SamplingParams) -> Constraint | None:
        """Compile what bounds an answer.

        Raises:
            InvalidParams: it is no grammar, or too large.
            UnsupportedFeature: grammars do not work with this tokenizer, or begin only after some reasoning.
        """
        if params.thinking_token_budget not in (None, -1):
            raise UnsupportedFeature("thinking_token_budget must be None here", field="thinking_token_budget")
        grammar = params.structured_outputs
        if grammar is None:
            return None
        if reasoning_parser_named(self._config.reasoning_parser, self._tokenizer) is not None:
            raise UnsupportedFeature(
                "structured_outputs must be None here: the model reasons before it answers",
                field="structured_outputs",
            )
        grammar.check_size(self._config.max_grammar_bytes)
        if grammar not in self._grammars:
            self._grammars[grammar] = self._compiled(grammar)
        while len(self._grammars) > self._config.max_grammars:
            del self._grammars[next(iter(self._grammars))]
        return Constraint(grammar=grammar)

    def _compiled(self, grammar: StructuredOutputsParams) -> Grammar:
        tokenizer: object = self._tokenizer
        if not isinstance(tokenizer, SerializableTokenizer):
            raise UnsupportedFeature(
                "structured_outputs must be None: the model has no tokenizer that grammars work with",
                field="structured_outputs",
            )
        try:
            if self._tokens is None:
                eos = self._info.generation.eos_token_ids
                spelled = tokenizer.tokenizer_json()
                self._tokens = GrammarVocabulary(Vocabulary(spelled, self._info.vocab_size, eos))
            return Grammar(self._tokens, grammar)
        except InvalidGrammar as error:
            field = f"structured_outputs.{grammar.kind}"
            raise InvalidParams(
                f"{field} must be a grammar that can be compiled: {error}", field=field
            ) from None

    def guide(self, journal: Journal, scheduler: Scheduler) -> None:
        """Tell the scheduler what may come next in every answer that waits for it."""
        for serial in journal.take_unmasked():
            entry = journal.get(serial)
            if entry is None or not entry.awaits_mask or entry.request.constraint is None:
                continue
            grammar = self._followed(entry.request.constraint)
            start, output = self._num_told.get(serial, 0), tuple(entry.output_token_ids)
            told = grammar.next_mask(MaskQuestion(serial, start, output[start:]))
            self._num_told[serial] = len(output)
            scheduler.guide(serial, TokenMask(len(output), told.mask, told.is_over, told.problem or None))
        for serial in [serial for serial in self._num_told if serial not in journal]:
            del self._num_told[serial]
            for grammar in self._grammars.values():
                grammar.forget([serial])

    def _followed(self, constraint: Constraint) -> Grammar:
        assert constraint.grammar is not None
        if constraint.grammar not in self._grammars:  # it was pushed out by others
            self._grammars[constraint.grammar] = self._compiled(constraint.grammar)
            self._num_told.clear()
        return self._grammars[constraint.grammar]
