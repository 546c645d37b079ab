"""The text of an answer, worked out from its bytes alone.

None of it is the engine's: Python decodes the bytes as a whole, and stop strings are looked for with `endswith` after
every character. So a defect of the engine's detokenizer or of its stop matcher shows as a difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from tests.simulation.model import byte_of
from triolet.core.request.request import Request

BROKEN = "\N{REPLACEMENT CHARACTER}"
MAX_UNFINISHED = 3  # a character of UTF-8 has at most four bytes: three may be there without it


@attrs.frozen
class OracleText:
    """What the text of some tokens is.

    Args:
        text: that may be shown.
        num_tokens: of the tokens given, how many belong to the answer.
        stop_reason: the stop string that ended it, or None.
    """

    text: str
    num_tokens: int
    stop_reason: str | None


def text_of(
    request: Request, token_ids: Sequence[int], *, is_flushed: bool, hide_last: bool = False
) -> OracleText:
    """Work out the text of a beginning of an answer.

    Args:
        request: with its prompt and parameters.
        token_ids: the first tokens of its answer.
        is_flushed: no more will come, so nothing is held back.
        hide_last: the last token ended the answer and is no text, unless what ended it is shown.
    """
    params = request.params
    stops: tuple[str, ...] = tuple(params.stop)
    num_read = len(token_ids) - (hide_last and not params.include_stop_str_in_output)
    raw = ""
    for number in range(1, num_read + 1):
        for char in _decoded(request.prompt_token_ids, token_ids[:number])[len(raw) :]:
            raw += char
            matched = next((stop for stop in stops if raw.endswith(stop)), None)
            if matched is not None and number > params.min_tokens:
                shown = raw if params.include_stop_str_in_output else raw.removesuffix(matched)
                return OracleText(shown, number, matched)
    if not is_flushed and not params.include_stop_str_in_output:
        raw = raw[: len(raw) - _num_held(raw, stops)]
    return OracleText(raw, len(token_ids), None)


def _num_held(raw: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of the text that is a beginning of a stop string, and not all of it."""
    beginnings = (stop[:length] for stop in stops for length in range(1, len(stop)))
    return max((len(beginning) for beginning in beginnings if raw.endswith(beginning)), default=0)


def _decoded(prompt: Sequence[int], answer: Sequence[int]) -> str:
    """Decode what the answer adds to the prompt, without what may be an unfinished character at its end."""
    before = _utf8(prompt)
    shown = _whole(before)
    text = _whole(_utf8([*prompt, *answer]))[len(shown) :]
    # The prompt may end inside a character, too: what it left unfinished is not the answer's.
    for _ in range(len(before) - len(shown)):
        if not text.startswith(BROKEN):
            break
        text = text.removeprefix(BROKEN)
    return text


def _utf8(token_ids: Sequence[int]) -> str:
    return bytes(map(byte_of, token_ids)).decode("utf-8", "replace")


def _whole(text: str) -> str:
    tail = text[-MAX_UNFINISHED:]
    return text[: len(text) - len(tail)] + tail.rstrip(BROKEN)
