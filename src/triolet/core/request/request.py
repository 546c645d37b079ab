"""The `Request`: a prompt with its parameters, resolved and checked once.

A request for n answers becomes n requests for one answer each (`fan_out`). They share everything but the noise: the
i-th has the i-th seed. Each is scheduled, preempted, stopped and recovered like any other;
`core.output.parallel_sampling` joins their outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import attrs

from triolet.core.kv_cache.namespace import DEFAULT_NAMESPACE, CacheNamespace
from triolet.core.request.grammar_state import Constraint
from triolet.core.request.param_validation import MAX_INT64
from triolet.core.request.params import SamplingParams
from triolet.core.request.trace_context import TraceHeaders


class RequestTask(StrEnum):
    """Kind of result that a request wants."""

    GENERATE = "generate"
    POOL = "pool"  # a vector; refused where a request enters


@attrs.frozen(kw_only=True)
class Request:
    """One prompt with everything that determines its answer.

    Args:
        request_id: unique among live requests.
        prompt: text of the prompt, if it came as text.
        prompt_token_ids: never empty, all in the vocabulary, fewer than `max_model_len`.
        params: as the caller gave them, or the model's defaults.
        seed: of the sampling noise; drawn by the engine where `params.seed` is None, so that a replay repeats
            it.
        max_tokens: most tokens of the answer: `params.max_tokens`, cut to the rest of the context.
        eos_token_ids: ids that end the answer, unless `params.ignore_eos`; the one of the tokenizer first.
        bad_words_token_ids: token ids of each bad word.
        priority: lower runs first under the `priority` policy.
        parent_id: id of the request with n > 1 that this one belongs to.
        index: of the answer among those to the prompt.
        num_answers: to the prompt, this one included.
        stream_interval: tokens from one output of the stream to the next.
        constraint: grammar and reasoning rules of the answer.
        client: name under which admission and fairness count the request.
        task: kind of result.
        cache_namespace: requests share cached blocks only within one.
        trace_headers: names and values of the trace context headers.
        arrival_s: when it was admitted, monotonic seconds.
        deadline_s: when it ends with what it has, monotonic seconds; infinity for never.
        queue_deadline_s: when it ends if it has not been scheduled yet, monotonic seconds.
    """

    request_id: str
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    parent_id: str | None = None
    index: int = 0
    num_answers: int = 1
    stream_interval: int = 1
    constraint: Constraint | None = None
    client: str | None = None
    task: RequestTask = RequestTask.GENERATE
    cache_namespace: CacheNamespace = DEFAULT_NAMESPACE
    trace_headers: TraceHeaders = ()
    arrival_s: float = 0.0
    deadline_s: float = float("inf")
    queue_deadline_s: float = float("inf")

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Ids that end the answer."""
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return frozenset(eos) | frozenset(self.params.stop_token_ids)

    @property
    def masked_token_ids(self) -> frozenset[int]:
        """Ids that are masked while the answer has fewer than `min_tokens` tokens."""
        # As in vLLM the end of sequence is masked even if `ignore_eos` is set.
        return frozenset(self.eos_token_ids) | frozenset(self.params.stop_token_ids)


def fan_out(request: Request, draw_seed: Callable[[], int]) -> tuple[Request, ...]:
    """Return one request per answer, in the order of their index; for one answer the request itself.

    Args:
        request: for all n answers.
        draw_seed: draws the seed of an answer, where the caller gave none.
    """
    if request.params.n == 1:
        return (request,)
    params = attrs.evolve(request.params, n=1)
    # Log-probabilities of the prompt are the same for all answers, so only the first request computes them.
    silent = attrs.evolve(params, prompt_logprobs=None)
    return tuple(
        attrs.evolve(
            request,
            request_id=f"{index}_{request.request_id}",
            parent_id=request.request_id,
            index=index,
            num_answers=request.params.n,
            params=silent if index else params,
            seed=_wrapped(request.seed + index) if params.seed is not None or index == 0 else draw_seed(),
            # The others count as scheduled once the first one is, so only that one can time out in the queue.
            queue_deadline_s=float("inf") if index else request.queue_deadline_s,
        )
        for index in range(request.params.n)
    )


def _wrapped(seed: int) -> int:
    # A seed above 64 bits wraps around to the negative numbers.
    return seed if seed <= MAX_INT64 else seed - 2**64
