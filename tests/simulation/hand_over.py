"""The next engine: it takes up what the first one has left unfinished, and must end it with the same text."""

from __future__ import annotations

import attrs
import trio

from tests.simulation.expected import expected_of
from tests.simulation.hooks import watched
from tests.simulation.model import FaultyCodec, FaultyExecutor
from tests.simulation.story import MAX_STEP_S
from tests.simulation.world import World
from triolet import EngineConfig, Snapshot
from triolet.actors.opening import run_engine
from triolet.actors.stream import TokenStream
from triolet.core.outputs import FinishReason, RequestOutput
from triolet.core.params import RequestOutputKind
from triolet.core.request import Request
from triolet.errors import RequestFailed


async def hand_over(world: World, snapshot: Snapshot) -> None:
    """Let another engine finish it, without faults of its own; what is wrong with that is noted in the world."""
    cut_off = {
        record.entry.request.request_id: record.entry.request
        for record in world.records.values()
        if record.entry.finish_reason is FinishReason.SHUTDOWN
    }
    names = {saved.request_id for saved in snapshot.requests}
    world.expect(names == cut_off.keys(), f"the snapshot has {sorted(names)}, not {sorted(cut_off)}")
    next_world = World(attrs.evolve(world.story, faults=()))
    next_world.hung_s = world.lateness_s  # a deadline may have passed while there was nobody to see to it
    config = EngineConfig(runner="inline", **world.story.limits)
    with watched(next_world):
        executor = FaultyExecutor(next_world)
        async with run_engine(config, executor, lambda: FaultyCodec(next_world)) as engine:
            streams = engine.resume(Snapshot.from_bytes(snapshot.to_bytes()))
            tokens_s = sum(request.max_tokens + len(request.prompt_token_ids) for request in cut_off.values())
            with trio.move_on_after(3 * MAX_STEP_S * tokens_s + 30) as patience:
                async with trio.open_nursery() as nursery:
                    for name, stream in streams.items():
                        if name in cut_off:
                            nursery.start_soon(_read_on, world, stream, cut_off[name])
            world.expect(not patience.cancelled_caught, "what was handed over waits for ever")
    world.lines += [f"          next engine: {line.strip()}" for line in next_world.lines]
    world.violations += next_world.violations


async def _read_on(world: World, stream: TokenStream, request: Request) -> None:
    name, expected = f"resumed {request.request_id}", expected_of(request)
    outputs: list[RequestOutput] = []
    try:
        async with stream:
            outputs = [output async for output in stream]
    except RequestFailed as error:
        is_poisoned = any(
            ask.poison_at is not None for ask in world.story.asks if ask.request_id == request.request_id
        )
        world.expect(is_poisoned, f"{name} got {error!r} for no reason")
        return
    if outputs[-1].finish_reason is FinishReason.DEADLINE:
        world.expect(
            min(request.deadline_s, request.queue_deadline_s) < float("inf"),
            f"{name} ended by a deadline that it does not have",
        )
        return
    text = "".join(output.text for output in outputs)
    tokens = tuple(token_id for output in outputs for token_id in output.outputs[0].token_ids)
    if request.params.output_kind is not RequestOutputKind.DELTA:
        text, tokens = outputs[-1].text, tuple(outputs[-1].outputs[0].token_ids)
    world.expect(tokens == expected.token_ids, f"{name} got tokens {tokens}, not {expected.token_ids}")
    world.expect(text == expected.text, f"{name} got {text!a}, not {expected.text!a}")
