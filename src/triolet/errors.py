"""Exceptions that triolet raises on purpose, grouped by whose fault they are.

Four groups tell a caller what to do:

* `InvalidRequest`: this request is wrong and was not accepted. Change it.
* `ConfigError` and `ModelError`: the engine cannot start like this. Change the configuration or the model folder.
* `Overloaded`, `ResourceShortage`, `EngineClosed`, `EngineUnhealthy`, `EngineDead`: the request is fine; the engine
  cannot serve it now.
* `RequestFailed`: the request was accepted and could not be finished; other requests continue.

`RunnerDied` and similar ones are crashes that a supervisor repairs: a caller meets them while the engine starts, or as
the cause of an `EngineDead`. `InvariantViolated` is a bug in triolet. Messages name the field, the rule and the value.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

MAX_SHOWN_CHARS = 80


class _Beginning(reprlib.Repr):
    """Text of a value up to about the length that is shown."""

    def __init__(self) -> None:
        # What is not shown is not made either: `repr` of a text of megabytes holds the GIL for milliseconds. Each limit
        # is well above the length that is shown, so that what is seen is the beginning of the usual text.
        super().__init__()
        self.maxlevel = self.maxlist = self.maxtuple = self.maxdict = MAX_SHOWN_CHARS
        self.maxset = self.maxfrozenset = self.maxdeque = self.maxarray = MAX_SHOWN_CHARS
        self.maxstring = self.maxlong = self.maxother = 4 * MAX_SHOWN_CHARS

    def repr_instance(self, x: object, level: int) -> str:
        return repr(x)


_BEGINNING = _Beginning()


def shown(got: object) -> str:
    """Return a short text of a value for a message; it never fails (an int of 5000 digits has no `repr`)."""
    try:
        text = _BEGINNING.repr(got)
    except Exception:
        return f"a {type(got).__name__} that cannot be shown"
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


class TrioletError(Exception):
    """Base of all exceptions that triolet raises on purpose."""

    # Python would pickle and copy it as a call of its class with `args`, the finished message, where many classes take
    # the parts of one.
    def __reduce__(self) -> tuple[object, ...]:
        return _without_init, (type(self), self.args), self.__dict__


def _without_init(kind: type[TrioletError], args: tuple[object, ...]) -> TrioletError:
    error = kind.__new__(kind)
    error.args = args
    return error


# ---------------------------------------------------------------------------- the caller's request


class InvalidRequest(TrioletError, ValueError):
    """A request that cannot be accepted as it is; nothing was queued for it.

    Args:
        message: the whole sentence, with field, rule and value.
        field: name of the offending field, as the caller wrote it.
        got: the value that came.
    """

    def __init__(self, message: str, *, field: str | None = None, got: object = None) -> None:
        super().__init__(message)
        self.field = field
        self.got = got

    @property
    def parameter(self) -> str | None:
        """`field` under the name that vLLM's validation errors use."""
        return self.field

    @property
    def value(self) -> object:
        """`got` under the name that vLLM's validation errors use."""
        return self.got


class InvalidParams(InvalidRequest):
    """A sampling parameter of the wrong type or out of its range."""


class InvalidPrompt(InvalidRequest):
    """A prompt that is empty, of an unknown form, or holds ids outside the vocabulary."""


class PromptTooLong(InvalidPrompt):
    """The prompt leaves no room for an answer.

    Args:
        num_prompt_tokens: length of the prompt, tokens.
        max_model_len: longest sequence of this engine, prompt and answer together, tokens.
        has_answer: whether the request wanted an answer.
        is_estimate: whether `num_prompt_tokens` is about the length only.
    """

    def __init__(
        self,
        num_prompt_tokens: int,
        max_model_len: int,
        *,
        has_answer: bool = True,
        is_estimate: bool = False,
    ) -> None:
        no_room = ", which leaves no room for an answer" if has_answer else ""
        about = "about " if is_estimate else ""
        super().__init__(
            # Clients such as litellm look for the first sentence, which is vLLM's and OpenAI's.
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has "
            f"{about}{num_prompt_tokens} tokens{no_room}. Please shorten the prompt.",
            field="prompt",
            got=num_prompt_tokens,
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


class RequestIdInUse(InvalidRequest, KeyError):
    """A live request has this id; it is free again as soon as that one has ended.

    It is a ValueError and a KeyError: vLLM's versions raise the one or the other.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request_id must not belong to a live request; got {shown(request_id)}",
            field="request_id",
            got=request_id,
        )

    # That of KeyError would show the sentence in quotes.
    __str__ = Exception.__str__


class ChatTemplateError(InvalidRequest):
    """The model's chat template refused the messages, failed, or passed its work or output limit."""


class UnsupportedFeature(InvalidRequest):
    """A feature that is known by name and not offered (yet): it is refused rather than ignored."""


class UnknownWorkerMethod(UnsupportedFeature):
    """A call into the workers of a method that is not in their table, or of a function that cannot be imported.

    Args:
        method: the name that was called.
        rule: what it must be, completing "method must be ...".
    """

    def __init__(self, method: str, rule: str) -> None:
        super().__init__(f"method must be {rule}; got {shown(method)}", field="method", got=method)
        self.method, self.rule = method, rule


class AdapterError(InvalidRequest):
    """A LoRA adapter or a prompt adapter that cannot be loaded; the engine and its other adapters are unchanged.

    Args:
        path: the file or the folder.
        problem: what is wrong with it, with the tensor or the field, completing "<path>: ...".
        field: argument of `generate` that named it.
    """

    def __init__(self, path: object, problem: str, field: str = "lora") -> None:
        super().__init__(f"{path}: {problem}", field=field, got=str(path))
        self.path, self.problem = str(path), problem


class SnapshotError(InvalidRequest):
    """Bytes that are not a snapshot of unfinished requests, or a snapshot that this engine cannot resume."""


# ------------------------------------------------------------------------- the operator's set-up


class ConfigError(TrioletError, ValueError):
    """A field of `EngineConfig` (or its flag or environment variable) is wrong.

    Args:
        field: the field's name.
        rule: what it must be, completing "<field> must be ...".
        got: the value that came.
    """

    def __init__(self, field: str, rule: str, got: object) -> None:
        super().__init__(f"{field} must be {rule}; got {shown(got)}")
        self.field, self.rule, self.got = field, rule, got


class RecordingError(TrioletError, ValueError):
    """A file is not a recording of requests, or is damaged; the message names its line."""


class ModelError(TrioletError):
    """The model cannot be loaded; no part of it stays loaded."""


class ModelNotFound(ModelError):
    """Neither a folder with a config.json nor a model that the hub knows."""


class HubUnreachable(ModelError):
    """The model hub could not be reached, and the model is not in the local cache."""


class ModelFileError(ModelError):
    """A file of the model folder is missing, truncated or not of the format that its name says.

    Args:
        path: the file.
        problem: what is wrong with it, completing "<path>: ...".
    """

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path, self.problem = str(path), problem


class UnsupportedModel(ModelError):
    """An architecture, or a feature of one, that neither the native decoder nor the fallback can run."""


class RemoteCodeRefused(ModelError):
    """The model wants to run its own Python code and `trust_remote_code` is off."""


class WeightsMismatch(ModelError):
    """Tensors of the checkpoint do not fit the architecture.

    Args:
        missing: names of tensors the architecture needs and the checkpoint lacks.
        unused: names of tensors in the checkpoint that the architecture has no place for.
        misshapen: sentences "name must be (..); got (..)".
    """

    def __init__(
        self, *, missing: Sequence[str] = (), unused: Sequence[str] = (), misshapen: Sequence[str] = ()
    ) -> None:
        self.missing, self.unused, self.misshapen = tuple(missing), tuple(unused), tuple(misshapen)
        parts = [
            f"{label}: {_listed(names)}"
            for label, names in (
                ("missing tensors", self.missing),
                ("unused tensors", self.unused),
                ("misshapen tensors", self.misshapen),
            )
            if names
        ]
        super().__init__("the checkpoint does not fit the architecture; " + "; ".join(parts))


def _listed(names: Sequence[str], most: int = 20) -> str:
    """Join the first names, with the number of the others: a wrong checkpoint has thousands."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# ----------------------------------------------------------------------------- the engine's state


class Overloaded(TrioletError):
    """Admission is full. Retry after `retry_after_s` seconds.

    Args:
        limit: the configuration field whose bound was reached.
        bound: that bound.
        retry_after_s: an estimate, seconds.
        is_for_others: the remaining room is reserved for clients with fewer requests (`policy="fair"`).
    """

    def __init__(self, limit: str, bound: int, retry_after_s: float, *, is_for_others: bool = False) -> None:
        kept = ", the last eighth of it for clients with less" if is_for_others else ""
        super().__init__(f"the engine is full ({limit}={bound}{kept}); retry after {retry_after_s:.1f} s")
        self.limit, self.bound, self.retry_after_s = limit, bound, retry_after_s
        self.is_for_others = is_for_others


class AdaptersPinned(Overloaded, RuntimeError):
    """There is no room for another LoRA adapter: all that are loaded are pinned items.

    Args:
        bound: how many may be loaded.
    """

    def __init__(self, bound: int) -> None:
        TrioletError.__init__(
            self,
            f"all {bound} LoRA adapters that may be loaded (max_cpu_loras) are pinned items; remove one of them first",
        )
        self.limit, self.bound, self.retry_after_s, self.is_for_others = "max_cpu_loras", bound, 1.0, False


class ResourceShortage(TrioletError):
    """The machine has none left of a resource that this request needs. Retry after `retry_after_s` seconds.

    Other requests continue.

    Args:
        resource: the resource, in words.
        purpose: what it was needed for, completing "there is a shortage of ... for ...".
        retry_after_s: an estimate, seconds.
    """

    def __init__(self, resource: str, purpose: str, retry_after_s: float = 1.0) -> None:
        super().__init__(
            f"there is a shortage of {resource} for {purpose}; retry after {retry_after_s:.1f} s"
        )
        self.resource, self.purpose, self.retry_after_s = resource, purpose, retry_after_s


class EngineClosed(TrioletError):
    """The engine's scope has ended, or it is draining and takes nothing new."""


class EngineDead(TrioletError):
    """The engine gave up after repeated crashes; `__cause__` is the last one."""


class EngineUnhealthy(TrioletError):
    """Work is pending and no step has finished for too long; the engine may recover.

    Args:
        actor: the actor that the others wait for.
        waiting_s: for how long, seconds.
    """

    def __init__(self, actor: str, waiting_s: float) -> None:
        super().__init__(
            f"{actor} is stuck: requests are waiting and no step has finished for {waiting_s:.1f} s"
        )
        self.actor, self.waiting_s = actor, waiting_s


class WrongTrioRun(TrioletError, RuntimeError):
    """An engine or stream was used outside of the Trio run in which the engine was opened."""

    def __init__(self) -> None:
        super().__init__(
            "an engine must be used in the Trio run in which it was opened; from another thread, use "
            "trio.from_thread.run or run_sync with that run's trio_token"
        )


class WrongEventLoop(TrioletError, RuntimeError):
    """An engine was opened or used under an event loop that it does not run in, or in a fork of its process."""


class StreamMisused(TrioletError, RuntimeError):
    """A stream was iterated outside of its `async with`, entered twice, or read by two tasks."""


class RequestFailed(TrioletError):
    """An accepted request could not be finished; `__cause__`, where there is one, says why."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(f"request {request_id} failed: {reason}")
        self.request_id, self.reason = request_id, reason


class ProfileConflict(TrioletError):
    """A profile is to be started while one is recorded, or to be stopped while none is."""


class WorkerCallError(TrioletError):
    """A call into the workers that raised an exception of a class that is not made again here, or was broken off.

    The message has type and text of the exception.
    """


class WorkerCallTimeout(TrioletError, TimeoutError):
    """A call into the workers that has not ended in time. The process of the model runner was ended if there is one.

    Args:
        method: the name that was called.
        timeout_s: its time limit, seconds.
    """

    def __init__(self, method: str, timeout_s: float) -> None:
        super().__init__(f"the call of {method} must end within {timeout_s:g} s; it did not")
        self.method, self.timeout_s = method, timeout_s


# ------------------------------------------------------------- a crash, which a supervisor repairs


class RunnerDied(TrioletError):
    """The process of the model runner has ended, or had to be ended; its supervisor starts another one.

    Args:
        reason: completing "the model runner's process ...".
        returncode: its exit status, or, negative, the number of the signal that ended it; None if another machine has
            not told it.
        is_hang: it was ended because it hung.
        is_lost: nothing is known but that its machine cannot be reached any more.
    """

    def __init__(
        self, reason: str, returncode: int | None, *, is_hang: bool = False, is_lost: bool = False
    ) -> None:
        super().__init__(f"the model runner's process {reason}")
        self.reason, self.returncode, self.is_hang, self.is_lost = reason, returncode, is_hang, is_lost

    @property
    def exit_status(self) -> int | None:
        """The exit status, if it ended by itself."""
        return self.returncode if self.returncode is not None and self.returncode >= 0 else None

    @property
    def signal(self) -> int | None:
        """The number of the signal that ended it, if one did."""
        return -self.returncode if self.returncode is not None and self.returncode < 0 else None


class RunnerFailed(TrioletError):
    """Computing a step raised an exception in the process of the model runner; the message has its type and text."""


class FrameError(TrioletError, ValueError):
    """Bytes between the engine and the process of the model runner do not follow their protocol."""


class WorkerRefused(TrioletError):
    """An engine and a worker that has connected to it do not work together: another token, or another version."""


# ------------------------------------------------------------------------------- bugs in triolet


class KernelShapeError(TrioletError, ValueError):
    """A kernel was launched with tensors that do not fit together.

    Args:
        what: the dimensions that must agree.
        **got: the shapes (or dtypes, devices) that came, by argument name.
    """

    def __init__(self, what: str, **got: object) -> None:
        super().__init__(
            f"{what} must agree; got " + ", ".join(f"{name}={value}" for name, value in got.items())
        )
        self.what, self.got = what, got


class InvariantViolated(TrioletError, AssertionError):
    """A `check()` found counts that cannot be true together: a bug in triolet."""
