"""`triolet serve`: engine, gateway and listener, until a signal.

    engine             its own tree of actors
    gateway            nursery of the answers that outlive their connection
    gateway_sup        one_for_one, 10 in 10 s
      front            listener; a failure of one connection ends only that one, any other failure restarts it

The first signal drains: new requests are answered with 503, and running ones may finish within the grace period.
Shortly before its end they end with what they have; resumable ones are written to a file for the next server. The
second signal ends the server at once. Neither waits for a client that does not read.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import attrs
import trio

from triolet.actors.supervisor import ChildSpec, Supervisor
from triolet.cli.loading import opened
from triolet.config.engine import EngineConfig
from triolet.config.fields import variable_name
from triolet.config.server import GatewayConfig
from triolet.core.recovery.supervision import Restart, Strategy
from triolet.engine.engine import Engine
from triolet.engine.gc_freeze import collect_in_short_steps, freeze_gc
from triolet.errors import ConfigError, EngineUnhealthy
from triolet.protocol.access import Access
from triolet.server import create_app
from triolet.server.models.host import FurtherModel, check_adapter_names
from triolet.server.responses.service import ResponsesService, open_gateway
from triolet.server.responses.snapshot_file import check_directory, restore_responses, save_responses
from triolet.server.transport.client_stream import InputBudget
from triolet.server.transport.listener import Listener, bind, tls_context
from triolet.server.transport.serving_process import prepare_to_serve
from triolet.server.transport.shutdown import StopSignals, drain_deadlines

CHECK_INTERVAL_S = 1.0
# What allocates meanwhile waits, also the event loop: a third of a millisecond for each MB that was freed.
TRIM_INTERVAL_S = 2.0
NUM_TRIMS = 8  # after the last long body: what it asked for may still have been in work
FREED_BLOCKS = 50_000  # of Python's allocator, that are worth a look: some 5 MB
# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8

logger = logging.getLogger("triolet.serve")


def run(
    gateway: GatewayConfig, config: EngineConfig, models: Mapping[str, FurtherModel] | None = None
) -> None:
    """Serve until a signal comes.

    Args:
        config: of the first model, which is loaded at once; with further ones it sleeps when it has been idle as long
            as they may be.
        models: further models, by name.

    Raises:
        ConfigError: the address, the port or the certificate cannot be used; the snapshot or the journal cannot be
            written to its folder, or both are given; `lora_dir` is given without `enable_lora`; or an adapter has the
            name of another one, or of a model.
        SystemExit: with 130 after a Ctrl-C; SIGTERM ends the program with 0.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    prepare_to_serve()
    share_heaps()
    if config.runner not in ("thread", "inline"):
        return_ends_of_heaps()
    check_directory(gateway.snapshot)
    check_directory(gateway.journal, "journal")
    if gateway.journal is not None and gateway.snapshot is not None:
        raise ConfigError("journal", "given without snapshot, whose place it takes", gateway.journal)
    check_adapter_names(config, models or {})
    if gateway.lora_dir is not None and not config.enable_lora:
        raise ConfigError("lora_dir", "given together with enable_lora", gateway.lora_dir)
    warn_of_open_access(gateway, config)
    if models and config.sleep_after is None:
        config = attrs.evolve(config, sleep_after=gateway.model_idle)
    server = Server(gateway, config, models=models or {})
    try:
        trio.run(server.run, restrict_keyboard_interrupt_to_checkpoints=True)
    finally:
        # The interpreter visits every object as it ends, which takes most of a second of the grace period.
        gc.freeze()
    server.signals.raise_for_interrupt()


@attrs.define(eq=False)
class Server:
    """Run of `triolet serve`."""

    gateway: GatewayConfig  # configuration of the server
    config: EngineConfig  # configuration of the first model's engine
    models: Mapping[str, FurtherModel] = attrs.field(factory=dict)  # further models, by name
    signals: StopSignals = attrs.field(factory=StopSignals)
    _front: Listener | None = attrs.field(default=None, init=False)
    # Bound for the first listener.
    _sockets: Sequence[trio.socket.SocketType] = attrs.field(default=(), init=False)
    _url: str = attrs.field(default="", init=False)

    async def run(self) -> None:
        """Serve until a signal has come and the server has drained."""
        async with trio.open_nursery() as nursery:
            signalled = self.signals.came
            await nursery.start(self.signals.watch)
            with trio.CancelScope() as loading:
                nursery.start_soon(_cancel_after, signalled, loading)
                async with AsyncExitStack() as stack:
                    # What cannot be used is found before the model is loaded, which takes long. Clients are refused
                    # until the server listens, which is when it can answer.
                    tls_context(self.gateway)
                    self._sockets = await bind(self.gateway)
                    for one in self._sockets:
                        stack.callback(one.close)
                    if self.gateway.uds is not None:
                        stack.callback(Path(self.gateway.uds).unlink, missing_ok=True)
                    engine = await opened(stack, self.config)
                    gateway = await stack.enter_async_context(open_gateway(engine, self.gateway, self.models))
                    loading.shield = True  # from now on a signal drains instead of cancelling
                    await self._serve(engine, gateway, signalled)
            nursery.cancel_scope.cancel()

    async def _serve(self, engine: Engine, gateway: ResponsesService, signalled: trio.Event) -> None:
        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            if self.gateway.snapshot is not None:
                restore_responses(Path(self.gateway.snapshot), gateway)
            if self.gateway.journal is not None:
                # Imported where it is asked for: its lock is one of Unix.
                from triolet.server.responses.journal_file import open_journal

                await stack.enter_async_context(open_journal(Path(self.gateway.journal), gateway))
            await nursery.start(self._listen, engine, gateway)
            nursery.start_soon(_watch_engine, engine)
            nursery.start_soon(return_memory, gateway.input_budget, trim_allocator)
            freeze_gc()
            nursery.start_soon(collect_in_short_steps, lambda: not engine.statistics().num_requests_live)
            print(self._url, flush=True)
            await signalled.wait()
            await self._drain(engine, gateway)
            await stack.aclose()  # writes the last records
            nursery.cancel_scope.cancel()

    async def _listen(
        self, engine: Engine, gateway: ResponsesService, *, task_status: trio.TaskStatus[None]
    ) -> None:
        app = create_app(engine, self.gateway, gateway=gateway)

        async def front(*, task_status: trio.TaskStatus[None]) -> None:
            sockets, self._sockets = self._sockets, ()
            self._front = Listener(self.gateway, app, gateway.serve_websocket, gateway.metrics, sockets)
            async with trio.open_nursery() as nursery:
                self._url = await nursery.start(self._front.run)
                # After a crash the next listener must have the same port.
                if self.gateway.uds is None:
                    port = int(self._url.rpartition(":")[2])
                    self.gateway = attrs.evolve(self.gateway, port=port)
                task_status.started()

        supervisor = Supervisor(
            "gateway_sup",
            # Transient: the listener returns when the drain has stopped it, which is no failure.
            [ChildSpec(name="front", start=front, restart=Restart.TRANSIENT)],
            strategy=Strategy.ONE_FOR_ONE,
            max_restarts=10,
            period_s=10.0,
        )
        await supervisor.run(task_status=task_status)

    async def _drain(self, engine: Engine, gateway: ResponsesService) -> None:
        statistics = engine.statistics()
        logger.info(
            "draining: %d requests, at most %g s", statistics.num_requests_live, self.gateway.grace_period
        )
        # After the second one, the snapshot is written and the engine's processes end.
        deadline, closed_by = drain_deadlines(self.gateway)
        assert self._front is not None, "it listens"
        await self._front.drain()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_until, closed_by, gateway.drain, deadline)
            if gateway.models is not None:
                nursery.start_soon(gateway.models.drain, deadline)
            snapshot = await engine.drain(deadline)  # ends the requests of HTTP, too
        await self._front.stop(closed_by)
        if self.gateway.snapshot is not None:
            await save_responses(Path(self.gateway.snapshot), gateway, snapshot)


async def _cancel_after(signalled: trio.Event, scope: trio.CancelScope) -> None:
    await signalled.wait()
    if not scope.shield:
        scope.cancel()


async def _until(deadline: float, work: Callable[[float], Awaitable[None]], work_deadline: float) -> None:
    with trio.move_on_at(deadline):
        await work(work_deadline)


async def _watch_engine(engine: Engine) -> None:
    """Check the health of the engine until it is dead, which ends the server so that it can be started again.

    Raises:
        EngineDead: the engine has exceeded its restarts.
    """
    while True:
        await trio.sleep(CHECK_INTERVAL_S)
        with contextlib.suppress(EngineUnhealthy):
            engine.check_health()


def num_full_collections() -> int:
    """Count the garbage collections so far that visited every object."""
    return int(gc.get_stats()[-1]["collections"])


async def return_memory(
    budget: InputBudget,
    trim: Callable[[], Awaitable[None]],
    num_blocks: Callable[[], int] = sys.getallocatedblocks,
    num_collections: Callable[[], int] = num_full_collections,
) -> None:
    """Give memory back to the system some seconds after much of it was freed.

    Args:
        budget: from which long bodies and messages take their memory.
        trim: returns the memory that is free.
        num_blocks: blocks that are allocated; fewer when stored responses or logs were dropped.
        num_collections: full garbage collections so far, which may have freed a few long texts.
    """
    num_returned, most_blocks, num_collected, num_due = 0, num_blocks(), num_collections(), 0
    while True:
        await trio.sleep(TRIM_INTERVAL_S)
        if budget.num_taken != num_returned:
            num_due = NUM_TRIMS
        num_now, num_collected_now = num_blocks(), num_collections()
        most_blocks = max(most_blocks, num_now)
        if num_due or num_collected_now != num_collected or most_blocks - num_now > FREED_BLOCKS:
            num_returned, most_blocks, num_collected = budget.num_taken, num_now, num_collected_now
            num_due = max(0, num_due - 1)
            await trim()


def share_heaps() -> None:
    """Let all threads beside the event loop's share one heap of the C allocator; only glibc has several."""
    # Each would have its own, and keep what it has freed: 250 MiB after two long texts were tokenized.
    set_allocator("MALLOC_ARENA_MAX", M_ARENA_MAX, 2)


def return_ends_of_heaps() -> None:
    """Have the C allocator return what is free at the end of a heap at once; for a process without the model."""
    # By itself glibc keeps up to 64 MiB there once a long text was freed, and `malloc_trim` returns that of the main
    # heap only. Long texts come from the heaps as they would then; a step of a model in this process would wait for
    # the pages of its largest arrays each time.
    set_allocator("MALLOC_MMAP_THRESHOLD_", M_MMAP_THRESHOLD, 32 * 2**20)
    set_allocator("MALLOC_TRIM_THRESHOLD_", M_TRIM_THRESHOLD, 2**20)


def set_allocator(variable: str, parameter: int, value: int) -> None:
    """Set a parameter of glibc's allocator unless the environment does."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and variable not in os.environ:
        mallopt(parameter, value)


async def trim_allocator() -> None:
    """Have the C allocator return the memory that is free, if it can be asked to."""
    # glibc keeps what lies between blocks that live on: some 50 MiB after an attack with long bodies.
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        with contextlib.suppress(RuntimeError):  # no thread can be started now
            await trio.to_thread.run_sync(trim, 0)


def warn_of_open_access(gateway: GatewayConfig, config: EngineConfig) -> None:
    """Warn if no key is needed, and other machines can connect or a key seems to have been meant."""
    has_keys = bool(gateway.api_keys or config.api_keys)
    # Under vLLM the variable of this name is the server's.
    if not has_keys and os.environ.get(variable_name("api_key")):
        logger.warning(
            "%s is the key that clients send, and protects no server: no key is needed here; set %s or --api-keys",
            variable_name("api_key"),
            variable_name("api_keys"),
        )
    if not has_keys and not Access(listens_on=gateway.host).listens_on_loopback:
        logger.warning(
            "host %s without API keys: every machine that reaches this address may use the model; set --api-keys",
            gateway.host,
        )
