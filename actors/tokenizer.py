"""The tokenizer actor encodes prompts in worker threads, away from the event loop; a bad prompt fails alone.

Each question is served by a task of its own, in worker threads with a limiter of their own: a long prompt delays
neither the loop nor, as long as there is a second thread, the short prompts behind it. The answer goes to a channel of
capacity 1 that came with the question; if the task that asked has left, the answer is dropped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import trio

from triolet.actors.actor_progress import ActorProgress
from triolet.actors.channels import Channels, TokenizeReply, TokenizeRequest
from triolet.actors.executors.threads import run_in_thread
from triolet.actors.supervisor import foreign_errors_kept
from triolet.config.engine import EngineConfig
from triolet.core.recovery.recovery_state import MAX_CRASHES
from triolet.core.recovery.supervision import shortage_of
from triolet.core.request.model_info import LoadedModel
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized, TokenizerInterface
from triolet.errors import InvalidPrompt, TrioletError

NUM_THREADS = 2
# Of rendering and encoding, before a thread gives way to the event loop: an ordinary chat takes less.
FREE_S = 0.002

Run = Callable[[Callable[[], Tokenized]], Awaitable[Tokenized]]
RunThread = Callable[..., Awaitable[Tokenized]]
"""Runs a function in a thread that gives way to the event loop; `limiter` and `free_s` are given by name."""
LoadTokenizer = Callable[[], TokenizerInterface | None]


async def tokenizer_actor(
    model: LoadedModel,
    channels: Channels,
    progress: ActorProgress,
    load: LoadTokenizer,
    *,
    run_thread: RunThread,
    inline: bool,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer questions until cancelled.

    Args:
        model: gets the tokenizer.
        channels: to the other actors.
        load: reads the tokenizer; called once, a later life uses the same one.
        run_thread: runs a function in a thread.
        inline: work in the event loop, for tests that want one order of events.
    """
    if model.tokenizer is None:
        model.tokenizer = await run_in_thread(load, "loading the tokenizer", is_inline=inline)
    limiter = trio.CapacityLimiter(NUM_THREADS)

    async def run(function: Callable[[], Tokenized]) -> Tokenized:
        if inline:
            await trio.lowlevel.checkpoint()
            return function()
        progress.num_tokenizing += 1
        try:
            return await run_thread(function, limiter=limiter, free_s=FREE_S)
        finally:
            progress.num_tokenizing -= 1

    # A clone, so that the inbox stays open for the next life.
    with channels.tokenizer_inbox.clone() as inbox:
        async with trio.open_nursery() as nursery:
            task_status.started()
            async for request in inbox:
                nursery.start_soon(_serve, model, progress, request, run)


async def _serve(model: LoadedModel, progress: ActorProgress, request: TokenizeRequest, run: Run) -> None:
    """Answer one question. If the actor dies of it, count that: the second time, the question fails alone."""
    errors: list[BaseException] = []
    with foreign_errors_kept(errors.append):
        await _answer(model.tokenizer, request, run)
    if errors:
        progress.count_crash(id(request[0]))
        raise errors[0]


async def _answer(tokenizer: TokenizerInterface | None, request: TokenizeRequest, run: Run) -> None:
    message, reply = request
    answers: list[TokenizeReply] = []
    with reply:  # closed without an answer if this life ends here; `_ask` then asks the next one
        with foreign_errors_kept(lambda error: answers.append(_error_for_caller(error, message))):
            answers.append(await run(lambda: _tokenize(tokenizer, message)))
        # The caller may have left meanwhile.
        with suppress(trio.BrokenResourceError):
            reply.send_nowait(answers[0])


def _tokenize(tokenizer: TokenizerInterface | None, message: Tokenize) -> Tokenized:
    assert tokenizer is not None, "`RequestBuilder` asks nothing of a model without a tokenizer"
    return tokenizer.tokenize(message)


def _error_for_caller(error: BaseException, message: Tokenize) -> BaseException:
    """Return the error that the caller gets."""
    # Any error but our own, a panic in foreign code included, is blamed on the prompt.
    if isinstance(error, TrioletError):
        return error
    if (shortage := shortage_of(error, "tokenizing the prompt")) is not None:  # no thread, no memory
        return shortage
    wrapped = InvalidPrompt(f"prompt could not be tokenized: {type(error).__name__}", field="prompt")
    wrapped.__cause__ = error
    return wrapped


async def ask_tokenizer(channels: Channels, progress: ActorProgress, message: Tokenize) -> Tokenized:
    """Tokenize a prompt with the tokenizer actor.

    Raises:
        InvalidRequest: the prompt cannot be encoded.
    """
    question = id(message)
    progress.asked_s[question] = trio.current_time()
    try:
        answer = await _ask(channels, progress, message)
    finally:
        del progress.asked_s[question]
        del progress.num_crashes[question]  # no error if there is none: it is a Counter
    if isinstance(answer, BaseException):
        raise answer
    return answer


async def _ask(channels: Channels, progress: ActorProgress, message: Tokenize) -> TokenizeReply:
    while progress.num_crashes[id(message)] < MAX_CRASHES:
        reply_send, reply = trio.open_memory_channel[TokenizeReply](1)
        # Without an answer, the actor has died while it handled the question: ask its next life.
        with reply, suppress(trio.EndOfChannel):
            await channels.to_tokenizer.send((message, reply_send))
            return await reply.receive()
    return InvalidPrompt("prompt could not be tokenized: the tokenizer dies of it each time", field="prompt")


async def check_configured_template(config: EngineConfig, *, inline: bool) -> None:
    """Check the chat template of a configuration, whose model is not loaded yet.

    Args:
        inline: work in the event loop.
    Raises:
        ConfigError: it names no readable file, or is no template.
    """

    def check() -> None:
        from triolet.model.tokenizer.tokenizer import check_template

        check_template(config.chat_template)

    await run_in_thread(check, "reading the chat template", is_inline=inline)


def make_tokenizer_loader(config: EngineConfig, model: LoadedModel) -> LoadTokenizer:
    """Return a function that reads the configured tokenizer, by default the one in the folder of the loaded model."""

    def load() -> TokenizerInterface | None:
        from triolet.model.tokenizer.tokenizer import load_configured_tokenizer

        assert model.info is not None, "the runner starts before the tokenizer"
        return load_configured_tokenizer(config, Path(model.info.folder))

    return load
