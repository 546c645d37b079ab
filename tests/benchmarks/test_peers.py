"""What a benchmark hears from a peer, whose engine is another program's: answers, and why there are none."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.line_protocol import Timer
from benchmarks.peers.peer import WORKERS, Peer, PeerFailed

JOBS = [([10, 11], 3, 0.0), ([20], 1, 0.001)]


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKERS, "fake", str(Path(__file__).with_name("fake_peer.py")))


def fake(**options: Any) -> Peer:
    return Peer("fake", sys.executable, options)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_peer_says_what_it_is_and_answers_round_after_round() -> None:
    with fake() as peer:
        assert peer.facts["version"] == "1.2.3"
        for _ in range(2):
            answer = peer.run(JOBS)
            assert answer["token_ids"] == [[10, 11, 12], [20]]
            assert (len(answer["ttft_s"]), len(answer["itl_s"])) == (2, 2)
            assert answer["elapsed_s"] >= 0.001
            assert answer["peak_mib"] > 1


@pytest.mark.skipif(sys.platform != "linux", reason="states of processes are read from /proc")
def test_a_peer_stands_still_between_rounds_and_is_gone_in_the_end() -> None:
    with fake() as peer:
        peer.run(JOBS)
        while state_of(peer.pid) != "T":
            pass
        peer.run(JOBS)
    with pytest.raises(ProcessLookupError):
        os.kill(peer.pid, 0)


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("raises", f"fake, by {sys.executable}: ValueError: no room for 7 tokens"),
        ("ends", "fake ended with 3: "),
        ("is killed", "fake ended with -9: "),
        ("gives too little", r"fake gave \[2, 0\] tokens, which is not what it was asked for"),
    ],
)
def test_a_round_that_goes_wrong_says_how(does: str, message: str) -> None:
    with fake(does=does) as peer, pytest.raises(PeerFailed, match=message):
        peer.run(JOBS)


def test_a_peer_that_has_ended_says_so_again() -> None:
    with fake(does="ends") as peer:
        for _ in range(2):
            with pytest.raises(PeerFailed, match="fake ended with 3"):
                peer.run(JOBS)


def test_a_peer_without_the_package_says_which_python_lacks_it() -> None:
    message = f"fake, by {sys.executable}: no_such_engine is not installed there"
    with pytest.raises(PeerFailed, match=message), fake(package="no_such_engine"):
        pass


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(PeerFailed, match=r"the Python of vllm cannot be started: .*/no/such/python"):
        Peer("vllm", "/no/such/python", {}).__enter__()


def test_requests_come_when_they_are_due_and_wait_from_then_on() -> None:
    clock = [100.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    timer = Timer([2.0, 0.0, 2.5], lambda: clock[0], sleep)
    assert timer.arrivals(is_idle=True) == [1]
    assert timer.arrivals(is_idle=False) == []
    clock[0] += 0.5
    timer.note(1, [7])
    assert timer.arrivals(is_idle=True) == [0]
    clock[0] += 1.0
    assert timer.arrivals(is_idle=False) == [2]
    assert not timer.awaits_more
    timer.note(2, [8])
    timer.note(0, [9])
    clock[0] += 0.25
    timer.note(0, [10, 11])
    assert timer.figures() == {
        "elapsed_s": 3.25,
        "ttft_s": [0.5, 0.5, 1.0],
        "itl_s": [0.25],
        "token_ids": [[9, 10, 11], [7], [8]],
    }
