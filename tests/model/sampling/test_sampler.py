from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from triolet.core.request.params import SamplingParams
from triolet.model.sampling.noise import answer_streams, exponential_noise, position_streams
from triolet.model.sampling.sampler import NOT_NUMBERS, NOTHING_ALLOWED, Samples, SamplingBatch
from triolet.model.sampling.sampling_row import SamplingRow
from triolet.model.sampling.top_k_top_p import TOP_P_TOLERANCE

CPU = torch.device("cpu")
NEVER = -math.inf
GREEDY = SamplingParams(temperature=0)

Array = npt.NDArray[np.float64]


def row(
    params: SamplingParams = GREEDY,
    *,
    seed: int = 0,
    vocab_size: int = 1000,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    ending: Sequence[int] = (),
    bad_words: Sequence[tuple[int, ...]] = (),
) -> SamplingRow:
    return SamplingRow(
        params=params,
        seed=seed,
        vocab_size=vocab_size,
        prompt_token_ids=prompt,
        output_token_ids=output,
        ending_token_ids=ending,
        bad_words_token_ids=bad_words,
    )


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Samples:
    return SamplingBatch(rows, logits.shape[1], CPU).sample(logits.clone())


def likely(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log().float()


def drawn(logits: Tensor, params: SamplingParams, *, draws: int = 400, **fields: Any) -> set[int]:
    """Every token that `draws` seeds bring up."""
    rows = [row(params, seed=seed, vocab_size=logits.shape[1], **fields) for seed in range(draws)]
    return set(sample(logits.expand(draws, -1), rows).token_ids)


# ------------------------------------------------------------------------- the reference, one row at a time in float64


@attrs.frozen
class Expected:
    """What the reference says of a row.

    Args:
        token_id: None if nothing can be chosen.
        kept: tokens that could have been drawn.
        is_close_call: whether a comparison was so near that float32 may decide otherwise.
    """

    token_id: int | None
    kept: frozenset[int]
    is_close_call: bool


def edited(
    logits: Array, state: SamplingRow, prompt: Sequence[int], ending: Sequence[int], bad: Sequence[Any]
) -> Array:
    params, output = state.params, state.output_token_ids
    scores = logits.copy()
    if params.allowed_token_ids is not None:
        for token_id in range(len(scores)):
            if token_id not in params.allowed_token_ids:
                scores[token_id] = NEVER
    for word in bad:
        if list(word[:-1]) == output[len(output) - len(word) + 1 :] and len(output) >= len(word) - 1:
            scores[word[-1]] = NEVER
    if len(output) < params.min_tokens:
        for token_id in ending:
            scores[token_id] = NEVER
    for token_id, bias in (params.logit_bias or {}).items():
        scores[token_id] += bias
    for token_id in range(len(scores)):
        count = output.count(token_id)
        if count or token_id in prompt:
            r = params.repetition_penalty
            scores[token_id] = scores[token_id] / r if scores[token_id] > 0 else scores[token_id] * r
        scores[token_id] -= params.frequency_penalty * count
        scores[token_id] -= params.presence_penalty * (count > 0)
    return scores


def expected_draw(scores: Array, params: SamplingParams, noise: Array) -> Expected:
    close = False
    scores = scores / params.temperature
    max_logit = scores.max()
    if params.min_p:
        floor = max_logit + math.log(params.min_p)
        close |= bool((np.abs(scores - floor) < 1e-5).any())
        scores = np.where(scores < floor, NEVER, scores)
    if 0 < params.top_k < len(scores):
        scores = np.where(scores < np.sort(scores)[-params.top_k], NEVER, scores)
    weights = np.exp(scores - max_logit)
    if params.top_p < 1.0:
        goal = params.top_p * weights.sum() * (1 - TOP_P_TOLERANCE)
        reached = 0.0
        for token_id in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
            close |= abs(reached - goal) < 1e-6 * weights.sum()
            weight = weights[token_id]
            if reached >= goal:
                weights[token_id] = 0.0
            reached += weight
    shares = weights / noise
    second, best = np.sort(shares)[-2:]
    close |= bool(second > best * (1 - 1e-5))
    return Expected(int(shares.argmax()), frozenset(np.flatnonzero(weights).tolist()), close)


def expected(logits: Array, state: SamplingRow, **edits: Any) -> Expected:
    scores = edited(logits, state, **edits)
    if scores.max() == NEVER:
        return Expected(None, frozenset(), False)
    if state.params.is_greedy:
        ranked = np.sort(scores)
        # Penalties move tokens by different amounts, so that what is one number in float64 may be two in float32.
        close = ranked[-2] > ranked[-1] - 1e-5 and (state.has_penalties or bool(state.params.logit_bias))
        return Expected(int(scores.argmax()), frozenset({int(scores.argmax())}), close)
    seed, position = torch.tensor([state.seed]), torch.tensor([len(state.output_token_ids)])
    noise = exponential_noise(position_streams(answer_streams(seed), position), torch.arange(len(scores)))
    return expected_draw(scores, state.params, noise[0].double().numpy())


class Cases:
    """Random rows: their logits, parameters and history, from one seeded generator."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.random = random.Random(seed)
        self.vocab_size = vocab_size

    def some_ids(self, most: int) -> list[int]:
        return self.random.sample(range(self.vocab_size), self.random.randint(1, min(most, self.vocab_size)))

    def logits(self) -> Array:
        """Rounded to halves in some rows, so that ties are many; partly -inf in some."""
        spread = self.random.choice([0.5, 3.0, 10.0])
        values = np.array([self.random.gauss(0, spread) for _ in range(self.vocab_size)])
        if self.random.random() < 0.5:
            values = np.round(values * 2) / 2
        if self.random.random() < 0.2:
            values[self.some_ids(self.vocab_size)] = NEVER
        return values.astype(np.float32).astype(np.float64)

    def maybe(self, chance: float, value: Any, otherwise: Any) -> Any:
        return value if self.random.random() < chance else otherwise

    def params(self) -> SamplingParams:
        roll = self.random
        return SamplingParams(
            temperature=roll.choice([0.0, 0.5, 1.0, 1.0, 2.0, 0.73]),
            top_k=self.maybe(0.5, roll.choice([1, 2, 5, 20, 200, 10**6]), 0),
            top_p=self.maybe(
                0.5, roll.choice([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, roll.uniform(0.01, 1.0)]), 1.0
            ),
            min_p=self.maybe(0.3, roll.choice([1.0, 0.5, 0.05, roll.random()]), 0.0),
            repetition_penalty=self.maybe(0.3, roll.choice([0.5, 1.1, 2.0]), 1.0),
            frequency_penalty=self.maybe(0.3, roll.uniform(-2, 2), 0.0),
            presence_penalty=self.maybe(0.3, roll.uniform(-2, 2), 0.0),
            logit_bias=self.maybe(
                0.3, {token_id: roll.uniform(-5, 5) for token_id in self.some_ids(10)}, None
            ),
            allowed_token_ids=self.maybe(0.3, self.some_ids(self.vocab_size), None),
            min_tokens=roll.choice([0, 0, 4]),
            max_tokens=10,
        )

    def case(self) -> tuple[Array, SamplingRow, dict[str, Any]]:
        prompt = [self.random.randrange(self.vocab_size) for _ in range(self.random.randint(1, 30))]
        output = [self.random.randrange(self.vocab_size) for _ in range(self.random.randint(0, 8))]
        ending = self.maybe(0.7, self.some_ids(4), [])
        bad = self.maybe(
            0.3,
            [(*output[-1:], word) for word in self.some_ids(5)] + [(0, 1, self.vocab_size - 1)],
            [],
        )
        state = row(
            self.params(),
            seed=self.random.getrandbits(63),
            vocab_size=self.vocab_size,
            prompt=prompt,
            output=output,
            ending=ending,
            bad_words=bad,
        )
        return self.logits(), state, {"prompt": prompt, "ending": ending, "bad": bad}


@pytest.mark.parametrize(
    ("vocab_size", "count"),
    [
        (2, 600), (300, 400), (5000, 24),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((40, 8000), (300, 1400))),
    ],
)  # fmt: skip
def test_random_rows_with_all_fields_agree_with_the_float64_reference(vocab_size: int, count: int) -> None:
    cases = Cases(vocab_size, vocab_size)
    rows = [cases.case() for _ in range(count)]
    logits = torch.from_numpy(np.stack([values for values, _, _ in rows])).float()
    samples = sample(logits, [state for _, state, _ in rows])
    close_calls = 0
    for i, (values, state, edits) in enumerate(rows):
        want = expected(values, state, **edits)
        assert (samples.failures.get(i) == NOTHING_ALLOWED) == (want.token_id is None)
        if want.token_id is not None and samples.token_ids[i] != want.token_id:
            assert want.is_close_call, f"row {i}, {state.params}: {want}, got {samples.token_ids[i]}"
            close_calls += 1
    assert close_calls <= count // 500


def test_rows_wider_than_the_first_candidates_agree_with_the_reference() -> None:
    """Flat rows, whose top_p or top_k reaches past 128 and past 2048 tokens, with ties across those edges."""
    vocab_size = 6000
    generator = np.random.default_rng(5)
    fields: list[dict[str, Any]] = [
        {"top_p": 0.9}, {"top_p": 0.05}, {"top_p": 0.4}, {"top_k": 127}, {"top_k": 128}, {"top_k": 2047},
        {"top_k": 2048}, {"top_k": 3000, "top_p": 0.5}, {"top_k": 5999}, {"top_k": 100, "top_p": 0.9},
        {"top_p": 0.99, "min_p": 0.3},
    ]  # fmt: skip
    for flatness in (0.0, 0.01, 1.0):
        values = generator.normal(size=(len(fields), vocab_size)) * flatness
        values = np.round(values * 8) / 8 if flatness == 1.0 else values.astype(np.float32).astype(np.float64)
        rows = [row(SamplingParams(**given), seed=i, vocab_size=vocab_size) for i, given in enumerate(fields)]
        samples = sample(torch.from_numpy(values).float(), rows)
        for i, state in enumerate(rows):
            want = expected(values[i], state, prompt=(), ending=(), bad=())
            assert samples.token_ids[i] == want.token_id or want.is_close_call, f"{fields[i]}, {flatness}"


def test_an_entirely_masked_row_fails_alone() -> None:
    params = SamplingParams(temperature=0, allowed_token_ids=[3], min_tokens=2)
    rows = [
        row(),
        row(params, ending=[3]),
        row(SamplingParams(allowed_token_ids=[3], min_tokens=2), ending=[3]),
        row(),
    ]
    samples = sample(torch.arange(40.0).view(4, 10), rows)
    assert samples.failures == {1: NOTHING_ALLOWED, 2: NOTHING_ALLOWED}
    assert (samples.token_ids[0], samples.token_ids[3]) == (9, 9)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_that_holds_no_numbers_fails_alone(poison: float, dtype: torch.dtype) -> None:
    kinds = [
        GREEDY,
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(temperature=0, allowed_token_ids=[1, 2]),  # even where the mask would hide it
    ]
    rows = [row(params, seed=seed, vocab_size=500) for params in kinds for seed in (1, 2)]
    clean = torch.linspace(-4, 4, 500).sin().expand(len(rows), -1).to(dtype)
    poisoned = clean.clone()
    poisoned[::2, 300] = poison
    samples, undisturbed = sample(poisoned, rows), sample(clean, rows)
    assert samples.failures == dict.fromkeys(range(0, len(rows), 2), NOT_NUMBERS)
    assert samples.token_ids[1::2] == undisturbed.token_ids[1::2]
    assert samples.logprobs == {i: undisturbed.logprobs[i] for i in (7,)}


@pytest.mark.parametrize("temperature", [0.0, 0.01, 2.0])
@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {1: 1e300}},
        {"logit_bias": {1: 1.7e308}, "repetition_penalty": 1e-300},
        {"logit_bias": {1: 1e300, 2: -1e300}, "repetition_penalty": 1e300, "frequency_penalty": 2.0},
    ],
)
def test_no_finite_number_is_too_large(fields: dict[str, Any], temperature: float) -> None:
    state = row(SamplingParams(temperature=temperature, **fields), prompt=[1, 3], output=[1, 2, 2])
    samples = sample(torch.linspace(-3, 3, 10).repeat(1, 1), [state])
    assert samples.failures == {}
    assert samples.token_ids == [1] if fields.get("repetition_penalty") != 1e300 else samples.token_ids != [2]


# ------------------------------------------------------------------------------------------------- each rule by itself


@pytest.mark.parametrize(
    ("top_p", "count"), [(0.39, 1), (0.4, 1), (0.41, 2), (0.7, 2), (0.71, 3), (0.9, 3), (1.0, 4)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, count: int) -> None:
    assert drawn(likely(0.4, 0.3, 0.2, 0.1), SamplingParams(top_p=top_p)) == set(range(count))


def test_top_p_keeps_one_token_however_small_it_is() -> None:
    assert drawn(likely(0.3, 0.4, 0.2, 0.1), SamplingParams(top_p=1e-12)) == {1}


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    # .4 and .3 are .57 and .43 after top_k: .5 is reached by the first alone, .6 by both.
    assert drawn(likely(0.4, 0.3, 0.2, 0.1), SamplingParams(top_k=2, top_p=0.5)) == {0}
    assert drawn(likely(0.4, 0.3, 0.2, 0.1), SamplingParams(top_k=2, top_p=0.6)) == {0, 1}


def test_top_k_keeps_ties_with_its_last() -> None:
    logits = torch.tensor([[5.0, 4.0, 4.0, 4.0, 1.0]])
    assert drawn(logits, SamplingParams(top_k=2)) == {0, 1, 2, 3}
    assert drawn(logits, SamplingParams(top_k=1)) == {0}


@pytest.mark.parametrize("vocab_size", [100, 5000])
def test_top_k_keeps_ties_however_many(vocab_size: int) -> None:
    logits = torch.zeros(1, vocab_size)
    logits[0, 7] = 1.0
    assert len(drawn(logits, SamplingParams(top_k=3), draws=300)) > 90


def test_top_p_after_top_k_is_a_share_of_all_its_ties() -> None:
    # 2999 tokens share the second place: .01 of the whole is reached by the first (weight e) and 28 of them.
    logits = torch.zeros(1, 3000)
    logits[0, 0] = 1.0
    assert drawn(logits, SamplingParams(top_k=3, top_p=0.01), draws=300) == set(range(29))


def test_among_equal_tokens_top_p_keeps_the_lower_ids() -> None:
    logits = torch.zeros(1, 3000)
    assert drawn(logits, SamplingParams(top_p=0.01), draws=300) == set(range(30))


def test_min_p_drops_what_is_less_likely_than_its_share_of_the_likeliest() -> None:
    assert drawn(likely(0.4, 0.3, 0.2, 0.1), SamplingParams(min_p=0.6)) == {0, 1}
    assert drawn(likely(0.4, 0.3, 0.2, 0.1), SamplingParams(min_p=1.0)) == {0}


def test_min_p_looks_at_probabilities_after_temperature() -> None:
    # At temperature 2 the probabilities are as .632, .548, .447, .316: the last is now half of the first.
    assert drawn(likely(0.4, 0.3, 0.2, 0.1), SamplingParams(min_p=0.49, temperature=2.0)) == {0, 1, 2, 3}
    assert drawn(likely(0.4, 0.3, 0.2, 0.1), SamplingParams(min_p=0.51, temperature=2.0)) == {0, 1, 2}


def test_draws_have_the_frequencies_of_the_softmax() -> None:
    draws = 20_000
    for params in (
        SamplingParams(),
        SamplingParams(top_k=4),
        SamplingParams(temperature=0.5),
        SamplingParams(top_p=0.85),
    ):
        logits = likely(0.4, 0.3, 0.2, 0.1)
        rows = [row(params, seed=seed, vocab_size=4) for seed in range(draws)]
        counts = torch.bincount(torch.tensor(sample(logits.expand(draws, -1), rows).token_ids), minlength=4)
        weights = logits[0].double().div(params.temperature).exp()
        weights[3] *= params.top_p == 1.0  # .85 keeps .4 .3 .2
        shares = weights / weights.sum()
        assert ((counts / draws - shares).abs() <= 4 * (shares * (1 - shares) / draws).sqrt()).all()


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_answer() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert sample(torch.tensor([[4.0, 3.0, 2.1]]), [row(params, prompt=[0], output=[1])]).token_ids == [2]
    assert sample(torch.tensor([[-1.0, -1.5, -9.0]]), [row(params, prompt=[0])]).token_ids == [1]


def test_frequency_counts_the_answer_and_presence_looks_once() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.1]])
    frequency, presence = (
        SamplingParams(temperature=0, frequency_penalty=0.6),
        SamplingParams(temperature=0, presence_penalty=0.6),
    )
    assert sample(logits, [row(frequency, prompt=[0, 0, 0], output=[0])]).token_ids == [0]
    assert sample(logits, [row(frequency, output=[0, 0])]).token_ids == [1]
    assert sample(logits, [row(presence, output=[0, 0, 0, 0])]).token_ids == [0]


def test_the_bias_comes_before_the_penalties() -> None:
    # (2 + 2) / 2 = 2 loses against 2.5; 2 / 2 + 2 = 3 would win.
    params = SamplingParams(temperature=0, repetition_penalty=2.0, logit_bias={0: 2.0})
    assert sample(torch.tensor([[2.0, 2.5]]), [row(params, prompt=[0])]).token_ids == [1]


def test_a_bias_does_not_bring_back_what_is_masked() -> None:
    params = SamplingParams(temperature=0, allowed_token_ids=[1, 2], logit_bias={0: 100.0})
    assert sample(torch.tensor([[5.0, 1.0, 2.0]]), [row(params)]).token_ids == [2]


def test_a_bad_word_is_banned_when_the_answer_ends_in_its_beginning() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    word = [(5, 6, 3)]
    assert sample(logits, [row(output=[5, 6], bad_words=word)]).token_ids == [2]
    assert sample(logits, [row(output=[6], bad_words=word)]).token_ids == [3]
    assert sample(logits, [row(output=[5, 6, 0], bad_words=word)]).token_ids == [3]
    assert sample(logits, [row(prompt=[5, 6], bad_words=word)]).token_ids == [3]
    assert sample(logits, [row(bad_words=[(3,)])]).token_ids == [2]


def test_ending_tokens_are_masked_until_min_tokens_are_there() -> None:
    params = SamplingParams(temperature=0, min_tokens=2)
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    chosen = [
        sample(logits, [row(params, output=[0] * count, ending=[2])]).token_ids[0] for count in range(4)
    ]
    assert chosen == [1, 1, 2, 2]


def test_ids_that_the_model_has_no_score_for_are_left_alone() -> None:
    params = SamplingParams(temperature=0, min_tokens=1)
    assert sample(
        torch.tensor([[0.0, 1.0]]), [row(params, vocab_size=2, ending=[7], bad_words=[(9,)])]
    ).token_ids == [1]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert sample(torch.zeros(3, 7), [row(), row(), row()]).token_ids == [0, 0, 0]


# ------------------------------------------------------------------------------------------------------ seeds and order


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_in_any_order() -> None:
    cases = Cases(77, 200)
    rows = [cases.case() for _ in range(200)]
    logits = torch.from_numpy(np.stack([values for values, _, _ in rows])).float()
    states = [state for _, state, _ in rows]
    together = sample(logits, states).token_ids
    order = random.Random(1).sample(range(200), 200)
    shuffled = sample(logits[order], [states[i] for i in order]).token_ids
    assert shuffled == [together[i] for i in order]
    assert [sample(logits[i : i + 1], [states[i]]).token_ids[0] for i in range(200)] == together


def test_position_and_seed_both_change_the_draw() -> None:
    logits = torch.zeros(1, 1000)
    by_position = {drawn(logits, SamplingParams(), draws=1, output=[0] * n).pop() for n in range(50)}
    assert len(by_position) > 40
    assert len(drawn(logits, SamplingParams(), draws=50)) > 40


def test_history_that_was_appended_equals_history_that_was_given() -> None:
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.1)
    generator = random.Random(3)
    prompt, output = (
        [generator.randrange(50) for _ in range(20)],
        [generator.randrange(50) for _ in range(100)],
    )
    grown = row(params, prompt=prompt)
    for token_id in output:
        grown.append(token_id)
    given = row(params, prompt=prompt, output=output)
    assert grown.counts is not None
    assert given.counts is not None
    listed = dict(zip(grown.counts.token_ids.tolist(), grown.counts.counts.tolist(), strict=True))
    assert listed == {token_id: output.count(token_id) for token_id in {*prompt, *output}}
    assert listed == dict(zip(given.counts.token_ids.tolist(), given.counts.counts.tolist(), strict=True))
    assert grown.output_token_ids == given.output_token_ids == output


def test_a_batch_follows_its_rows_from_step_to_step() -> None:
    params = SamplingParams(repetition_penalty=1.5, min_tokens=5, top_p=0.9)
    steady = [row(params, seed=i, prompt=[1, 2], ending=[4], bad_words=[(3, 4)]) for i in range(5)]
    batch = SamplingBatch(steady, 30, CPU)
    logits = torch.randn(8, 5, 30, generator=torch.Generator().manual_seed(0))
    for step in range(8):
        fresh = [
            row(params, seed=i, prompt=[1, 2], output=state.output_token_ids, ending=[4], bad_words=[(3, 4)])
            for i, state in enumerate(steady)
        ]
        token_ids = batch.sample(logits[step].clone()).token_ids
        assert token_ids == sample(logits[step], fresh).token_ids
        for state, token_id in zip(steady, token_ids, strict=True):
            state.append(token_id)


# ------------------------------------------------------------------------------------------------------------- logprobs


def test_logprobs_name_the_chosen_token_first_and_then_the_likeliest() -> None:
    logits = likely(0.1, 0.4, 0.2, 0.3)
    rows = [
        row(SamplingParams(temperature=0, logprobs=2)),
        row(),
        row(SamplingParams(allowed_token_ids=[0], logprobs=0)),
    ]
    samples = sample(logits.expand(3, -1), rows)
    assert samples.logprobs.keys() == {0, 2}
    greedy, forced = samples.logprobs[0], samples.logprobs[2]
    assert greedy.token_ids == (1, 1, 3)
    assert [math.exp(value) for value in greedy.logprobs] == pytest.approx([0.4, 0.4, 0.3])
    assert greedy.rank == 1
    assert (forced.token_ids, forced.rank) == ((0,), 4)
    assert math.exp(forced.logprobs[0]) == pytest.approx(0.1)


def test_logprobs_of_minus_one_name_the_whole_vocabulary_in_falling_order() -> None:
    rows = [row(SamplingParams(temperature=0, logprobs=-1)), row(SamplingParams(temperature=0, logprobs=1))]
    all_of_them = sample(likely(0.1, 0.4, 0.2, 0.3).expand(2, -1), rows).logprobs
    assert all_of_them[0].token_ids == (1, 1, 3, 2, 0)
    assert all_of_them[1].token_ids == (1, 1)
    assert sum(math.exp(value) for value in all_of_them[0].logprobs[1:]) == pytest.approx(1.0)


def test_the_rank_counts_every_token_at_least_as_likely() -> None:
    rows = [row(SamplingParams(temperature=0, logprobs=1, allowed_token_ids=[2]))]
    assert sample(torch.tensor([[3.0, 2.0, 2.0, 1.0]]), rows).logprobs[0].rank == 3


def test_logprobs_are_the_models_own_whatever_is_asked_of_sampling() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(2))
    plain = logits.log_softmax(dim=1)[0]
    params = SamplingParams(
        temperature=0.1,
        top_k=3,
        repetition_penalty=2.0,
        logit_bias={1: 50.0},
        logprobs=20,
        frequency_penalty=1.0,
    )
    got = sample(logits, [row(params, prompt=[1, 2, 3], output=[4])]).logprobs[0]
    assert list(got.logprobs) == pytest.approx([plain[token_id].item() for token_id in got.token_ids])
    assert set(got.token_ids[1:]) == set(plain.topk(20).indices.tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_as_their_float32_values(dtype: torch.dtype) -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(4)).to(dtype)
    kinds = [GREEDY, SamplingParams(), SamplingParams(top_p=0.8), SamplingParams(temperature=0.3, logprobs=3)]
    rows = [row(kinds[i % 4], seed=i) for i in range(40)]
    assert sample(logits, rows) == sample(logits.float(), rows)


@pytest.mark.gpu
def test_the_gpu_chooses_the_same_tokens() -> None:
    cases = Cases(9, 3000)
    rows = [cases.case() for _ in range(100)]
    logits = torch.from_numpy(np.stack([values for values, _, _ in rows])).float()
    states = [state for _, state, _ in rows]
    on_gpu = SamplingBatch(states, 3000, torch.device("cuda")).sample(logits.cuda())
    here = sample(logits, states)
    assert on_gpu.failures == here.failures
    differing = sum(a != b for a, b in zip(on_gpu.token_ids, here.token_ids, strict=True))
    assert differing <= 1 + len(here.failures)
