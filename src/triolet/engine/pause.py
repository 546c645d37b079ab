"""Methods of `Engine` that pause generation and put the engine to sleep, with the names and modes of vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import trio

from triolet.actors.actor_progress import ActorProgress
from triolet.actors.channels import Channels
from triolet.core.engine_core import EngineCore
from triolet.core.request.request import FinishReason
from triolet.core.sleep import NOTHING, PAUSE, SLEEP, TAGS, RunnerPhase, check_level, check_mode, check_tags
from triolet.engine.submission import TrioRunGuard
from triolet.engine.token_stream import Availability
from triolet.errors import InvalidRequest, UnsupportedFeature, shown


class PauseMethods:
    """Base class of `Engine`: pauses generation, sleeps and wakes."""

    _run: TrioRunGuard
    _core: EngineCore
    _channels: Channels
    _progress: ActorProgress
    _availability: Availability
    _end_all: Callable[[FinishReason], None]

    async def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Compute no request until `resume_generation`; return when the step in flight has ended.

        Requests that come meanwhile wait. Deadlines go on. A pause ends with `drain`, too.

        Args:
            mode: what happens to the live requests: `abort` ends them with what they have, `wait` lets them finish
                before this returns (a cancelled call takes the pause back), `keep` has them go on after the pause.
            clear_cache: forget the prefix cache; requests that are kept are then computed again.
        Raises:
            UnsupportedFeature: the engine has several replicas.
            InvalidRequest: another mode.
            EngineClosed: the engine drains or has ended.
            EngineDead: the engine has died.
        """
        self._run.check()
        self._check_one_replica("pause_generation")
        check_mode(mode)
        if not isinstance(clear_cache, bool):
            raise InvalidRequest(
                f"clear_cache must be a boolean; got {shown(clear_cache)}",
                field="clear_cache",
                got=clear_cache,
            )
        self._availability.check_open()
        by = object() if mode == "wait" else None
        self._core.sleep.hold(PAUSE, self._limit_of(mode), by)
        try:
            await self._until_settled(PAUSE)
        except trio.Cancelled:
            if by is not None:
                self._take_back(PAUSE, by)
            raise
        self._core.sleep.keep(PAUSE, by)
        if clear_cache:
            self.reset_prefix_cache(reset_running_requests=True)

    def resume_generation(self) -> None:
        """End a pause; harmless without one."""
        self._run.check()
        # No step was due meanwhile, so that the pause is no silence of the runner.
        self._progress.progressed_s = trio.current_time()
        self._core.sleep.release(PAUSE)

    @property
    def is_paused(self) -> bool:
        """True from the call of `pause_generation` to that of `resume_generation`."""
        return self._core.sleep.is_paused

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give up the model and the KV cache until `wake_up`; return when their memory is free.

        Requests that come meanwhile wait. Deadlines go on. Harmless for an engine that sleeps as deeply already. A
        drain wakes the engine, if requests are live.

        Args:
            level: 0 only stops computing, as a pause does. 1 and 2 end the process of the runner, or drop the model of
                its thread; it is read again when the engine wakes.
            mode: what happens to the live requests: `abort` ends them with what they have, `wait` lets them finish
                before (a cancelled call takes the sleep back), `keep` has them go on after it, with the same tokens.
        Raises:
            UnsupportedFeature: the engine has several replicas.
            InvalidRequest: a wrong argument.
            EngineClosed: the engine drains or has ended.
            EngineDead: the engine has died.
        """
        self._run.check()
        self._check_one_replica("sleep")
        check_level(level)
        check_mode(mode)
        self._availability.check_open()
        sleep, by = self._core.sleep, object() if mode == "wait" else None
        sleep.sleep(level, self._limit_of(mode), by=by)
        try:
            await self._until_settled(SLEEP)
            while sleep.wants_unloading and sleep.phase is not RunnerPhase.UNLOADED:
                self._availability.check_serving()
                await self._progress.stepped.park()
        except trio.Cancelled:
            if by is not None and sleep.phase is RunnerPhase.SERVING:
                self._take_back(SLEEP, by)
            raise
        sleep.keep(SLEEP, by)

    def sleep_when_idle(self) -> None:
        """Give up the model and the KV cache as soon as no request is live; the next request wakes the engine.

        Raises:
            EngineClosed: the engine drains or has ended.
        """
        self._run.check()
        self._availability.check_open()
        self._core.sleep.sleep_when_idle()

    async def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        """End a sleep; return when requests are computed again. Harmless for an engine that is awake.

        Args:
            tags: what should be back, `weights`, `kv_cache` or `scheduling`; by default everything. Requests are
                computed as soon as weights and KV cache are both asked for; only `scheduling` ends a sleep of level 0.
        Returns:
            Whether the engine is awake.
        Raises:
            InvalidRequest: another tag.
            EngineClosed: the engine has ended.
            EngineDead: the engine has died, also of a model that can no longer be loaded.
        """
        self._run.check()
        checked = check_tags(tags)
        self._availability.check_serving()
        self._wake(checked)
        await trio.lowlevel.checkpoint()
        while self.is_sleeping and self._core.sleep.level is None:
            self._availability.check_serving()
            await self._progress.stepped.park()
        return not self.is_sleeping

    @property
    def is_sleeping(self) -> bool:
        """True from the call of `sleep` until everything is back, and while an idle engine sleeps by itself."""
        return self._core.sleep.is_sleeping

    @property
    def sleeps_in_s(self) -> float | None:
        """Seconds until the engine goes to sleep by itself if no request comes; None while it has one, or will not."""
        due_s = self._core.sleep.due_s
        return None if due_s == math.inf else max(0.0, due_s - trio.current_time())

    @property
    def wakes_by_itself(self) -> bool:
        """True while the engine sleeps because it was idle: the next request wakes it."""
        return self._core.sleep.is_automatic

    def _take_back(self, name: str, by: object) -> None:
        # As at the end of a pause, which it may be.
        self._progress.progressed_s = trio.current_time()
        self._core.sleep.take_back(name, by)

    def _wake(self, tags: frozenset[str]) -> None:
        # No step was due meanwhile, so that sleep is no silence of the runner.
        self._progress.progressed_s = trio.current_time()
        self._core.sleep.wake(tags)

    def _release_all(self) -> None:
        """End a pause, and a sleep if requests are live: they could not finish otherwise."""
        if self.is_paused:
            self.resume_generation()
        if self._core.journal:
            self._wake(frozenset(TAGS))

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached KV that is not in use: no later request finds any of it.

        Args:
            reset_running_requests: preempt the running requests, so that their KV can be forgotten, too.
        Returns:
            False, and nothing was done, if requests hold blocks and may not be preempted.
        """
        self._run.check()
        return self._core.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def _check_one_replica(self, method: str) -> None:
        """Refuse what would have to hold for all replicas at the same moment.

        Raises:
            UnsupportedFeature: there are several.
        """
        if (number := len(self._channels.replicas)) > 1:
            raise UnsupportedFeature(
                f"{method} is not offered with replicas above 1; got {number}", field="replicas", got=number
            )

    def _limit_of(self, mode: str) -> int:
        """Return the serial of the last request that a mode lets finish; under `abort`, end all of them."""
        if mode == "abort":
            self._end_all(FinishReason.ABORT)
        return self._core.journal.last_serial if mode == "wait" else NOTHING

    async def _until_settled(self, name: str) -> None:
        """Wait until what a hold lets finish has, and nothing is computed, or until it has ended. A checkpoint."""
        await trio.lowlevel.checkpoint()
        core = self._core
        # Another hold may be stricter: then what this one lets finish is still to come.
        while (limit := core.sleep.limit_of(name)) < math.inf and (
            core.has_live(limit) or not core.has_settled
        ):
            self._availability.check_serving()
            await self._progress.stepped.park()
