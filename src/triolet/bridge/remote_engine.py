"""The part of an engine's interface that is the same for all callers outside of its thread: facts and short calls.

`triolet.aio` and `triolet.blocking` add what waits. Every method here holds the caller until the engine's thread has
had a turn, about 0.1 ms.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NoReturn, TypedDict, TypeVar

import attrs
import trio

from triolet.bridge.engine_thread import EngineThread
from triolet.config.engine import EngineConfig
from triolet.core.metrics.iteration_stats import EngineStatistics
from triolet.core.output.output_processor import LiveRequest
from triolet.core.request.lora import LoRARequest
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.param_validation import check_type
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.prompt import Prompt
from triolet.core.request.prompt_adapter import PromptAdapterRequest
from triolet.core.request.request import RequestStatus
from triolet.core.request.tokenizer_interface import TokenizerInterface
from triolet.engine.engine import Engine
from triolet.engine.token_stream import TokenStream
from triolet.errors import EngineDead, UnsupportedFeature
from triolet.ipc.snapshot import Snapshot
from triolet.observability.stat_loggers import StatLogger

T = TypeVar("T")


class RequestFields(TypedDict, total=False):
    """Keywords of `generate` that a remote engine hands on unchanged."""

    request_id: str | None
    priority: int
    client: str | None
    queue_timeout: float | None
    cache_salt: str | None
    lora: LoRARequest | None
    prompt_adapter: PromptAdapterRequest | None
    trace_headers: Mapping[str, str] | None
    owner: str | None


class RemoteEngine:
    """Facts and short calls of an engine that runs in a thread of its own."""

    def __init__(self, thread: EngineThread, engine: Engine) -> None:
        self._thread, self._native = thread, engine
        self.config: EngineConfig = engine.config

    # These are read without a hop into the engine's thread: they are constants, or one attribute each.

    @property
    def model_info(self) -> ModelInfo:
        """Facts about the loaded model."""
        return self._native.model_info

    @property
    def model_name(self) -> str:
        """Name under which the model is shown."""
        return self._native.model_name

    @property
    def tokenizer(self) -> TokenizerInterface | None:
        """The model's tokenizer; None if it has none."""
        return self._native.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and answer together, tokens."""
        return self._native.max_model_len

    @property
    def tool_parser(self) -> str | None:
        """Format in which the model calls tools; see `triolet.Engine.tool_parser`."""
        return self._native.tool_parser

    @property
    def reasoning_parser(self) -> str | None:
        """Format in which the model marks its reasoning; None if it marks none."""
        return self._native.reasoning_parser

    @property
    def index(self) -> int:
        """Number of the engine among those of this process, as metrics show it."""
        return self._native.index

    @property
    def death(self) -> EngineDead | None:
        """Error of a dead engine; None while it lives."""
        return self._native.death

    @property
    def is_open(self) -> bool:
        """True if requests are taken."""
        return self._native.is_open

    def default_sampling_params(self) -> SamplingParams:
        """Return the model's own parameters; if they have no `max_tokens`, the context is the limit."""
        return self._native.default_sampling_params()

    def cache_config(self) -> dict[str, object]:
        """Return the layout of the KV cache, in vLLM's words."""
        return self._native.cache_config()

    def statistics(self) -> EngineStatistics:
        """Return the engine's counts, all taken at one moment."""
        return self._thread.call(self._native.statistics)

    def check_health(self) -> None:
        """Check that requests are being served; raises as `triolet.Engine.check_health` does."""
        self._thread.call(self._native.check_health)

    def status(self, request_id: str) -> RequestStatus | None:
        """Return the status of a request, also for a while after it ended; None for an unknown id."""
        return self._thread.call(self._native.status, request_id)

    def requests(self, owner: str | None = None) -> tuple[LiveRequest, ...]:
        """Return the requests that wait or run, of one owner or of all, in the order of arrival."""
        return self._thread.call(self._native.requests, owner)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached KV that is not in use; see `triolet.Engine.reset_prefix_cache`."""
        return self._thread.call(
            self._native.reset_prefix_cache, reset_running_requests=reset_running_requests
        )

    def resume_generation(self) -> None:
        """End a pause; harmless without one."""
        self._thread.call(self._native.resume_generation)

    def sleep_when_idle(self) -> None:
        """Go to sleep as soon as no request is live; see `triolet.Engine.sleep_when_idle`."""
        self._thread.call(self._native.sleep_when_idle)

    @property
    def sleeps_in_s(self) -> float | None:
        """Seconds until the engine goes to sleep by itself; see `triolet.Engine.sleeps_in_s`."""
        return self._thread.call(lambda: self._native.sleeps_in_s)

    @property
    def is_sleeping(self) -> bool:
        """True from the call of `sleep` until everything is back."""
        return self._native.is_sleeping

    @property
    def wakes_by_itself(self) -> bool:
        """True while the engine sleeps because it was idle."""
        return self._native.wakes_by_itself

    @property
    def weight_version(self) -> int:
        """Number of exchanges of the weights so far."""
        return self._native.weight_version

    @property
    def weights_folder(self) -> str:
        """Folder of the weights in use."""
        return self._native.weights_folder

    @property
    def is_paused(self) -> bool:
        """True from the call of `pause_generation` to that of `resume_generation`."""
        return self._native.is_paused

    def add_stat_logger(self, stat_logger: StatLogger) -> None:
        """Report every step and every ended request to a logger, which is called in the engine's thread."""
        self._thread.call(self._native.add_stat_logger, stat_logger)

    def remove_stat_logger(self, stat_logger: StatLogger) -> None:
        """Stop reporting to a logger; harmless if it was not added."""
        self._thread.call(self._native.remove_stat_logger, stat_logger)

    def tell_stat_loggers(self, *, asks_for_summary: bool = False) -> None:
        """Report to the stat loggers now what the next step would report, and perhaps ask for their summaries."""
        self._thread.call(self._native.tell_stat_loggers, asks_for_summary=asks_for_summary)

    def abort(self, request_id: str) -> None:
        """End a request; its reader gets the output so far, with finish_reason `abort`. Unknown ids are ignored."""
        self._thread.call(self._native.abort, request_id)

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forget a LoRA adapter; requests with it go on. Return False if it is not loaded."""
        return self._thread.call(self._native.remove_lora, lora_int_id)

    def list_loras(self) -> set[int]:
        """Return the numbers of the loaded LoRA adapters."""
        return self._thread.call(self._native.list_loras)

    def loras(self) -> tuple[LoRARequest, ...]:
        """Return the loaded LoRA adapters."""
        return self._thread.call(self._native.loras)

    def remove_prompt_adapter(self, prompt_adapter_id: int) -> bool:
        """Forget a prompt adapter; requests with it go on. Return False if it is not loaded."""
        return self._thread.call(self._native.remove_prompt_adapter, prompt_adapter_id)

    def list_prompt_adapters(self) -> set[int]:
        """Return the numbers of the loaded prompt adapters."""
        return self._thread.call(self._native.list_prompt_adapters)

    def prompt_adapters(self) -> tuple[PromptAdapterRequest, ...]:
        """Return the loaded prompt adapters."""
        return self._thread.call(self._native.prompt_adapters)

    def encode(self, *arguments: object, **keywords: object) -> NoReturn:
        """Refuse the call, whose stream has one output: `encode_all` returns that.

        Raises:
            UnsupportedFeature: always.
        """
        raise UnsupportedFeature(
            "encode is not offered outside of Trio's event loop: encode_all takes a list of prompts, also of one",
            field="encode",
        )

    def snapshot(self) -> Snapshot:
        """Return the unfinished requests, for another engine to `resume`; nothing changes in this engine."""
        return self._thread.call(self._native.snapshot)

    def shut_down(self) -> None:
        """Take nothing new, and end what there is with finish_reason `shutdown`; the engine's scope goes on."""
        self._thread.call(self._native.shut_down)

    def _opening(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        remaining_s: float | None,
        fields: RequestFields,
    ) -> Callable[[], TokenStream]:
        """Return a function that makes the native stream, to be called in the engine's thread.

        Args:
            remaining_s: seconds from now to the deadline; None if there is none.
        """
        if remaining_s is None:
            return lambda: self._native.generate(prompt, sampling_params, **fields)
        due_s = time.monotonic() + remaining_s  # the stream may be entered at any time from now on
        return lambda: self._native.generate(
            prompt, sampling_params, deadline=engine_time(due_s - time.monotonic()), **fields
        )

    def _calling(
        self,
        method: Callable[..., Awaitable[T]],
        prompts: Any,
        params: Any,
        arguments: dict[str, Any],
        remaining_s: Callable[[float | None], float | None],
    ) -> Callable[[], Awaitable[T]]:
        """Return a function that calls a native method with a deadline, for `EngineThread.submit`.

        Args:
            remaining_s: returns the seconds that are left until a deadline of the caller's clock.
        """
        left_s = remaining_s(arguments.pop("deadline", None))
        return lambda: method(prompts, params, deadline=engine_time(left_s), **arguments)

    def _resumed(self, snapshot: Snapshot) -> dict[str, Callable[[], TokenStream]]:
        """Return functions that return the native streams of a snapshot, by request id."""
        streams = self._thread.call(self._native.resume, snapshot)
        return {request_id: partial(_same, stream) for request_id, stream in streams.items()}

    def _whole_answer(self, sampling_params: SamplingParams | None) -> SamplingParams:
        """Return these parameters, or the model's own, for one output at the end."""
        if sampling_params is not None:
            check_type("sampling_params", sampling_params, SamplingParams, "SamplingParams")
        params = sampling_params or self.default_sampling_params()
        return attrs.evolve(params, output_kind=RequestOutputKind.FINAL_ONLY)


def engine_time(remaining_s: float | None) -> float | None:
    """Return the time of the engine's clock that lies so many seconds ahead. Called in the engine's thread."""
    return None if remaining_s is None else trio.current_time() + remaining_s


def _same(stream: TokenStream) -> TokenStream:
    return stream
