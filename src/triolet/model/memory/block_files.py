"""Files of a prefix store: one for each block of KV, written in the background, checked whenever one is read.

The files of a model lie in a folder of their own, whose name is a digest of what the KV depends on beside the tokens. A
file appears under its name when it is whole, so that several processes can share a folder. It begins with its own name
and a checksum of its content: a damaged, cut or renamed one counts as missing, and is removed. When all files of the
store take more than they may, those that were used least recently are removed.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import queue
import struct
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs

logger = logging.getLogger("triolet.runner")

_MAGIC: Final = b"triolet kv\x01"  # the last byte is the version of the layout
_HEADER: Final = struct.Struct("<11s16sQI")  # magic, key, bytes of the content, their CRC-32
_SUFFIX: Final = ".kv"
# Blocks that wait to be written. A disk that does not keep up must not take the memory: what comes then is not stored.
_MAX_PENDING_BYTES: Final = 256 * 2**20
# Time to write what is pending: when the model is let go, in which the event loop may wait, and when the process ends.
_CLOSING_S: Final = 0.8
_ENDING_S: Final = 5.0
_KEPT_SHARE: Final = 0.9  # of the bound, after files were removed
_UNCOUNTED_SHARE: Final = 0.05  # of the bound: so much each process may write between two counts
_STALE_S: Final = 3600.0  # an unfinished file of this age was left behind by a process that was killed


@attrs.define(eq=False)
class _Writer:
    """State of the writing thread; it outlives the store until what is pending is written."""

    folder: Path
    max_bytes: int
    jobs: queue.SimpleQueue[tuple[bytes, bytearray, int] | None] = attrs.field(factory=queue.SimpleQueue)
    pending: dict[bytes, bytearray] = attrs.field(factory=dict)
    # Each is changed by one thread alone; what is between them waits.
    num_queued_bytes: int = 0
    num_done_bytes: int = 0
    known: set[bytes] = attrs.field(factory=set)  # keys with a file, as far as is known
    num_failed: int = 0
    # Of all files of the store, those of other models included; what other processes write is counted when files are
    # removed.
    num_bytes: int = 0
    num_uncounted_bytes: int = 0  # written since they were counted
    has_warned: bool = False

    def run(self) -> None:
        """Write until None comes."""
        self.num_bytes = sum(size for _, size, _ in _files(self.folder.parent))
        while (job := self.jobs.get()) is not None:
            key, content, used_ns = job
            try:
                self._write(key, content, used_ns)
            except OSError as error:
                self.num_failed += 1
                if not self.has_warned:
                    self.has_warned = True
                    logger.warning(
                        "a block of the prefix store cannot be written to %s: %s", self.folder, error
                    )
            self.num_done_bytes += len(content)
            self.pending.pop(key, None)

    def _write(self, key: bytes, content: bytearray, used_ns: int) -> None:
        size = _HEADER.size + len(content)
        # Counted anew from time to time: other processes write, too.
        if (
            self.num_bytes + size > self.max_bytes
            or self.num_uncounted_bytes > _UNCOUNTED_SHARE * self.max_bytes
        ):
            self._make_room(size)
        descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix="new.")
        try:
            with open(descriptor, "wb", buffering=0) as file:
                file.write(_HEADER.pack(_MAGIC, key, len(content), zlib.crc32(content)))
                file.write(content)
            if os.stat(temporary).st_size != size:  # a disk that fills up cuts a write short
                raise OSError(f"only a part of {size} bytes was written")
            os.utime(temporary, ns=(used_ns, used_ns))
            os.replace(temporary, _path(self.folder, key))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self.num_bytes += size
        self.num_uncounted_bytes += size
        self.known.add(key)
        self.has_warned = False

    def _make_room(self, size: int) -> None:
        self.num_uncounted_bytes = 0
        files = sorted(_files(self.folder.parent))
        self.num_bytes = sum(num_bytes for _, num_bytes, _ in files)
        is_full = self.num_bytes + size > self.max_bytes
        kept_bytes = _KEPT_SHARE * self.max_bytes if is_full else self.max_bytes
        for used_ns, num_bytes, path in files:
            is_stale = path.suffix != _SUFFIX and used_ns < time.time_ns() - 1e9 * _STALE_S
            if path.suffix != _SUFFIX and not is_stale:
                continue  # it is being written
            if not is_stale and self.num_bytes + size <= kept_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            self.num_bytes -= num_bytes
            if path.parent == self.folder and path.suffix == _SUFFIX:
                self.known.discard(bytes.fromhex(path.stem))
        if self.num_bytes + size > self.max_bytes:
            raise OSError(
                f"{size} bytes of a block are more than kv_store_bytes ({self.max_bytes}) leaves room for"
            )


_writers: Final = weakref.WeakSet[_Writer]()  # of this process


class BlockFiles:
    """Files of the blocks of one model.

    Args:
        folder: of these files, within the store; made if it is missing.
        max_bytes: bound for all files of the store.
    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._writer = _Writer(folder, max_bytes)
        self._num_dropped = 0  # blocks that came too fast
        names = [name.removesuffix(_SUFFIX) for name in os.listdir(folder) if name.endswith(_SUFFIX)]
        for name in names:
            with contextlib.suppress(ValueError):  # a file of another program
                self._writer.known.add(bytes.fromhex(name))
        # A daemon, so that a disk that hangs never keeps a process from ending; see `_write_the_rest`.
        thread = threading.Thread(target=self._writer.run, name="triolet prefix store", daemon=True)
        thread.start()
        _writers.add(self._writer)
        weakref.finalize(self, _close, self._writer)

    @property
    def num_failed(self) -> int:
        """Blocks that could not be written, since the start."""
        return self._writer.num_failed + self._num_dropped

    def has(self, key: bytes) -> bool:
        """Return whether there is a file for a block, or soon will be."""
        return key in self._writer.known or key in self._writer.pending

    def write(self, key: bytes, content: bytearray, used_ns: int) -> None:
        """Write a block in the background; it is dropped if too much is waiting already.

        Args:
            used_ns: time of last use, see `times_of_use`.
        """
        writer = self._writer
        if writer.num_queued_bytes - writer.num_done_bytes + len(content) > _MAX_PENDING_BYTES:
            self._num_dropped += 1
            return
        writer.num_queued_bytes += len(content)
        writer.pending[key] = content
        writer.jobs.put((key, content, used_ns))

    def read(self, key: bytes, num_bytes: int) -> bytearray | None:
        """Return the content of a block; None if there is no file that is good.

        Args:
            num_bytes: its length.
        """
        if (content := self._writer.pending.get(key)) is not None:
            return content
        path = _path(self._writer.folder, key)
        data = bytearray(_HEADER.size + num_bytes + 1)  # one more, which a whole file leaves as it is
        try:
            with open(path, "rb", buffering=0) as file:
                num_read = file.readinto(data)
        except FileNotFoundError:  # not there, or removed by another process to make room
            self._writer.known.discard(key)
            return None
        except OSError as error:
            logger.warning("a block of the prefix store cannot be read: %s", error)
            return None
        del data[-1]
        with memoryview(data) as view:
            header = _HEADER.pack(_MAGIC, key, num_bytes, zlib.crc32(view[_HEADER.size :]))
            if num_read != len(data) or view[: _HEADER.size] != header:
                logger.warning("%s is no block of this prefix store, or is damaged: it is removed", path)
                with contextlib.suppress(OSError):
                    os.unlink(path)
                self._writer.known.discard(key)
                return None
        del data[: _HEADER.size]
        self._writer.known.add(key)
        return data

    def note_used(self, keys: Sequence[bytes]) -> None:
        """Set the time of last use of files that were read.

        Args:
            keys: of one prompt, in order.
        """
        for key, used_ns in zip(keys, times_of_use(), strict=False):
            with contextlib.suppress(OSError):  # not written yet, or removed by another process
                os.utime(_path(self._writer.folder, key), ns=(used_ns, used_ns))

    def flush(self, limit_s: float) -> None:
        """Wait until nothing waits to be written, so many seconds at most."""
        _flush(self._writer, time.monotonic() + limit_s)


def _close(writer: _Writer) -> None:
    writer.jobs.put(None)  # the thread ends when what is pending is written
    _flush(writer, time.monotonic() + _CLOSING_S)


def _flush(writer: _Writer, until_s: float) -> None:
    while writer.pending and time.monotonic() < until_s:
        time.sleep(0.005)


@atexit.register
def _write_the_rest() -> None:
    """Give the threads the time to write what is pending, before the process ends."""
    until_s = time.monotonic() + _ENDING_S
    for writer in tuple(_writers):
        _flush(writer, until_s)


def times_of_use() -> Iterator[int]:
    """Yield times for the blocks of a prompt that is used now, in order, nanoseconds.

    The first block's is the latest, so that it is removed last: the others are of no use without it.
    """
    return itertools.count(time.time_ns(), -1000)


def _path(folder: Path, key: bytes) -> str:
    return f"{folder}/{key.hex()}{_SUFFIX}"


def _files(store: Path) -> list[tuple[int, int, Path]]:
    """Return time of last use in nanoseconds, size and path of the files of a store, finished or not."""
    found = []
    for path in store.glob("*/*"):
        if path.suffix == _SUFFIX or path.name.startswith("new."):
            with contextlib.suppress(OSError):  # removed by another process
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, path))
    return found
