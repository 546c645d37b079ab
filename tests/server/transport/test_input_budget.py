from __future__ import annotations

import pytest

from triolet.protocol.errors import WireError
from triolet.server.transport.client_stream import FREE_BYTES, InputBudget


def test_a_client_over_its_share_is_refused_and_another_one_is_not() -> None:
    budget = InputBudget(max_bytes=1000, max_bytes_per_client=400)
    one, two, other = budget.reservation("a"), budget.reservation("a"), budget.reservation("b")
    one.grow_to(FREE_BYTES + 300)
    with pytest.raises(WireError) as raised:
        two.grow_to(FREE_BYTES + 101)
    assert (raised.value.status, raised.value.retry_after_s) == (429, 1.0)
    other.grow_to(FREE_BYTES + 400)


def test_all_clients_together_are_bounded() -> None:
    budget = InputBudget(max_bytes=1000, max_bytes_per_client=400)
    for name in "ab":
        budget.reservation(name).grow_to(FREE_BYTES + 400)
    with pytest.raises(WireError) as raised:
        budget.reservation("c").grow_to(FREE_BYTES + 201)
    assert (raised.value.status, raised.value.retry_after_s) == (503, 1.0)


def test_a_short_request_is_never_refused() -> None:
    budget = InputBudget(max_bytes=1, max_bytes_per_client=1)
    for _ in range(1000):
        budget.reservation("a").grow_to(FREE_BYTES)
    assert budget.num_bytes == 0


def test_leaving_a_reservation_gives_everything_back() -> None:
    budget = InputBudget(max_bytes=1000, max_bytes_per_client=1000)
    for _ in range(3):
        with budget.reservation("a") as reservation:
            for num_bytes in (10, 500, 400, 1000):
                reservation.grow_to(FREE_BYTES + num_bytes)
            assert budget.num_bytes == 1000
        reservation.clear()
        assert budget.num_bytes == 0
