"""Any value that may be sent, for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from triolet.config.choices import DTYPES, RUNNERS
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import LoadProgress
from triolet.core.request.lora import AdapterModule, AdapterSupport
from triolet.core.request.model_info import GenerationDefaults, ModelInfo
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.pooling_params import TASKS, PoolingInfo, PoolingParams
from triolet.core.request.repetition_detection import RepetitionDetectionParams
from triolet.core.step_plan import (
    AdapterStart,
    PlanRow,
    PooledVectors,
    PromptLogprobs,
    RowFailure,
    RowStart,
    SampledToken,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from triolet.ipc.failures import Failure
from triolet.ipc.messages import Halt, PrepareAdapter

MANY = 4  # items of a list, at most: what a long list does, a short one does

any_text = st.text(st.characters(), max_size=12)  # lone surrogates, too: a request id may be any text
names = st.text(min_size=1, max_size=12)
naturals = st.integers(0, 2**63 - 1)
token_ids = st.integers(0, 2**31 - 1)
token_lists = st.lists(token_ids, max_size=MANY).map(tuple)
numbers = st.floats(allow_nan=False)
fractions = st.floats(0.01, 1.0)
maybe = st.none


def lists(items: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, max_size=MANY).map(tuple)


sampling_params = st.builds(
    SamplingParams,
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 2),
    temperature=st.just(0.0) | st.floats(0.01, 2.0),
    top_p=fractions,
    top_k=st.integers(-1, 1000),
    min_p=st.floats(0, 1),
    seed=maybe() | naturals,
    stop=st.lists(names, max_size=MANY),
    stop_token_ids=token_lists,
    ignore_eos=st.booleans(),
    max_tokens=maybe() | st.integers(10, 2**63 - 1),
    min_tokens=st.integers(0, 10),
    logprobs=maybe() | st.integers(-1, 20),
    prompt_logprobs=maybe() | st.integers(-1, 20),
    flat_logprobs=st.booleans(),
    logprob_token_ids=token_lists,
    skip_special_tokens=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    output_kind=st.sampled_from(RequestOutputKind),
    stream_interval=maybe() | st.integers(1, 100),
    repetition_detection=maybe()
    | st.builds(
        RepetitionDetectionParams,
        max_pattern_size=st.integers(9, 99),
        min_pattern_size=st.integers(0, 9),
        min_count=st.integers(2, 9),
    ),
    skip_reading_prefix_cache=maybe() | st.booleans(),
    logit_bias=maybe() | st.dictionaries(token_ids, st.floats(-100, 100), max_size=MANY),
    allowed_token_ids=maybe() | token_lists,
    bad_words=st.lists(names, max_size=MANY),
)
pooling_params = st.builds(
    PoolingParams,
    task=maybe() | st.sampled_from(TASKS),
    use_activation=maybe() | st.booleans(),
    dimensions=maybe() | st.integers(1, 2**40),
    step_tag_id=maybe() | token_ids,
    returned_token_ids=maybe() | token_lists,
)
row_starts = st.builds(
    RowStart,
    row_id=naturals,
    request_id=any_text,
    epoch=naturals,
    prompt_token_ids=token_lists,
    output_token_ids=token_lists,
    params=sampling_params,
    seed=st.integers(-(2**63), 2**63 - 1),
    ending_token_ids=st.frozensets(token_ids, max_size=MANY),
    bad_words_token_ids=lists(token_lists),
    wants_prompt_logprobs=st.booleans(),
    pooling=maybe() | pooling_params,
    adapter_slot=maybe() | naturals,
)
plan_rows = st.builds(
    PlanRow,
    naturals,
    naturals,
    naturals,
    token_lists,
    st.booleans(),
    st.none() | st.binary(max_size=64),
    token_lists,
)
adapter_starts = st.builds(AdapterStart, slot=naturals, name=any_text, path=any_text, digest=any_text)
plans = st.builds(
    StepPlan, naturals, token_lists, lists(row_starts), lists(plan_rows), naturals, lists(adapter_starts)
)
configs = st.builds(
    EngineConfig,
    model=maybe() | names,
    tokenizer=maybe() | names,
    revision=maybe() | names,
    dtype=st.sampled_from(DTYPES),
    device=st.sampled_from(("auto", "cpu", "cuda", "cuda:1")),
    runner=st.sampled_from(RUNNERS),
    max_model_len=maybe() | st.integers(2, 2**40),
    kv_cache_bytes=maybe() | st.integers(1, 2**50),
    step_timeout=maybe() | st.integers(1, 100) | st.floats(0.5, 100),
    enable_prefix_caching=st.booleans(),
    trust_remote_code=st.booleans(),
)

progress = st.builds(LoadProgress, any_text, naturals, naturals)
generation_defaults = st.builds(
    GenerationDefaults,
    eos_token_ids=token_lists,
    temperature=maybe() | numbers,
    top_p=maybe() | numbers,
    top_k=maybe() | naturals,
    min_p=maybe() | numbers,
    repetition_penalty=maybe() | numbers,
    max_new_tokens=maybe() | naturals,
)
infos = st.builds(
    ModelInfo,
    folder=any_text,
    architecture=any_text,
    backend=any_text,
    vocab_size=naturals,
    max_position=naturals,
    max_model_len=naturals,
    num_kv_blocks=naturals,
    block_size=naturals,
    dtype=any_text,
    device=any_text,
    generation=generation_defaults,
    generates=st.booleans(),
    pooling=maybe()
    | st.builds(
        PoolingInfo,
        tasks=st.just(TASKS),
        size=naturals,
        is_matryoshka=st.booleans(),
        matryoshka_dimensions=token_lists,
        labels=lists(any_text),
        default_prompt=any_text,
        is_rendered=st.booleans(),
    ),
    process_id=maybe() | naturals,
    adapters=maybe()
    | st.builds(
        AdapterSupport,
        lists(st.builds(AdapterModule, any_text, any_text, naturals, naturals, naturals, st.booleans())),
        any_text,
        naturals,
    ),
)
logprobs = st.builds(TokenLogprobs, token_lists, lists(numbers), naturals)
sampled_tokens = st.builds(SampledToken, any_text, naturals, naturals, token_ids, maybe() | logprobs)
row_failures = st.builds(RowFailure, any_text, naturals, any_text)
prompt_logprobs = st.builds(PromptLogprobs, naturals, naturals, lists(logprobs))
pooled_vectors = st.builds(PooledVectors, naturals, naturals, naturals, st.binary(max_size=64), st.booleans())
row_results = sampled_tokens | prompt_logprobs | row_failures | pooled_vectors
results = st.builds(StepResult, naturals, lists(row_results), numbers, maybe() | any_text, st.booleans())
arguments = maybe() | any_text | st.integers(-(2**63), 2**63 - 1) | numbers | st.booleans() | lists(any_text)
failures = st.builds(Failure, any_text, any_text, st.dictionaries(any_text, arguments, max_size=MANY))

requests = configs | plans | st.builds(Halt) | st.builds(PrepareAdapter, any_text, any_text, st.booleans())
replies = progress | infos | results | failures
