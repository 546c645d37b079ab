"""Stat loggers written for vLLM: made by factories or handed in, and told of each step in vLLM's fields."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from triolet.config.engine import EngineConfig
from triolet.core.metrics.iteration_stats import EngineStatistics, FinishedRequest, IterationStats
from triolet.errors import ConfigError
from triolet.observability.stat_loggers import StatLogger

StatLoggerFactory = Callable[[EngineConfig, int], Any]
"""Function that makes a stat logger for a configuration and the engine's index in this process."""

GivenLoggers = Mapping[str, Any] | Sequence[Any] | None
"""Stat loggers or factories of them, by name or in a list."""


class StatLoggerBase:
    """Base class of stat loggers, as in vLLM: what is not overridden does nothing.

    Args:
        vllm_config: configuration of the engine.
        engine_index: number of the engine in this process.
    """

    def __init__(self, vllm_config: EngineConfig | None = None, engine_index: int = 0) -> None:
        self.vllm_config, self.engine_index = vllm_config, engine_index

    def record(
        self,
        scheduler_stats: SchedulerStats,
        iteration_stats: IterationStatsView,
        mm_cache_stats: None = None,
        engine_idx: int = 0,
    ) -> None:
        """Record an iteration, as a rule a step."""

    def log_engine_initialized(self) -> None:
        """Write that the engine is ready; called once."""

    def log(self) -> None:
        """Write a summary; called every ten seconds with work, and by `do_log_stats`."""


@attrs.frozen
class PrefixCacheStats:
    """Lookups in the prefix cache since the last record, tokens."""

    queries: int
    hits: int
    requests: int = 0
    reset: bool = False


@attrs.frozen
class SchedulerStats:
    """State of the scheduler in vLLM's fields; those of `EngineStatistics` are there, too."""

    statistics: EngineStatistics
    prefix_cache_stats: PrefixCacheStats

    @property
    def num_running_reqs(self) -> int:
        """Requests that are computed."""
        return self.statistics.num_requests_running

    @property
    def num_waiting_reqs(self) -> int:
        """Requests that wait."""
        return self.statistics.num_requests_waiting

    @property
    def kv_cache_usage(self) -> float:
        """Part of the KV cache that is in use, from 0 to 1."""
        return self.statistics.kv_blocks_in_use / self.statistics.kv_blocks_total

    gpu_cache_usage = kv_cache_usage  # its name in early versions

    @property
    def step_counter(self) -> int:
        """Steps so far."""
        return self.statistics.steps

    def __getattr__(self, name: str) -> Any:
        if name == "statistics":  # in an object that is being copied
            raise AttributeError(name)
        return getattr(self.statistics, name)


@attrs.frozen
class FinishedRequestStats:
    """Ended request in vLLM's fields; those of `FinishedRequest` and its `RequestMetrics` are there, too."""

    request: FinishedRequest

    @property
    def max_tokens_param(self) -> int:
        """Tokens that the answer might have had."""
        return self.request.max_tokens

    def __getattr__(self, name: str) -> Any:
        if name == "request":
            raise AttributeError(name)
        where = self.request if hasattr(self.request, name) else self.request.metrics
        return getattr(where, name)


@attrs.frozen
class IterationStatsView:
    """Numbers since the last record in vLLM's fields; those of `IterationStats` are there, too."""

    iteration: IterationStats
    num_preempted_reqs: int
    iteration_timestamp: float = attrs.field(factory=time.time)  # seconds since the epoch

    @property
    def finished_requests(self) -> list[FinishedRequestStats]:
        """Requests that have ended."""
        return [FinishedRequestStats(one) for one in self.iteration.finished_requests]

    @property
    def time_to_first_tokens_iter(self) -> list[float]:
        """Seconds from arrival to first token, of each request that got it."""
        return list(self.iteration.times_to_first_token)

    @property
    def inter_token_latencies_iter(self) -> list[float]:
        """Seconds between two tokens, of all others."""
        return list(self.iteration.inter_token_latencies)

    time_per_output_tokens_iter = inter_token_latencies_iter  # its name in early versions

    def __getattr__(self, name: str) -> Any:
        if name == "iteration":
            raise AttributeError(name)
        return getattr(self.iteration, name)


class LoggerFace:
    """Stat logger of the engine that hands everything on to one that was written for vLLM.

    Args:
        guest: has `record`, of any of vLLM's shapes, and perhaps `log`.
        engine_index: number of the engine in this process.
    """

    def __init__(self, guest: Any, engine_index: int) -> None:
        self._guest = guest
        self._before: EngineStatistics | None = None
        given = inspect.signature(guest.record).parameters
        self._is_native = list(given)[:2] == ["statistics", "iteration"]
        kinds = [one.kind for one in given.values()]
        is_open = inspect.Parameter.VAR_POSITIONAL in kinds
        num_places = kinds.count(inspect.Parameter.POSITIONAL_ONLY) + kinds.count(
            inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        self._takes_iteration = is_open or num_places >= 2
        names = [name for name in ("engine_idx", "engine_index") if name in given]
        self._others: dict[str, Any] = dict.fromkeys(names, engine_index)
        if "mm_cache_stats" in given:
            self._others["mm_cache_stats"] = None

    def record(self, statistics: EngineStatistics, iteration: IterationStats) -> None:
        if self._is_native:
            self._guest.record(statistics, iteration)
            return
        before, self._before = self._before or statistics, statistics
        looked_up = PrefixCacheStats(
            statistics.prefix_cache_queries - before.prefix_cache_queries,
            statistics.prefix_cache_hits - before.prefix_cache_hits,
        )
        given: list[Any] = [SchedulerStats(statistics, looked_up)]
        if self._takes_iteration:
            num_preempted = statistics.num_preemptions - before.num_preemptions
            given.append(IterationStatsView(iteration, num_preempted))
        self._guest.record(*given, **self._others)

    def log(self) -> None:
        if hasattr(self._guest, "log"):
            self._guest.log()


class NamedLoggers:
    """Stat loggers of one `AsyncLLM` or `LLMEngine`, by name.

    Args:
        config: of the engine, for factories.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._faces: dict[str, LoggerFace] = {}
        self.guests: dict[str, Any] = {}

    def make(self, given: GivenLoggers, engine_index: int) -> Iterator[StatLogger]:
        """Yield loggers for the engine; the names of those in a list are their places.

        Raises:
            ConfigError: something that is neither a logger nor a function.
        """
        named = given.items() if isinstance(given, Mapping) else enumerate(given or ())
        for name, one in named:
            guest = one
            if isinstance(one, type) or not hasattr(one, "record"):
                if not callable(one):
                    raise ConfigError("stat_loggers", "loggers, or functions that make them", one)
                guest = one(self._config, engine_index)
            yield self.add(str(name), guest, engine_index)

    def add(self, name: str, guest: Any, engine_index: int) -> LoggerFace:
        """Return a logger for the engine.

        Raises:
            KeyError: there is one of that name, as in vLLM.
        """
        if name in self._faces:
            raise KeyError(f"Logger with name {name} already exists.")
        face = self._faces[name] = LoggerFace(guest, engine_index)
        self.guests[name] = guest
        if hasattr(guest, "log_engine_initialized"):
            guest.log_engine_initialized()
        return face

    def take(self, name: str) -> LoggerFace:
        """Forget a logger, and return what the engine knows of it.

        Raises:
            KeyError: there is none of that name.
        """
        if name not in self._faces:
            raise KeyError(f"Logger with name {name} does not exist.")
        del self.guests[name]
        return self._faces.pop(name)
