"""Outputs of pooled requests: their shapes, and how they are read as an embedding, classes or a score."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from tests.core.make import make_request
from triolet.core.journal import Journal, JournalEntry
from triolet.core.output.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    pooled_output,
)
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.request import FinishReason
from triolet.core.step_plan import PooledVectors
from triolet.errors import RequestFailed


def pooling_output(numbers: Sequence[float], shape: Sequence[int] | None = None) -> PoolingOutput:
    data = memoryview(array("f", numbers))
    return PoolingOutput(data if shape is None else data.cast("B").cast("f", list(shape)))


# ------------------------------------------------------------------------------ readings of the numbers


def test_a_vector_is_read_as_an_embedding_or_as_the_scores_of_classes() -> None:
    embedding = EmbeddingOutput.from_base(pooling_output([0.5, -1.0, 2.0]))
    assert (embedding.embedding, embedding.hidden_size) == ([0.5, -1.0, 2.0], 3)
    classes = ClassificationOutput.from_base(pooling_output([0.25, 0.75]))
    assert (classes.probs, classes.num_classes) == ([0.25, 0.75], 2)


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
@pytest.mark.parametrize(
    ("kind", "name"), [(EmbeddingOutput, "embedding"), (ClassificationOutput, "classification")]
)
def test_vectors_per_token_are_no_single_vector(
    kind: type[EmbeddingOutput | ClassificationOutput], name: str, shape: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match=f"single vector to be read as {name}"):
        kind.from_base(pooling_output([1.0, 2.0, 3.0, 4.0], shape))


@pytest.mark.parametrize("shape", [(1,), ()])
def test_a_single_number_is_a_score(shape: tuple[int, ...]) -> None:
    assert ScoringOutput.from_base(pooling_output([0.75], shape)).score == 0.75


@pytest.mark.parametrize(("numbers", "shape"), [([0.5, 0.5], (2,)), ([0.5], (1, 1)), ([0.5, 0.5], (2, 1))])
def test_anything_else_is_no_score(numbers: list[float], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a score must be a single number"):
        ScoringOutput.from_base(pooling_output(numbers, shape))


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        (EmbeddingRequestOutput, EmbeddingOutput([0.5])),
        (ClassificationRequestOutput, ClassificationOutput([0.5])),
        (ScoringRequestOutput, ScoringOutput(0.5)),
    ],
)
def test_a_reading_keeps_all_else_of_the_output(
    kind: type[EmbeddingRequestOutput | ClassificationRequestOutput | ScoringRequestOutput],
    read: EmbeddingOutput | ClassificationOutput | ScoringOutput,
) -> None:
    found = kind.from_base(
        PoolingRequestOutput(
            request_id="r",
            outputs=pooling_output([0.5]),
            prompt_token_ids=(1, 2),
            num_cached_tokens=1,
            finished=False,
            error="broken",
            task="classify",
        )
    )
    assert type(found) is kind
    assert found.outputs == read
    assert (found.request_id, found.prompt_token_ids, found.num_cached_tokens) == ("r", (1, 2), 1)
    assert (found.finished, found.error, found.task) == (False, "broken", "classify")


def test_an_output_is_finished_and_owes_nothing_to_the_cache_unless_it_says_so() -> None:
    output = PoolingRequestOutput(request_id="r", outputs=pooling_output([1.0]), prompt_token_ids=(1,))
    assert (output.finished, output.num_cached_tokens, output.error) == (True, 0, None)


# ---------------------------------------------------------------------------- outputs of the journal


def ended_entry(task: str, *parts: Sequence[float], width: int = 2, is_last: bool = True) -> JournalEntry:
    """Entry of a pooled request, with the parts of its result that steps gave."""
    journal = Journal()
    entry = journal.open(make_request((7, 8, 9), pooling=PoolingParams(task=task)))
    for place, numbers in enumerate(parts):
        ends = is_last and place == len(parts) - 1
        part = PooledVectors(entry.epoch, place, width, array("f", numbers).tobytes(), ends)
        journal.commit_pooled(entry, part)
    return entry


@pytest.mark.parametrize("task", ["embed", "classify"])
def test_the_result_of_a_prompt_is_one_vector(task: str) -> None:
    entry = ended_entry(task, [0.5, 1.5])
    entry.num_cached_tokens = 2
    output = pooled_output(entry)
    assert output.outputs.data.shape == (2,)
    assert output.outputs.data.tolist() == [0.5, 1.5]
    assert (output.request_id, output.prompt_token_ids, output.num_cached_tokens) == ("r", (7, 8, 9), 2)
    assert (output.task, output.finished, output.error) == (task, True, None)


@pytest.mark.parametrize("task", ["token_embed", "token_classify"])
def test_the_parts_of_a_result_per_token_make_one_matrix(task: str) -> None:
    output = pooled_output(ended_entry(task, [1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0, 8.0, 9.0], width=3))
    assert output.outputs.data.shape == (3, 3)
    assert output.outputs.data.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
    assert output.task == task


def test_a_result_without_any_token_is_empty() -> None:
    data = pooled_output(ended_entry("token_classify", [])).outputs.data
    assert (data.format, data.shape, data.tolist()) == ("f", (0,), [])


def test_the_numbers_may_be_written_to() -> None:
    data = pooled_output(ended_entry("embed", [0.5, 1.5])).outputs.data
    assert not data.readonly
    data[0] = 4.0
    assert data.tolist() == [4.0, 1.5]


@pytest.mark.parametrize("parts", [[], [[1.0, 2.0]]])
def test_a_request_that_ended_before_its_result_has_failed(parts: list[list[float]]) -> None:
    entry = ended_entry("token_embed", *parts, is_last=False)
    entry.finish_reason = FinishReason.DEADLINE
    with pytest.raises(RequestFailed, match=r"request r failed: it ended before its result \(deadline\)"):
        pooled_output(entry)
