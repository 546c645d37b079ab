"""Whether an answer is over with its last token, and why."""

from __future__ import annotations

from triolet.core.journal import JournalEntry
from triolet.core.outputs import FinishReason
from triolet.core.repetition import REPETITION_DETECTED, is_repeating

Ending = tuple[FinishReason, int | str | None]


def ending_of(entry: JournalEntry) -> Ending | None:
    """Why an answer with a token is over, and its stop_reason; None if it goes on.

    The order is vLLM's: end of sequence, stop token ids, length, and only then what `min_tokens` must wait for. So an
    end of sequence on the last allowed token is a stop. (Before `min_tokens` the sampler leaves no ending token.)
    """
    request, output = entry.request, entry.output_token_ids
    params = request.params
    if output[-1] in request.eos_token_ids and not params.ignore_eos:
        return FinishReason.STOP, None
    if output[-1] in params.stop_token_ids:
        return FinishReason.STOP, output[-1]
    if len(output) >= request.max_tokens:
        return FinishReason.LENGTH, None
    detection = params.repetition_detection
    if detection is not None and len(output) >= params.min_tokens and is_repeating(output, detection):
        return FinishReason.REPETITION, REPETITION_DETECTED
    return None
