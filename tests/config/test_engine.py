"""One value, whether it came from keyword arguments, flags or the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.config.choices import (
    ATTENTION_BACKENDS,
    CALIBRATIONS,
    CONVERSIONS,
    DTYPES,
    GENERATION_CONFIGS,
    HOLD_BACKS,
    KV_CACHE_DTYPES,
    LOGPROBS_MODES,
    POLICIES,
    QUANTIZATIONS,
    REASONING_PARSERS,
    RUNNERS,
    SPECULATIVE,
    TOOL_PARSERS,
)
from triolet.config.engine import EngineConfig
from triolet.config.engine_fields import EngineFields
from triolet.config.environment import unknown_variables
from triolet.config.fields import ENVIRONMENT_PREFIX
from triolet.config.server import GatewayConfig
from triolet.core.request.param_validation import MAX_ENTRIES
from triolet.core.request.params import MAX_N
from triolet.errors import ConfigError, shown

CHOICES = {
    "dtype": DTYPES,
    "convert": CONVERSIONS,
    "quantization": QUANTIZATIONS,
    "runner": RUNNERS,
    "policy": POLICIES,
    "hold_back": HOLD_BACKS,
    "speculative": SPECULATIVE,
    "logprobs_mode": LOGPROBS_MODES,
    "tool_parser": TOOL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
    "lora_dtype": DTYPES,
    "calibration": CALIBRATIONS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "attention_backend": ATTENTION_BACKENDS,
    "generation_config": GENERATION_CONFIGS,
}
TEXTS = (
    "model",
    "tokenizer",
    "chat_template",
    "revision",
    "worker_extension",
    "weights_cache",
    "kv_store",
    "profile_dir",
    "record",
    "worker_token",
    "worker_certfile",
)
LISTS = ("devices", "api_keys", "lora_modules", "prompt_adapters", "classifier_from_token")
FLAGS = (
    "allow_special_tokens",
    "enable_prefix_caching",
    "enable_lora",
    "enforce_eager",
    "keep_standby",
    "log_stats",
    "trust_remote_code",
)
MINIMA = {
    "max_model_len": 2,
    "block_size": 1,
    "tensor_parallel_size": 1,
    "replicas": 1,
    "num_kv_blocks": 1,
    "kv_cache_bytes": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_queued_requests": 1,
    "max_queued_tokens": 1,
    "seed": 0,
    "stream_interval": 1,
    "num_speculative_tokens": 1,
    "prompt_lookup_min": 1,
    "max_loras": 1,
    "max_lora_rank": 1,
    "max_cpu_loras": 1,
    "kv_store_bytes": 1,
    "kv_pool_bytes": 0,
    "max_logprobs": -1,
    "max_n": 1,
    "max_stop_strings": 0,
    "max_logit_bias": 0,
    "max_bad_words": 0,
    "max_grammar_bytes": 1,
    "max_grammars": 1,
    "num_scheduler_steps": 1,
    "grammar_memory_bytes": 2**20,
}
SCALED = ("max_model_len", "max_num_batched_tokens", "kv_cache_bytes")  # texts such as 4k
MAXIMA = {
    "num_scheduler_steps": 64,
    "tensor_parallel_size": 64,
    "replicas": 64,
    "num_speculative_tokens": 16,
    "prompt_lookup_min": 16,
    "max_num_seqs": 2**16,
    "max_loras": 2**16,
    "max_n": MAX_N,
    "max_stop_strings": MAX_ENTRIES,
    "max_logit_bias": MAX_ENTRIES,
    "max_bad_words": MAX_ENTRIES,
    "max_grammar_bytes": 2**20,
    "max_grammars": 1024,
}
NEVER_NONE = ("grammar_timeout",)
SECONDS = ("step_timeout", "sleep_after", "priority_aging", "max_prefill_delay", *NEVER_NONE)
OPTIONAL = {field.name for field in attrs.fields(EngineConfig) if field.default is None}
OPTIONAL |= {*SECONDS, "fair_ttft_factor"} - {*NEVER_NONE}

FIELDS: dict[str, Any] = {
    "model": "folder/of/model",
    "tokenizer": "folder",
    "chat_template": "{{ messages }}",
    "generation_config": "vllm",
    "revision": "main",
    "dtype": "bfloat16",
    "convert": "embed",
    "classifier_from_token": ("no", "yes"),
    "quantization": "int8",
    "tensor_parallel_size": 2,
    "replicas": 2,
    "autoscale": (1, 3),
    "devices": ("cuda:0", "cuda:1"),
    "device": "cpu",
    "runner": "inline",
    "worker_listen": "127.0.0.1:7340",
    "worker_token": "sesame",
    "worker_certfile": "worker.pem",
    "max_model_len": 4096,
    "block_size": 8,
    "num_kv_blocks": 100,
    "kv_cache_bytes": 2**30,
    "kv_cache_dtype": "fp8",
    "attention_backend": "auto",
    "gpu_memory_utilization": 0.5,
    "enforce_eager": True,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_queued_requests": 5,
    "max_queued_tokens": 1000,
    "policy": "priority",
    "priority_aging": 9.5,
    "fair_ttft_factor": 3.5,
    "max_prefill_delay": 0.1,
    "num_scheduler_steps": 4,
    "async_scheduling": False,
    "enable_prefix_caching": False,
    "seed": 7,
    "stream_interval": 3,
    "hold_back": "blind",
    "logprobs_mode": "processed_logits",
    "max_logprobs": -1,
    "max_n": 8,
    "max_stop_strings": 4,
    "max_logit_bias": 300,
    "max_bad_words": 0,
    "max_grammar_bytes": 1000,
    "max_grammars": 4,
    "grammar_timeout": 0.5,
    "grammar_memory_bytes": 2**26,
    "tool_parser": "mistral",
    "reasoning_parser": "none",
    "speculative": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 2,
    "enable_lora": True,
    "lora_modules": ("sql=folder", "chat=other"),
    "prompt_adapters": ("sql=folder", "chat=other"),
    "max_loras": 3,
    "max_lora_rank": 64,
    "max_cpu_loras": 5,
    "lora_dtype": "bfloat16",
    "worker_extension": "package.module:Methods",
    "weights_cache": "packed",
    "calibration": "force",
    "kv_store": "prefixes",
    "kv_store_bytes": 2**30,
    "kv_pool_bytes": 2**28,
    "profile_dir": "traces",
    "record": "requests.jsonl",
    "served_model_name": "mine",
    "api_keys": ("one", "two"),
    "step_timeout": 2.5,
    "keep_standby": False,
    "sleep_after": 90.0,
    "log_stats": False,
    "allow_special_tokens": False,
    "otlp_traces_endpoint": "http://127.0.0.1:4318/v1/traces",
    "trust_remote_code": True,
}


def taken(field: str, value: Any) -> Any:
    """What a field holds that was given `value`."""
    return getattr(EngineConfig(**{field: value}), field)


def refusal(**fields: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("field", "given", "meant"),
    [
        ("dtype", "half", "float16"),
        ("dtype", "float", "float32"),
        ("lora_dtype", "half", "float16"),
        ("quantization", "awq_marlin", "awq"),
        ("quantization", "gptq_marlin", "gptq"),
        ("attention_backend", "TRITON_ATTN", "triton"),
    ],
)
def test_another_name_of_a_word_means_the_same_from_a_program_and_from_a_text(
    field: str, given: str, meant: str
) -> None:
    assert taken(field, given) == meant
    assert getattr(EngineConfig.from_texts({field: given}), field) == meant
    EngineConfig.check_texts({field: given})


@pytest.mark.parametrize("field", SCALED)
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("1.5k", 1500),
        ("25.6k", 25_600),
        ("2m", 2_000_000),
        ("1M", 2**20),
        ("1g", 10**9),
        ("2G", 2**31),
        ("1t", 10**12),
        ("1T", 2**40),
    ],
)
def test_a_number_of_tokens_or_bytes_may_have_vllms_suffixes(field: str, given: str, meant: int) -> None:
    assert getattr(EngineConfig.from_texts({field: given}), field) == meant


@pytest.mark.parametrize("given", ["1.5K", "k", "4kk", "-4k", "4 k", "1.k", "4x", ""])
def test_what_is_no_number_with_a_suffix_is_refused_with_the_forms_that_are(given: str) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len must be a whole number, such as 4096, 4k \(4000\)"):
        EngineConfig.from_texts({"max_model_len": given})


def test_the_tables_of_this_file_name_every_field() -> None:
    names = [field.name for field in attrs.fields(EngineConfig)]
    assert set(FIELDS) == set(names)
    assert {
        *CHOICES,
        *TEXTS,
        *FLAGS,
        *LISTS,
        *MINIMA,
        *SECONDS,
        "fair_ttft_factor",
        "gpu_memory_utilization",
        "device",
        "worker_listen",
        "otlp_traces_endpoint",
        "async_scheduling",
        "autoscale",
        "served_model_name",
    } == set(names)
    assert all(getattr(EngineConfig(), name) != FIELDS[name] for name in names)


def test_arguments_texts_and_environment_give_equal_configurations() -> None:
    texts = {name: ",".join(map(str, v)) if isinstance(v, tuple) else str(v) for name, v in FIELDS.items()}
    environ = {ENVIRONMENT_PREFIX + name.upper(): text for name, text in texts.items()}
    config = EngineConfig.create(**FIELDS)
    assert config == EngineConfig(**FIELDS)
    assert config == EngineConfig.from_texts(texts)
    assert config == EngineConfig.from_texts(EngineConfig.environment_fields(environ))
    assert attrs.asdict(config) == FIELDS


def test_nothing_given_is_the_defaults() -> None:
    assert EngineConfig() == EngineConfig.create() == EngineConfig.from_texts({})
    assert EngineConfig.environment_fields({}) == {}


def test_keys_are_separated_by_commas_and_are_in_no_repr() -> None:
    config = EngineConfig.from_texts({"api_keys": "sesame, two"})
    assert config == EngineConfig(api_keys=("sesame", "two"))
    assert "sesame" not in repr(config)
    with pytest.raises(ConfigError, match="api_keys must be a tuple of texts, none of them empty"):
        EngineConfig(api_keys=["one"])  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["ключ", "é", "two words", "line\nbreak", "\x7f"])
@pytest.mark.parametrize(
    ("config", "field"),
    [(EngineConfig, "api_keys"), (GatewayConfig, "api_keys"), (GatewayConfig, "priority_keys")],
)
def test_a_key_that_no_header_can_carry_is_refused_and_the_keys_are_not_shown(
    config: type[EngineConfig | GatewayConfig], field: str, key: str
) -> None:
    rule = "of visible ASCII characters, as a header has them; got a secret that is not shown"
    with pytest.raises(ConfigError, match=f"^{field} must be .*{rule}$"):
        config.from_texts({field: f"pN3/xQ==,{key}"})


def test_the_environment_is_read_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOLET_BLOCK_SIZE", "8")
    assert EngineConfig.environment_fields()["block_size"] == "8"


def test_variables_that_name_no_field_are_not_ours() -> None:
    assert EngineConfig.environment_fields({"TRIOLET_HOME": "x", "triolet_seed": "1", "SEED": "2"}) == {}


def test_a_variable_that_nothing_reads_is_found_with_the_name_nearest_to_it() -> None:
    known = {"TRIOLET_SEED": "1", "TRIOLET_PORT": "1", "TRIOLET_DEBUG": "1", "TRIOLET_CPU_TARGET": "off"}
    unknown = {"TRIOLET_MAX_NUM_SEQ": "4", "TRIOLET_XYZZY": "1"}
    environ = {**known, **unknown, "PATH": "/bin", "triolet_seed": "1"}
    assert unknown_variables(environ) == {
        "TRIOLET_MAX_NUM_SEQ": "TRIOLET_MAX_NUM_SEQS",
        "TRIOLET_XYZZY": None,
    }


def test_the_keywords_that_editors_complete_are_the_fields() -> None:
    assert EngineFields.__total__ is False
    keywords = {name: hint.__forward_arg__ for name, hint in EngineFields.__annotations__.items()}
    assert keywords == {field.name: field.type for field in attrs.fields(EngineConfig)}


@pytest.mark.parametrize("config", [Path("folder"), {"model": "folder"}, GatewayConfig()], ids=shown)
def test_anything_else_in_place_of_a_configuration_is_refused_with_what_to_write(config: Any) -> None:
    with pytest.raises(
        ConfigError, match="config must be an EngineConfig; all else is given by keyword, such as model="
    ):
        EngineConfig.of(config)


def test_a_text_in_place_of_a_configuration_is_the_model() -> None:
    assert EngineConfig.of("org/Model-1B", seed=7) == EngineConfig(model="org/Model-1B", seed=7)
    assert EngineConfig.of("mine", model="mine").model == "mine"
    with pytest.raises(ConfigError, match=r"model must be given once, .*; got \['mine', 'other'\]"):
        EngineConfig.of("mine", model="other")


def test_some_fields_of_a_configuration_can_be_changed() -> None:
    config = EngineConfig(block_size=8, seed=7)
    changed = EngineConfig.create(config, seed=8)
    assert (changed.block_size, changed.seed) == (8, 8)
    assert (config.block_size, config.seed) == (8, 7)


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        EngineConfig().seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("field", attrs.fields(EngineConfig), ids=lambda field: field.name)
def test_every_field_has_a_sentence_for_help(field: attrs.Attribute[Any]) -> None:
    text = field.metadata["help"]
    assert text[0].isupper()
    assert text.endswith(".")


# ------------------------------------------------------------------------------------ wrong values


@pytest.mark.parametrize(("field", "minimum"), MINIMA.items())
def test_a_number_has_a_least_value_and_some_have_a_greatest(field: str, minimum: int) -> None:
    maximum = MAXIMA.get(field, 2**63 - 1)
    rule = f"from {minimum} to {maximum}" if field in MAXIMA else f"of at least {minimum}"
    for value in (minimum, maximum):
        assert taken(field, value) == value
    for value in (minimum - 1, -(2**63), maximum + 1):
        error = refusal(**{field: value})
        assert str(error) == f"{field} must be a whole number {rule}; got {value}"
        assert (error.field, error.got) == (field, value)


@pytest.mark.parametrize("field", MINIMA)
@pytest.mark.parametrize(
    "value", [1.0, float("nan"), float("inf"), True, "16", "", [16], 10**5000], ids=shown
)
def test_a_number_is_not_something_like_it(field: str, value: object) -> None:
    error = refusal(**{field: value})
    assert error.field == field
    assert str(error).endswith(f"; got {shown(value)}")


@pytest.mark.parametrize("field", SECONDS)
def test_seconds_are_a_finite_number_above_0_or_none(field: str) -> None:
    for value in (1e-3, 1, 2.5, 1e9, *([] if field in NEVER_NONE else [None])):
        assert taken(field, value) == value
        assert getattr(EngineConfig.from_texts({field: str(value)}), field) == value
    for wrong in (0, -1.0, float("nan"), float("inf"), 1e10, 10**5000, True, "5", [5]):
        assert str(refusal(**{field: wrong})).startswith(
            f"{field} must be above 0 and at most 1e+09 seconds; got "
        )


def test_a_factor_is_a_finite_number_above_1_or_none() -> None:
    for value in (1.01, 2, 1e9, None):
        assert taken("fair_ttft_factor", value) == value
    for wrong in (1, 0.0, -2, float("nan"), float("inf"), True, "2"):
        rule = "fair_ttft_factor must be above 1 and at most 1e+09"
        assert str(refusal(fair_ttft_factor=wrong)).startswith(rule)


def test_a_share_of_memory_is_above_nothing_and_at_most_all_of_it() -> None:
    for value in (0.001, 0.5, 1, 1.0):
        assert taken("gpu_memory_utilization", value) == value
    for wrong in (0, -0.1, 1.01, float("nan"), float("inf"), True, "half", None):
        rule = "gpu_memory_utilization must be above 0 and at most 1"
        assert str(refusal(gpu_memory_utilization=wrong)).startswith(rule)


@pytest.mark.parametrize("field", SECONDS)
def test_a_text_that_is_no_number_of_seconds_is_refused(field: str) -> None:
    or_none = ", or none" if field in OPTIONAL else ""
    with pytest.raises(ConfigError, match=f"^{field} must be a number of seconds{or_none}; got 'soon'$"):
        EngineConfig.from_texts({field: "soon"})


@pytest.mark.parametrize("value", ["auto", "cpu", "cpu:3", "cpu:0-3+8-11", "cuda", "cuda:0", "cuda:11"])
def test_a_device_may_have_a_number(value: str) -> None:
    assert EngineConfig(device=value).device == value


@pytest.mark.parametrize(
    "value", ["", "tpu", "cuda:", "cuda:-1", "cpu:", "cpu:0-", "cpu:0,1", "cpu:0+", "cuda:1 ", 1]
)
def test_anything_else_is_no_device(value: object) -> None:
    with pytest.raises(ConfigError, match="device must be one of auto, cpu, cpu:CORES, cuda, cuda:N; got"):
        EngineConfig(device=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["127.0.0.1:0", "host.example:7340", "[::1]:7340", None])
def test_an_address_is_a_host_and_a_port(value: str | None) -> None:
    assert EngineConfig(worker_listen=value).worker_listen == value


@pytest.mark.parametrize(
    "value",
    ["", "7340", ":7340", "host", "host:", "host:x", "host:65536", "host:99999", "host..example:1", 7340],
    ids=shown,
)
def test_anything_else_is_no_address(value: Any) -> None:
    assert str(refusal(worker_listen=value)) == f"worker_listen must be HOST:PORT; got {value!r}"


@pytest.mark.parametrize("value", ["abc", "", "host:4318", "grpc://host:4317", "http://", 4318], ids=shown)
def test_spans_are_sent_to_a_url(value: Any) -> None:
    rule = f"otlp_traces_endpoint must be an http:// or https:// URL; got {value!r}"
    assert str(refusal(otlp_traces_endpoint=value)) == rule


@pytest.mark.parametrize("field", TEXTS)
@pytest.mark.parametrize("value", ["", 5, True, b"a", ["a"]], ids=shown)
def test_a_text_is_not_empty_and_nothing_else(field: str, value: object) -> None:
    got = "a secret that is not shown" if value and field == "worker_token" else repr(value)
    assert str(refusal(**{field: value})) == f"{field} must be a non-empty text; got {got}"


@pytest.mark.parametrize("field", FLAGS)
@pytest.mark.parametrize("value", [0, 1, None, "true", 1.0, []], ids=shown)
def test_a_flag_is_true_or_false_and_nothing_like_it(field: str, value: object) -> None:
    assert str(refusal(**{field: value})) == f"{field} must be true or false; got {value!r}"


def test_async_scheduling_is_on_off_or_open_and_not_on_with_drafts() -> None:
    assert [taken("async_scheduling", value) for value in (True, False, None)] == [True, False, None]
    texts = [EngineConfig.from_texts({"async_scheduling": text}) for text in ("on", "false", "None")]
    assert [config.async_scheduling for config in texts] == [True, False, None]
    assert str(refusal(async_scheduling=1)) == "async_scheduling must be true or false; got 1"
    assert str(refusal(async_scheduling=True, speculative="ngram")) == (
        "async_scheduling must be false with speculative 'ngram'; got True"
    )
    assert EngineConfig(async_scheduling=False, speculative="ngram").speculative == "ngram"


@pytest.mark.parametrize(("field", "choices"), CHOICES.items())
def test_a_choice_is_one_of_those_there_are(field: str, choices: tuple[str, ...]) -> None:
    for choice in choices:
        assert taken(field, choice) == choice
    wrong: tuple[object, ...] = ("", "other", choices[0].upper(), None, 1, [], float("nan"))
    for value in wrong:
        assert str(refusal(**{field: value})) == f"{field} must be one of {', '.join(choices)}; got {value!r}"


@pytest.mark.parametrize("field", sorted(OPTIONAL))
def test_what_is_optional_may_be_left_open(field: str) -> None:
    assert taken(field, None) is None


@pytest.mark.parametrize("field", sorted(OPTIONAL))
@pytest.mark.parametrize("text", ["none", "None"])
def test_a_flag_or_variable_leaves_an_optional_field_open_with_none(field: str, text: str) -> None:
    environ = {ENVIRONMENT_PREFIX + field.upper(): text}
    config = EngineConfig.from_texts(EngineConfig.environment_fields(environ))
    assert getattr(config, field) is None


@pytest.mark.parametrize("field", sorted(FIELDS.keys() - OPTIONAL))
def test_what_is_not_may_not(field: str) -> None:
    assert refusal(**{field: None}).field == field


@pytest.mark.parametrize(
    "wrong", [(0, 2), (2, 2), (3, 2), (1, 65), (1,), (1, 2, 3), (True, 2), [1, 2], "1,2", 3]
)
def test_numbers_of_replicas_are_a_least_and_a_larger_greatest_one(wrong: Any) -> None:
    assert EngineConfig.from_texts({"autoscale": "1, 64"}).autoscale == (1, 64)
    error = refusal(autoscale=wrong)
    assert str(error).startswith("autoscale must be (min, max) with 1 <= min < max <= 64; got ")
    for text in ("", "1,x", "1-2"):
        with pytest.raises(ConfigError, match=r"^autoscale must be MIN,MAX, or none; got "):
            EngineConfig.from_texts({"autoscale": text})


@pytest.mark.parametrize("field", ["quantisation", "max_num_seq", "Seed", "pipeline_parallel_size"])
def test_an_unknown_field_is_refused_with_those_there_are(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field} must be a field of EngineConfig \(model, ") as caught:
        EngineConfig.create(**{field: 3})
    assert (caught.value.field, caught.value.got) == (field, 3)
    with pytest.raises(ConfigError, match=f"^{field} must be a field of EngineConfig"):
        EngineConfig.from_texts({field: "3"})
    with pytest.raises(TypeError, match=field):
        taken(field, 3)


# ------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize("field", MINIMA)
@pytest.mark.parametrize("text", ["", "x", "1.5", "1e3", "0x10", "9" * 5000])
def test_a_text_that_is_no_number_is_refused(field: str, text: str) -> None:
    or_none = ", or none" if field in OPTIONAL else ""
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_texts({field: text})
    such_as = ", such as 4096, 4k (4000) or 4K (4096)" if field in SCALED else ""
    assert str(caught.value) == f"{field} must be a whole number{such_as}{or_none}; got {shown(text)}"


@pytest.mark.parametrize("field", MINIMA)
def test_a_number_out_of_range_is_refused_as_text_too(field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field} must be a whole number (of at least|from) "):
        EngineConfig.from_texts({field: "-2"})


@pytest.mark.parametrize("field", FLAGS)
@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((text, True) for text in ("1", "true", "True", "yes", "ON")),
        *((text, False) for text in ("0", "false", "False", "no", "off")),
    ],
)
def test_a_flag_has_a_few_texts(field: str, text: str, value: bool) -> None:
    assert getattr(EngineConfig.from_texts({field: text}), field) is value


@pytest.mark.parametrize("field", FLAGS)
@pytest.mark.parametrize("text", ["", "maybe", "2", "y", "None"])
def test_a_text_that_is_neither_true_nor_false_is_refused(field: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_texts({field: text})
    assert str(caught.value) == f"{field} must be true or false; got {text!r}"


@given(texts=st.dictionaries(st.sampled_from(sorted(FIELDS)), st.text(max_size=4), max_size=3))
def test_whatever_the_texts_are_a_wrong_one_is_refused_by_name(texts: dict[str, str]) -> None:
    try:
        config = EngineConfig.from_texts(texts)
    except ConfigError as error:
        wrong = error.field
    else:
        assert EngineConfig.create(**attrs.asdict(config)) == config
        return
    assert wrong in texts


# --------------------------------------------------------------------------------------- model_name


@pytest.mark.parametrize(
    ("model", "served_model_name", "name"),
    [
        (None, None, "triolet-nano"),
        (None, "mine", "mine"),
        ("folder/of/model", None, "model"),
        ("folder/of/model/", None, "model"),
        ("org/Model-1B", None, "Model-1B"),
        ("org/Model-1B", "mine", "mine"),
        ("model", None, "model"),
    ],
)
def test_the_model_is_shown_under_its_last_name(
    model: str | None, served_model_name: str | None, name: str
) -> None:
    assert EngineConfig(model=model, served_model_name=served_model_name).model_name == name


@pytest.mark.parametrize("names", [("a", "b"), ["a", "b"]], ids=shown)
def test_a_model_is_served_under_each_of_its_names_and_shown_under_the_first(names: Any) -> None:
    config = EngineConfig(model="org/Model-1B", served_model_name=names)
    assert config.model_name == "a"
    assert config.model_names == ("a", "b", "org/Model-1B")
    assert config == EngineConfig.from_texts({"model": "org/Model-1B", "served_model_name": "a, b"})


def test_one_name_of_a_model_is_a_text_however_it_was_given() -> None:
    config = EngineConfig(served_model_name="mine")
    assert config.served_model_name == "mine"
    assert EngineConfig(served_model_name=("mine",)) == EngineConfig.from_texts({"served_model_name": "mine"})
    assert EngineConfig(served_model_name=["mine"]) == config  # type: ignore[arg-type]
    assert EngineConfig(served_model_name=()) == EngineConfig()


def test_a_model_without_names_of_its_own_is_served_under_two() -> None:
    assert EngineConfig().model_names == ("triolet-nano",)
    assert EngineConfig(model="org/Model-1B").model_names == ("Model-1B", "org/Model-1B")
    assert EngineConfig(model="model").model_names == ("model",)


@pytest.mark.parametrize("value", ["", 5, True, b"a", ("a", ""), ("a", 5), ("",)], ids=shown)
def test_a_name_of_a_model_is_a_text_that_is_not_empty(value: Any) -> None:
    got = value[0] if value == ("",) else value
    rule = "served_model_name must be a non-empty text or a tuple of such texts"
    assert str(refusal(served_model_name=value)) == f"{rule}; got {got!r}"


@pytest.mark.parametrize("text", ["", ","])
def test_a_list_of_names_has_one(text: str) -> None:
    with pytest.raises(ConfigError, match="served_model_name must be one text or several"):
        EngineConfig.from_texts({"served_model_name": text})


def test_at_least_the_adapters_of_one_step_are_kept() -> None:
    assert str(refusal(max_loras=4, max_cpu_loras=3)) == "max_cpu_loras must be at least max_loras (4); got 3"
    assert EngineConfig(max_loras=4, max_cpu_loras=4).max_cpu_loras == 4


def test_adapters_are_given_where_they_are_enabled() -> None:
    rule = "lora_modules must be given together with enable_lora; got ('a=/x',)"
    assert str(refusal(lora_modules=("a=/x",))) == rule
    with pytest.raises(ConfigError, match=r"^lora_modules must be given together with enable_lora"):
        EngineConfig.from_texts({"lora_modules": "a=/x", "enable_lora": "false"})
    assert EngineConfig(lora_modules=("a=/x",), enable_lora=True).lora_modules == ("a=/x",)


def test_texts_of_a_part_of_a_configuration_are_checked_each_by_its_own_rule() -> None:
    EngineConfig.check_texts({"lora_modules": "a=/x", "max_cpu_loras": "1", "max_loras": "2"})
    for text, rule in (("0", "a whole number of at least 1"), ("x", "a whole number, or none")):
        with pytest.raises(ConfigError, match=f"^block_size must be {rule}; got"):
            EngineConfig.check_texts({"policy": "fcfs", "block_size": text})


def test_blocks_are_stored_with_a_folder_or_memory_for_them() -> None:
    assert [
        EngineConfig(**fields).stores_blocks for fields in ({}, {"kv_store": "x"}, {"kv_pool_bytes": 1})
    ] == [
        False,
        True,
        True,
    ]


def test_as_many_adapters_are_kept_as_are_configured() -> None:
    three = ("a=A", "b=B", "c=C")
    rule = "max_cpu_loras must be at least the number of lora_modules (3); got 2"
    assert str(refusal(enable_lora=True, lora_modules=three, max_cpu_loras=2)) == rule
    assert EngineConfig(enable_lora=True, lora_modules=three).num_kept_loras == 3
    assert EngineConfig(enable_lora=True, lora_modules=three, max_loras=5).num_kept_loras == 5
    assert (
        EngineConfig(enable_lora=True, lora_modules=three, max_loras=1, max_cpu_loras=8).num_kept_loras == 8
    )


def test_the_name_of_the_built_in_model_is_no_model_of_the_hub() -> None:
    assert EngineConfig(model="triolet-nano") == EngineConfig()
    assert EngineConfig(model="./triolet-nano").model == "./triolet-nano"
