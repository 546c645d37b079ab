"""The next engine: it takes up what the first one has left unfinished, and must end it with the same text."""

from __future__ import annotations

import attrs
import trio

from tests.simulation.expected import expected_of
from tests.simulation.hooks import watched
from tests.simulation.model import FaultyExecutor, FaultyTokenizer
from tests.simulation.story import MAX_STEP_S
from tests.simulation.world import Record, World
from triolet import EngineConfig, Snapshot
from triolet.core.output.outputs import CompletionOutput, RequestOutput
from triolet.core.request.params import RequestOutputKind
from triolet.core.request.request import FinishReason, Request
from triolet.engine.open_engine import run_engine
from triolet.engine.token_stream import TokenStream
from triolet.errors import RequestFailed, SnapshotError


async def hand_over(world: World, snapshot: Snapshot) -> None:
    """Let another engine finish it, without faults of its own; what is wrong with that is noted in the world."""
    cut_off = {
        record.request_id: records
        for record in world.records.values()
        if record.entry.finish_reason is FinishReason.SHUTDOWN
        and record.entry.request.pooling is None  # nothing of it could be taken along
        and not _has_failed(records := world.records_of(record.owner))
    }
    names = {saved.request_id for saved in snapshot.requests}
    world.expect(names == cut_off.keys(), f"the snapshot has {sorted(names)}, not {sorted(cut_off)}")
    next_world = World(attrs.evolve(world.story, faults=(), kills=()))
    next_world.folders = world.folders
    next_world.hung_s = world.lateness_s  # a deadline may have passed while no scheduler lived to see to it
    config = EngineConfig(runner="inline", **world.story.limits)
    with watched(next_world):
        executors = [FaultyExecutor(next_world, replica) for replica in range(world.story.num_replicas)]
        async with run_engine(
            config, executors[0], lambda: FaultyTokenizer(next_world), *executors[1:]
        ) as engine:
            streams = engine.resume(Snapshot.from_bytes(snapshot.to_bytes()))
            requests = [record.entry.request for records in cut_off.values() for record in records]
            tokens_s = sum(request.max_tokens + len(request.prompt_token_ids) for request in requests)
            with trio.move_on_after(3 * MAX_STEP_S * tokens_s + 30) as patience:
                async with trio.open_nursery() as nursery:
                    for name, stream in streams.items():
                        if name in cut_off:
                            nursery.start_soon(_read_on, world, stream, cut_off[name])
            world.expect(not patience.cancelled_caught, "what was handed over waits for ever")
    world.lines += [f"          next engine: {line.strip()}" for line in next_world.lines]
    world.violations += next_world.violations


def _has_failed(records: list[Record]) -> bool:
    """Whether their reader is told that it went wrong: then it may ask again."""
    return any(record.entry.finish_reason is FinishReason.ERROR for record in records)


async def _read_on(world: World, stream: TokenStream, records: list[Record]) -> None:
    """Read all answers to their ends.

    Args:
        world: judges.
        stream: of the next engine.
        records: of these answers, of the first engine.
    """
    name, outputs = f"resumed {records[0].request_id}", list[RequestOutput]()
    try:
        async with stream:
            outputs = [output async for output in stream]
    except RequestFailed as error:
        is_poisoned = any(
            ask.poison_at is not None for ask in world.story.asks if ask.request_id == records[0].request_id
        )
        is_too_long = "the model runner has now" in error.reason and world.story.later_num_blocks is not None
        world.expect(is_poisoned or is_too_long, f"{name} got {error!r} for no reason")
        return
    except SnapshotError as error:
        adapter = records[0].entry.request.adapter
        has_changed = adapter is not None and adapter.digest != world.folders.digest(adapter.path)
        world.expect(has_changed, f"{name} got {error!r} for no reason")
        return
    requests = [record.entry.request for record in records]
    for record in records:
        index = record.entry.request.index
        answers = [new for output in outputs for new in output.outputs if new.index == index]
        _judge(world, name, requests[0], record, answers)


def _judge(world: World, name: str, first: Request, record: Record, answers: list[CompletionOutput]) -> None:
    """Hold what was read of one answer against what it must be.

    Args:
        world: judges.
        name: of the request.
        first: of its answers, which waits for all of them.
        record: of this answer.
        answers: outputs with some of it.
    """
    request = record.entry.request
    # the next engine has the weights that this one began with
    expected = expected_of(request, (*record.weights, 0), world.story.windows)
    if answers[-1].finish_reason is FinishReason.DEADLINE:
        world.expect(
            min(request.deadline_s, first.queue_deadline_s) < float("inf"),
            f"{name} ended by a deadline that it does not have",
        )
        return
    text = "".join(new.text for new in answers)
    tokens = tuple(token_id for new in answers for token_id in new.token_ids)
    if request.params.output_kind is not RequestOutputKind.DELTA:
        text, tokens = answers[-1].text, tuple(answers[-1].token_ids)
    world.expect(tokens == expected.token_ids, f"{name} got tokens {tokens}, not {expected.token_ids}")
    world.expect(text == expected.text, f"{name} got {text!a}, not {expected.text!a}")
