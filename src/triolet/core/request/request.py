"""Request: a prompt with its parameters, resolved and checked once; its status, reasons for its end, and times."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

import attrs

from triolet.core.kv_cache.prefix_cache import DEFAULT_NAMESPACE, CacheNamespace
from triolet.core.request.grammar_state import Constraint
from triolet.core.request.lora import Adapter
from triolet.core.request.param_validation import MAX_INT64
from triolet.core.request.params import SamplingParams
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.prompt_adapter import SoftPrompt

# The two headers of W3C Trace Context are carried along unread. They are not checked here. The exporter of
# spans reads them with OpenTelemetry's own parser, which ignores a header that it does not understand.
#
# Source: W3C Trace Context, level 1.
TRACE_HEADERS = ("traceparent", "tracestate")
MAX_HEADER_CHARS = 1024  # W3C asks for 512 at least; a longer one costs memory and says nothing more

TraceHeaders = tuple[tuple[str, str], ...]
"""Names, in lower case, and values."""


def pick_trace_headers(headers: Mapping[str, Any], prefix: str = "") -> TraceHeaders:
    """Return the trace headers among `headers`; values that are not text, or too long, are left out.

    Args:
        headers: values by name, in upper or lower case.
        prefix: text before the names of trace headers.
    """
    wanted = {prefix + name: name for name in TRACE_HEADERS}
    return tuple(
        (wanted[name.lower()], value)
        for name, value in headers.items()
        if name.lower() in wanted and isinstance(value, str) and len(value) <= MAX_HEADER_CHARS
    )


class RequestTask(StrEnum):
    """Kind of result that a request wants."""

    GENERATE = "generate"
    POOL = "pool"  # vectors computed from the prompt


@attrs.frozen(kw_only=True)
class Request:
    """One prompt with everything that determines its answer."""

    request_id: str  # unique among live requests
    prompt: str | None = None  # text of the prompt, if it came as text
    prompt_token_ids: tuple[int, ...]  # never empty, all in the vocabulary, fewer than `max_model_len`
    params: SamplingParams  # as the caller gave them, or the model's defaults
    # Of the sampling noise; drawn by the engine where `params.seed` is None, so that a replay repeats it.
    seed: int
    max_tokens: int  # most tokens of the answer: `params.max_tokens`, cut to the rest of the context
    # Ids that end the answer, unless `params.ignore_eos`; the one of the tokenizer first.
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # token ids of each bad word
    priority: int = 0  # lower runs first under the `priority` policy
    parent_id: str | None = None  # id of the request with n > 1 that this one belongs to
    index: int = 0  # of the answer among those to the prompt
    num_answers: int = 1  # to the prompt, this one included
    stream_interval: int = 1  # tokens from one output of the stream to the next
    constraint: Constraint | None = None  # grammar and reasoning rules of the answer
    client: str | None = None  # name of the client that the request belongs to
    owner: str | None = None  # name of the server's key, if there is one
    # Of a request that wants vectors instead of an answer; `params` has no meaning for it then.
    pooling: PoolingParams | None = None
    cache_namespace: CacheNamespace = DEFAULT_NAMESPACE  # requests share cached blocks only within one
    adapter: Adapter | None = None  # LoRA adapter that computes the answer
    # Virtual tokens before the prompt; `prompt_token_ids` begins with as many placeholders.
    soft_prompt: SoftPrompt | None = None
    trace_headers: TraceHeaders = ()  # names and values of the trace context headers
    arrival_s: float = 0.0  # when it was admitted, monotonic seconds
    deadline_s: float = float("inf")  # when it ends with what it has, monotonic seconds; infinity for never
    queue_deadline_s: float = float("inf")  # when it ends if it has not been scheduled yet, monotonic seconds
    # Tokens at the beginning of the prompt that the caller did not send, and does not see or pay.
    num_virtual_tokens: int = attrs.field(init=False)

    @num_virtual_tokens.default
    def _count_virtual_tokens(self) -> int:
        return 0 if self.soft_prompt is None else self.soft_prompt.num_virtual_tokens

    @property
    def task(self) -> RequestTask:
        """Kind of result."""
        return RequestTask.GENERATE if self.pooling is None else RequestTask.POOL

    @property
    def account(self) -> str | None:
        """Name under which admission and fairness count the request: that of the key, or of the client without one."""
        # A server takes `client` from the request, so that it must not decide on a key's share.
        return self.client if self.owner is None else self.owner

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Ids that end the answer."""
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return frozenset(eos) | frozenset(self.params.stop_token_ids)


# A request for n answers becomes n requests for one answer each (`fan_out`). They share everything but the
# noise: the i-th has the i-th seed. Each is scheduled, preempted, stopped and recovered like any other;
# `core.output.output_processor` joins their outputs.
def fan_out(request: Request, draw_seed: Callable[[], int]) -> tuple[Request, ...]:
    """Return one request per answer, in the order of their index; for one answer the request itself.

    Args:
        request: for all n answers.
        draw_seed: draws the seed of an answer, where the caller gave none.
    """
    if request.params.n == 1:
        return (request,)
    params = attrs.evolve(request.params, n=1)
    # Log-probabilities of the prompt are the same for all answers, so only the first request computes them.
    silent = attrs.evolve(params, prompt_logprobs=None)
    return tuple(
        attrs.evolve(
            request,
            request_id=f"{index}_{request.request_id}",
            parent_id=request.request_id,
            index=index,
            num_answers=request.params.n,
            params=silent if index else params,
            seed=_wrapped(request.seed + index) if params.seed is not None or index == 0 else draw_seed(),
            # The others count as scheduled once the first one is, so only that one can time out in the queue.
            queue_deadline_s=float("inf") if index else request.queue_deadline_s,
        )
        for index in range(request.params.n)
    )


def _wrapped(seed: int) -> int:
    # A seed above 64 bits wraps around to the negative numbers.
    return seed if seed <= MAX_INT64 else seed - 2**64


class FinishReason(enum.StrEnum):
    """Reason for the end of an answer; the values go on the wire."""

    STOP = "stop"
    """An end-of-sequence token, a stop token id or a stop text."""
    LENGTH = "length"
    """`max_tokens`, or the context is full."""
    ABORT = "abort"
    """The stream was closed, or the request was aborted."""
    ERROR = "error"
    """It failed; the stream raises `RequestFailed`."""
    DEADLINE = "deadline"
    """The deadline passed; the tokens so far were delivered."""
    SHUTDOWN = "shutdown"
    """The engine closed."""
    REPETITION = "repetition"
    """The answer repeated a pattern, and `repetition_detection` was set."""


class RequestStatus(enum.StrEnum):
    """State of a request as its caller sees it."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


STATUS_OF_ENDING: Final[Mapping[FinishReason, RequestStatus]] = MappingProxyType(
    {
        FinishReason.STOP: RequestStatus.COMPLETED,
        FinishReason.LENGTH: RequestStatus.COMPLETED,
        FinishReason.REPETITION: RequestStatus.COMPLETED,
        FinishReason.ERROR: RequestStatus.FAILED,
        FinishReason.ABORT: RequestStatus.CANCELLED,
        FinishReason.DEADLINE: RequestStatus.CANCELLED,
        FinishReason.SHUTDOWN: RequestStatus.CANCELLED,
    }
)


@attrs.frozen(kw_only=True)
class RequestMetrics:
    """Counts and times of a request; `arrival_time` is wall clock, the `_ts` are monotonic, all in seconds.

    Args:
        num_generation_tokens: tokens generated so far.
        num_preemptions: times that the request was preempted.
        arrival_time: when the request arrived, seconds since the epoch.
        queued_ts: when the scheduler received it.
        scheduled_ts: when its first step was planned; 0.0 before.
        first_token_ts: when its first token was known; 0.0 before.
        last_token_ts: when its latest token was known; 0.0 before.
    """

    num_generation_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0

    @property
    def first_token_latency(self) -> float:
        """Seconds from the queue to the first token; 0.0 before it."""
        return self.first_token_ts - self.queued_ts if self.first_token_ts else 0.0

    @property
    def queued_time(self) -> float:
        """Seconds from the queue to the first step; 0.0 before it."""
        return self.scheduled_ts - self.queued_ts if self.scheduled_ts else 0.0

    @property
    def prefill_time(self) -> float:
        """Seconds from the first step to the first token; 0.0 before it."""
        return self.first_token_ts - self.scheduled_ts if self.first_token_ts else 0.0

    @property
    def decode_time(self) -> float:
        """Seconds from the first token to the latest; 0.0 before the first."""
        return self.last_token_ts - self.first_token_ts if self.first_token_ts else 0.0

    @property
    def inference_time(self) -> float:
        """Seconds from the first step to the latest token, time spent preempted included; 0.0 before the first."""
        return self.last_token_ts - self.scheduled_ts if self.first_token_ts else 0.0
