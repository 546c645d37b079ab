"""The tokenizer actor: prompts become ids, away from the event loop, and a bad one fails alone.

Each request is served by a task of its own, in worker threads of its own number: a long prompt delays neither the
loop nor, as long as there is a second thread, the short ones behind it. Who asks waits for the answer on a channel of
capacity 1 that came with the question; if the asker has left, the answer is dropped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import trio

from triolet.actors.channels import TokenizeReply, TokenizeRequest, Wiring
from triolet.actors.supervisor import foreign_errors_kept
from triolet.config.engine import EngineConfig
from triolet.core.recovery.poison_bisection import MAX_STRIKES
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized, TokenizerInterface
from triolet.errors import ConfigError, InvalidPrompt, TrioletError, UnsupportedFeature

NUM_THREADS = 2

Run = Callable[[Callable[[], Tokenized]], Awaitable[Tokenized]]
LoadTokenizer = Callable[[], TokenizerInterface | None]


async def tokenizer_actor(
    wiring: Wiring,
    load: LoadTokenizer,
    *,
    inline: bool,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer questions until cancelled.

    Args:
        wiring: channels.
        load: reads the tokenizer; called once, a later life uses the same.
        inline: work in the event loop, for tests that want one order of events.
    """
    if wiring.tokenizer is None:
        wiring.tokenizer = load() if inline else await trio.to_thread.run_sync(load)
    limiter = trio.CapacityLimiter(NUM_THREADS)

    async def run(function: Callable[[], Tokenized]) -> Tokenized:
        if inline:
            await trio.lowlevel.checkpoint()
            return function()
        wiring.pulse.num_tokenizing += 1
        try:
            return await trio.to_thread.run_sync(function, limiter=limiter)
        finally:
            wiring.pulse.num_tokenizing -= 1

    with wiring.tokenizer_inbox.clone() as inbox:
        async with trio.open_nursery() as nursery:
            task_status.started()
            async for request in inbox:
                nursery.start_soon(_serve, wiring, request, run)


async def _serve(wiring: Wiring, request: TokenizeRequest, run: Run) -> None:
    """Answer one question. If the actor dies of it that is written down: for the second time, it fails alone."""
    errors: list[BaseException] = []
    with foreign_errors_kept(errors.append):
        await _answer(wiring.tokenizer, request, run)
    if errors:
        wiring.pulse.count_crash(id(request[0]))
        raise errors[0]


async def _answer(tokenizer: TokenizerInterface | None, request: TokenizeRequest, run: Run) -> None:
    message, reply = request
    answers: list[TokenizeReply] = []
    with reply:  # closed without an answer if this life ends here: then the asker asks the next one
        with foreign_errors_kept(lambda error: answers.append(_at_the_caller(error, message))):
            answers.append(await run(lambda: _tokenize(tokenizer, message)))
        with suppress(trio.BrokenResourceError):
            reply.send_nowait(answers[0])


def _tokenize(tokenizer: TokenizerInterface | None, message: Tokenize) -> Tokenized:
    if tokenizer is None:
        raise UnsupportedFeature("prompt must be token ids: the model has no tokenizer", field="prompt")
    return tokenizer.tokenize(message)


def _at_the_caller(error: BaseException, message: Tokenize) -> BaseException:
    """Our own errors say what is wrong; anything else, a panic in foreign code included, is blamed on the prompt."""
    if isinstance(error, TrioletError):
        return error
    wrapped = InvalidPrompt(f"prompt could not be tokenized: {type(error).__name__}", field="prompt")
    wrapped.__cause__ = error
    return wrapped


async def ask_tokenizer(wiring: Wiring, message: Tokenize) -> Tokenized:
    """Ask, and wait for the answer.

    Raises:
        InvalidRequest: the prompt can not be encoded.
    """
    question, pulse = id(message), wiring.pulse
    pulse.asked_s[question] = trio.current_time()
    try:
        answer = await _ask(wiring, message)
    finally:
        del pulse.asked_s[question]
        del pulse.num_crashes[question]  # harmless where there are none
    if isinstance(answer, BaseException):
        raise answer
    return answer


async def _ask(wiring: Wiring, message: Tokenize) -> TokenizeReply:
    while wiring.pulse.num_crashes[id(message)] < MAX_STRIKES:
        reply_send, reply = trio.open_memory_channel[TokenizeReply](1)
        # Without an answer, the actor died with the question in its hands: the next one is asked.
        with reply, suppress(trio.EndOfChannel):
            await wiring.to_tokenizer.send((message, reply_send))
            return await reply.receive()
    return InvalidPrompt("prompt could not be tokenized: the tokenizer dies of it each time", field="prompt")


def make_tokenizer_loader(config: EngineConfig, wiring: Wiring) -> LoadTokenizer:
    """Reads the configured tokenizer, or the one in the folder of the model that the runner has loaded."""

    def load() -> TokenizerInterface | None:
        from triolet.model.tokenizer.tokenizer import load_tokenizer

        assert wiring.model_info is not None, "the runner starts before the tokenizer"
        folder = config.tokenizer or wiring.model_info.folder
        tokenizer = load_tokenizer(Path(folder), trust_remote_code=config.trust_remote_code)
        if tokenizer is None and config.tokenizer is not None:  # what was named must be there
            raise ConfigError("tokenizer", "a folder with a tokenizer", config.tokenizer)
        return tokenizer

    return load
