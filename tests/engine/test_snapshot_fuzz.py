"""Snapshots that were changed on their way: each is refused as one, or its requests are answered or refused by name."""

from __future__ import annotations

import random

import attrs
import msgpack
import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import VOCAB, assert_all_blocks_back, fake_engine
from tests.damage import change_tree, other_bytes
from triolet import SamplingParams, Snapshot
from triolet.core.step_plan import TokenLogprobs
from triolet.errors import SnapshotError, TrioletError
from triolet.ipc.snapshot import SavedAnswer, SavedRequest


def whole_snapshot() -> bytes:
    """Return the bytes of three requests: two answers with stop strings, a plain one, and one with logprobs."""
    logprobs = (TokenLogprobs((7, 3), (-0.5, -1.0), 1),)
    requests = (
        SavedRequest(
            request_id="a",
            prompt_token_ids=(1, 2, 3),
            params=SamplingParams(max_tokens=6, seed=3, n=2, stop=("QQ",), temperature=0.7),
            answers=(SavedAnswer(seed=3, output_token_ids=(1, 2)), SavedAnswer(seed=4)),
            time_left_s=5.0,
            client="c",
            cache_salt="s",
            owner="o",
        ),
        SavedRequest(
            request_id="b",
            prompt="x",
            prompt_token_ids=(4, 5),
            params=SamplingParams(max_tokens=6, seed=3),
            answers=(SavedAnswer(seed=1, output_token_ids=(7,)),),
            queue_time_left_s=2.0,
        ),
        SavedRequest(
            request_id="c",
            prompt_token_ids=(4, 5),
            params=SamplingParams(max_tokens=3, seed=3, logprobs=1),
            answers=(SavedAnswer(seed=3, output_token_ids=(7,), output_logprobs=logprobs),),
        ),
    )
    return Snapshot(architecture="Fake", vocab_size=VOCAB, requests=requests).to_bytes()


def mutated(rng: random.Random) -> bytes:
    """Return a snapshot with other bytes, or with values and names that were put in, left out or replaced."""
    whole = whole_snapshot()
    if rng.random() < 0.3:
        return other_bytes(whole, rng)
    tree = msgpack.unpackb(whole)
    change_tree(tree, rng)
    packed: bytes = msgpack.packb(tree, unicode_errors="surrogatepass")
    return packed


async def outcome(data: bytes) -> str:
    """Read a snapshot and resume what is in it; only the errors that callers are told of are caught."""
    try:
        snapshot = Snapshot.from_bytes(data)
    except SnapshotError:
        return "refused"
    async with fake_engine() as engine:
        try:
            streams = engine.resume(snapshot)
        except SnapshotError:
            return "refused for this model"
        for stream in streams.values():
            try:
                async with stream:
                    await stream.text()
            except TrioletError:
                continue
        await trio.testing.wait_all_tasks_blocked()
        assert engine.statistics().num_restarts == 0
        assert_all_blocks_back(engine)
    return "resumed"


@pytest.mark.parametrize("start", range(0, 800, 100))
async def test_a_changed_snapshot_is_refused_or_resumed_and_crashes_nothing(
    start: int, autojump_clock: MockClock
) -> None:
    outcomes = [await outcome(mutated(random.Random(seed))) for seed in range(start, start + 100)]
    assert {"refused", "resumed"} <= set(outcomes)


@pytest.mark.parametrize("name", [5, None, True, b"name"])
def test_a_name_that_is_no_string_is_refused_as_a_snapshots(name: object) -> None:
    tree = msgpack.unpackb(whole_snapshot())
    tree["requests"][0][name] = 1
    with pytest.raises(SnapshotError, match="must hold requests as they were saved"):
        Snapshot.from_bytes(msgpack.packb(tree))


@pytest.mark.parametrize(
    "changes",
    [
        {"time_left_s": float("nan")},
        {"queue_time_left_s": float("inf")},
        {"priority": 2**63},
    ],
)
def test_a_number_that_no_request_can_have_is_refused_as_a_snapshots(changes: dict[str, object]) -> None:
    tree = msgpack.unpackb(whole_snapshot())
    tree["requests"][0] |= changes
    [name] = changes
    with pytest.raises(SnapshotError, match=name):
        Snapshot.from_bytes(msgpack.packb(tree))


def test_a_seed_must_fit_the_noise() -> None:
    with pytest.raises(ValueError, match="seed"):
        attrs.evolve(SavedAnswer(seed=1), seed=2**63)
