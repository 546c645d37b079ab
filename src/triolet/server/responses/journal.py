"""Journal of resumable responses as bytes: records that are only appended, their replay, and their compaction.

A journal begins with a magic line. Every record has a header (length, checksum, number of the response) and a body in
msgpack. `BEGIN` holds a response and the engine's request as they were admitted, `DELTA` what one output of the engine
has added, `TOKENS` what outputs of several responses have added, if that is text and tokens alone, and `FORGET` that
nothing is to be resumed. Deltas are counted, so that a lost or repeated record is noticed.

A record counts if it and all before it are whole. The bytes after the first record that is not are ignored: what they
held is computed again by the next engine, which continues from the tokens before them.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import attrs
import msgpack

from triolet.core.request.request import FinishReason, RequestMetrics
from triolet.core.step_plan import TokenLogprobs
from triolet.errors import SnapshotError
from triolet.ipc.snapshot import SavedAnswer, SavedRequest, Snapshot
from triolet.protocol.json.encoding import EncodedList
from triolet.protocol.responses.response_items import ResponseDelta
from triolet.protocol.responses.snapshot import SavedOutput, SavedResponse, from_bytes, to_bytes

MAGIC: Final = b"triolet journal of resumable responses 1\n"
BEGIN, DELTA, FORGET, TOKENS = range(4)
_KIND: Final = 1  # place of the kind in a body: after the byte that begins an array

PlainDelta: TypeAlias = tuple[int, int, str, Sequence[int]]
"""Delta of text and tokens alone: number of the response, number of deltas before it, text, token ids."""

_HEADER: Final = struct.Struct(
    "<IIQ"
)  # length of the body, checksum of number and body, number of the response
_NUMBER: Final = struct.Struct("<Q")
# One for all records: making it takes longer than packing a short one.
_PACKER: Final = msgpack.Packer(unicode_errors="surrogatepass")


@attrs.define(kw_only=True)  # not frozen: one is made for every token, and that takes three times as long
class JournalDelta:
    """Content that one output of the engine has added to a response."""

    index: int  # number of deltas before it
    piece: ResponseDelta
    token_ids: tuple[int, ...]
    token_logprobs: tuple[TokenLogprobs, ...] = ()  # of these tokens, if they were asked for
    item_ids: tuple[str, ...] = ()  # ids of the items that it has made
    # Counts and times of the request, with the first delta and the last one.
    num_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0
    metrics: RequestMetrics | None = None
    finish_reason: FinishReason | None = None
    completed_at: int = 0  # seconds since the epoch


@attrs.define
class JournaledResponse:
    """Part of one response that a journal has."""

    number: int
    num_deltas: int = 0
    num_ids: int = 0  # of the items


@attrs.frozen
class Replay:
    """State at the end of a journal.

    Args:
        responses: those that were begun and not forgotten, by number.
        num_bytes: length of the records that count, with the magic line.
        problem: why the rest does not count; None if all do.
        is_corrupt: whether the rest is more than a record whose writing was interrupted.
    """

    responses: dict[int, SavedResponse]
    num_bytes: int
    problem: str | None = None
    is_corrupt: bool = False


def _record(number: int, body: list[Any]) -> bytes:
    packed: bytes = _PACKER.pack(body)
    checksum = zlib.crc32(packed, zlib.crc32(_NUMBER.pack(number)))
    return _HEADER.pack(len(packed), checksum, number) + packed


def begin_record(number: int, response: SavedResponse, snapshot: Snapshot) -> bytes:
    """Return the record of a response that was admitted.

    Args:
        snapshot: of the engine, with the request of the response alone.
    """
    data, _ = to_bytes([attrs.evolve(response, engine="")], max_bytes=2**32)
    return _record(number, [BEGIN, data, snapshot.to_bytes()])


def delta_record(number: int, delta: JournalDelta) -> bytes:
    """Return the record of what an output has added."""
    body: list[Any] = [DELTA, delta.index, delta.piece.text, delta.token_ids]
    is_plain = not (delta.piece.logprobs or delta.token_logprobs or delta.item_ids or delta.metrics)
    if not is_plain or delta.finish_reason is not None:
        body += [
            list(delta.piece.logprobs),
            [attrs.astuple(one) for one in delta.token_logprobs],
            delta.item_ids,
            [delta.num_cached_tokens, delta.num_cache_creation_tokens],
            None if delta.metrics is None else attrs.asdict(delta.metrics),
            None if delta.finish_reason is None else delta.finish_reason.value,
            delta.completed_at,
        ]
    return _record(number, body)


def tokens_record(deltas: Sequence[PlainDelta]) -> bytes:
    """Return one record of many deltas, which takes a fraction of the time of a record for each."""
    return _record(0, [TOKENS, deltas])


def encode(entries: Iterable[bytes | PlainDelta]) -> bytes:
    """Return records and plain deltas as the bytes of a journal, in their order."""
    parts: list[bytes] = []
    deltas: list[PlainDelta] = []
    for entry in entries:
        if isinstance(entry, tuple):
            deltas.append(entry)
            continue
        if deltas:
            parts.append(tokens_record(deltas))
            deltas = []
        parts.append(entry)
    if deltas:
        parts.append(tokens_record(deltas))
    return b"".join(parts)


def forget_record(number: int) -> bytes:
    """Return the record of a response that is not to be resumed any more."""
    return _record(number, [FORGET])


# ------------------------------------------------------------------------------------------------ reading


@attrs.define
class _Replayed:
    """One response while its records are replayed."""

    response: SavedResponse
    snapshot: Snapshot
    deltas: list[JournalDelta] = attrs.field(factory=list)

    def saved(self) -> SavedResponse:
        """Return the response as a snapshot file would hold it."""
        [request], deltas = self.snapshot.requests, self.deltas
        facts = next((delta for delta in reversed(deltas) if delta.metrics is not None), None)
        ending = deltas[-1] if deltas else None
        is_over = ending is not None and ending.finish_reason is not None
        return attrs.evolve(
            self.response,
            pieces=tuple(delta.piece for delta in deltas),
            item_ids=tuple(item_id for delta in deltas for item_id in delta.item_ids),
            finish_reason=ending.finish_reason.value if ending and ending.finish_reason else None,
            completed_at=ending.completed_at if ending else 0,
            output=None if facts is None else _output(request, facts),
            engine=None if is_over else self._engine(request),
        )

    def _engine(self, request: SavedRequest) -> str:
        [answer], deltas = request.answers, self.deltas
        grown = SavedAnswer(
            seed=answer.seed,
            output_token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            output_logprobs=tuple(one for delta in deltas for one in delta.token_logprobs),
        )
        # It was scheduled if it has a token.
        queue_s = None if grown.output_token_ids else request.queue_time_left_s
        request = attrs.evolve(request, answers=(grown,), queue_time_left_s=queue_s)
        return base64.b64encode(attrs.evolve(self.snapshot, requests=(request,)).to_bytes()).decode()


def _output(request: SavedRequest, facts: JournalDelta) -> SavedOutput:
    assert facts.metrics is not None
    return SavedOutput(
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        num_cached_tokens=facts.num_cached_tokens,
        num_cache_creation_tokens=facts.num_cache_creation_tokens,
        metrics=facts.metrics,
    )


def replay(data: bytes) -> Replay:
    """Read a journal up to its end, or to the first record that is not whole.

    Raises:
        SnapshotError: the bytes do not begin as a journal of this version.
    """
    if not data.startswith(MAGIC):
        raise SnapshotError(f"a journal must begin with {MAGIC[:-1]!r}; got {data[: len(MAGIC)]!r}")
    found: dict[int, _Replayed] = {}
    end, problem, is_corrupt = len(MAGIC), None, False
    try:
        for start, number, body in _records(data):
            try:
                _apply(found, number, msgpack.unpackb(body, unicode_errors="surrogatepass"))
            except Exception as error:  # any check may raise anything on a wrong value
                raise _Broken(f"the record at byte {start} is wrong: {error!r:.200}", True) from error
            end = start + _HEADER.size + len(body)
    except _Broken as error:
        problem, is_corrupt = error.problem, error.is_corrupt
    responses = {number: one.saved() for number, one in found.items()}
    return Replay(responses, end, problem, is_corrupt)


@attrs.frozen
class _Broken(Exception):
    """A record that does not count."""

    problem: str
    is_corrupt: bool


def _records(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield place, number and body of each record.

    Raises:
        _Broken: one is not whole.
    """
    start, view = len(MAGIC), memoryview(data)
    while start < len(data):
        if len(data) - start < _HEADER.size:
            raise _Broken(f"the record at byte {start} is cut off", False)
        length, checksum, number = _HEADER.unpack_from(data, start)
        body = bytes(view[start + _HEADER.size : start + _HEADER.size + length])
        if len(body) < length:
            raise _Broken(f"the record at byte {start} is cut off", False)
        if zlib.crc32(body, zlib.crc32(_NUMBER.pack(number))) != checksum:
            raise _Broken(f"the record at byte {start} has another checksum", True)
        yield start, number, body
        start += _HEADER.size + length


def _apply(found: dict[int, _Replayed], number: int, body: list[Any]) -> None:
    kind, *fields = body
    if kind == BEGIN:
        data, snapshot = fields
        [response] = from_bytes(data)
        one = _Replayed(response, Snapshot.from_bytes(snapshot))
        [request] = one.snapshot.requests
        [_] = request.answers
        if number in found or request.request_id != response.response_id:
            raise ValueError("it must begin one new response")
        found[number] = one
    elif kind == FORGET:
        del found[number]
    elif kind == DELTA:
        _append_delta(found[number].deltas, _delta(*fields))
    elif kind == TOKENS:
        _append_plain_deltas(found, *fields)
    else:
        raise ValueError(f"its kind must be known; got {kind!r:.20}")


def _append_delta(deltas: list[JournalDelta], delta: JournalDelta) -> None:
    if delta.index != len(deltas) or (deltas and deltas[-1].finish_reason is not None):
        raise ValueError(f"delta {delta.index} must follow {len(deltas)} deltas of an unfinished response")
    deltas.append(delta)


def _append_plain_deltas(found: dict[int, _Replayed], rows: list[PlainDelta]) -> None:
    """Append all deltas of a record, or none if one of them is wrong."""
    grown: list[list[JournalDelta]] = []
    try:
        for number, index, text, token_ids in rows:
            deltas = found[number].deltas
            _append_delta(deltas, _delta(index, text, list(token_ids)))
            grown.append(deltas)
    except Exception:
        for deltas in grown:
            deltas.pop()
        raise


def _delta(
    index: int,
    text: str,
    token_ids: list[int],
    logprobs: Collection[Any] = (),
    token_logprobs: Collection[Any] = (),
    item_ids: Collection[str] = (),
    cached: Collection[int] = (0, 0),
    metrics: dict[str, Any] | None = None,
    finish_reason: str | None = None,
    completed_at: int = 0,
) -> JournalDelta:
    num_cached, num_created = cached
    return JournalDelta(
        index=index,
        piece=ResponseDelta(text=text, num_tokens=len(token_ids), logprobs=EncodedList(logprobs)),
        token_ids=tuple(token_ids),
        token_logprobs=tuple(
            TokenLogprobs(tuple(ids), tuple(values), rank) for ids, values, rank in token_logprobs
        ),
        item_ids=tuple(item_ids),
        num_cached_tokens=num_cached,
        num_cache_creation_tokens=num_created,
        metrics=None if metrics is None else RequestMetrics(**metrics),
        finish_reason=None if finish_reason is None else FinishReason(finish_reason),
        completed_at=completed_at,
    )


def compact(data: bytes, live: Collection[int]) -> bytes:
    """Return a journal with the records of these responses only, in the same order.

    Raises:
        SnapshotError: the bytes are no journal, or one of the records is not whole.
    """
    if not data.startswith(MAGIC):
        raise SnapshotError("a journal must begin with its magic line")
    parts = [MAGIC]
    try:
        for start, number, body in _records(data):
            if body[_KIND : _KIND + 1] == bytes([TOKENS]):
                _, rows = msgpack.unpackb(body, unicode_errors="surrogatepass")
                if rows := [row for row in rows if row[0] in live]:
                    parts.append(tokens_record(rows))
            elif number in live:
                parts.append(data[start : start + _HEADER.size + len(body)])
    except _Broken as error:
        raise SnapshotError(error.problem) from error
    return b"".join(parts)
