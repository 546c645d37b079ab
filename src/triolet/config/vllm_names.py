"""vLLM's names: what its arguments and the flags of `vllm serve` are here, or why there is nothing.

`triolet.compat.EngineArgs` and the hints of the command line read the same tables. A name has underscores here, as an
argument of `EngineArgs`; the flag of that name has dashes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

RENAMED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "num_gpu_blocks_override": "num_kv_blocks",
        "kv_cache_memory_bytes": "kv_cache_bytes",
        "scheduling_policy": "policy",
        "max_num_queued_reqs": "max_queued_requests",
        "max_num_queued_tokens": "max_queued_tokens",
        "data_parallel_size": "replicas",
    }
)
IN_VLLM: Final[Mapping[str, str]] = MappingProxyType({ours: theirs for theirs, ours in RENAMED.items()})
"""vLLM's names of the fields of `EngineConfig` that have another one here."""
# Arguments whose effect is fixed here, with the values that ask for that effect; any other value is refused.
FIXED: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "pipeline_parallel_size": (1,),
        "enable_chunked_prefill": (True, None),
        "fully_sharded_loras": (False,),
        "tokenizer_mode": ("auto",),
        "task": ("auto", "generate"),
        "runner_type": ("auto", "generate"),
        "load_format": ("auto", "safetensors"),
        "skip_tokenizer_init": (False,),
        "enable_sleep_mode": (False, True),  # sleep needs no preparation
        "limit_mm_per_prompt": (None, {}),
    }
)
# Arguments of vLLM's that are not honoured. A program that spells out a default of vLLM's asks for nothing.
DROPPED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "engine_use_ray": "vLLM has dropped it",
        "swap_space": "blocks are computed again and not swapped out; vLLM has dropped it, too",
        "cpu_offload_gb": "weights stay where they are",
        "preemption_mode": "preemption is by recompute only; vLLM has dropped it, too",
        "max_seq_len_to_capture": "graphs are for sequences of any length; vLLM has dropped it, too",
    }
)
# Further arguments of vLLM's, which have no counterpart here: let through only without a value.
UNKNOWN_HERE: Final = """
    enable_return_routed_experts return_sampling_mask model_weights hf_config_path enable_prompt_embeds
    allowed_local_media_path allowed_media_domains safetensors_load_strategy safetensors_prefetch_num_threads
    safetensors_prefetch_block_size config_format cudagraph_capture_sizes max_cudagraph_capture_size
    ir_op_priority master_addr master_port nnodes node_rank distributed_timeout_seconds
    cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids
    prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend dcp_q_replicate
    dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_rank data_parallel_start_rank
    data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb
    data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend enable_hc_sp
    enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter moe_backend linear_backend
    sparse_indexer_topk_backend all2all_backend enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size
    dbo_decode_token_threshold dp_sync_interval dbo_prefill_token_threshold disable_nccl_for_dp_synchronization
    eplb_config enable_eplb expert_placement_strategy max_parallel_loading_workers prefix_caching_hash_algo
    prefix_cache_retention_interval disable_sliding_window disable_cascade_attn offload_backend
    cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step offload_params
    max_num_scheduled_tokens long_prefill_token_threshold long_prefill_token_threshold_adaptive
    max_num_active_seqs use_fp64_gumbel enable_trace_replay aggregate_engine_logging code_revision
    model_class_overrides tokenizer_revision quantization_config allow_deprecated_quantization
    disable_custom_all_reduce enable_shm_tensor_arena language_model_only enable_mm_embeds interleave_mm_strings
    media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm
    mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend
    mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
    mm_encoder_fp8_scale_save_margin io_processor_plugin renderer_num_workers skip_mm_profiling
    video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
    mm_device_do_normalize default_mm_loras lora_target_modules enable_tower_connector_lora
    specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels
    ray_workers_use_nsight model_loader_extra_config ignore_patterns disable_chunked_mm_input
    scheduler_reserve_full_isl prefill_schedule_interval watermark disable_hybrid_kv_cache_manager
    structured_outputs_config aux_output_config reasoning_parser_plugin watermark_config diffusion_config
    show_hidden_metrics_for_version collect_detailed_traces per_request_spec_decode_metrics kv_cache_metrics
    kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing
    enable_mfu_metrics enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose
    enable_mm_processor_stats scheduler_cls pooler_config compilation_config attention_config engram_config
    mamba_config kernel_config enable_flashinfer_autotune monokernel logging_config log_level log_config_file
    kv_transfer_config kv_events_config ec_transfer_config ec_manager_config reasoning_config
    sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator
    enable_nccl_comm_suspend model_impl kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype
    mamba_block_size prefix_match_unit mamba_cache_mode
    enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm mamba_backend mamba_ssu_algorithm
    enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds additional_config use_tqdm_on_load
    pt_load_map_location logits_processors kv_sharing_fast_prefill swa_bounded_replay
    optimization_level performance_mode fault_tolerance_config enable_fault_tolerance tokens_only
    shutdown_timeout watchdog_config weight_transfer_config fail_on_environ_validation gdn_prefill_backend
    kda_prefill_backend kda_decode_backend _api_process_count _api_process_rank
"""
ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(UNKNOWN_HERE.split(), "triolet has nothing of the kind"),
        "override_generation_config": (
            "defaults are those of generation_config.json, or vLLM's own with `generation_config` vllm; requests give "
            "theirs"
        ),
        "profiler_config": "the folder of traces is `profile_dir`",
        "worker_extension_cls": "the methods of the worker are `worker_extension`, as module:Class",
        "worker_cls": "the methods of the worker are `worker_extension`, as module:Class",
        "hf_token": "the hub's client reads HF_TOKEN",
        "download_dir": "the hub's client reads HF_HOME",
        "kv_offloading_size": "KV stays in its cache",
        "kv_offloading_backend": "KV stays in its cache",
        **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), "see `speculative_config`"),
    }
)

# Flags of `vllm serve` beside the arguments of an engine, by the fields or flags that they are here.
_RENAMED_FLAGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tool_call_parser": "tool_parser",
        "api_key": "api_keys",
        "ssl_certfile": "certfile",
        "ssl_keyfile": "keyfile",
        "disable_log_stats": "no_log_stats",
        "worker_extension_cls": "worker_extension",
    }
)
_SHORT_FLAGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "-tp": "tensor_parallel_size",
        "-pp": "pipeline_parallel_size",
        "-dp": "data_parallel_size",
        "-ep": "enable_expert_parallel",
        "-q": "quantization",
        "-asc": "api_server_count",
        "-cc": "compilation_config",
        "-ac": "attention_config",
        "-O": "optimization_level",
        "-n": "nnodes",
        "-r": "node_rank",
    }
)
_NO_LOG_OF_REQUESTS: Final = "the server writes no line for a request; GET /v1/requests has those under way"
_NO_UVICORN: Final = "there is no uvicorn, and no access log"
_RUNNER: Final = "--runner says it: thread, process, remote or ray"
_NO_IMAGES: Final = "there are no inputs but texts and tokens"
_SPECULATION: Final = "--speculative ngram and its fields say it"
# What flags of `vllm serve` are here that no single flag stands for.
_FLAGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "enable_auto_tool_choice": "tool calls need no switch; leave it out",
        "enable_chunked_prefill": "prefill is always chunked; leave it out",
        "enable_sleep_mode": "sleep needs no switch; leave it out",
        "enable_reasoning": "--reasoning-parser says it, by default as the chat template does",
        "enable_prompt_tokens_details": "usage always has prompt_tokens_details; leave it out",
        "enable_force_include_usage": "a request's stream_options.include_usage asks for it",
        "enable_server_load_tracking": "GET /load is always there; leave it out",
        "task": "the model's folder says what it computes; --convert embed or classify asks for more",
        "limit_mm_per_prompt": _NO_IMAGES,
        "hf_overrides": "of config.json only classifier_from_token can be set, with --classifier-from-token",
        "rope_scaling": "config.json of the folder says it",
        "rope_theta": "config.json of the folder says it",
        "guided_decoding_backend": "one library compiles all grammars; leave it out",
        **dict.fromkeys(
            ("speculative_config", "speculative_model", "spec_method", "spec_model", "spec_tokens"),
            _SPECULATION,
        ),
        **dict.fromkeys(("distributed_executor_backend", "worker_use_ray"), _RUNNER),
        "config": "a preset, in a file of its own, has the settings of a model",
        "api_server_count": "one process answers clients; --replicas computes with several",
        "headless": "`triolet worker` computes for a server on another machine",
        "root_path": "routes begin at /; a proxy has to take its prefix away",
        "middleware": "there is no place for code of others in the server",
        **dict.fromkeys(
            ("enable_log_requests", "disable_log_requests", "enable_log_outputs"), _NO_LOG_OF_REQUESTS
        ),
        "max_log_len": _NO_LOG_OF_REQUESTS,
        **dict.fromkeys(("uvicorn_log_level", "disable_uvicorn_access_log"), _NO_UVICORN),
        "disable_access_log_for_endpoints": _NO_UVICORN,
        "disable_fastapi_docs": "there are no such pages; leave it out",
        "disable_frontend_multiprocessing": "--runner thread computes in the process of the server",
        **dict.fromkeys(
            ("allow_credentials", "allowed_methods", "allowed_headers"),
            "--allowed-origins alone says which pages may ask",
        ),
        **dict.fromkeys(
            ("ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh"),
            "TLS has --certfile and --keyfile; a proxy can do more",
        ),
        "response_role": "the role of answers is assistant",
        "chat_template_content_format": "the template gets the messages as they are; leave it out",
        "trust_request_chat_template": "a request cannot bring a template; --chat-template is the server's",
        "default_chat_template_kwargs": "a request's chat_template_kwargs says it",
        "return_tokens_as_token_ids": "tokens of logprobs are texts, with their bytes",
        "exclude_tools_when_tool_choice_none": "the template gets no tools then; leave it out",
        "tool_parser_plugin": "the formats of --tool-parser are all there are",
        "tool_server": "tools are called by clients",
        "enable_request_id_headers": "answers have ids of their own",
        "enable_tokenizer_info_endpoint": "there is no such route; POST /tokenize and /detokenize are there",
        "h11_max_incomplete_event_size": "the longest head of a request is fixed; --max-body-bytes bounds bodies",
        "h11_max_header_count": "the longest head of a request is fixed; --max-body-bytes bounds bodies",
    }
)


def flag_hint(flag: str, known: Collection[str]) -> str | None:
    """Return what a flag of `vllm serve` is here, completing "no such option FLAG: ..."; None if vLLM has none such.

    Args:
        flag: as it was written, such as `--data-parallel-size` or `-tp`.
        known: flags of the command, such as `--replicas`.
    """
    flag = flag.partition(".")[0]  # of a part of it, as in --speculative-config.method
    name = _SHORT_FLAGS.get(flag) or flag.lstrip("-").replace("-", "_").removeprefix("no_")
    ours = _flag(RENAMED.get(name) or _RENAMED_FLAGS.get(name) or name)
    if ours in known:
        return f"here it is {ours}"
    reason = _FLAGS.get(name) or _fixed(name) or DROPPED.get(name) or ELSEWHERE.get(name)
    return None if reason is None else re.sub(r"`(\w+)`", lambda field: _named(field[1], known), reason)


def short_flag_of(word: str) -> str | None:
    """Return the short flag of vLLM's that a word of a command line is, such as `-tp` of `-tp=2`, or None."""
    flag = word.partition("=")[0]
    return flag if flag in _SHORT_FLAGS else None


def _fixed(name: str) -> str | None:
    if name not in FIXED:
        return None
    values = [str(value) for value in FIXED[name] if value not in (None, False)]
    return f"it is always {' or '.join(values)}; leave it out" if values else "there is no such thing here"


def _named(field: str, known: Collection[str]) -> str:
    return flag if (flag := _flag(field)) in known else f"`{field}`"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
