"""Snapshots: saving the unfinished requests of an engine, and resuming them in another one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import attrs
import trio

from triolet.core.journal import Journal, JournalEntry
from triolet.core.request.lora import Adapter, LoRARequest
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.prompt import ParsedPrompt
from triolet.core.request.prompt_adapter import PromptAdapterRequest, SoftPrompt
from triolet.core.request.request import Request
from triolet.engine.submission import Submission
from triolet.errors import InvalidRequest, SnapshotError, shown
from triolet.ipc.snapshot import SavedAnswer, SavedRequest, Snapshot


def take_snapshot(info: ModelInfo, submissions: Iterable[Submission]) -> Snapshot:
    """Return the unfinished requests as a value; nothing is changed.

    Args:
        submissions: of the engine; those that are not admitted yet, have ended or have failed are left out, and those
            that are pooled: they have nothing that could be taken along.
    """
    now_s = trio.current_time()
    return Snapshot(
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        requests=tuple(
            saved_request(submission, now_s)
            for submission in submissions
            if submission.outputs and submission.is_live and not submission.has_failed
            if submission.pooling is None
        ),
    )


def saved_request(submission: Submission, now_s: float) -> SavedRequest:
    """Return an admitted request as a value, with its answers so far."""
    entries = submission.entries
    first = entries[0].request
    was_scheduled = entries[0].scheduled_s is not None
    return SavedRequest(
        request_id=submission.request_id,
        prompt=first.prompt,
        prompt_token_ids=first.prompt_token_ids[first.num_virtual_tokens :],
        # The length as resolved here: another engine may have a longer context. A minimum beyond it changes nothing.
        params=attrs.evolve(
            first.params,
            n=len(entries),
            max_tokens=first.max_tokens,
            min_tokens=min(first.params.min_tokens, first.max_tokens),
        ),
        answers=tuple(map(_saved_answer, entries)),
        priority=first.priority,
        client=first.client,
        cache_salt=first.cache_namespace.salt,
        **({} if first.adapter is None else _saved_adapter(first.adapter)),
        **({} if first.soft_prompt is None else _saved_soft_prompt(first.soft_prompt)),
        trace_headers=first.trace_headers,
        owner=submission.owner,
        time_left_s=_time_left(first.deadline_s, now_s),
        queue_time_left_s=None if was_scheduled else _time_left(first.queue_deadline_s, now_s),
    )


def _saved_adapter(adapter: Adapter) -> dict[str, Any]:
    return {
        "lora_name": adapter.name,
        "lora_int_id": adapter.int_id,
        "lora_path": adapter.path,
        "lora_base_model_name": adapter.base_model_name,
        "adapter": adapter.digest,
    }


def _saved_soft_prompt(soft_prompt: SoftPrompt) -> dict[str, Any]:
    return {
        "prompt_adapter_name": soft_prompt.name,
        "prompt_adapter_id": soft_prompt.int_id,
        "prompt_adapter_path": soft_prompt.path,
        "adapter": soft_prompt.digest,
    }


def _saved_answer(entry: JournalEntry) -> SavedAnswer:
    return SavedAnswer(
        seed=entry.request.seed,
        output_token_ids=tuple(entry.output_token_ids),
        output_logprobs=tuple(entry.output_logprobs),
        # An answer that has ended is not computed again, and only the first one has them.
        prompt_logprobs=() if entry.wants_prompt_logprobs else tuple(entry.prompt_logprobs),
        finish_reason=entry.finish_reason,
        stop_reason=entry.stop_reason,
    )


def _time_left(deadline_s: float, now_s: float) -> float | None:
    return None if deadline_s == math.inf else deadline_s - now_s


def check_snapshot(snapshot: Snapshot, info: ModelInfo) -> None:
    """Check that a snapshot is of this model, and consistent.

    Raises:
        SnapshotError: naming the difference.
    """
    theirs, ours = (snapshot.architecture, snapshot.vocab_size), (info.architecture, info.vocab_size)
    if theirs != ours:
        raise SnapshotError(
            f"a snapshot must be of the engine's model, {ours[0]} with {ours[1]} tokens; "
            f"got {theirs[0]} with {theirs[1]}"
        )
    for saved in snapshot.requests:
        if len(saved.answers) != saved.params.n:
            raise SnapshotError(
                f"request {shown(saved.request_id)} must have {saved.params.n} answers; got {len(saved.answers)}"
            )
        for answer in saved.answers:
            _check_answer(saved, answer, info.vocab_size)
        _lora_of(saved)
        _prompt_adapter_of(saved)


def _check_answer(saved: SavedRequest, answer: SavedAnswer, vocab_size: int) -> None:
    num_tokens, num_logprobs = len(answer.output_token_ids), len(answer.output_logprobs)
    if not all(0 <= token_id < vocab_size for token_id in answer.output_token_ids):
        raise SnapshotError(f"request {shown(saved.request_id)} must have tokens in [0, {vocab_size})")
    if num_logprobs not in (0, num_tokens) or (
        num_logprobs == 0 < num_tokens and saved.params.wants_logprobs
    ):
        raise SnapshotError(
            f"request {shown(saved.request_id)} must have logprobs for {num_tokens} tokens; got {num_logprobs}"
        )
    num_wanted = 0 if saved.params.prompt_logprobs is None else len(saved.prompt_token_ids) - 1
    if (num_given := len(answer.prompt_logprobs)) not in (0, num_wanted):
        raise SnapshotError(
            f"request {shown(saved.request_id)} must have prompt logprobs for {num_wanted} tokens; got {num_given}"
        )
    positions = (
        *zip(answer.output_token_ids, answer.output_logprobs, strict=False),
        *zip(saved.prompt_token_ids[1:], answer.prompt_logprobs, strict=False),
    )
    for token_id, position in positions:
        is_one_each = len(position.token_ids) == len(position.logprobs)
        is_known = all(0 <= named < vocab_size for named in position.token_ids)
        if not is_one_each or not is_known or position.token_ids[:1] != (token_id,):
            raise SnapshotError(
                f"request {shown(saved.request_id)} must have one logprob for every token that it names at a position, "
                f"the chosen one first; got {len(position.token_ids)} tokens and {len(position.logprobs)} logprobs"
            )


def _lora_of(saved: SavedRequest) -> LoRARequest | None:
    if saved.lora_name is None:
        return None
    try:
        return LoRARequest(saved.lora_name, saved.lora_int_id, saved.lora_path, saved.lora_base_model_name)
    except InvalidRequest as error:
        raise SnapshotError(f"request {shown(saved.request_id)} must name its adapter: {error}") from None


def _prompt_adapter_of(saved: SavedRequest) -> PromptAdapterRequest | None:
    if saved.prompt_adapter_name is None:
        return None
    try:
        return PromptAdapterRequest(
            saved.prompt_adapter_name, saved.prompt_adapter_id, saved.prompt_adapter_path
        )
    except InvalidRequest as error:
        raise SnapshotError(
            f"request {shown(saved.request_id)} must name its prompt adapter: {error}"
        ) from None


def resumed(saved: SavedRequest) -> Submission:
    """Return a submission that goes on with a saved request; its remaining time runs from now."""
    now_s = trio.current_time()
    return Submission(
        # By its ids, so that it is not tokenized a second time; the text says whether it ends amid reasoning.
        prompt=ParsedPrompt(token_ids=saved.prompt_token_ids, content=None, text=saved.prompt),
        params=saved.params,
        request_id=saved.request_id,
        priority=saved.priority,
        client=saved.client,
        # Saved as remaining time: the clocks of two processes have nothing in common.
        deadline_s=math.inf if saved.time_left_s is None else now_s + saved.time_left_s,
        queue_timeout_s=math.inf if saved.queue_time_left_s is None else saved.queue_time_left_s,
        cache_salt=saved.cache_salt,
        lora=_lora_of(saved),
        prompt_adapter=_prompt_adapter_of(saved),
        trace_headers=saved.trace_headers,
        owner=saved.owner,
        saved=saved,
    )


def goes_on(requests: tuple[Request, ...], saved: SavedRequest) -> tuple[Request, ...]:
    """Return the requests with the prompt and the seeds of the saved answers, which make their next tokens the same."""
    return tuple(
        attrs.evolve(request, prompt=saved.prompt, seed=answer.seed)
        for request, answer in zip(requests, saved.answers, strict=True)
    )


def fill_in(journal: Journal, entry: JournalEntry, saved: SavedAnswer) -> None:
    """Set the saved answer in an entry that has just been opened."""
    entry.output_token_ids += saved.output_token_ids
    entry.output_logprobs += saved.output_logprobs
    entry.prompt_logprobs += saved.prompt_logprobs
    if saved.finish_reason is not None:
        entry.finish(saved.finish_reason, saved.stop_reason)
        journal.close(entry)
