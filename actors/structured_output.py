"""The structured-output actor computes the grammar masks of the answers that are bound to a form.

The scheduler names the requests that need masks and goes on with the others (`core.engine_core`). So this actor has
no state that the journal does not have: its next life, and the next processes of its grammars, follow the answers again
from their beginnings.

A shortage of descriptors, processes or memory is no crash. A task that waits for its grammar gets it as an error; a
request that is being answered waits for some seconds first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from triolet.actors.channels import Channels
from triolet.actors.executors.grammar.grammars import (
    GrammarFailed,
    GrammarRefused,
    Grammars,
    InlineGrammars,
    NoGrammars,
    OpenGrammars,
    unusable_grammar,
)
from triolet.actors.grammar_requests import GrammarRequests
from triolet.config.engine import EngineConfig
from triolet.core.engine_core import EngineCore, GrammarQuestions
from triolet.core.recovery.recovery_state import MAX_CRASHES
from triolet.core.recovery.supervision import MIN_PAUSE_S, typed_shortages
from triolet.core.request.grammar_state import TokenMask
from triolet.core.request.model_info import LoadedModel
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.request.tokenizer_interface import SerializableTokenizer
from triolet.errors import RequestFailed, ResourceShortage
from triolet.ipc.grammar import MaskAnswer, Vocabulary

NO_TOKENIZER = "structured_outputs must be None: they need a tokenizer.json"
# Attempts to get a mask while the machine has no process for its grammar: over 3 s, in which a short shortage passes.
MAX_ATTEMPTS = 6


async def structured_output_actor(
    core: EngineCore,
    channels: Channels,
    requests: GrammarRequests,
    open_grammars: OpenGrammars,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer questions until cancelled. The processes of grammars are started when the first grammar is wanted.

    Args:
        channels: to the other actors.
        requests: tasks that wait for grammars.
        open_grammars: opens the scope in which grammars are served.
    """
    manager = StructuredOutputManager(core, channels, requests)
    manager.fail_what_hangs()
    # Questions that the last life had taken are lost with it.
    core.masks.ask_again()
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        # Tasks that come between two lives wait for the next one's grammars.
        stack.callback(requests.serve, None)
        task_status.started()
        while True:
            serials = await requests.questions()
            wants_grammars = requests.wants_grammars or core.masks.needs_grammars(serials)
            shortage: ResourceShortage | None = None
            if manager.grammars is None and wants_grammars:
                try:
                    with typed_shortages("grammar processes"), requests.starting():
                        manager.grammars = await stack.enter_async_context(open_grammars())
                except ResourceShortage as error:
                    shortage = error
                    requests.refuse(shortage)
                else:
                    requests.serve(manager.grammars)
                    # Its error ends this life: without the original no process can be made.
                    nursery.start_soon(manager.grammars.watch)
            for params, answers in manager.sort(serials).items():
                if shortage is None:
                    nursery.start_soon(manager.handle, params, answers)
                else:
                    nursery.start_soon(manager.ask_later, tuple(answers), shortage)


class StructuredOutputManager:
    """State of one life of the structured-output actor."""

    def __init__(self, core: EngineCore, channels: Channels, requests: GrammarRequests) -> None:
        self.grammars: Grammars | None = None
        self._core, self._channels, self._requests = core, channels, requests
        self._num_attempts: Counter[int] = Counter()  # in vain, to get a mask for a request

    def fail_what_hangs(self) -> None:
        """End the requests over which earlier lives of the actor hung again and again."""
        for serial, num_hangs in tuple(self._requests.num_hangs.items()):
            entry = self._core.journal.get(serial)
            if entry is not None and num_hangs >= MAX_CRASHES:
                reason = "its grammar gives no answer"
                self._fail(serial, RequestFailed(entry.request.parent_id or entry.request.request_id, reason))
            if entry is None or num_hangs >= MAX_CRASHES:
                del self._requests.num_hangs[serial]

    def _fail(self, serial: int, error: Exception) -> None:
        self._core.fail(serial, error, trio.current_time())

    def sort(self, serials: Iterable[int]) -> GrammarQuestions:
        """Answer the requests that need no grammar now; return the questions to the grammars."""
        if self.grammars is not None:
            self.grammars.forget(self._core.journal.__contains__)
        for serial in [serial for serial in self._num_attempts if serial not in self._core.journal]:
            del self._num_attempts[serial]
        questions = self._core.masks.sort(serials)
        if self._core.masks.has_answers:
            self._channels.wake_scheduler()
        return questions

    async def handle(self, params: StructuredOutputsParams, answers: dict[int, tuple[int, ...]]) -> None:
        """Ask one grammar about some answers; if there is a shortage, later once more."""
        try:
            with self._requests.handling(answers):
                await self.ask(params, answers)
        except ResourceShortage as shortage:
            await self.ask_later(tuple(answers), shortage)

    async def ask(self, params: StructuredOutputsParams, answers: dict[int, tuple[int, ...]]) -> None:
        """Ask one grammar about some answers. If it fails, ask about each alone: one of them may be the reason."""
        assert self.grammars is not None
        try:
            masks = await self.grammars.guide(params, answers)
        except (GrammarFailed, GrammarRefused) as error:  # it was compiled once; to keep it took too much
            if len(answers) > 1:
                for serial, token_ids in answers.items():
                    await self.ask(params, {serial: token_ids})
                return
            [(serial, token_ids)] = answers.items()
            self._set_mask(MaskAnswer(serial, len(token_ids), b"", False, f"its grammar failed: {error}"))
            return
        for one in masks:
            if one.problem and self._core.masks.is_current(one.serial, one.position):
                # A grammar can pass compilation and exceed the limits of matching later: that is the request's fault.
                del self._num_attempts[one.serial]
                self._fail(one.serial, unusable_grammar(params, one.problem))
                self._channels.wake_scheduler()
            else:
                self._set_mask(one)

    async def ask_later(self, serials: tuple[int, ...], shortage: ResourceShortage) -> None:
        """Have these masks asked for again after a pause; fail the requests whose last attempt this was."""
        for serial in serials:
            self._num_attempts[serial] += 1
            if self._num_attempts[serial] >= MAX_ATTEMPTS:
                self._fail(serial, ResourceShortage(shortage.resource, shortage.purpose))
        num_attempts = min(self._num_attempts[serial] for serial in serials)
        with self._requests.pausing(serials):
            await trio.sleep(MIN_PAUSE_S * 2 ** (num_attempts - 1))
        self._core.masks.put_back(serials)
        self._requests.wake()

    def _set_mask(self, answer: MaskAnswer) -> None:
        del self._num_attempts[answer.serial]
        mask = TokenMask(answer.position, answer.mask, answer.is_over, answer.problem or None)
        if self._core.masks.set_mask(answer.serial, mask):
            self._channels.wake_scheduler()


def make_grammars(config: EngineConfig, model: LoadedModel) -> OpenGrammars:
    """Return the scope in which the configured kind of grammars is served, for use once the model is loaded."""
    if config.runner == "inline":
        return _inline_grammars(model)
    # Imported while nothing is served: that takes more than 10 ms, and the first grammar must not hold the loop.
    from triolet.actors.executors.grammar import grammar_process

    # Kept from scope to scope: only an original that is known to start in a second is missed after two.
    limits = grammar_process.GrammarLimits()

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Grammars]:
        if (vocabulary := _vocabulary(model)) is None:
            yield NoGrammars(NO_TOKENIZER)
            return
        async with grammar_process.open_processes(
            vocabulary,
            max_grammars=config.max_grammars,
            timeout_s=config.grammar_timeout,
            memory_bytes=config.grammar_memory_bytes,
            limits=limits,
        ) as processes:
            yield processes

    return opened


def _inline_grammars(model: LoadedModel) -> OpenGrammars:
    @asynccontextmanager
    async def opened() -> AsyncGenerator[Grammars]:
        vocabulary = _vocabulary(model)
        yield NoGrammars(NO_TOKENIZER) if vocabulary is None else InlineGrammars.of(vocabulary)

    return opened


def _vocabulary(model: LoadedModel) -> Vocabulary | None:
    tokenizer: object = model.tokenizer
    if model.info is None or not isinstance(tokenizer, SerializableTokenizer):
        return None
    return Vocabulary(tokenizer.tokenizer_json(), model.info.vocab_size, model.info.generation.eos_token_ids)
