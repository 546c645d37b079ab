"""triolet for asyncio: the same engine and the same scopes, with the engine's Trio loop in a thread of its own.

    async with triolet.aio.open_engine() as engine:
        async with engine.generate("Hello!") as stream:
            async for output in stream:
                print(output.text)

Cancelling the asyncio task, or leaving a stream's scope, frees the request's KV blocks before the scope is left, as a
Trio cancel scope does. In a program that runs on Trio (AnyIO's backend `trio`), `open_engine` gives the native engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack, cast

import trio

from triolet.bridge.engine_thread import EngineThread, RemoteCall
from triolet.bridge.remote_engine import RemoteEngine, RequestFields, engine_time
from triolet.bridge.remote_stream import RemoteStream
from triolet.config.engine import EngineConfig
from triolet.config.engine_fields import EngineFields
from triolet.core.beam_search import BeamSearchOutput, BeamSearchParams
from triolet.core.load_progress import LoadProgress, OnProgress
from triolet.core.output.output_processor import RequestProgress
from triolet.core.output.outputs import RequestOutput
from triolet.core.output.pooling_outputs import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from triolet.core.request.lora import LoRARequest
from triolet.core.request.params import SamplingParams
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.prompt import Prompt
from triolet.core.request.prompt_adapter import PromptAdapterRequest
from triolet.engine.beam_search import beam_search
from triolet.engine.engine import Engine as NativeEngine
from triolet.engine.open_engine import open_engine as open_native_engine
from triolet.engine.token_stream import TokenStream as NativeTokenStream
from triolet.errors import StreamMisused, WrongEventLoop
from triolet.ipc.snapshot import Snapshot

__all__ = ["AsyncioEngine", "AsyncioFollower", "AsyncioTokenStream", "open_engine"]

T = TypeVar("T")

_WRONG_LOOP = "an engine of triolet.aio must be used in the event loop in which it was opened"


@asynccontextmanager
async def open_engine(
    config: EngineConfig | str | None = None,
    /,
    *,
    on_progress: OnProgress = lambda progress: None,
    **fields: Unpack[EngineFields],
) -> AsyncGenerator[AsyncioEngine]:
    """Start an engine in a thread of its own, yield it when it is ready, and stop it when the scope is left.

    Arguments and errors are those of `triolet.open_engine`; `on_progress` is called in the event loop. Under Trio the
    native `triolet.Engine` is given instead, and no thread is started.
    """
    # AnyIO on its Trio backend comes here: a thread in between would only cost time.
    if trio.lowlevel.in_trio_run():
        async with open_native_engine(config, on_progress=on_progress, **fields) as native:
            yield cast("AsyncioEngine", native)
        return
    loop = asyncio.get_running_loop()

    def tell(progress: LoadProgress) -> None:
        _call_soon(loop, on_progress, progress)

    thread = EngineThread(lambda: open_native_engine(config, on_progress=tell, **fields))
    async with engine_of_thread(thread) as engine:
        yield engine


@asynccontextmanager
async def engine_of_thread(thread: EngineThread) -> AsyncGenerator[AsyncioEngine]:
    """Yield the engine of a thread when it is ready, and stop the thread when the scope is left."""
    try:
        yield AsyncioEngine(thread, await _result(thread.opened))
    finally:
        thread.stop()
        # If opening failed, `opened` has told why; an engine that died while it closed raises here.
        await _wait_through_cancellation(thread.ended)
        thread.finish()


class AsyncioEngine(RemoteEngine):
    """Running engine for asyncio; `triolet.aio.open_engine` makes it.

    Its methods are those of `triolet.Engine`, to be used in the event loop in which it was opened. Deadlines are in
    the time of that loop: `loop.time() + seconds`.
    """

    def __init__(self, thread: EngineThread, engine: NativeEngine) -> None:
        super().__init__(thread, engine)
        self._news = _News(asyncio.get_running_loop())

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        deadline: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> AsyncioTokenStream:
        """Return a stream of the answer to a prompt, to be entered with `async with`; nothing is queued before that.

        Arguments are those of `triolet.Engine.generate`, but `deadline` is an absolute time of the event loop. Wrong
        ones are told when the stream is entered.
        """
        opening = self._opening(prompt, sampling_params, self._remaining_s(deadline), fields)
        return AsyncioTokenStream(self._thread, opening, self._news)

    async def complete(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **arguments: Any
    ) -> RequestOutput:
        """Return the whole answer at once; arguments and errors are those of `generate`."""
        async with self.generate(prompt, self._whole_answer(sampling_params), **arguments) as stream:
            async for output in stream:
                return output
        raise AssertionError("a stream ends with an output or an error")

    async def encode_all(
        self, prompts: Sequence[Prompt], pooling_params: PoolingParams | None = None, **arguments: Any
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the outputs of several pooled requests, in the prompts' order; see `triolet.Engine.encode_all`.

        A cancelled call aborts them all.
        """
        run = self._calling(self._native.encode_all, prompts, pooling_params, arguments, self._remaining_s)
        return await _outcome(self._thread.submit(run))

    async def embed(self, prompts: Any, pooling_params: PoolingParams | None = None, **arguments: Any) -> Any:
        """Return the embedding of a prompt, or those of several prompts in a list; see `triolet.Engine.embed`."""
        run = self._calling(self._native.embed, prompts, pooling_params, arguments, self._remaining_s)
        return await _outcome(self._thread.submit(run))

    async def score(
        self, data_1: Any, data_2: Any, pooling_params: PoolingParams | None = None, **arguments: Any
    ) -> list[ScoringRequestOutput]:
        """Return the scores of pairs of texts, in their order; see `triolet.Engine.score`."""
        method = partial(self._native.score, data_1)
        run = self._calling(method, data_2, pooling_params, arguments, self._remaining_s)
        return await _outcome(self._thread.submit(run))

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, **arguments: Any
    ) -> BeamSearchOutput:
        """Find the likeliest answers to a prompt; see `triolet.beam_search`."""
        run = self._calling(partial(beam_search, self._native), prompt, params, arguments, self._remaining_s)
        return await _outcome(self._thread.submit(run))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter; see `triolet.Engine.add_lora`."""
        return await _outcome(self._thread.submit(lambda: self._native.add_lora(lora_request)))

    async def add_prompt_adapter(self, prompt_adapter_request: PromptAdapterRequest) -> bool:
        """Load a prompt adapter; see `triolet.Engine.add_prompt_adapter`."""
        return await _outcome(
            self._thread.submit(lambda: self._native.add_prompt_adapter(prompt_adapter_request))
        )

    async def pin_lora(self, lora_int_id: int) -> bool:
        """Keep a LoRA adapter loaded until it is removed; see `triolet.Engine.pin_lora`."""
        return await _outcome(self._thread.submit(lambda: self._native.pin_lora(lora_int_id)))

    async def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Compute no request until `resume_generation`; see `triolet.Engine.pause_generation`."""
        await _outcome(
            self._thread.submit(lambda: self._native.pause_generation(mode, clear_cache=clear_cache))
        )

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,  # noqa: ASYNC109  vLLM's name
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        invalidates: bool = False,
    ) -> list[Any]:
        """Call a method of every worker between two steps; see `triolet.Engine.collective_rpc`."""
        call = partial(self._native.collective_rpc, method, timeout, args, kwargs, invalidates=invalidates)
        return await _outcome(self._thread.submit(call))

    async def apply_model(
        self,
        func: str | Callable[[Any], Any],
        timeout: float | None = None,  # noqa: ASYNC109  vLLM's name
        *,
        invalidates: bool = False,
    ) -> list[Any]:
        """Call a function with every worker's model; see `triolet.Engine.apply_model`."""
        call = partial(self._native.apply_model, func, timeout, invalidates=invalidates)
        return await _outcome(self._thread.submit(call))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give up the model and the KV cache until `wake_up`; see `triolet.Engine.sleep`."""
        await _outcome(self._thread.submit(lambda: self._native.sleep(level, mode)))

    async def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        """End a sleep; see `triolet.Engine.wake_up`."""
        return await _outcome(self._thread.submit(lambda: self._native.wake_up(tags)))

    async def reload_weights(self, path: str, *, mode: str = "keep") -> int:
        """Serve with the weights of another folder; see `triolet.Engine.reload_weights`."""
        return await _outcome(self._thread.submit(lambda: self._native.reload_weights(path, mode=mode)))

    async def update_weights(
        self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], *, mode: str = "keep"
    ) -> int:
        """Serve with other values of some tensors; see `triolet.Engine.update_weights`."""
        return await _outcome(self._thread.submit(lambda: self._native.update_weights(tensors, mode=mode)))

    async def start_profile(self, prefix: str | None = None) -> None:
        """Record the steps from now on; see `triolet.Engine.start_profile`."""
        await _outcome(self._thread.submit(lambda: self._native.start_profile(prefix)))

    async def stop_profile(self) -> str:
        """Write the recording of the steps; return the path. See `triolet.Engine.stop_profile`."""
        return await _outcome(self._thread.submit(self._native.stop_profile))

    def resume(self, snapshot: Snapshot) -> dict[str, AsyncioTokenStream]:
        """Return streams that go on with the unfinished requests of another engine; see `triolet.Engine.resume`."""
        self._news.check_loop()
        return {
            request_id: AsyncioTokenStream(self._thread, opening, self._news)
            for request_id, opening in self._resumed(snapshot).items()
        }

    def follow_restarts(self) -> AsyncioFollower[tuple[str, ...]]:
        """Return an iterator over changes of `statistics().restarting`, which ends with the engine.

        `close` it if it is left earlier.
        """
        self._news.check_loop()
        return AsyncioFollower(self._thread, self._native.follow_restarts, self._news)

    async def drain(self, deadline: float) -> Snapshot:
        """Take no new requests, and let the live ones finish until `deadline`, an absolute time of the event loop.

        Returns:
            The requests that had not finished, for another engine to `resume`.
        """
        remaining_s = self._remaining_s(deadline)
        return await _outcome(
            self._thread.submit(lambda: self._native.drain(engine_time(remaining_s) or 0.0))
        )

    def _remaining_s(self, deadline: float | None) -> float | None:
        # The clocks of the two loops count from different moments.
        return None if deadline is None else deadline - self._news.check_loop().time()


class _RemoteReader(Generic[T]):
    """Reader of a stream's items in an asyncio event loop."""

    _remote: RemoteStream[Any, T]

    def __init__(self, news: _News) -> None:
        self._news = news
        self._changed = asyncio.Event()
        self._is_read = False

    def _notify(self) -> None:
        self._news.tell(self)

    def wake(self) -> None:
        """Let the waiting tasks look again. Called in the event loop."""
        self._changed.set()

    async def _wait(self, is_true: Callable[[], bool]) -> None:
        # `wake` runs in the event loop: a change after the question sets the event only when this task waits.
        while not is_true():
            self._changed.clear()
            await self._changed.wait()

    def _check(self) -> None:
        """Raise if the stream cannot be read here and now."""
        self._news.check_loop()
        if self._is_read:
            raise StreamMisused("a stream has one reader; another task is waiting for its next output")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        self._check()
        remote = self._remote
        self._is_read = True
        try:
            # A reader that never waits would keep every other task of its loop from running.
            if remote.has_item:
                await asyncio.sleep(0)
            await self._wait(lambda: remote.has_item or remote.is_over)
        finally:
            self._is_read = False
        self._check()
        if remote.has_item:
            return remote.take()
        if remote.error is not None:
            error, remote.error = remote.error, None  # raised once; then the stream is over
            raise error
        raise StopAsyncIteration


class AsyncioTokenStream(_RemoteReader[RequestOutput]):
    """Stream of the outputs of one request; made by `AsyncioEngine.generate`.

    Works as `triolet.TokenStream` does. Leaving its scope, in whatever way, waits until its blocks are free.
    """

    def __init__(
        self, thread: EngineThread, open_stream: Callable[[], NativeTokenStream], news: _News
    ) -> None:
        super().__init__(news)
        self._thread = thread
        self._remote: RemoteStream[NativeTokenStream, RequestOutput] = RemoteStream(
            thread, open_stream, self._notify
        )
        self._was_entered = self._was_left = False
        self._followers: list[AsyncioFollower[RequestProgress]] = []

    @property
    def request_id(self) -> str:
        """Id that the caller gave, or that the engine made; known inside of the `async with`."""
        return self._source().request_id

    @property
    def progress(self) -> RequestProgress:
        """Progress towards the first token; it never decreases."""
        source = self._source()
        return self._thread.call(lambda: source.progress)

    def follow(self, interval: float = 0.0) -> AsyncioFollower[RequestProgress]:
        """Return an iterator over changes of `progress`; see `triolet.TokenStream.follow`."""
        source = self._source()
        follower = AsyncioFollower(self._thread, lambda: source.follow(interval), self._news)
        self._followers.append(follower)
        return follower

    async def text(self) -> str:
        """Read to the end; return the whole text of the first answer, with the part that was read before."""
        async for _ in self:
            pass
        return await _outcome(self._thread.submit(self._source().text))

    async def __aenter__(self) -> Self:
        self._news.check_loop()
        if self._was_entered:
            raise StreamMisused("a stream can be entered once; call generate() again")
        self._was_entered = True
        remote = self._remote
        remote.start()
        try:
            await self._wait(lambda: remote.source is not None or remote.is_over)
            if remote.source is None:
                # None where another task or thread has closed it meanwhile.
                raise remote.error or StreamMisused("a stream was closed while it was entered")
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._leave()

    async def _leave(self) -> None:
        """Leave the scope in the engine's thread, and wait for that; a cancellation meanwhile is kept for later."""
        self.close()
        cancelled: asyncio.CancelledError | None = None
        while not self._remote.is_closed:
            try:
                await self._wait(lambda: self._remote.is_closed)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def close(self) -> None:
        """Begin to leave the scope, and do not wait. Harmless when repeated, and in any thread."""
        self._was_left = True
        for follower in self._followers:
            follower.close()
        self._remote.leave()

    def _check(self) -> None:
        super()._check()
        self._source()

    def _source(self) -> NativeTokenStream:
        if self._remote.source is None or self._was_left:
            raise StreamMisused("a stream must be read inside of its `async with`")
        return self._remote.source


class AsyncioFollower(_RemoteReader[T]):
    """Iterator over changes; made by `AsyncioTokenStream.follow` and `AsyncioEngine.follow_restarts`."""

    def __init__(self, thread: EngineThread, follow: Callable[[], AsyncIterator[T]], news: _News) -> None:
        super().__init__(news)
        self._remote: RemoteStream[AsyncIterator[T], T] = RemoteStream(
            thread, lambda: nullcontext(follow()), self._notify
        )
        self._remote.start()

    def close(self) -> None:
        """End the iteration; a request that is followed goes on. Harmless when repeated."""
        self._remote.leave()


class _News:
    """Wake-ups of the readers of one event loop: one call into the loop for all that changed since the last."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._readers: deque[_RemoteReader[Any]] = deque()
        self._is_scheduled = False

    def check_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop, which the caller must run in.

        Raises:
            WrongEventLoop: it runs in another one, or in none.
        """
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            raise WrongEventLoop(_WRONG_LOOP) from None
        if running is not self._loop:
            raise WrongEventLoop(_WRONG_LOOP)
        return running

    def tell(self, reader: _RemoteReader[Any]) -> None:
        """Wake a reader. Called in the engine's thread."""
        self._readers.append(reader)
        if not self._is_scheduled:
            self._is_scheduled = True
            _call_soon(self._loop, self._wake_all)

    def _wake_all(self) -> None:
        self._is_scheduled = False  # first: what is told from here on schedules another call
        while self._readers:
            self._readers.popleft().wake()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    with suppress(RuntimeError):  # the loop is closed: no task of it waits any more
        loop.call_soon_threadsafe(function, *args)


async def _result(future: Future[T]) -> T:
    # Not through a future of asyncio: one whose wait is cancelled would log an error that comes later.
    await _ended(future).wait()
    return future.result()


def _ended(future: Future[Any]) -> asyncio.Event:
    """Return an event that is set when a future is done, whatever its result."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    future.add_done_callback(lambda _: _call_soon(loop, ended.set))
    return ended


async def _outcome(call: RemoteCall[T]) -> T:
    """Wait for a call; a cancellation cancels it, and waits for its end."""
    try:
        return await _result(call.future)
    except asyncio.CancelledError:
        call.cancel()
        await _wait_through_cancellation(call.future)
        raise


async def _wait_through_cancellation(future: Future[Any]) -> None:
    """Wait until a future is done, whatever its result; a cancellation is raised after that."""
    ended = _ended(future)
    cancelled: asyncio.CancelledError | None = None
    while not ended.is_set():
        try:
            await ended.wait()
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
