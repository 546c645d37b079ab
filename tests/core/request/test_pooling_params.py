"""Parameters of pooled requests: what each may be, what a model does with it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from triolet.core.request.params import RequestOutputKind
from triolet.core.request.pooling_params import (
    POOLED,
    POOLED_WITHOUT_CACHE,
    PoolingInfo,
    PoolingParams,
    check_size,
    check_task,
    resolved,
)
from triolet.errors import InvalidParams, UnsupportedFeature

EMBEDDER = PoolingInfo(tasks=("embed", "token_embed"), size=8)
CLASSIFIER = PoolingInfo(tasks=("classify", "token_classify"), size=3)


def resolve(info: PoolingInfo = EMBEDDER, **fields: Any) -> PoolingParams:
    """Parameters of a request as a model of 100 tokens completes them."""
    return resolved(PoolingParams(**fields), info, info.tasks, "org/model", 100)


def refusal(field: str, info: PoolingInfo = EMBEDDER, **fields: Any) -> str:
    with pytest.raises(InvalidParams) as caught:
        resolve(info, **fields)
    assert caught.value.field == field
    return str(caught.value)


# ----------------------------------------------------------------------------- parameters alone


def test_parameters_that_are_not_given_are_none() -> None:
    params = PoolingParams()
    assert (params.task, params.use_activation, params.dimensions) == (None, None, None)
    assert (params.step_tag_id, params.returned_token_ids, params.token_type_start) == (None, None, None)


@pytest.mark.parametrize(
    ("field", "values", "rule"),
    [
        ("task", [5, True, b"embed"], "must be one of embed, classify, token_embed, token_classify"),
        ("task", ["generate", "", "EMBED"], "must be one of embed, classify, token_embed, token_classify"),
        ("use_activation", [0, 1, "true"], "must be true or false"),
        ("dimensions", [True, 4.0, "4"], "must be an integer"),
        ("dimensions", [0, -1], "must be at least 1"),
        ("step_tag_id", [True, 4.0, "4"], "must be an integer"),
        ("token_type_start", [True, 4.0, "4"], "must be an integer"),
        ("token_type_start", [-1], "must be at least 0"),
        ("returned_token_ids", [5, "12", [1.0], [1, True], {1: 2}, {1}], "must be a list of integers"),
    ],
)
def test_a_parameter_of_another_type_or_out_of_its_range_is_refused(
    field: str, values: list[object], rule: str
) -> None:
    for value in values:
        with pytest.raises(InvalidParams) as caught:
            PoolingParams(**{field: value})  # type: ignore[arg-type]
        assert str(caught.value).startswith(f"{field} {rule}, got ")
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", "token_classify"),
        ("use_activation", False),
        ("dimensions", 1),
        ("step_tag_id", 0),
        ("token_type_start", 0),
        ("returned_token_ids", ()),
        ("returned_token_ids", (2, 1)),
    ],
)
def test_a_parameter_in_its_range_is_kept(field: str, value: Any) -> None:
    assert getattr(PoolingParams(**{field: value}), field) == value


def test_a_list_of_columns_is_kept_as_it_was_when_it_came() -> None:
    columns = [2, 0]
    params = PoolingParams(returned_token_ids=columns)
    columns.append(1)
    assert params.returned_token_ids == (2, 0)


def test_a_pooled_request_is_one_step_without_text() -> None:
    assert (POOLED.temperature, POOLED.max_tokens, POOLED.n) == (0.0, 1, 1)
    assert (POOLED.detokenize, POOLED.output_kind) == (False, RequestOutputKind.FINAL_ONLY)


def test_a_pooled_request_reads_the_prefix_cache_unless_it_must_not() -> None:
    assert not POOLED.skip_reading_prefix_cache
    assert POOLED_WITHOUT_CACHE.skip_reading_prefix_cache
    assert (POOLED_WITHOUT_CACHE.max_tokens, POOLED_WITHOUT_CACHE.detokenize) == (1, False)


# --------------------------------------------------------------------------- facts about a model


def test_a_model_pools_the_last_token_of_a_causal_prompt_unless_it_says_otherwise() -> None:
    info = PoolingInfo(tasks=("embed",))
    assert (info.method, info.size, info.is_matryoshka, info.is_asked) == ("LAST", 0, False, False)
    assert (info.needs_whole_prompts, info.takes_token_types) == (False, False)


@pytest.mark.parametrize(
    ("tasks", "size", "scores"),
    [
        (("embed", "token_embed"), 8, True),
        (("classify", "token_classify"), 1, True),
        (("classify", "token_classify"), 2, False),
        (("token_classify",), 1, False),
        (("token_embed",), 1, False),
    ],
)
def test_a_pair_of_texts_has_a_score_by_embeddings_or_by_a_single_class(
    tasks: tuple[str, ...], size: int, scores: bool
) -> None:
    assert PoolingInfo(tasks=tasks, size=size).scores is scores


@pytest.mark.parametrize(
    ("task", "method", "needs_whole_prompts", "reads"),
    [
        ("embed", "LAST", False, True),
        ("classify", "LAST", False, True),
        ("token_embed", "LAST", False, False),
        ("token_classify", "LAST", False, False),
        ("embed", "MEAN", False, False),
        ("embed", "CLS", False, False),
        ("embed", "LAST", True, False),
    ],
)
def test_only_the_last_token_of_a_causal_model_is_pooled_with_the_prefix_cache(
    task: str, method: str, needs_whole_prompts: bool, reads: bool
) -> None:
    info = PoolingInfo(tasks=(task,), method=method, needs_whole_prompts=needs_whole_prompts)
    assert info.reads_prefix_cache(task) is reads


# ------------------------------------------------------------------------------ against the model


@pytest.mark.parametrize(
    ("task", "way"),
    [
        ("embed", "--convert embed"),
        ("token_embed", "--convert embed"),
        ("classify", "a model of sequence classification, or convert='classify'"),
        ("token_classify", "a model of sequence classification, or convert='classify'"),
        ("score", "a model of sequence classification with one label"),
    ],
)
def test_a_task_that_the_model_does_not_do_is_refused_with_the_way_to_have_it(task: str, way: str) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        check_task(task, ("generate", "other"))
    assert str(caught.value).startswith(
        f"task must be one of generate, other for this model; got {task!r}, which needs "
    )
    assert way in str(caught.value)
    assert (caught.value.field, caught.value.got) == ("task", task)


def test_generation_by_a_model_that_only_pools_is_refused() -> None:
    with pytest.raises(UnsupportedFeature, match="which needs a model that generates text"):
        check_task("generate", ("embed",))


def test_a_task_is_by_default_the_first_of_the_model_and_else_the_one_that_is_asked_for() -> None:
    assert resolve().task == "embed"
    assert resolve(CLASSIFIER).task == "classify"
    assert resolve(task="token_embed") == PoolingParams(task="token_embed")


def test_a_task_of_another_model_is_refused() -> None:
    with pytest.raises(UnsupportedFeature, match="task must be one of embed, token_embed for this model"):
        resolve(task="classify")


def test_a_model_that_only_generates_is_asked_for_an_embedding_by_default() -> None:
    with pytest.raises(UnsupportedFeature, match="got 'embed'"):
        resolved(PoolingParams(), None, ("generate",), "org/model", 100)


def test_other_parameters_are_kept() -> None:
    params = resolve(CLASSIFIER, task="token_classify", use_activation=False, returned_token_ids=[0, 2])
    assert params == PoolingParams(task="token_classify", use_activation=False, returned_token_ids=(0, 2))


@pytest.mark.parametrize("task", ["classify", "token_classify"])
def test_only_embeddings_are_cut(task: str) -> None:
    assert (
        refusal("dimensions", CLASSIFIER, task=task, dimensions=2)
        == f"dimensions must be None for task {task}, got 2."
    )


def test_embeddings_of_a_model_without_nested_ones_are_not_cut() -> None:
    assert refusal("dimensions", dimensions=4) == (
        "Model 'org/model' does not support Matryoshka embeddings; dimensions must be unset "
        "(received dimensions=4)."
    )


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_nested_embeddings_are_cut_to_any_length_up_to_their_own(task: str) -> None:
    info = PoolingInfo(tasks=("embed", "token_embed"), size=8, is_matryoshka=True)
    assert resolve(info, task=task, dimensions=1).dimensions == 1
    assert resolve(info, task=task, dimensions=8).dimensions == 8
    assert refusal("dimensions", info, task=task, dimensions=9) == "dimensions must be in [1, 8], got 9."


def test_nested_embeddings_are_cut_to_the_lengths_that_the_model_names() -> None:
    info = PoolingInfo(tasks=("embed",), size=8, is_matryoshka=True, matryoshka_dimensions=(2, 4))
    assert resolve(info, dimensions=4).dimensions == 4
    assert refusal("dimensions", info, dimensions=3) == "dimensions must be one of 2, 4, got 3."


@pytest.mark.parametrize(("field", "value"), [("step_tag_id", 5), ("returned_token_ids", (0,))])
@pytest.mark.parametrize(("info", "task"), [(EMBEDDER, "embed"), (CLASSIFIER, "classify")])
def test_positions_and_columns_are_chosen_only_among_the_scores_of_tokens(
    field: str, value: Any, info: PoolingInfo, task: str
) -> None:
    assert f"{field} must be None for task {task}" in refusal(field, info, **{field: value})
    assert getattr(resolve(CLASSIFIER, task="token_classify", **{field: value}), field) == value


@pytest.mark.parametrize(("token_id", "is_known"), [(-1, False), (0, True), (99, True), (100, False)])
def test_the_token_of_the_positions_is_in_the_vocabulary(token_id: int, is_known: bool) -> None:
    fields: dict[str, Any] = {"task": "token_classify", "step_tag_id": token_id}
    if is_known:
        assert resolve(CLASSIFIER, **fields).step_tag_id == token_id
    else:
        assert "step_tag_id must be in [0, 100)" in refusal("step_tag_id", CLASSIFIER, **fields)


@pytest.mark.parametrize(("column", "is_known"), [(-1, False), (0, True), (2, True), (3, False)])
def test_columns_are_those_of_the_classes(column: int, is_known: bool) -> None:
    fields: dict[str, Any] = {"task": "token_classify", "returned_token_ids": [0, column]}
    if is_known:
        assert resolve(CLASSIFIER, **fields).returned_token_ids == (0, column)
    else:
        sentence = f"returned_token_ids must hold columns in [0, 3), got {column}."
        assert refusal("returned_token_ids", CLASSIFIER, **fields) == sentence


def test_token_types_are_for_models_that_have_them() -> None:
    assert "must be None for this model, got 0." in refusal("token_type_start", token_type_start=0)
    info = PoolingInfo(tasks=("embed",), takes_token_types=True)
    assert resolve(info, token_type_start=3).token_type_start == 3


@pytest.mark.parametrize("task", ["token_embed", "token_classify"])
def test_a_result_with_a_vector_per_token_has_a_largest_size(task: str) -> None:
    # 65,536 vectors of 1,024 numbers of 4 bytes are 256 MiB
    info, params = PoolingInfo(tasks=(task,), size=1024), PoolingParams(task=task)
    check_size(params, info, 65_536)
    with pytest.raises(InvalidParams) as caught:
        check_size(params, info, 65_537)
    assert str(caught.value) == f"prompt must have at most 65536 tokens for task {task}, got 65537."
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("task", ["embed", "classify"])
def test_a_result_of_one_vector_is_small_however_long_the_prompt_is(task: str) -> None:
    info = PoolingInfo(tasks=(task,), size=1024)
    check_size(PoolingParams(task=task), info, 10**9)
    with pytest.raises(InvalidParams):
        check_size(PoolingParams(task="token_" + task), info, 10**9)
