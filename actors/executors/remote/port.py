"""Port that workers on other machines connect to, and the workers that wait there to be taken.

Anyone can connect. A peer has `HANDSHAKE_S` and a kilobyte to prove that it knows the token; of the peers that have not
yet, the oldest is dropped for the newest, so that slow ones keep no worker out.
"""

from __future__ import annotations

import logging
import math
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from triolet.actors.executors.remote.handshaking import admit, watch_other_end
from triolet.actors.executors.remote.link import WorkerLink
from triolet.config.address import Address
from triolet.config.engine import EngineConfig
from triolet.core.request.model_info import ModelInfo
from triolet.errors import ConfigError, FrameError, RunnerDied, WorkerRefused

logger = logging.getLogger("triolet.runner")

HANDSHAKE_S = 5.0
MAX_UNKNOWN = 64  # peers that have not proven anything
BACKLOG = 128
RETRY_S = 0.1
LOG_S = 1.0  # between two lines about peers that were refused


class WorkerPort:
    """Port of an engine.

    Args:
        address: to listen at; port 0 takes a free one.
        token: that workers must know.
        tls: settings of TLS, or None.
        num_ranks: processes that each worker is to start.
    Raises:
        ConfigError: there is nothing to listen at.
    """

    def __init__(
        self, address: Address, token: str, tls: ssl.SSLContext | None = None, num_ranks: int = 1
    ) -> None:
        self._token, self._tls, self._num_ranks = token, tls, num_ranks
        try:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            self._socket = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
        except OSError as error:
            rule = f"an address of this machine with a free port ({error})"
            raise ConfigError("worker_listen", rule, str(address)) from None
        self.address = Address(address.host, self._socket.getsockname()[1])
        self.on_start: Callable[[Address, str], None] = lambda address, token: None
        """Called with address and token when the port begins to listen."""
        self.on_want: Callable[[int], None] = lambda num_workers: None
        """Called with the number of workers that there should be, again and again."""
        self.kv_cache: ModelInfo | None = None
        """Model of the first worker that has loaded one."""
        self.closed = trio.Event()
        """Set when nothing of the port is left."""
        self._scope: trio.CancelScope | None = None
        self._unknown: deque[trio.CancelScope] = deque()
        self._groups: dict[bytes, dict[int, WorkerLink]] = {}  # ranks of each worker that is here
        self._ready: deque[tuple[WorkerLink, ...]] = deque()  # workers, each by its ranks
        self._links: set[WorkerLink] = set()
        self._arrived = trio.lowlevel.ParkingLot()
        self._logged_s, self._num_refused = -math.inf, 0

    @classmethod
    def of(cls, config: EngineConfig) -> WorkerPort:
        """Return the port that a configuration names.

        Raises:
            ConfigError: a field is missing or wrong.
        """
        if config.worker_listen is None:
            raise ConfigError("worker_listen", f"HOST:PORT with runner {config.runner!r}", None)
        if config.worker_token is None:
            raise ConfigError("worker_token", f"a text with runner {config.runner!r}", None)
        address = Address.parse(config.worker_listen)
        return cls(address, config.worker_token, tls_of(config), config.tensor_parallel_size)

    def start(self) -> None:
        """Begin to take connections, unless that has begun."""
        if self._scope is None:
            self._scope = trio.CancelScope()
            logger.info("workers can connect to %s", self.address)
            # A system task, since workers come and wait also between two lives of an executor.
            trio.lowlevel.spawn_system_task(self._listen, self._scope)
            self.on_start(self.address, self._token)

    def close(self) -> None:
        """Stop listening, and close the connections of all workers; see `closed`."""
        for link in [*self._links]:
            link.discard()
        if self._scope is None:
            self._socket.close()
            self.closed.set()
        else:
            self._scope.cancel()

    @property
    def num_ready(self) -> int:
        """Number of workers that wait to be taken."""
        return len(self._ready)

    def want(self, num_workers: int) -> None:
        """Say how many workers there should be, those that are taken included; see `on_want`."""
        self.on_want(num_workers)

    def has_taken(self, prefix: str) -> bool:
        """Return whether a worker that has a name with this beginning was taken, and lives."""
        waiting = {link for ranks in self._ready for link in ranks}
        return any(link.is_prepared and link.name.startswith(prefix) for link in self._links - waiting)

    async def take(self) -> tuple[WorkerLink, ...]:
        """Wait for a worker that is ready, and return its ranks."""
        await trio.lowlevel.checkpoint()
        while not self._ready:
            logger.info("waiting for a worker to connect to %s", self.address)
            await self._arrived.park()
        return self._ready.popleft()

    async def _listen(self, scope: trio.CancelScope) -> None:
        try:
            with scope, self._socket:
                await self._accept()
        except Exception:  # nothing but a bug; an error of a system task would end all of Trio
            logger.exception("the port for workers has failed")
        finally:
            self.closed.set()

    async def _accept(self) -> None:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._socket))
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    nursery.start_soon(self._serve, await listener.accept())
                except Exception as error:  # no descriptor or memory is free, or the peer has left already
                    logger.warning("a connection to %s cannot be taken: %r", self.address, error)
                    await trio.sleep(RETRY_S)

    async def _serve(self, socket_stream: trio.SocketStream) -> None:
        """Take a connection; whatever its other end does, it ends at most this connection."""
        stream: trio.abc.Stream = socket_stream
        try:
            with trio.move_on_after(HANDSHAKE_S) as patience, self._counted(patience):
                watch_other_end(socket_stream.socket)
                if self._tls is not None:
                    secured = trio.SSLStream(socket_stream, self._tls, server_side=True)
                    await secured.do_handshake()
                    stream = secured
                hello = await admit(stream, self._token, self._num_ranks)
            if patience.cancelled_caught:
                self._refused(f"it must prove within {HANDSHAKE_S} s that it knows the worker token")
                return
            name = "".join(char if char.isprintable() else "?" for char in hello.name)
            rank = "" if self._num_ranks == 1 else f", rank {hello.rank}"
            await self._offer(
                WorkerLink(stream, socket_stream.socket, name, f"{name}, process {hello.process_id}{rank},"),
                hello.group,
                hello.rank,
            )
        except (WorkerRefused, FrameError) as error:
            self._refused(str(error))
        except Exception as error:
            # The bytes of a stranger may make anything fail; they harm only this connection.
            self._refused(f"it must be a worker; its connection ended ({type(error).__name__})")
        finally:
            socket_stream.socket.close()

    @contextmanager
    def _counted(self, patience: trio.CancelScope) -> Iterator[None]:
        """Count a peer as unknown; the oldest of too many is dropped."""
        self._unknown.append(patience)
        if len(self._unknown) > MAX_UNKNOWN:
            self._unknown[0].cancel()
        try:
            yield
        finally:
            self._unknown.remove(patience)

    async def _offer(self, link: WorkerLink, worker: bytes, rank: int) -> None:
        """Hold a rank until its end; when all of its worker are prepared, that can be taken.

        Args:
            worker: the same for all of its ranks.
        Raises:
            FrameError: there is no such rank, or the worker has it already.
        """
        if rank in self._groups.get(worker, {}) or not 0 <= rank < self._num_ranks:
            raise FrameError(
                f"a worker must have each of the ranks 0 to {self._num_ranks - 1} once; got rank {rank}"
            )
        ranks = self._groups.setdefault(worker, {})
        ranks[rank] = link
        self._links.add(link)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.keep)
                try:
                    await link.prepare()
                except RunnerDied as death:
                    logger.warning("%s", death)
                else:
                    self._prepared(link, ranks)
        finally:
            self._links.discard(link)
            for each in ranks.values():  # a worker without one of its ranks is none
                each.discard()
            if self._groups.pop(worker, None) is not None:
                self._ready = deque(one for one in self._ready if link not in one)

    def _prepared(self, link: WorkerLink, ranks: dict[int, WorkerLink]) -> None:
        link.is_prepared = True
        if len(ranks) == self._num_ranks and all(each.is_prepared for each in ranks.values()):
            logger.info("a worker is ready: %s", link.worker.rstrip(","))
            self._ready.append(tuple(ranks[number] for number in range(self._num_ranks)))
            self._arrived.unpark()

    def _refused(self, sentence: str) -> None:
        """Log that a peer was refused; at most a line a second, since peers can be many."""
        self._num_refused += 1
        if (now_s := trio.current_time()) - self._logged_s >= LOG_S:
            more = f" ({self._num_refused - 1} others before it)" if self._num_refused > 1 else ""
            logger.warning("a connection to %s is refused: %s%s", self.address, sentence, more)
            self._logged_s, self._num_refused = now_s, 0


def tls_of(config: EngineConfig) -> ssl.SSLContext | None:
    """Return the TLS settings of the port; None without a certificate.

    Raises:
        ConfigError: the certificate or its key cannot be used.
    """
    if config.worker_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.worker_certfile)
    except (OSError, ssl.SSLError) as error:
        rule = f"a certificate chain with its private key ({error})"
        raise ConfigError("worker_certfile", rule, config.worker_certfile) from None
    return context
