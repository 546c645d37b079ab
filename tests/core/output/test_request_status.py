"""What a caller is told of a request: its progress never goes back, and its ending is known for a while."""

from __future__ import annotations

import pytest

from triolet.core.output.output_processor import EndedRequests, LiveRequest, RequestProgress
from triolet.core.request.request import RequestStatus

DONE, FAILED = RequestStatus.COMPLETED, RequestStatus.FAILED


def progress(position: int, computed: int) -> RequestProgress:
    return RequestProgress(
        status=RequestStatus.WAITING,
        queue_position=position,
        num_prompt_tokens=9,
        num_computed_tokens=computed,
    )


@pytest.mark.parametrize(
    ("earlier", "now", "told"),
    [
        ((3, 4), (2, 5), (2, 5)),
        ((3, 4), (3, 4), (3, 4)),
        ((3, 4), (5, 6), (3, 6)),  # overtaken
        ((3, 4), (1, 2), (1, 4)),  # preempted
        ((3, 4), (5, 2), (3, 4)),
    ],
)
def test_progress_never_goes_back(
    earlier: tuple[int, int], now: tuple[int, int], told: tuple[int, int]
) -> None:
    assert progress(*now).after(progress(*earlier)) == progress(*told)
    assert progress(*now).after(None) == progress(*now)


@pytest.mark.parametrize("now", [(3, 4), (2, 4), (3, 5)])
def test_progress_that_goes_on_is_told_as_it_is(now: tuple[int, int]) -> None:
    later = progress(*now)
    assert later.after(progress(3, 4)) is later


def test_a_live_request_has_computed_nothing_before_it_is_admitted() -> None:
    live = LiveRequest(request_id="r", client=None, priority=0, status=RequestStatus.WAITING)
    assert (live.queue_position, live.n, live.num_prompt_tokens, live.num_cached_tokens) == (0, 1, 0, 0)
    assert (live.num_computed_tokens, live.num_output_tokens, live.num_kv_blocks) == (0, 0, 0)
    assert (live.num_preemptions, live.age_s, live.time_left_s) == (0, 0.0, None)


def test_the_last_1024_endings_are_known_for_ten_minutes() -> None:
    ended = EndedRequests()
    for number in range(1024):
        ended.remember(str(number), DONE, 1.0)
    assert (len(ended), ended.get("0", 601.0), ended.get("none", 601.0)) == (1024, DONE, None)
    ended.remember("new", FAILED, 2.0)
    assert len(ended) == 1024
    assert [ended.get(name, 2.0) for name in ("0", "1", "new")] == [None, DONE, FAILED]
    assert (ended.get("1", 601.5), ended.get("new", 601.5), len(ended)) == (None, FAILED, 1)


def test_an_id_that_is_used_again_has_its_latest_ending_for_as_long_as_any_other() -> None:
    ended = EndedRequests(max_endings=2, max_age_s=10.0)
    ended.remember("a", DONE, 0.0)
    ended.remember("b", DONE, 1.0)
    ended.remember("a", FAILED, 2.0)
    ended.remember("c", DONE, 3.0)
    assert [ended.get(name, 3.0) for name in "abc"] == [FAILED, None, DONE]
    ended.remember("d", DONE, 12.5)
    assert [ended.get(name, 12.5) for name in "acd"] == [None, DONE, DONE]
