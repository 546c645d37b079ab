from __future__ import annotations

from collections import UserDict, UserList
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.core.request.prompt import ParsedPrompt, check_prompt, parse_prompt
from triolet.errors import InvalidPrompt, PromptTooLong, shown

MESSAGES = [{"role": "user", "content": "hi"}]


def refusal(prompt: object) -> InvalidPrompt:
    with pytest.raises(InvalidPrompt) as caught:
        parse_prompt(prompt)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "token_ids", "content"),
    [
        ("hi", None, "hi"),
        ({"prompt": "hi"}, None, "hi"),
        ([1, 2], (1, 2), None),
        ((1, 2), (1, 2), None),
        (range(1, 3), (1, 2), None),
        (UserList([1, 2]), (1, 2), None),
        ({"prompt_token_ids": [1, 2]}, (1, 2), None),
        (UserDict({"prompt_token_ids": (1, 2)}), (1, 2), None),
        (MESSAGES, None, MESSAGES),
        (tuple(MESSAGES), None, tuple(MESSAGES)),
        ([], (), None),
        ({"prompt_token_ids": []}, (), None),
    ],
    ids=repr,
)
def test_a_prompt_comes_in_one_of_five_forms(
    prompt: object, token_ids: tuple[int, ...] | None, content: object
) -> None:
    parsed = parse_prompt(prompt)
    assert parsed == ParsedPrompt(token_ids, content)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [False, True, None])
def test_a_text_may_be_encoded_without_special_tokens_around_it(value: bool | None) -> None:
    parsed = parse_prompt({"prompt": "hi", "add_special_tokens": value})
    assert parsed == ParsedPrompt(content="hi", add_special_tokens=value is not False)


@pytest.mark.parametrize("value", [0, "false"], ids=repr)
def test_whether_special_tokens_are_added_is_true_or_false(value: object) -> None:
    error = refusal({"prompt": "hi", "add_special_tokens": value})
    assert str(error) == f"add_special_tokens must be true or false; got {value!r}"
    assert (error.field, error.got) == ("add_special_tokens", value)


@pytest.mark.parametrize("beside", [{"prompt": "a", "text_pair": "b"}, {"prompt_token_ids": [1]}], ids=repr)
def test_special_tokens_are_left_out_of_a_text_alone(beside: dict[str, object]) -> None:
    assert "got 'add_special_tokens'" in str(refusal({**beside, "add_special_tokens": False}))


def test_token_ids_may_come_with_their_text() -> None:
    assert parse_prompt({"prompt": "hi", "prompt_token_ids": [1]}) == ParsedPrompt((1,), text="hi")
    error = refusal({"prompt": 5, "prompt_token_ids": [1]})
    assert str(error) == "prompt beside prompt_token_ids must be text; got int"


@pytest.mark.parametrize("beside", [{"prompt": "hi"}, {"prompt_token_ids": [1]}])
def test_a_key_that_is_not_read_is_refused_by_name(beside: dict[str, object]) -> None:
    error = refusal({**beside, "multi_modal_data": {}})
    sentence = "prompt must have no other keys than prompt and prompt_token_ids; got 'multi_modal_data'"
    assert (str(error), error.field, error.got) == (sentence, "prompt", ["multi_modal_data"])


@pytest.mark.parametrize("prompt", ["", {"prompt": ""}])
def test_an_empty_text_is_a_prompt_since_its_tokenizer_may_begin_all_texts_with_a_token(
    prompt: object,
) -> None:
    assert parse_prompt(prompt) == ParsedPrompt(content="")


def test_a_key_without_a_value_is_no_key() -> None:
    assert parse_prompt({"prompt": "a", "multi_modal_data": None}) == ParsedPrompt(content="a")


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        1.5,
        True,
        b"hi",
        bytearray(b"hi"),
        {},
        {"prompt": None},
        {"prompt": ["hi"]},
        {"prompt_embeds": [0.5]},
        {1, 2},
        pytest.param(object(), id="object()"),
    ],
    ids=repr,
)
def test_anything_else_is_refused_with_the_forms_there_are(prompt: object) -> None:
    error = refusal(prompt)
    assert str(error).startswith("prompt must be a text, a list of token ids, ")
    assert str(error).endswith(f"; got {type(prompt).__name__}")
    assert (error.field, error.got) == ("prompt", type(prompt))


@pytest.mark.parametrize("token_ids", [None, 5, "12", b"12", {}, {1: 2}, {1, 2}], ids=repr)
def test_token_ids_are_a_list(token_ids: object) -> None:
    error = refusal({"prompt_token_ids": token_ids})
    assert str(error) == f"prompt_token_ids must be a list of integers; got {type(token_ids).__name__}"
    assert (error.field, error.got) == ("prompt_token_ids", type(token_ids))


@pytest.mark.parametrize("wrong", [1.0, "1", None, True, [1], b"1", float("nan"), {"a": 1}], ids=repr)
def test_token_ids_are_integers_and_nothing_like_them(wrong: object) -> None:
    error = refusal([1, wrong])
    assert str(error) == f"prompt_token_ids must contain only integers; got {wrong!r}"
    assert error.got is wrong


def test_a_wrong_item_is_shown_in_part_if_it_is_long() -> None:
    assert len(str(refusal([1, "a" * 10**6]))) < 200


def test_the_callers_list_may_change_afterwards() -> None:
    token_ids = [1, 2]
    parsed = parse_prompt(token_ids)
    token_ids.append(3)
    assert parsed.token_ids == (1, 2)


# ------------------------------------------------------------------------------ against the model


@pytest.mark.parametrize(
    ("num_tokens", "error"),
    [
        (0, InvalidPrompt("The decoder prompt cannot be empty")),
        (1, None),
        (7, None),
        (8, PromptTooLong(8, 8)),
        (9, PromptTooLong(9, 8)),
    ],
)
def test_a_prompt_has_a_token_and_leaves_room_for_one(num_tokens: int, error: InvalidPrompt | None) -> None:
    if error is None:
        check_prompt([0] * num_tokens, vocab_size=10, max_model_len=8)
    else:
        with pytest.raises(InvalidPrompt) as caught:
            check_prompt([0] * num_tokens, vocab_size=10, max_model_len=8)
        assert (type(caught.value), str(caught.value)) == (type(error), str(error))
        assert caught.value.field == "prompt"


@pytest.mark.parametrize("wrong", [-1, 10, 2**63, -(2**63) - 1, 10**5000], ids=shown)
def test_a_token_id_outside_the_vocabulary_is_named(wrong: int) -> None:
    check_prompt([0, 9], vocab_size=10, max_model_len=8)
    with pytest.raises(InvalidPrompt) as caught:
        check_prompt([0, wrong, 9], vocab_size=10, max_model_len=8)
    assert str(caught.value) == (
        f"Token id {shown(wrong)} is out of vocabulary; prompt_token_ids must be in [0, 10)"
    )
    assert (caught.value.field, caught.value.got) == ("prompt_token_ids", wrong)


junk = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.sampled_from(["prompt", "prompt_token_ids", "role"]), inner, max_size=2),
    ),
    max_leaves=5,
)


def outcome(prompt: object) -> ParsedPrompt | InvalidPrompt:
    try:
        return parse_prompt(prompt)
    except InvalidPrompt as error:
        return error


@given(prompt=junk)
def test_whatever_comes_is_a_prompt_or_is_refused_by_name(prompt: object) -> None:
    got = outcome(prompt)
    if isinstance(got, InvalidPrompt):
        assert got.field in ("prompt", "prompt_token_ids")
        assert got.field in str(got)
    else:
        assert (got.token_ids is None) != (got.content is None)


@given(token_ids=st.lists(st.integers(-2, 12), max_size=10))
def test_what_passes_the_check_is_fit_to_be_computed(token_ids: Sequence[int]) -> None:
    fits = 1 <= len(token_ids) < 8 and all(0 <= token_id < 10 for token_id in token_ids)
    try:
        check_prompt(token_ids, vocab_size=10, max_model_len=8)
    except InvalidPrompt:
        assert not fits
    else:
        assert fits
