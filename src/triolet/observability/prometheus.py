"""Prometheus metrics of an engine: vLLM's names, labels and buckets, under a prefix of one's own.

    metrics = Metrics(engine)  # from now on, and for what the engine has counted before
    metrics.render()           # what /metrics answers

`prefix="vllm:"` makes existing dashboards work unchanged. Two things are more than vLLM has: every ending is counted
(`deadline`, `shutdown` and `rejected` are reasons too, and an `abort` is never forgotten), and so is every arrival, so
that `requests_received_total` is the sum of `request_success_total` over all reasons whenever nothing is live.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

import attrs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from triolet.core.metrics.iteration_stats import REJECTED, EngineStatistics, FinishedRequest, IterationStats
from triolet.core.recovery.supervision import RESTART_CAUSES
from triolet.core.request.lora import AdapterUsage
from triolet.core.request.request import FinishReason

DEFAULT_PREFIX: Final = "triolet:"
CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
LABELS: Final = ("model_name", "engine")
SAMPLES_AT_ONCE: Final = 64  # as text: about 2 ms

# The buckets are vLLM's, so that its dashboards show the same.
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_ITERATION_BUCKETS = (1, *(2**exponent for exponent in range(3, 15)))
_N_BUCKETS = (1, 2, 5, 10, 20)
_PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)

_GAUGES: Final = {
    "num_requests_running": "Requests being computed.",
    "num_requests_waiting": "Requests waiting to be computed.",
    "kv_cache_usage_perc": "Share of the KV cache that is in use, 0 to 1.",
    "longest_task_step_seconds": "Longest time that one task step has held the event loop, seconds.",
}
# prometheus_client adds `_total` to these names.
_COUNTERS: Final = {
    "num_preemptions": "Preemptions: KV blocks of a running request taken back.",
    "prompt_tokens": "Prompt tokens of requests that got a first token.",
    "generation_tokens": "Tokens generated.",
    "prompt_tokens_cached": "Prompt tokens whose KV was found in the prefix cache.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "external_prefix_cache_queries": "Tokens looked up in the prefix store.",
    "external_prefix_cache_hits": "Tokens whose KV was found in the prefix store.",
    "kv_store_failed_saves": "Blocks that could not be written to the prefix store.",
    "spec_decode_num_drafts": "Drafts: steps that verified draft tokens of a request.",
    "spec_decode_num_draft_tokens": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted.",
    "long_task_steps": "Task steps that held the event loop for more than 10 ms.",
    "recording_lost_records": "Records that are missing in the file of record.",
    "moved_requests": "Times that a request went on at another replica after the death of its own.",
    "requests_received": "Requests received; each ends for exactly one reason.",
}
# By the field of `ReplicaStatistics`; only of an engine with several replicas.
_REPLICA_GAUGES: Final = {
    "is_living": ("replica_up", "1 while the replica computes, 0 while it restarts or is not needed."),
    "num_requests_running": ("replica_requests_running", "Requests that the replica computes."),
    "num_requests_waiting": ("replica_requests_waiting", "Requests that wait for the replica."),
    "kv_blocks_in_use": ("replica_kv_blocks_in_use", "Blocks of its KV cache that are in use."),
    "steps": ("replica_steps", "Forward passes that it has finished."),
}
_SECONDS: Final = {
    "time_to_first_token_seconds": ("From the arrival to the first token.", _TTFT_BUCKETS),
    "inter_token_latency_seconds": ("From one token to the next.", _ITL_BUCKETS),
    "request_time_per_output_token_seconds": (
        "Mean of a request's gaps between tokens; 0 if it has one.",
        _ITL_BUCKETS,
    ),
    "e2e_request_latency_seconds": ("From the arrival to the end.", _LATENCY_BUCKETS),
    "request_queue_time_seconds": ("From the arrival to the first step.", _LATENCY_BUCKETS),
    "request_inference_time_seconds": ("From the first step to the last token.", _LATENCY_BUCKETS),
    "request_prefill_time_seconds": ("From the first step to the first token.", _LATENCY_BUCKETS),
    "request_decode_time_seconds": ("From the first token to the last.", _LATENCY_BUCKETS),
}
_TOKENS: Final = {
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens generated for a request.",
    "request_max_num_generation_tokens": "Tokens of the longest of the n completions.",
    "request_params_max_tokens": "max_tokens of a request.",
    "request_prefill_kv_computed_tokens": "Prompt tokens whose KV had to be computed.",
}
_ACTORS: Final = ("model_runner", "scheduler", "tokenizer", "detokenizer", "structured_output")
_STATES_BY_LEVEL: Final = {1: "weights_offloaded", 2: "discard_all"}  # vLLM's words
_SLEEP_STATES: Final = ("awake", *_STATES_BY_LEVEL.values())
_REFUSING_STATUSES: Final = (401, 403, 413, 429, 503)
UNMATCHED: Final = "unmatched"
"""Label `route` of a response to a request for which there is no route, or that could not be read."""
HTTP_CLOSE_REASONS: Final = ("client", "server", "idle", "write_timeout", "upgrade", "shutdown", "error")
_BLOCK_STATES: Final = ("free", "cached", "in_use", "quarantined")
_REASONS: Final = (*FinishReason, REJECTED)
_REJECTION_LABELS: Final = {  # the bounds of EngineConfig, under vLLM's names
    "max_queued_requests": "max_num_queued_reqs",
    "max_queued_tokens": "max_num_queued_tokens",
}


class MetricsSource(Protocol):
    """Interface of an engine that metrics are read from."""

    @property
    def model_name(self) -> str:
        """The label `model_name`."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence, tokens: where the buckets of token counts end."""
        ...

    def statistics(self) -> EngineStatistics:
        """Return the current counts."""
        ...

    def cache_config(self) -> Mapping[str, object]:
        """Return the labels of `cache_config_info`."""
        ...

    def add_stat_logger(self, stat_logger: Metrics) -> None:
        """Register a stat logger."""
        ...

    def tell_stat_loggers(self) -> None:
        """Report what stat loggers have not been told yet."""
        ...


class Metrics:
    """Prometheus registry of one engine; joins it as a stat logger.

    Args:
        engine: a running engine.
        prefix: of every name, colon included.
        adapters: returns the adapters that are in use; None for an engine without adapters.
    """

    def __init__(
        self,
        engine: MetricsSource,
        prefix: str = DEFAULT_PREFIX,
        adapters: Callable[[], AdapterUsage] | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._engine, self._prefix = engine, prefix
        self._labels = {"model_name": engine.model_name, "engine": str(engine.statistics().engine_index)}
        self._gauges = {name: self._make(Gauge, name, text) for name, text in _GAUGES.items()}
        self._counters = {name: self._make(Counter, name, text) for name, text in _COUNTERS.items()}
        self._histograms = self._make_histograms(engine.max_model_len)
        self._waiting_by_reason = self._make_by(
            Gauge,
            "num_requests_waiting_by_reason",
            "Requests waiting, by reason.",
            "reason",
            ("capacity", "deferred"),
        )
        self._success = self._make_by(
            Counter, "request_success", "Finished requests, by reason.", "finished_reason", _REASONS
        )
        self._rejections = self._make_by(
            Counter,
            "admission_rejections",
            "Requests refused at admission.",
            "reason",
            tuple(_REJECTION_LABELS.values()),
            common=("model_name",),  # as in vLLM: it is the front that refuses, and not one of its engines
        )
        self._by_source = self._make_by(
            Counter,
            "prompt_tokens_by_source",
            "Prompt tokens, by the source of their KV.",
            "source",
            ("local_compute", "local_cache_hit"),
        )
        self._cached_by_source = self._make_by(
            Counter,
            "prompt_tokens_cached_by_source",
            "Tokens found in the prefix cache, by where it keeps them.",
            "source",
            ("device",),
        )
        self._blocks = self._make_by(Gauge, "kv_blocks", "Blocks of the KV cache.", "state", _BLOCK_STATES)
        self._accepted = self._make_by(
            Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            "position",
            tuple(map(str, range(len(engine.statistics().spec_decode_num_accepted_tokens_per_pos)))),
        )
        restarts = Counter(
            prefix + "actor_restarts",
            "Crashes, hangs and failed starts of actors, each followed by a restart.",
            (*LABELS, "actor", "cause"),
            registry=self.registry,
        )
        self._restarts = {
            (actor, cause): restarts.labels(**self._labels, actor=actor, cause=cause)
            for actor in _ACTORS
            for cause in RESTART_CAUSES
        }
        self._restarting = self._make_by(
            Gauge, "actor_restarting", "1 while an actor is being restarted, else 0.", "actor", _ACTORS
        )
        self._sleep_state = self._make_by(
            Gauge,
            "engine_sleep_state",
            "1 for the state that the engine is in, else 0.",
            "sleep_state",
            _SLEEP_STATES,
        )
        replicas = tuple(str(replica.replica) for replica in engine.statistics().replicas)
        self._by_replica = {
            field: self._make_by(Gauge, name, text, "replica", replicas)
            for field, (name, text) in _REPLICA_GAUGES.items()
            if replicas
        }
        self._make_cache_info()
        self._adapters, self._adapter_info = adapters, self._make_adapter_info() if adapters else None
        self._last: EngineStatistics | None = None
        self._catch_up(engine.statistics())
        engine.add_stat_logger(self)

    def render(self) -> bytes:
        """Return the metrics as text; the content type is `CONTENT_TYPE`."""
        return b"".join(self.render_in_pieces())

    def render_in_pieces(self, *others: Metrics) -> Iterator[bytes]:
        """Yield the text in pieces: all of it takes some 10 ms, in which an event loop does nothing else.

        Args:
            others: of further engines of the same program, whose series stand beside this one's.
        """
        for one in (self, *others):
            one._engine.tell_stat_loggers()
            one._catch_up(one._engine.statistics())
            one._catch_up_adapters()
        yield from pieces_of(self.registry, *(one.registry for one in others))

    # ---------------------------------------------------------------------------------------- making

    def _make(self, kind: Any, name: str, text: str, **more: Any) -> Any:
        # A registry of its own, so that several engines of one program do not collide.
        family = kind(self._prefix + name, text, LABELS, registry=self.registry, **more)
        return family.labels(**self._labels)

    def _make_by(
        self,
        kind: Any,
        name: str,
        text: str,
        label: str,
        values: tuple[str, ...],
        common: tuple[str, ...] = LABELS,
    ) -> dict[str, Any]:
        """Return a child per label value."""
        # All exist from the start: a rate over a series that begins at 1 misses the 1.
        family = kind(self._prefix + name, text, (*common, label), registry=self.registry)
        labels = {name: self._labels[name] for name in common}
        return {str(value): family.labels(**labels, **{label: str(value)}) for value in values}

    def _make_histograms(self, max_model_len: int) -> dict[str, Any]:
        token_buckets = decade_buckets(max_model_len)
        kinds: dict[str, tuple[str, tuple[float, ...]]] = {
            **_SECONDS,
            **{name: (text, token_buckets) for name, text in _TOKENS.items()},
            "iteration_tokens_total": ("Tokens computed in a step.", _ITERATION_BUCKETS),
            "request_params_n": ("Completions requested (n).", _N_BUCKETS),
            "request_num_preemptions": ("Times a request was preempted.", _PREEMPTION_BUCKETS),
        }
        return {
            name: self._make(Histogram, name, text, buckets=buckets)
            for name, (text, buckets) in kinds.items()
        }

    def _make_cache_info(self) -> None:
        facts = {key: str(value) for key, value in self._engine.cache_config().items()}
        info = Gauge(
            self._prefix + "cache_config_info",
            "Layout of the KV cache, as labels.",
            (*LABELS, *facts),
            registry=self.registry,
        )
        info.labels(**self._labels, **facts).set(1)

    def _make_adapter_info(self) -> Gauge:
        return Gauge(
            self._prefix + "lora_requests_info",
            "Time of this answer; the labels name the LoRA adapters of running and waiting requests.",
            ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            registry=self.registry,
        )

    # ------------------------------------------------------------------------------------- recording

    def record(self, statistics: EngineStatistics, iteration: IterationStats) -> None:
        """Record an iteration; called by the engine."""
        self._counters["prompt_tokens"].inc(iteration.num_prompt_tokens)
        self._counters["generation_tokens"].inc(iteration.num_generation_tokens)
        self._counters["prompt_tokens_cached"].inc(iteration.num_cached_tokens)
        self._by_source["local_cache_hit"].inc(iteration.num_cached_tokens)
        self._by_source["local_compute"].inc(iteration.num_prompt_tokens - iteration.num_cached_tokens)
        for name, values in (
            ("iteration_tokens_total", iteration.step_tokens),
            ("time_to_first_token_seconds", iteration.times_to_first_token),
            ("inter_token_latency_seconds", iteration.inter_token_latencies),
        ):
            for value in values:
                self._histograms[name].observe(value)
        for finished in iteration.finished_requests:
            self._record_finished(finished)
        for limit, count in iteration.rejections.items():
            if limit is not None:
                self._rejections[_REJECTION_LABELS[limit]].inc(count)

    def log(self) -> None:
        """Do nothing: Prometheus asks by itself."""

    def _record_finished(self, finished: FinishedRequest) -> None:
        metrics, num_tokens = finished.metrics, finished.metrics.num_generation_tokens
        seen = {
            "request_prompt_tokens": finished.num_prompt_tokens,
            "request_generation_tokens": num_tokens,
            "request_params_max_tokens": finished.max_tokens,
            "request_num_preemptions": metrics.num_preemptions,
            "request_prefill_kv_computed_tokens": finished.num_prompt_tokens - finished.num_cached_tokens,
            "e2e_request_latency_seconds": finished.e2e_latency,
        }
        # Once per prompt: with n > 1 each answer is recorded, too.
        if finished.is_last:
            longest = max(answer.metrics.num_generation_tokens for answer in finished.answers)
            seen |= {"request_max_num_generation_tokens": longest, "request_params_n": finished.n}
        # 0 for a request that ended before its first step.
        if metrics.scheduled_ts:
            seen["request_queue_time_seconds"] = metrics.queued_time
        if num_tokens:
            seen["request_prefill_time_seconds"] = metrics.prefill_time
            seen["request_decode_time_seconds"] = metrics.decode_time
            seen["request_inference_time_seconds"] = metrics.inference_time
            seen["request_time_per_output_token_seconds"] = metrics.decode_time / max(1, num_tokens - 1)
        for name, value in seen.items():
            self._histograms[name].observe(value)

    def _catch_up_adapters(self) -> None:
        if self._adapters is None or self._adapter_info is None:
            return
        usage = self._adapters()
        self._adapter_info.clear()  # one series: each set of names would otherwise leave its own behind
        self._adapter_info.labels(
            str(usage.max_loras), ",".join(usage.running), ",".join(usage.waiting)
        ).set_to_current_time()

    def _catch_up(self, now: EngineStatistics) -> None:
        """Update all metrics that the engine counts itself."""
        self._gauges["num_requests_running"].set(now.num_requests_running)
        self._gauges["num_requests_waiting"].set(now.num_requests_waiting)
        self._waiting_by_reason["capacity"].set(now.num_requests_waiting - now.num_requests_deferred)
        self._waiting_by_reason["deferred"].set(now.num_requests_deferred)
        for state, gauge in self._blocks.items():
            gauge.set(getattr(now, f"kv_blocks_{state}"))
        self._gauges["kv_cache_usage_perc"].set(now.kv_blocks_in_use / now.kv_blocks_total)
        self._gauges["longest_task_step_seconds"].set(now.longest_task_step_s)
        before = self._last
        for name, field in (
            ("num_preemptions", "num_preemptions"),
            ("prefix_cache_queries", "prefix_cache_queries"),
            ("prefix_cache_hits", "prefix_cache_hits"),
            ("external_prefix_cache_queries", "external_prefix_cache_queries"),
            ("external_prefix_cache_hits", "external_prefix_cache_hits"),
            ("kv_store_failed_saves", "num_failed_kv_saves"),
            ("spec_decode_num_drafts", "spec_decode_num_drafts"),
            ("spec_decode_num_draft_tokens", "spec_decode_num_draft_tokens"),
            ("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens"),
            ("requests_received", "num_requests_received"),
            ("long_task_steps", "num_long_task_steps"),
            ("recording_lost_records", "num_lost_records"),
        ):
            self._counters[name].inc(getattr(now, field) - (getattr(before, field) if before else 0))
        for key, counter in self._restarts.items():
            counter.inc(now.restarts.get(key, 0) - (before.restarts.get(key, 0) if before else 0))
        sleep_state = "awake" if now.sleep_level is None else _STATES_BY_LEVEL.get(now.sleep_level)
        for state, gauge in self._sleep_state.items():
            gauge.set(state == sleep_state)
        restarting = {actor.partition(".")[0] for actor in now.restarting}  # without numbers of replicas
        for actor, gauge in self._restarting.items():
            gauge.set(actor in restarting)
        self._counters["moved_requests"].inc(
            now.num_moved_requests - (before.num_moved_requests if before else 0)
        )
        for replica in now.replicas:
            for name, gauges in self._by_replica.items():
                gauges[str(replica.replica)].set(getattr(replica, name))
        num_hits = now.prefix_cache_hits - (before.prefix_cache_hits if before else 0)
        self._cached_by_source["device"].inc(num_hits)
        for reason, total in now.num_requests_ended.items():
            self._success[str(reason)].inc(
                total - (before.num_requests_ended.get(reason, 0) if before else 0)
            )
        for position, total in enumerate(now.spec_decode_num_accepted_tokens_per_pos):
            self._accepted[str(position)].inc(
                total - (before.spec_decode_num_accepted_tokens_per_pos[position] if before else 0)
            )
        self._last = now


@attrs.frozen
class _Part:
    """Some of the metrics of a registry, for what expects one."""

    families: tuple[Metric, ...]

    def collect(self) -> tuple[Metric, ...]:
        """Return these metrics."""
        return self.families


def pieces_of(registry: CollectorRegistry, *others: CollectorRegistry) -> Iterator[bytes]:
    """Yield the metrics of registries as text, in pieces of about SAMPLES_AT_ONCE lines; a metric is not cut.

    Args:
        others: registries with other labels. Metrics of one name are one metric of the text, as its format demands.
    """
    further: dict[str, list[Metric]] = {}
    for other in others:
        for family in other.collect():
            further.setdefault(family.name, []).append(family)
        # An empty piece: between two registries others get their turn.
        yield b""
    families: list[Metric] = []
    num_samples = 0
    # Those that the first registry does not have come last, such as the metrics of replicas.
    for family in itertools.chain(registry.collect(), _only_further(further)):
        for same in further.pop(family.name, ()):
            family.samples += same.samples
        families.append(family)
        num_samples += len(family.samples)
        if num_samples >= SAMPLES_AT_ONCE:
            yield generate_latest(_Part(tuple(families)))
            families, num_samples = [], 0
    if families:
        yield generate_latest(_Part(tuple(families)))


def _only_further(further: dict[str, list[Metric]]) -> Iterator[Metric]:
    """Take the first metric of each name that is left."""
    while further:
        yield further[next(iter(further))].pop(0)


def decade_buckets(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 and so on, up to `most`."""
    buckets = [mantissa * 10**exponent for exponent in range(len(str(most))) for mantissa in (1, 2, 5)]
    return tuple(bucket for bucket in buckets if bucket <= most)


class GatewayMetrics:
    """Prometheus registry of one server: its connections and what it answers.

    An HTTP connection ends because the client has disconnected (`client`), after a response or an error (`server`),
    because no request came (`idle`) or the client does not read (`write_timeout`), by becoming a WebSocket (`upgrade`),
    with the server (`shutdown`), or by a mistake in it (`error`).

    Args:
        prefix: of every name, colon included.
        num_websockets: counts the open WebSockets.
        num_waiting_bytes: counts the bytes of events that wait to be sent to their clients.
    """

    def __init__(
        self,
        prefix: str = DEFAULT_PREFIX,
        num_websockets: Callable[[], int] = lambda: 0,
        num_waiting_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.registry = CollectorRegistry()
        self.num_http_connections = 0  # counted by the listener
        self.num_sse_waiting_bytes = 0  # counted by the streams of events

        def make(kind: Any, name: str, text: str, *labels: str) -> Any:
            return kind(prefix + name, text, labels, registry=self.registry)

        make(Gauge, "open_websockets", "Open WebSockets.").set_function(num_websockets)
        make(Gauge, "send_queue_bytes", "Bytes of events that wait to be sent on WebSockets.").set_function(
            num_waiting_bytes
        )
        make(
            Gauge, "open_http_connections", "Open connections that have not become a WebSocket."
        ).set_function(lambda: self.num_http_connections)
        make(Gauge, "sse_waiting_bytes", "Bytes of HTTP event streams that wait to be sent.").set_function(
            lambda: self.num_sse_waiting_bytes
        )
        self._sse_bytes = make(Counter, "sse_sent_bytes", "Bytes of HTTP event streams that were sent.")
        http_closes = make(
            Counter, "http_connection_closes", "HTTP connections that have ended, by reason.", "reason"
        )
        self._http_closes = {reason: http_closes.labels(reason=reason) for reason in HTTP_CLOSE_REASONS}
        self._closes = make(Counter, "websocket_closes", "WebSockets that have ended, by close code.", "code")
        self._responses = make(
            Counter, "http_responses", "HTTP responses, by route and status.", "route", "status"
        )
        self._rejections = make(
            Counter, "gateway_rejections", "Requests refused by the server, by code of the error.", "reason"
        )
        self._by_key = make(Counter, "key_requests", "Generation requests, by hash of the API key.", "key")
        self._make = make

    def watch_journal(self, num_bytes: Callable[[], int], num_errors: Callable[[], int]) -> None:
        """Add the metrics of a journal of resumable responses."""
        self._make(Gauge, "journal_bytes", "Length of the journal of resumable responses.").set_function(
            num_bytes
        )
        self._make(
            Gauge, "journal_write_errors", "1 if the journal cannot be written and is no longer kept."
        ).set_function(num_errors)

    def render(self) -> bytes:
        """Return the metrics as text."""
        return b"".join(self.render_in_pieces())

    def render_in_pieces(self) -> Iterator[bytes]:
        """Yield the text in pieces."""
        yield from pieces_of(self.registry)

    def note_close(self, code: int) -> None:
        """Count the end of a WebSocket."""
        # Codes from 3000 on are the client's own choice: each would be a series.
        self._closes.labels(code=str(code) if code < 3000 else "other").inc()

    def note_http_close(self, reason: str) -> None:
        """Count the end of an HTTP connection, by one of `HTTP_CLOSE_REASONS`."""
        self._http_closes[reason].inc()

    def note_sse_sent(self, num_bytes: int) -> None:
        """Count bytes of an event stream that were handed to the network."""
        self._sse_bytes.inc(num_bytes)

    def note_response(self, route: str, status: int) -> None:
        """Count an HTTP response; `route` is the pattern of the path."""
        self._responses.labels(route=route, status=str(status)).inc()

    def note_error(self, status: int, code: str) -> None:
        """Count an error, if it refuses a request for access, a limit or the state of the server."""
        if status in _REFUSING_STATUSES:
            self._rejections.labels(reason=code).inc()

    def note_request(self, key: str | None) -> None:
        """Count a generation request of a key; `key` is its name, a hash."""
        if key is not None:
            self._by_key.labels(key=key).inc()
