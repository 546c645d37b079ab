"""Journal file: records that a server appends while it runs, from which the next one continues after `kill -9`.

Events are read by clients only when their records are written, so that a client never knows more than the file. A
thread writes all records that have come since its last write with one call: the event loop never waits for the disk. A
write ends in the memory of the system, which outlives the process; it is not synced to the disk, so that a power
failure may take the latest records. A client that knows more than the file is then refused.

When the file has doubled it is replaced by one without the responses that are over. When it cannot be written, the
server goes on without it: one warning, and the metric `journal_write_errors`.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import attrs
import trio

from triolet.core.output.outputs import CompletionOutput
from triolet.core.step_plan import TokenLogprobs
from triolet.errors import ConfigError, SnapshotError
from triolet.protocol.responses.response import ResponseBuilder
from triolet.protocol.responses.snapshot import SavedResponse
from triolet.server.responses.journal import (
    MAGIC,
    JournalDelta,
    JournaledResponse,
    PlainDelta,
    begin_record,
    compact,
    delta_record,
    encode,
    forget_record,
    replay,
)
from triolet.server.responses.resumable import ResumableResponse
from triolet.server.responses.service import ResponsesService
from triolet.server.responses.snapshot_file import read_file, restorer, set_aside

# A smaller file is not worth a replacement.
MIN_COMPACTED_BYTES: Final = 4 * 2**20
MAX_JOURNAL_BYTES: Final = 2**30

logger = logging.getLogger("triolet.gateway")


@attrs.define(eq=False)
class ResponseJournal:
    """Journal of the resumable responses of one server; made by `open_journal`.

    Args:
        path: of the file.
        gateway: the responses service.
        in_thread: runs a function that writes, and returns when it has.
    """

    path: Path
    gateway: ResponsesService
    in_thread: Callable[[Callable[[], None]], Awaitable[None]] = trio.to_thread.run_sync
    num_bytes: int = attrs.field(default=0, init=False)  # length of the file
    num_errors: int = attrs.field(default=0, init=False)  # failed writes
    _file: int = attrs.field(default=-1, init=False)
    _journaled: dict[str, JournaledResponse | None] = attrs.field(factory=dict, init=False)
    _num_responses: int = attrs.field(default=0, init=False)
    _max_bytes: int = attrs.field(default=MIN_COMPACTED_BYTES, init=False)  # a longer file is compacted
    _entries: list[bytes | PlainDelta] = attrs.field(factory=list, init=False)  # to be written
    _write_number: int = attrs.field(default=1, init=False)  # of the write that will have the entries
    _num_writes: int = attrs.field(default=0, init=False)  # that are done
    _is_on: bool = attrs.field(default=True, init=False)  # neither closed nor failed
    _news: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _writes: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    # ------------------------------------------------------------------------------------- the start

    def restore(self) -> None:
        """Continue the responses of the previous server, all or none, and begin a file with their records alone.

        Raises:
            ConfigError: another server uses the file, or it cannot be written.
        """
        try:
            self._lock()
        except OSError as error:
            raise ConfigError("journal", f"a file that can be written: {error}", str(self.path)) from error
        restorers: list[Callable[[], None]] = []
        known: dict[str, JournaledResponse | None] = {}
        try:
            data = read_file(self.path, MAX_JOURNAL_BYTES) or MAGIC
            found = replay(data)
            data = data[: found.num_bytes]
            for number, saved in found.responses.items():
                restorers.append(restorer(self.gateway, saved))
                known[saved.response_id] = JournaledResponse(number, len(saved.pieces), len(saved.item_ids))
            if found.problem is not None:
                logger.warning("%s: %s; it counts up to there", self.path, found.problem)
                if found.is_corrupt:
                    set_aside(self.path)
            data = compact(data, found.responses)
        except SnapshotError as error:
            logger.warning("%s cannot be restored, the server starts without it: %s", self.path, error)
            set_aside(self.path)
            data, restorers, known = MAGIC, [], {}
        except OSError as error:
            raise ConfigError("journal", f"a file that can be read: {error}", str(self.path)) from error
        self._journaled = known
        self._num_responses = 1 + max((one.number for one in known.values() if one is not None), default=-1)
        try:
            self._replace(data)
        except OSError as error:
            raise ConfigError("journal", f"a file that can be written: {error}", str(self.path)) from error
        for restore in restorers:
            restore()
        logger.info("%d resumable responses restored from %s", len(restorers), self.path)

    def _lock(self) -> None:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_ino != os.stat(self.path).st_ino:  # replaced between the two calls
                raise BlockingIOError
        except BaseException as error:
            os.close(file)
            if isinstance(error, BlockingIOError):
                raise ConfigError("journal", "a file that no other server uses", str(self.path)) from error
            raise
        # Kept open until the file is replaced by one that is locked as well.
        self._file = file

    # ------------------------------------------------------------------------------------ in the loop

    def note(self, resumable: ResumableResponse) -> int:
        """Append what is new of a response; return a mark for `wait_written`. Never waits."""
        if not self._is_on:
            return 0
        answer = resumable.answer
        plain, answer.plain_output = answer.plain_output, None
        # Nearly always there is one delta with text and tokens alone. Each token of each stream pays for this, between
        # other things that have taken its code and data from the processor's caches: so it is short, in one function,
        # reads few objects, and only puts values into a list; the writer makes one record of all that have come
        # meanwhile.
        if plain is not None and (known := resumable.journaled) is not None:
            index = known.num_deltas
            known.num_deltas = index + 1
            if not (entries := self._entries):
                self._news.unpark_all()
            entries.append((known.number, index, plain.text, plain.token_ids))
            return self._write_number
        known = self._journaled.get(answer.response_id)
        if known is None:
            if answer.response_id in self._journaled or answer.is_over:
                return 0
            known = self._begin(answer, resumable.owner)
        if known is not None:
            self._note_deltas(known, answer)
            resumable.journaled = known if known.num_deltas else None  # the first delta is never a plain one
        return self._latest_write()

    def _begin(self, answer: ResponseBuilder, owner: str | None) -> JournaledResponse | None:
        snapshot = self.gateway.engine.snapshot(answer.response_id)
        history = answer.history()
        if not snapshot.requests or history is None:  # of another model of this server, or dropped already
            self._journaled[answer.response_id] = None
            return None
        known = self._journaled[answer.response_id] = JournaledResponse(self._num_responses)
        self._num_responses += 1
        self._append(begin_record(known.number, SavedResponse.of(answer, history, owner, None), snapshot))
        return known

    def _note_deltas(self, known: JournaledResponse, answer: ResponseBuilder) -> None:
        pieces, output, reason, completed_at = answer.growth(known.num_deltas)
        if answer.is_over and reason is None:  # it has failed, or was cancelled
            self.forget(answer.response_id)
            return
        if not pieces or output is None:
            return
        # Every output is noted before the next one comes.
        [piece], [completion] = pieces, output.outputs
        index = known.num_deltas
        known.num_deltas += 1
        item_ids = answer.item_ids
        is_telling = index == 0 or reason is not None
        delta = JournalDelta(
            index=index,
            piece=piece,
            token_ids=tuple(completion.token_ids),
            token_logprobs=_token_logprobs(completion),
            item_ids=item_ids[known.num_ids :],
            num_cached_tokens=output.num_cached_tokens,
            num_cache_creation_tokens=output.num_cache_creation_tokens,
            metrics=output.metrics if is_telling else None,
            finish_reason=reason,
            completed_at=completed_at,
        )
        known.num_ids = len(item_ids)
        self._append(delta_record(known.number, delta))

    def forget(self, response_id: str) -> None:
        """Record that a response is not to be resumed any more; harmless if it has none."""
        known = self._journaled.pop(response_id, None)
        if known is not None and self._is_on:
            self._append(forget_record(known.number))

    def _append(self, entry: bytes | PlainDelta) -> None:
        if not self._entries:  # else the writer has not read the news
            self._news.unpark_all()
        self._entries.append(entry)

    def _latest_write(self) -> int:
        """Return the number of the write that has, or will have, the latest entry."""
        return self._write_number if self._entries else self._write_number - 1

    async def wait_written(self, mark: int) -> None:
        """Wait until the records up to a mark of `note` are written, or can no longer be."""
        while self._num_writes < mark and not self.num_errors:
            await self._writes.park()

    async def close(self) -> None:
        """Write the last records; nothing is noted any more."""
        self._is_on = False
        await self.wait_written(self._latest_write())

    def release(self) -> None:
        """Close the file, which ends its lock, when nothing writes any more; harmless when repeated."""
        self._is_on = False
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # -------------------------------------------------------------------------------------- the writer

    async def run(self) -> None:
        """Write records until cancelled, or until a write fails."""
        try:
            while True:
                while not self._entries:
                    await self._news.park()
                entries, self._entries = self._entries, []
                self._write_number += 1
                live = {known.number for known in self._journaled.values() if known is not None}
                await self.in_thread(lambda entries=entries, live=live: self._write(encode(entries), live))  # type: ignore[misc]
                self._num_writes += 1
                self._writes.unpark_all()
        except Exception as error:  # of whatever kind, a shortage of memory included: the server goes on
            self.num_errors += 1
            self._is_on = False
            self._entries.clear()
            self._writes.unpark_all()
            logger.warning(
                "%s cannot be written, the server goes on without it until its next start: %r",
                self.path,
                error,
            )

    def _write(self, data: bytes, live: set[int]) -> None:
        """Append records; compact a file that has become long."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            self._replace(compact(self.path.read_bytes(), live))

    def _replace(self, data: bytes) -> None:
        """Replace the file atomically by one with this content, which is locked before it has the name."""
        fresh = self.path.with_name(f".{self.path.name}.new")
        file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            # Before the rename, or a power failure could leave an empty file under the final name.
            os.fsync(file)
            os.replace(fresh, self.path)
        except BaseException:
            os.close(file)
            # On a full disk its bytes are missed most.
            with suppress(OSError):
                fresh.unlink()
            raise
        os.close(self._file)
        self._file = file
        self.num_bytes = len(data)
        self._max_bytes = max(MIN_COMPACTED_BYTES, 2 * len(data))


def _token_logprobs(completion: CompletionOutput) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of an output in the form of the engine's journal."""
    positions = []
    for token_id, entries in zip(completion.token_ids, completion.logprobs or (), strict=False):
        others = [named for named in entries if named != token_id]
        ids = (token_id, *others)
        rank = entries[token_id].rank or 1
        positions.append(TokenLogprobs(ids, tuple(entries[named].logprob for named in ids), rank))
    return tuple(positions)


@asynccontextmanager
async def open_journal(path: Path, gateway: ResponsesService) -> AsyncGenerator[ResponseJournal]:
    """Continue the responses of a journal, and keep one for this server while the scope is open.

    Raises:
        ConfigError: the file cannot be used; see `ResponseJournal.restore`.
    """
    journal = ResponseJournal(path, gateway)
    try:
        journal.restore()
        gateway.resumable.journal = journal
        gateway.metrics.watch_journal(lambda: journal.num_bytes, lambda: journal.num_errors)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.run)
            yield journal
            await journal.close()
            nursery.cancel_scope.cancel()
    finally:
        journal.release()
