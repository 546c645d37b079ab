"""Views of the live requests, without a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable

import trio

from triolet.core.engine_core import EngineCore
from triolet.core.journal import JournalEntry
from triolet.core.output.output_processor import LiveRequest, RequestProgress
from triolet.engine.submission import Submission


def live_requests(
    submissions: Iterable[Submission], core: EngineCore, owner: str | None
) -> tuple[LiveRequest, ...]:
    """Return the requests that have not ended, in the order of arrival.

    Args:
        owner: owner of the requests to return; None for all.
    """
    now_s = trio.current_time()
    return tuple(
        _admitted(submission, core, now_s) if submission.outputs else _on_its_way(submission, now_s)
        for submission in submissions
        if submission.is_live and (owner is None or submission.owner == owner)
    )


def _on_its_way(submission: Submission, now_s: float) -> LiveRequest:
    """Describe a request before its admission: its prompt is being tokenized, or its grammar compiled."""
    return LiveRequest(
        request_id=submission.request_id,
        client=submission.client,
        priority=submission.priority,
        status=submission.status(),
        n=1 if submission.params is None else submission.params.n,
        age_s=now_s - submission.began_s,
        time_left_s=_time_left(submission.deadline_s, now_s),
        lora_name=_lora_name(submission),
    )


def _admitted(submission: Submission, core: EngineCore, now_s: float) -> LiveRequest:
    entries, progress = submission.entries, progress_of(submission, core)
    return LiveRequest(
        request_id=submission.request_id,
        client=submission.client,
        priority=submission.priority,
        status=progress.status,
        queue_position=progress.queue_position,
        n=len(entries),
        num_prompt_tokens=progress.num_prompt_tokens,
        num_cached_tokens=entries[0].num_cached_tokens,
        num_computed_tokens=progress.num_computed_tokens,
        num_output_tokens=sum(len(entry.output_token_ids) for entry in entries),
        num_kv_blocks=sum(_num_blocks(core, entry) for entry in entries),
        num_preemptions=sum(entry.num_preemptions for entry in entries),
        age_s=now_s - submission.began_s,
        time_left_s=_time_left(entries[0].request.deadline_s, now_s),
        lora_name=_lora_name(submission),
    )


def _lora_name(submission: Submission) -> str | None:
    return None if submission.lora is None else submission.lora.lora_name


def _num_blocks(core: EngineCore, entry: JournalEntry) -> int:
    return 0 if entry.scheduled_s is None else core.whereabouts(entry.serial)[2]  # it never held a block


def _time_left(deadline_s: float, now_s: float) -> float | None:
    return None if deadline_s == math.inf else deadline_s - now_s


def has_first_token(submission: Submission) -> bool:
    """Return True if the request has a token or has ended: its progress is complete then."""
    return any(entry.output_token_ids or entry.finish_reason for entry in submission.entries)


def progress_of(submission: Submission, core: EngineCore) -> RequestProgress:
    """Return the progress of an admitted request towards its first token; of several answers, the first counts."""
    first = submission.entries[0]
    num_virtual = first.request.num_virtual_tokens
    num_prompt_tokens = len(first.request.prompt_token_ids) - num_virtual
    was_admitted = first.scheduled_s is not None or first.finish_reason is not None
    position, num_computed, _ = core.whereabouts(first.serial)
    progress = RequestProgress(
        status=submission.status(),
        queue_position=0 if was_admitted else position,
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=num_prompt_tokens
        if first.output_token_ids
        else min(max(0, num_computed - num_virtual), num_prompt_tokens),
    )
    # A preemption takes back what was computed, and progress never decreases for its reader.
    submission.progress = progress.after(submission.progress)
    return submission.progress
