"""Random walks: any order of adding, stepping, aborting and expiring keeps every count and every answer
right.
"""

from __future__ import annotations

import random

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.core.fake_model import REPETITIVE, FakeModel, expected_answer
from tests.scale import one_in
from triolet.core.journal import Journal, JournalEntry
from triolet.core.kv_cache.prefix_cache import CacheNamespace
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import FinishReason, Request
from triolet.core.scheduling.policies.registry import POLICIES
from triolet.core.scheduling.scheduler import Scheduler, SchedulerConfig
from triolet.core.step_plan import StepResult

VOCAB = 50


@attrs.define
class Walk:
    """An engine's core without its actors: a scheduler, a journal and a model that remembers what is in which
    block.
    """

    config: SchedulerConfig
    journal: Journal = attrs.field(factory=Journal)
    entries: list[JournalEntry] = attrs.field(factory=list)
    results: list[StepResult] = attrs.field(factory=list)  # not yet applied
    now_s: float = 0.0
    num_ahead: int = 0  # plans that were made while another step was in flight
    scheduler: Scheduler = attrs.field(init=False)
    model: FakeModel = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, self.journal)
        config = self.config
        self.model = FakeModel(config.num_blocks, config.block_size, VOCAB, windows=config.groups.windows)

    def add(self, prompt: tuple[int, ...], max_tokens: int, **fields: object) -> JournalEntry:
        """Where guesses are made, every second request is one that it pays to guess."""
        is_repetitive = self.config.num_speculative_tokens and len(self.entries) % 2
        request = Request(
            request_id=f"r{len(self.entries)}",
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens),
            seed=len(self.entries) % 3 + (REPETITIVE if is_repetitive else 0),
            max_tokens=min(max_tokens, self.config.max_model_len - len(prompt)),
            **fields,  # type: ignore[arg-type]
        )
        entry = self.journal.open(request)
        self.entries.append(entry)
        self.scheduler.add(entry)
        return entry

    def begin(self) -> bool:
        """Plan a step and have it computed; its result is not yet applied."""
        num_in_flight = len(self.results)
        plan = self.scheduler.plan_step(self.now_s)
        if plan is not None:
            assert plan.num_tokens <= self.config.max_num_batched_tokens
            assert plan.is_ahead == bool(num_in_flight)
            self.num_ahead += plan.is_ahead
            self.results.append(self.model.execute(plan))
        return plan is not None

    def end(self) -> None:
        self.scheduler.apply(self.results.pop(0), self.now_s)

    def run(self) -> None:
        """Until nothing is left to compute."""
        while True:
            while self.scheduler.may_plan and self.begin():
                self.scheduler.check()
            if not self.results:
                return
            self.end()
            self.scheduler.check()

    def check(self) -> None:
        self.scheduler.check()
        for entry in self.entries:
            whole = self.answer(entry)
            got = entry.output_token_ids
            assert got == whole[: len(got)]
            if entry.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
                assert got == whole

    def answer(self, entry: JournalEntry) -> list[int]:
        request = entry.request
        return expected_answer(
            request.prompt_token_ids,
            request.seed,
            request.max_tokens,
            VOCAB,
            request.ending_token_ids,
            windows=self.config.groups.windows,
        )


def make_config(**fields: object) -> SchedulerConfig:
    defaults: dict[str, object] = {
        "num_blocks": 12,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 9,
        "max_model_len": 48,
        "cache_key": b"k",
    }
    return SchedulerConfig(**(defaults | fields))  # type: ignore[arg-type]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 20),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 16),
        policy=st.sampled_from(sorted(POLICIES)),
        caching=st.booleans(),
        draft=st.sampled_from([0, 0, 1, 4, 7]),
        storing=st.booleans(),
        ahead=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        policy: str,
        caching: bool,
        draft: int,
        storing: bool,
        ahead: bool,
    ) -> None:
        self.walk = Walk(
            make_config(
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=num_blocks * block_size,
                policy=policy,
                enable_prefix_caching=caching,
                num_speculative_tokens=0 if ahead else draft,
                prompt_lookup_min=1,
                stores_blocks=storing and caching,
                async_scheduling=ahead,
            )
        )

    @rule(
        stem=st.integers(0, 2),
        length=st.integers(1, 30),
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 1),
        client=st.sampled_from([None, "a", "b"]),
        salt=st.sampled_from([None, "a"]),
        time_s=st.one_of(st.none(), st.integers(0, 6)),
        eos=st.booleans(),
    )
    def add(
        self,
        stem: int,
        length: int,
        max_tokens: int,
        priority: int,
        client: str | None,
        salt: str | None,
        time_s: int | None,
        eos: bool,
    ) -> None:
        length = min(length, self.walk.config.max_model_len - 1)
        # Few stems: prompts that begin alike are what the prefix cache is for.
        prompt = tuple((stem * 7 + position) % VOCAB for position in range(length))
        self.walk.add(
            prompt,
            max_tokens,
            priority=priority,
            client=client,
            cache_namespace=CacheNamespace(salt=salt),
            deadline_s=float("inf") if time_s is None else self.walk.now_s + time_s,
            eos_token_ids=(3, 4, 5) if eos else (),
        )

    @precondition(lambda self: self.walk.scheduler.may_plan)
    @rule()
    def begin_step(self) -> None:
        self.walk.begin()

    @precondition(lambda self: self.walk.results)
    @rule()
    def end_step(self) -> None:
        self.walk.end()

    @precondition(lambda self: self.walk.scheduler.may_plan)
    @rule(steps=st.integers(1, 5))
    def run_steps(self, steps: int) -> None:
        for _ in range(steps):
            if self.walk.scheduler.may_plan:
                self.walk.begin()
            if self.walk.results:
                self.walk.end()

    @rule(most_tokens=st.sampled_from([None, None, 1, 3]))
    def have_memory(self, most_tokens: int | None) -> None:
        self.walk.model.most_tokens = most_tokens

    @precondition(lambda self: self.walk.entries)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        self.walk.scheduler.abort(self.walk.entries[choice % len(self.walk.entries)].serial)

    @rule(seconds=st.integers(1, 3))
    def let_time_pass(self, seconds: int) -> None:
        self.walk.now_s += seconds
        self.walk.scheduler.expire(self.walk.now_s)
        assert all(entry.request.deadline_s > self.walk.now_s for entry in self.walk.journal)

    @precondition(lambda self: self.walk.results)
    @rule()
    def lose_the_scheduler(self) -> None:
        """Its successor starts from the journal; the steps in flight come too late and change nothing."""
        walk = self.walk
        late = tuple(walk.results)
        walk.scheduler = Scheduler(walk.config, walk.journal, walk.scheduler.counters)
        for entry in walk.journal:
            walk.scheduler.add(entry)
        walk.results.clear()
        for result in late:
            walk.scheduler.apply(result, walk.now_s)

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "walk"):
            self.walk.check()

    def teardown(self) -> None:
        if hasattr(self, "walk"):
            self.walk.model.most_tokens = None
            self.walk.run()
            self.walk.check()
            pool = self.walk.scheduler.pool
            assert pool.num_free + pool.num_cached == pool.num_blocks
            assert len(self.walk.journal) == 0
            assert all(entry.finish_reason is not None for entry in self.walk.entries)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@pytest.mark.slow
class TestLongSchedulerMachine(TestSchedulerMachine):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize(
    ("policy", "seed"), one_in(2, ((policy, seed) for seed in range(6) for policy in POLICIES))
)
def test_ten_thousand_random_operations_keep_every_count(seed: int, policy: str) -> None:
    dice = random.Random(seed)
    walk = Walk(
        make_config(
            num_blocks=dice.randint(12, 24),
            max_num_seqs=dice.randint(2, 6),
            policy=policy,
            num_speculative_tokens=0 if seed >= 4 else seed % 2 * 4,
            prompt_lookup_min=2,
            stores_blocks=seed in (2, 3, 5),
            async_scheduling=seed >= 4,
        )
    )
    for _ in range(1250):
        _random_operation(walk, dice)
        walk.scheduler.check()
    walk.run()
    walk.check()
    assert walk.scheduler.counters.num_preemptions > 0
    assert walk.scheduler.counters.prefix_cache_hits > 0
    assert (walk.scheduler.counters.external_prefix_cache_hits > 0) == (seed in (2, 3, 5))
    assert (sum(walk.scheduler.counters.num_accepted_tokens_per_pos) > 0) == (seed in (1, 3))
    assert (walk.num_ahead > 100) == (seed >= 4)
    assert walk.scheduler.pool.num_free + walk.scheduler.pool.num_cached == walk.config.num_blocks


def _random_operation(walk: Walk, dice: random.Random) -> None:
    draw = dice.random()
    if draw < 0.2 and len(walk.journal) < 12:
        stem = dice.randint(0, 2)
        prompt = tuple((stem + position) % VOCAB for position in range(dice.randint(1, 30)))
        walk.add(
            prompt,
            dice.randint(1, 14),
            priority=dice.randint(-2, 2),
            client=dice.choice("abc"),
            owner=dice.choice([None, "d", "e"]),
        )
    elif draw < 0.25 and walk.entries:
        walk.scheduler.abort(dice.choice(walk.entries[-12:]).serial)
    elif walk.results and (not walk.scheduler.may_plan or dice.random() < 0.3):
        walk.end()
    else:
        walk.begin()
