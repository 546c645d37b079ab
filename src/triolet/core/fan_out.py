"""One request for n answers becomes n requests for one each.

They share everything but the noise: the i-th has the i-th seed. Each is scheduled, preempted, stopped and recovered
like any other; `core.answers` puts their outputs together again.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from triolet.core.param_checks import MAX_INT64
from triolet.core.request import Request


def fan_out(request: Request, draw_seed: Callable[[], int]) -> tuple[Request, ...]:
    """The requests for each answer, in the order of their index; for one answer the request itself.

    Args:
        request: as it was resolved.
        draw_seed: a seed for an answer, where the caller gave none.
    """
    if request.params.n == 1:
        return (request,)
    params = attrs.evolve(request.params, n=1)
    # What there is to say of the prompt is said once.
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
            # Its turn has come when the first one's has.
            queue_deadline_s=float("inf") if index else request.queue_deadline_s,
        )
        for index in range(request.params.n)
    )


def _wrapped(seed: int) -> int:
    """A seed beyond 64 bits goes on at their other end."""
    return seed if seed <= MAX_INT64 else seed - 2**64
