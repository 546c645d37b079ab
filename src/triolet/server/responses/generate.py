"""How a request of the Responses protocol is answered by the engine, whatever it came over."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import trio

from triolet.config.server import GatewayConfig
from triolet.engine.engine import Engine
from triolet.engine.token_stream import TokenStream
from triolet.errors import InvalidRequest, PromptTooLong
from triolet.protocol.access import Access
from triolet.protocol.responses.input_items import Message
from triolet.protocol.responses.output_items import Event
from triolet.protocol.responses.response import ResponseBuilder
from triolet.protocol.responses.session import ResponsesContext
from triolet.protocol.responses.snapshot import ReplaySkipper
from triolet.protocol.responses.store import ResponseStore
from triolet.protocol.truncation import without_oldest

EmitEvents = Callable[[Sequence[Event]], None]
"""Gets the events of an answer."""

WaitForRoom = Callable[[], Awaitable[None]]
"""Waits until whoever is told should be told more."""


async def generate_response(
    engine: Engine,
    answer: ResponseBuilder,
    messages: list[Message],
    owner: str | None,
    emit: EmitEvents,
    wait_for_room: WaitForRoom,
) -> None:
    """Have an engine answer, from the first event to the last; leaving it is the abort.

    Args:
        engine: answers.
        answer: still without any event.
        messages: what the model is asked with.
        owner: whose it is.
        tell: gets the events.
        room: waits until it should get more.
    Raises:
        Exception: there will be no answer, or no more of it.
    """
    while True:
        try:
            await _generate_once(engine, answer, messages, owner, emit, wait_for_room)
            return
        except PromptTooLong as error:  # known before anything was told
            if answer.request.truncation != "auto":
                raise
            messages = without_oldest(messages, error)


async def _generate_once(
    engine: Engine,
    answer: ResponseBuilder,
    messages: list[Message],
    owner: str | None,
    emit: EmitEvents,
    wait_for_room: WaitForRoom,
) -> None:
    request = answer.request
    stream = engine.generate(
        request.prompt(messages, answer.plan, engine.reasoning_parser),
        answer.params,
        request_id=answer.response_id,
        priority=request.priority,
        client=request.client or owner,
        deadline=None if request.timeout is None else trio.current_time() + request.timeout,
        cache_salt=salt_of(request.cache_salt, owner),
        trace_headers=request.trace_headers,
        owner=owner,
    )
    try:
        async with stream:
            emit(answer.begin())
            async for output in stream:
                emit(answer.add(output, int(time.time())))
                await wait_for_room()
    except PromptTooLong:  # the caller may leave the oldest messages out
        raise
    except InvalidRequest as error:
        raise request.refusal(error) from error


async def continue_response(
    answer: ResponseBuilder,
    stream: TokenStream,
    rest: ReplaySkipper,
    emit: EmitEvents,
    wait_for_room: WaitForRoom,
) -> None:
    """Have an engine go on with what the last server has begun; leaving it is the abort.

    Args:
        answer: as it was there.
        stream: of the engine, with all of it.
        rest: what is new in that.
        tell: gets the events.
        room: waits until it should get more.
    Raises:
        Exception: there will be no more of it.
    """
    async with stream:
        async for output in stream:
            if (new := rest.of(output)) is not None:
                emit(answer.add(new, int(time.time())))
            await wait_for_room()


def responses_context(
    engine: Engine,
    config: GatewayConfig,
    find_resumable: Callable[[str, str | None], ResponseBuilder | None] = lambda response_id, owner: None,
) -> ResponsesContext:
    """What conversations must know of a server.

    Args:
        engine: answers.
        config: the limits.
        find_resumable: the answer of that id that may be read on, for this owner.
    """
    return ResponsesContext(
        models=_names(engine),
        defaults=engine.default_sampling_params(),
        store=ResponseStore(config.max_stored_responses, config.max_stored_bytes),
        new_id=new_id,
        tool_parser=engine.tool_parser,
        reasoning_parser=engine.reasoning_parser,
        find_resumable=find_resumable,
        max_active=config.max_active_responses,
        max_lanes=config.max_lanes,
        max_queued=config.max_queued_responses,
        max_queued_bytes=4 * config.max_message_bytes,
        saves_snapshot=config.snapshot is not None,
    )


def access_to(engine: Engine, config: GatewayConfig) -> Access:
    """Who may enter a server of this engine."""
    return Access(
        listens_on=config.host,
        api_keys=config.api_keys or engine.config.api_keys,
        allowed_origins=config.allowed_origins,
        allowed_hosts=config.allowed_hosts,
    )


def _names(engine: Engine) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, (engine.model_name, engine.config.model))))


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}_{secrets.token_hex(16)}"


def salt_of(salt: str | None, owner: str | None) -> str | None:
    """Prefixes are shared between requests of one key only: how long one takes would tell what others ask."""
    return salt if owner is None else f"{owner}:{salt or ''}"


# --------------------
# Answers that are being made, by their ids: somebody else than who asked for one can look at it, and end it.


@attrs.frozen(eq=False)
class _Running:
    answer: ResponseBuilder
    owner: str | None
    emit: EmitEvents
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


@attrs.frozen(eq=False)
class ActiveResponses:
    """Those of one server, whatever they are told over."""

    _running: dict[str, _Running] = attrs.field(factory=dict, init=False)

    @property
    def ids(self) -> tuple[str, ...]:
        """Of all of them."""
        return tuple(self._running)

    async def make(
        self,
        engine: Engine,
        answer: ResponseBuilder,
        messages: list[Message],
        owner: str | None,
        emit: EmitEvents,
        wait_for_room: WaitForRoom,
    ) -> None:
        """See `generate_response`; an answer that `cancel` ends is told to its end, too."""
        with self._registered(answer, owner, emit):
            await generate_response(engine, answer, messages, owner, emit, wait_for_room)

    async def resume_generation(
        self,
        answer: ResponseBuilder,
        owner: str | None,
        stream: TokenStream,
        rest: ReplaySkipper,
        emit: EmitEvents,
        wait_for_room: WaitForRoom,
    ) -> None:
        """See `continue_response`; the rest is as in `make`."""
        with self._registered(answer, owner, emit):
            await continue_response(answer, stream, rest, emit, wait_for_room)

    @contextmanager
    def _registered(self, answer: ResponseBuilder, owner: str | None, emit: EmitEvents) -> Iterator[None]:
        active = self._running[answer.response_id] = _Running(answer, owner, emit)
        try:
            with active.scope:
                yield
        finally:
            del self._running[answer.response_id]

    def find(self, response_id: str, owner: str | None) -> ResponseBuilder | None:
        """The answer of that id, if it is this owner's."""
        active = self._running.get(response_id)
        return active.answer if active is not None and active.owner == owner else None

    def cancel(self, response_id: str, owner: str | None, now: int) -> ResponseBuilder | None:
        """End an answer with what there is; its blocks are free within a step.

        Args:
            response_id: which.
            owner: whose it must be.
            now: seconds since the epoch.
        Returns:
            The answer, which is over; None if none of that id is being made.
        """
        answer = self.find(response_id, owner)
        if answer is not None:
            active = self._running[response_id]
            active.emit(answer.cancel(now))
            active.scope.cancel()
        return answer
