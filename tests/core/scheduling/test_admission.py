from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.core.make import make_request
from triolet.core.journal import Journal, JournalEntry
from triolet.core.scheduling.admission import (
    MAX_ENDED,
    NEVER,
    RECENT_ENDINGS,
    Admission,
    Deadlines,
    is_overdue,
    overdue_of,
)
from triolet.errors import InvalidRequest, Overloaded


def make_admission(*, running: int = 2, queued: int = 1, tokens: int = 100) -> Admission:
    return Admission(Journal(), max_num_seqs=running, max_queued_requests=queued, max_queued_tokens=tokens)


def admit(admission: Admission, num_tokens: int = 3) -> JournalEntry:
    admission.reserve(0.0)
    entry = admission.journal.open(make_request(range(num_tokens)))
    admission.give_back()
    return entry


def refusal(admission: Admission, now_s: float = 0.0) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        admission.reserve(now_s)
    return caught.value


# ----------------------------------------------------------------------------------- requests


def test_as_many_are_let_in_as_can_run_and_wait() -> None:
    admission = make_admission(running=2, queued=1)
    assert admission.max_live_requests == 3
    for _ in range(3):
        admit(admission)
    error = refusal(admission)
    assert (error.limit, error.bound) == ("max_queued_requests", 1)
    assert str(error) == "the engine is full (max_queued_requests=1); retry after 1.0 s"


def test_a_place_that_is_reserved_is_no_other_requests() -> None:
    admission = make_admission()
    for _ in range(3):
        admission.reserve(0.0)
    assert refusal(admission).limit == "max_queued_requests"
    admission.give_back()
    admission.reserve(0.0)
    assert refusal(admission).limit == "max_queued_requests"


@pytest.mark.parametrize("limit", ["max_queued_requests", "max_queued_tokens"])
def test_a_refused_request_takes_nothing(limit: str) -> None:
    admission = make_admission(tokens=9 if limit == "max_queued_tokens" else 100)
    entries = [admit(admission) for _ in range(3)]
    if limit == "max_queued_tokens":
        admission.max_queued_requests = 2
    assert {refusal(admission).limit for _ in range(10)} == {limit}
    admission.journal.close(entries[0])
    assert admit(admission).serial == 4


def test_an_ended_request_makes_room_for_one() -> None:
    admission = make_admission()
    entries = [admit(admission) for _ in range(3)]
    admission.journal.close(entries[1])
    admit(admission)
    assert refusal(admission).limit == "max_queued_requests"


def test_a_place_is_given_back_once() -> None:
    admission = make_admission()
    admission.reserve(0.0)
    admission.give_back()
    with pytest.raises(AssertionError, match="a place was given back twice"):
        admission.give_back()


# ------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize(("num_tokens", "is_full"), [(99, False), (100, True), (101, True)])
def test_a_request_is_refused_where_enough_tokens_wait(num_tokens: int, is_full: bool) -> None:
    admission = make_admission(tokens=100)
    admit(admission, num_tokens)
    if is_full:
        error = refusal(admission)
        assert (error.limit, error.bound) == ("max_queued_tokens", 100)
        with pytest.raises(Overloaded, match=r"max_queued_tokens=100"):
            admission.check_tokens(0.0)
    else:
        admission.check_tokens(0.0)
        admission.reserve(0.0)


def test_a_request_longer_than_the_bound_is_let_in_where_no_other_one_waits() -> None:
    admission = make_admission(tokens=100)
    assert admit(admission, 1000) in list(admission.journal)


def test_tokens_that_have_been_scheduled_wait_no_more() -> None:
    admission = make_admission(tokens=100)
    entry = admit(admission, 100)
    admission.journal.scheduled(entry, 0.0)
    admission.check_tokens(0.0)
    assert admit(admission, 5).serial == 2


# --------------------------------------------------------------------------------- retry_after_s


@pytest.mark.parametrize(
    ("endings", "now_s", "retry_after_s"),
    [
        ([], 10.0, 1.0),
        ([9.0], 10.0, 1.0),
        ([0.0, 5.0], 10.0, 5.0),
        ([4.0, 6.0, 8.0], 10.0, 2.0),
        ([10.0, 10.0], 10.0, 0.1),  # never "at once"
        ([9.99, 9.995], 10.0, 0.1),
        ([0.0, 1.0], 1000.0, 60.0),  # nor in an hour, because of a quiet one
    ],
)
def test_the_retry_time_is_the_mean_time_between_recent_endings(
    endings: list[float], now_s: float, retry_after_s: float
) -> None:
    admission = make_admission()
    for ended_s in endings:
        admission.ended(ended_s)
    assert admission.retry_after_s(now_s) == pytest.approx(retry_after_s)


def test_only_recent_endings_count() -> None:
    admission = make_admission()
    for ended_s in [*range(-1000, 0, 10), *range(RECENT_ENDINGS)]:
        admission.ended(float(ended_s))
    assert admission.retry_after_s(float(RECENT_ENDINGS)) == pytest.approx(1.0)


@pytest.mark.parametrize("limit", ["max_queued_requests", "max_queued_tokens"])
def test_a_refusal_carries_the_retry_time(limit: str) -> None:
    admission = make_admission(queued=1 if limit == "max_queued_requests" else 100, tokens=100)
    for ended_s in (0.0, 5.0):
        admission.ended(ended_s)
    for _ in range(3):
        admit(admission, 3 if limit == "max_queued_requests" else 33)
    if limit == "max_queued_tokens":
        admit(admission, 1)
    error = refusal(admission, 10.0)
    assert (error.limit, error.retry_after_s) == (limit, 5.0)


# ------------------------------------------------------------------------------ any order of things


class AdmissionMachine(RuleBasedStateMachine):
    """Callers that reserve, wait for the tokenizer, and then are admitted or go away."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = make_admission(running=3, queued=2, tokens=20)
        self.num_tokenizing = 0
        self.live: list[JournalEntry] = []

    @rule()
    def come(self) -> None:
        queued = sum(len(e.request.prompt_token_ids) for e in self.live if e.scheduled_s is None)
        if self.num_tokenizing + len(self.live) >= 5 or queued >= 20:
            refusal(self.admission)
        else:
            self.admission.reserve(0.0)
            self.num_tokenizing += 1

    @precondition(lambda self: self.num_tokenizing)
    @rule(num_tokens=st.integers(1, 12), goes_away=st.booleans())
    def tokenized(self, num_tokens: int, goes_away: bool) -> None:
        if not goes_away:
            self.live.append(self.admission.journal.open(make_request(range(num_tokens))))
        self.admission.give_back()
        self.num_tokenizing -= 1

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 9))
    def run(self, choice: int) -> None:
        self.admission.journal.scheduled(self.live[choice % len(self.live)], 0.0)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 9))
    def end(self, choice: int) -> None:
        self.admission.journal.close(self.live.pop(choice % len(self.live)))

    def teardown(self) -> None:
        assert len(self.admission.journal) + self.num_tokenizing <= self.admission.max_live_requests
        self.admission.journal.check()


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=50, stateful_step_count=30)


# ------------------------------------------------------------------------------------ fair shares


def fair_admission(*, places: int = 16, tokens: int = 1000) -> Admission:
    return Admission(Journal(), places // 2, places - places // 2, tokens, is_fair=True)


def admits(admission: Admission, client: str, num_tokens: int = 3) -> bool:
    """One more request of a client; whether there was a place."""
    try:
        admission.reserve(0.0, client=client)
    except Overloaded:
        return False
    admission.journal.open(make_request(range(num_tokens), client=client))
    admission.give_back(1, client)
    return True


def test_under_fair_a_client_alone_leaves_an_eighth_of_the_places_to_others() -> None:
    admission = fair_admission(places=16)
    assert sum(admits(admission, "hog") for _ in range(50)) == 14
    with pytest.raises(Overloaded) as caught:
        admission.reserve(0.0, client="hog")
    error = caught.value
    assert (error.limit, error.bound, error.is_for_others) == ("max_queued_requests", 8, True)
    assert "max_queued_requests=8, the last eighth of it for clients with less" in str(error)
    assert [admits(admission, client) for client in ("light", "third", "fourth")] == [True, True, False]


def test_under_fair_a_client_with_its_share_is_refused_before_the_last_places_are_gone() -> None:
    admission = fair_admission(places=16)
    for _ in range(9):
        assert admits(admission, "hog")
    assert sum(admits(admission, "light") for _ in range(50)) == 5  # a third
    assert admits(admission, "third")


def test_under_fair_places_that_are_reserved_count_for_their_client() -> None:
    admission = fair_admission(places=16)
    for _ in range(14):
        admission.reserve(0.0, client="hog")
    with pytest.raises(Overloaded):
        admission.reserve(0.0, client="hog")
    admission.give_back(1, "hog")
    admission.reserve(0.0, client="hog")
    admission.reserve(0.0, client="light")


def test_under_fair_an_eighth_of_the_tokens_that_may_wait_is_for_clients_with_less() -> None:
    admission = fair_admission(places=100, tokens=80)
    assert sum(admits(admission, "hog", num_tokens=10) for _ in range(50)) == 7
    with pytest.raises(Overloaded) as caught:
        admission.check_tokens(0.0, "hog")
    assert (caught.value.limit, caught.value.bound, caught.value.is_for_others) == (
        "max_queued_tokens",
        80,
        True,
    )
    assert admits(admission, "light", num_tokens=10)
    assert not admits(admission, "light", num_tokens=10)  # all of them wait


def test_what_was_let_in_by_another_engine_is_not_asked_for_its_share() -> None:
    admission = fair_admission(places=16)
    for _ in range(14):
        assert admits(admission, "hog")
    admission.reserve(0.0, client="hog", was_admitted=True)


def test_without_fair_one_client_may_take_every_place() -> None:
    admission = make_admission(running=8, queued=8)
    assert sum(admits(admission, "hog") for _ in range(50)) == 16


def test_a_share_is_of_the_clients_that_are_there_the_one_that_asks_and_one_that_may_come() -> None:
    admission = fair_admission(places=16)
    assert admission.share("new") == 16 // 2
    admission.reserve(0.0, 3, client="other")
    assert admission.share("new") == 16 // 3
    admission.give_back(3, "other")
    assert admission.share("new") == 16 // 2


def test_of_the_last_places_a_client_gets_its_whole_share_and_no_more() -> None:
    admission = fair_admission(places=16)
    assert sum(admits(admission, "hog") for _ in range(10)) == 10
    assert [admits(admission, "light") for _ in range(6)] == [True] * 5 + [False]  # a third of 16


def test_of_the_last_tokens_a_client_gets_less_than_its_share() -> None:
    admission = fair_admission(places=100, tokens=80)
    assert admits(admission, "hog", num_tokens=44)
    assert admits(admission, "light", num_tokens=26)
    with pytest.raises(Overloaded):
        admission.check_tokens(0.0, "light")  # it has a third of 80, and an eighth is left


def test_more_answers_than_there_are_places_are_refused_for_good() -> None:
    admission = make_admission(running=2, queued=1)
    admission.reserve(0.0, 3)
    admission.give_back(3)
    with pytest.raises(InvalidRequest, match=r"n must be at most 3 \(max_num_seqs \+ max_queued_requests\)"):
        admission.reserve(0.0, 4)


@pytest.mark.parametrize(("policy", "is_fair"), [("fair", True), ("fcfs", False)])
def test_admission_has_the_limits_of_the_engine(policy: str, is_fair: bool) -> None:
    journal = Journal()
    limits = SimpleNamespace(max_num_seqs=2, max_queued_requests=3, max_queued_tokens=4, policy=policy)
    assert Admission.of(limits, journal) == Admission(journal, 2, 3, 4, is_fair=is_fair)


def test_the_last_64_endings_count() -> None:
    admission = make_admission()
    for ended_s in range(65):
        admission.ended(float(ended_s))
    assert admission.retry_after_s(129.0) == 2.0  # 128 s since the second of them


# ------------------------------------------------------------------------------------- deadlines


def test_the_next_deadline_is_the_earliest_of_a_live_request() -> None:
    deadlines = Deadlines()
    assert deadlines.next_s({1, 2, 3}) == math.inf
    for serial, deadline_s in ((1, 5.0), (2, 3.0), (3, math.inf), (4, 1.0)):
        deadlines.add(serial, deadline_s)
    assert deadlines.next_s({1, 2, 3}) == 3.0
    assert deadlines.pop() == 2
    assert (deadlines.next_s({1, 3}), deadlines.next_s({3})) == (5.0, math.inf)


def test_deadlines_of_ended_requests_take_bounded_memory() -> None:
    deadlines, live = Deadlines(), {0, 1, 2}
    for serial in live:
        deadlines.add(serial, 10.0 - serial)
    for serial in range(10, 10_000):
        deadlines.add(serial, 1e6 + serial)  # behind those of the live ones
        deadlines.add(0, 10.0)  # one that waits anew
        assert deadlines.next_s(live) == 8.0
        assert len(deadlines._heap) <= 2 * len(live) + 66
    for serial, at_s in ((2, 8.0), (1, 9.0), (0, 10.0)):
        assert deadlines.next_s(live) == at_s
        assert deadlines.pop() == serial
        live.remove(serial)
    assert deadlines.next_s(live) == math.inf


def test_the_earliest_time_of_a_live_request_stays_when_those_of_ended_ones_are_removed() -> None:
    deadlines = Deadlines()
    for at_s in (9.0, 5.0, 7.0):
        deadlines.add(1, at_s)
    for serial in range(10, 10 + 2 * MAX_ENDED):
        deadlines.add(serial, 1.0)
    assert deadlines.next_s({1}) == 5.0
    assert len(deadlines._heap) == 1
    assert deadlines.pop() == 1


@pytest.mark.parametrize(
    ("fields", "is_scheduled", "overdue"),
    [
        ({}, False, False),
        ({"deadline_s": 5.0}, True, True),
        ({"deadline_s": 5.1}, False, False),
        ({"queue_deadline_s": 5.0}, False, True),
        ({"queue_deadline_s": 5.1}, False, False),
        ({"queue_deadline_s": 5.0}, True, False),
    ],
)
def test_a_request_is_overdue_at_its_deadline_or_at_that_of_the_queue_while_it_was_never_scheduled(
    fields: dict[str, float], is_scheduled: bool, overdue: bool
) -> None:
    journal = Journal()
    entry = journal.open(make_request(**fields))  # type: ignore[arg-type]
    if is_scheduled:
        journal.scheduled(entry, 1.0)
    assert is_overdue(entry, 5.0) is overdue


def test_of_requests_that_are_not_overdue_the_earliest_deadline_comes_next() -> None:
    journal = Journal()
    entries = [journal.open(make_request(deadline_s=at_s)) for at_s in (7.0, 5.0, NEVER, 6.0, 4.0)]
    assert overdue_of(entries, 5.0) == ([entries[1], entries[4]], 6.0)
    assert overdue_of(entries, 3.9) == ([], 4.0)
    assert overdue_of(entries, 7.0) == ([entries[0], entries[1], entries[3], entries[4]], NEVER)
    assert overdue_of([], 5.0) == ([], NEVER)
