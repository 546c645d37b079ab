"""The policy `fair`: active clients, accounts, throttled rows, and rows that make way.

Rows take 1 s here, further tokens half a second each, unless a test says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.core.make import make_request
from tests.core.stage import Stage, make_config
from triolet.core.journal import Journal
from triolet.core.request.grammar_state import Constraint
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.scheduling.budget import CostModel, TokenBudget
from triolet.core.scheduling.policies.fair import ActiveClients, FairQueue
from triolet.core.scheduling.policies.name_turns import NameTurns
from triolet.core.scheduling.sequence import Sequence
from triolet.errors import InvariantViolated

# -------------------------------------------------------------------------------- active clients


def company(**requests: int) -> ActiveClients:
    there = ActiveClients()
    for client, number in requests.items():
        there.set_num_requests(client, number)
    return there


def test_a_client_has_many_requests_only_beside_one_with_few() -> None:
    assert company(a=100).with_many() == []
    assert company(a=100, b=100 // 4 + 1).with_many() == []
    assert company(a=100, b=1, c=2 * 4).with_many() == ["a", "c"]


def test_a_client_that_had_many_requests_together_is_not_light_with_its_last_one() -> None:
    there = company(a=100, b=80)
    there.set_num_requests("b", 1)
    assert there.with_many() == []


def test_a_client_that_had_many_requests_and_comes_back_with_one_is_light() -> None:
    there = company(a=100, b=80)
    there.set_num_requests("b", 0)
    assert there.with_many() == []
    there.set_num_requests("b", 1)
    assert there.with_many() == ["a"]


def test_a_client_that_has_left_counts_for_a_while() -> None:
    there = company(a=100, b=1)
    there.advance_clock(10.0)
    there.set_num_requests("b", 0)
    there.advance_clock(10.0 + 5.0 - 0.1)
    assert (there.with_many(), there.has_lingering) == (["a"], True)
    there.advance_clock(10.0 + 5.0)
    assert (there.with_many(), there.has_lingering) == ([], False)


def test_clients_that_left_are_forgotten_in_the_order_in_which_they_did() -> None:
    there = company(a=100, b=1, c=1)
    there.set_num_requests("b", 0)
    there.advance_clock(3.0)
    there.set_num_requests("c", 0)
    there.advance_clock(5.0)
    assert there.has_lingering
    there.advance_clock(8.0)
    assert not there.has_lingering


def test_a_client_that_came_back_has_not_left() -> None:
    there = company(a=1)
    there.set_num_requests("a", 0)
    there.set_num_requests("a", 1)
    assert not there.has_lingering


def test_of_the_clients_that_left_the_last_64_count() -> None:
    there = company(a=100, first=1, **{f"c{number}": 50 for number in range(64)})
    there.set_num_requests("first", 0)
    for number in range(63):
        there.set_num_requests(f"c{number}", 0)
    assert "a" in there.with_many()
    there.set_num_requests("c63", 0)
    assert "a" not in there.with_many()


def test_a_client_has_few_requests_beside_one_with_four_times_as_many() -> None:
    there = company(a=7, b=2)
    assert (there.with_many(), there.with_few(beside="a")) == ([], [])
    there = company(a=8, b=2)
    assert (there.with_many(), there.with_few(beside="a")) == (["a"], ["b"])
    there.set_num_requests("a", 0)
    assert there.with_many() == []


# ------------------------------------------------------------------------------------- a fair queue


class Line:
    """A fair queue with requests of clients, some of which run.

    Args:
        many_s: time of a step that rows of clients with many requests may take beside one with few.
    """

    def __init__(self, many_s: float = math.inf) -> None:
        self.journal = Journal()
        config = make_config(policy="fair", fair_ttft_factor=2.0)
        budget = TokenBudget(config)
        if many_s < math.inf:
            stage = Stage()
            stage.add("first step", 1)
            budget.step_done(stage.in_flight(), many_s)
        budget.costs = CostModel(row_s=1.0, token_s=0.5)
        self.queue = FairQueue(config, budget)
        self.running: list[Sequence] = []

    def wait(self, client: str, num_tokens: int = 1, **fields: Any) -> Sequence:
        entry = self.journal.open(make_request(range(num_tokens), client=client, **fields))
        sequence = Sequence(entry, self.queue.order(entry))
        self.queue.add(sequence)
        return sequence

    def run(self, client: str, num_tokens: int = 1, **fields: Any) -> Sequence:
        sequence = self.wait(client, num_tokens, **fields)
        self.admit(sequence)
        return sequence

    def admit(self, sequence: Sequence) -> None:
        self.queue.remove(sequence)
        sequence.begin(len(self.running), [], [], 0)
        self.running.append(sequence)
        self.queue.started(sequence)

    def stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.queue.stopped(sequence)

    def charge(self, **num_tokens: int) -> None:
        """Charge the first running request of each client, or a waiting one."""
        for client, number in num_tokens.items():
            every = [*self.running, *self.queue]
            sequence = next(one for one in every if one.entry.request.client == client)
            self.queue.charge(sequence, sequence.num_charged_tokens + number)

    def served(self, clients: str) -> list[int]:
        return [self.queue.served(client) for client in clients]

    def overtaking(self) -> tuple[Sequence, Sequence] | None:
        return self.queue.overtaking(self.running, lambda _: True)


def crowded(many_s: float, *num_tokens: int) -> tuple[Line, list[Sequence]]:
    """A client with many requests, of which some run, beside one that runs a single request: it is throttled."""
    line = Line(many_s)
    rows = [line.run("hog", number) for number in num_tokens]
    for _ in range(8 - len(rows)):
        line.wait("hog")
    line.run("light")
    line.queue.begin_step(0.0)
    return line, rows


def test_the_policy_counts_tokens_by_client_and_keeps_steps_short() -> None:
    assert (FairQueue.keeps_accounts, FairQueue.allows_long_steps) == (True, False)


# ----------------------------------------------------------------------------------------- accounts


def test_accounts_are_closed_when_a_request_comes_while_none_waits() -> None:
    line = Line()
    line.run("a")
    line.run("b")
    line.charge(a=40, b=4)
    line.wait("c")
    assert line.served("abc") == [0, 0, 0]


def test_accounts_stay_open_while_a_client_is_throttled_and_a_newcomer_starts_level_with_what_runs() -> None:
    line = Line(5.0)
    light = line.run("light")
    for _ in range(8):
        line.run("hog")
    line.queue.begin_step(0.0)
    line.charge(hog=100)
    line.stop(light)
    assert line.queue.served("hog") == 100
    line.wait("new")
    assert line.queue.served("new") == 100


def test_a_client_that_runs_a_request_and_waits_with_none_has_the_account_that_it_had() -> None:
    line = Line()
    line.wait("b")
    line.run("a")
    last = line.wait("a")
    line.charge(b=100)
    line.admit(last)
    line.wait("c")  # starts level with b
    assert line.served("abc") == [0, 100, 100]


def test_a_client_that_leaves_and_owes_nothing_has_no_account() -> None:
    line = Line()
    line.wait("b")
    leaver = line.wait("a")
    line.charge(a=30, b=50)
    line.queue.remove(leaver)
    assert dict(line.queue._served) == {"b": 50}


def test_beyond_1024_accounts_the_oldest_debt_of_an_idle_client_is_forgiven() -> None:
    line = Line()
    line.wait("waits")
    for number in range(1023):
        debtor = line.run(f"c{number}")
        line.queue.charge(debtor, 2)
        line.stop(debtor)
    line.queue.remove(line.wait("c0"))  # its account is the youngest now
    assert {line.queue.served(f"c{number}") for number in range(1023)} == {2}
    last = line.run("last")
    line.queue.charge(last, 2)
    line.stop(last)
    assert [line.queue.served(client) for client in ("c0", "c1", "c2", "last")] == [2, 0, 2, 2]


def test_what_a_client_ever_had_together_is_known_while_a_request_of_it_changes_its_queue() -> None:
    line = Line(5.0)
    rows = [line.run("b") for _ in range(7)]
    last = line.wait("b")
    for row in rows:
        line.stop(row)
    line.admit(last)  # for a moment b has neither a waiting nor a running request
    for _ in range(8):
        line.wait("a")
    line.queue.begin_step(0.0)
    assert line.queue.next(lambda _: True) is not None
    assert line.queue._active.with_many() == []
    last.schedule(1, step_id=1)
    line.stop(last)
    line.queue.add(last)  # preempted
    assert line.queue._active.with_many() == []
    line.queue.remove(last)
    line.wait("b")  # it had left, and has one request now
    assert line.queue._active.with_many() == ["a"]


# ------------------------------------------------------------------------------------ throttled rows


def test_rows_of_a_throttled_client_take_turns_the_one_that_waited_longest_first() -> None:
    line, rows = crowded(2.0, 1, 1, 1)
    for row, step in zip(rows, (3, 1, 2), strict=True):
        row.last_step = step
    taking_part = line.queue.taking_part(line.running)
    assert taking_part == [rows[1], rows[2], line.running[-1]]


def test_throttled_clients_take_turns_from_the_one_that_was_served_least() -> None:
    line = Line(2.0)
    rows = {client: [line.run(client) for _ in range(4)] for client in "ab"}
    light = line.run("light")
    line.queue.begin_step(0.0)
    line.charge(a=1)
    assert line.queue.taking_part(line.running) == [rows["a"][0], rows["b"][0], light]


def test_a_row_that_awaits_its_mask_takes_no_time_of_a_step() -> None:
    line = Line(1.0)
    masked = line.run("hog", constraint=Constraint())
    free = line.run("hog")
    for _ in range(6):
        line.wait("hog")
    line.run("light")
    line.queue.begin_step(0.0)
    assert masked not in line.queue.taking_part(line.running)
    assert free in line.queue.taking_part(line.running)


@pytest.mark.parametrize(
    ("many_s", "num_tokens", "portions"),
    [
        (5.0, (100, 1), [9, None]),  # a row and 8 further tokens take all of the time
        (5.0, (3, 1), [3, 1]),  # 2 seconds, and 3 are left
        (3.0, (3, 1), [3, 1]),  # one second is left: exactly a row's
        (2.5, (2, 1), [2, 1]),
        (2.25, (2, 1), [2, None]),
        (2.0, (1, 100), [1, 1]),
        (0.5, (100, 1), [1, None]),  # one row goes on however little time there is
        (math.inf, (100, 100), [100, 100]),
    ],
)
def test_rows_of_a_throttled_client_share_the_time_that_the_step_has_for_them(
    many_s: float, num_tokens: tuple[int, int], portions: list[int | None]
) -> None:
    line, rows = crowded(many_s, *num_tokens)
    taking_part = line.queue.taking_part(line.running)
    shares = [line.queue.portion(row, row.num_pending_tokens) for row in rows]
    assert [
        share if row in taking_part else None for row, share in zip(rows, shares, strict=True)
    ] == portions
    light = line.running[-1]
    assert light in taking_part
    assert line.queue.portion(light, 50) == 50


def test_a_request_of_a_throttled_client_is_admitted_with_what_is_left_of_the_time_or_not_at_all() -> None:
    line, _ = crowded(5.0, 1)
    line.queue.taking_part(line.running)
    waiting = line.queue.next(lambda _: True)
    assert waiting is not None
    assert line.queue.portion(waiting, 100) == 1 + (4 - 1) * 2
    assert line.queue.portion(waiting, 100) == 0
    assert line.queue.next(lambda _: True) is None
    other = line.wait("light")
    assert line.queue.next(lambda _: True) is other


def test_pooled_rows_lengthen_the_step_of_anothers_decode_by_three_tenths_at_most() -> None:
    line = Line(100.0)
    line.queue._budget.costs.fixed_s = 9.0  # 10 seconds with the decode
    pooled = [line.run("hog", 50, pooling=PoolingParams(task="embed")) for _ in range(2)]
    text = line.run("hog", 50)
    waiting = [line.wait("hog", 50, pooling=PoolingParams(task="embed")) for _ in range(5)]
    light = line.run("light")
    line.queue.begin_step(0.0)
    assert line.queue.taking_part(line.running) == [pooled[0], text, light]
    assert line.queue.portion(pooled[0], 50) == 1 + (3 - 1) * 2
    assert line.queue.portion(text, 50) == 50
    assert line.queue.portion(waiting[0], 50) == 0
    assert line.queue.next(lambda _: True) is None
    line.stop(light)
    line.queue.begin_step(0.0)
    line.queue.taking_part(line.running)
    assert (
        line.queue.portion(pooled[1], 50) == 50
    )  # a reader may be back, and gets a first token soon: no more


def test_pooled_rows_lengthen_a_step_by_a_part_of_the_decodes_of_clients_that_are_not_throttled_alone() -> (
    None
):
    line = Line(100.0)
    line.queue._budget.costs = CostModel(fixed_s=9.0, row_s=1.0, token_s=0.25)
    pooled = line.run("hog", 50, pooling=PoolingParams(task="embed"))
    line.run("hog", 1)
    for _ in range(6):
        line.wait("hog")
    line.run("light", 1)
    line.run("light", 50)
    line.queue.begin_step(0.0)
    line.queue.taking_part(line.running)
    assert line.queue.portion(pooled, 50) == 1 + (3 - 1) * 4  # a decode takes 10 seconds


def test_a_client_is_throttled_for_5_seconds_after_the_last_one_with_few_requests_has_left() -> None:
    line, (row, other) = crowded(1.0, 1, 1)
    line.stop(line.running[-1])
    for now_s, number in ((4.5, 1), (5.0, 2)):
        line.queue.begin_step(now_s)
        assert len(line.queue.taking_part([row, other])) == number


# -------------------------------------------------------------------------------- rows that make way


def admitted(line: Line) -> str:
    """The names of all waiting requests in the order in which they get a row."""
    names = ""
    while sequence := line.queue.next(lambda _: True):
        names += sequence.entry.request.client or "-"
        line.admit(sequence)
    return names


def test_the_names_under_one_key_take_turns_a_request_each() -> None:
    line = Line()
    for name in "aaaaabbc":
        line.wait(name, owner="key")
    assert admitted(line) == "abcabaaa"


def test_a_name_that_begins_to_wait_starts_at_the_turn_that_is_served() -> None:
    line = Line()
    for _ in range(4):
        line.wait("a", owner="key")
    for _ in range(2):
        sequence = line.queue.next(lambda _: True)
        assert sequence is not None
        line.admit(sequence)
    for name in "bbb":
        line.wait(name, owner="key")
    # Two of `a` are served: `b` is behind the next one of `a` by its arrival, and has saved nothing up.
    assert admitted(line) == "ababb"


def test_a_priority_goes_before_the_turns_of_names() -> None:
    line = Line()
    for name in "aab":
        line.wait(name, owner="key")
    line.wait("a", owner="key", priority=-1)
    assert line.queue.next(lambda _: True).entry.request.priority == -1  # type: ignore[union-attr]
    assert admitted(line) == "aaba"


def test_a_preempted_request_keeps_its_turn() -> None:
    line = Line()
    first = line.run("a", owner="key")
    first.last_step = 1
    for name in "ba":
        line.wait(name, owner="key")
    line.stop(first)
    line.queue.add(first)
    assert line.queue.next(lambda _: True) is first
    assert [line.queue.position(one) for one in line.queue] == [0, 1, 2]


def test_requests_without_a_key_have_no_names_below_their_client() -> None:
    line = Line()
    waiting = [line.wait(name) for name in "aab"]
    assert [one.turn for one in waiting] == [1, 2, 1]
    assert [line.queue.position(one) for one in waiting] == [0, 2, 1]


def test_turns_of_thousands_of_names_that_came_and_went_are_forgotten() -> None:
    turns = NameTurns()
    turns.started(1000)
    for number in range(5000):
        turns.started(turns.next(f"name {number}"))
    assert turns.next("name 0") == 6001
    assert len(turns._latest) <= 65


def test_turns_of_names_that_waited_together_are_forgotten_once_they_were_served() -> None:
    turns = NameTurns()
    latest = max(turns.next(f"name {number}") for number in range(200))
    assert len(turns._latest) == 200  # what waits is kept
    turns.started(latest)
    turns.next("new")
    assert turns._latest.keys() == {"new"}


def test_a_client_without_requests_has_no_turns() -> None:
    line = Line()
    line.wait("b", owner="other")  # so that accounts stay open
    line.stop(line.run("a", owner="key"))
    assert line.queue._turns.keys() == {"other"}
    assert line.wait("a", owner="key").turn == 1


def test_the_last_request_of_the_client_with_most_rows_makes_way() -> None:
    line = Line()
    for client in "abbbbbccc":
        line.run(client)
    poor = line.wait("poor")
    assert line.overtaking() == (poor, line.running[5])
    assert line.queue.overtaking(line.running, lambda _: False) is None


@pytest.mark.parametrize(
    ("rich", "poor", "num_rows", "makes_way"),
    [
        (0, 256, 2, True),
        (0, 257, 2, False),  # behind by more than the slack
        (0, 0, 1, False),
        (1023, 0, 1, False),
        (1024, 0, 1, True),  # a quantum ahead
        (0, 1024, 1, False),
    ],
)
def test_a_client_makes_way_for_one_with_two_rows_less_or_a_quantum_behind(
    rich: int, poor: int, num_rows: int, makes_way: bool
) -> None:
    line = Line()
    for _ in range(num_rows):
        line.run("rich")
    line.wait("poor")
    line.wait("rich")
    line.charge(rich=rich, poor=poor)
    assert (line.overtaking() is not None) == makes_way


# ------------------------------------------------------------------------------------ our own mistakes


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda queue: queue._queues["b"].reverse(), "out of order"),
        (lambda queue: queue._queues.update(c=[]), "a client without waiting requests"),
        (lambda queue: queue._num_rows.__setitem__("c", 0), "run at least one request each"),
    ],
)
def test_a_fair_queue_that_is_wrong_is_found(corrupt: Callable[[FairQueue], object], message: str) -> None:
    line = Line()
    line.run("a")
    line.wait("b")
    line.wait("b")
    line.queue.check()
    corrupt(line.queue)
    with pytest.raises(InvariantViolated, match=message):
        line.queue.check()
