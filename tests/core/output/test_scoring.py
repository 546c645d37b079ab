"""Scores of pairs of texts: which requests a model gets for them, and which numbers come out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from triolet.core.output.pooling_outputs import PoolingOutput, PoolingRequestOutput
from triolet.core.output.scoring import Scoring, plan_scoring
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.pooling_params import PoolingInfo, PoolingParams
from triolet.errors import InvalidPrompt, UnsupportedFeature

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
TRAINED_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

EMBEDDER = PoolingInfo(tasks=("embed", "token_embed"), size=2)
CROSS_ENCODER = PoolingInfo(tasks=("classify", "token_classify"), size=1)
JUDGING = attrs.evolve(CROSS_ENCODER, is_asked=True)


@attrs.frozen
class ChatTokenizer:
    """Tokenizer with nothing but a chat template."""

    template_source: str
    template_variables: frozenset[str] = frozenset()
    thinking_prompt: str = ""
    tool_template_source: str = ""


WITH_ROLES = ChatTokenizer("""{% if m.role == 'query' %}Q{% elif m.role == "document" %}D{% endif %}""")


def info_of(pooling: PoolingInfo | None) -> ModelInfo:
    return ModelInfo(
        folder="",
        architecture="",
        backend="native",
        vocab_size=50,
        max_position=99,
        max_model_len=99,
        num_kv_blocks=9,
        block_size=4,
        dtype="float32",
        device="cpu",
        generates=False,
        pooling=pooling,
    )


def plan(
    data_1: Any = "a",
    data_2: Any = "b",
    pooling: PoolingInfo | None = CROSS_ENCODER,
    *,
    tokenizer: object = None,
    params: PoolingParams | None = None,
    instruction: str | None = None,
) -> Scoring:
    return plan_scoring(data_1, data_2, info_of(pooling), tokenizer, params, instruction)


def output(
    numbers: Sequence[float], token_ids: Sequence[int] = (), num_cached_tokens: int = 0, name: str = "r"
) -> PoolingRequestOutput[PoolingOutput]:
    return PoolingRequestOutput(
        request_id=name,
        outputs=PoolingOutput(memoryview(array("f", numbers))),
        prompt_token_ids=tuple(token_ids),
        num_cached_tokens=num_cached_tokens,
    )


# --------------------------------------------------------------------------------------- the pairs


@pytest.mark.parametrize(
    ("data_1", "data_2", "pairs"),
    [
        ("a", "b", [("a", "b")]),
        ("a", ["b", "c"], [("a", "b"), ("a", "c")]),
        (["a"], ("b", "c"), [("a", "b"), ("a", "c")]),
        (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")]),
        ("ab", ["cd", "ef"], [("ab", "cd"), ("ab", "ef")]),  # a text is no list of letters
    ],
)
def test_one_text_is_compared_with_each_and_several_each_with_its_own(
    data_1: object, data_2: object, pairs: list[tuple[str, str]]
) -> None:
    prompts = plan(data_1, data_2).prompts
    assert prompts == tuple({"prompt": first, "text_pair": second} for first, second in pairs)


@pytest.mark.parametrize(
    ("data_1", "data_2", "message"),
    [
        (["a", "b"], "c", "holds 1; got 2"),
        (["a", "b"], ["c", "d", "e"], "holds 3; got 2"),
        (["a", "b", "c"], ["d", "e"], "holds 2; got 3"),
    ],
)
def test_numbers_of_texts_that_do_not_fit_are_refused(data_1: object, data_2: object, message: str) -> None:
    with pytest.raises(InvalidPrompt, match=message) as caught:
        plan(data_1, data_2)
    assert isinstance(data_1, list)
    assert (caught.value.field, caught.value.got) == ("data_1", len(data_1))


@pytest.mark.parametrize("value", [[], 7, None, ["a", 7], {"a"}, [["a"]]])
@pytest.mark.parametrize("field", ["data_1", "data_2"])
def test_what_is_no_text_and_no_list_of_texts_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidPrompt, match=f"{field} must be a text or a list") as caught:
        plan(**dict[str, Any]({field: value}))
    assert (caught.value.field, caught.value.got) == (field, value)


# --------------------------------------------------------------------------- what each model is asked


def test_a_cross_encoder_reads_both_texts_in_one_prompt() -> None:
    found = plan("a", ["b", "c"])
    assert found.prompts == ({"prompt": "a", "text_pair": "b"}, {"prompt": "a", "text_pair": "c"})
    assert (found.params, found.places) == (PoolingParams(task="classify"), None)


def test_a_model_of_embeddings_gets_each_text_once() -> None:
    found = plan(["a", "b", "a"], ["c", "a", "a"], EMBEDDER)
    assert found.prompts == ("a", "c", "b")
    assert found.places == ((0, 1), (2, 0), (0, 0))
    assert found.params == PoolingParams(task="embed", use_activation=True)


def test_a_model_that_does_both_classifies_the_pair() -> None:
    both = PoolingInfo(tasks=("embed", "classify"), size=1)
    assert plan(pooling=both).params.task == "classify"


@pytest.mark.parametrize(
    ("pooling", "params", "planned"),
    [
        (
            CROSS_ENCODER,
            PoolingParams(task="embed", use_activation=False),
            PoolingParams(task="classify", use_activation=False),
        ),
        (
            EMBEDDER,
            PoolingParams(task="classify", use_activation=False, dimensions=2),
            PoolingParams(task="embed", use_activation=True, dimensions=2),
        ),
    ],
)
def test_the_callers_parameters_are_kept_but_for_what_the_score_decides(
    pooling: PoolingInfo, params: PoolingParams, planned: PoolingParams
) -> None:
    assert plan(pooling=pooling, params=params).params == planned


@pytest.mark.parametrize(
    "pooling",
    [
        None,
        PoolingInfo(tasks=("classify",), size=2),
        PoolingInfo(tasks=("token_embed",), size=1),
    ],
)
def test_a_model_without_a_single_score_is_refused(pooling: PoolingInfo | None) -> None:
    with pytest.raises(UnsupportedFeature, match="got 'score', which needs") as caught:
        plan(pooling=pooling)
    assert caught.value.field == "task"


# -------------------------------------------------------------------------------------- the chats


def test_a_model_that_is_asked_gets_a_question_about_each_pair() -> None:
    found = plan("q", ["d", "e"], JUDGING)
    assert found.places is None
    assert found.params.task == "classify"
    assert found.prompts == tuple(
        {
            "messages": [
                {"role": "system", "content": JUDGE},
                {
                    "role": "user",
                    "content": f"<Instruct>: {TRAINED_INSTRUCTION}\n<Query>: q\n<Document>: {document}",
                },
            ],
            "chat_template_kwargs": {"enable_thinking": False},
        }
        for document in ("d", "e")
    )


def chat(prompt: object) -> dict[str, Any]:
    assert isinstance(prompt, dict)
    return prompt


@pytest.mark.parametrize(("given", "asked"), [("Find it", "Find it"), ("", TRAINED_INSTRUCTION)])
def test_an_instruction_takes_the_place_of_the_trained_one(given: str, asked: str) -> None:
    (prompt,) = plan("q", "d", JUDGING, instruction=given).prompts
    user = chat(prompt)["messages"][1]["content"]
    assert user == f"<Instruct>: {asked}\n<Query>: q\n<Document>: d"


@pytest.mark.parametrize(
    ("instruction", "values"),
    [(None, {}), ("Find it", {"instruction": "Find it"}), ("", {"instruction": ""})],
)
@pytest.mark.parametrize("pooling", [CROSS_ENCODER, JUDGING])
def test_a_template_with_roles_for_the_texts_is_the_whole_prompt(
    pooling: PoolingInfo, instruction: str | None, values: dict[str, str]
) -> None:
    (prompt,) = plan("q", "d", pooling, tokenizer=WITH_ROLES, instruction=instruction).prompts
    assert prompt == {
        "messages": [{"role": "query", "content": "q"}, {"role": "document", "content": "d"}],
        "add_generation_prompt": False,
        "chat_template_kwargs": values,
    }


@pytest.mark.parametrize(
    "tokenizer",
    [
        None,
        ChatTokenizer(""),
        ChatTokenizer("role == 'query'"),
        ChatTokenizer('role == "document"'),
        ChatTokenizer("{{ query }} and {{ document }}"),  # variables, not roles
    ],
)
def test_a_template_that_names_not_both_roles_makes_no_chat(tokenizer: object) -> None:
    assert plan(tokenizer=tokenizer).prompts == ({"prompt": "a", "text_pair": "b"},)


@pytest.mark.parametrize(
    ("pooling", "tokenizer"),
    [
        (CROSS_ENCODER, None),
        (EMBEDDER, None),
        (EMBEDDER, WITH_ROLES),
        (attrs.evolve(EMBEDDER, is_asked=True), None),
    ],
)
@pytest.mark.parametrize("instruction", ["Find it", ""])
def test_an_instruction_without_a_chat_is_refused(
    pooling: PoolingInfo, tokenizer: object, instruction: str
) -> None:
    with pytest.raises(UnsupportedFeature, match="not asked in a chat") as caught:
        plan(pooling=pooling, tokenizer=tokenizer, instruction=instruction)
    assert (caught.value.field, caught.value.got) == ("instruction", instruction)


# -------------------------------------------------------------------------------------- the scores


def test_the_class_score_of_a_pair_is_its_score() -> None:
    scores = plan("a", ["b", "c"]).scores([output([0.25], [1, 2], 1, "x"), output([-0.5], [1, 3], 0, "y")])
    assert [one.outputs.score for one in scores] == [0.25, -0.5]
    assert [(one.request_id, one.prompt_token_ids, one.num_cached_tokens) for one in scores] == [
        ("x", (1, 2), 1),
        ("y", (1, 3), 0),
    ]


@pytest.mark.parametrize("length", [1.0, 0.25])  # shorter than 1 where `truncate_dim` has cut them
def test_the_score_of_two_embeddings_is_their_cosine_whatever_their_lengths(length: float) -> None:
    found = plan(["a", "b", "b"], ["c", "c", "b"], EMBEDDER)
    vectors = {"a": [1.0, 0.0], "b": [0.6 * length, 0.8 * length], "c": [-0.8, 0.6]}
    scores = found.scores([output(vectors[str(text)]) for text in found.prompts])
    assert [one.outputs.score for one in scores] == [pytest.approx(score) for score in (-0.8, 0.0, 1.0)]


def test_an_embedding_of_zeros_scores_zero() -> None:
    (score,) = plan("a", "b", EMBEDDER).scores([output([0.0, 0.0]), output([0.6, 0.8])])
    assert score.outputs.score == 0.0


def test_the_score_of_two_embeddings_counts_the_tokens_of_both() -> None:
    found = plan("a", "b", EMBEDDER)
    (score,) = found.scores([output([1.0, 0.0], [1, 2], 2, "x"), output([0.5, 0.0], [3], 1, "y")])
    assert score.prompt_token_ids == (1, 2, 3)
    assert score.num_cached_tokens == 3
    assert (score.request_id, score.task, score.finished, score.error) == ("y", "score", True, None)
