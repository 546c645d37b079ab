"""Recordings: files that say what determined every answer of an engine, and what the answers were.

A recording is JSON lines. The field `record` of each tells its kind:

    engine    begins the records of one engine; later ones are appended behind
    weights   a version of the model's weights, with the digest of their files
    request   one admitted request: prompt token ids, parameters, seeds, adapter; numbers grow in order of arrival
    end       its answers, as far as they were delivered, and how they ended

A file that a killed process leaves may end within a line, which does not count, and lacks the ends of some requests.
Everything else that is not as written here is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs
import cattrs.preconf.json

from triolet.core.request.request import FinishReason
from triolet.errors import RecordingError, shown
from triolet.ipc.snapshot import MAX_PROBLEM_CHARS, SavedRequest, strict, text_of_error

FORMAT: Final = 1
# Reasons that do not follow from the request: another computation of it goes on behind what was delivered.
CUT_SHORT: Final = frozenset(
    (FinishReason.ABORT, FinishReason.ERROR, FinishReason.DEADLINE, FinishReason.SHUTDOWN)
)


def _is_not_negative(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 0:
        raise ValueError(f"{attribute.name} must be at least 0; got {value}")


def _is_positive(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        raise ValueError(f"{attribute.name} must be at least 1; got {value}")


def _are_plain(instance: object, attribute: attrs.Attribute[Any], value: Mapping[str, Any]) -> None:
    for name, one in value.items():
        if one is not None and type(one) not in (bool, int, float, str):
            raise ValueError(f"{attribute.name}.{name} must be a plain value; got {shown(one)}")


@attrs.frozen(kw_only=True)
class EngineRecord:
    """Engine that computed the requests behind this record."""

    format: int
    version: str  # of triolet
    architecture: str  # of the model
    vocab_size: int = attrs.field(validator=_is_positive)
    # Fields of EngineConfig by name, as far as answers depend on them.
    config: dict[str, Any] = attrs.field(validator=_are_plain)


@attrs.frozen(kw_only=True)
class WeightsRecord:
    """Version of the weights; 0 is the first."""

    version: int = attrs.field(validator=_is_not_negative)
    folder: str
    digest: str | None = None  # of the files' contents
    problem: str | None = None  # reason why there is no digest


@attrs.frozen(kw_only=True)
class RequestRecord:
    """Request at its admission; its answers have seeds and no tokens."""

    number: int = attrs.field(validator=_is_positive)  # in order of arrival
    weight_version: int = attrs.field(validator=_is_not_negative)
    request: SavedRequest


@attrs.frozen(kw_only=True)
class EndedAnswer:
    """Answer as its reader got it."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None

    @property
    def is_whole(self) -> bool:
        """True if the request itself, and nothing from outside, ended the answer."""
        return self.finish_reason not in CUT_SHORT


@attrs.frozen(kw_only=True)
class EndRecord:
    """Ending of a request, when its reader left."""

    number: int = attrs.field(validator=_is_positive)
    weight_version: int = attrs.field(validator=_is_not_negative)  # of the newest token
    answers: tuple[EndedAnswer, ...]  # in the order of their index
    failure: str | None = None  # cause of finish_reason error


Record = EngineRecord | WeightsRecord | RequestRecord | EndRecord
KINDS: Final[Mapping[str, type[Record]]] = {
    "engine": EngineRecord,
    "weights": WeightsRecord,
    "request": RequestRecord,
    "end": EndRecord,
}
_NAMES: Final = {kind: name for name, kind in KINDS.items()}
_CONVERTER: Final = strict(cattrs.preconf.json.make_converter(detailed_validation=False))


def encode(record: Record) -> bytes:
    """Return a record as a line."""
    body = _CONVERTER.unstructure(record)
    if isinstance(record, RequestRecord) and (bias := record.request.params.logit_bias) is not None:
        body["request"]["params"]["logit_bias"] = [
            list(pair) for pair in bias.items()
        ]  # JSON's keys are texts
    return json.dumps({"record": _NAMES[type(record)], **body}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes, where: str) -> Record:
    """Return the record of a line.

    Args:
        where: name of the line, for the error.
    Raises:
        RecordingError: it is none; names what is wrong.
    """
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{where}: a line of a recording must be JSON; {error}") from None
    if not isinstance(body, dict) or (kind := KINDS.get(str(body.get("record")))) is None:
        raise RecordingError(
            f"{where}: record must be one of {', '.join(KINDS)}; "
            f"got {shown(body.get('record') if isinstance(body, dict) else body)}"
        )
    del body["record"]
    try:
        if kind is RequestRecord and body["request"]["params"].get("logit_bias") is not None:
            body["request"]["params"]["logit_bias"] = dict(body["request"]["params"]["logit_bias"])
        return _CONVERTER.structure(body, kind)
    except Exception as error:  # any check may raise anything on a wrong value
        problem = f"{type(error).__name__}: {text_of_error(error)[:MAX_PROBLEM_CHARS]}"
        raise RecordingError(
            f"{where}: fields of a recording must be as they were written; {problem}"
        ) from None


@attrs.frozen(kw_only=True)
class RecordedRequest:
    """One request of a recording, with what its answer depends on."""

    engine: EngineRecord
    weights: WeightsRecord | None  # None if the engine ended before they were known
    begin: RequestRecord
    end: EndRecord | None  # None if the engine was killed, or the record was lost

    @property
    def request_id(self) -> str:
        """Id that the caller or the engine gave."""
        return self.begin.request.request_id

    @property
    def obstacle(self) -> str | None:
        """Reason why the request cannot be replayed; None if it can."""
        if self.end is None:
            return "its end was not recorded"
        if self.end.weight_version != self.begin.weight_version:
            return (
                f"the weights changed from version {self.begin.weight_version} to {self.end.weight_version} "
                "while it was computed"
            )
        if self.weights is None or self.weights.digest is None:
            problem = self.weights.problem if self.weights is not None else None
            return f"no digest of the model is known ({problem or 'the engine ended before it was computed'})"
        return None


@attrs.define
class _Section:
    """Records of one engine while they are read."""

    engine: EngineRecord
    weights: dict[int, WeightsRecord] = attrs.field(factory=dict)
    begins: dict[int, RequestRecord] = attrs.field(factory=dict)
    ends: dict[int, EndRecord] = attrs.field(factory=dict)

    def add(self, record: WeightsRecord | RequestRecord | EndRecord) -> None:
        if isinstance(record, WeightsRecord):
            self.weights[record.version] = record
        elif isinstance(record, RequestRecord):
            self._check_request(record)
            self.begins[record.number] = record
        else:
            self._check_end(record)
            self.ends[record.number] = record

    def _check_request(self, record: RequestRecord) -> None:
        request = record.request
        if record.number in self.begins:
            raise ValueError(f"number must be unique; got {record.number} a second time")
        if len(request.answers) != request.params.n:
            raise ValueError(f"answers must be {request.params.n} (n); got {len(request.answers)}")
        if not request.prompt_token_ids:
            raise ValueError("prompt_token_ids must not be empty")
        self._check_tokens("prompt_token_ids", request.prompt_token_ids)

    def _check_end(self, record: EndRecord) -> None:
        begin = self.begins.get(record.number)
        if begin is None or record.number in self.ends:
            raise ValueError(f"number must be that of a request that has not ended; got {record.number}")
        if len(record.answers) != len(begin.request.answers):
            raise ValueError(f"answers must be {len(begin.request.answers)}; got {len(record.answers)}")
        for answer in record.answers:
            self._check_tokens("token_ids", answer.token_ids)

    def _check_tokens(self, field: str, token_ids: Sequence[int]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.engine.vocab_size:
            raise ValueError(f"{field} must be in [0, {self.engine.vocab_size})")

    def requests(self) -> list[RecordedRequest]:
        return [
            RecordedRequest(
                engine=self.engine,
                weights=self.weights.get(begin.weight_version),
                begin=begin,
                end=self.ends.get(number),
            )
            for number, begin in self.begins.items()
        ]


def check_first_line(line: bytes, name: str) -> EngineRecord:
    """Return the record that every recording begins with.

    Raises:
        RecordingError: this is another one, or of a format that is not known here.
    """
    record = decode(line, f"{name}:1")
    if not isinstance(record, EngineRecord):
        raise RecordingError(f"{name}:1: the first record must be of kind engine")
    if record.format != FORMAT:
        raise RecordingError(f"{name}:1: format must be {FORMAT}; got {shown(record.format)}")
    return record


def read_recording(lines: Iterable[bytes], name: str = "line") -> list[RecordedRequest]:
    """Return the requests of a recording, in the order of their arrival.

    Args:
        lines: of the file, each with its end.
        name: of the file, for errors.
    Raises:
        RecordingError: it is no recording; names the line, the field, the rule and what came.
    """
    sections: list[_Section] = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):  # the process was killed while it wrote
            break
        where = f"{name}:{number}"
        if not sections:
            sections.append(_Section(check_first_line(line, name)))
            continue
        record = decode(line, where)
        if isinstance(record, EngineRecord):
            if record.format != FORMAT:
                raise RecordingError(f"{where}: format must be {FORMAT}; got {shown(record.format)}")
            sections.append(_Section(record))
            continue
        try:
            sections[-1].add(record)
        except ValueError as error:
            raise RecordingError(f"{where}: {error}") from None
    if not sections:
        raise RecordingError(
            f"{name}: a recording must begin with a record of kind engine; got an empty file"
        )
    return [request for section in sections for request in section.requests()]


@attrs.frozen(kw_only=True)
class Departure:
    """First difference of an answer from the recorded one."""

    answer: int  # index among the answers to the prompt
    position: int  # of the token in the answer
    expected: int | None  # recorded token; None for the end
    got: int | None  # computed token; None for the end


def departure_of(index: int, recorded: EndedAnswer, token_ids: Sequence[int]) -> Departure | None:
    """Return where an answer departs from the recorded one; None if it does not.

    Of an answer that was cut short, what was delivered is compared.
    """
    expected: Sequence[int | None] = recorded.token_ids
    got: Sequence[int | None] = token_ids
    if recorded.is_whole:  # None is the end, which counts as a token of its own
        expected, got = [*expected, None], [*got, None]
    else:
        got = [*got, None]
    for position, token_id in enumerate(expected):
        if token_id != got[position]:
            return Departure(answer=index, position=position, expected=token_id, got=got[position])
    return None
