"""Snapshot file: resumable responses saved by a server at its end, and restored by the next one.

The file is replaced atomically and has mode 0600, because it holds prompts and answers of clients. A file that cannot
be restored is renamed and logged, and the server starts without it.
"""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

from triolet.config.whole_file import write_file
from triolet.engine.token_stream import TokenStream
from triolet.errors import ConfigError, SnapshotError
from triolet.ipc.snapshot import SavedRequest, Snapshot
from triolet.protocol.responses.response_items import ResponseHistory
from triolet.protocol.responses.snapshot import MAX_BYTES, ReplaySkipper, SavedResponse, from_bytes, to_bytes
from triolet.server.responses.service import ResponsesService

# Renamed and not removed: the next start does not read it again, and nothing is lost.
REFUSED: Final = ".refused"

logger = logging.getLogger("triolet.gateway")


def check_directory(path: str | None, field: str = "snapshot") -> None:
    """Check at the start that the file can be written at the end.

    Args:
        field: name of the option.
    Raises:
        ConfigError: its directory is missing or not writable.
    """
    if path is None:
        return
    directory = Path(path).absolute().parent
    if not os.access(directory, os.W_OK | os.X_OK) or not directory.is_dir() or Path(path).is_dir():
        raise ConfigError(field, "a file in a directory that can be written to", path)


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes | None:
    """Return the content of the file; None if there is none.

    Raises:
        OSError: it cannot be read.
        SnapshotError: it is longer than `max_bytes`.
    """
    try:
        with path.open("rb") as file:
            # One more, so that a longer file is noticed without reading all of it.
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    if len(data) > max_bytes:
        raise SnapshotError(f"it must have at most {max_bytes} bytes")
    return data


async def save_responses(path: Path, gateway: ResponsesService, snapshot: Snapshot) -> None:
    """Write every resumable response that has not failed to the file; no file if there are none.

    Args:
        gateway: a drained responses service.
        snapshot: of its drained engine.
    """
    kept = await collect_responses(gateway, snapshot)
    if not kept:
        return
    data, num_kept = to_bytes(kept)
    try:
        write_file(path, data)
    except OSError as error:
        logger.warning("%d resumable responses are lost: %s cannot be written: %s", len(kept), path, error)
        return
    logger.info("%d resumable responses saved to %s", num_kept, path)
    if num_kept < len(kept):
        logger.warning(
            "%d more were not saved: the file would be longer than %d bytes", len(kept) - num_kept, MAX_BYTES
        )


async def collect_responses(gateway: ResponsesService, snapshot: Snapshot) -> list[SavedResponse]:
    """Return the resumable responses to save, those that go on first; see `save_responses`."""
    saved = {request.request_id: request for request in snapshot.requests}
    kept = []
    for answer, owner in await gateway.resumable.run_all_to_end():
        history, request = answer.history(), saved.get(answer.response_id)
        if history is not None and (answer.is_over or request is not None):
            engine = None if answer.is_over or request is None else _encoded(snapshot, request)
            kept.append(SavedResponse.of(answer, history, owner, engine))
    # `to_bytes` leaves out the last ones if the file would be too long.
    return sorted(kept, key=lambda one: one.engine is None)


def _encoded(snapshot: Snapshot, request: SavedRequest) -> str:
    return base64.b64encode(attrs.evolve(snapshot, requests=(request,)).to_bytes()).decode()


def restore_responses(path: Path, gateway: ResponsesService) -> None:
    """Restore the responses of the previous server, all or none; the file is removed."""
    try:
        data = read_file(path)
        if data is None:
            return
        restorers = [restorer(gateway, one) for one in from_bytes(data)]
        path.unlink()  # first, so that no response is restored twice
    except (OSError, SnapshotError) as error:
        logger.warning("%s cannot be restored, the server starts without it: %s", path, error)
        set_aside(path)
        return
    for restore in restorers:
        restore()
    logger.info("%d resumable responses restored from %s", len(restorers), path)


def set_aside(path: Path) -> None:
    """Rename a file that cannot be restored."""
    aside = path.with_name(path.name + REFUSED)
    try:
        os.replace(path, aside)
    except OSError as error:
        logger.warning("it cannot be renamed either: %s", error)
    else:
        logger.info("it was renamed to %s", aside)


def restorer(gateway: ResponsesService, kept: SavedResponse) -> Callable[[], None]:
    """Return a function that continues one saved response.

    Raises:
        SnapshotError: it is of another model, or not a response of a server.
    """
    answer, history = kept.answer(gateway.context), kept.history()
    stream = None if kept.engine is None else _stream(gateway, kept.response_id, kept.engine, history)
    return lambda: gateway.continue_restored(answer, kept.owner, stream, ReplaySkipper.after(history))


def _stream(
    gateway: ResponsesService, response_id: str, engine: str, history: ResponseHistory
) -> TokenStream:
    rule = f"response {response_id[:80]} must be the one that its engine knew"
    try:
        snapshot = Snapshot.from_bytes(base64.b64decode(engine, validate=True))
        [saved] = snapshot.requests
        [answer] = saved.answers
    except ValueError as error:
        raise SnapshotError(rule) from error
    if saved.request_id != response_id or history.num_tokens > len(answer.output_token_ids):
        raise SnapshotError(rule)
    return gateway.engine.resume(snapshot)[response_id]
