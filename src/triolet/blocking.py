"""triolet for plain Python: the same engine and the same scopes, with the engine's Trio loop in a thread of its own.

    with triolet.blocking.open_engine() as engine:
        with engine.generate("Hello!") as stream:
            for output in stream:
                print(output.text)

Any thread may use the engine; a stream has one reader. Leaving a stream's scope, also by an exception or Ctrl-C, frees
the request's KV blocks before the scope is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

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
from triolet.engine.open_engine import open_engine as open_native_engine
from triolet.engine.token_stream import TokenStream as NativeTokenStream
from triolet.errors import StreamMisused, WrongEventLoop
from triolet.ipc.snapshot import Snapshot

__all__ = ["BlockingEngine", "BlockingFollower", "BlockingTokenStream", "open_engine"]

T = TypeVar("T")


@contextmanager
def open_engine(
    config: EngineConfig | str | None = None,
    /,
    *,
    on_progress: OnProgress = lambda progress: None,
    **fields: Unpack[EngineFields],
) -> Generator[BlockingEngine]:
    """Start an engine in a thread of its own, yield it when it is ready, and stop it when the scope is left.

    Arguments and errors are those of `triolet.open_engine`; `on_progress` is called in the caller's thread.

    Raises:
        WrongEventLoop: the caller runs on Trio, whose loop this would block.
    """
    if trio.lowlevel.in_trio_run():
        raise WrongEventLoop(
            "triolet.blocking would block Trio's event loop; under Trio use triolet.open_engine"
        )
    # The caller waits anyway, so that its own thread can call `on_progress`, which then needs no lock.
    progress: SimpleQueue[LoadProgress | None] = SimpleQueue()
    thread = EngineThread(lambda: open_native_engine(config, on_progress=progress.put, **fields))
    thread.opened.add_done_callback(lambda _: progress.put(None))
    with engine_of_thread(thread, lambda: _tell_all(progress, on_progress)) as engine:
        yield engine


def _tell_all(progress: SimpleQueue[LoadProgress | None], on_progress: OnProgress) -> None:
    while (news := progress.get()) is not None:
        on_progress(news)


@contextmanager
def engine_of_thread(
    thread: EngineThread, meanwhile: Callable[[], None] = lambda: None
) -> Generator[BlockingEngine]:
    """Yield the engine of a thread when it is ready, and stop the thread when the scope is left.

    Args:
        meanwhile: called before the wait for the engine.
    """
    try:
        meanwhile()
        yield BlockingEngine(thread, thread.opened.result())
    finally:
        thread.stop()
        thread.finish()


class BlockingEngine(RemoteEngine):
    """Running engine for threads; `triolet.blocking.open_engine` makes it.

    Its methods are those of `triolet.Engine`. Deadlines are in the time of `time.monotonic()`.
    """

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        deadline: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> BlockingTokenStream:
        """Return a stream of the answer to a prompt, to be entered with `with`; nothing is queued before that.

        Arguments are those of `triolet.Engine.generate`, but `deadline` is an absolute time of `time.monotonic()`.
        Wrong ones are told when the stream is entered.
        """
        opening = self._opening(prompt, sampling_params, _remaining_s(deadline), fields)
        return BlockingTokenStream(self._thread, opening)

    def complete(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **arguments: Any
    ) -> RequestOutput:
        """Return the whole answer at once; arguments and errors are those of `generate`."""
        with self.generate(prompt, self._whole_answer(sampling_params), **arguments) as stream:
            for output in stream:
                return output
        raise AssertionError("a stream ends with an output or an error")

    def encode_all(
        self, prompts: Sequence[Prompt], pooling_params: PoolingParams | None = None, **arguments: Any
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the outputs of several pooled requests, in the prompts' order; see `triolet.Engine.encode_all`.

        An exception meanwhile, such as Ctrl-C, aborts them all.
        """
        run = self._calling(self._native.encode_all, prompts, pooling_params, arguments, _remaining_s)
        return _outcome(self._thread.submit(run))

    def embed(self, prompts: Any, pooling_params: PoolingParams | None = None, **arguments: Any) -> Any:
        """Return the embedding of a prompt, or those of several prompts in a list; see `triolet.Engine.embed`."""
        run = self._calling(self._native.embed, prompts, pooling_params, arguments, _remaining_s)
        return _outcome(self._thread.submit(run))

    def score(
        self, data_1: Any, data_2: Any, pooling_params: PoolingParams | None = None, **arguments: Any
    ) -> list[ScoringRequestOutput]:
        """Return the scores of pairs of texts, in their order; see `triolet.Engine.score`."""
        method = partial(self._native.score, data_1)
        run = self._calling(method, data_2, pooling_params, arguments, _remaining_s)
        return _outcome(self._thread.submit(run))

    def beam_search(self, prompt: Prompt, params: BeamSearchParams, **arguments: Any) -> BeamSearchOutput:
        """Find the likeliest answers to a prompt; see `triolet.beam_search`."""
        run = self._calling(partial(beam_search, self._native), prompt, params, arguments, _remaining_s)
        return _outcome(self._thread.submit(run))

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter; see `triolet.Engine.add_lora`."""
        return _outcome(self._thread.submit(lambda: self._native.add_lora(lora_request)))

    def add_prompt_adapter(self, prompt_adapter_request: PromptAdapterRequest) -> bool:
        """Load a prompt adapter; see `triolet.Engine.add_prompt_adapter`."""
        return _outcome(self._thread.submit(lambda: self._native.add_prompt_adapter(prompt_adapter_request)))

    def pin_lora(self, lora_int_id: int) -> bool:
        """Keep a LoRA adapter loaded until it is removed; see `triolet.Engine.pin_lora`."""
        return _outcome(self._thread.submit(lambda: self._native.pin_lora(lora_int_id)))

    def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Compute no request until `resume_generation`; see `triolet.Engine.pause_generation`."""
        _outcome(self._thread.submit(lambda: self._native.pause_generation(mode, clear_cache=clear_cache)))

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        invalidates: bool = False,
    ) -> list[Any]:
        """Call a method of every worker between two steps; see `triolet.Engine.collective_rpc`."""
        call = partial(self._native.collective_rpc, method, timeout, args, kwargs, invalidates=invalidates)
        return _outcome(self._thread.submit(call))

    def apply_model(
        self, func: str | Callable[[Any], Any], timeout: float | None = None, *, invalidates: bool = False
    ) -> list[Any]:
        """Call a function with every worker's model; see `triolet.Engine.apply_model`."""
        call = partial(self._native.apply_model, func, timeout, invalidates=invalidates)
        return _outcome(self._thread.submit(call))

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give up the model and the KV cache until `wake_up`; see `triolet.Engine.sleep`."""
        _outcome(self._thread.submit(lambda: self._native.sleep(level, mode)))

    def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        """End a sleep; see `triolet.Engine.wake_up`."""
        return _outcome(self._thread.submit(lambda: self._native.wake_up(tags)))

    def reload_weights(self, path: str, *, mode: str = "keep") -> int:
        """Serve with the weights of another folder; see `triolet.Engine.reload_weights`."""
        return _outcome(self._thread.submit(lambda: self._native.reload_weights(path, mode=mode)))

    def update_weights(
        self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], *, mode: str = "keep"
    ) -> int:
        """Serve with other values of some tensors; see `triolet.Engine.update_weights`."""
        return _outcome(self._thread.submit(lambda: self._native.update_weights(tensors, mode=mode)))

    def start_profile(self, prefix: str | None = None) -> None:
        """Record the steps from now on; see `triolet.Engine.start_profile`."""
        _outcome(self._thread.submit(lambda: self._native.start_profile(prefix)))

    def stop_profile(self) -> str:
        """Write the recording of the steps; return the path. See `triolet.Engine.stop_profile`."""
        return _outcome(self._thread.submit(self._native.stop_profile))

    def resume(self, snapshot: Snapshot) -> dict[str, BlockingTokenStream]:
        """Return streams that go on with the unfinished requests of another engine; see `triolet.Engine.resume`."""
        return {
            request_id: BlockingTokenStream(self._thread, opening)
            for request_id, opening in self._resumed(snapshot).items()
        }

    def follow_restarts(self) -> BlockingFollower[tuple[str, ...]]:
        """Return an iterator over changes of `statistics().restarting`, which ends with the engine.

        `close` it if it is left earlier.
        """
        return BlockingFollower(self._thread, self._native.follow_restarts)

    def drain(self, deadline: float) -> Snapshot:
        """Take no new requests, and let the live ones finish until `deadline`, a time of `time.monotonic()`.

        Returns:
            The requests that had not finished, for another engine to `resume`.
        """
        remaining_s = _remaining_s(deadline)
        return _outcome(self._thread.submit(lambda: self._native.drain(engine_time(remaining_s) or 0.0)))


class _RemoteReader(Generic[T]):
    """Reader of a stream's items in a thread."""

    _remote: RemoteStream[Any, T]

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_read = False

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait(self, is_true: Callable[[], bool]) -> None:
        if is_true():
            return
        # Looked at again under the lock: the change may have come in between, and its notification with it.
        with self._changed:
            self._changed.wait_for(is_true)

    def _check(self) -> None:
        """Raise if the stream cannot be read here and now."""
        self._remote.check_process()
        # Two readers would share the outputs between them, each with gaps.
        if self._is_read:
            raise StreamMisused("a stream has one reader; another thread is waiting for its next output")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        self._check()
        remote = self._remote
        self._is_read = True
        try:
            self._wait(lambda: remote.has_item or remote.is_over)
        finally:
            self._is_read = False
        self._check()
        if remote.has_item:
            return remote.take()
        if remote.error is not None:
            error, remote.error = remote.error, None  # raised once; then the stream is over
            raise error
        raise StopIteration


class BlockingTokenStream(_RemoteReader[RequestOutput]):
    """Stream of the outputs of one request; made by `BlockingEngine.generate`.

    Works as `triolet.TokenStream` does. Leaving its scope, in whatever way, waits until its blocks are free.
    """

    def __init__(self, thread: EngineThread, open_stream: Callable[[], NativeTokenStream]) -> None:
        super().__init__()
        self._thread = thread
        self._remote: RemoteStream[NativeTokenStream, RequestOutput] = RemoteStream(
            thread, open_stream, self._notify
        )
        self._was_entered = self._was_left = False
        self._followers: list[BlockingFollower[RequestProgress]] = []

    @property
    def request_id(self) -> str:
        """Id that the caller gave, or that the engine made; known inside of the `with`."""
        return self._source().request_id

    @property
    def progress(self) -> RequestProgress:
        """Progress towards the first token; it never decreases."""
        source = self._source()
        return self._thread.call(lambda: source.progress)

    def follow(self, interval: float = 0.0) -> BlockingFollower[RequestProgress]:
        """Return an iterator over changes of `progress`; see `triolet.TokenStream.follow`."""
        source = self._source()
        follower = BlockingFollower(self._thread, lambda: source.follow(interval))
        self._followers.append(follower)
        return follower

    def text(self) -> str:
        """Read to the end; return the whole text of the first answer, with the part that was read before."""
        for _ in self:
            pass
        return _outcome(self._thread.submit(self._source().text))

    def close(self) -> None:
        """Begin to leave the scope, and do not wait. Harmless when repeated, and in any thread."""
        self._was_left = True
        for follower in self._followers:
            follower.close()
        self._remote.leave()

    def __enter__(self) -> Self:
        if self._was_entered:
            raise StreamMisused("a stream can be entered once; call generate() again")
        self._was_entered = True
        remote = self._remote
        remote.start()
        try:
            self._wait(lambda: remote.source is not None or remote.is_over)
            if remote.source is None:
                # None where another task or thread has closed it meanwhile.
                raise remote.error or StreamMisused("a stream was closed while it was entered")
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self.close()
        self._wait(lambda: self._remote.is_closed)

    def _check(self) -> None:
        super()._check()
        self._source()

    def _source(self) -> NativeTokenStream:
        if self._remote.source is None or self._was_left:
            raise StreamMisused("a stream must be read inside of its `with`")
        return self._remote.source


class BlockingFollower(_RemoteReader[T]):
    """Iterator over changes; made by `BlockingTokenStream.follow` and `BlockingEngine.follow_restarts`."""

    def __init__(self, thread: EngineThread, follow: Callable[[], AsyncIterator[T]]) -> None:
        super().__init__()
        self._remote: RemoteStream[AsyncIterator[T], T] = RemoteStream(
            thread, lambda: nullcontext(follow()), self._notify
        )
        self._remote.start()

    def close(self) -> None:
        """End the iteration; a request that is followed goes on. Harmless when repeated."""
        self._remote.leave()


def _remaining_s(deadline: float | None) -> float | None:
    # The clock of the engine's loop counts from another moment.
    return None if deadline is None else deadline - time.monotonic()


def _outcome(call: RemoteCall[T]) -> T:
    """Wait for a call; an exception meanwhile, such as Ctrl-C, cancels it."""
    try:
        return call.future.result()
    except BaseException:
        call.cancel()
        raise
