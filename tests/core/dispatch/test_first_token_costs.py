"""Costs of prompts are found again from the times that they took."""

from __future__ import annotations

import random

import numpy as np
import pytest

from triolet.core.dispatch.first_token_costs import HALF_LIFE, FirstTokenCosts


def test_both_costs_are_found_from_prompts_of_any_length_beside_any_number() -> None:
    costs, dice = FirstTokenCosts(1.0), random.Random(1)
    for _ in range(50):
        tokens, running = dice.randrange(1, 9000), dice.randrange(40)
        costs.observe(tokens, running, tokens * (2e-4 + 3e-6 * running))
    assert costs.token_s == pytest.approx(2e-4, rel=1e-6)
    assert costs.row_s == pytest.approx(3e-6, rel=1e-6)


def test_before_anything_was_seen_the_given_cost_counts() -> None:
    assert (FirstTokenCosts(0.5).token_s, FirstTokenCosts(0.5).row_s, FirstTokenCosts(0.5).num_seen) == (
        0.5,
        0,
        0,
    )


def test_prompts_that_all_ran_beside_equally_many_give_a_plain_mean() -> None:
    costs = FirstTokenCosts(1.0)
    for _ in range(3):
        costs.observe(100, 7, 0.02)
    assert costs.token_s == pytest.approx(2e-4)
    assert costs.row_s == 0


def test_no_rounding_of_prompts_beside_equally_many_makes_a_slope() -> None:
    costs, dice = FirstTokenCosts(1.0), random.Random(4)
    for _ in range(200):
        tokens = dice.randrange(1, 9000)
        costs.observe(tokens, 7, tokens * dice.uniform(1e-4, 3e-4))
        assert costs.row_s == 0


def test_a_line_below_zero_becomes_the_best_one_through_the_origin() -> None:
    costs = FirstTokenCosts(1.0)
    rates = {1: 1e-4, 10: 1e-2}
    for running, rate in rates.items():
        costs.observe(100, running, 100 * rate)
    older = 0.5 ** (1 / HALF_LIFE)
    [slope], *_ = np.linalg.lstsq(
        np.array([[older**0.5 * 1], [10]]), np.array([older**0.5 * rates[1], rates[10]]), rcond=None
    )
    assert costs.token_s == 0
    assert costs.row_s == pytest.approx(slope)


def test_two_prompts_done_in_one_step_average_out() -> None:
    costs = FirstTokenCosts(1.0)
    for _ in range(200):  # the first of a pair gets the time of both, the second none
        costs.observe(100, 0, 0.04)
        costs.observe(100, 0, 0.0)
    assert costs.token_s == pytest.approx(2e-4, rel=0.01)


def test_costs_are_never_negative_whatever_the_times_were() -> None:
    dice = random.Random(2)
    for _ in range(200):
        costs = FirstTokenCosts(1.0)
        for _ in range(dice.randrange(1, 20)):
            costs.observe(dice.randrange(1, 500), dice.randrange(30), dice.choice((0.0, 1e-3, dice.random())))
        assert costs.token_s >= 0
        assert costs.row_s >= 0


def test_what_was_seen_half_a_life_ago_weighs_half() -> None:
    costs = FirstTokenCosts(1.0)
    for _ in range(40 * HALF_LIFE):  # as if for ever
        costs.observe(10, 0, 10.0)
    for _ in range(HALF_LIFE):
        costs.observe(10, 0, 30.0)
    assert costs.token_s == pytest.approx(2.0)  # half of 1 and half of 3 seconds a token


def test_the_fit_is_that_of_numpy_with_the_same_weights() -> None:
    costs, dice = FirstTokenCosts(1.0), random.Random(3)
    seen = [(dice.randrange(50, 900), dice.randrange(9)) for _ in range(120)]
    times = [tokens * (1e-3 + 1e-4 * running) * dice.uniform(0.9, 1.1) for tokens, running in seen]
    for (tokens, running), seconds in zip(seen, times, strict=True):
        costs.observe(tokens, running, seconds)
    ages = np.arange(len(seen))[::-1]
    weights = np.array([tokens for tokens, _ in seen]) * 0.5 ** (ages / HALF_LIFE)
    rates = np.array(times) / np.array([tokens for tokens, _ in seen])
    slope, constant = np.polyfit([running for _, running in seen], rates, 1, w=np.sqrt(weights))
    assert costs.row_s == pytest.approx(slope)
    assert costs.token_s == pytest.approx(constant)
