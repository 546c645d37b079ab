"""Sampling parameters come from strangers: every value is either honoured or refused by name."""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.core.request.param_validation import MAX_ENTRIES, MAX_INT64, MAX_STOP_STRING_CHARS, MIN_INT64
from triolet.core.request.params import (
    MAX_N,
    MIN_TEMPERATURE,
    NOT_OFFERED,
    RequestOutputKind,
    SamplingParams,
)
from triolet.errors import InvalidParams, shown

NAN, INF = math.nan, math.inf
MAX_FLOAT = sys.float_info.max
OBJECT = pytest.param(object(), id="object()")  # its repr is another one in each process

# Lowest and highest value that is accepted; beside `min_tokens` stands the default max_tokens=16.
INTEGERS: dict[str, tuple[int, int]] = {
    "n": (1, MAX_N),
    "top_k": (-1, MAX_INT64),
    "seed": (MIN_INT64, MAX_INT64),
    "max_tokens": (1, MAX_INT64),
    "min_tokens": (0, 16),
    "logprobs": (-1, MAX_INT64),
    "prompt_logprobs": (-1, MAX_INT64),
    "stream_interval": (1, MAX_INT64),
    "thinking_token_budget": (-1, MAX_INT64),
}
NUMBERS: dict[str, tuple[float, float]] = {
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (math.ulp(0.0), MAX_FLOAT),
    "temperature": (0.0, 2.0),
    "top_p": (math.ulp(0.0), 1.0),
    "min_p": (0.0, 1.0),
}
FLAGS = (
    "ignore_eos",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
TEXT_LISTS = ("stop", "bad_words")
ID_LISTS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
OTHERS = (
    *("logit_bias", "output_kind", "repetition_detection", "skip_reading_prefix_cache", "extra_args"),
    "structured_outputs",
)
OPTIONAL = (
    *("seed", "max_tokens", "logprobs", "prompt_logprobs", "stream_interval", "repetition_detection"),
    *("skip_reading_prefix_cache", "extra_args", *TEXT_LISTS, *ID_LISTS, "logit_bias"),
    *("structured_outputs", "thinking_token_budget"),
)


def taken(field: str, value: Any) -> Any:
    """What a field holds that was given `value`."""
    return getattr(SamplingParams(**{field: value}), field)


def refusal(**fields: Any) -> InvalidParams:
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(**fields)
    return caught.value


def vocabulary_refusal(vocab_size: int, **fields: Any) -> InvalidParams:
    params = SamplingParams(**fields)
    with pytest.raises(InvalidParams) as caught:
        params.check_vocabulary(vocab_size)
    return caught.value


def test_the_tables_of_this_file_name_every_field() -> None:
    tested = {*INTEGERS, *NUMBERS, *FLAGS, *TEXT_LISTS, *ID_LISTS, *OTHERS}
    assert tested == {field.name for field in attrs.fields(SamplingParams)}


def test_the_defaults_are_those_of_vllm() -> None:
    assert attrs.asdict(SamplingParams(), recurse=False) == {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "flat_logprobs": False,
        "logprob_token_ids": (),
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "stream_interval": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": (),
        "repetition_detection": None,
        "skip_reading_prefix_cache": None,
        "structured_outputs": None,
        "thinking_token_budget": None,
        "extra_args": None,
    }


# ------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n must be at least 1, got 0."),
        ({"n": 20_000}, "n must be at most 16384, got 20000."),
        ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got 2."),
        ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3."),
        ({"frequency_penalty": -2.5}, "frequency_penalty must be in [-2, 2], got -2.5."),
        ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0."),
        ({"temperature": -1}, "temperature must be non-negative, got -1."),
        ({"temperature": 3}, "temperature must be in [0, 2], got 3."),
        ({"temperature": NAN}, "temperature must be a finite number, got nan."),
        ({"repetition_penalty": INF}, "repetition_penalty must be a finite number, got inf."),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
        ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2."),
        ({"top_k": 1.5}, "top_k must be an integer, got float"),
        ({"min_p": 2}, "min_p must be in [0, 1], got 2."),
        ({"stop": [""]}, "stop cannot contain an empty string."),
        ({"stop": ""}, "stop cannot contain an empty string."),
        (
            {"stop": ["."], "detokenize": False},
            "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.",
        ),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must contain only integers, got ['a']."),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
        ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1."),
        (
            {"min_tokens": 20, "max_tokens": 10},
            "min_tokens must be less than or equal to max_tokens=10, got 20.",
        ),
        ({"logprobs": -2}, "logprobs must be non-negative or -1, got -2."),
        ({"bad_words": [""]}, "bad_words cannot contain an empty string. Got bad_words=['']"),
        ({"seed": 2**63}, "seed must fit in 64 bits, got 9223372036854775808."),
        ({"detokenize": 1}, "detokenize must be True or False, got 1."),
    ],
)
def test_a_refusal_says_what_vllm_says(fields: dict[str, Any], message: str) -> None:
    field = next(iter(fields))
    error = refusal(**fields)
    assert str(error) == message
    assert (error.field, error.parameter) == (field, field)
    assert error.got is error.value


def test_a_refusal_is_a_value_error_that_carries_what_came() -> None:
    error = refusal(temperature=-1)
    assert isinstance(error, ValueError)
    assert (error.parameter, error.value) == ("temperature", -1)
    assert type(error.value) is int


@pytest.mark.parametrize(
    "keyword",
    [
        "best_of",
        "use_beam_search",
        "length_penalty",
        "early_stopping",
        "logits_processors",
        "guided_decoding",
        "truncate_prompt_tokens",
        "watermarking",
        "Temperature",
    ],
)
def test_what_is_not_honoured_is_an_unknown_keyword(keyword: str) -> None:
    fields: dict[str, Any] = {keyword: 1}
    with pytest.raises(TypeError, match=f"^Unexpected keyword argument '{keyword}'$"):
        SamplingParams(**fields)


def test_parameters_are_given_by_name_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1)  # type: ignore[call-arg]


# ---------------------------------------------------------------------------- one number at a time


@pytest.mark.parametrize(("field", "bounds"), INTEGERS.items())
def test_an_integer_is_taken_within_its_bounds_and_not_beyond(field: str, bounds: tuple[int, int]) -> None:
    low, high = bounds
    for value in (low, high):
        is_unbounded = (field, value) == ("thinking_token_budget", -1)
        assert taken(field, value) == (None if is_unbounded else value)
    for value in (low - 1, high + 1):
        error = refusal(**{field: value})
        assert error.field == field
        assert error.value == value
        assert str(value) in str(error)


@pytest.mark.parametrize(("field", "bounds"), NUMBERS.items())
def test_a_number_is_taken_within_its_bounds_and_not_beyond(field: str, bounds: tuple[float, float]) -> None:
    low, high = bounds
    for value in (low, high):
        assert taken(field, value) == value
    for value in (math.nextafter(low, -INF), math.nextafter(high, INF)):
        error = refusal(**{field: value})
        assert error.field == field
        assert error.value == value
        assert str(value) in str(error)


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 10**400, -(10**400), 10**5000], ids=shown)
def test_a_number_is_finite(field: str, value: float) -> None:
    error = refusal(**{field: value})
    rule = "a finite number" if field in ("temperature", "repetition_penalty") else "in "
    assert str(error).startswith(f"{field} must be {rule}")
    assert error.value is value


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**5000], ids=shown)
def test_an_integer_fits_in_64_bits(field: str, value: int) -> None:
    error = refusal(**{field: value})
    assert str(error).startswith(f"{field} must fit in 64 bits, got ")
    assert error.value == value


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", [1.0, NAN, INF, "1", "", b"1", [1], (), {}, 1j, OBJECT], ids=shown)
def test_an_integer_is_not_something_like_it(field: str, value: object) -> None:
    error = refusal(**{field: value})
    assert str(error) == f"{field} must be an integer, got {type(value).__name__}"
    assert error.value is value


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", ["0.5", "", b"1", None, True, False, [0.5], (), {}, 0.5j], ids=shown)
def test_a_number_is_not_something_like_it(field: str, value: object) -> None:
    assert str(refusal(**{field: value})) == f"{field} must be a number, got {value!r}."


@pytest.mark.parametrize("field", [field for field in INTEGERS if not field.endswith("logprobs")])
@pytest.mark.parametrize("value", [True, False])
def test_a_flag_is_no_integer(field: str, value: bool) -> None:
    assert str(refusal(**{field: value})) == f"{field} must be an integer, got bool"


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_a_flag_asks_for_one_log_probability_or_for_that_of_the_chosen_token(field: str) -> None:
    assert (taken(field, True), taken(field, False)) == (1, 0)


@pytest.mark.parametrize("field", FLAGS)
@pytest.mark.parametrize("value", [0, 1, 0.0, NAN, 2**63, "true", "", None, [], [True]], ids=shown)
def test_a_flag_is_true_or_false_and_nothing_like_it(field: str, value: object) -> None:
    error = refusal(**{field: value})
    assert str(error) == f"{field} must be True or False, got {value!r}."
    assert error.field == field


@pytest.mark.parametrize("field", FLAGS)
def test_a_flag_is_taken(field: str) -> None:
    assert [taken(field, value) for value in (True, False)] == [True, False]


@pytest.mark.parametrize("field", NUMBERS)
def test_a_whole_number_becomes_a_float(field: str) -> None:
    assert type(taken(field, 1)) is float


@pytest.mark.parametrize("field", OPTIONAL)
def test_none_is_the_absence_of_an_optional_parameter(field: str) -> None:
    assert not taken(field, None)


@pytest.mark.parametrize("field", ["n", "top_k", "min_tokens", "output_kind"])
def test_none_is_no_value_of_a_parameter_that_has_a_default(field: str) -> None:
    assert refusal(**{field: None}).field == field


@pytest.mark.parametrize("value", [0, 1, "delta", "CUMULATIVE", NAN, []])
def test_the_output_kind_is_one_of_three(value: object) -> None:
    assert str(refusal(output_kind=value)) == f"output_kind must be a RequestOutputKind, got {value!r}."


# -------------------------------------------------------------------------------- what is normalised


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0])
def test_a_temperature_of_zero_is_greedy_and_turns_the_filters_off(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=7, min_p=0.1)
    assert params.is_greedy
    assert params == SamplingParams(temperature=0)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


@pytest.mark.parametrize("temperature", [1e-12, 1e-5, 0.001, 0.0099])
def test_a_small_temperature_is_raised_with_a_warning_at_the_callers_line(temperature: float) -> None:
    with pytest.warns(UserWarning, match=f"temperature {temperature} is raised to 0.01") as caught:
        params = SamplingParams(temperature=temperature)
    assert params.temperature == MIN_TEMPERATURE
    assert not params.is_greedy
    assert caught[0].filename == __file__


def test_a_temperature_that_is_large_enough_is_left_alone() -> None:
    assert SamplingParams(temperature=MIN_TEMPERATURE).temperature == MIN_TEMPERATURE


def test_seed_minus_one_asks_for_a_drawn_one() -> None:
    assert SamplingParams(seed=-1) == SamplingParams(seed=None)
    assert SamplingParams(seed=-2).seed == -2
    assert SamplingParams(seed=0).seed == 0


def test_without_max_tokens_min_tokens_may_be_anything() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6


def test_equal_wishes_are_equal_and_can_be_keys() -> None:
    listed = SamplingParams(stop=["a"], stop_token_ids=[3, 4, 3], logit_bias={1: 2}, temperature=1)
    tupled = SamplingParams(stop="a", stop_token_ids=(3, 4), logit_bias={1: 2.0}, temperature=1.0)
    assert listed == tupled
    assert hash(listed) == hash(tupled)
    assert listed.stop_token_ids == (3, 4)


def test_what_the_caller_does_with_its_lists_later_changes_nothing() -> None:
    stop, token_ids, bias = ["a"], [1], {1: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=token_ids, logit_bias=bias)
    stop.append("b")
    token_ids.append(2)
    bias[2] = 2.0
    assert params == SamplingParams(stop=["a"], stop_token_ids=[1], logit_bias={1: 1.0})


def test_parameters_do_not_change() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


# ---------------------------------------------------------------------------------- lists


@pytest.mark.parametrize("field", ["bad_words", *ID_LISTS])
@pytest.mark.parametrize("value", [5, NAN, "ab", "", b"ab", {}, {1: 1}, True], ids=shown)
def test_a_list_is_not_something_like_it(field: str, value: object) -> None:
    error = refusal(**{field: value})
    assert str(error) == f"{field} must be a list, got {value!r}."
    assert error.field == field


@pytest.mark.parametrize("value", [5, NAN, b"ab", {}, {"a"}, True], ids=shown)
def test_stop_is_a_text_or_a_list(value: object) -> None:
    assert str(refusal(stop=value)) == f"stop must be a list, got {value!r}."


@pytest.mark.parametrize("field", TEXT_LISTS)
@pytest.mark.parametrize("item", [5, NAN, None, b"ab", [], ["a"], True], ids=shown)
def test_a_list_of_texts_holds_only_texts(field: str, item: object) -> None:
    assert str(refusal(**{field: ["a", item]})).startswith(f"{field} must contain only strings, got ")


@pytest.mark.parametrize("field", ID_LISTS)
@pytest.mark.parametrize("item", [1.0, NAN, None, "1", True, [1]], ids=shown)
def test_a_list_of_token_ids_holds_only_integers(field: str, item: object) -> None:
    assert str(refusal(**{field: [1, item]})).startswith(f"{field} must contain only integers, got ")


@pytest.mark.parametrize(
    ("field", "limit", "item"),
    [
        ("bad_words", MAX_ENTRIES, "a"),
        ("stop_token_ids", MAX_ENTRIES, 1),
        ("allowed_token_ids", MAX_ENTRIES, 1),
    ],
)
def test_a_list_has_a_longest_length(field: str, limit: int, item: object) -> None:
    assert taken(field, [item] * limit)
    error = refusal(**{field: [item] * (limit + 1)})
    assert str(error) == f"{field} must have at most {limit} entries, got {limit + 1}."
    assert error.value == limit + 1


@pytest.mark.parametrize("field", [*TEXT_LISTS, *ID_LISTS])
def test_a_list_of_any_length_is_refused_before_it_is_read(field: str) -> None:
    assert refusal(**{field: range(10**12)}).value == 10**12


def test_a_stop_text_has_a_longest_length() -> None:
    longest = "a" * MAX_STOP_STRING_CHARS
    assert SamplingParams(stop=longest).stop == (longest,)
    error = refusal(stop=["b", longest + "a"])
    assert str(error) == "stop must contain strings of at most 4096 characters, got 4097."


# ------------------------------------------------------------------------------- logit_bias


@pytest.mark.parametrize("value", [5, NAN, "ab", [], [(1, 2.0)], True], ids=shown)
def test_logit_bias_is_a_mapping(value: object) -> None:
    error = refusal(logit_bias=value)
    assert str(error) == f"logit_bias must be a mapping from token id to bias, got {value!r}."


@pytest.mark.parametrize("key", ["1", 1.0, None, True, (1,)], ids=shown)
def test_the_keys_of_logit_bias_are_integers(key: object) -> None:
    assert (
        str(refusal(logit_bias={key: 1.0}))
        == f"logit_bias must have integer token ids as keys, got {[key]!r}."
    )


@pytest.mark.parametrize(
    ("bias", "rule"),
    [
        (NAN, "a finite number"),
        (INF, "a finite number"),
        (10**400, "a finite number"),
        ("1", "a number"),
        (None, "a number"),
        (True, "a number"),
    ],
)
def test_the_values_of_logit_bias_are_finite_numbers(bias: object, rule: str) -> None:
    error = refusal(logit_bias={1: bias})
    assert str(error).startswith(f"logit_bias must be {rule}, got ")
    assert error.value is bias


def test_logit_bias_has_a_greatest_size() -> None:
    bias = dict.fromkeys(range(MAX_ENTRIES), 1.0)
    assert SamplingParams(logit_bias=bias).logit_bias == bias
    assert refusal(logit_bias={**bias, -1: 1.0}).value == MAX_ENTRIES + 1


# ------------------------------------------------------------------------ against the model


@pytest.mark.parametrize("field", [*ID_LISTS, "logit_bias"])
@pytest.mark.parametrize("token_id", [-1, 100, 2**63, 10**5000], ids=shown)
def test_every_token_id_is_in_the_vocabulary(field: str, token_id: int) -> None:
    def fields(*token_ids: int) -> dict[str, Any]:
        return {field: dict.fromkeys(token_ids, 1.0) if field == "logit_bias" else list(token_ids)}

    SamplingParams(**fields(0, 99)).check_vocabulary(100)
    error = vocabulary_refusal(100, **fields(0, token_id))
    assert "out-of-vocab token id" in str(error)
    assert str(error).endswith(". Vocabulary size: 100")
    assert (error.field, error.value) == (field, [token_id])


def test_an_empty_choice_of_tokens_is_refused_at_the_model_as_in_vllm() -> None:
    assert str(vocabulary_refusal(100, allowed_token_ids=[])) == "allowed_token_ids is not None and empty!"


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_an_empty_list_asks_for_nothing(field: str) -> None:
    fields: dict[str, Any] = {field: {} if field == "logit_bias" else []}
    params = SamplingParams(**fields)
    params.check_vocabulary(100)
    assert not getattr(params, field)


# ------------------------------------------------------------------------------------ anything at all

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-(2**63) - 1, -(2**63), 2**63 - 1, 2**63, 10**400]),
    st.floats(),
    st.floats(0.0, 2.0),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from(RequestOutputKind),
)
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.integers(), st.text()), inner, max_size=3)
    ),
    max_leaves=6,
)
any_fields = st.fixed_dictionaries(
    {},
    optional={field.name: st.one_of(junk, st.just(field.default)) for field in attrs.fields(SamplingParams)},
)


def outcome(fields: dict[str, Any], vocab_size: int) -> SamplingParams | InvalidParams:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            params = SamplingParams(**fields)
        params.check_vocabulary(vocab_size)
    except InvalidParams as error:
        return error
    return params


@given(fields=any_fields, vocab_size=st.integers(1, 200_000))
def test_any_value_is_taken_or_refused_by_name(fields: dict[str, Any], vocab_size: int) -> None:
    got = outcome(fields, vocab_size)
    if isinstance(got, InvalidParams):
        assert got.field in fields
        assert got.field in str(got)
        assert len(str(got)) < 300
    else:
        assert outcome(attrs.asdict(got, recurse=False), vocab_size) == got
        assert hash(attrs.evolve(got)) == hash(got)


def test_a_bad_word_has_a_longest_length() -> None:
    assert SamplingParams(bad_words=["x" * 4096]).bad_words == ("x" * 4096,)
    with pytest.raises(
        InvalidParams, match="bad_words must contain words of at most 4096 characters, got 4097"
    ):
        SamplingParams(bad_words=["fine", "x" * 4097])


def test_type_checkers_know_what_every_list_and_mapping_takes() -> None:
    annotations = SamplingParams.__init__.__annotations__
    fields = ("stop", "stop_token_ids", "logprobs", "logit_bias", "allowed_token_ids", "bad_words")
    assert [field for field in fields if "Any" in str(annotations[field])] == []


# ----------------------------------------------------------------------------- from a request's fields


def test_what_was_not_said_is_the_default() -> None:
    nothing = {field.name: None for field in attrs.fields(SamplingParams) if field.name != "max_tokens"}
    assert SamplingParams.from_optional(**nothing) == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional(temperature=0.5, stop="a") == SamplingParams(
        temperature=0.5, stop="a"
    )


def test_arguments_of_vllm_that_ask_for_nothing_are_let_through() -> None:
    nothing: dict[str, Any] = dict.fromkeys(NOT_OFFERED)
    without_clone: dict[str, Any] = {"skip_clone": True}
    for made in (SamplingParams(seed=3, **nothing), SamplingParams.from_optional(seed=3, **nothing)):
        assert made == SamplingParams(seed=3, **without_clone) == SamplingParams(seed=3)
    for name in NOT_OFFERED:
        asked: dict[str, Any] = {name: [1]}
        with pytest.raises(TypeError, match=f"^Unexpected keyword argument '{name}'$"):
            SamplingParams(**asked)


def test_a_temperature_that_is_raised_is_told_at_the_line_that_gives_it() -> None:
    with pytest.warns(UserWarning, match="is raised to") as caught:
        SamplingParams(temperature=0.001)
    assert caught[0].filename == __file__


def test_biases_of_a_request_have_texts_as_keys_and_are_cut() -> None:
    params = SamplingParams.from_optional(logit_bias={"5": 200, 6: -1e9, "7": 0.5})
    assert params.logit_bias == {5: 100.0, 6: -100.0, 7: 0.5}
    assert SamplingParams(logit_bias={5: 200.0}).logit_bias == {5: 200.0}


@pytest.mark.parametrize("bias", [{"a": 1.0}, {None: 1.0}, {"5": "1"}, {"5": NAN}, [5], "5"])
def test_other_biases_of_a_request_are_refused(bias: Any) -> None:
    with pytest.raises(InvalidParams) as caught:
        SamplingParams.from_optional(logit_bias=bias)
    assert caught.value.field == "logit_bias"


def test_an_unknown_field_of_a_request_is_refused_as_elsewhere() -> None:
    with pytest.raises(TypeError, match=r"^Unexpected keyword argument 'best_of'$"):
        SamplingParams.from_optional(best_of=2)


def test_stop_strings_have_a_greatest_length_together() -> None:
    assert len(SamplingParams(stop=["a" * 4096] * 4).stop) == 4
    error = refusal(stop=["a" * 4096] * 5)
    assert str(error) == "stop must have at most 16384 characters together, got 20480."


def test_named_tokens_are_at_most_128() -> None:
    assert len(SamplingParams(logprob_token_ids=range(128)).logprob_token_ids) == 128
    assert refusal(logprob_token_ids=range(129)).value == 129
