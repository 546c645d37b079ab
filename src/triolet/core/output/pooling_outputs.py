"""Outputs of pooled requests, under vLLM's names, immutable."""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar

import attrs

from triolet.core.journal import JournalEntry
from triolet.core.request.pooling_params import TOKEN_TASKS
from triolet.errors import RequestFailed

Pooled = TypeVar("Pooled")


@attrs.frozen
class PoolingOutput:
    """Numbers of a pooled request: [size], or for a task per token [num_tokens, size].

    Args:
        data: float32, a `memoryview` with that shape, which `numpy.asarray` and `torch.frombuffer` take; a tensor in
            `triolet.compat`.
    """

    data: Any


@attrs.frozen(kw_only=True)
class PoolingRequestOutput(Generic[Pooled]):
    """Result of a pooled request.

    Args:
        request_id: given by the caller, or else by the engine.
        outputs: the numbers, or a view of them.
        prompt_token_ids: the prompt.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        finished: True.
        error: why there are no numbers; always None where a failed request raises.
        task: the task that was done.
    """

    request_id: str
    outputs: Pooled
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None
    task: str = "embed"


@attrs.frozen
class EmbeddingOutput:
    """Embedding of a prompt."""

    embedding: list[float]

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        return cls(_one_vector(output, "embedding"))

    @property
    def hidden_size(self) -> int:
        """Numbers of the embedding."""
        return len(self.embedding)


@attrs.frozen
class ClassificationOutput:
    """Scores of the classes."""

    probs: list[float]

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        return cls(_one_vector(output, "classification"))

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@attrs.frozen
class ScoringOutput:
    """Score of a pair of texts."""

    score: float

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        numbers = output.data.tolist()
        if isinstance(numbers, list):
            if len(numbers) != 1 or isinstance(numbers[0], list):
                raise ValueError("a score must be a single number")
            numbers = numbers[0]
        return cls(numbers)


def _one_vector(output: PoolingOutput, name: str) -> list[float]:
    if output.data.ndim != 1:
        raise ValueError(f"an output must be a single vector to be read as {name}")
    numbers: list[float] = output.data.tolist()
    return numbers


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Result of an `embed` request."""

    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> Self:
        return cls(**_fields(output), outputs=EmbeddingOutput.from_base(output.outputs))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Result of a `classify` request."""

    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> Self:
        return cls(**_fields(output), outputs=ClassificationOutput.from_base(output.outputs))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Result of a request for the score of a pair."""

    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> Self:
        return cls(**_fields(output), outputs=ScoringOutput.from_base(output.outputs))


def _fields(output: PoolingRequestOutput[Any]) -> dict[str, Any]:
    names = [field.name for field in attrs.fields(PoolingRequestOutput) if field.name != "outputs"]
    return {name: getattr(output, name) for name in names}


def pooled_output(entry: JournalEntry) -> PoolingRequestOutput[PoolingOutput]:
    """Return the output of a pooled request that has ended.

    Raises:
        RequestFailed: it ended before its result was complete.
    """
    request = entry.request
    assert request.pooling is not None
    task = request.pooling.task or ""
    if not entry.is_pooled:
        raise RequestFailed(request.request_id, f"it ended before its result ({entry.finish_reason})")
    # a bytearray, since torch takes only what may be written to
    values, width = (
        memoryview(bytearray().join([part.values for part in entry.pooled])),
        entry.pooled[0].width,
    )
    # a memoryview takes no shape with a 0, which a STEP result without any such token has
    has_rows = task in TOKEN_TASKS and len(values) > 0
    data = values.cast("f", [len(values) // (4 * width), width]) if has_rows else values.cast("f")
    return PoolingRequestOutput(
        request_id=request.request_id,
        outputs=PoolingOutput(data),
        prompt_token_ids=request.prompt_token_ids,
        num_cached_tokens=entry.num_cached_tokens,
        task=task,
    )
