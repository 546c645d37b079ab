"""Program of the model runner's process: `python -m triolet.workers.runner`, started by `actors.executors.process`.

It receives requests and sends replies over a `Transport`, here its standard input and output: an `EngineConfig` to
load, then one `StepPlan` after the other (`ipc.messages`). A plan that comes before the result of the one before it is
handed to the device at once (`workers.step_pipeline`). The process ends when the requests end, and after the first
exception: half a step may be in its tables, and what a driver or a library has broken is best left behind with the
process.

It never outlives its parent. Linux kills it when the thread that started it ends, however that ends. Elsewhere, and
should that fail, a thread watches the transport: once the other side has closed it, nothing waits for replies, and the
process ends, also in the middle of a step. The same thread holds the lifeline, whose end tells the parent that this
process has ended (`ipc.lifeline`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import itertools
import os
import queue
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn, Protocol

import attrs

from triolet import nano
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import IMPORTS, LoadProgress, OnProgress
from triolet.core.recovery.supervision import shortage_of, typed_shortages
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import (
    AdapterRunner,
    StepPlan,
    StepRunner,
    SubmittingRunner,
    WritingRunner,
    steps_of,
)
from triolet.core.worker_call import WorkerCall, WorkerOutcome, outcome_of
from triolet.errors import ConfigError, ModelError, ResourceShortage, UnknownWorkerMethod
from triolet.ipc import lifeline
from triolet.ipc.failures import describe
from triolet.ipc.messages import (
    REPLIES,
    REQUESTS,
    CallAnswer,
    CallWorker,
    Halt,
    ImportModules,
    Ping,
    Pong,
    PrepareAdapter,
    Reply,
    Request,
)
from triolet.ipc.values import pack_value, unpack_value
from triolet.model.loading.imports import no_full_collections
from triolet.workers.parent_death import die_with_parent
from triolet.workers.step_pipeline import StepPipeline

SHORT_BYTES = 2**12  # at most, of nearly all requests
READ_BYTES = 2**16  # what a pipe holds on Linux
LONG_BYTES = 2**20  # read at once of a long request, such as a tensor: a socket holds some of them
LAST_FD = 2**32 - 1
SYS_CLOSE_RANGE = 436  # on every architecture
CLOSE_RANGE_UNSHARE = 2  # from <linux/close_range.h>
IMPORT_REPORT_S = 0.1  # between two reports that modules are being imported


Load = Callable[[EngineConfig, OnProgress], tuple[StepRunner, ModelInfo]]

# The runner, if it writes behind its steps: in whatever thread the process ends, that is waited for.
_writing: list[WritingRunner] = []


class Transport(Protocol):
    """Connection to the engine; its calls block."""

    def requests(self) -> Iterator[Request | None]:
        """Receive requests until the engine closes the connection; None for each `wake`, or for several.

        Raises:
            FrameError: the bytes are no request.
        """
        ...

    def wake(self) -> None:
        """Have `requests` give a None. May be called from any thread."""
        ...

    def has_request(self) -> bool:
        """Return whether a request is unread, or the engine has closed the connection."""
        ...

    def reply(self, reply: Reply | bytes) -> None:
        """Send a reply, or the frame of one; return when all of it is sent."""
        ...

    def fileno(self) -> int:
        """Return the descriptor that requests come from: its end is the engine's."""
        ...


@attrs.frozen
class FdTransport:
    """Transport over file descriptors: two pipes, or one stream socket for both directions."""

    requests_fd: int  # to read from
    replies_fd: int  # to write to
    _wakes: tuple[int, int] = attrs.field(factory=os.pipe, init=False)  # to read from, to write to

    @classmethod
    def take_over_standard_streams(cls) -> FdTransport:
        """Talk over standard input and output, which become empty and the log for the rest of the program."""
        transport = cls(os.dup(0), os.dup(1))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)  # a stray `print` goes to the log and is not taken for a reply
        os.close(nothing)
        return transport

    def requests(self) -> Iterator[Request | None]:
        reader, poll = REQUESTS.reader(), select.poll()
        for fd in (self.requests_fd, self._wakes[0]):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            # First what the device is to do next: it may be about to run out of work.
            if self.requests_fd in ready:
                if not (data := self._read(reader.num_missing)):
                    break
                reader.feed(data)
                yield from REQUESTS.messages(reader)
            if self._wakes[0] in ready:
                os.read(self._wakes[0], SHORT_BYTES)
                yield None
        reader.close()

    def _read(self, num_expected: int) -> bytes:
        if num_expected > SHORT_BYTES:
            with suppress(MemoryError):
                return os.read(self.requests_fd, min(num_expected, LONG_BYTES))
        data = os.read(self.requests_fd, SHORT_BYTES)
        if len(data) == SHORT_BYTES and self.has_request():
            # Not from the beginning: each read takes memory for the most that it may give.
            with suppress(MemoryError):
                data += os.read(self.requests_fd, READ_BYTES)
        return data

    def wake(self) -> None:
        os.write(self._wakes[1], b"\0")

    def has_request(self) -> bool:
        poll = select.poll()
        poll.register(self.requests_fd, select.POLLIN)
        return bool(poll.poll(0))

    def reply(self, reply: Reply | bytes) -> None:
        rest = memoryview(reply if isinstance(reply, bytes) else REPLIES.pack(reply))
        while rest:
            rest = rest[os.write(self.replies_fd, rest) :]

    def fileno(self) -> int:
        return self.requests_fd


def serve(load: Load, transport: Transport, prepare: Callable[[OnProgress], None] | None = None) -> NoReturn:
    """Load a model, compute plans until the requests end, and end the process.

    Args:
        load: makes the runner; its exceptions, like those of the runner, are sent as a reply and end the process.
        transport: to the engine.
        prepare: imports what `load` will need.
    """
    try:
        with typed_shortages("starting the model runner"):
            _end_with_parent(transport.fileno())
        faulthandler.enable()  # a segmentation fault leaves its stack in the engine's log
        for reply in _replies(load, transport, prepare):
            transport.reply(reply)
    except ConnectionError:
        _leave(0)  # the engine has gone
    except BaseException as error:
        _log_mistake(error)
        transport.reply(describe(error))
        _leave(1)
    _leave(0)


def _log_mistake(error: BaseException) -> None:
    """Write an exception with its traceback to the log, unless its sentence says all."""
    if not isinstance(error, ConfigError | ModelError | ResourceShortage | UnknownWorkerMethod):
        traceback.print_exception(error)


def _leave(status: int) -> NoReturn:
    # Nothing needs to be saved, and taking down an interpreter with torch in it takes a second.
    for runner in _writing if status == 0 else ():
        runner.flush()
    sys.stderr.flush()
    os._exit(status)


def _replies(
    load: Load, transport: Transport, prepare: Callable[[OnProgress], None] | None = None
) -> Iterator[Reply | bytes]:
    runner: StepRunner | None = None
    pipeline: StepPipeline | None = None
    for request in transport.requests():
        if pipeline is not None:
            if isinstance(request, StepPlan) and request.num_steps == 1:
                pipeline.submit(request)
                yield from pipeline.finished()
                continue
            # Everything else but a message that is not answered comes after the steps before it.
            is_answered = request is not None and not isinstance(request, Halt | PrepareAdapter)
            yield from pipeline.drain() if is_answered else pipeline.finished()
        if isinstance(request, EngineConfig):
            with typed_shortages("loading the model"):
                runner, info = load(request, transport.reply)
            if request.stores_blocks and isinstance(runner, WritingRunner):
                _writing.append(runner)
            if isinstance(runner, SubmittingRunner):
                pipeline = StepPipeline(runner, transport.wake)
            gc.collect()  # the loaded model is there to stay: no later collection need look at it
            gc.freeze()
            yield attrs.evolve(info, process_id=os.getpid())
        elif runner is None and isinstance(request, StepPlan):
            raise RuntimeError("a model must be loaded before the first step")
        elif runner is not None and isinstance(request, StepPlan):
            # A request that comes while a run is computed is a Halt, or an adapter that the next plan may need.
            yield from steps_of(request, runner.execute, transport.has_request)
        elif isinstance(request, ImportModules):
            if prepare is not None:
                with suppress(Exception):  # the load raises it again, to an engine that waits for a reply
                    prepare(transport.reply)
        elif isinstance(request, CallWorker):
            yield _answer(runner, request)
        elif isinstance(request, Ping):
            yield Pong()
        elif isinstance(request, PrepareAdapter) and isinstance(runner, AdapterRunner):
            # In a thread, so that the next plan is read at once; a step that needs the adapter waits for it. Without a
            # thread that step reads it.
            with suppress(RuntimeError, MemoryError):
                threading.Thread(target=_prepare, args=(runner, request), daemon=True).start()


def _answer(runner: StepRunner | None, request: CallWorker) -> bytes:
    """Make a call into the worker; return the frame of its answer. What it raises is told, and the worker goes on."""
    outcome = WorkerOutcome()
    try:
        args, kwargs = unpack_value(request.arguments, _tensor_of)
        call = WorkerCall(request.target, request.is_on_model, tuple(args), kwargs, request.invalidates)
        outcome = outcome_of(runner, call)
        if outcome.error is None:
            # A frame that is too long is an error of the call, not of the connection.
            return REPLIES.pack(CallAnswer(pack_value(outcome.value, _tensor_bytes)))
    except Exception as error:  # torch raises many kinds for tensors that are not plain bytes
        rule = f"the result of {request.target} must be plain values and tensors that fit into a message; {error}"
        outcome = WorkerOutcome(error=shortage_of(error, "a call into the worker") or TypeError(rule))
    assert outcome.error is not None
    _log_mistake(outcome.error)
    return REPLIES.pack(CallAnswer(b"", describe(outcome.error)))


def _tensor_bytes(value: object) -> bytes | None:
    if "torch" not in sys.modules:  # no model has been loaded, and nothing can be a tensor
        return None
    from triolet.model.tensor_bytes import tensor_bytes

    return tensor_bytes(value)


def _tensor_of(data: bytes) -> object:
    from triolet.model.tensor_bytes import tensor_of

    return tensor_of(data)


def _prepare(runner: AdapterRunner, request: PrepareAdapter) -> None:
    try:
        runner.prepare_adapter(request.path, request.digest, is_pinned=request.is_pinned)
    except Exception as error:  # the step that needs the adapter fails its requests with the reason
        sys.stderr.write(f"adapter {request.path} cannot be prepared: {error}\n")


def _end_with_parent(requests_fd: int) -> None:
    die_with_parent()  # one that died before this line has left the pipe behind, closed
    watch = partial(_watch_parent, requests_fd)
    if (fd := os.environ.pop(lifeline.VARIABLE, None)) is not None:
        hold_lifeline(int(fd), {requests_fd, sys.stderr.fileno()}, watch)
    else:
        threading.Thread(target=watch, name="triolet-parent", daemon=True).start()


def hold_lifeline(fd: int, keep: Collection[int], then: Callable[[], object]) -> None:
    """Start a thread that holds a lifeline (`ipc.lifeline`) for as long as this process lives.

    Args:
        fd: its writing end.
        keep: other descriptors that the thread needs.
        then: called in the thread; it returns when the process is to end.
    """
    os.set_inheritable(fd, False)
    is_alone: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def sleep() -> None:
        is_alone.put(_unshare_descriptors({fd, *keep}))
        then()

    threading.Thread(target=sleep, name="triolet-lifeline", daemon=True).start()
    if is_alone.get():
        os.close(fd)


def _unshare_descriptors(kept: Collection[int]) -> bool:
    """Give this thread a descriptor table of its own with only a few open; False where that is not possible."""
    if sys.platform != "linux":
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    borders = [-1, *sorted(kept), LAST_FD + 1]
    flags = CLOSE_RANGE_UNSHARE  # of the first call; from then on the table is this thread's
    for before, behind in reversed(list(itertools.pairwise(borders))):
        if behind - before > 1:
            numbers = (before + 1, behind - 1, flags)
            if syscall(ctypes.c_long(SYS_CLOSE_RANGE), *map(ctypes.c_uint, numbers)):
                return False
            flags = 0
    return True


def _watch_parent(requests_fd: int) -> None:
    poll = select.poll()
    # No event but the end, which is always reported; that of a socket's other end, whose own stays open, is not.
    poll.register(requests_fd, getattr(select, "POLLRDHUP", 0))
    poll.poll()
    _leave(0)


@attrs.define(eq=False)
class ImportReporter:
    """Finder of modules that finds none, and reports that modules are being imported."""

    _on_progress: OnProgress
    _reported_s: float = 0.0

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Leave a module to the next finder."""
        if (now_s := time.monotonic()) - self._reported_s >= IMPORT_REPORT_S:
            self._reported_s = now_s
            self._on_progress(LoadProgress(IMPORTS, 0, 0))


@contextmanager
def imports_reported(on_progress: OnProgress) -> Iterator[None]:
    """Report within this scope that modules are being imported.

    The import of torch takes seconds. Without a sign of life from its middle, a process that hangs in it is
    known to only after a multiple of these.
    """
    reporter = ImportReporter(on_progress)
    sys.meta_path.insert(0, reporter)
    try:
        yield
    finally:
        sys.meta_path.remove(reporter)


def import_model_code(on_progress: OnProgress) -> None:
    """Import torch, and the modules of the model."""
    with imports_reported(on_progress), no_full_collections():
        importlib.import_module("triolet.model.loading.runner")


def load_model(config: EngineConfig, on_progress: OnProgress) -> tuple[StepRunner, ModelInfo]:
    """Load a real model, by default the one that ships with the package; torch is first imported here."""
    if config.model is None:  # of an engine on another machine
        config = attrs.evolve(config, model=str(nano.PATH))
    with imports_reported(on_progress):
        with no_full_collections():
            from triolet.model.loading.runner import load_runner

        return load_runner(config, on_progress)


def run() -> NoReturn:
    """Be the process of a model runner, from its standard streams on."""
    serve(load_model, FdTransport.take_over_standard_streams(), import_model_code)


if __name__ == "__main__":
    run()
