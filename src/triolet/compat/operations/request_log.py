"""Lines in the log about the requests of an `AsyncLLM`, in the words of vLLM; the logger is `triolet.requests`.

INFO  Received request ID: params: ..., lora_request: ...
INFO  Added request ID.
INFO  Finished request ID.           or  Aborted request ID.   or  Request ID failed: ...
DEBUG Request ID details: prompt: ..., at most `max_log_len` characters or token ids
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import attrs

from triolet.compat.prompts import check_max_log_len
from triolet.core.request.lora import LoRARequest
from triolet.core.request.request import FinishReason

logger = logging.getLogger("triolet.requests")


@attrs.frozen
class RequestLog:
    """Writer of the lines.

    Args:
        max_log_len: characters or token ids of a prompt that are written; None for all.
    """

    max_log_len: int | None = attrs.field(default=None, converter=check_max_log_len)

    def begin(
        self, request_id: str, prompt: Any, params: object, lora_request: LoRARequest | None
    ) -> RequestLines:
        """Write that a request has come and is queued; return what writes its end."""
        logger.info("Received request %s: params: %s, lora_request: %s.", request_id, params, lora_request)
        if logger.isEnabledFor(logging.DEBUG):  # prompts may be long
            logger.debug("Request %s details: prompt: %r.", request_id, self._beginning(prompt))
        logger.info("Added request %s.", request_id)
        return RequestLines(request_id)

    def _beginning(self, prompt: Any) -> Any:
        if self.max_log_len is None:
            return prompt
        if isinstance(prompt, Mapping):
            return {name: self._beginning(value) for name, value in prompt.items()}
        if isinstance(prompt, str) or (isinstance(prompt, list | tuple) and not _is_chat(prompt)):
            return prompt[: self.max_log_len]
        return repr(prompt)[: self.max_log_len]


def _is_chat(prompt: Any) -> bool:
    return bool(prompt) and isinstance(prompt[0], Mapping)


@attrs.define
class RequestLines:
    """Writer of one request's last line, which is written once."""

    request_id: str
    _has_ended: bool = False

    def finished(self, reason: FinishReason | None) -> None:
        """Write that the last output was handed out."""
        if reason is FinishReason.ABORT:
            self.aborted()
        else:
            self._end("Finished request %s.", self.request_id)

    def aborted(self) -> None:
        """Write that the request was left before its end."""
        self._end("Aborted request %s.", self.request_id)

    def failed(self, error: BaseException) -> None:
        """Write that the request could not be finished."""
        self._end("Request %s failed: %s: %s", self.request_id, type(error).__name__, error)

    def _end(self, line: str, *values: object) -> None:
        if not self._has_ended:
            self._has_ended = True
            logger.info(line, *values)
