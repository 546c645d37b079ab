"""Engines behind a router: which of them serve, and which one gets a request.

    starting --ready--> up --not ready--> draining --ready--> up
    up --a broken connection--> suspected --ready--> up
    any --shuts down--> leaving
    any --no answer twice, or none when it is suspected--> down --ready--> up

Each engine is asked for its readiness every second. One that sleeps or restarts gets nothing new, and keeps what it
has. One that shuts down hands its requests over, if another engine is up. One that is down loses its requests: its uses
are ended, and the callers place them anew. An engine that accepts connections and answers nothing is down as
well, since its `/health` says whether it makes progress.

One that breaks a connection is asked at once. The requests that it has are left alone until it fails to answer: it may
have broken the connection for what one client did, such as reading too slowly, and where its process has ended every
other connection breaks by itself.

An engine tells its models whenever it comes up. One that serves others than the fleet is down, and is asked again until
it serves the same.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import attrs
import trio

from triolet.client.address import ServerAddress, ServerError
from triolet.client.http import HttpError, model_cards, request
from triolet.core.dispatch.dispatcher import Dispatcher
from triolet.core.dispatch.prompt_blocks import BLOCK_CHARS, CHARS_PER_TOKEN
from triolet.core.recovery.supervision import shortage_of
from triolet.protocol.errors import WireError
from triolet.router.client_request import RoutedPrompt
from triolet.router.refusals import is_of_engine

CHECK_INTERVAL_S = 1.0
CHECK_TIMEOUT_S = 3.0
MAX_PAUSE_S = 30.0  # before engines that refuse to go on with an answer are asked again
MAX_MISSED = 2  # checks without an answer until an engine is down
CONNECTION = "a connection to an engine"
"""What a descriptor is needed for."""
SHORTAGE_S = 1.0  # until an answer that has begun is tried again where there was no descriptor

logger = logging.getLogger("triolet.router")


class EngineState(enum.Enum):
    """What a router knows of an engine."""

    STARTING = "starting"
    UP = "up"
    SUSPECTED = "suspected"  # has broken a connection: takes nothing new until it has answered a check
    DRAINING = "draining"  # takes nothing new
    LEAVING = "leaving"  # shuts down
    DOWN = "down"


class Endable(Protocol):
    """Use of an engine: a scope, or an `EngineUse`."""

    def cancel(self) -> None:
        """End it."""
        ...


@attrs.define(eq=False)
class EngineUse:
    """Use of an engine that ends between two pieces of its answer, and not while one is sent to the client."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _is_sending: bool = attrs.field(default=False, init=False)
    _is_over: bool = attrs.field(default=False, init=False)

    def cancel(self) -> None:
        """End it, once what is being sent has been sent."""
        self._is_over = True
        if not self._is_sending:
            self.scope.cancel()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Enclose the sending of a piece: what the client was sent is known to be all of it."""
        self._is_sending = True
        try:
            yield
        finally:
            self._is_sending = False
            if self._is_over:
                self.scope.cancel()


@attrs.define(eq=False)
class RoutedEngine:
    """One engine.

    Args:
        number: of the engine, from 0.
        address: of its API.
    """

    number: int
    address: ServerAddress
    state: EngineState = EngineState.STARTING
    # Names; None until the engine has told them since it came up, empty if it keeps them from the router.
    models: frozenset[str] | None = None
    num_requests: int = 0  # that it has been given
    # Its present requests, with what tells whether each may be moved to another engine.
    uses: dict[Endable, Callable[[], bool]] = attrs.field(factory=dict)
    _num_missed: int = 0
    _alarm: trio.Event = attrs.field(factory=trio.Event)  # it is to be asked at once
    _complaint: str = ""  # why it gets nothing, as the log says

    @property
    def root(self) -> ServerAddress:
        """Address of the routes beside the API, such as /health."""
        return attrs.evolve(self.address, base_path=self.address.base_path.removesuffix("/v1"))


class Engines:
    """All engines of a router.

    Args:
        addresses: of their APIs, at least one; with an API key for the router's own questions, if they want one.
    """

    def __init__(self, addresses: Sequence[ServerAddress]) -> None:
        self.all = tuple(RoutedEngine(number, address) for number, address in enumerate(addresses))
        self.on_move: Callable[[], None] = lambda: None  # called when a request goes on at another engine
        self._dispatcher = Dispatcher(BLOCK_CHARS // CHARS_PER_TOKEN)
        self.is_closed = False
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def models(self) -> frozenset[str]:
        """Names of the models of the fleet; empty while no engine has told them."""
        return next((engine.models for engine in self.all if engine.models), frozenset())

    @property
    def up(self) -> tuple[RoutedEngine, ...]:
        """Engines that get new requests."""
        return tuple(engine for engine in self.all if engine.state is EngineState.UP)

    @property
    def check_keys(self) -> bool:
        """True if clients need a key: the router has one for them, or an engine keeps its models from it."""
        return any(one.address.api_key is not None or one.models == frozenset() for one in self.all)

    async def run(self) -> None:
        """Watch the engines until cancelled."""
        async with trio.open_nursery() as nursery:
            for engine in self.all:
                nursery.start_soon(self._watch, engine)

    async def wait_for_first_checks(self, timeout_s: float) -> None:
        """Wait until each engine has been checked, or the time is over."""
        with trio.move_on_after(timeout_s):
            while any(engine.state is EngineState.STARTING for engine in self.all):
                await self._changed.park()

    async def wait_for_one(self, timeout_s: float) -> bool:
        """Wait until an engine is up; False if none is in time, or the fleet is closed."""
        with trio.move_on_after(timeout_s):
            while not self.up and not self.is_closed:
                await self._changed.park()
        return bool(self.up) and not self.is_closed

    def close(self) -> None:
        """End all requests, for good; those that wait for an engine get none."""
        self.is_closed = True
        for engine in self.all:
            for use in tuple(engine.uses):
                use.cancel()
        self._changed.unpark_all()

    # ---------------------------------------------------------------------------------------- requests

    def place(
        self, request_id: str, prompt: RoutedPrompt, refused_by: Collection[RoutedEngine] = ()
    ) -> RoutedEngine | None:
        """Choose the engine of a request; None if none is up.

        Args:
            request_id: name of the request, new here.
            prompt: of the request.
            refused_by: engines that get it only if no other one is up.
        """
        if refused_by and (others := [one for one in self.up if one not in refused_by]):
            engine = min(others, key=lambda one: self._dispatcher.num_requests(one.number))
            self._dispatcher.assign(request_id, engine.number, prompt.num_tokens, trio.current_time())
            return self._given(engine)
        placement = self._dispatcher.place(request_id, prompt.hashes, prompt.num_tokens, trio.current_time())
        return None if placement is None else self._given(self.all[placement.replica])

    def _given(self, engine: RoutedEngine) -> RoutedEngine:
        engine.num_requests += 1
        return engine

    async def note_refusal(
        self, engine: RoutedEngine, error: WireError, refused_by: set[RoutedEngine]
    ) -> None:
        """Note that an engine does not go on with an answer now, and wait if all that are up have refused it.

        Args:
            engine: that refuses.
            error: with status 429 or 503.
            refused_by: engines that have refused the answer, with this one.
        """
        refused_by.add(engine)
        if is_of_engine(error):
            self.note_not_ready(engine)
        if not refused_by.issuperset(self.up):
            return
        refused_by.clear()
        if self.up:
            await self._pause(min(error.retry_after or CHECK_INTERVAL_S, MAX_PAUSE_S))

    async def pass_over(self, engine: RoutedEngine, refused_by: set[RoutedEngine]) -> None:
        """Leave an engine that has broken the connection of an answer for another one, and wait if there is none.

        Args:
            engine: that is lost.
            refused_by: see `note_refusal`.
        """
        refused_by.add(engine)
        if refused_by.issuperset(self.up):
            refused_by.clear()
            await self._pause(CHECK_INTERVAL_S)

    async def _pause(self, pause_s: float) -> None:
        with trio.move_on_after(pause_s):
            while not self.is_closed:
                await self._changed.park()

    def note_progress(self, request_id: str, num_chars: int) -> None:
        """Note a part of an answer, the first of which ends the wait for the prompt."""
        self._dispatcher.first_token(request_id, trio.current_time())
        self._dispatcher.grow(request_id, max(1, num_chars // CHARS_PER_TOKEN))

    def finish(self, request_id: str) -> None:
        """Forget a request, however it ended; harmless when repeated."""
        self._dispatcher.finish(request_id, trio.current_time())

    @contextmanager
    def computing(self, engine: RoutedEngine, use: Endable, may_move: Callable[[], bool]) -> Iterator[None]:
        """Enclose the use of an engine, which is ended when the engine is found to be down, or to shut down.

        Args:
            engine: that is used.
            use: of it.
            may_move: asked when it shuts down: a request that cannot be moved may finish there.
        """
        engine.uses[use] = may_move
        try:
            yield
        finally:
            del engine.uses[use]

    # ------------------------------------------------------------------------------------------ health

    def note_lost(self, engine: RoutedEngine) -> None:
        """Note that an engine has broken a connection: it gets nothing new until it has answered a check."""
        if engine.state in (EngineState.SUSPECTED, EngineState.DOWN):
            return
        self._become(engine, EngineState.SUSPECTED)
        engine._num_missed = MAX_MISSED - 1  # the broken connection is the first answer that it owes
        engine._alarm.set()

    def note_not_ready(self, engine: RoutedEngine) -> None:
        """Note that an engine refuses what is new: it gets nothing until a check finds it ready."""
        if engine.state is EngineState.UP:  # of any other one more is known
            self._become(engine, EngineState.DRAINING)

    async def _watch(self, engine: RoutedEngine) -> None:
        while True:
            engine._alarm = trio.Event()
            state = await self._checked(engine)
            if engine._alarm.is_set():
                continue  # it may have answered before it broke the connection
            if state is not None:
                self._note_check(engine, state)
            with trio.move_on_after(CHECK_INTERVAL_S):
                await engine._alarm.wait()

    def _note_check(self, engine: RoutedEngine, state: EngineState) -> None:
        if state is EngineState.DOWN and engine.state is not EngineState.DOWN:
            engine._num_missed += 1
            if engine._num_missed < MAX_MISSED:
                return
        else:
            engine._num_missed = 0
        self._become(engine, state)

    async def _checked(self, engine: RoutedEngine) -> EngineState | None:
        """Ask an engine for its readiness; None where there was no room for a connection on this machine."""
        try:
            with trio.fail_after(CHECK_TIMEOUT_S):
                async with request(engine.root, "/health/ready"):
                    pass
                if engine.models is None:
                    return self._with_models(engine, await _models_of(engine))
        except HttpError as error:
            if error.status != 503:
                return EngineState.DOWN
            return EngineState.LEAVING if "shutting down" in str(error) else EngineState.DRAINING
        except trio.TooSlowError:
            return EngineState.DOWN
        except (ServerError, OSError) as error:
            if shortage_of(error, CONNECTION) is not None:
                return None
            engine.models = None  # there may be another engine at this address a second later
            return EngineState.DOWN
        return EngineState.UP

    def _with_models(self, engine: RoutedEngine, models: frozenset[str]) -> EngineState:
        """Return the state of a ready engine with these models."""
        fleet, complaint = self.models, ""
        if models and fleet and models != fleet:
            complaint = f"serves {_listed(models)}, the fleet serves {_listed(fleet)}"
        if complaint != engine._complaint:
            engine._complaint = complaint
            if complaint:
                logger.warning("engine %s %s: it gets nothing", engine.address, complaint)
        if complaint:
            engine._num_missed = MAX_MISSED  # no doubt is left that another check could remove
            return EngineState.DOWN
        if not models:
            logger.warning(
                "engine %s keeps its models from a router without a valid key (--api-key, TRIOLET_API_KEY): they are "
                "not compared with those of the fleet",
                engine.address,
            )
        engine.models = models
        return EngineState.UP

    def _become(self, engine: RoutedEngine, state: EngineState) -> None:
        if state is engine.state:
            return
        logger.info("engine %s: %s, was %s", engine.address, state.value, engine.state.value)
        engine.state = state
        if state in (EngineState.SUSPECTED, EngineState.DOWN, EngineState.LEAVING):
            engine.models = None  # what comes up there may be another one
        known = engine.number in self._dispatcher.replicas
        if state is EngineState.UP:
            self._dispatcher.add_replica(engine.number)
        elif state is EngineState.DOWN:
            if known:
                self._dispatcher.remove_replica(engine.number)
            for use in tuple(engine.uses):
                use.cancel()
        elif known:
            self._dispatcher.drain_replica(engine.number)
        self._hand_over()
        self._changed.unpark_all()

    def _hand_over(self) -> None:
        """Have others go on with what engines compute that shut down, as soon as there is one that takes it."""
        leaving = [engine for engine in self.all if engine.state is EngineState.LEAVING] if self.up else []
        for engine in leaving:
            for use, may_move in tuple(engine.uses.items()):
                if may_move():
                    use.cancel()


async def _models_of(engine: RoutedEngine) -> frozenset[str]:
    """Return the names of an engine's models; empty where it keeps them from callers without a key."""
    try:
        cards = await model_cards(engine.address)
    except HttpError as error:
        if error.status in (401, 403):
            return frozenset()
        raise
    return frozenset(card["id"] for card in cards)


def _listed(models: frozenset[str]) -> str:
    return ", ".join(sorted(models))
