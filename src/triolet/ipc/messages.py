"""Messages between the engine and the runner's process: values of the core.

    engine --> process   EngineConfig   load this model         process --> engine   LoadProgress   on the way
                                                                                     ModelInfo      loaded
                         StepPlan       compute this step, or run                    StepResult     computed
                         Halt           end the run                                  Failure        it raised

A run is answered with a `StepResult` for each step, and a `Halt` with nothing: one that comes too late is about a run
that is over.

On the way a message is [name of its class, fields], as msgpack, in a frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar, cast

import attrs
import msgpack

from triolet.config.engine import EngineConfig
from triolet.core.load_progress import LoadProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult
from triolet.errors import FrameError
from triolet.ipc.converter import CONVERTER, layout_of
from triolet.ipc.failures import Failure
from triolet.ipc.frames import FrameReader, pack_frame

MAX_PROBLEM_CHARS = 300  # of what a wrong message is refused for

M = TypeVar("M")


@attrs.frozen
class Halt:
    """Request to end the current run after the step that is being computed."""


Request = EngineConfig | StepPlan | Halt
Reply = LoadProgress | ModelInfo | StepResult | Failure


@attrs.frozen(eq=False)
class Way(Generic[M]):
    """One direction of a connection: its messages and their size limits.

    Args:
        kinds: their classes.
        max_bytes: of a message.
        max_items: of a list in one.
        layout: checksum over the fields of all messages, both ways.
    """

    kinds: tuple[type, ...]
    max_bytes: int
    max_items: int
    layout: int

    def pack(self, message: M) -> bytes:
        """Return the frame of a message.

        Raises:
            FrameError: it is too long.
        """
        body = [type(message).__name__, CONVERTER.unstructure(message)]
        # A request id may be any text, also one that is not well-formed Unicode.
        payload = msgpack.packb(body, unicode_errors="surrogatepass")
        return pack_frame(payload, layout=self.layout, max_bytes=self.max_bytes)

    def reader(self) -> FrameReader:
        """Return a reader of the frames of this direction."""
        return FrameReader(layout=self.layout, max_bytes=self.max_bytes)

    def unpack(self, payload: bytes) -> M:
        """Return the message of a frame.

        Raises:
            FrameError: it is no message of this direction.
        """
        try:
            name, fields = self._values(payload)
            kind = {kind.__name__: kind for kind in self.kinds}[name]
            return cast(M, CONVERTER.structure(fields, kind))
        except Exception as error:  # any check may raise anything on a wrong value
            names = ", ".join(kind.__name__ for kind in self.kinds)
            problem = f"{type(error).__name__}: {str(error)[:MAX_PROBLEM_CHARS]}"
            raise FrameError(
                f"a message must be one of {names}; got {len(payload)} bytes: {problem}"
            ) from error

    def _values(self, payload: bytes) -> Any:
        return msgpack.unpackb(
            payload,
            strict_map_key=False,  # token ids are keys, too
            unicode_errors="surrogatepass",
            max_array_len=self.max_items,
            max_map_len=self.max_items,
        )

    def messages(self, reader: FrameReader) -> Iterator[M]:
        """Iterate over the messages that have arrived whole."""
        while (payload := reader.next_payload()) is not None:
            yield self.unpack(payload)


_REQUESTS: Final = (EngineConfig, StepPlan, Halt)
_REPLIES: Final = (LoadProgress, ModelInfo, StepResult, Failure)
LAYOUT: Final = layout_of((*_REQUESTS, *_REPLIES))

# A plan may start a hundred requests with a million prompt tokens each, if all but one of each are in the prefix cache.
# An answer is short, unless a hundred requests want the log-probabilities of a whole vocabulary.
REQUESTS: Final = Way[Request](_REQUESTS, max_bytes=2**29, max_items=2**24, layout=LAYOUT)
REPLIES: Final = Way[Reply](_REPLIES, max_bytes=2**29, max_items=2**20, layout=LAYOUT)
