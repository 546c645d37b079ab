"""Stat loggers: registration, calls after each step, and a throughput line every ten seconds of work.

A logger that raises is logged once and removed; no request is affected. Loggers are called in the engine's loop, after
the next step was sent to the runner, so they must be quick.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Protocol

from triolet.core.journal import Journal
from triolet.core.metrics.iteration_stats import EngineStatistics, IterationStats

LOG_INTERVAL_S = 10.0  # vLLM's VLLM_LOG_STATS_INTERVAL
SHORTEST_S = 1e-3  # two lines may be asked for at one moment

LINE = (
    "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
    "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%"
)
DRAFTS = ", Draft acceptance rate: %.1f%% (%d of %d tokens)"

logger = logging.getLogger("triolet.statistics")


class StatLogger(Protocol):
    """Receiver of statistics."""

    def record(self, statistics: EngineStatistics, iteration: IterationStats) -> None:
        """Record an iteration, as a rule a step. Must not wait."""
        ...

    def log(self) -> None:
        """Write a summary; called after ten seconds with work."""
        ...


class ThroughputLogger:
    """Stat logger that writes the throughput of the last ten seconds to the log.

    Args:
        statistics: returns the engine's statistics.
        interval_s: between two lines, seconds.
    """

    def __init__(
        self, statistics: Callable[[], EngineStatistics], interval_s: float = LOG_INTERVAL_S
    ) -> None:
        self._statistics = statistics
        self._usual_s = self._interval_s = interval_s
        self._num_prompt_tokens = self._num_generation_tokens = 0
        self._drafted = 0, 0  # accepted and drafted tokens up to the last line

    def record(self, statistics: EngineStatistics, iteration: IterationStats) -> None:
        self.count(iteration)

    def count(self, iteration: IterationStats) -> None:
        """Count the tokens of an iteration for the next line."""
        self._num_prompt_tokens += iteration.num_prompt_tokens
        self._num_generation_tokens += iteration.num_generation_tokens

    def log(self) -> None:
        now = self._statistics()
        line, drafted = LINE, tuple[float, ...]()
        if now.spec_decode_num_accepted_tokens_per_pos:
            line, drafted = LINE + DRAFTS, self._take_drafted(now)
        logger.info(
            line,
            self._num_prompt_tokens / self._interval_s,
            self._num_generation_tokens / self._interval_s,
            now.num_requests_running,
            now.num_requests_waiting,
            100 * now.kv_blocks_in_use / now.kv_blocks_total,
            100 * now.prefix_cache_hits / max(1, now.prefix_cache_queries),
            *drafted,
        )
        self._num_prompt_tokens = self._num_generation_tokens = 0
        self._interval_s = self._usual_s

    def begin_summary(self, interval_s: float) -> None:
        """Prepare a line that is asked for between two others, `interval_s` seconds after the last one."""
        self._interval_s = max(interval_s, SHORTEST_S)

    def _take_drafted(self, now: EngineStatistics) -> tuple[float, int, int]:
        """Return the acceptance of drafts since the last line: per cent, accepted tokens, draft tokens."""
        accepted, tried = now.spec_decode_num_accepted_tokens, now.spec_decode_num_draft_tokens
        (accepted_before, tried_before), self._drafted = self._drafted, (accepted, tried)
        num_accepted, num_tried = accepted - accepted_before, tried - tried_before
        return 100 * num_accepted / max(1, num_tried), num_accepted, num_tried

    def forget(self) -> None:
        """Reset the counts after an idle time."""
        self._num_prompt_tokens = self._num_generation_tokens = 0


class StatLoggers:
    """The stat loggers of one engine.

    Args:
        journal: holds the live requests, and collects the iterations.
        statistics: returns the engine's statistics.
        writes_log: whether the throughput line is written.
    """

    def __init__(
        self, journal: Journal, statistics: Callable[[], EngineStatistics], *, writes_log: bool = True
    ) -> None:
        self._journal, self._statistics = journal, statistics
        self._line = ThroughputLogger(statistics)
        self._loggers: list[StatLogger] = [self._line] if writes_log else []
        self._idle_since_s: float | None = -math.inf
        self._window_began_s = 0.0

    def add(self, guest: StatLogger) -> None:
        """Register a stat logger."""
        if guest not in self._loggers:
            self._loggers.append(guest)

    def remove(self, guest: StatLogger) -> None:
        """Remove a stat logger, if it is registered."""
        if guest in self._loggers:
            self._loggers.remove(guest)

    def report(self, now_s: float, *, asks_for_summary: bool = False) -> None:
        """Report new iterations, and ask for a summary every ten seconds of work.

        Args:
            asks_for_summary: ask for one now, too.
        """
        iteration = self._journal.stats.take()
        if iteration is not None:
            self._record(iteration, now_s)
        passed_s = now_s - self._window_began_s
        if asks_for_summary:
            self._line.begin_summary(passed_s)
            self._window_began_s = now_s
        elif iteration is not None and passed_s >= LOG_INTERVAL_S:
            # A step longer than the interval costs lines; the ones after it do not come closer together.
            self._window_began_s = now_s - passed_s % LOG_INTERVAL_S
        else:
            return
        self._tell(lambda guest: guest.log())

    def _record(self, iteration: IterationStats, now_s: float) -> None:
        if self._idle_since_s is not None and now_s - self._idle_since_s >= LOG_INTERVAL_S:
            # Tokens of before the pause would be counted as those of the last ten seconds.
            self._line.forget()
            self._window_began_s = now_s
        self._idle_since_s = None if self._journal else now_s
        if all(guest is self._line for guest in self._loggers):
            # It needs no statistics before its next line, and gathering them takes longer than all else here.
            self._line.count(iteration)
            return
        statistics = self._statistics()
        self._tell(lambda guest: guest.record(statistics, iteration))

    def _tell(self, call: Callable[[StatLogger], None]) -> None:
        # A copy: one that fails is removed meanwhile.
        for guest in tuple(self._loggers):
            try:
                call(guest)
            except (KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException:  # a panic in foreign code is no Exception
                self.remove(guest)
                logger.exception("a stat logger failed and was removed")
