"""Recorder: appends the requests of one engine, and their answers, to a file.

The engine hands over a request when it is admitted and again when its reader leaves; that only appends to a queue. A
task takes what has come and has a thread encode and write it with one call, so that neither the steps nor the event
loop wait for the disk. A write ends in the memory of the system, which outlives the process.

The queue is bounded: what does not fit is lost. When the file cannot be written, recording ends and the engine goes on.
Both are said once in the log, and `num_lost` counts the records.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import trio

from triolet.config.engine import EngineConfig
from triolet.core.engine_core import OpenOutput
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.request import FinishReason
from triolet.errors import ConfigError, RecordingError
from triolet.ipc.recording import (
    FORMAT,
    EndedAnswer,
    EndRecord,
    EngineRecord,
    Record,
    RequestRecord,
    WeightsRecord,
    check_first_line,
    encode,
)
from triolet.ipc.snapshot import SavedAnswer, SavedRequest
from triolet.recording.model_digest import digest_of_model

MAX_QUEUED_RECORDS: Final = 2**14
# Some 40 bytes each in Python: a disk that hangs costs 160 MiB at most.
MAX_QUEUED_TOKENS: Final = 2**22
# A first record is a few KiB, most of it paths, but for a chat template: 250,000 characters of at most 12 bytes.
MAX_FIRST_LINE_BYTES: Final = 2**22
# Time at the end of the engine for the digest of weights that have none yet, seconds. A request is not replayed without
# one: an engine that lived for less than it takes to read a small model would leave a recording of no use.
LAST_DIGEST_S: Final = 2.0

# Fields that answers depend on, and limits that a request was checked against.
FIELDS: Final = (
    *("model", "tokenizer", "chat_template", "revision", "dtype", "convert", "quantization", "device"),
    "kv_cache_dtype",
    "max_model_len",
    *("max_logprobs", "max_n", "max_stop_strings", "max_logit_bias", "max_bad_words", "max_grammar_bytes"),
    *("tool_parser", "reasoning_parser", "allow_special_tokens"),
    *("enable_lora", "max_lora_rank", "lora_dtype"),
)

logger = logging.getLogger("triolet.recording")


@attrs.define(eq=False)
class Recorder:
    """Recorder of one engine; made by `open_recorder`."""

    path: str
    _file: int
    num_lost: int = attrs.field(default=0, init=False)  # records that are not in the file
    _num_bytes: int = attrs.field(default=0, init=False)  # length of the file, whole lines
    _weights: Callable[[], tuple[int, str]] | None = attrs.field(default=None, init=False)
    _queue: list[Record] = attrs.field(factory=list, init=False)
    _num_queued_tokens: int = attrs.field(default=0, init=False)
    # Requests whose end is to be recorded, by number.
    _open: dict[int, tuple[int, Sequence[OpenOutput]]] = attrs.field(factory=dict, init=False)
    _versions: set[int] = attrs.field(factory=set, init=False)  # of weights that have a record, or get one
    _undigested: list[tuple[int, str]] = attrs.field(factory=list, init=False)
    _is_on: bool = attrs.field(default=False, init=False)
    _was_said: bool = attrs.field(default=False, init=False)
    _news: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    def begin(
        self, version: str, config: EngineConfig, info: ModelInfo, weights: Callable[[], tuple[int, str]]
    ) -> None:
        """Begin the records of an engine that has loaded its model.

        Args:
            version: of triolet.
            config: of the engine, with the text of a chat template that it names.
            weights: returns version and folder of the weights in use.
        """
        self._weights, self._is_on = weights, True
        fields = {name: getattr(config, name) for name in FIELDS}
        # As resolved: another machine may have memory for a longer context, where answers would end later.
        fields |= {"model": info.folder, "dtype": info.dtype, "max_model_len": info.max_model_len}
        self._append(
            EngineRecord(
                format=FORMAT,
                version=version,
                architecture=info.architecture,
                vocab_size=info.vocab_size,
                config=fields,
            )
        )
        self._note_weights()

    # ------------------------------------------------------------------------------------ in the loop

    def admit(self, request: SavedRequest, outputs: Sequence[OpenOutput]) -> None:
        """Record a request that was just admitted. Never waits."""
        if not self._is_on:
            self.num_lost += 1
            return
        number, version = outputs[0].entry.serial, self._note_weights()
        answers = tuple(SavedAnswer(seed=answer.seed) for answer in request.answers)
        # Names of callers and texts are left out: answers do not depend on them.
        request = attrs.evolve(
            request,
            prompt=None,
            answers=answers,
            client=None,
            owner=None,
            trace_headers=(),
            time_left_s=None,
            queue_time_left_s=None,
        )
        record = RequestRecord(number=number, weight_version=version, request=request)
        if self._append(record, len(request.prompt_token_ids)):
            self._open[number] = version, outputs

    def end(self, number: int) -> None:
        """Record the answers of a request whose reader leaves. Never waits."""
        version, outputs = self._open.pop(number, (0, ()))
        if not outputs:
            return
        entries = [output.entry for output in outputs]
        with_tokens = [entry.weight_version for entry in entries if entry.output_token_ids]
        # As delivered: the journal may be ahead of what the reader got when it left.
        collectors = [output.processor.collector for output in outputs]
        record = EndRecord(
            number=number,
            weight_version=max(with_tokens, default=version),
            answers=tuple(
                EndedAnswer(
                    token_ids=tuple(collector.entry.output_token_ids[: collector.num_tokens]),
                    finish_reason=collector.finish_reason or _reason_of_break(output),
                    stop_reason=collector.entry.stop_reason,
                )
                for output, collector in zip(outputs, collectors, strict=True)
            ),
            failure=next((entry.failure for entry in entries if entry.failure is not None), None),
        )
        self._append(record, sum(collector.num_tokens for collector in collectors))

    def _note_weights(self) -> int:
        assert self._weights is not None
        version, folder = self._weights()
        if version not in self._versions:
            self._versions.add(version)
            self._undigested.append((version, folder))
            self._news.unpark_all()
        return version

    def _append(self, record: Record, num_tokens: int = 0) -> bool:
        if not self._is_on:
            self.num_lost += 1
            return False
        num_queued_tokens = self._num_queued_tokens + num_tokens
        if len(self._queue) >= MAX_QUEUED_RECORDS or num_queued_tokens > MAX_QUEUED_TOKENS:
            self._lose(1, "the disk is slower than the requests")
            return False
        self._queue.append(record)
        self._num_queued_tokens = num_queued_tokens
        self._news.unpark_all()
        return True

    def _lose(self, num_records: int, reason: object) -> None:
        self.num_lost += num_records
        if not self._was_said:
            self._was_said = True
            logger.warning("%s misses records from now on, the engine goes on: %s", self.path, reason)

    # -------------------------------------------------------------------------------------- the writer

    async def run(self) -> None:
        """Write records until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._digest_weights)
            while True:
                while not self._queue:
                    await self._news.park()
                await self._write_queue()

    async def close(self) -> None:
        """Record what has not ended as it is now, write the last records, and close the file.

        Takes `LAST_DIGEST_S` longer at most if there are weights without a digest.
        """
        try:
            for number in list(self._open):
                self.end(number)
            with trio.move_on_after(LAST_DIGEST_S, shield=True):
                while self._undigested and self._is_on:
                    await self._digest_next()
            await self._write_queue()
        finally:
            self._is_on = False
            os.close(self._file)

    async def _write_queue(self) -> None:
        records, self._queue, self._num_queued_tokens = self._queue, [], 0
        if not records:
            return
        try:
            # Shielded: the records are no longer in the queue, so that a cancelled write would lose them.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._write, records)
        except Exception as error:  # of whatever kind, a shortage of memory included: the engine goes on
            self._is_on = False
            self._lose(len(records) + len(self._queue), error)
            self._queue.clear()

    def _write(self, records: Sequence[Record]) -> None:
        rest = memoryview(b"".join(map(encode, records)))
        num_bytes = self._num_bytes + len(rest)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except Exception:
            # A later engine appends behind the last whole line.
            os.ftruncate(self._file, self._num_bytes)
            raise
        self._num_bytes = num_bytes

    async def _digest_weights(self) -> None:
        while True:
            while not self._undigested:
                await self._news.park()
            await self._digest_next()

    async def _digest_next(self) -> None:
        version, folder = self._undigested[0]
        digest, problem = None, None
        try:
            # Cancelled between two chunks: the end of the engine does not wait until gigabytes are read.
            digest = await trio.to_thread.run_sync(digest_of_model, folder, trio.from_thread.check_cancelled)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        del self._undigested[0]
        self._append(WeightsRecord(version=version, folder=folder, digest=digest, problem=problem))


def _reason_of_break(output: OpenOutput) -> FinishReason:
    return FinishReason.ABORT if output.error is None else FinishReason.ERROR


def open_recorder(path: str) -> Recorder:
    """Open the file of a recording, and cut off a line that a killed process left incomplete.

    Raises:
        ConfigError: it cannot be written, another engine writes to it, or it is something else than a recording.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise ConfigError("record", f"a file that can be written ({error.strerror})", path) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        recorder = Recorder(path, file)
        recorder._num_bytes = _whole_lines(file, path)
        os.ftruncate(file, recorder._num_bytes)
    except BlockingIOError as error:
        os.close(file)
        raise ConfigError("record", "a file that no other engine writes to", path) from error
    except RecordingError as error:
        os.close(file)
        raise ConfigError("record", f"a recording or a new file ({error})", path) from error
    except OSError as error:
        os.close(file)
        raise ConfigError("record", f"a file that can be written ({error.strerror})", path) from error
    return recorder


def _whole_lines(file: int, path: str) -> int:
    """Return the length of a file up to the end of its last whole line."""
    size = os.fstat(file).st_size
    first, newline, _ = os.pread(file, MAX_FIRST_LINE_BYTES, 0).partition(b"\n")
    if not newline:
        # A process that was killed at its very first write leaves less; anything longer is another kind of file.
        if first and not b'{"record":"engine"'.startswith(first[:18]):
            raise RecordingError(f"{path}:1: the first record must be of kind engine")
        return 0
    check_first_line(first, path)
    end = size
    while end:
        start = max(0, end - MAX_FIRST_LINE_BYTES)
        if (found := os.pread(file, end - start, start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0
