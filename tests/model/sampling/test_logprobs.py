"""What log-probabilities are told of: of the model's distribution or of what is left of it, as such or as logits."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.model.sampling.test_sampler import Cases, edited, expected_draw
from triolet.config.choices import LOGPROBS_MODES
from triolet.core.request.params import SamplingParams
from triolet.core.step_plan import TokenLogprobs
from triolet.model.sampling.sampler import SamplingBatch
from triolet.model.sampling.sampling_row import SamplingRow

VOCAB = 12
NEVER = float("-inf")


def told(logits: Tensor, mode: str, **fields: Any) -> TokenLogprobs:
    """What one row is told of its position."""
    state = SamplingRow(params=SamplingParams(**fields), seed=3, vocab_size=logits.shape[1])
    samples = SamplingBatch([state], logits.shape[1], torch.device("cpu"), mode).sample(logits.clone())
    return samples.logprobs[0]


def by_token(logprobs: TokenLogprobs) -> dict[int, float]:
    return dict(zip(logprobs.token_ids, logprobs.logprobs, strict=True))


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_only_the_processed_ones_know_of_temperature_and_filters(mode: str) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    plain = by_token(told(logits, mode, logprobs=-1))
    sharp = by_token(told(logits, mode, logprobs=-1, temperature=0.1, top_k=3, logit_bias={2: 50.0}))
    assert (plain == sharp) == mode.startswith("raw")
    if mode == "raw_logits":
        assert plain == {i: float(value) for i, value in enumerate(logits[0])}
    if mode == "processed_logits":
        assert sum(value > NEVER for value in sharp.values()) == 3
        assert sharp[2] == pytest.approx((float(logits[0, 2]) + 50) / 0.1, rel=1e-6)
    if mode.endswith("logprobs"):
        assert np.exp(list(sharp.values())).sum() == pytest.approx(1.0, abs=1e-5)


def test_processed_logits_are_what_the_reference_draws_from() -> None:
    cases = Cases(11, 40)
    rows = [cases.case() for _ in range(400)]
    for _, state, _ in rows:
        state.params = attrs.evolve(state.params, logprobs=-1)
    states = [state for _, state, _ in rows]
    logits = torch.from_numpy(np.stack([values for values, _, _ in rows])).float()
    samples = SamplingBatch(states, 40, torch.device("cpu"), "processed_logits").sample(logits)
    num_looked_at = 0
    for i, (values, _, edits) in enumerate(rows):
        state = states[i]
        if i in samples.failures:
            continue
        got = by_token(samples.logprobs[i])
        finite = {token_id for token_id, value in got.items() if value > NEVER}
        scores = edited(values, state, **edits)
        if state.params.is_greedy:
            assert finite == set(np.flatnonzero(scores > NEVER).tolist())
            continue
        want = expected_draw(scores, state.params, np.ones(40))
        if not want.is_close_call:
            assert finite == want.kept, state.params
            assert got[samples.token_ids[i]] == pytest.approx(
                scores[samples.token_ids[i]] / state.params.temperature, rel=1e-4, abs=1e-4
            )
            num_looked_at += 1
    assert num_looked_at > 100


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_k": 3, "top_p": 0.5}, {"top_p": 0.5}])
def test_a_token_is_left_out_of_the_processed_ones_by_the_filters_and_not_by_a_small_probability(
    filters: dict[str, Any],
) -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]
    found = by_token(told(logits, "processed_logprobs", logprobs=-1, logit_bias={2: 1e6}, **filters))
    # exp(-1e6) is zero in any float; top_p needs no token but the likeliest.
    kept = {2: 0.0} if "top_p" in filters else {2: 0.0, 11: 9.0 - 1e6, 10: 8.0 - 1e6}
    assert {token_id: value for token_id, value in found.items() if value > NEVER} == pytest.approx(
        kept, abs=0.1
    )


def test_named_tokens_come_instead_of_the_likeliest() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]
    entries = told(logits, "raw_logprobs", temperature=0, logprob_token_ids=[5, 0])
    assert entries.token_ids == (VOCAB - 1, 5, 0)
    assert entries.logprobs == pytest.approx(logits.log_softmax(1)[0, [VOCAB - 1, 5, 0]].tolist())
    assert told(logits, "raw_logprobs", temperature=0, logprobs=2, logprob_token_ids=[5]).token_ids == (11, 5)


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_a_row_that_asks_for_logprobs_changes_nothing_for_one_that_does_not(mode: str) -> None:
    """In a batch of all kinds of rows, tokens are those of a batch without log-probabilities."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logit_bias": {3: 9.0}},
        {"top_k": 4},
        {},
        {"top_p": 0.5, "presence_penalty": 1.0},
    ]
    logits = torch.randn(2 * len(kinds), VOCAB, generator=torch.Generator().manual_seed(2))

    def tokens(asks: bool) -> list[int]:
        params = [
            SamplingParams(**kind, logprobs=3 if asks and even else None) for kind in kinds for even in (0, 1)
        ]
        rows = [SamplingRow(params=p, seed=i, vocab_size=VOCAB) for i, p in enumerate(params)]
        return SamplingBatch(rows, VOCAB, torch.device("cpu"), mode).sample(logits.clone()).token_ids

    assert tokens(asks=True) == tokens(asks=False)
