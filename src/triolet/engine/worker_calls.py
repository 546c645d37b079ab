"""Methods of `Engine` that call into the workers, with the names and the return values of vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triolet.actors.channels import Channels
from triolet.core.worker_call import WorkerCall
from triolet.engine.adapters import AdapterMethods
from triolet.engine.submission import check_type, seconds
from triolet.engine.token_stream import Availability
from triolet.errors import InvalidRequest


class WorkerCallMethods(AdapterMethods):
    """Base class of `Engine`: calls methods of the worker, and functions with its model."""

    _channels: Channels
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
        """Call a method of every worker between two steps; return the results in the order of the ranks: one.

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
            WorkerCallTimeout: the call has not ended in time, a TimeoutError. A process is ended and restarted, and the
                streams continue; a thread is waited for by the next step.
            WorkerCallError: the method raised an exception that is neither built in nor triolet's; other exceptions are
                raised as they are, and the engine goes on.
            RunnerDied: the process ended in the call.
        """
        return [
            await self._call(WorkerCall(method, False, tuple(args), dict(kwargs or {})), timeout, invalidates)
        ]

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
        return [await self._call(WorkerCall(func, True), timeout, invalidates)]

    async def _call(self, call: WorkerCall, timeout: float | None, invalidates: bool) -> Any:  # noqa: ASYNC109  vLLM's name
        self._run.check()
        if not callable(call.target):
            check_type("method", call.target, str, "the name of a method, or a callable")
        timeout_s = None if timeout is None else seconds("timeout", timeout)
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise InvalidRequest(f"timeout must be positive; got {timeout}", field="timeout", got=timeout)
        if not self._availability.is_serving or self._availability.death is not None:
            self._availability.check_open()
        return await self._channels.worker_calls.make(call, timeout_s, invalidates=invalidates)
