"""Generate responses of the Responses protocol with the engine, for WebSocket and HTTP."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import trio

from triolet.config.server import GatewayConfig
from triolet.core.tools.answer import template_efforts_of, thinking_switch_of
from triolet.engine.engine import Engine
from triolet.engine.token_stream import TokenStream
from triolet.errors import InvalidRequest, PromptTooLong
from triolet.protocol.access import Access
from triolet.protocol.errors import WireError, model_not_found
from triolet.protocol.responses.output_items import Event
from triolet.protocol.responses.response import ResponseBuilder
from triolet.protocol.responses.response_items import Message
from triolet.protocol.responses.session import ResponsesContext
from triolet.protocol.responses.snapshot import ReplaySkipper
from triolet.protocol.responses.store import ResponseStore, StoreBudget
from triolet.protocol.truncation import without_oldest
from triolet.server.responses.vendor_events import vendor_events
from triolet.server.transport.ids import id_maker

EmitEvents = Callable[[Sequence[Event]], None]
"""Receives the events of a response."""

WaitForRoom = Callable[[], Awaitable[None]]
"""Waits until more events may be emitted."""


async def generate_response(
    engine: Engine,
    answer: ResponseBuilder,
    messages: list[Message],
    owner: str | None,
    emit: EmitEvents,
    wait_for_room: WaitForRoom,
) -> None:
    """Generate a response, from its first event to its last; leaving the call aborts the request.

    Args:
        engine: a running engine.
        answer: a new response, without events.
        messages: the chat for the model.
        owner: name of the key.
        emit: receives the events.
        wait_for_room: waits until more events may be emitted.
    Raises:
        Exception: the response cannot be generated, or not finished.
    """
    while True:
        try:
            await _generate_once(engine, answer, messages, owner, emit, wait_for_room)
            return
        except PromptTooLong as error:  # raised before any event was emitted
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
    request, tokenizer = answer.request, engine.tokenizer
    stream = engine.generate(
        request.prompt(messages, answer.plan, thinking_switch_of(tokenizer), template_efforts_of(tokenizer)),
        answer.params,
        request_id=answer.response_id,
        priority=request.priority,
        client=request.client or owner,
        deadline=None if request.timeout is None else trio.current_time() + request.timeout,
        cache_salt=salt_of(request.cache_salt, owner),
        trace_headers=request.trace_headers,
        owner=owner,
        **({} if answer.adapter is None else adapter_argument(engine, answer.adapter)),
    )
    try:
        async with stream:
            emit(answer.begin())
            async with _telling(engine, answer, stream, emit, wait_for_room):
                async for output in stream:
                    emit(answer.add(output, int(time.time())))
                    await wait_for_room()
    except PromptTooLong:  # the caller may leave the oldest messages out
        raise
    except InvalidRequest as error:
        raise request.refusal(error) from error


def _telling(
    engine: Engine, answer: ResponseBuilder, stream: TokenStream, emit: EmitEvents, wait_for_room: WaitForRoom
) -> AbstractAsyncContextManager[None]:
    """Return the scope in which the vendor events of a response are emitted, if the client asked for them."""
    if not answer.request.triolet_events:
        return nullcontext()

    async def tell(event: Event) -> None:
        if not answer.is_over:
            emit([{**event, "response_id": answer.response_id}])
        await wait_for_room()

    return vendor_events(engine, stream, tell)


async def continue_response(
    engine: Engine,
    answer: ResponseBuilder,
    stream: TokenStream,
    rest: ReplaySkipper,
    emit: EmitEvents,
    wait_for_room: WaitForRoom,
) -> None:
    """Continue a response of the previous server; leaving the call aborts the request.

    Args:
        engine: a running engine.
        answer: the response as it was there.
        stream: the engine's stream, from the first token.
        rest: skips what the previous server has sent already.
        emit: receives the events.
        wait_for_room: waits until more events may be emitted.
    Raises:
        Exception: the response cannot be finished.
    """
    async with stream, _telling(engine, answer, stream, emit, wait_for_room):
        async for output in stream:
            if (new := rest.of(output)) is not None:
                emit(answer.add(new, int(time.time())))
            await wait_for_room()


def responses_context(
    engine: Engine,
    config: GatewayConfig,
    find_resumable: Callable[[str, str | None], ResponseBuilder | None] = lambda response_id, owner: None,
) -> ResponsesContext:
    """Return what sessions need to know of the server.

    Args:
        engine: a running engine.
        find_resumable: finds a resumable response by id and owner.
    """
    return ResponsesContext(
        models=engine.config.model_names,
        adapter_names=lambda: adapter_names(engine),
        access=access_to(engine, config),
        defaults=engine.default_sampling_params(),
        store=ResponseStore(config.max_stored_responses, config.max_stored_bytes),
        new_id=id_maker(engine.tool_parser),
        tool_parser=engine.tool_parser,
        reasoning_parser=engine.reasoning_parser,
        tokenizer=engine.tokenizer,
        find_resumable=find_resumable,
        max_active=config.max_active_responses,
        max_lanes=config.max_lanes,
        max_queued=config.max_queued_responses,
        # Room for some messages of full size, and for thousands of ordinary ones.
        max_queued_bytes=4 * config.max_message_bytes,
        local_budget=StoreBudget(config.max_connection_stored_bytes),
        saves_snapshot=config.snapshot is not None or config.journal is not None,
    )


def access_to(engine: Engine, config: GatewayConfig) -> Access:
    """Return the access rules of a server for this engine."""
    return Access(
        listens_on=config.host,
        api_keys=(*(config.api_keys or engine.config.api_keys), *config.priority_keys),
        priority_keys=config.priority_keys,
        allowed_origins=config.allowed_origins,
        allowed_hosts=config.allowed_hosts,
    )


def adapter_names(engine: Engine) -> tuple[str, ...]:
    """Return the names of the loaded LoRA and prompt adapters: requests may have one in the place of the model's."""
    return (
        *(adapter.lora_name for adapter in engine.loras()),
        *(adapter.prompt_adapter_name for adapter in engine.prompt_adapters()),
    )


def adapter_argument(engine: Engine, name: str) -> dict[str, Any]:
    """Return the argument of `Engine.generate` for the adapter of a name.

    Raises:
        WireError: no adapter of that name is loaded.
    """
    for lora in engine.loras():
        if lora.lora_name == name:
            return {"lora": lora}
    for prompt_adapter in engine.prompt_adapters():
        if prompt_adapter.prompt_adapter_name == name:
            return {"prompt_adapter": prompt_adapter}
    raise model_not_found(name)


def salt_of(salt: str | None, owner: str | None) -> str | None:
    """Return the cache salt of a request: prefixes are shared only between requests of one key."""
    # The time to the first token would otherwise tell one client what another one has asked.
    return salt if owner is None else f"{owner}:{salt or ''}"


@attrs.frozen(eq=False)
class _ActiveResponse:
    answer: ResponseBuilder
    owner: str | None
    emit: EmitEvents
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


@attrs.frozen(eq=False)
class ActiveResponses:
    """Active responses of one server, by id, so that any connection of the same key can read or cancel them."""

    _responses: dict[str, _ActiveResponse] = attrs.field(factory=dict, init=False)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._responses)

    async def generate(
        self,
        engine: Engine,
        answer: ResponseBuilder,
        messages: list[Message],
        owner: str | None,
        emit: EmitEvents,
        wait_for_room: WaitForRoom,
    ) -> None:
        """Run `generate_response`; `cancel` ends it with its last event."""
        with self._registered(answer, owner, emit):
            await generate_response(engine, answer, messages, owner, emit, wait_for_room)

    async def resume(
        self,
        engine: Engine,
        answer: ResponseBuilder,
        owner: str | None,
        stream: TokenStream,
        rest: ReplaySkipper,
        emit: EmitEvents,
        wait_for_room: WaitForRoom,
    ) -> None:
        """Run `continue_response`; `cancel` ends it as in `generate`."""
        with self._registered(answer, owner, emit):
            await continue_response(engine, answer, stream, rest, emit, wait_for_room)

    @contextmanager
    def _registered(self, answer: ResponseBuilder, owner: str | None, emit: EmitEvents) -> Iterator[None]:
        active = self._responses[answer.response_id] = _ActiveResponse(answer, owner, emit)
        try:
            with active.scope:
                yield
        finally:
            del self._responses[answer.response_id]

    def find(self, response_id: str, owner: str | None) -> ResponseBuilder | None:
        """Return the active response of that id, if it belongs to this owner."""
        active = self._responses.get(response_id)
        # One that is over stays for a moment, until its last event is taken; it is stored by then, or was deleted.
        if active is None or active.owner != owner or active.answer.is_over:
            return None
        return active.answer

    def cancel(self, response_id: str, owner: str | None, now: int) -> ResponseBuilder | None:
        """Cancel a response; its KV blocks are free within a step.

        Args:
            owner: name of the key that it must belong to.
            now: seconds since the epoch.
        Returns:
            The cancelled response; None if none of that id is active.
        """
        answer = self.find(response_id, owner)
        if answer is not None:
            active = self._responses[response_id]
            # First, since the cancelled task emits nothing more.
            active.emit(answer.cancel(now))
            active.scope.cancel()
        return answer


@attrs.frozen(eq=False)
class _Place:
    """Place that a request of a key has taken; `answer` is its response, if it is one of the Responses protocol."""

    answer: ResponseBuilder | None

    @property
    def is_free(self) -> bool:
        # A lane starts its next turn with the last event of this one, before the task of this one has ended.
        return self.answer is not None and self.answer.is_over


@attrs.frozen(eq=False)
class ActivePerKey:
    """Active responses of each key."""

    limit: int | None  # most active responses of one key; None for no limit
    _places: dict[str, list[_Place]] = attrs.field(factory=dict, init=False)

    def num_active(self, owner: str) -> int:
        """Return how many active responses a key has."""
        return sum(not place.is_free for place in self._places.get(owner, ()))

    @contextmanager
    def acquire(self, owner: str | None, answer: ResponseBuilder | None) -> Iterator[None]:
        """Hold a place of a key, until the scope is left or the response is over.

        Raises:
            WireError: the key has reached its limit.
        """
        if owner is not None and self.limit is not None and self.num_active(owner) >= self.limit:
            raise over_limit(f"A key can have {self.limit} responses at the same time.")
        with self.hold(owner, answer):
            yield

    @contextmanager
    def hold(self, owner: str | None, answer: ResponseBuilder | None) -> Iterator[None]:
        """Hold a place of a key, whether or not it has reached its limit."""
        if owner is None:
            yield
            return
        place = _Place(answer)
        places = self._places.setdefault(owner, [])
        places.append(place)
        try:
            yield
        finally:
            places.remove(place)
            if not places:
                del self._places[owner]


def over_limit(sentence: str) -> WireError:
    """Return the error for a key that has reached a limit."""
    return WireError(
        sentence, code="rate_limit_exceeded", status=429, type="rate_limit_error", retry_after_s=1.0
    )
