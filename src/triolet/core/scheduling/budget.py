"""Limits of the scheduler, and the token budget that bounds the time of a step by what earlier steps took."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from typing import Protocol

import attrs

from triolet.core.kv_cache.cache_groups import ONE_GROUP, CacheGroups
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan

DEFAULT_BATCHED_TOKENS = 2048
SURE_TOKENS = {"cpu": 512}  # by device; elsewhere all: tokens of a step before any was measured


class SchedulerLimits(Protocol):
    """Fields of an `EngineConfig` that limit the scheduler."""

    @property
    def max_num_seqs(self) -> int:
        """Rows."""
        ...

    @property
    def max_num_batched_tokens(self) -> int | None:
        """Token budget; None for the device's own."""
        ...

    @property
    def policy(self) -> str:
        """Scheduling policy: `fcfs`, `priority` or `fair`."""
        ...

    @property
    def priority_aging(self) -> float | None:
        """Seconds; None for never."""
        ...

    @property
    def fair_ttft_factor(self) -> float | None:
        """Times what a first token takes alone; None for no bound."""
        ...

    @property
    def max_prefill_delay(self) -> float | None:
        """Seconds; None for no bound."""
        ...

    @property
    def enable_prefix_caching(self) -> bool:
        """True to publish and look up full blocks."""
        ...

    @property
    def num_scheduler_steps(self) -> int:
        """Longest run of steps that one plan is for."""
        ...

    @property
    def async_scheduling(self) -> bool | None:
        """True to plan a step while another one is in flight; None for the default of device and runner."""
        ...

    @property
    def tensor_parallel_size(self) -> int:
        """Processes that compute the model together."""
        ...

    @property
    def speculative(self) -> str:
        """Method of speculative decoding, or `none`."""
        ...

    @property
    def num_speculative_tokens(self) -> int:
        """Longest draft."""
        ...

    @property
    def prompt_lookup_min(self) -> int:
        """Tokens that must agree."""
        ...

    @property
    def max_loras(self) -> int:
        """Different adapters in a step."""
        ...

    @property
    def kv_store(self) -> str | None:
        """Folder of a prefix store."""
        ...

    @property
    def kv_pool_bytes(self) -> int:
        """Memory of a prefix store, bytes."""
        ...


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """The limits of a step and of a sequence."""

    num_blocks: int  # blocks of the KV cache, whichever cache group takes them
    block_size: int  # tokens in a block
    max_num_seqs: int  # rows of the runner's table
    max_num_batched_tokens: int  # token budget of a step
    max_model_len: int  # longest sequence, tokens; `num_blocks` hold at least one such sequence
    groups: CacheGroups = ONE_GROUP  # cache groups of the model
    # Tokens that a step may have however long it takes; with more it must fit into `max_prefill_delay_s`.
    num_sure_tokens: int = 2**31
    policy: str = "fcfs"  # `fcfs`, `priority` or `fair`
    # Under `priority`, seconds of waiting that weigh as much as one step of priority.
    priority_aging_s: float = float("inf")
    # Under `fair`, times what a first token takes alone; infinity for no bound.
    fair_ttft_factor: float = float("inf")
    # Time by which prompts may lengthen a step of decodes, seconds; infinity for no bound.
    max_prefill_delay_s: float = float("inf")
    enable_prefix_caching: bool = True  # publish and look up full blocks
    cache_key: bytes = b""  # secret of the prefix hashes
    weight_version: int = 0  # of the weights that compute the KV
    num_scheduler_steps: int = 1  # most steps that one plan is for
    async_scheduling: bool = False  # whether a step is planned while the one before it is in flight
    num_speculative_tokens: int = 0  # longest draft; 0 for none
    prompt_lookup_min: int = 3  # last tokens that must have occurred before for a draft
    # True if tokens attend in both directions: a prompt is computed in one step, and nothing of it is kept.
    whole_prompts: bool = False
    max_adapters: int = 0  # different LoRA adapters in a step; 0 for a model without them
    stores_blocks: bool = False  # whether the runner has a prefix store
    # Tokens that a sequence may have at most: as many as the model may, and as the cache can hold.
    num_places: int = attrs.field(init=False)

    @num_places.default
    def _num_places(self) -> int:
        return min(self.max_model_len, self.groups.longest(self.num_blocks, self.block_size))

    @classmethod
    def of(
        cls, limits: SchedulerLimits, info: ModelInfo, cache_key: bytes, weight_version: int = 0
    ) -> SchedulerConfig:
        """Return the limits for a loaded model."""
        device = info.device.partition(":")[0]
        whole_prompts = info.pooling is not None and info.pooling.needs_whole_prompts
        # On a CPU, runs give the same without a plan for each step. Ranks of a group get a plan when all have answered
        # the one before it, and are better served with runs, too. A draft needs the tokens before it.
        is_async = limits.async_scheduling
        if is_async is None:
            is_alone = limits.tensor_parallel_size == 1
            is_async = device == "cuda" and is_alone and limits.speculative == "none"
        return cls(
            num_blocks=info.num_kv_blocks,
            block_size=info.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS,
            num_sure_tokens=limits.max_num_batched_tokens or SURE_TOKENS.get(device, DEFAULT_BATCHED_TOKENS),
            max_model_len=info.max_model_len,
            groups=_groups_of(info.cache_windows),
            policy=limits.policy,
            priority_aging_s=_or_never(limits.priority_aging),
            fair_ttft_factor=_or_never(limits.fair_ttft_factor),
            max_prefill_delay_s=_or_never(limits.max_prefill_delay),
            enable_prefix_caching=limits.enable_prefix_caching and not whole_prompts,
            whole_prompts=whole_prompts,
            cache_key=cache_key,
            weight_version=weight_version,
            num_scheduler_steps=1 if is_async else limits.num_scheduler_steps,
            async_scheduling=is_async,
            num_speculative_tokens=0 if limits.speculative == "none" else limits.num_speculative_tokens,
            prompt_lookup_min=limits.prompt_lookup_min,
            max_adapters=limits.max_loras if info.adapters is not None else 0,
            stores_blocks=(limits.kv_store is not None or limits.kv_pool_bytes > 0) and not whole_prompts,
        )


@cache
def _groups_of(windows: tuple[int | None, ...]) -> CacheGroups:
    return CacheGroups(windows)


def _or_never(limit: float | None) -> float:
    return float("inf") if limit is None else limit


@attrs.define
class SchedulerCounters:
    """Totals since the engine started; a scheduler that is built anew goes on with them."""

    steps: int = 0  # plans made; also numbers the plans
    num_steps_done: int = 0  # steps with a result
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0  # tokens looked up in the prefix store
    external_prefix_cache_hits: int = 0  # tokens whose KV came from it
    num_failed_kv_saves: int = 0  # blocks that it could not write
    num_drafts: int = 0  # rows of finished steps with a draft
    num_draft_tokens: int = 0  # draft tokens of these rows
    # Accepted draft tokens, by their position in the draft.
    num_accepted_tokens_per_pos: list[int] = attrs.field(factory=list)


# Cost model: the time of a step, predicted from the times of the steps before it.
#
# A step has a part that is the same whatever is in it (weights are read once), a part for each row, and a
# part for each token of a prompt beyond a row's first:
#
#     fixed_s + rows * row_s + further_tokens * token_s
#
# The three are fitted to what was measured. Steps of the same kind, by powers of two of rows and of further
# tokens, are one point, so that a thousand equal steps do not drown the one other that says how cost grows. A
# point goes down quickly and up slowly, since what makes a step longer than it must be (a busy machine, a
# first time) passes; one that was not seen for long is forgotten. First the line through the decodes,
# relative errors least squares, then what prompts add to it. No clock is read here: what a step took comes
# with its result.
QUICKLY, SLOWLY = 0.5, 0.1  # part of a difference that a point moves by
MOST_GROWTH = 2.0  # a measurement counts as at most that many times what was known
MEMORY_STEPS = 1024  # a few seconds to minutes of steps
FIT_INTERVAL_STEPS = 8  # one fit takes some 20 microseconds


@attrs.define
class _Point:
    num_rows: float
    num_further: float
    elapsed_s: float
    step: int

    def move(self, num_rows: int, num_further: int, elapsed_s: float, step: int) -> None:
        elapsed_s = min(elapsed_s, MOST_GROWTH * self.elapsed_s)
        rate = QUICKLY if elapsed_s < self.elapsed_s else SLOWLY
        self.elapsed_s += rate * (elapsed_s - self.elapsed_s)
        self.num_rows += rate * (num_rows - self.num_rows)
        self.num_further += rate * (num_further - self.num_further)
        self.step = step


@attrs.define
class CostModel:
    """Fitted costs of a step; all are 0 until a step was measured."""

    fixed_s: float = 0.0  # cost of any step, seconds
    row_s: float = 0.0  # cost of a row and one token of it, seconds
    token_s: float = 0.0  # cost of each further token, seconds
    _points: dict[tuple[int, int], _Point] = attrs.field(factory=dict, init=False)
    _num_steps: int = attrs.field(default=0, init=False)

    def observe(self, num_rows: int, num_tokens: int, elapsed_s: float) -> None:
        """Add the measured time of a step.

        Args:
            num_rows: rows of the step.
            num_tokens: tokens of all rows.
            elapsed_s: time of the step, seconds; 0 if it is not known.
        """
        if elapsed_s <= 0 or not num_rows:
            return
        self._num_steps += 1
        num_further = num_tokens - num_rows
        kind = (num_rows.bit_length(), num_further.bit_length())
        if (point := self._points.get(kind)) is not None:
            point.move(num_rows, num_further, elapsed_s, self._num_steps)
        else:
            self._points[kind] = _Point(num_rows, num_further, elapsed_s, self._num_steps)
        if point is None or self._num_steps % FIT_INTERVAL_STEPS == 0:
            self._fit()

    def decodes_s(self, num_rows: int) -> float:
        """Return the time of a step of decodes, seconds: with more rows than were seen it is rather too short."""
        # Where all steps had about the same number of rows, the line says that each of them takes its part.
        line_s = self.fixed_s + num_rows * self.row_s
        seen = [point for (_, further), point in self._points.items() if not further]
        nearest = max(
            (one for one in seen if one.num_rows <= num_rows), key=lambda one: one.num_rows, default=None
        )
        return line_s if nearest is None else min(line_s, max(nearest.elapsed_s, line_s / 2))

    def _fit(self) -> None:
        self._points = {
            kind: point for kind, point in self._points.items() if point.step > self._num_steps - MEMORY_STEPS
        }
        decodes = [point for (_, further), point in self._points.items() if not further]
        self.fixed_s, self.row_s = _line(decodes) if decodes else (0.0, 0.0)
        self.token_s = self._further_s(point for (_, further), point in self._points.items() if further)

    def _further_s(self, prompts: Iterable[_Point]) -> float:
        above, below = 0.0, 0.0
        for point in prompts:
            share = point.num_further / point.elapsed_s
            above += share * (1 - (self.fixed_s + point.num_rows * self.row_s) / point.elapsed_s)
            below += share * share
        return max(0.0, above / below) if below else 0.0


def _line(points: list[_Point]) -> tuple[float, float]:
    """Return start and slope, both at least 0, of the least-squares line (relative errors) of seconds over rows."""
    one = rows = squares = times = products = 0.0
    for point in points:
        weight = 1 / point.elapsed_s**2
        one += weight
        rows += weight * point.num_rows
        squares += weight * point.num_rows**2
        times += weight * point.elapsed_s
        products += weight * point.num_rows * point.elapsed_s
    determinant = one * squares - rows**2
    if determinant <= 1e-9 * one * squares:  # all points have the same number of rows
        return 0.0, products / squares
    slope = (one * products - rows * times) / determinant
    start = (times - slope * rows) / one
    if slope < 0:
        return times / one, 0.0
    return (start, slope) if start >= 0 else (0.0, products / squares)


# Token budget: other requests wait for the end of a step, so its time is bounded.
#
# The configuration sets two bounds in seconds; they are kept by the measured times of earlier steps
# (`CostModel`):
#
# `max_prefill_delay_s`: where requests decode, the prompts beside them lengthen a step by at most so much. A
# chunk that would be longer is cut. At least `MIN_CHUNK` tokens are computed in every step, or a prompt would
# never end. Where no request decodes, a step has `num_sure_tokens`, and more as far as that bound allows: a
# new request waits for its end.
#
# `fair_ttft_factor`: under `fair`, steps of clients with many requests are so short, as long as one with few
# is there, that a first token of it comes within that many times what it would take on an idle engine. It
# waits for the end of the step in flight, then has a step of its own (`core.scheduling.policies.fair`). So
# the step in flight may take (factor - 1) times the time of such first steps, measured as the shortest of the
# last few. Steps are not cut below twice their fixed cost, where half of the machine's throughput would be
# lost and hardly any time gained.
#
# A third bound is not configured. What requests bring that another replica computed until it died is computed again
# beside those that decode here, and these are to notice little of it: it lengthens their steps by less than what a step
# will take once all of them decode.
#
# Before any step was measured, none of the bounds has an effect. The decisions depend on the reported times only,
# so that the same times give the same decisions.
MIN_CHUNK = 16  # tokens: a block of the default size
MOVED_PART = 0.4  # of that time: beside a replica that loads, all may take twice what it took before
NUM_FIRST_STEPS = 8


@attrs.define
class TokenBudget:
    """Token budget of the step that is being planned."""

    config: SchedulerConfig  # the two bounds
    costs: CostModel = attrs.field(factory=CostModel)  # fitted costs of steps
    allows_long_steps: bool = attrs.field(default=True, kw_only=True)  # see `policies.base.WaitingQueue`
    _first_steps_s: deque[float] = attrs.field(factory=lambda: deque(maxlen=NUM_FIRST_STEPS), init=False)
    _chunks_s: float = attrs.field(default=float("inf"), init=False)
    _moved_s: float | None = attrs.field(default=None, init=False)  # None until it is needed in a step
    _has_chunk: bool = attrs.field(default=False, init=False)

    def begin_step(self, *, has_decodes: bool) -> None:
        """Start the budget of a new step.

        Args:
            has_decodes: whether a request decodes in it.
        """
        self._chunks_s = self.config.max_prefill_delay_s if has_decodes else float("inf")
        self._has_chunk, self._moved_s = False, None

    @property
    def max_tokens(self) -> int:
        """Most tokens of a step; above `num_sure_tokens` only when their cost is known."""
        config = self.config
        may_be_long = self.allows_long_steps and self.costs.token_s
        fitting = self.tokens_within(config.max_prefill_delay_s) if may_be_long else 0
        return min(config.max_num_batched_tokens, max(config.num_sure_tokens, fitting))

    @property
    def has_room(self) -> bool:
        """True if the step being planned can have one more prompt, or a part of it."""
        return self._chunks_s > 0 or not self._has_chunk

    def chunk(self, num_tokens: int) -> int:
        """Return how many of a row's tokens fit into the step being planned; 0 for none.

        Args:
            num_tokens: pending tokens; a decode has one.
        """
        if num_tokens <= 1 or not self.costs.token_s:
            return num_tokens
        if not self.has_room:
            return 0
        fitting = max(1, self.tokens_within(self._chunks_s))
        return min(num_tokens, fitting if self._has_chunk else max(fitting, MIN_CHUNK))

    def moved_chunk(self, num_tokens: int, num_decodes: Callable[[], int]) -> int:
        """Return how many tokens of a row that another replica computed until it died fit into the step; 0 for none.

        Args:
            num_tokens: pending tokens, at least two.
            num_decodes: counts the requests that will decode after it; 0 if none does in the step being planned.
        """
        if self._moved_s is None:
            number = num_decodes()
            self._moved_s = (MOVED_PART * self.costs.decodes_s(number) if number else 0.0) or float("inf")
        fitting = self.tokens_within(self._moved_s)
        if self._has_chunk and fitting <= 1:
            return 0
        return self.chunk(min(num_tokens, fitting if self._has_chunk else max(fitting, MIN_CHUNK)))

    def take(self, num_tokens: int, *, is_moved: bool = False) -> None:
        """Take the tokens that a row gets out of the step being planned; those of a decode are free."""
        if num_tokens > 1 and self.costs.token_s:
            self._chunks_s -= num_tokens * self.costs.token_s
            self._has_chunk = True
            if is_moved and self._moved_s is not None:
                self._moved_s -= num_tokens * self.costs.token_s

    def tokens_within(self, seconds: float) -> int:
        """Return how many tokens beyond a row's first can be computed in that time."""
        token_s = self.costs.token_s
        return int(min(seconds / token_s, 2**31)) if token_s else 2**31

    @property
    def many_s(self) -> float:
        """Seconds that the rows of clients with many requests may add to a step beside one with few; infinity if there
        is no bound, or no step was measured.
        """
        factor, costs = self.config.fair_ttft_factor, self.costs
        if not self._first_steps_s or not costs.row_s:
            return float("inf")
        return max((factor - 1) * min(self._first_steps_s) - costs.fixed_s, costs.fixed_s)

    def many_pooled_s(self, num_decodes: int, part: float) -> float:
        """Return the seconds that pooled rows of clients with many requests may add to a step; infinity as `many_s`.

        Args:
            num_decodes: requests of other clients that decode in the step.
            part: of the time that these take.
        """
        costs = self.costs
        if self.config.fair_ttft_factor == float("inf") or not costs.row_s:
            return float("inf")
        return part * (costs.fixed_s + num_decodes * costs.row_s)

    def step_done(self, plan: StepPlan, elapsed_s: float) -> None:
        """Record the time that a step took, seconds; 0 if it is not known."""
        num_rows = len(plan.rows)
        self.costs.observe(num_rows, sum([row.num_tokens for row in plan.rows]), elapsed_s)
        if elapsed_s > 0 and num_rows == len(plan.starts):
            self._first_steps_s.append(elapsed_s)
