"""Stop conditions: end of sequence, stop token ids, length, repetition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from triolet.core.journal import Journal, JournalEntry
from triolet.core.request.repetition_detection import REPETITION_DETECTED, is_repeating
from triolet.core.request.status import FinishReason
from triolet.core.scheduling.sequence import Sequence
from triolet.core.step_plan import SampledToken

Ending = tuple[FinishReason, int | str | None]


def ending_of(entry: JournalEntry) -> Ending | None:
    """Return why an answer has ended with its last token, and its stop_reason; None if it goes on.

    The tokenizer's own end of sequence has no stop_reason; further ones of a model are reported like stop token ids.

    The order is vLLM's: end of sequence, stop token ids, length, and only then the repetition that `min_tokens` delays.
    So an end of sequence on the last allowed token is a stop. (Before `min_tokens` the sampler leaves no ending token.)
    """
    request, output = entry.request, entry.output_token_ids
    params = request.params
    if output[-1] in request.eos_token_ids and not params.ignore_eos:
        return FinishReason.STOP, None if output[-1] == request.eos_token_ids[0] else output[-1]
    if output[-1] in params.stop_token_ids:
        return FinishReason.STOP, output[-1]
    if len(output) >= request.max_tokens:
        return FinishReason.LENGTH, None
    detection = params.repetition_detection
    if detection is not None and len(output) >= params.min_tokens and is_repeating(output, detection):
        return FinishReason.REPETITION, REPETITION_DETECTED
    return None


def commit_tokens(
    journal: Journal, tokens: Iterable[SampledToken], by_epoch: Mapping[int, Sequence], now_s: float
) -> dict[int, Ending | None]:
    """Commit the tokens of a step to the journal; tokens after the end of an answer are dropped.

    Args:
        journal: of the answers.
        tokens: in order, of an answer none, one, or several.
        by_epoch: the requests that are computed now.
        now_s: monotonic seconds.
    Returns:
        By epoch, the answers that have grown, and the endings of those that have ended.
    """
    grown: dict[int, Ending | None] = {}
    for token in tokens:
        sequence = by_epoch.get(token.epoch)
        if sequence is None or grown.get(token.epoch) is not None:
            continue
        if journal.commit(sequence.entry, token, now_s):
            grown[token.epoch] = ending_of(sequence.entry)
    return grown
