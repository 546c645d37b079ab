"""The structured-output actor computes the grammar masks of the answers that are bound to a form.

The scheduler names the requests that need masks and goes on with the others (`core.grammar_masks`). So this actor has
no state that the journal does not have: its next life, and the next processes of its grammars, follow the answers again
from their beginnings.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from triolet.actors.channels import Channels
from triolet.actors.executors.grammars import (
    GrammarFailed,
    GrammarRefused,
    Grammars,
    InlineGrammars,
    NoGrammars,
    OpenGrammars,
)
from triolet.actors.grammar_requests import GrammarRequests
from triolet.config.engine import EngineConfig
from triolet.core.engine_core import EngineCore
from triolet.core.grammar_masks import GrammarQuestions
from triolet.core.request.grammar_state import TokenMask
from triolet.core.request.model_info import LoadedModel
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.request.tokenizer_interface import SerializableTokenizer
from triolet.ipc.grammar import MaskAnswer, Vocabulary


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
        core: of the engine.
        channels: to the other actors.
        requests: where tasks wait for grammars.
        open_grammars: the scope in which grammars are served.
    """
    manager = StructuredOutputManager(core, channels)
    core.masks.ask_again()
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        stack.callback(requests.serve, None)
        task_status.started()
        while True:
            serials = await requests.questions()
            wants_grammars = requests.wants_grammars or core.masks.needs_grammars(serials)
            if manager.grammars is None and wants_grammars:
                manager.grammars = await stack.enter_async_context(open_grammars())
                requests.serve(manager.grammars)
                nursery.start_soon(manager.grammars.watch)
            for params, answers in manager.sort(serials).items():
                nursery.start_soon(manager.ask, params, answers)


class StructuredOutputManager:
    """One life of the actor."""

    def __init__(self, core: EngineCore, channels: Channels) -> None:
        self.grammars: Grammars | None = None
        self._core, self._channels = core, channels

    def sort(self, serials: Iterable[int]) -> GrammarQuestions:
        """Answer what needs no grammar; return what grammars must be asked."""
        if self.grammars is not None:
            self.grammars.forget(self._core.journal.__contains__)
        questions = self._core.masks.sort(serials)
        if self._core.masks.has_answers:
            self._channels.wake_scheduler()
        return questions

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
            [serial] = answers
            masks = (MaskAnswer(serial, len(answers[serial]), b"", False, f"its grammar failed: {error}"),)
        for one in masks:
            self._put_down(one)

    def _put_down(self, answer: MaskAnswer) -> None:
        mask = TokenMask(answer.position, answer.mask, answer.is_over, answer.problem or None)
        if self._core.masks.put_down(answer.serial, mask):
            self._channels.wake_scheduler()


def make_grammars(config: EngineConfig, model: LoadedModel) -> OpenGrammars:
    """Return the scope in which the configured kind of grammars is served, for use once the model is loaded."""

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Grammars]:
        tokenizer: object = model.tokenizer
        if model.info is None or not isinstance(tokenizer, SerializableTokenizer):
            yield NoGrammars("structured_outputs must be None: they need a tokenizer.json")
            return
        vocabulary = Vocabulary(
            tokenizer.tokenizer_json(), model.info.vocab_size, model.info.generation.eos_token_ids
        )
        if config.runner == "inline":
            yield InlineGrammars.of(vocabulary)
            return
        from triolet.actors.executors.grammar_process import open_processes

        async with open_processes(
            vocabulary,
            max_grammars=config.max_grammars,
            timeout_s=config.grammar_timeout,
            memory_bytes=config.grammar_memory_bytes,
        ) as processes:
            yield processes

    return opened
