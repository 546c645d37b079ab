"""The dispatcher gives a request to the replica that will answer first, and to none that is dead or drains."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from math import isclose

import pytest

from triolet.core.dispatch.dispatcher import (
    EXTERNALITY,
    FIRST_TOKEN_S,
    NUM_SURE,
    TIE,
    Dispatcher,
    Placement,
)
from triolet.core.dispatch.first_token_costs import FirstTokenCosts
from triolet.errors import InvariantViolated

BLOCK = 100


def chain(name: str, num_blocks: int) -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(num_blocks)]


def dispatcher_of(num_replicas: int, *, learns_from_placements: bool = True) -> Dispatcher:
    dispatcher = Dispatcher(BLOCK, learns_from_placements=learns_from_placements)
    for replica in range(num_replicas):
        dispatcher.add_replica(replica)
    return dispatcher


def teach(dispatcher: Dispatcher, replica: int, token_s: float, *, at_s: float = 0.0) -> None:
    """Let a replica, the only one that takes requests meanwhile, compute prompts at so many seconds a token."""
    others = [each for each in dispatcher.replicas if each != replica]
    for other in others:
        dispatcher.drain_replica(other)
    for number in range(NUM_SURE):
        name = f"taught {replica} {number}"
        assert replica_of(dispatcher, name, [], 100, at_s) == replica
        dispatcher.first_token(name, at_s + 100 * token_s)
        dispatcher.finish(name, at_s + 100 * token_s)
    for other in others:
        dispatcher.add_replica(other)


def place(
    dispatcher: Dispatcher, name: str, hashes: list[bytes], num_tokens: int, now_s: float = 0.0
) -> Placement:
    placement = dispatcher.place(name, hashes, num_tokens, now_s)
    assert placement is not None
    return placement


def replica_of(
    dispatcher: Dispatcher, name: str, hashes: list[bytes], num_tokens: int, now_s: float = 0.0
) -> int:
    return place(dispatcher, name, hashes, num_tokens, now_s).replica


def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    dispatcher = dispatcher_of(3)
    assert replica_of(dispatcher, "first", chain("a", 5), 550) == 0
    dispatcher.first_token("first", 0.055)
    placement = place(dispatcher, "second", [*chain("a", 5), b"more"], 650, 1.0)
    assert (placement.replica, placement.num_cached_tokens) == (0, 500)


def test_a_prefix_is_worth_the_time_that_it_saves_and_no_more() -> None:
    """500 of 600 tokens are cached at 0, which costs 100 + 100 ms there beside the queue, and 600 + 600 ms at 1."""
    for queued, expected in ((950, 0), (1050, 1)):
        dispatcher = dispatcher_of(2, learns_from_placements=False)
        teach(dispatcher, 0, 1e-3)
        teach(dispatcher, 1, 1e-3)
        dispatcher.index.touch(0, chain("a", 5))
        dispatcher.drain_replica(1)
        place(dispatcher, "queued", [], queued, 9.0)
        dispatcher.add_replica(1)
        assert replica_of(dispatcher, "asked", chain("a", 6), 600, 9.0) == expected


def test_equal_costs_go_to_the_replica_with_fewest_tokens_in_use() -> None:
    dispatcher = dispatcher_of(3)
    for name in ("one", "two", "three"):
        place(dispatcher, name, [], 10)
        dispatcher.first_token(name, 0.001)
    assert [dispatcher.replica_of(name) for name in ("one", "two", "three")] == [0, 1, 2]
    dispatcher.grow("one", 50)
    dispatcher.grow("three", 20)
    assert replica_of(dispatcher, "four", [], 10, 1.0) == 1


def test_costs_within_a_hundredth_are_equal() -> None:
    dispatcher = dispatcher_of(2)
    teach(dispatcher, 0, 1.000e-3)
    teach(dispatcher, 1, 1.005e-3)
    assert replica_of(dispatcher, "one", [], 1000, 9.0) == 0
    dispatcher.first_token("one", 10.0)
    dispatcher.drain_replica(0)
    place(dispatcher, "two", [], 500, 11.0)
    dispatcher.first_token("two", 11.5)
    dispatcher.add_replica(0)
    assert replica_of(dispatcher, "three", [], 1000, 12.0) == 1  # the dearer one by 0.5 %, but emptier


def test_a_replica_of_half_the_speed_gets_half_as_much() -> None:
    dispatcher, shares, now_s = dispatcher_of(2), Counter[int](), 0.0
    speeds, free_at_s = (1e-3, 2e-3), [0.0, 0.0]
    done: list[tuple[float, str]] = []
    for number in range(900):  # 100 tokens each 0.07 s: they need 0.067 s of both together
        now_s += 0.07
        for at_s, name in sorted(done):
            if at_s <= now_s:
                dispatcher.first_token(name, at_s)
                dispatcher.finish(name, at_s)
                done.remove((at_s, name))
        chosen = replica_of(dispatcher, str(number), [], 100, now_s)
        free_at_s[chosen] = max(now_s, free_at_s[chosen]) + 100 * speeds[chosen]
        done.append((free_at_s[chosen], str(number)))
        shares[chosen] += 1
    assert 1.6 < shares[0] / shares[1] < 2.4


def test_a_replica_that_was_never_seen_costs_what_all_together_do() -> None:
    dispatcher = dispatcher_of(1)
    teach(dispatcher, 0, 5e-3)
    dispatcher.add_replica(1)
    dispatcher.drain_replica(0)
    assert place(dispatcher, "asked", [], 1000, 9.0).expected_s == pytest.approx(5.0)


def test_before_anything_was_seen_the_expected_time_is_that_of_the_constant() -> None:
    assert place(dispatcher_of(1), "asked", [], 200).expected_s == pytest.approx(200 * FIRST_TOKEN_S)


def test_the_wait_counts_what_is_queued_less_what_was_computed_since() -> None:
    dispatcher = dispatcher_of(1)
    teach(dispatcher, 0, 1e-3)
    place(dispatcher, "one", [], 1000, 10.0)
    place(dispatcher, "two", [], 500, 10.0)
    # At 10.4 s: 0.6 s of "one", 0.5 s of "two", 0.2 s of its own.
    assert place(dispatcher, "three", [], 200, 10.4).expected_s == pytest.approx(1.3)


def test_a_replica_with_an_overdue_prompt_is_left_the_more_the_longer_it_takes() -> None:
    dispatcher = dispatcher_of(1)
    teach(dispatcher, 0, 1e-3)
    place(dispatcher, "stuck", [], 1000, 10.0)
    assert place(dispatcher, "soon", [], 1, 11.0).expected_s == pytest.approx(0.001)
    dispatcher.finish("soon", 11.0)
    assert place(dispatcher, "late", [], 1, 31.0).expected_s == pytest.approx(20.001)


def test_answers_that_run_beside_a_prompt_make_it_dearer() -> None:
    """Token times of 1 ms alone and 2 ms beside one other: 3 ms are expected beside two."""
    dispatcher, now_s = dispatcher_of(1), 0.0
    for number in range(NUM_SURE):
        place(dispatcher, f"alone {number}", [], 100, now_s)
        dispatcher.first_token(f"alone {number}", now_s + 0.1)
        place(dispatcher, f"beside {number}", [], 100, now_s + 1)
        dispatcher.first_token(f"beside {number}", now_s + 1.2)
        dispatcher.finish(f"alone {number}", now_s + 2)
        dispatcher.finish(f"beside {number}", now_s + 2)
        now_s += 3
    for number in range(2):
        place(dispatcher, f"runs {number}", [], 100, now_s)
        dispatcher.first_token(f"runs {number}", now_s + 0.1 * (1 + number))
        now_s += 1
    assert place(dispatcher, "asked", [], 1000, now_s).expected_s == pytest.approx(3.0, rel=0.01)


def test_a_dead_replica_returns_what_it_had_oldest_first_and_is_known_for_nothing() -> None:
    dispatcher = dispatcher_of(2)
    dispatcher.drain_replica(1)
    for name in ("one", "two", "three"):
        place(dispatcher, name, chain(name, 2), 250)
    dispatcher.first_token("two", 1.0)
    dispatcher.add_replica(1)
    assert dispatcher.remove_replica(0) == ("one", "two", "three")
    assert dispatcher.replicas == (1,)
    assert len(dispatcher.index) == 0
    assert dispatcher.replica_of("one") is None
    assert [replica_of(dispatcher, name, chain(name, 2), 250) for name in ("one", "two", "three")] == [
        1,
        1,
        1,
    ]


def test_a_replica_that_comes_back_starts_with_nothing() -> None:
    dispatcher = dispatcher_of(2)
    assert replica_of(dispatcher, "before", chain("a", 5), 500) == 0
    dispatcher.remove_replica(0)
    dispatcher.add_replica(0)
    assert dispatcher.num_requests(0) == 0
    placement = place(dispatcher, "after", chain("a", 5), 500)
    assert (placement.replica, placement.num_cached_tokens) == (0, 0)


def test_late_news_of_a_dead_replica_changes_nothing() -> None:
    dispatcher = dispatcher_of(2)
    place(dispatcher, "lost", [], 100)
    dispatcher.remove_replica(0)
    dispatcher.first_token("lost", 1.0)
    dispatcher.grow("lost", 5)
    dispatcher.finish("lost", 2.0)
    assert dispatcher.num_requests(1) == 0


def test_a_replica_that_drains_gets_nothing_and_keeps_what_it_has() -> None:
    dispatcher = dispatcher_of(2)
    assert replica_of(dispatcher, "kept", chain("a", 5), 500) == 0
    dispatcher.drain_replica(0)
    assert replica_of(dispatcher, "asked", chain("a", 5), 500) == 1
    assert (dispatcher.replica_of("kept"), dispatcher.num_requests(0)) == (0, 1)
    dispatcher.add_replica(0)  # the drain is called off, and its cache is still known
    assert place(dispatcher, "again", chain("a", 5), 550, 9.0).num_cached_tokens == 500


def test_where_no_replica_takes_requests_nothing_is_noted() -> None:
    dispatcher = dispatcher_of(1)
    dispatcher.drain_replica(0)
    assert dispatcher.place("asked", chain("a", 2), 250, 0.0) is None
    assert Dispatcher(BLOCK).place("asked", [], 1, 0.0) is None
    assert (dispatcher.replica_of("asked"), len(dispatcher.index)) == (None, 0)


def test_one_token_is_always_left_to_compute() -> None:
    dispatcher = dispatcher_of(1)
    place(dispatcher, "one", chain("a", 2), 200)
    assert place(dispatcher, "two", chain("a", 2), 200).num_cached_tokens == 199


def test_an_index_that_caches_feed_learns_nothing_from_placements() -> None:
    dispatcher = dispatcher_of(1, learns_from_placements=False)
    place(dispatcher, "one", chain("a", 2), 250)
    assert place(dispatcher, "two", chain("a", 2), 250).num_cached_tokens == 0


class Formula:
    """The rule as the module states it, with a look at every replica and nothing kept between two decisions."""

    def __init__(self) -> None:
        self.waiting: dict[int, dict[str, int]] = {}  # new tokens, by replica and request
        self.running: dict[int, set[str]] = {}
        self.held: Counter[int] = Counter()
        self.front_since_s: dict[int, float] = {}
        self.costs: dict[int, FirstTokenCosts] = {}
        self.all_costs = FirstTokenCosts(FIRST_TOKEN_S)

    def decision(self, num_tokens: int, now_s: float, taking: Iterable[int]) -> tuple[int, float]:
        offers: dict[int, tuple[float, float]] = {}
        for replica in taking:
            costs = self.costs[replica]
            token_s = (costs if costs.num_seen >= NUM_SURE else self.all_costs).per_token_s(
                len(self.running[replica])
            )
            own_s = wait_s = num_tokens * token_s
            if queue := list(self.waiting[replica].values()):
                first_s = abs(queue[0] * token_s - (now_s - self.front_since_s[replica]))
                wait_s = sum(queue[1:]) * token_s + first_s + own_s
            offers[replica] = wait_s + EXTERNALITY * own_s, wait_s
        least = min(cost for cost, _ in offers.values())
        near = [replica for replica, (cost, _) in offers.items() if cost <= (1 + TIE) * least]
        chosen = min(near, key=lambda replica: (self.held[replica], replica))
        return chosen, offers[chosen][1]


@pytest.mark.parametrize("seed", range(4))
def test_the_decisions_of_random_stories_are_those_of_the_formula(seed: int) -> None:
    draw, formula, dispatcher = random.Random(seed), Formula(), dispatcher_of(0, learns_from_placements=False)
    requests: dict[str, tuple[int, int]] = {}  # replica and prompt tokens
    draining: set[int] = set()
    now_s = 0.0
    for number in range(1500):
        now_s += draw.expovariate(10)
        if number % 100 == 0 and len(formula.costs) < 8:
            replica = len(formula.costs)
            dispatcher.add_replica(replica)
            formula.waiting[replica], formula.running[replica] = {}, set()
            formula.costs[replica] = FirstTokenCosts(FIRST_TOKEN_S)
        if number % 70 == 0 and len(draining) < len(formula.costs) - 1:
            draining.add(last := max(set(formula.costs) - draining))
            dispatcher.drain_replica(last)
        elif number % 35 == 0 and draining:
            dispatcher.add_replica(draining.pop())
        name, num_tokens = str(number), draw.randint(1, 2000)
        expected = formula.decision(num_tokens, now_s, sorted(set(formula.costs) - draining))
        placement = place(dispatcher, name, [], num_tokens, now_s)
        assert placement.replica == expected[0]
        assert isclose(placement.expected_s, expected[1], rel_tol=1e-6)
        if not formula.waiting[placement.replica]:
            formula.front_since_s[placement.replica] = now_s
        formula.waiting[placement.replica][name] = num_tokens
        formula.held[placement.replica] += num_tokens
        requests[name] = placement.replica, num_tokens
        for _ in range(draw.randint(0, 2)):
            name = draw.choice(list(requests))
            replica, num_tokens = requests[name]
            queue = formula.waiting[replica]
            if name in queue and draw.random() < 0.8:
                seconds = now_s - formula.front_since_s[replica]
                for costs in (formula.costs[replica], formula.all_costs):
                    costs.observe(num_tokens, len(formula.running[replica]), seconds)
                del queue[name]
                formula.front_since_s[replica] = now_s
                formula.running[replica].add(name)
                dispatcher.first_token(name, now_s)
                continue
            if name in queue and next(iter(queue)) == name:
                formula.front_since_s[replica] = now_s
            queue.pop(name, None)
            formula.running[replica].discard(name)
            formula.held[replica] -= num_tokens
            del requests[name]
            dispatcher.finish(name, now_s)


def test_a_request_or_replica_that_is_there_already_is_refused() -> None:
    dispatcher = dispatcher_of(1)
    place(dispatcher, "one", [], 100)
    with pytest.raises(InvariantViolated, match="'one' is placed"):
        dispatcher.place("one", [], 100, 0.0)
    with pytest.raises(InvariantViolated, match="0 is there"):
        dispatcher.add_replica(0)


def test_after_random_stories_nothing_is_left_over() -> None:
    """Whatever comes, each request is in one queue, and sums are those of the requests that are there."""
    for seed in range(200):
        dice, dispatcher, now_s = random.Random(seed), dispatcher_of(3), 0.0
        owed: dict[str, int] = {}
        for number in range(120):
            now_s += dice.random()
            some = dice.choice([*owed, ""])
            match dice.randrange(8):
                case 0 | 1 | 2 | 3:
                    placement = dispatcher.place(str(number), chain(str(dice.randrange(4)), 3), 400, now_s)
                    if placement is not None:
                        owed[str(number)] = placement.replica
                case 4:
                    dispatcher.first_token(some, now_s)
                case 5:
                    dispatcher.finish(some, now_s)
                    owed.pop(some, None)
                case 6:
                    replica = dice.randrange(3)
                    if replica in dispatcher.replicas:
                        lost = dispatcher.remove_replica(replica)
                        assert lost == tuple(name for name, where in owed.items() if where == replica)
                        owed = {name: where for name, where in owed.items() if where != replica}
                    else:
                        dispatcher.add_replica(replica)
                case 7 if dispatcher.replicas:
                    dispatcher.drain_replica(dice.choice(dispatcher.replicas))
            held = Counter(owed.values())
            assert all(dispatcher.num_requests(each) == held[each] for each in dispatcher.replicas)
        for name in owed:
            dispatcher.finish(name, now_s)
        for replica in dispatcher.replicas:
            dispatcher.drain_replica(replica)
            dispatcher.add_replica(replica)
            alone = [each for each in dispatcher.replicas if each != replica]
            for other in alone:
                dispatcher.drain_replica(other)
            placement = place(dispatcher, f"last {replica}", [], 1, now_s)
            assert placement.replica == replica
            after = place(dispatcher, f"after {replica}", [], 1, now_s)
            assert after.expected_s == pytest.approx(
                2 * placement.expected_s
            )  # behind the last, and nothing else
            for other in alone:
                dispatcher.add_replica(other)


@pytest.mark.parametrize(("num_tokens", "num_new"), [(400, 400), (1, 1), (0, 1)])
def test_a_request_that_came_otherwise_waits_with_all_its_tokens_and_at_least_one(
    num_tokens: int, num_new: int
) -> None:
    dispatcher = dispatcher_of(1)
    dispatcher.assign("came", 0, num_tokens, 5.0)
    assert (dispatcher.replica_of("came"), dispatcher.num_requests(0)) == (0, 1)
    expected_s = (num_new + 10) * FIRST_TOKEN_S
    assert place(dispatcher, "asked", [], 10, 5.0).expected_s == pytest.approx(expected_s)


def test_the_tokens_of_a_request_that_came_otherwise_are_held_by_its_replica() -> None:
    dispatcher = dispatcher_of(2)
    dispatcher.assign("came", 0, 300, 0.0)
    place(dispatcher, "other", [], 200)
    for name, seconds in (("came", 0.03), ("other", 0.02)):
        dispatcher.first_token(name, seconds)
    assert replica_of(dispatcher, "asked", [], 10, 1.0) == 1


def test_the_first_token_of_an_answer_ends_its_wait_and_each_one_is_held() -> None:
    dispatcher = dispatcher_of(2)
    for name in ("one", "two"):
        place(dispatcher, name, [], 100)
    for _ in range(3):
        dispatcher.token_came("one", 0.01)
    dispatcher.token_came("two", 0.01)
    placement = place(dispatcher, "asked", [], 1, 0.5)
    assert (placement.replica, placement.num_cached_tokens) == (1, 0)
    assert placement.expected_s == pytest.approx(FIRST_TOKEN_S)


def test_the_later_tokens_of_an_answer_teach_nothing() -> None:
    dispatcher = dispatcher_of(1)
    place(dispatcher, "one", [], 100)
    dispatcher.token_came("one", 0.01)
    place(dispatcher, "two", [], 100, 1.0)
    dispatcher.token_came("one", 9.0)
    assert place(dispatcher, "asked", [], 100, 1.0).expected_s == pytest.approx(200 * FIRST_TOKEN_S)


def test_tokens_of_an_answer_that_is_over_count_nowhere() -> None:
    dispatcher = dispatcher_of(2)
    place(dispatcher, "over", [], 100)
    dispatcher.token_came("over", 0.01)
    dispatcher.finish("over", 0.02)
    dispatcher.token_came("over", 0.03)
    assert (dispatcher.num_requests(0), dispatcher.replica_of("over")) == (0, None)
    assert replica_of(dispatcher, "asked", [], 100, 1.0) == 0


@pytest.mark.parametrize("replica", [0, 1])
def test_the_tokens_that_a_request_held_are_free_when_it_is_over(replica: int) -> None:
    dispatcher = dispatcher_of(2)
    for name in ("first", "second"):
        place(dispatcher, name, [], 100)
        dispatcher.first_token(name, 0.01)
    for name in ("first", "second"):
        if dispatcher.replica_of(name) == replica:
            dispatcher.grow(name, 50)
            dispatcher.token_came(name, 0.02)
        dispatcher.finish(name, 0.03)
    assert replica_of(dispatcher, "asked", [], 100, 1.0) == 0


@pytest.mark.parametrize(("num_seen", "is_sure"), [(7, False), (8, True)])
def test_the_costs_of_a_replica_are_its_own_after_eight_first_tokens(num_seen: int, is_sure: bool) -> None:
    dispatcher = dispatcher_of(2)
    teach(dispatcher, 0, 1e-3)
    dispatcher.drain_replica(0)
    for number in range(num_seen):
        place(dispatcher, str(number), [], 100, 10.0 * number)
        dispatcher.first_token(str(number), 10.0 * number + 0.5)
        dispatcher.finish(str(number), 10.0 * number + 0.5)
    expected_s = place(dispatcher, "asked", [], 100, 100.0).expected_s
    assert (expected_s == pytest.approx(0.5)) is is_sure
    assert expected_s > 0.25  # those of both together are between 0.1 and 0.5 s


def test_a_replica_drains_only_while_it_lives_and_until_it_takes_requests_again() -> None:
    dispatcher = dispatcher_of(2)
    assert not dispatcher.is_draining(0)
    dispatcher.drain_replica(0)
    assert (dispatcher.is_draining(0), dispatcher.is_draining(1), dispatcher.is_draining(2)) == (
        True,
        False,
        False,
    )
    dispatcher.drain_replica(0)  # once more does no harm
    dispatcher.add_replica(0)
    assert not dispatcher.is_draining(0)
    dispatcher.drain_replica(0)
    dispatcher.remove_replica(0)
    assert not dispatcher.is_draining(0)


def test_no_more_blocks_of_a_replica_are_known_than_were_asked_for() -> None:
    dispatcher = Dispatcher(BLOCK, max_blocks=3)
    dispatcher.add_replica(0)
    place(dispatcher, "one", chain("a", 5), 550)
    assert len(dispatcher.index) == 3
