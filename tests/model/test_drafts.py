"""A row that tries tokens beyond its next one: what it gets is what it would have got one by one."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from tests.model.backends.fake_causal_model import VOCAB_SIZE, FakeCausalModel
from tests.model.test_runner import Driver, make_runner, run_all, start
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import Request
from triolet.core.scheduling.scheduler import SchedulerConfig, SchedulerCounters
from triolet.core.step_plan import PlanRow, RowFailure, SampledToken, StepPlan
from triolet.errors import InvariantViolated
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.interface import LayerCache
from triolet.model.sampling.sampler import NOT_NUMBERS

pytestmark = pytest.mark.usefixtures("one_thread")


class RepetitiveModel(FakeCausalModel):
    """Its logits depend on everything in the cache, too, and mostly make it go round in a circle of seven tokens."""

    def _logits_after(self, index: int, layer: LayerCache, attention: AttentionMetadata) -> Tensor:
        logits = super()._logits_after(index, layer, attention)
        ends = attention.cu_query_lens.tolist()
        sequence = next(i for i in range(len(ends)) if index < ends[i + 1])
        position = attention.seq_lens_host[sequence] - (ends[sequence + 1] - index)
        size = layer.keys.shape[1]
        block = attention.block_tables[sequence, position // size]
        last = int(layer.keys[block, position % size, 0, 0])
        logits[(last * 3 + 1) % 7] += 12 if math.isfinite(logits[0]) else 0
        return logits


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.7},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalised": {"temperature": 0.5, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "greedy and penalised": {"temperature": 0, "frequency_penalty": 0.5},
    "with least tokens": {"temperature": 0.7, "min_tokens": 12},
    "with bad words": {"temperature": 0.7},
    "biased": {"temperature": 0.7, "logit_bias": {5: 2.0}, "allowed_token_ids": tuple(range(60))},
    "with logprobs": {"temperature": 0.7, "logprobs": 3, "prompt_logprobs": 2},
}  # fmt: skip


def make_requests(count: int, generator: random.Random) -> list[Request]:
    requests = []
    for i in range(count):
        kind = list(PARAMS)[i % len(PARAMS)]
        max_tokens = generator.randint(12, 40)
        prompt = [generator.randrange(7) for _ in range(generator.randint(1, 24))]
        requests.append(
            Request(
                request_id=f"r{i}",
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(**{"max_tokens": max_tokens} | PARAMS[kind]),
                seed=1000 + i,
                max_tokens=max_tokens,
                eos_token_ids=(50, 51) if i % 4 else (2,),
                bad_words_token_ids=((4, 6), (60,)) if kind == "with bad words" else (),
            )
        )
    return requests


def answers(
    requests: Sequence[Request], mode: str = "raw_logprobs", **fields: Any
) -> tuple[list[Any], SchedulerCounters]:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 6, "max_model_len": 72}
    sizes |= {name: fields[name] for name in sizes.keys() & fields}
    limits: dict[str, Any] = (
        {"max_num_batched_tokens": 32, "cache_key": b"k", "prompt_lookup_min": 2} | sizes | fields
    )
    config = SchedulerConfig(**limits)
    runner = make_runner(RepetitiveModel(), logprobs_mode=mode, **sizes)
    entries, scheduler = run_all(runner, config, requests)
    assert scheduler.pool.num_in_use == 0
    given = [
        (one.output_token_ids, one.output_logprobs, one.prompt_logprobs, one.finish_reason) for one in entries
    ]
    return given, scheduler.counters


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
@pytest.mark.parametrize(
    "num_guesses", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(9, marks=pytest.mark.slow)]
)
def test_every_answer_is_the_same_with_and_without_drafts_whatever_else_happens(
    num_guesses: int, mode: str
) -> None:
    requests = make_requests(45, random.Random(num_guesses))
    plain, counters = answers(requests, mode, max_num_seqs=1, enable_prefix_caching=False)
    assert counters.num_drafts == 0
    scarce = {"num_blocks": 24, "max_num_batched_tokens": 19}
    tried, counters = answers(requests, mode, num_speculative_tokens=num_guesses, **scarce)
    assert tried == plain
    assert counters.num_preemptions > 0
    assert counters.prefix_cache_hits > 0
    assert all(counters.num_accepted_tokens_per_pos[:4])
    assert sum(counters.num_accepted_tokens_per_pos) < counters.num_draft_tokens


def draft_of(driver: Driver, row_id: int, draft: Sequence[int]) -> StepPlan:
    """The next step of a row that tries something."""
    computed, length = driver.lengths[row_id]
    assert computed == length - 1
    driver.step_id += 1
    row = PlanRow(row_id, computed, 1 + len(draft), (40, 41, 42), sample=True, draft_token_ids=tuple(draft))
    return StepPlan(driver.step_id, (), (), (row,))


def begun(model: FakeCausalModel, params: SamplingParams | None = None) -> Driver:
    driver = Driver(make_runner(model), num_blocks=40)
    driver.step([start(0, [1, 2, 3], params=params or SamplingParams(temperature=0))])
    return driver


def test_a_token_comes_after_every_guess_that_was_right_and_no_other() -> None:
    reference = begun(FakeCausalModel())
    for _ in range(4):
        reference.step()
    right = reference.answers[0]
    wrong = (right[3] + 1) % VOCAB_SIZE
    driver = begun(FakeCausalModel())
    result = driver.runner.execute(draft_of(driver, 0, [right[1], right[2], wrong, right[4]]))
    assert [(token.position, token.token_id) for token in result.tokens] == [(i, right[i]) for i in (1, 2, 3)]
    again = PlanRow(0, 6, 1, (), sample=True)  # the prompt and the three tokens that are computed
    result = driver.runner.execute(StepPlan(9, (), (), (again,)))
    assert result.tokens == (SampledToken("request-0", 1, 4, right[4]),)


def test_logits_that_are_no_numbers_count_only_behind_a_guess_that_was_right() -> None:
    reference = begun(FakeCausalModel())
    reference.step()
    reference.step()
    [first, second, third] = reference.answers[0]
    assert len({first, second, third}) == 3
    driver = begun(FakeCausalModel(poison=(second + 1) % VOCAB_SIZE))
    result = driver.runner.execute(draft_of(driver, 0, [(second + 1) % VOCAB_SIZE]))
    assert (result.failures, [token.token_id for token in result.tokens]) == ((), [second])
    driver = begun(FakeCausalModel(poison=second))
    result = driver.runner.execute(draft_of(driver, 0, [second, third]))
    assert result.failures == (RowFailure("request-0", 1, NOT_NUMBERS),)
    assert [token.token_id for token in result.tokens] == [second]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (PlanRow(0, 3, 2, (9,), sample=False, draft_token_ids=(1,)), "request-0 has 4 tokens"),
        (PlanRow(0, 3, 1, (9,), sample=True, draft_token_ids=(1,)), "request-0 has 4 tokens"),
        (PlanRow(0, 3, 2, (9,), sample=True, draft_token_ids=(VOCAB_SIZE,)), r"must be in \[0, 97\)"),
        (PlanRow(0, 3, 2, (9,), sample=True, draft_token_ids=(-1,)), r"must be in \[0, 97\)"),
        (PlanRow(0, 3, 2, (9,), sample=True, mask=b"", draft_token_ids=(1,)), "cannot take draft tokens"),
        (PlanRow(0, 3, 98, (), sample=True, draft_token_ids=(1,) * 97), "cannot take draft tokens"),
        (PlanRow(0, 3, 6, (9,), sample=True, draft_token_ids=(1,) * 5), "must have blocks for 9 tokens"),
    ],
)
def test_a_draft_that_contradicts_the_table_is_refused_before_anything_is_computed(
    row: PlanRow, message: str
) -> None:
    model = FakeCausalModel()
    driver = begun(model)
    with pytest.raises(InvariantViolated, match=message):
        driver.runner.execute(StepPlan(2, (), (), (row,)))
    assert len(model.num_tokens_of_steps) == 1
