"""Methods of `Engine` that call into the workers, also to profile them, with the names of vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triolet.actors.actor_progress import ActorProgress
from triolet.actors.channels import Channels
from triolet.core.profile import StepRecorder
from triolet.core.request.param_validation import check_type
from triolet.core.worker_call import WorkerCall
from triolet.engine.adapters import AdapterMethods
from triolet.engine.submission import seconds
from triolet.engine.token_stream import Availability
from triolet.errors import InvalidRequest, ProfileConflict
from triolet.observability.profile_path import check_profiling, new_profile_path

PROFILE_TIMEOUT_S = 600.0  # a trace of many steps takes long to write


class WorkerCallMethods(AdapterMethods):
    """Base class of `Engine`: calls methods of the worker, and functions with its model."""

    _channels: Channels
    _progress: ActorProgress
    _profile_path: str = ""
    _availability: Availability

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,  # noqa: ASYNC109  vLLM's name
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        invalidates: bool = False,
    ) -> list[Any]:
        """Call a method of every worker between two steps; return the results in the order of the ranks.

        Args:
            method: name of a method of `worker_extension`, or of the worker's own; a callable, which gets the worker
                first, only where the model runs in this process (`runner` thread or inline).
            timeout: seconds until the result. A call without one may take `step_timeout` in a process.
            args: positional arguments; for a process None, numbers, texts, bytes, tensors, and lists, tuples and
                mappings of these. The same holds for the result.
            kwargs: keyword arguments.
            invalidates: whether the call changes what the model computes: no step is computed from KV of before it.
                A restart of the process loads the weights again, without the change.
        Raises:
            UnknownWorkerMethod: there is no such method.
            UnsupportedFeature: a callable, and the model runs in a process.
            InvalidRequest: a wrong argument, or one that cannot be sent.
            WorkerCallTimeout: the call has not ended in time, a TimeoutError. A process that is in it for as long is
                ended and restarted, and the streams continue; a thread is waited for by the next step.
            WorkerCallError: the method raised an exception that is neither built in nor triolet's; other exceptions are
                raised as they are, and the engine goes on.
            RunnerDied: the process ended in the call.
        """
        return await self._call(
            WorkerCall(method, False, tuple(args), dict(kwargs or {}), invalidates), timeout, invalidates
        )

    async def apply_model(
        self,
        func: str | Callable[[Any], Any],
        timeout: float | None = None,  # noqa: ASYNC109  vLLM's name
        *,
        invalidates: bool = False,
    ) -> list[Any]:
        """Call a function with every worker's model; see `collective_rpc`.

        Args:
            func: the function; its name, `module:function`, where the model runs in a process, which imports it.
            timeout: as for `collective_rpc`, which the results and the errors are those of, too.
        """
        return await self._call(WorkerCall(func, True, invalidates=invalidates), timeout, invalidates)

    async def start_profile(self, prefix: str | None = None) -> None:
        """Record the steps from now on: their spans, and what torch's profiler sees of them.

        The steps are slower meanwhile. At most 20,000 are recorded. A recording ends with its worker: if that restarts,
        there is no trace.

        Args:
            prefix: beginning of the file's name: letters, digits, dots, hyphens and underscores.
        Raises:
            UnsupportedFeature: `profile_dir` is not set.
            ProfileConflict: a profile is being recorded.
            ConfigError: the folder cannot be written to.
            InvalidRequest: another prefix.
        """
        self._run.check()
        folder = check_profiling(self.config.profile_dir, "start_profile")
        path = new_profile_path(folder, prefix)
        if self._progress.profile is not None:
            raise ProfileConflict("a profile is being recorded; stop it first")
        # First, so that a plan that is made while the call waits is recorded: the worker computes it after the call.
        self._progress.profile = StepRecorder()
        self._profile_path = path
        try:
            await self._call(WorkerCall("start_profile", args=(path,)), PROFILE_TIMEOUT_S, False)
        except BaseException:
            self._progress.profile = None
            raise

    async def stop_profile(self) -> str:
        """End the recording and write it as one Chrome trace, for chrome://tracing or Perfetto; return its path.

        Raises:
            UnsupportedFeature: `profile_dir` is not set.
            ProfileConflict: no profile is being recorded, or it was lost with a restart of the worker.
            ConfigError: the file cannot be written.
            EngineClosed: the engine has ended.
            EngineDead: the engine has died.
        """
        self._run.check()
        check_profiling(self.config.profile_dir, "stop_profile")
        recorder = self._progress.profile
        if recorder is None:
            raise ProfileConflict("no profile is being recorded; start it first")
        try:
            [was_recording] = await self._call(WorkerCall("stop_profile"), PROFILE_TIMEOUT_S, False)
            if not was_recording:
                raise ProfileConflict("the profile was lost: the worker was restarted")
            # The last result is yet to be applied.
            while self._channels.scheduler_inbox.statistics().current_buffer_used:
                self._availability.check_serving()
                await self._progress.stepped.park()
        finally:
            self._progress.profile = None
        await self._call(WorkerCall("write_profile", args=(recorder.values(),)), PROFILE_TIMEOUT_S, False)
        return self._profile_path

    async def _call(self, call: WorkerCall, timeout: float | None, invalidates: bool) -> list[Any]:  # noqa: ASYNC109  vLLM's name
        self._run.check()
        if not callable(call.target):
            check_type("method", call.target, str, "the name of a method, or a callable")
        timeout_s = None if timeout is None else seconds("timeout", timeout)
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise InvalidRequest(f"timeout must be positive; got {timeout}", field="timeout", got=timeout)
        if not self._availability.is_serving or self._availability.death is not None:
            self._availability.check_open()
        return await self._channels.worker_calls.make(call, timeout_s, invalidates=invalidates)
