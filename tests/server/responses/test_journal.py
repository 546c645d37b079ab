"""Records of the journal: replay, compaction, and what damage can do."""

from __future__ import annotations

import base64
import random

import attrs
import pytest

from tests.protocol.make import create
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import FinishReason, RequestMetrics
from triolet.errors import SnapshotError
from triolet.ipc.snapshot import SavedAnswer, SavedRequest, Snapshot
from triolet.protocol.responses.response_items import ResponseDelta
from triolet.protocol.responses.snapshot import SavedResponse
from triolet.server.responses.journal import (
    MAGIC,
    JournalDelta,
    PlainDelta,
    begin_record,
    compact,
    delta_record,
    encode,
    forget_record,
    replay,
)

NUM_RESPONSES, NUM_DELTAS = 4, 12
METRICS = RequestMetrics(num_generation_tokens=1, arrival_time=5.0)


def begun(number: int) -> bytes:
    request = {name: value for name, value in create(resumable=True).items() if name not in ("type", "input")}
    saved = SavedResponse(response_id=f"resp_{number}", request=request, model="m", created_at=7)
    admitted = SavedRequest(
        request_id=f"resp_{number}",
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(max_tokens=NUM_DELTAS),
        answers=(SavedAnswer(seed=number),),
    )
    snapshot = Snapshot(architecture="A", vocab_size=1000, requests=(admitted,))
    return begin_record(number, saved, snapshot)


def delta(number: int, index: int) -> JournalDelta:
    return JournalDelta(
        index=index,
        piece=ResponseDelta(text=f"{number}.{index} ", num_tokens=1),
        token_ids=(100 * number + index,),
        item_ids=("msg_1",) if index == 0 else (),
        metrics=METRICS if index == 0 else None,
    )


def plain(number: int, index: int) -> PlainDelta:
    one = delta(number, index)
    return number, index, one.piece.text, one.token_ids


def journal(seed: int) -> tuple[list[bytes], dict[int, int]]:
    """Records of responses whose deltas come mixed; the number of deltas of those that are not forgotten."""
    draw = random.Random(seed)
    records = [begun(number) for number in range(NUM_RESPONSES)]
    sizes = dict.fromkeys(range(NUM_RESPONSES), 0)
    for _ in range(NUM_RESPONSES * NUM_DELTAS // 2):
        number = draw.choice(list(sizes))
        if draw.random() < 0.03 and len(sizes) > 1:
            records.append(forget_record(number))
            del sizes[number]
        elif sizes[number] == 0 or draw.random() < 0.5:
            records.append(delta_record(number, delta(number, sizes[number])))
            sizes[number] += 1
        else:
            rows = []
            for other in [number, *draw.choices([one for one in sizes if sizes[one]], k=draw.randrange(3))]:
                rows.append(plain(other, sizes[other]))
                sizes[other] += 1
            records.append(encode(rows))
    return records, sizes


def tokens(saved: SavedResponse) -> list[int]:
    assert saved.engine is not None
    [request] = Snapshot.from_bytes(base64.b64decode(saved.engine)).requests
    return list(request.answers[0].output_token_ids)


def assert_beginnings(found: dict[int, SavedResponse]) -> None:
    """Every response holds the first of its own deltas, with none left out, repeated or changed."""
    for number, saved in found.items():
        expected = [delta(number, index) for index in range(len(saved.pieces))]
        assert [piece.text for piece in saved.pieces] == [one.piece.text for one in expected]
        assert tokens(saved) == [100 * number + index for index in range(len(saved.pieces))]


@pytest.mark.parametrize("seed", range(3))
def test_a_journal_is_replayed_and_compacted_to_what_is_live(seed: int) -> None:
    records, sizes = journal(seed)
    data = MAGIC + b"".join(records)
    found = replay(data)
    assert (found.problem, found.num_bytes) == (None, len(data))
    assert {number: len(saved.pieces) for number, saved in found.responses.items()} == sizes
    assert_beginnings(found.responses)
    short = compact(data, sizes)
    assert replay(short).responses == found.responses
    assert compact(short, sizes) == short and len(short) <= len(data)


def test_a_journal_that_is_cut_off_anywhere_holds_the_whole_records_before() -> None:
    records, _ = journal(1)
    data = MAGIC + b"".join(records)
    ends = [len(MAGIC)]
    for record in records:
        ends.append(ends[-1] + len(record))
    for length in range(len(MAGIC), len(data), 7):
        found = replay(data[:length])
        assert found.num_bytes == max(end for end in ends if end <= length)
        assert not found.is_corrupt and (found.problem is None) == (length in ends)
        assert_beginnings(found.responses)


def test_records_and_plain_deltas_keep_their_order() -> None:
    rows: list[bytes | PlainDelta] = [
        begun(0),
        delta_record(0, delta(0, 0)),
        plain(0, 1),
        plain(0, 2),
        delta_record(0, delta(0, 3)),
        plain(0, 4),
    ]
    found = replay(MAGIC + encode(rows))
    assert found.problem is None and tokens(found.responses[0]) == [0, 1, 2, 3, 4]


def test_a_record_of_which_one_delta_is_wrong_adds_none_of_its_deltas() -> None:
    begin = MAGIC + encode([begun(0), begun(1), delta_record(0, delta(0, 0)), delta_record(1, delta(1, 0))])
    for wrong in (plain(1, 2), plain(2, 0), plain(0, 1)):
        found = replay(begin + encode([plain(0, 1), wrong]))
        assert found.is_corrupt and found.num_bytes == len(begin)
        assert [len(saved.pieces) for saved in found.responses.values()] == [1, 1]


def test_compaction_takes_the_deltas_of_ended_responses_out_of_records_of_several() -> None:
    begin = [begun(0), begun(1), delta_record(0, delta(0, 0)), delta_record(1, delta(1, 0))]
    data = MAGIC + encode([*begin, plain(0, 1), plain(1, 1), plain(0, 2), forget_record(0)])
    assert compact(data, [1]) == MAGIC + encode([begin[1], begin[3], plain(1, 1)])


def test_damage_never_changes_a_token() -> None:
    records, _ = journal(2)
    draw = random.Random(5)
    for _ in range(300):
        damaged = list(records)
        kind, place = draw.randrange(4), draw.randrange(len(records))
        if kind == 0:  # a byte
            one = bytearray(damaged[place])
            one[draw.randrange(len(one))] ^= 1 << draw.randrange(8)
            damaged[place] = bytes(one)
        elif kind == 1:  # a lost record
            del damaged[place]
        elif kind == 2:  # one that came twice
            damaged.insert(draw.randrange(len(records)), damaged[place])
        else:  # zeroes, as of a page that was never written
            damaged[place] = bytes(len(damaged[place]))
        assert_beginnings(replay(MAGIC + b"".join(damaged)).responses)


def test_a_response_that_is_over_keeps_its_ending_and_needs_no_engine() -> None:
    last = attrs.evolve(delta(0, 0), finish_reason=FinishReason.STOP, completed_at=9)
    [saved] = replay(MAGIC + begun(0) + delta_record(0, last)).responses.values()
    assert (saved.finish_reason, saved.completed_at, saved.engine) == ("stop", 9, None)
    assert saved.output is not None and saved.output.metrics == METRICS and saved.item_ids == ("msg_1",)


@pytest.mark.parametrize("data", [b"", b"something else", MAGIC[:-2] + b"9\n"])
def test_what_is_no_journal_is_refused(data: bytes) -> None:
    with pytest.raises(SnapshotError, match="must begin with"):
        replay(data)


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The same with a flipped bit, lost, added or zeroed bytes, or no end; up to 20 of these."""
    one = bytearray(data)
    for _ in range(draw.choice((1, 1, 3, 20))):
        kind, place, length = draw.randrange(5), draw.randrange(len(one)), draw.randrange(1, 60)
        if kind == 0:
            one[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del one[place : place + length]
        elif kind == 2:
            one[place:place] = draw.randbytes(length)
        elif kind == 3:
            one[place : place + length] = bytes(len(one[place : place + length]))
        else:
            del one[place + 1 :]
        one = one or bytearray(MAGIC)
    return bytes(one)


def test_1000_mutations_are_refused_or_read_up_to_the_damage() -> None:
    num_refused = num_read = 0
    for seed in range(1000):
        records, _ = journal(seed % 7)
        data = mutated(MAGIC + b"".join(records), random.Random(seed))
        if not data.startswith(MAGIC):
            with pytest.raises(SnapshotError, match="must begin with"):
                replay(data)
            num_refused += 1
            continue
        found = replay(data)
        assert_beginnings(found.responses)
        assert (found.problem is None) == (found.num_bytes == len(data))
        assert replay(compact(data[: found.num_bytes], found.responses)).responses == found.responses
        num_read += 1
    assert num_refused > 50 and num_read > 500
