"""Program of the grammar processes: `python -m triolet.workers.grammar FD PARENT`.

Started by `actors.executors.grammar.grammar_process`.

The first one reads the vocabulary, once, and then only forks: each grammar gets a copy of it, which shares the
vocabulary's memory and serves that one grammar until its socket is closed. A process that takes too long is killed, and
one that takes too much memory dies of its limit; neither affects any other grammar.

FD is a Unix socket: first a `Vocabulary`, answered with a `GrammarState`, then one byte for each copy that is wanted,
with the socket that the copy is to serve. If there is no process or memory left for a copy, the answer on that socket
says so, and the first process goes on.

PARENT is the id of the engine's process. No grammar process outlives its parent, whatever it is doing: Linux kills it.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from triolet.core.recovery.supervision import shortage_of
from triolet.ipc.grammar import (
    GRAMMAR_REPLIES,
    GRAMMAR_REQUESTS,
    GrammarReply,
    GrammarRequest,
    GrammarState,
    MaskAnswers,
    MaskQuestions,
    OpenGrammar,
    Vocabulary,
)
from triolet.workers.parent_death import die_with_parent
from triolet.workers.priority import lower_priority

if TYPE_CHECKING:
    from triolet.structured_outputs.compiler import Grammar, GrammarVocabulary

READ_BYTES = 2**16
NICENESS = 10
MAX_CRASH_CHARS = 4_000


def main(connection: socket.socket, parent_id: int | None = None) -> NoReturn:
    """Read the vocabulary, then fork a copy for each request, until the connection is closed."""
    die_with_parent(os.getppid() if parent_id is None else parent_id)
    # A grammar may take a core for seconds, which the event loop and the model need for everything else.
    lower_priority(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's business
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the copies
    tokens = _read_vocabulary(connection)
    while True:
        request, fds, _, _ = socket.recv_fds(connection, 1, 1)
        if not request:
            os._exit(0)
        # Without a free descriptor the system has closed the socket instead of handing it over: its end is the answer.
        for fd in fds:
            _split(tokens, connection, fd)


def _split(tokens: GrammarVocabulary, connection: socket.socket, fd: int) -> None:
    """Fork a copy that serves the socket `fd`, or report there why it cannot be started."""
    original_id = os.getpid()
    with socket.socket(fileno=fd) as client:
        try:
            is_copy = os.fork() == 0
        except OSError as error:
            with suppress(OSError):  # the client has left
                _reply(client, _state_of(error, "a grammar process"))
            return
        if is_copy:
            die_with_parent(original_id)
            connection.close()
            _serve(tokens, client)


def _state_of(error: Exception, purpose: str) -> GrammarState:
    shortage = shortage_of(error, purpose)
    resource = "" if shortage is None else shortage.resource
    return GrammarState(os.getpid(), str(error) or type(error).__name__, resource)


def _read_vocabulary(connection: socket.socket) -> GrammarVocabulary:
    vocabulary = next(_requests(connection))
    if not isinstance(vocabulary, Vocabulary):
        raise TypeError(f"the first word must be a Vocabulary; got a {type(vocabulary).__name__}")
    try:
        from triolet.structured_outputs.compiler import (
            GrammarVocabulary,
        )  # imported here, so that a failure can be reported

        tokens = GrammarVocabulary(vocabulary)
    except (ValueError, MemoryError, ImportError, OSError) as error:
        _reply(connection, _state_of(error, "reading the vocabulary"))
        os._exit(0)
    _reply(connection, GrammarState(os.getpid(), ""))
    return tokens


def _serve(tokens: GrammarVocabulary, connection: socket.socket) -> NoReturn:
    """Serve one grammar, from its compilation to its last answer."""
    grammar: Grammar | None = None
    try:
        _reply(connection, GrammarState(os.getpid(), "", memory_left=_memory_left()))
        for request in _requests(connection):
            if isinstance(request, OpenGrammar):
                try:
                    grammar, problem = _compile(tokens, request)
                except MemoryError as error:
                    _reply(connection, _state_of(error, "compiling a grammar"))
                    break
                _reply(connection, GrammarState(os.getpid(), problem))
            elif isinstance(request, MaskQuestions) and grammar is not None:
                grammar.forget(request.ended)
                guided = tuple(map(grammar.next_mask, request.steps))
                _reply(connection, MaskAnswers(guided, os.getpid()))
            else:
                break
    except (BrokenPipeError, ConnectionResetError):
        pass  # the engine has closed the connection
    except MemoryError:
        os._exit(1)  # the limit of the grammar's memory; there may be none left to say so
    except BaseException:  # a panic in foreign code is no Exception
        crash = traceback.format_exc()[-MAX_CRASH_CHARS:]
        with suppress(OSError):  # the client has left
            _reply(connection, GrammarState(os.getpid(), "", crash=crash))
        os._exit(1)
    finally:
        os._exit(0)


def _compile(tokens: GrammarVocabulary, request: OpenGrammar) -> tuple[Grammar | None, str]:
    from triolet.structured_outputs.compiler import Grammar, InvalidGrammar

    has_its_memory = not request.memory_bytes or _limit_memory(request.memory_bytes)
    try:
        return Grammar(tokens, request.params), ""
    except InvalidGrammar as error:
        return None, str(error)
    except MemoryError:
        if not has_its_memory:  # a shortage of the machine's, and no fault of the grammar
            raise
        return None, f"it takes more than {request.memory_bytes} bytes of memory"


def _limit_memory(num_bytes: int) -> bool:
    """Limit the memory that this process may take from here on; return False if less is left than that."""
    if sys.platform != "linux":  # a limit on mapped memory also limits the memory in use
        return True
    # An operator's limit stays: only root may raise it, and it would be no limit if that were done.
    left = _memory_left()
    least = _num_mapped() + (num_bytes if left is None else min(num_bytes, left))
    resource.setrlimit(resource.RLIMIT_AS, (least, least))
    return left is None or left >= num_bytes


def _memory_left() -> int | None:
    """Return the bytes that this process may still map; None without a limit."""
    limits = [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
    return max(min(limits) - _num_mapped(), 0) if limits and sys.platform == "linux" else None


def _num_mapped() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _requests(connection: socket.socket) -> Iterator[GrammarRequest]:
    reader = GRAMMAR_REQUESTS.reader()
    while data := connection.recv(READ_BYTES):
        reader.feed(data)
        yield from GRAMMAR_REQUESTS.messages(reader)


def _reply(connection: socket.socket, reply: GrammarReply) -> None:
    connection.sendall(GRAMMAR_REPLIES.pack(reply))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
