"""Serialization of resumable responses as JSON lines: what one server saves for the next one.

The first line holds the format, its version and the number of lines that follow. Each of these is a response: its
request and its deltas. The next server makes the same events of them, with the same sequence numbers, and its engine
continues where the last one stopped. The engine's own part is opaque here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from triolet.core.output.outputs import CompletionOutput, RequestOutput
from triolet.core.request.param_validation import ApiFamily
from triolet.core.request.request import FinishReason, RequestMetrics
from triolet.errors import InvalidRequest, SnapshotError
from triolet.protocol.errors import WireError
from triolet.protocol.json.encoding import EncodedList
from triolet.protocol.json.structuring import CONVERTER, Wrong, structure
from triolet.protocol.responses.requests import CreateResponse
from triolet.protocol.responses.response import ResponseBuilder
from triolet.protocol.responses.response_items import Input, NewId, ResponseDelta, ResponseHistory
from triolet.protocol.responses.session import ResponsesContext
from triolet.protocol.sampling import write_sampling

FORMAT: Final = "triolet resumable responses"
VERSION: Final = 1
MAX_BYTES: Final = 2**28  # a thousand responses of 256 KiB: longer than most chats


@attrs.frozen(kw_only=True)
class SavedOutput:
    """Fields of the last engine output that are not in the deltas; see `RequestOutput`."""

    prompt: str | None = None
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int
    num_cache_creation_tokens: int
    metrics: RequestMetrics

    @classmethod
    def of(cls, output: RequestOutput) -> SavedOutput:
        """Return the saved fields of an output."""
        return cls(**{field.name: getattr(output, field.name) for field in attrs.fields(cls)})

    def output(self, response_id: str) -> RequestOutput:
        """Return an output with the saved fields."""
        fields = {field.name: getattr(self, field.name) for field in attrs.fields(SavedOutput)}
        nothing = CompletionOutput(index=0, text="", token_ids=())
        return RequestOutput(request_id=response_id, outputs=(nothing,), finished=False, **fields)


@attrs.frozen(kw_only=True)
class SavedResponse:
    """Saved response."""

    response_id: str
    owner: str | None = None  # name of the key that may read it
    request: Mapping[str, Any]  # the fields of its request, less its input
    model: str  # name of the model
    created_at: int  # seconds since the epoch
    chat: tuple[Mapping[str, Any], ...] = ()  # messages before the answer
    pieces: tuple[ResponseDelta, ...] = ()  # see `ResponseHistory`, as the next three
    item_ids: tuple[str, ...] = ()  # likewise
    finish_reason: str | None = None  # likewise
    completed_at: int = 0  # likewise
    output: SavedOutput | None = None
    engine: str | None = None  # what the engine knows of it, if it has not ended

    @classmethod
    def of(
        cls, answer: ResponseBuilder, history: ResponseHistory, owner: str | None, engine: str | None
    ) -> SavedResponse:
        """Return what is saved of a response.

        Args:
            answer: the response.
            owner: name of the key that may read it.
            engine: what the engine knows of it, if it has not ended.
        """
        return cls(
            response_id=answer.response_id,
            owner=owner,
            request=_fields(answer.request),
            model=answer.model,
            created_at=answer.created_at,
            chat=answer.chat,
            pieces=history.pieces,
            item_ids=history.item_ids,
            finish_reason=history.finish_reason,
            completed_at=history.completed_at,
            output=None if history.output is None else SavedOutput.of(history.output),
            engine=engine,
        )

    def history(self) -> ResponseHistory:
        """Return the history of the saved response."""
        return ResponseHistory(
            pieces=self.pieces,
            item_ids=self.item_ids,
            output=None if self.output is None else self.output.output(self.response_id),
            finish_reason=None if self.finish_reason is None else FinishReason(self.finish_reason),
            completed_at=self.completed_at,
        )

    def answer(self, context: ResponsesContext) -> ResponseBuilder:
        """Return the response as it was.

        Raises:
            SnapshotError: the response cannot be one of this server.
        """
        try:
            return self._answer(context)
        except (WireError, InvalidRequest, ValueError, LookupError, TypeError, AttributeError) as error:
            raise SnapshotError(
                f"response {self.response_id[:80]} cannot be one of this server: {error}"
            ) from error

    def _answer(self, context: ResponsesContext) -> ResponseBuilder:
        request = CreateResponse.of({**self.request, "input": []})
        history = self.history()
        if (history.finish_reason is None) != (self.engine is not None):
            raise ValueError("either it has ended, or an engine knows of it")
        if history.pieces and history.output is None:
            raise ValueError("it has pieces, and no output that they are of")
        planned = context.planned(request)
        answer = ResponseBuilder(
            response_id=self.response_id,
            request=request,
            params=planned.params,
            model=self.model,
            created_at=self.created_at,
            new_id=_first(self.item_ids, context.new_id),
            plan=planned.tools,
            echo=planned.echo,
            chat=tuple(map(dict, self.chat)),
            survives_restart=context.saves_snapshot,
        )
        answer.replay(history)
        return answer


def _fields(request: CreateResponse) -> dict[str, Any]:
    """Return a request as a client would write it, without its input, which the chat already holds."""
    fields = attrs.asdict(attrs.evolve(request, input=Input(()), client_metadata=None), recurse=False)
    fields |= write_sampling(fields.pop("sampling"), ApiFamily.RESPONSES)
    for name in ("text", "reasoning"):
        fields[name] = None if fields[name] is None else attrs.asdict(fields[name])
    return {name: value for name, value in fields.items() if name != "input" and value is not None}


def _first(ids: Iterable[str], new_id: NewId) -> NewId:
    rest = iter(ids)
    return lambda prefix: next(rest, None) or new_id(prefix)


# ------------------------------------------------------------------------------------------------ text


def to_bytes(answers: Iterable[SavedResponse], max_bytes: int = MAX_BYTES) -> tuple[bytes, int]:
    """Serialize responses, up to a limit.

    Args:
        answers: the most important first.
        max_bytes: how much they may be; what is left out is what would make them more.
    Returns:
        The lines, and the number of answers in them.
    """
    lines: list[bytes] = []
    room = max_bytes - len(_head(10**9))
    for answer in answers:
        line = _line(answer)
        if len(line) <= room:
            room -= len(line)
            lines.append(line)
    return b"".join([_head(len(lines)), *lines]), len(lines)


def from_bytes(data: bytes) -> tuple[SavedResponse, ...]:
    """Parse the lines of `to_bytes`.

    Raises:
        SnapshotError: with what is wrong.
    """
    head, *lines = data.split(b"\n")
    known = _read(head)
    if known.get("format") != FORMAT:
        raise SnapshotError(
            f"it must be what a server wrote at its end; got {len(data)} bytes of something else"
        )
    if known.get("version") != VERSION:
        raise SnapshotError(f"it must be of version {VERSION}; got {str(known.get('version'))[:20]}")
    if lines[-1:] != [b""] or len(lines) - 1 != known.get("num_responses"):
        raise SnapshotError(
            f"it must hold {str(known.get('num_responses'))[:20]} whole lines; got {len(lines) - 1}"
        )
    try:
        answers = tuple(structure(_read(line), SavedResponse) for line in lines[:-1])
    except WireError as error:
        raise SnapshotError(f"it must hold responses as they were kept: {error.message}") from error
    if len({answer.response_id for answer in answers}) < len(answers):
        raise SnapshotError("it must hold every response once")
    return answers


def _head(num_responses: int) -> bytes:
    head = {"format": FORMAT, "version": VERSION, "num_responses": num_responses}
    return json.dumps(head).encode() + b"\n"


def _line(answer: SavedResponse) -> bytes:
    return json.dumps(attrs.asdict(answer), separators=(",", ":")).encode() + b"\n"


def _read(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise SnapshotError("it must be lines of JSON objects")
    return value


def _logprobs(value: Any, _: Any) -> EncodedList:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Wrong("a list of objects", value)
    return EncodedList(value)


CONVERTER.register_structure_hook(EncodedList, _logprobs)


# ------------------------------------------------------------------------------------------- going on


@attrs.define
class ReplaySkipper:
    """Filter that skips the outputs which the previous server has sent already."""

    num_chars: int  # sent characters
    num_tokens: int  # sent tokens

    @classmethod
    def after(cls, history: ResponseHistory) -> ReplaySkipper:
        """Return the filter for a replayed response."""
        return cls(history.num_chars, history.num_tokens)

    def of(self, output: RequestOutput) -> RequestOutput | None:
        """Return the new part of the next output; None if nothing is new."""
        [completion] = output.outputs
        num_chars = min(self.num_chars, len(completion.text))
        num_tokens = min(self.num_tokens, len(completion.token_ids))
        self.num_chars -= num_chars
        self.num_tokens -= num_tokens
        logprobs = completion.logprobs
        new = attrs.evolve(
            completion,
            text=completion.text[num_chars:],
            token_ids=completion.token_ids[num_tokens:],
            logprobs=None if logprobs is None else logprobs[num_tokens:],
        )
        if not (new.text or new.token_ids or new.finish_reason):
            return None
        return attrs.evolve(output, outputs=(new,))
