"""Token budget of a step: bounds its time, so that other requests do not wait too long for its end.

The configuration sets two bounds in seconds; they are kept by the measured times of earlier steps
(`core.scheduling.cost_model`):

`max_prefill_delay_s`: where requests decode, the prompts beside them lengthen a step by at most so much. A chunk that
would be longer is cut. At least `MIN_CHUNK` tokens are computed in every step, or a prompt would never end. Where
no request decodes, a step has `num_sure_tokens`, and more as far as that bound allows: a new request waits for its end.

`fair_ttft_factor`: under `fair`, steps of clients with many requests are so short, as long as one with few is there,
that a first token of it comes within that many times what it would take on an idle engine. It waits for the end of the
step in flight, then has a step of its own (`core.scheduling.policies.fair`). So the step in flight may take
(factor - 1) times the time of such first steps, measured as the shortest of the last few. Steps are not cut below twice
their fixed cost, where half of the machine's throughput would be lost and hardly any time gained.

Before any step was measured, neither bound has an effect. The decisions depend on the reported times only, so that the
same times give the same decisions.
"""

from __future__ import annotations

from collections import deque

import attrs

from triolet.core.scheduling.config import SchedulerConfig
from triolet.core.scheduling.cost_model import CostModel
from triolet.core.step_plan import StepPlan

MIN_CHUNK = 16  # tokens: a block of the default size
NUM_FIRST_STEPS = 8


@attrs.define
class TokenBudget:
    """Token budget of the step that is being planned.

    Args:
        config: the two bounds.
        costs: fitted costs of steps.
        allows_long_steps: see `policies.base.WaitingQueue`.
    """

    config: SchedulerConfig
    costs: CostModel = attrs.field(factory=CostModel)
    allows_long_steps: bool = attrs.field(default=True, kw_only=True)
    _first_steps_s: deque[float] = attrs.field(factory=lambda: deque(maxlen=NUM_FIRST_STEPS), init=False)
    _chunks_s: float = attrs.field(default=float("inf"), init=False)
    _has_chunk: bool = attrs.field(default=False, init=False)

    def begin_step(self, *, has_decodes: bool) -> None:
        """Start the budget of a new step.

        Args:
            has_decodes: whether a request decodes in it.
        """
        self._chunks_s = self.config.max_prefill_delay_s if has_decodes else float("inf")
        self._has_chunk = False

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
        if num_tokens <= 1 or self._chunks_s == float("inf") or not self.costs.token_s:
            return num_tokens
        if not self.has_room:
            return 0
        fitting = max(1, self.tokens_within(self._chunks_s))
        num_tokens = min(num_tokens, fitting if self._has_chunk else max(fitting, MIN_CHUNK))
        self._chunks_s -= num_tokens * self.costs.token_s
        self._has_chunk = True
        return num_tokens

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
        if factor == float("inf") or not self._first_steps_s or not costs.row_s:
            return float("inf")
        return max((factor - 1) * min(self._first_steps_s) - costs.fixed_s, costs.fixed_s)

    def step_done(self, plan: StepPlan, elapsed_s: float) -> None:
        """Record the time that a step took, seconds; 0 if it is not known."""
        num_rows = len(plan.rows)
        self.costs.observe(num_rows, plan.num_tokens, elapsed_s)
        if elapsed_s > 0 and num_rows == len(plan.starts):
            self._first_steps_s.append(elapsed_s)
