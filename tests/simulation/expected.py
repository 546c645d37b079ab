"""What a request must be answered, worked out without an engine: the whole of it, and any beginning of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs

from tests.actors.harness import VOCAB
from tests.core.fake_model import expected_answer
from tests.simulation.adapters import number_of
from tests.simulation.forms import choice_in
from tests.simulation.text_oracle import text_of
from triolet.core.request.request import FinishReason, Request

Ended = tuple[FinishReason | None, int | str | None]


@attrs.frozen(eq=False)
class Expected:
    """The one right answer to a request, however it was dealt out to steps and lives.

    Args:
        token_ids: up to and with the one that ended it.
        text: of all of them.
        ended: why, and by which stop string or token.
    """

    request: Request
    token_ids: tuple[int, ...]
    text: str
    ended: Ended

    def text_of(self, num_tokens: int, *, is_flushed: bool) -> str:
        """The text of a beginning that no token has ended; `is_flushed` if no more will come."""
        return text_of(self.request, self.token_ids[:num_tokens], is_flushed=is_flushed).text


def tokens_of(
    request: Request,
    num_tokens: int,
    ending: tuple[int, ...] = (),
    weights: tuple[int, ...] = (),
    windows: tuple[int | None, ...] = (None,),
) -> tuple[int, ...]:
    """The first tokens of its answer, up to one that ends it, or to where its form does."""
    form, eos = request.params.structured_outputs, request.eos_token_ids

    def mask_after(output: Sequence[int]) -> bytes | None:
        if form is None:
            return None
        choice = choice_in(form, output, eos)
        return b"" if choice.is_over else choice.mask

    adapter = 0 if request.adapter is None else number_of(request.adapter.digest)
    return tuple(
        expected_answer(
            request.prompt_token_ids,
            request.seed,
            num_tokens,
            VOCAB,
            ending,
            mask_after,
            adapter,
            weights,
            windows,
        )
    )


@functools.cache
def expected_of(
    request: Request, weights: tuple[int, ...] = (), windows: tuple[int | None, ...] = (None,)
) -> Expected:
    """Work it out; `weights` are those of its tokens, and the last of them compute the rest."""
    params = request.params
    eos = () if params.ignore_eos else request.eos_token_ids
    ending = (*eos, *params.stop_token_ids)
    answer = tokens_of(request, request.max_tokens, ending, weights, windows)
    is_ended_by_token = answer[-1] in ending
    whole = text_of(request, answer, is_flushed=True, hide_last=is_ended_by_token)
    is_whole = len(answer) < request.max_tokens  # then its form has ended it, if nothing else has
    ended: Ended = (FinishReason.STOP if is_whole else FinishReason.LENGTH, None)
    if whole.stop_reason is not None:
        ended = (FinishReason.STOP, whole.stop_reason)
    elif is_ended_by_token:
        ended = (FinishReason.STOP, None if answer[-1:] == eos[:1] else answer[-1])
    return Expected(request, answer[: whole.num_tokens], whole.text, ended)
