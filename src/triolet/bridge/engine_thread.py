"""Trio run in a thread of its own that holds one engine, and the ways in which other threads call it.

A caller in another thread has three ways: `call` runs a function and waits for its result, `submit` starts an async
function whose result is a future, and `start` begins a task that reports by itself. All tasks are children of the
engine's scope, so that none is left when the thread has ended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, ParamSpec, TypeVar

import trio

from triolet.engine.engine import Engine
from triolet.errors import EngineClosed, WrongEventLoop

T = TypeVar("T")
P = ParamSpec("P")

OpenEngine = Callable[[], AbstractAsyncContextManager[Engine]]
"""Function that returns the scope of an engine, to be entered in the engine's thread."""

SCOPE_ENDED = "the engine's scope has ended"


class RemoteCall(Generic[T]):
    """An async function that runs in the engine's thread.

    `future` is done when the function has ended, also after a `cancel`, which makes it fail with `CancelledError`: what
    the function held has been given back by then.
    """

    def __init__(self, thread: EngineThread, function: Callable[[], Awaitable[T]]) -> None:
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()  # from here on only `cancel` of this class can end it
        self._thread, self._function = thread, function
        self._scope = trio.CancelScope()

    def cancel(self) -> None:
        """Cancel the function; harmless if it has ended."""
        self._thread.soon(self._scope.cancel)

    def refuse(self) -> None:
        """Fail the future: the function cannot be run any more."""
        self.future.set_exception(EngineClosed(SCOPE_ENDED))

    async def run(self) -> None:
        """Run the function and resolve the future. Runs in the engine's thread."""
        try:
            with self._scope:
                self.future.set_result(await self._function())
            if self._scope.cancelled_caught:
                self.future.set_exception(CancelledError())
        except Exception as error:
            self.future.set_exception(error)
        finally:
            if not self.future.done():
                self.refuse()


class EngineThread:
    """One engine in a thread of its own.

    Args:
        open_engine: scope of the engine.
    """

    def __init__(self, open_engine: OpenEngine) -> None:
        self.opened: Future[Engine] = Future()
        self.ended: Future[None] = Future()
        # A future that runs cannot be cancelled by a caller that gives up waiting.
        self.opened.set_running_or_notify_cancel()
        self.ended.set_running_or_notify_cancel()
        self._open_engine = open_engine
        self._process_id = os.getpid()
        self._scope = trio.CancelScope()
        self._has_token = threading.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        # A daemon, so that a program that never leaves the engine's scope can end all the same.
        self._thread = threading.Thread(target=self._run, name="triolet engine", daemon=True)
        self._thread.start()

    @property
    def _is_elsewhere(self) -> bool:
        """True in a fork of the process that has the thread."""
        return os.getpid() != self._process_id

    def check_process(self) -> None:
        """Check that the thread runs in the caller's process.

        Raises:
            WrongEventLoop: the caller's process is a fork of it.
        """
        if self._is_elsewhere:
            raise WrongEventLoop(
                f"an engine must be used in the process in which it was opened, {self._process_id}; got a call in "
                f"{os.getpid()}, which is a fork of it"
            )

    def stop(self) -> None:
        """Close the engine; `ended` tells when that is done. Harmless when repeated, also while the engine opens."""
        self._has_token.wait()  # the thread sets it before it does anything else, or when it cannot do anything
        self.soon(self._scope.cancel)

    def finish(self) -> None:
        """Join the thread, after `ended`; in a forked process there is none, and the engine goes on.

        Raises:
            BaseException: error with which the engine's scope was left, such as `EngineDead`.
        """
        if self._is_elsewhere:
            return
        self._thread.join()
        self.ended.result()

    def soon(self, function: Callable[[], object]) -> bool:
        """Run a synchronous function in the engine's thread soon; False if that thread has ended, or is elsewhere."""
        if self._token is None or self._is_elsewhere:  # no token: the Trio run could not begin
            return False
        try:
            self._token.run_sync_soon(function)
        except trio.RunFinishedError:
            return False
        return True

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a synchronous function in the engine's thread, wait for it, and return its result.

        Raises:
            EngineClosed: the engine's thread has ended.
            WrongEventLoop: see `check_process`.
        """
        self.check_process()
        try:
            return trio.from_thread.run_sync(lambda: function(*args, **kwargs), trio_token=self._token)
        except trio.RunFinishedError:
            raise EngineClosed(SCOPE_ENDED) from None

    def submit(self, function: Callable[[], Awaitable[T]]) -> RemoteCall[T]:
        """Start an async function in the engine's thread.

        The call's future fails with `EngineClosed` if the engine's scope ends first.
        """
        call = RemoteCall(self, function)
        self.start(call.run, call.refuse)
        return call

    def start(self, task: Callable[[], Awaitable[Any]], refuse: Callable[[], None]) -> None:
        """Begin a task in the engine's thread; the task must not raise.

        Args:
            task: async function.
            refuse: called instead, in any thread, if the engine's thread ends or has ended.
        Raises:
            WrongEventLoop: see `check_process`.
        """
        self.check_process()

        def begin() -> None:
            assert self._nursery is not None
            try:
                self._nursery.start_soon(task)
            except RuntimeError:  # the nursery has been left, and the thread is about to end
                refuse()

        if not self.soon(begin):
            refuse()

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:  # the caller's thread raises it
            failure: BaseException | None = error
        else:
            failure = None
        self._has_token.set()
        if not self.opened.done():
            self.opened.set_exception(failure or EngineClosed("the engine was closed before it had opened"))
            failure = None
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._has_token.set()
        failure: Exception | None = None
        # The nursery lies outside of the engine's scope: a call that comes in while the engine closes finds a place to
        # run in, and learns from the engine itself that it is closed.
        async with trio.open_nursery() as self._nursery:
            try:
                with self._scope:
                    async with self._open_engine() as engine:
                        self.opened.set_result(engine)
                        await trio.sleep_forever()
            except Exception as error:  # raised again below, without the nursery's group around it
                failure = error
            # Calls that still run have no engine any more.
            self._nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
