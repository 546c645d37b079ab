"""An operator: makes the calls of an operation, and holds what they did against what they must have done."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio

from tests.simulation.operations import Operation
from tests.simulation.world import World, is_planted
from triolet.engine.engine import Engine
from triolet.errors import EngineClosed, EngineDead, ModelFileError


@attrs.define(eq=False)
class Operator:
    """One operation of the story, from its beginning to its end."""

    world: World
    operation: Operation
    has_ended: bool = False

    @property
    def name(self) -> str:
        return f"operation {self.operation.number}"

    async def run(self, engine: Engine) -> None:
        """Do it, and take it back."""
        operation, shared = self.operation, self.world.operations
        await trio.sleep_until(operation.at_s)
        shared.num_begun += 1
        shared.num_live[operation.kind] += 1
        self.world.note(f"{self.name} begins: {operation.kind} {operation.mode}")
        try:
            match operation.kind:
                case "sleep":
                    await self._sleep(engine)
                case "pause":
                    await self._pause(engine)
                case "reload":
                    await self._reload(engine)
        except EngineClosed:
            self._expect(self.world.is_closing, "was told of an end that was not there")
        except EngineDead:
            self._expect(self.world.may_die, "found the engine dead")
        self.world.note(f"{self.name} has ended")
        shared.num_live[operation.kind] -= 1
        self.has_ended = True
        self.world.endings.unpark_all()

    def _expect(self, holds: bool, rule: str) -> None:
        self.world.expect(holds or self.world.is_closing, f"{self.name}: {rule}")

    def _call(self, name: str) -> None:
        self.world.note(f"{self.name} calls {name}")
        self.world.operations.num_calls[name] += 1

    @property
    def _is_alone(self) -> bool:
        return sum(self.world.operations.num_live.values()) == 1 and not self._sleeps_by_itself

    @property
    def _sleeps_by_itself(self) -> bool:
        return self.world.story.limits.get("sleep_after") is not None

    # --------------------------------------------------------------------------------------- sleep

    async def _sleep(self, engine: Engine) -> None:
        operation, world, calls = self.operation, self.world, self.world.operations.num_calls
        try:
            with trio.move_on_after(operation.cancel_after_s or math.inf):
                self._call("sleep")
                num_woken, live = calls["wake"], self._live()
                begun = world.operations.num_begun if self._is_alone else None
                with _aborting(self):
                    await engine.sleep(operation.level, operation.mode)
                self.world.note(f"{self.name} sleeps")
                if calls["wake"] == num_woken and not world.is_closing:
                    self._expect(engine.is_sleeping, "does not sleep")
                    if operation.level:
                        self._expect(world.weights.loaded is None, "sleeps, and the runner has a model")
                        self._expect(engine.statistics().kv_blocks_in_use == 0, "sleeps with blocks in use")
                    world.operations.still.add("sleep")
                    self._must_have_finished(live, begun)
                await trio.sleep(operation.lasts_s)
                self._must_be_healthy(engine)
        finally:
            await self._wake(engine)

    async def _wake(self, engine: Engine) -> None:
        operation, world, calls = self.operation, self.world, self.world.operations.num_calls
        for tags in (*operation.parts, None):
            self._call("wake")
            world.operations.still.discard("sleep")
            num_sleeps, num_exits = calls["sleep"], world.weights.num_exits
            is_awake = await engine.wake_up(tags)
            if tags is None and calls["sleep"] == num_sleeps and not self._sleeps_by_itself:
                self._expect(is_awake, "sleeps after it was woken")
                others = world.operations.num_live["reload"] + world.weights.is_pending
                if not (num_exits != world.weights.num_exits or world.weights.has_crashed or others):
                    self._expect(world.weights.loaded is not None, "is awake without a model")

    # --------------------------------------------------------------------------------------- pause

    async def _pause(self, engine: Engine) -> None:
        operation, world, calls = self.operation, self.world, self.world.operations.num_calls
        try:
            with trio.move_on_after(operation.cancel_after_s or math.inf):
                self._call("pause")
                num_resumed, live = calls["resume"], self._live()
                begun = world.operations.num_begun if self._is_alone else None
                with _aborting(self):
                    await engine.pause_generation(operation.mode, clear_cache=operation.clear_cache)
                self.world.note(f"{self.name} pauses")
                if calls["resume"] == num_resumed and not world.is_closing:
                    self._expect(engine.is_paused, "does not pause")
                    world.operations.still.add("pause")
                    self._must_have_finished(live, begun)
                await trio.sleep(operation.lasts_s)
                self._must_be_healthy(engine)
        finally:
            self._call("resume")
            world.operations.still.discard("pause")
            engine.resume_generation()

    # ------------------------------------------------------------------------------------- weights

    async def _reload(self, engine: Engine) -> None:
        operation, weights = self.operation, self.world.weights
        weights.promised = None
        num_begun, live = self.world.operations.num_begun, self._live()
        try:
            with trio.move_on_after(operation.cancel_after_s or math.inf) as scope, _aborting(self):
                version = await engine.reload_weights(operation.folder, mode=operation.mode)
        except (EngineClosed, EngineDead):
            raise
        except Exception as error:
            self.world.note(f"{self.name} is refused: {error!r}")
            is_explained = isinstance(error, ModelFileError) or is_planted(error)
            self._expect(is_explained, f"got {error!r} for no reason")
            weights.withdrawn.add(operation.number)
            return
        if scope.cancelled_caught:
            if operation.number not in weights.begun:
                weights.withdrawn.add(operation.number)
            elif weights.loaded is None:
                weights.is_pending = True  # the load goes on
            return
        self.world.note(f"{self.name} has brought version {version}")
        weights.is_pending |= engine.is_sleeping
        if operation.mode == "wait":
            weights.not_for.setdefault(operation.number, set()).update(live)
        if num_begun == self.world.operations.num_begun:
            weights.promised = operation.number
            if self._is_alone and not engine.is_sleeping:
                self._expect(engine.weight_version == version, f"is version {engine.weight_version}")
                self._expect(weights.of_version.get(version) == operation.number, "others were loaded")

    # ----------------------------------------------------------------------------------- judgement

    def _live(self) -> list[int]:
        return [serial for serial, record in self.world.records.items() if record.closed_s is None]

    def _must_have_finished(self, live: list[int], num_begun: int | None) -> None:
        """Under `wait` and `abort`, what was live at the call has ended; others could have stopped it, too."""
        if self.operation.mode == "keep" or num_begun != self.world.operations.num_begun:
            return
        left = [serial for serial in live if self.world.records[serial].closed_s is None]
        self._expect(not left, f"{self.operation.mode} has left {left}")

    def _must_be_healthy(self, engine: Engine) -> None:
        """Where nothing goes wrong, neither sleep nor a pause is taken for a hang."""
        if self.world.story.mood == "calm" and not self.world.is_closing:
            engine.check_health()


@contextmanager
def _aborting(operator: Operator) -> Iterator[None]:
    """Scope of a call that may end live requests."""
    shared, number = operator.world.operations, int(operator.operation.mode == "abort")
    shared.num_aborting += number
    try:
        yield
    finally:
        shared.num_aborting -= number
