"""Run one story: faults for a while, then none, and everything must come to its end."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from tests.simulation.client import Client
from tests.simulation.determinism import seeded_scheduling
from tests.simulation.expected import expected_of, tokens_of
from tests.simulation.hand_over import hand_over
from tests.simulation.hooks import WatchedCore, WatchedScheduler, watched
from tests.simulation.model import SLOW_LOADS_S, FaultyExecutor, FaultyTokenizer
from tests.simulation.operator import Operator
from tests.simulation.process import FaultyProcessExecutor
from tests.simulation.story import LOAD_POINTS, MAX_STEP_S, Story, draw_story
from tests.simulation.world import Record, World
from triolet import EngineConfig, SamplingParams
from triolet.core.recovery.supervision import MAX_PAUSE_S
from triolet.core.replicas.replicated_core import ReplicatedCore
from triolet.core.request.request import FinishReason
from triolet.engine.engine import Engine
from triolet.engine.open_engine import run_engine
from triolet.errors import EngineDead, InvariantViolated

MAX_TASK_STEPS = 200_000  # a run has a few thousand; one that has more goes round in circles
PATIENCE_S = 1000.0  # of virtual time; a run takes a few seconds
READING_S = 30.0  # for the slowest reader
_LONGEST_RETURN_S = 60.0  # of a replica, after the longest pauses between its starts
OPERATION_S = 20.0  # for loads, slow ones included, and for what waits for them


def simulate(story: Story | int) -> World:
    """Run a story, or that of a seed; a run without violations is a good one."""
    world = World(draw_story(story) if isinstance(story, int) else story)
    with seeded_scheduling(world.story.seed), watched(world):
        try:
            trio.run(_run, world, clock=MockClock(autojump_threshold=0), instruments=[_Watcher(world)])
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            world.violations.append(f"the run ended with {error!r}")
    return world


class _Watcher(trio.abc.Instrument):
    """Record the order of the tasks, and cancel at the checkpoints that were drawn."""

    def __init__(self, world: World) -> None:
        self.world = world

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        world = self.world
        world.schedule.append(task.name)
        if (countdown := world.cancels.get(task)) is not None:
            countdown.num_steps -= 1
            if countdown.num_steps == 0:
                countdown.scope.cancel()
        if len(world.schedule) == MAX_TASK_STEPS:
            world.violations.append("goes round in circles")
            world.emergency.cancel()


async def _run(world: World) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_lose_patience, world)
        num_tasks = trio.lowlevel.current_statistics().tasks_living
        with world.emergency:
            try:
                await _play(world)
            except* EngineDead as group:
                world.expect(world.may_die, f"the engine died: {group.exceptions[0]!r}")
        num_left = trio.lowlevel.current_statistics().tasks_living - num_tasks
        world.expect(num_left == 0, f"{num_left} tasks are left")
        nursery.cancel_scope.cancel()


async def _lose_patience(world: World) -> None:
    """End a run that does not get on: it is a violation, and no test that waits for ever."""
    await trio.sleep(PATIENCE_S)
    world.violated("nothing moves any more")
    world.emergency.cancel()


async def _play(world: World) -> None:
    story = world.story
    config = EngineConfig(runner="inline", **story.limits)
    clients = [Client(world, ask) for ask in story.asks]
    operators = [Operator(world, operation) for operation in story.operations]
    async with trio.open_nursery() as nursery:
        kind = FaultyProcessExecutor if story.is_in_a_process else FaultyExecutor
        executors = [kind(world, replica) for replica in range(story.num_replicas)]
        async with run_engine(config, executors[0], lambda: FaultyTokenizer(world), *executors[1:]) as engine:
            for client in clients:
                nursery.start_soon(client.run, engine, name=client.name)
                if client.ask.abort_after_s is not None:
                    nursery.start_soon(client.abort_later, engine, name=f"abort of {client.name}")
            for operator in operators:
                nursery.start_soon(operator.run, engine, name=operator.name)
            await trio.sleep_until(story.faults_until_s)
            world.is_armed = False
            world.note(f"no faults any more: {story.ending}")
            if story.ending == "wait":
                await _must_end(world, clients, operators)
                await _must_be_idle(world, engine)
            world.is_closing = True
            snapshot = None
            if story.ending == "drain":
                snapshot = await engine.drain(trio.current_time() + world.rng.choice((0.0, 0.0, 0.1, 10.0)))
        world.note("engine closed")
        await _must_be_gone(world, clients)
        with trio.move_on_after(READING_S):
            for operator in operators:
                while not operator.has_ended:
                    await world.endings.park()
        for operator in operators:
            world.expect(operator.has_ended, f"{operator.name} goes on for ever")
        nursery.cancel_scope.cancel()
    if snapshot is not None:
        await hand_over(world, snapshot)
    _must_have_ended(world)
    _must_have_all_blocks(world, engine)


# -------------------------------------------------------------------------------- when faults are over


async def _must_end(world: World, clients: list[Client], operators: list[Operator]) -> None:
    """Whatever was admitted ends in the time that its tokens take, and be it one request after the other."""
    tokens_s = 3 * MAX_STEP_S * sum(map(_num_tokens, world.records.values()))
    patience_s = tokens_s + world.lateness_s + world.story.limits["step_timeout"]
    if operators:  # they begin late, may keep everything from being computed, and wait for each other
        last_s = max(0.0, *(operator.operation.at_s - trio.current_time() for operator in operators))
        patience_s += last_s + OPERATION_S * len(operators)
    with trio.move_on_after(patience_s):
        for operator in operators:
            while not operator.has_ended:
                await world.endings.park()
        for client in clients:
            while not client.is_settled:
                await world.endings.park()
    for client in clients:
        world.expect(client.is_settled, f"{client.name} waits for ever")
    for operator in operators:
        world.expect(operator.has_ended, f"{operator.name} goes on for ever")
    await _must_be_gone(world, clients)


def _num_tokens(record: Record) -> int:
    request = record.entry.request
    return len(request.prompt_token_ids) + request.max_tokens


async def _must_be_gone(world: World, clients: list[Client]) -> None:
    """Every client has read what it wants and knows how it ended."""
    with trio.move_on_after(READING_S):
        for client in clients:
            await client.gone.wait()
    for client in clients:
        world.expect(client.gone.is_set(), f"{client.name} reads for ever")
        client.scope.cancel()


async def _must_be_idle(world: World, engine: Engine) -> None:
    """No request holds anything, and the next one finds the engine as good as new."""
    # A step may have been in flight for a client that has left: it ends, or hangs until the watchdog comes.
    await trio.sleep(
        2 * (MAX_STEP_S + world.story.limits["step_timeout"] + world.longest_hang_s)
        + world.story.restart_s
        + (2 * MAX_PAUSE_S if world.fired["shortage.runner"] else 0.0)
        + (SLOW_LOADS_S if world.fired["runner.load_slow"] + world.fired["runner.load_hang"] else 0.0)
    )
    try:
        engine.check_health()
    except EngineDead:
        world.expect(world.may_die, "the engine died")
        return
    with trio.move_on_after(_LONGEST_RETURN_S):
        while not all(replica.is_living for replica in engine.statistics().replicas):
            await engine._progress.restarted.park()
    down = [replica.replica for replica in engine.statistics().replicas if not replica.is_living]
    world.expect(not down, f"replicas {down} do not come back")
    held = {
        "journal": len(engine._core.journal),
        "outputs": len(engine._core.outputs),
        "submissions": len(engine._requests.submissions),
        "places": engine._core.admission._num_reserved,
        "questions": len(engine._progress.asked_s),
        "quarantine": engine.statistics().kv_blocks_quarantined,
        "blocks": engine.statistics().kv_blocks_in_use,
    }
    world.expect(not any(held.values()), f"the idle engine still holds {held}")
    statistics = engine.statistics()
    num_ended = sum(statistics.num_requests_ended.values())
    num_received = statistics.num_requests_received
    world.expect(num_ended == num_received, f"{num_received} requests came, and {num_ended} ended")
    await _must_serve(world, engine)


async def _must_serve(world: World, engine: Engine) -> None:
    """One more request, as long as the cache is large: it needs every block there is."""
    longest = world.max_model_len
    if engine.is_sleeping and world.story.later_num_blocks is not None:
        longest = world.story.longest_in(world.story.later_num_blocks)
    prompt = [7] * (longest - 1)
    tokens_s = 3 * MAX_STEP_S * len(prompt)
    if world.story.operations:  # it may have to be woken
        tokens_s += OPERATION_S
    if world.hung_s:  # an actor that has hung since it had nothing to read is found only now
        tokens_s += world.longest_hang_s
    with trio.move_on_after(tokens_s):
        output = await engine.complete(prompt, SamplingParams(max_tokens=1, seed=1, ignore_eos=True))
        (record,) = world.records_of(trio.lowlevel.current_task())
        expected = expected_of(record.entry.request, tuple(record.weights), world.story.windows)
        is_right = output.outputs[0].token_ids == expected.token_ids
        promised = world.weights.promised
        has_failed = any(world.fired[point] for point in ("weights.load", "runner.start", *LOAD_POINTS))
        is_kept = has_failed or promised in (None, world.weights.loaded)
        world.expect(is_kept, f"weights {promised} were promised, not {world.weights.loaded}")
        world.expect(is_right and output.finish_reason is FinishReason.LENGTH, f"the last answer is {output}")
        return
    world.violated("the last request waits for ever")


def _must_have_ended(world: World) -> None:
    """Accepted is ended: each request once, its tokens a beginning of the right ones."""
    for serial, record in world.records.items():
        tokens, entry = tuple(record.entry.output_token_ids), record.entry
        world.expect(record.closed_s is not None, f"request {serial} was accepted and never ended")
        # A stop string is found a moment later than its tokens, so the journal may know a few more.
        right = tokens_of(
            entry.request, len(tokens), weights=tuple(record.weights), windows=world.story.windows
        )
        world.expect(tokens == right, f"request {serial} has tokens {tokens}, not {right}")
        for number in {*record.weights} & world.weights.not_for.keys():
            is_allowed = serial not in world.weights.not_for[number]
            world.expect(is_allowed, f"request {serial} was to finish before weights {number} came")


def _must_have_all_blocks(world: World, engine: Engine) -> None:
    if isinstance(engine._core, ReplicatedCore):
        try:
            engine._core.table.check()
        except InvariantViolated as violation:
            world.violated(f"after the end: {violation}")
        return
    scheduler = engine._core.scheduler
    if not isinstance(scheduler, WatchedScheduler) or not scheduler.is_whole:
        return
    if isinstance(engine._core, WatchedCore) and engine._core.is_stale:
        return  # it was not told of what ended after its death
    try:
        scheduler.check()
    except InvariantViolated as violation:
        world.violated(f"after the end: {violation}")
    statistics = engine.statistics()
    resting = statistics.kv_blocks_free + statistics.kv_blocks_cached
    # Not the whole statistics: how long a task took is no matter of the virtual clock.
    total = statistics.kv_blocks_total
    world.expect(resting == total, f"after the end {resting} of {total} blocks are free or cached")
