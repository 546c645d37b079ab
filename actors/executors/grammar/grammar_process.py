"""Grammars that are compiled and followed in processes of their own, one for each.

A grammar comes from outside, and its compilation may take for ever, or all the memory there is. So the processes have
limits (`triolet.workers.grammar`), every question has a timeout, and a process that is late or dead is replaced by
a copy that is asked once more. If the second copy dies, too, the grammar is at fault, and its requests fail alone. The
time in which a process waits for a processor is no fault of its grammar, and does not count.

Processes are kept for the next request with the same grammar; when there are too many, the one that was not used for
longest goes. If all are in use, a new grammar waits. A process that is not used any more goes after a time that grows
with the number of requests that have wanted its grammar: a few hostile ones hold much memory for a few seconds.

Few grammars are compiled at one time. The owners of those that wait take turns, so that a hundred hostile grammars of
one key delay those of another one by a single compilation, and a request that waits too long gets an error.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import NoReturn

import attrs
import trio

from triolet.actors.executors.child_process import worker_environment
from triolet.actors.executors.grammar.compiler_turns import CompilerTurns
from triolet.actors.executors.grammar.fd_passing import has_hung_up, send_fd, wait_for_room
from triolet.actors.executors.grammar.grammars import (
    GrammarDead,
    GrammarFailed,
    GrammarLate,
    GrammarRefused,
    Grammars,
    GrammarsDied,
    NoGrammars,
    wrong_grammar,
)
from triolet.core.recovery.recovery_state import RareHangLimit
from triolet.core.recovery.supervision import typed_shortages
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.errors import FrameError, ResourceShortage
from triolet.ipc.grammar import (
    GRAMMAR_REPLIES,
    GRAMMAR_REQUESTS,
    GrammarReply,
    GrammarRequest,
    GrammarState,
    MaskAnswer,
    MaskAnswers,
    MaskQuestion,
    MaskQuestions,
    OpenGrammar,
    Vocabulary,
)
from triolet.ipc.messages import FrameReader

logger = logging.getLogger("triolet.grammar")

PROGRAM: tuple[str, ...] = (sys.executable, "-P", "-m", "triolet.workers.grammar")
READ_BYTES = 2**16
# Limits until each has been seen once; then they are learned, as those of steps are.
START_S = 60.0  # for an interpreter to start and read a vocabulary, on a busy machine
SPLIT_S = 5.0  # for a process to copy itself, likewise
CHECK_S = 0.5  # after which a question that has no answer makes the original show that it is alive
NUM_COMPILERS = 2  # grammars compiled at one time: what they take is taken from the model
IDLE_S = 10.0  # without use, after which a process is ended, for each request that has wanted its grammar
MAX_IDLE_S = 600.0  # the same for all requests together
IDLE_CHECK_S = 5.0
MAX_STARVED = 10  # times its limit that a process may take altogether if it has to wait for a processor
MAX_WAIT = 30  # for a compiler, in units of the time that one grammar may take


def starved_s(process_id: int) -> float:
    """Return how long a process has waited for a processor since its start, seconds; 0 where that is not known."""
    try:
        with open(f"/proc/{process_id}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


@attrs.define(eq=False)
class GrammarLimits:
    """Limits of what the processes of one engine do apart from answering, kept from one original to the next."""

    start: RareHangLimit = attrs.field(factory=lambda: RareHangLimit(START_S))
    split: RareHangLimit = attrs.field(factory=lambda: RareHangLimit(SPLIT_S))


@attrs.define(eq=False)
class GrammarProcess:
    """Connection to one process, and what the process has been sent.

    Args:
        stream: to the process.
        known: how many tokens of each answer it has been sent, by serial.
        ended: serials that it may forget.
        turn: lock that keeps it to one question at a time.
        memory_left: bytes that it could still map at its start; None without a limit.
    """

    stream: trio.SocketStream
    process_id: int = 0
    num_requests: int = 0  # that wanted its grammar
    used_s: float = -math.inf  # last, by Trio's clock
    known: dict[int, int] = attrs.field(factory=dict)
    ended: set[int] = attrs.field(factory=set)
    turn: trio.Lock = attrs.field(factory=trio.Lock)
    memory_left: int | None = None
    _reader: FrameReader = attrs.field(factory=GRAMMAR_REPLIES.reader)
    _pidfd: int | None = None

    def remember(self, process_id: int) -> None:
        """Set the process to kill.

        Raises:
            GrammarDead: it has ended.
        """
        self.process_id = process_id
        if sys.platform == "linux":  # a pidfd: another process may get the same number later
            try:
                self._pidfd = os.pidfd_open(process_id)
            except ProcessLookupError:
                raise GrammarDead("its process has ended") from None

    async def ask_with_learned_limit(
        self, request: GrammarRequest | None, limit: RareHangLimit
    ) -> GrammarReply:
        """Ask within a limit that is learned; otherwise as `ask`."""
        began_s, limit_s = trio.current_time(), limit.limit_s()
        assert limit_s is not None
        try:
            reply = await self.ask(request, limit_s)
        except GrammarLate:
            limit.count_hang()
            raise
        limit.observe(trio.current_time() - began_s)
        return reply

    async def ask(self, request: GrammarRequest | None, timeout_s: float) -> GrammarReply:
        """Send a request (None at the very beginning), and wait for the reply.

        Raises:
            GrammarFailed: there is none; the process is dead.
            ResourceShortage: the process reports one.
        """
        try:
            with trio.fail_after(MAX_STARVED * timeout_s):
                reply = await self._reply_to(request, timeout_s)
        except trio.TooSlowError:
            self.kill()
            raise GrammarLate(f"it takes more than {timeout_s:g} s") from None
        except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError, FrameError):
            self.kill()
            raise GrammarDead("it takes too much memory, or it crashes what compiles it") from None
        except BaseException:
            self.kill()  # cancelled within a question: its late reply would be taken for that of the next
            raise
        if isinstance(reply, GrammarState) and (reply.shortage or reply.crash):
            self.kill()
            if reply.shortage:
                raise ResourceShortage(reply.shortage, "a grammar process")
            logger.error("process %d of a grammar has crashed:\n%s", reply.process_id, reply.crash)
            raise GrammarDead("it crashes what compiles it")
        return reply

    async def _reply_to(self, request: GrammarRequest | None, timeout_s: float) -> GrammarReply:
        began_s, starved_before_s = trio.current_time(), starved_s(self.process_id)
        deadline_s = began_s + timeout_s
        if request is not None:
            with trio.fail_at(deadline_s):
                await self.stream.send_all(GRAMMAR_REQUESTS.pack(request))
        while trio.current_time() < deadline_s:
            with trio.move_on_at(deadline_s):
                return await self._reply()
            deadline_s = began_s + timeout_s + starved_s(self.process_id) - starved_before_s
        raise trio.TooSlowError

    async def _reply(self) -> GrammarReply:
        while (payload := self._reader.next_payload()) is None:
            if not (data := await self.stream.receive_some(READ_BYTES)):
                raise EOFError
            self._reader.feed(data)
        return GRAMMAR_REPLIES.unpack(payload)

    @property
    def is_dead(self) -> bool:
        """True if the connection is closed."""
        return self.stream.socket.fileno() < 0

    def kill(self) -> None:
        """Kill the process. Synchronous; harmless when repeated."""
        self.stream.socket.close()
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = None
        elif self.process_id and sys.platform != "linux":
            with suppress(ProcessLookupError):
                os.kill(self.process_id, signal.SIGKILL)
            self.process_id = 0  # another process may get the same number later


@attrs.define(eq=False)
class _Opening:
    """A grammar that is being compiled; others may want the same one."""

    is_over: trio.Event = attrs.field(factory=trio.Event)
    failure: GrammarFailed | GrammarRefused | ResourceShortage | None = None

    def fail(self) -> NoReturn:
        """Raise the failure to one more task that waits for the same grammar."""
        match self.failure:
            case ResourceShortage(resource=resource, purpose=purpose):
                raise ResourceShortage(resource, purpose)
            case failure:
                assert failure is not None
                raise type(failure)(*failure.args)


class GrammarProcesses:
    """Implementation of `Grammars` by processes; made by `open_processes`."""

    def __init__(
        self,
        original: GrammarProcess,
        *,
        max_grammars: int,
        timeout_s: float,
        memory_bytes: int,
        limits: GrammarLimits,
    ) -> None:
        self._original = original
        self._limits = limits
        self._max_grammars = max_grammars
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._processes: OrderedDict[StructuredOutputsParams, GrammarProcess] = OrderedDict()
        self._users: dict[StructuredOutputsParams, int] = {}
        self._is_closed = False
        self._openings: dict[StructuredOutputsParams, _Opening] = {}
        self._room = trio.lowlevel.ParkingLot()
        self._compilers = CompilerTurns(NUM_COMPILERS)
        self._num_compiled = 0  # grammars that have a place, and no process yet
        self._splitting = trio.Lock()
        self._asked_s: dict[object, float] = {}  # since when each question waits for its answer, oldest first
        self._asking = trio.lowlevel.ParkingLot()  # the check of the original, while there is no question

    async def open(self, params: StructuredOutputsParams, owner: str | None = None) -> None:
        try:
            async with self._in_use(params, owner, MAX_WAIT * self._timeout_s) as process:
                process.num_requests += 1
        except (GrammarFailed, GrammarRefused) as error:
            raise wrong_grammar(params, str(error)) from None

    async def watch(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check_original)
            # The original sends nothing any more, so that a read returns only when it has ended.
            is_alive = True
            while is_alive:
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    with trio.move_on_after(IDLE_CHECK_S) as wait:
                        await self._original.stream.receive_some(1)
                is_alive = wait.cancelled_caught
                self._end_idle()
            nursery.cancel_scope.cancel()
        raise GrammarsDied

    def _end_idle(self) -> None:
        """End the processes whose time without use is over."""
        now_s = trio.current_time()
        for params, process in tuple(self._processes.items()):
            # One that took the place of a dead process has been wanted by no request yet.
            kept_s = min(IDLE_S * max(1, process.num_requests), MAX_IDLE_S)
            if params not in self._users and process.used_s <= now_s - kept_s:
                self._processes.pop(params).kill()

    async def _check_original(self) -> None:
        """Have a copy made whenever a question is late: what stopped its process may have stopped the original, too.

        So the two hangs are noticed at the same time, and not one after the other.
        """
        while True:
            if not self._asked_s:
                await self._asking.park()
            await trio.sleep(CHECK_S)
            oldest_s = next(iter(self._asked_s.values()), math.inf)
            if trio.current_time() - oldest_s >= CHECK_S:
                with suppress(ResourceShortage, GrammarsDied):  # the connection is closed then
                    (await self._split()).kill()

    async def guide(
        self, params: StructuredOutputsParams, answers: dict[int, tuple[int, ...]]
    ) -> tuple[MaskAnswer, ...]:
        # A process may have died of something other than the question, so it is replaced once.
        try:
            return await self._guide(params, answers)
        except GrammarFailed:
            return await self._guide(params, answers)

    async def _guide(
        self, params: StructuredOutputsParams, answers: dict[int, tuple[int, ...]]
    ) -> tuple[MaskAnswer, ...]:
        async with self._in_use(params) as process, process.turn:
            steps = tuple(_step(process, serial, token_ids) for serial, token_ids in answers.items())
            request = MaskQuestions(steps, tuple(process.ended))
            process.ended.clear()
            reply = await self._timed(process, request, self._timeout_s)
            if not isinstance(reply, MaskAnswers) or len(reply.steps) != len(steps):
                process.kill()
                raise GrammarFailed("its process answers what was not asked")
        return reply.steps

    async def _timed(
        self, process: GrammarProcess, request: GrammarRequest, timeout_s: float
    ) -> GrammarReply:
        with self._timing():
            return await process.ask(request, timeout_s)

    @contextmanager
    def _timing(self) -> Iterator[None]:
        question = object()
        self._asked_s[question] = trio.current_time()
        self._asking.unpark_all()
        try:
            yield
        finally:
            del self._asked_s[question]

    @property
    def is_timed(self) -> bool:
        return bool(self._asked_s)

    def forget(self, is_live: Callable[[int], bool]) -> None:
        for process in self._processes.values():
            for serial in [serial for serial in process.known if not is_live(serial)]:
                del process.known[serial]
                process.ended.add(serial)

    @asynccontextmanager
    async def _in_use(
        self, params: StructuredOutputsParams, owner: str | None = None, max_wait_s: float = math.inf
    ) -> AsyncGenerator[GrammarProcess]:
        """Yield the process of a grammar, and keep it running within the scope."""
        self._users[params] = self._users.get(params, 0) + 1
        try:
            process = await self._find(params, owner, max_wait_s)
            try:
                yield process
            finally:
                process.used_s = trio.current_time()
                if process.is_dead and self._processes.get(params) is process:
                    # Only its users learn of its death. It would keep the place that one of them waits for.
                    del self._processes[params]
                    self._room.unpark()
        finally:
            self._users[params] -= 1
            if not self._users[params]:
                del self._users[params]
                self._room.unpark()

    async def _find(
        self, params: StructuredOutputsParams, owner: str | None, max_wait_s: float
    ) -> GrammarProcess:
        while (process := self._processes.get(params)) is None:
            if (other := self._openings.get(params)) is not None:
                await other.is_over.wait()
                if other.failure is not None:
                    other.fail()
                continue
            opening = self._openings[params] = _Opening()
            try:
                async with self._compilers.turn(owner, max_wait_s), self._place():
                    self._processes[params] = await self._compiled(params)
            except (GrammarFailed, GrammarRefused, ResourceShortage) as error:
                if self._is_closed or has_hung_up(self._original.stream.socket):
                    raise GrammarsDied from None  # and took this one along
                opening.failure = error
                raise
            finally:
                del self._openings[params]
                opening.is_over.set()
                del opening  # the traceback of its failure refers to this frame
        self._processes.move_to_end(params)
        return process

    @asynccontextmanager
    async def _place(self) -> AsyncGenerator[None]:
        """Hold the place of one more process within the scope."""
        await self._make_room()
        self._num_compiled += 1
        try:
            yield
        finally:
            self._num_compiled -= 1

    async def _make_room(self) -> None:
        """Kill the process least recently used; wait if all are in use."""
        while len(self._processes) + self._num_compiled >= self._max_grammars:
            if self._is_closed:
                raise GrammarsDied
            idle = next((params for params in self._processes if params not in self._users), None)
            if idle is None:
                await self._room.park()
            else:
                self._processes.pop(idle).kill()

    async def _compiled(self, params: StructuredOutputsParams) -> GrammarProcess:
        process = await self._split()
        try:
            state = await self._timed(process, OpenGrammar(params, self._memory_bytes), self._timeout_s)
            if not isinstance(state, GrammarState) or state.problem:
                raise GrammarRefused(getattr(state, "problem", "its process is confused"))
        except GrammarDead:
            if process.memory_left is None or process.memory_left >= self._memory_bytes:
                raise
            # The compiler aborts where it gets no memory, and it could not have what a grammar may take.
            raise ResourceShortage("memory", "compiling a grammar") from None
        except BaseException:
            process.kill()
            raise
        return process

    async def _split(self) -> GrammarProcess:
        """Make a copy of the original.

        Raises:
            GrammarsDied: the original is dead.
            ResourceShortage: no process can be started now.
        """
        purpose = "a grammar process"
        process, theirs = _connected(purpose)
        try:
            with typed_shortages(purpose), theirs:
                async with self._splitting:
                    await wait_for_room(self._original.stream.socket)
                    send_fd(self._original.stream.socket, theirs.fileno())
                    theirs.close()  # from here on it is the copy's alone, and ends with it
                    with self._timing():
                        state = await process.ask_with_learned_limit(None, self._limits.split)
                process.remember(state.process_id)
                process.memory_left = state.memory_left if isinstance(state, GrammarState) else None
        except (OSError, GrammarFailed, trio.ClosedResourceError) as error:
            process.kill()
            if isinstance(error, GrammarDead) and not has_hung_up(self._original.stream.socket):
                # The system could not hand over the socket, or ended the copy at once.
                raise ResourceShortage("memory or file descriptors", purpose) from None
            self._original.kill()  # it may be alive but useless: only its death makes the actor start another one
            raise GrammarsDied from None
        except BaseException:
            process.kill()
            raise
        return process

    def close(self) -> None:
        """Kill all processes, and wake the tasks that wait for one: they raise `GrammarsDied`."""
        self._is_closed = True
        self._room.unpark_all()
        for process in (*self._processes.values(), self._original):
            process.kill()
        self._processes.clear()


def _step(process: GrammarProcess, serial: int, token_ids: tuple[int, ...]) -> MaskQuestion:
    start = process.known.get(serial, 0)
    process.known[serial] = max(start, len(token_ids))  # an older question may come late
    return MaskQuestion(serial, start, token_ids[start:])


def _connected(purpose: str) -> tuple[GrammarProcess, socket.socket]:
    """Return a connection, and its other end for the process that is to be started.

    Raises:
        ResourceShortage: there is no descriptor left.
    """
    with typed_shortages(purpose):
        ours, theirs = socket.socketpair()
    return GrammarProcess(trio.SocketStream(trio.socket.from_stdlib_socket(ours))), theirs


def _start(connection: socket.socket) -> subprocess.Popen[bytes]:
    """Start the program at the other end of a connection; blocks for a millisecond or two."""
    return subprocess.Popen(
        (*PROGRAM, str(connection.fileno()), str(os.getpid())),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[connection.fileno()],
        start_new_session=True,  # which the program gives a low priority, also beside the model's session
        env=worker_environment(),
    )


@asynccontextmanager
async def open_processes(
    vocabulary: Vocabulary, *, max_grammars: int, timeout_s: float, memory_bytes: int, limits: GrammarLimits
) -> AsyncGenerator[Grammars]:
    """Start the process that all others are forked from; all are killed at the end of the scope.

    Args:
        max_grammars: processes at one time.
        timeout_s: for one compilation, and for the answer to one question, seconds.
        memory_bytes: of one grammar.
        limits: learned from the originals before this one.
    Raises:
        ResourceShortage: it cannot be started now.
    """
    original, popen, problem = await _start_original(vocabulary, limits.start)
    try:
        if problem:
            yield NoGrammars(f"structured_outputs must be None: {problem}")
            return
        grammars = GrammarProcesses(
            original,
            max_grammars=max_grammars,
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
            limits=limits,
        )
        try:
            yield grammars
        finally:
            grammars.close()
    finally:
        _end_original(original, popen)


async def _start_original(
    vocabulary: Vocabulary, limit: RareHangLimit
) -> tuple[GrammarProcess, subprocess.Popen[bytes], str]:
    """Start the process that all others are forked from.

    Returns:
        The connection, the process, and why no grammar works with the vocabulary; "" if some do.
    Raises:
        ResourceShortage: it cannot be started now.
    """
    purpose = "the process that grammar processes are copies of"
    while True:
        original, theirs = _connected(purpose)
        try:
            with typed_shortages(purpose), theirs:
                popen = _start(theirs)
        except BaseException:
            original.kill()
            raise
        limit_s = limit.limit_s()
        try:
            state = await original.ask_with_learned_limit(vocabulary, limit)
        except GrammarDead:
            _end_original(original, popen)
            # The interpreter died before it could report the shortage.
            raise ResourceShortage("memory", purpose) from None
        except GrammarLate:
            _end_original(original, popen)
            if limit_s is not None and limit_s < START_S:
                continue  # with twice the time: the machine may only have become slow
            raise ResourceShortage("processor time", purpose) from None
        except BaseException:
            _end_original(original, popen)
            raise
        return (
            original,
            popen,
            state.problem if isinstance(state, GrammarState) else "its process is confused",
        )


def _end_original(original: GrammarProcess, popen: subprocess.Popen[bytes]) -> None:
    original.kill()
    popen.kill()
    popen.wait()
