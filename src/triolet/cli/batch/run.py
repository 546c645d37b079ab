"""Run of a batch file in OpenAI's format: one request a line in, one answer a line out.

    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "...", "custom_id": "1", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

Requests go to the ASGI app of the server, without a socket, so that routes, checks and errors are the server's own.

A run that was interrupted is continued by the same command. An answer is appended in one write, so that the file has
whole lines, but perhaps for the last one after a crash of the machine or of the program; if that is the beginning of an
answer, it is cut off. Requests whose custom_id is in the file are not asked again, and no answer stands twice.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import IO, Any, Final

import attrs
import click
import trio
from starlette.types import Message

from triolet.cli.failures import CommandFailure
from triolet.cli.interrupts import Interrupts
from triolet.cli.loading import opened
from triolet.cli.screen import Screen
from triolet.config.engine import EngineConfig
from triolet.config.server import GatewayConfig
from triolet.engine.engine import Engine
from triolet.errors import shown
from triolet.server import create_app

URLS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/score",
    "/v1/rerank",
)
FIELDS: Final = frozenset(("custom_id", "method", "url", "body"))
ANSWER_FIELDS: Final = frozenset(("id", "custom_id", "response", "error"))
ANSWER_BEGINNING: Final = b'{"id": "batch_'  # of every line that `AppCall.answer` makes
# The file is the user's own: what guards a server against its clients would refuse long lines of it.
UNGUARDED: Final = GatewayConfig(
    max_body_bytes=2**30,
    max_input_bytes=2**40,
    max_input_bytes_per_client=2**40,
    max_json_values=2**30,
    max_json_members=2**30,
)


class BatchError(CommandFailure):
    """File of a batch that cannot be used."""


@attrs.frozen(kw_only=True)
class BatchLine:
    """One request of a batch."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


@attrs.define
class BatchCounts:
    """Lines of a batch by their outcome."""

    num_before: int = 0  # answered by an earlier run
    num_answered: int = 0
    num_refused: int = 0  # answered with an error


def run(source: Path, target: Path, config: EngineConfig, concurrency: int) -> None:
    """Answer the requests of `source` into `target`; say at the end how many there were.

    Raises:
        BatchError: a file cannot be read or written, or has a wrong line, and nothing was asked; or `source` has lost
            lines since, and its other requests are answered.
    """
    # A model is loaded only for a file that is right.
    num_lines = check_input(source)
    done = finished_ids(target)

    async def body(interrupts: Interrupts) -> None:
        async with AsyncExitStack() as stack:
            # Keys are for the clients of a server.
            engine = await opened(stack, attrs.evolve(config, api_keys=()))
            batch = Batch(engine, concurrency, num_lines)
            counts = await batch.run(source, target, done)
        click.echo(
            f"triolet: {counts.num_answered} answered, {counts.num_refused} refused, "
            f"{counts.num_before} answered before",
            err=True,
        )

    Interrupts().run(body)


def check_input(path: Path) -> int:
    """Check every line of a batch; return how many requests it has.

    Raises:
        BatchError: a line is wrong, or a custom_id comes twice; names the line. Or the file can be read only once.
    """
    if not path.is_file():  # requests are not kept: they are read a second time when they are asked
        raise BatchError(f"{path} must be a file that can be read twice; it is a pipe or a device")
    first_lines: dict[str, int] = {}
    for number, line in read_lines(path):
        if (first := first_lines.setdefault(line.custom_id, number)) != number:
            raise BatchError(
                f"{path}:{number}: custom_id must be unique; {line.custom_id!r} is in line {first}, too"
            )
    return len(first_lines)


def read_lines(path: Path) -> Iterator[tuple[int, BatchLine]]:
    """Yield the requests of a batch with their line numbers; empty lines are left out.

    Raises:
        BatchError: the file cannot be read, or a line is wrong.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, read_line(text, f"{path}:{number}")
    except (OSError, UnicodeError) as error:
        raise BatchError(f"{path} must be a readable text file; {error}") from None


def read_line(text: str, where: str) -> BatchLine:
    """Return the request of a line.

    Raises:
        BatchError: it is wrong; names the field, the rule and what came.
    """
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BatchError(f"{where}: the line must be JSON; {error}") from None
    if not isinstance(line, dict) or line.keys() != FIELDS:
        raise BatchError(
            f"{where}: the line must have the fields custom_id, method, url and body; got {shown(line)}"
        )
    custom_id, url, body = line["custom_id"], line["url"], line["body"]
    if not isinstance(custom_id, str) or not custom_id:
        raise BatchError(f"{where}: custom_id must be a non-empty text; got {shown(custom_id)}")
    if any("\ud800" <= char <= "\udfff" for char in custom_id):  # no answer could be written for it
        raise BatchError(f"{where}: custom_id must have no lone surrogates; got {shown(custom_id)}")
    if line["method"] != "POST":
        raise BatchError(f"{where}: method must be POST; got {shown(line['method'])}")
    if url not in URLS:
        raise BatchError(f"{where}: url must be one of {', '.join(URLS)}; got {shown(url)}")
    if not isinstance(body, dict):
        raise BatchError(f"{where}: body must be an object; got {shown(body)}")
    if body.get("stream"):
        raise BatchError(f"{where}: body.stream must be left out or false; got {shown(body['stream'])}")
    return BatchLine(custom_id=custom_id, url=url, body=body)


def finished_ids(path: Path) -> set[str]:
    """Return the ids that a file has answers for; the beginning of an answer in its last line is cut off.

    Raises:
        BatchError: the file has something else than answers of a batch, and stays as it is.
    """
    if not path.exists():
        return set()
    try:
        with path.open("rb+") as file:
            return _finished_in(file, path)
    except OSError as error:
        raise BatchError(f"{path} must be a file that can be written; {error}") from None


def _finished_in(file: IO[bytes], path: Path) -> set[str]:
    found: set[str] = set()
    num_whole_bytes = 0
    for number, line in enumerate(file, 1):
        try:
            found.add(_answered_id(json.loads(line)))
        except (ValueError, RecursionError):
            begins = line.startswith(ANSWER_BEGINNING) or ANSWER_BEGINNING.startswith(line)
            if line.endswith(b"\n") or not begins:
                raise BatchError(
                    f"{path}:{number}: the line must be an answer of a batch; got {shown(line)}"
                ) from None
            file.truncate(num_whole_bytes)
            break
        if not line.endswith(b"\n"):  # an answer that an editor has taken the end from
            file.write(b"\n")
        num_whole_bytes += len(line)
    return found


def _answered_id(answer: object) -> str:
    """Return the custom_id of an answer.

    Raises:
        ValueError: the object has another form.
    """
    if not isinstance(answer, dict) or answer.keys() != ANSWER_FIELDS:
        raise ValueError
    if not isinstance(custom_id := answer["custom_id"], str):
        raise ValueError
    return custom_id


class Batch:
    """Requests of a file, a number of them at the same time.

    Args:
        engine: a running engine.
        concurrency: most requests at the same time.
        num_lines: requests of the file when it was checked.
    """

    def __init__(self, engine: Engine, concurrency: int, num_lines: int) -> None:
        self._engine, self._concurrency, self._num_lines = engine, concurrency, num_lines
        self._app = create_app(engine, UNGUARDED)
        self._counts = BatchCounts()

    async def run(self, source: Path, target: Path, done: set[str]) -> BatchCounts:
        """Answer the requests whose ids are not in `done`, and append the answers to `target`.

        Raises:
            EngineDead: the engine has died; the requests that it had are not in the file.
            BatchError: `source` has lost lines since it was checked; what it still had is answered.
        """
        places = trio.Semaphore(self._concurrency)
        with target.open("ab", buffering=0) as file, self._bar() as progress:
            async with trio.open_nursery() as nursery:
                for _, line in read_lines(source):
                    if line.custom_id in done:
                        self._counts.num_before += 1
                        progress()
                        continue
                    await places.acquire()
                    nursery.start_soon(self._answer, line, file, places, progress)
        counts = self._counts
        if (num_read := counts.num_before + counts.num_answered + counts.num_refused) < self._num_lines:
            raise BatchError(
                f"{source} must stay as it is during a run; it had {self._num_lines} requests, and then {num_read}"
            )
        return counts

    async def _answer(self, line: BatchLine, file: IO[bytes], places: trio.Semaphore, progress: Any) -> None:
        try:
            body = {"model": self._engine.model_name, **line.body}
            call = AppCall(line.url, json.dumps(body).encode())
            await self._app(call.scope, call.receive, call.send)
        finally:
            places.release()
        if call.status >= 500:
            self._engine.check_health()  # an engine that has died would fail all that follow
        if call.status == 200:
            self._counts.num_answered += 1
        else:
            self._counts.num_refused += 1
        # One write, without a checkpoint: an interruption leaves no part of a line.
        file.write(json.dumps(call.answer(line.custom_id), ensure_ascii=False).encode() + b"\n")
        progress()

    def _bar(self) -> Any:
        """Return the scope of a progress bar on stderr: a function to call after each request."""
        if sys.stderr is None or not Screen.of(sys.stderr).colour:
            return nullcontext(lambda: None)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        task = bar.add_task("", total=self._num_lines)
        return _Advancing(bar, lambda: bar.advance(task))


@attrs.frozen
class _Advancing:
    """Scope of a progress bar whose value is the function that advances it."""

    bar: Any
    advance: Any

    def __enter__(self) -> Any:
        self.bar.start()
        return self.advance

    def __exit__(self, *error: object) -> None:
        self.bar.stop()


@attrs.define(eq=False)
class AppCall:
    """One request to an ASGI app in this process."""

    url: str
    body: bytes
    status: int = attrs.field(default=0, init=False)
    _request_id: str = attrs.field(default="", init=False)
    _received: bytearray = attrs.field(factory=bytearray, init=False)
    _was_read: bool = attrs.field(default=False, init=False)

    @property
    def scope(self) -> dict[str, Any]:
        """Scope of the request, which comes from this machine."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self.url,
            "raw_path": self.url.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost"), (b"content-length", str(len(self.body)).encode())],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
        }

    async def receive(self) -> Message:
        """Return the body, once; the client then stays until it is cancelled."""
        if self._was_read:
            await trio.sleep_forever()
        self._was_read = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Take a part of the response."""
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = dict(message["headers"])
            self._request_id = headers.get(b"x-request-id", b"").decode()
        else:
            self._received += message.get("body", b"")

    def answer(self, custom_id: str) -> dict[str, Any]:
        """Return the line of the answer; a refusal is in the body of its response, as OpenAI has it."""
        response = {
            "status_code": self.status,
            "request_id": self._request_id,
            "body": json.loads(bytes(self._received)),
        }
        return {
            "id": f"batch_{self._request_id}",
            "custom_id": custom_id,
            "response": response,
            "error": None,
        }
