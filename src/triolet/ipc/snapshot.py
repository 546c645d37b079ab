"""Unfinished requests as a value, and as bytes, to be resumed by another process.

A snapshot holds what the journal knows: the requests, with the seeds that were drawn, and the tokens generated so far.
The engine that restores it computes the rest, and the text is the same as without the interruption. The
bytes are msgpack with names, so that a later version can read what an earlier one wrote; they name no code to run, and
everything in them is checked.
"""

from __future__ import annotations

import math
from typing import Final, Self

import attrs
import cattrs
import cattrs.preconf.msgpack
import msgpack
from cattrs.gen import make_dict_structure_fn

from triolet.core.request.param_validation import MAX_INT64, MIN_INT64
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import FinishReason, TraceHeaders
from triolet.core.step_plan import TokenLogprobs
from triolet.errors import SnapshotError

VERSION: Final = 1
MAX_PROBLEM_CHARS = 300


def _is_int64(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if not MIN_INT64 <= value <= MAX_INT64:
        raise ValueError(f"{attribute.name} must be in [-2**63, 2**63); got {value}")


def _is_finite(instance: object, attribute: attrs.Attribute[float | None], value: float | None) -> None:
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{attribute.name} must be finite; got {value}")


@attrs.frozen(kw_only=True)
class SavedAnswer:
    """One answer so far."""

    seed: int = attrs.field(validator=_is_int64)  # of the sampling noise
    output_token_ids: tuple[int, ...] = ()  # the answer so far
    output_logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if they were asked for
    # Of the prompt from its second token on, if they were asked for: of the first answer, once all are known.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # Set if this answer has ended while another one to the same prompt has not.
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # likewise

    @property
    def has_begun(self) -> bool:
        """True if it has a token, or has ended without one."""
        return bool(self.output_token_ids) or self.finish_reason is not None


@attrs.frozen(kw_only=True)
class SavedRequest:
    """A request that has not finished."""

    request_id: str  # the caller's, or the engine's
    prompt: str | None = None  # the text it was tokenised from, if there was one
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # the caller's, or the model's
    answers: tuple[SavedAnswer, ...]  # as many as `params.n`
    priority: int = attrs.field(default=0, validator=_is_int64)  # see `Engine.generate`
    client: str | None = None  # likewise
    cache_salt: str | None = None  # likewise
    # Adapter that computes the answer, as it was loaded, and the digest of its contents.
    lora_name: str | None = None
    lora_int_id: int = 0
    lora_path: str = ""
    lora_base_model_name: str | None = None
    adapter: str | None = None
    # Soft prompt before the prompt, whose digest is `adapter`.
    prompt_adapter_name: str | None = None
    prompt_adapter_id: int = 0
    prompt_adapter_path: str = ""
    trace_headers: TraceHeaders = ()  # likewise
    owner: str | None = None  # likewise
    # Until its deadline, seconds; None if it has none.
    time_left_s: float | None = attrs.field(default=None, validator=_is_finite)
    # Until its queue timeout, seconds; None if it has none, or has been scheduled.
    queue_time_left_s: float | None = attrs.field(default=None, validator=_is_finite)

    @property
    def num_unfinished(self) -> int:
        """Answers that go on."""
        return sum(answer.finish_reason is None for answer in self.answers)


@attrs.frozen(kw_only=True)
class Snapshot:
    """The unfinished requests of an engine.

    Args:
        architecture: of the model; another engine must have the same one, and the same weights, which is not checked.
        vocab_size: of the model.
        requests: in order of their admission.
    """

    architecture: str
    vocab_size: int
    requests: tuple[SavedRequest, ...] = ()

    def __len__(self) -> int:
        return len(self.requests)

    def to_bytes(self) -> bytes:
        """Return the snapshot as bytes, for a file or a pipe."""
        body = {"version": VERSION, **_CONVERTER.unstructure(self)}
        packed: bytes = msgpack.packb(body, unicode_errors="surrogatepass")
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a snapshot that `to_bytes` wrote.

        Raises:
            SnapshotError: these are no bytes of a snapshot, or of a version that is not known here.
        """
        try:
            body = msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")
            version = body.pop("version")
        except Exception as error:
            raise SnapshotError(f"a snapshot must be what `to_bytes` wrote; got {len(data)} bytes") from error
        if version != VERSION:
            raise SnapshotError(f"a snapshot must be of version {VERSION}; got {str(version)[:20]}")
        try:
            return _CONVERTER.structure(body, cls)
        except Exception as error:  # any check may raise anything on a wrong value
            problem = f"{type(error).__name__}: {text_of_error(error)[:MAX_PROBLEM_CHARS]}"
            raise SnapshotError(f"a snapshot must hold requests as they were saved; {problem}") from error


def text_of_error(error: Exception) -> str:
    """Return the text of an error, if it has one: cattrs' own fails for names that are no strings."""
    try:
        return str(error)
    except Exception:
        return ", ".join(map(repr, error.args))


def strict(converter: cattrs.Converter) -> cattrs.Converter:
    """Return a converter that refuses other types and unknown names instead of adapting them."""

    def exactly(value: object, kind: type) -> object:
        if type(value) is not kind:  # no coercion: "1" is no number, and neither is True
            raise TypeError(f"must be {kind.__name__}, got {type(value).__name__}")
        return value

    for kind in (int, str, bool):
        converter.register_structure_hook(kind, exactly)
    # A string itself, it would be taken for a plain one.
    converter.register_structure_hook(FinishReason, lambda value, kind: kind(value))
    converter.register_structure_hook_factory(
        attrs.has, lambda kind: make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True)
    )
    return converter


_CONVERTER: Final = strict(cattrs.preconf.msgpack.make_converter(detailed_validation=False))
