"""Events of a server's response, read into a reply: a state machine without a socket or a clock.

It keeps the id of the response and the number of its last event, so that another connection can go on from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from triolet.cli.backends.base import ReplySink
from triolet.cli.reply import Reply
from triolet.core.request.request import FinishReason
from triolet.errors import TrioletError

ENDINGS: Final = ("response.completed", "response.incomplete", "response.failed")
GONE: Final = ("response_not_found", "previous_response_not_found")
# Sent by a server that is about to end: the next one may serve the request.
RETRIED: Final = ("service_unavailable", "websocket_connection_limit_reached")
TOO_LONG: Final = "context_length_exceeded"
_TOO_LONG_HINT: Final = "; /clear begins a new conversation, /undo takes back the last exchange"


class RefusedByServer(TrioletError):
    """Error that a server gave in place of an answer, or in the middle of one.

    Args:
        message: sentence of the server.
        code: short name of the error; None if there was none.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message + (_TOO_LONG_HINT if code == TOO_LONG else ""))
        self.code = code


@attrs.define(eq=False)
class ResponseReader:
    """Reader of one response, over one connection after the other."""

    reply: Reply
    sink: ReplySink
    response_id: str | None = None  # None before `response.created`
    last_number: int = -1  # sequence number of the last event
    is_over: bool = False

    def take(self, event: Mapping[str, Any], now: float) -> None:
        """Read the next event.

        Args:
            event: as it came.
            now: on the clock of `Reply.asked_s`.
        Raises:
            RefusedByServer: an error, or the end of a response that failed.
        """
        number = event.get("sequence_number")
        if isinstance(number, int):
            if number <= self.last_number:  # sent again
                return
            self.last_number = number
        self.sink.event(event)
        match event.get("type"):
            case "response.created":
                self.response_id = event["response"]["id"]
            case "response.output_text.delta":
                self.reply.arrived(now)
                self.reply.text += event["delta"]
                self.sink.text(event["delta"])
            case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
                self.reply.arrived(now)
                self.reply.reasoning += event["delta"]
                self.sink.reasoning(event["delta"])
            case "error":
                raise _refusal(event.get("error") or event)
            case str(kind) if kind.startswith("triolet:"):
                sentence = waiting_sentence(event)
                self.sink.waits_for(lambda: sentence)
            case str(kind) if kind in ENDINGS:
                self._end(event["response"], now)

    def start_over(self) -> None:
        """Forget the response: it is asked for again."""
        self.response_id, self.last_number = None, -1
        self.reply.start_over()
        self.sink.starts_over()

    def _end(self, response: Mapping[str, Any], now: float) -> None:
        self.is_over = True
        reply, usage, metrics = self.reply, response.get("usage") or {}, response.get("metrics") or {}
        reply.total_s = now - reply.asked_s
        reply.num_output_tokens = usage.get("output_tokens", 0)
        reply.num_prompt_tokens = usage.get("input_tokens", 0)
        reply.num_cached_tokens = (usage.get("input_tokens_details") or {}).get("cached_tokens", 0)
        reply.decode_s = metrics.get("decode_s")
        reply.finish_reason = _finish_reason(response)
        if response.get("status") == "failed":
            raise _refusal(response.get("error") or {})


def waiting_sentence(event: Mapping[str, Any]) -> str:
    """Return what a vendor event says that the reply waits for; empty for nothing to tell."""
    match event:
        case {"type": "triolet:restart", "restarting": [_, *_]}:
            return "the engine restarts"
        case {"type": "triolet:queue", "position": int(position)}:
            return f"waiting, number {position + 1} in line"
        case {"type": "triolet:prefill", "num_computed_tokens": int(done), "num_prompt_tokens": int(total)}:
            return f"reading the prompt {100 * done // max(1, total)} %"
        case _:
            return ""


def _finish_reason(response: Mapping[str, Any]) -> FinishReason | None:
    if (reason := response.get("finish_reason")) in [known.value for known in FinishReason]:
        return FinishReason(reason)
    # Other servers give the reason only where an answer is not complete.
    details = response.get("incomplete_details") or {}
    return FinishReason.LENGTH if details.get("reason") == "max_output_tokens" else None


def _refusal(error: Mapping[str, Any]) -> RefusedByServer:
    return RefusedByServer(str(error.get("message") or "the server gave no reason"), error.get("code"))
