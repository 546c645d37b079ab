"""Outputs of a stream: `RequestOutput` and its completions, under vLLM's names, immutable."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from triolet.core.output.logprobs import FlatLogprobs, Logprob, Position
from triolet.core.request.lora import LoRARequest
from triolet.core.request.request import FinishReason, RequestMetrics, RequestStatus

__all__ = [
    "CompletionOutput",
    "FinishReason",
    "FlatLogprobs",
    "Logprob",
    "PromptLogprobs",
    "RequestMetrics",
    "RequestOutput",
    "RequestStatus",
    "SampleLogprobs",
]


SampleLogprobs = Sequence[Position]
"""One per token of the answer."""

PromptLogprobs = Sequence[Position | None]
"""One per token of the prompt; the first one's is None (or, as columns, empty)."""


@attrs.frozen(kw_only=True)
class CompletionOutput:
    """One answer, or the new part of it (see `RequestOutputKind`).

    Args:
        index: of the answer among the request's `n`.
        text: never ends inside a character.
        token_ids: ids, including the one that ended the answer.
        cumulative_logprob: sum over the generated tokens, if logprobs were asked for.
        logprobs: per token, by token id, the chosen one first.
        finish_reason: None while it continues.
        stop_reason: the stop string or stop token id; None for the tokenizer's end of sequence. Further end
            tokens of the model are given like stop token ids.
        lora_request: LoRA adapter that computed it; None for none.
        weight_version: version of the weights that computed its newest token; see `Engine.reload_weights`.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    weight_version: int = 0

    def finished(self) -> bool:
        """Return True if this answer has ended."""
        return self.finish_reason is not None

    @property
    def routed_experts(self) -> None:
        """None: the experts of a token are not reported."""

    @property
    def sampling_mask(self) -> None:
        """None: the candidates of a token are not reported."""

    @property
    def spec_decode_metrics(self) -> None:
        """None: speculative decoding is counted per engine, not per answer."""

    @property
    def weight_versions(self) -> None:
        """None: see `weight_version`."""


@attrs.frozen(kw_only=True)
class RequestOutput:
    """Output of a stream.

    Args:
        request_id: given by the caller, or else by the engine.
        prompt: the prompt's text, where it came as text or messages.
        prompt_token_ids: the prompt.
        outputs: the answers; with n > 1 a streamed output has one, and a FINAL_ONLY output has all, by index.
        finished: True in the last output.
        metrics: times and counts.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        num_cache_creation_tokens: prompt tokens that were computed, and whose KV is in the prefix cache now.
        prompt_logprobs: per token of the prompt, if they were asked for: in the first output with DELTA, in each with
            the other kinds.
        lora_request: LoRA adapter that computes the answers; None for none.
        encoder_prompt: None: there are no encoder-decoder models.
        encoder_prompt_token_ids: None, for the same reason.
        kv_transfer_params: None: KV stays in its engine.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    lora_request: LoRARequest | None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None

    @property
    def prompt_token_id_logprobs(self) -> None:
        """None: log-probabilities of chosen tokens of the prompt are not offered."""

    @property
    def ec_transfer_params(self) -> None:
        """None: there are no encoders."""

    @property
    def text(self) -> str:
        """Text of the first answer: the whole of it so far, or what is new, by the output kind."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the first answer ended; None while it continues."""
        return self.outputs[0].finish_reason

    def add(self, next_output: RequestOutput, aggregate: bool) -> RequestOutput:
        """Join a later output of the same stream to this one, in place, and return this one.

        Nothing else changes an output: of those that a stream has handed out, only the caller has this one.

        Args:
            next_output: the later one, which stays unchanged.
            aggregate: join texts, tokens and logprobs, as DELTA outputs want it; otherwise the later answer replaces
                the earlier one of the same index.
        """
        # With n > 1 each output of a stream has one answer, and any of them may be missing.
        answers = {answer.index: answer for answer in self.outputs}
        for answer in next_output.outputs:
            earlier = answers.get(answer.index)
            answers[answer.index] = answer if earlier is None or not aggregate else _joined(earlier, answer)
        joined = attrs.evolve(
            next_output,
            outputs=tuple(answers[index] for index in sorted(answers)),
            finished=self.finished or next_output.finished,
            # DELTA streams have them in their first output only.
            prompt_logprobs=next_output.prompt_logprobs or self.prompt_logprobs,
        )
        for field in attrs.fields(RequestOutput):
            object.__setattr__(self, field.name, getattr(joined, field.name))  # the class is frozen otherwise
        return self


def _joined(earlier: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
    return attrs.evolve(
        later,
        text=earlier.text + later.text,
        token_ids=(*earlier.token_ids, *later.token_ids),
        logprobs=None if later.logprobs is None else (*(earlier.logprobs or ()), *later.logprobs),
    )
