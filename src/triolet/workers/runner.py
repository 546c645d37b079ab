"""The process of the model runner: `python -m triolet.workers.runner`, started by `actors.executors.process` and by
nobody else.

It reads requests from what was its standard input and writes replies to what was its standard output: an `EngineConfig`
to load, then one `StepPlan` after the other (`ipc.messages`). It ends when the requests end, and after the first
exception: half a step may be in its tables, and whatever a driver or a library has broken is best left behind with the
process.

It never outlives its parent. Linux kills it when the thread that started it ends, however that ends. Elsewhere, and
should that fail, a thread here watches the pipe: once nobody can send requests any more, nobody waits for replies, and
the process ends, also in the middle of a step. The same thread holds the lifeline, by whose end the parent knows of
this process's (`ipc.lifeline`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import itertools
import os
import queue
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import NoReturn, Protocol

import attrs

from triolet.config.engine import EngineConfig
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult
from triolet.ipc import lifeline
from triolet.ipc.failures import describe
from triolet.ipc.messages import REPLIES, REQUESTS, Reply, Request

READ_BYTES = 2**16  # what a pipe holds on Linux
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
LAST_FD = 2**32 - 1
SYS_CLOSE_RANGE = 436  # on every architecture
CLOSE_RANGE_UNSHARE = 2  # from <linux/close_range.h>


class RunnerProgram(Protocol):
    """What the process drives: `model.runner.ModelRunner`, or a fake."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        ...


Load = Callable[[EngineConfig, OnProgress], tuple[RunnerProgram, ModelInfo]]


@attrs.frozen
class Pipe:
    """The process's side of the conversation; it waits where the other side does not.

    Args:
        requests_fd: to read from.
        replies_fd: to write to.
    """

    requests_fd: int
    replies_fd: int

    def requests(self) -> Iterator[Request]:
        """What is asked, until the other side has closed its end.

        Raises:
            FrameError: what came is no request.
        """
        reader = REQUESTS.reader()
        while data := os.read(self.requests_fd, READ_BYTES):
            reader.feed(data)
            yield from REQUESTS.messages(reader)
        reader.close()

    def has_request(self) -> bool:
        """Whether something is asked that has not been read, or the other side has closed its end."""
        poll = select.poll()
        poll.register(self.requests_fd, select.POLLIN)
        return bool(poll.poll(0))

    def reply(self, reply: Reply) -> None:
        """Say something; returns when all of it is on its way."""
        rest = memoryview(REPLIES.pack(reply))
        while rest:
            rest = rest[os.write(self.replies_fd, rest) :]


def serve(load: Load) -> NoReturn:
    """Load, then compute what is asked, until nobody asks any more.

    Args:
        load: makes the runner; its exceptions, like those of the runner, end the process and are told before.
    """
    pipe = _take_over_standard_streams()
    _die_with_parent(pipe.requests_fd)
    faulthandler.enable()  # a segmentation fault leaves its stack in the engine's log
    try:
        for reply in _replies(load, pipe):
            pipe.reply(reply)
    except BrokenPipeError:
        _leave(0)  # nobody listens any more
    except BaseException as error:
        traceback.print_exc()
        pipe.reply(describe(error))
        _leave(1)
    _leave(0)


def _leave(status: int) -> NoReturn:
    # There is nothing to save, and taking down an interpreter with torch in it takes a second.
    sys.stderr.flush()
    os._exit(status)


def _replies(load: Load, pipe: Pipe) -> Iterator[Reply]:
    runner: RunnerProgram | None = None
    for request in pipe.requests():
        if isinstance(request, EngineConfig):
            runner, info = load(request, pipe.reply)
            gc.collect()  # what is there now is there to stay, and no later collection need look at it
            gc.freeze()
            yield attrs.evolve(info, process_id=os.getpid())
        elif runner is None and isinstance(request, StepPlan):
            raise RuntimeError("a model must be loaded before the first step")
        elif runner is not None and isinstance(request, StepPlan):
            yield from _results(runner, request, pipe)


def _results(runner: RunnerProgram, plan: StepPlan, pipe: Pipe) -> Iterator[StepResult]:
    while True:
        result = runner.execute(plan)
        if (rest := plan.after(result)) is None or pipe.has_request():  # which can only be to halt
            yield result
            return
        yield attrs.evolve(result, is_last=False)
        plan = rest


def _take_over_standard_streams() -> Pipe:
    """Whatever prints from now on prints into the log; a stray `print` can not be taken for a reply."""
    pipe = Pipe(os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return pipe


def _die_with_parent(requests_fd: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that died before this line has left the pipe behind, closed.
    watch = partial(_watch_parent, requests_fd)
    if (fd := os.environ.pop(lifeline.VARIABLE, None)) is not None:
        hold_lifeline(int(fd), {requests_fd, sys.stderr.fileno()}, watch)
    else:
        threading.Thread(target=watch, name="triolet-parent", daemon=True).start()


def hold_lifeline(fd: int, keep: Collection[int], then: Callable[[], object]) -> None:
    """Have a thread hold a lifeline (`ipc.lifeline`) for as long as this process lives.

    Args:
        fd: its writing end.
        keep: other descriptors that the thread needs.
        then: what it does; returns when the process is to end.
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
    """Give this thread a table of its own, in which only a few are open; False if there is no such thing here."""
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
    poll.register(requests_fd, 0)  # nothing but the end, which is always reported
    poll.poll()
    _leave(0)


def load_model(config: EngineConfig, on_progress: OnProgress) -> tuple[RunnerProgram, ModelInfo]:
    """Load a real model; torch is first imported here."""
    from triolet.model.runner import load_configured_runner

    return load_configured_runner(config, on_progress)


if __name__ == "__main__":
    serve(load_model)
