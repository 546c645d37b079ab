"""Leaving the resumable responses of a server to the next one, in a file.

The file is there, whole, or it is not; nobody else may read it, for it holds what clients have asked and been answered.
One that can not be taken up harms nothing: the server says why, puts it aside and begins without it.
"""

from __future__ import annotations

import base64
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

from triolet.engine.token_stream import TokenStream
from triolet.errors import ConfigError, SnapshotError
from triolet.ipc.snapshot import SavedRequest, Snapshot
from triolet.protocol.responses.replay import ResponseHistory
from triolet.protocol.responses.snapshot import MAX_BYTES, ReplaySkipper, SavedResponse, from_bytes, to_bytes
from triolet.server.responses.service import ResponsesService

REFUSED: Final = ".refused"

log = logging.getLogger("triolet.gateway")


def check_directory(path: str | None) -> None:
    """Find out at the beginning whether there can be a file at the end.

    Raises:
        ConfigError: there can not.
    """
    if path is None:
        return
    directory = Path(path).absolute().parent
    if not os.access(directory, os.W_OK | os.X_OK) or not directory.is_dir() or Path(path).is_dir():
        raise ConfigError("snapshot", "a file in a directory that can be written to", path)


# ----------------------------------------------------------------------------------------- the file


def write_file(path: Path, data: bytes) -> None:
    """Write a file that is there as a whole, for nobody but this user.

    Raises:
        OSError: it can not be written; what was there before still is.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)  # of mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes | None:
    """What is in it; None if there is none.

    Raises:
        OSError: it can not be read.
        SnapshotError: it is too long to be one.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    if len(data) > max_bytes:
        raise SnapshotError(f"it must have at most {max_bytes} bytes")
    return data


# ---------------------------------------------------------------------------------------- the way down


async def save_responses(path: Path, gateway: ResponsesService, snapshot: Snapshot) -> None:
    """Write down every resumable response that has not failed, if there are any.

    Args:
        path: of the file.
        gateway: whose; it has been drained.
        snapshot: of its engine, which has been drained, too.
    """
    kept = await collect_responses(gateway, snapshot)
    if not kept:
        return
    data, num_kept = to_bytes(kept)
    try:
        write_file(path, data)
    except OSError as error:
        log.warning("%d resumable responses are lost: %s can not be written: %s", len(kept), path, error)
        return
    log.info("%d resumable responses are in %s", num_kept, path)
    if num_kept < len(kept):
        log.warning("%d more would have made it longer than %d bytes", len(kept) - num_kept, MAX_BYTES)


async def collect_responses(gateway: ResponsesService, snapshot: Snapshot) -> list[SavedResponse]:
    """The resumable responses of a gateway, those first that have not ended; see `save_responses`."""
    saved = {request.request_id: request for request in snapshot.requests}
    kept = []
    for answer, owner in await gateway.resumable.run_all_to_end():
        history, request = answer.history(), saved.get(answer.response_id)
        if history is not None and (answer.is_over or request is not None):
            engine = None if answer.is_over or request is None else _text(snapshot, request)
            kept.append(SavedResponse.of(answer, history, owner, engine))
    return sorted(kept, key=lambda one: one.engine is None)


def _text(snapshot: Snapshot, request: SavedRequest) -> str:
    return base64.b64encode(attrs.evolve(snapshot, requests=(request,)).to_bytes()).decode()


# ------------------------------------------------------------------------------------------ the way up


def restore_responses(path: Path, gateway: ResponsesService) -> None:
    """Go on with what the last server has left in a file, all of it or nothing; the file is removed."""
    try:
        data = read_file(path)
        if data is None:
            return
        taken = [_restored(gateway, one) for one in from_bytes(data)]
        path.unlink()  # first: nobody is to take it up twice
    except (OSError, SnapshotError) as error:
        log.warning("%s can not be taken up, the server begins without it: %s", path, error)
        _set_aside(path)
        return
    for begin in taken:
        begin()
    log.info("going on with %d resumable responses from %s", len(taken), path)


def _set_aside(path: Path) -> None:
    aside = path.with_name(path.name + REFUSED)
    try:
        os.replace(path, aside)
    except OSError as error:
        log.warning("nor can it be put aside: %s", error)
    else:
        log.info("it is kept as %s", aside)


def _restored(gateway: ResponsesService, kept: SavedResponse) -> Callable[[], None]:
    """What has the gateway go on with a response.

    Raises:
        SnapshotError: it was a server of another model, or this is no response of one.
    """
    answer, history = kept.answer(gateway.context), kept.history()
    stream = None if kept.engine is None else _stream(gateway, kept.response_id, kept.engine, history)
    return lambda: gateway.resume_generation(answer, kept.owner, stream, ReplaySkipper.after(history))


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
