"""What an engine has still to answer of one turn of a WebSocket: pure, messages and events in, the end of the turn out.

    response.create    its terminal event, or an error
    response.steer     a terminal event or an error of the successor, or `response.steer.failed`
    response.cancel    the terminal event of what it ends, or, if that was over, an error behind it
    response.resume    a terminal event, an error, or nothing where the client had the last event

So that the last one has an end, too, a message without a meaning is sent behind it (`end_mark`): the error of a
`response.resume` waits for its place in the lane.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from triolet.router.continuation import TERMINAL_TYPES, Event

_ENDS: Final = (*TERMINAL_TYPES, "response.steer.failed", "error")


@attrs.define(eq=False)
class OwedAnswers:
    """Answers of one engine that are to come until a turn is over.

    Args:
        payload: message that began the turn.
    """

    payload: Mapping[str, Any]
    num_ends: int = 1  # terminal events, errors and failed steers that are to come
    num_cancels: int = 0  # that no event has answered
    has_mark: bool = attrs.field(init=False)  # the end mark is unanswered

    def __attrs_post_init__(self) -> None:
        # Any other resume is refused for what it is, in the same words as the mark.
        self.has_mark = self._kind == "response.resume" and isinstance(self.payload.get("response_id"), str)

    @property
    def end_mark(self) -> dict[str, Any] | None:
        """Message to send behind the one that began the turn; None if there is none to send."""
        if not self.has_mark:
            return None
        lane = {"stream_id": self.payload["stream_id"]} if "stream_id" in self.payload else {}
        return {"type": "response.resume", **lane}

    @property
    def _kind(self) -> object:
        return self.payload.get("type")

    @property
    def is_over(self) -> bool:
        """True if nothing more is to come."""
        return self.num_ends <= 0 and self.num_cancels <= 0

    def add(self, control: Mapping[str, Any]) -> None:
        """Note a `response.steer` or a `response.cancel` about the turn."""
        if control["type"] == "response.steer":
            self.num_ends += 1
        else:
            self.num_cancels += 1

    def is_of_mark(self, event: Event) -> bool:
        """Return True for the answer to the end mark, which the client does not get."""
        if not self.has_mark or event["type"] != "error":
            return False
        error = event["error"]
        if (error.get("code"), error.get("param")) == ("missing_required_parameter", "response_id"):
            self.num_ends = self.num_cancels = 0
        elif error.get("code") != "service_unavailable":
            return False
        # An engine that shuts down refuses what waits, the mark as well, and the response goes on.
        self.has_mark = False
        return True

    def note(self, event: Event) -> None:
        """Note an event that the client gets."""
        kind = event["type"]
        # An error of a create never has this code: it is that of a cancel that came too late.
        if _is_of_late_cancel(event) and (self.num_cancels or self._kind == "response.create"):
            self.num_cancels = max(self.num_cancels - 1, 0)
        elif kind in _ENDS:
            self.num_ends -= 1
            if _is_of_cancel(event):
                self.num_cancels = max(self.num_cancels - 1, 0)


def _is_of_late_cancel(event: Event) -> bool:
    if event["type"] != "error":
        return False
    error = event["error"]
    return error.get("code") == "response_not_found" and error.get("param") in ("response_id", "stream_id")


def _is_of_cancel(event: Event) -> bool:
    response = event.get("response") or {}
    return (response.get("status"), response.get("finish_reason")) == ("cancelled", "abort")
