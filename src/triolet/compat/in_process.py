"""Grammars and adapters of `LLMEngine`, in the caller's thread.

`Engine` compiles grammars in processes of their own, which can be killed, and reads adapters in worker threads. Here
only the library's own limits hold, and a call that names an adapter waits until it is read.
"""

from __future__ import annotations

from triolet.config.engine import EngineConfig
from triolet.core.engine_core import EngineCore
from triolet.core.request.grammar_state import TokenMask
from triolet.core.request.lora import Adapter, AdapterSupport, AdapterTable, LoRARequest
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.request.tokenizer_interface import SerializableTokenizer
from triolet.core.step_plan import AdapterRunner, StepRunner
from triolet.errors import InvalidParams, InvalidRequest, UnsupportedFeature
from triolet.ipc.grammar import MaskQuestion, Vocabulary
from triolet.model.folder.adapter_files import digest_of_folder
from triolet.structured_outputs.compiler import Grammar, GrammarVocabulary, InvalidGrammar


class InProcessGrammars:
    """Compiled grammars of one `LLMEngine`.

    Args:
        config: of the engine.
        core: gives requests and masks; its model is loaded.
    """

    def __init__(self, config: EngineConfig, core: EngineCore) -> None:
        self._config, self._core = config, core
        self._tokens: GrammarVocabulary | None = None
        self._grammars: dict[StructuredOutputsParams, Grammar] = {}
        self._num_told: dict[int, int] = {}  # by serial: tokens of the answer that its grammar has read

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return a compiled grammar, from the cache if it is there.

        Raises:
            InvalidParams: the grammar cannot be compiled.
            UnsupportedFeature: grammars do not work with the model's tokenizer.
        """
        if params not in self._grammars:
            self._grammars[params] = self._compiled(params)
            # Oldest first: a dict keeps the order in which they were compiled.
            while len(self._grammars) > self._config.max_grammars:
                del self._grammars[next(iter(self._grammars))]
                # Answers may follow the grammar that goes, so every answer is read again from its beginning.
                self._num_told.clear()
        return self._grammars[params]

    def _compiled(self, params: StructuredOutputsParams) -> Grammar:
        tokenizer: object = self._core.model.tokenizer
        if self._core.model.info is None or not isinstance(tokenizer, SerializableTokenizer):
            raise UnsupportedFeature(
                "structured_outputs must be None: the model has no tokenizer that grammars work with",
                field="structured_outputs",
            )
        info, field = self._core.model.info, f"structured_outputs.{params.kind}"
        try:
            # Made once, with the first grammar: it takes long for a large vocabulary, and most engines never
            # need it.
            if self._tokens is None:
                vocabulary = Vocabulary(
                    tokenizer.tokenizer_json(), info.vocab_size, info.generation.eos_token_ids
                )
                self._tokens = GrammarVocabulary(vocabulary)
            return Grammar(self._tokens, params)
        except InvalidGrammar as error:
            raise InvalidParams(
                f"{field} must be a grammar that can be compiled: {error}", field=field
            ) from None

    def answer(self) -> None:
        """Compute the masks that requests of the core need before the next step."""
        core = self._core
        for params, answers in core.masks.sort(core.journal.take_unmasked()).items():
            for serial, token_ids in answers.items():
                grammar, start = self.compile(params), self._num_told.get(serial, 0)
                found = grammar.next_mask(MaskQuestion(serial, start, token_ids[start:]))
                self._num_told[serial] = len(token_ids)
                mask = TokenMask(len(token_ids), found.mask, found.is_over, found.problem or None)
                core.masks.set_mask(serial, mask)
        # Ended requests: their place in each grammar is of no use any more.
        for serial in [serial for serial in self._num_told if serial not in core.journal]:
            del self._num_told[serial]
            for grammar in self._grammars.values():
                grammar.forget([serial])


class InProcessAdapters:
    """LoRA adapters of one `LLMEngine`.

    Args:
        config: limits.
        support: parts of the model that adapters may change; None for a model without such parts.
        runner: computes with them; None while the engine sleeps.
    """

    def __init__(
        self, config: EngineConfig, support: AdapterSupport | None, runner: StepRunner | None
    ) -> None:
        self._table = AdapterTable(config.enable_lora, config.num_kept_loras)
        self._support, self.runner = support, runner

    @property
    def numbers(self) -> set[int]:
        """Numbers of the loaded adapters."""
        return {adapter.int_id for adapter in self._table.adapters}

    def check(self, request: object) -> LoRARequest:
        """Check that a request may name this adapter; return it. Nothing is read.

        Raises:
            InvalidRequest: it is no `LoRARequest`, or adapters are not enabled.
        """
        if not isinstance(request, LoRARequest):
            raise InvalidRequest(
                f"lora_request must be a LoRARequest; got {type(request).__name__}", field="lora_request"
            )
        self._table.check_enabled(request)
        return request

    def resolve(self, given: object) -> Adapter:
        """Return the adapter of a request, loaded now if it is not yet.

        Raises:
            InvalidRequest: adapters are not enabled, name and number disagree with those of a loaded adapter, or the
                adapter cannot be loaded (`AdapterError`).
            AdaptersPinned: there is no room for another adapter, because all are pinned.
        """
        request = self.check(given)
        if (adapter := self._table.find(request)) is None:
            adapter = Adapter.of(request, digest_of_folder(request.folder, self._support))
            self._prepare(adapter, is_pinned=self._table.is_pinned(adapter))
            self._table.add(adapter)
        return adapter

    def _prepare(self, adapter: Adapter, *, is_pinned: bool) -> None:
        if isinstance(self.runner, AdapterRunner):
            self.runner.prepare_adapter(adapter.path, adapter.digest, is_pinned=is_pinned)

    def remove(self, int_id: int) -> bool:
        """Forget an adapter; requests with it go on. Return False if it is not loaded."""
        return self._table.remove(int_id)

    def pin(self, int_id: int) -> bool:
        """Keep an adapter loaded until it is removed; return True.

        Raises:
            InvalidRequest: it is not loaded.
        """
        self._prepare(self._table.pin(int_id), is_pinned=True)
        return True
