"""Keywords of an engine's configuration with their types; a test compares them with the fields of `EngineConfig`."""

from __future__ import annotations

from typing import TypedDict


class EngineFields(TypedDict, total=False):
    """Keywords of `open_engine` and `EngineConfig`, for editors and type checkers."""

    model: str | None
    tokenizer: str | None
    chat_template: str | None
    generation_config: str
    revision: str | None
    dtype: str
    convert: str
    classifier_from_token: tuple[str, ...]
    quantization: str
    device: str
    runner: str
    worker_listen: str | None
    worker_token: str | None
    worker_certfile: str | None
    tensor_parallel_size: int
    replicas: int | None
    autoscale: tuple[int, int] | None
    devices: tuple[str, ...]
    max_model_len: int | None
    block_size: int | None
    num_kv_blocks: int | None
    kv_cache_bytes: int | None
    kv_cache_dtype: str
    attention_backend: str
    gpu_memory_utilization: float
    enforce_eager: bool
    max_num_seqs: int
    max_num_batched_tokens: int | None
    max_queued_requests: int
    max_queued_tokens: int
    policy: str
    priority_aging: float | None
    fair_ttft_factor: float | None
    max_prefill_delay: float | None
    num_scheduler_steps: int
    async_scheduling: bool | None
    enable_prefix_caching: bool
    seed: int
    stream_interval: int
    hold_back: str
    logprobs_mode: str
    max_logprobs: int
    max_n: int
    max_stop_strings: int
    max_logit_bias: int
    max_bad_words: int
    max_grammar_bytes: int
    max_grammars: int
    grammar_timeout: float
    grammar_memory_bytes: int
    tool_parser: str
    reasoning_parser: str
    speculative: str
    num_speculative_tokens: int
    prompt_lookup_min: int
    enable_lora: bool
    lora_modules: tuple[str, ...]
    prompt_adapters: tuple[str, ...]
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    lora_dtype: str
    worker_extension: str | None
    weights_cache: str | None
    calibration: str
    kv_store: str | None
    kv_store_bytes: int
    kv_pool_bytes: int
    profile_dir: str | None
    record: str | None
    served_model_name: str | tuple[str, ...] | None
    api_keys: tuple[str, ...]
    step_timeout: float | None
    keep_standby: bool
    sleep_after: float | None
    log_stats: bool
    otlp_traces_endpoint: str | None
    allow_special_tokens: bool
    trust_remote_code: bool
