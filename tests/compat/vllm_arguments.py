"""Defaults of the engine arguments of vLLM 0.32, as its dataclass has them, but for the model."""

from __future__ import annotations

from typing import Any, Final

_NONE = """
    served_model_name tokenizer hf_config_path allowed_media_domains download_dir safetensors_load_strategy
    max_model_len cudagraph_capture_sizes max_cudagraph_capture_size distributed_executor_backend
    distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind_nodes numa_bind_cpus device_ids
    dcp_comm_backend dcp_q_replicate cp_kv_cache_interleave_size data_parallel_rank data_parallel_start_rank
    data_parallel_size_local data_parallel_address data_parallel_rpc_port enable_batch_sharded_sampling
    elastic_ep_max_dp_size disable_nccl_for_dp_synchronization max_parallel_loading_workers block_size
    enable_prefix_caching disable_cascade_attn kv_cache_memory_bytes max_num_batched_tokens
    max_num_scheduled_tokens max_num_seqs max_num_active_seqs max_num_queued_reqs max_num_queued_tokens
    revision code_revision hf_token tokenizer_revision quantization quantization_config mm_processor_kwargs
    mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
    io_processor_plugin video_pruning_rate default_mm_loras max_cpu_loras lora_target_modules
    max_lora_cls_labels num_gpu_blocks_override enable_chunked_prefill disable_hybrid_kv_cache_manager
    reasoning_parser_plugin speculative_config spec_method spec_model spec_tokens watermark_config
    diffusion_config show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
    custom_histogram_buckets scheduler_cls pooler_config engram_config enable_flashinfer_autotune
    logging_config log_level log_config_file kv_transfer_config kv_events_config ec_transfer_config
    reasoning_config attention_backend mamba_block_size prefix_match_unit mamba_ssu_algorithm
    logits_processors async_scheduling kv_offloading_size weight_transfer_config gdn_prefill_backend
    kda_prefill_backend kda_decode_backend
"""
_FALSE = """
    enable_return_routed_experts return_sampling_mask skip_tokenizer_init enable_prompt_embeds
    trust_remote_code numa_bind data_parallel_hybrid_lb data_parallel_external_lb
    data_parallel_multi_port_external_lb enable_hc_sp enable_expert_parallel enable_ep_weight_filter
    enable_elastic_ep enable_dbo enable_eplb disable_sliding_window long_prefill_token_threshold_adaptive
    use_fp64_gumbel enable_trace_replay disable_log_stats aggregate_engine_logging
    allow_deprecated_quantization enforce_eager disable_custom_all_reduce enable_shm_tensor_arena
    language_model_only enable_mm_embeds interleave_mm_strings mm_encoder_only skip_mm_profiling enable_lora
    fully_sharded_loras enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format
    enable_moe_shared_loras ray_workers_use_nsight disable_chunked_mm_input kv_cache_metrics
    cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details
    jit_monitor_verbose enable_mm_processor_stats enable_sleep_mode sleep_mode_offload_cudagraph
    enable_cumem_allocator enable_nccl_comm_suspend enable_mamba_shared_prefix_checkpoint use_replayssm
    enable_mamba_cache_stochastic_rounding kv_sharing_fast_prefill enable_fault_tolerance tokens_only
    fail_on_environ_validation enable_log_requests
"""
_AUTO = """
    runner convert tokenizer_mode load_format config_format dtype kv_cache_dtype moe_backend linear_backend
    sparse_indexer_topk_backend offload_backend mm_processor_device lora_dtype worker_cls generation_config
    model_impl mamba_cache_dtype mamba_ssm_cache_dtype
"""
CONFIGURATIONS: Final = """
    ir_op_priority eplb_config structured_outputs_config aux_output_config compilation_config
    attention_config mamba_config kernel_config profiler_config ec_manager_config fault_tolerance_config
""".split()
"""Arguments whose defaults are configurations, dataclasses with their own defaults."""

VLLM_DEFAULTS: Final[dict[str, Any]] = {
    **dict.fromkeys(_NONE.split()),
    **dict.fromkeys(_FALSE.split(), False),
    **dict.fromkeys(_AUTO.split(), "auto"),
    "model_weights": "",
    "allowed_local_media_path": "",
    "safetensors_prefetch_num_threads": 8,
    "safetensors_prefetch_block_size": 16777216,
    "seed": 0,
    "pipeline_parallel_size": 1,
    "master_addr": "127.0.0.1",
    "master_port": 29501,
    "nnodes": 1,
    "node_rank": 0,
    "tensor_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "dcp_kv_cache_interleave_size": 1,
    "data_parallel_size": 1,
    "data_parallel_backend": "mp",
    "all2all_backend": "allgather_reducescatter",
    "ubatch_size": 0,
    "dbo_decode_token_threshold": 32,
    "dp_sync_interval": 16,
    "dbo_prefill_token_threshold": 512,
    "expert_placement_strategy": "linear",
    "_api_process_count": 1,
    "_api_process_rank": 0,
    "prefix_caching_hash_algo": "sha256",
    "prefix_cache_retention_interval": 0,
    "cpu_offload_gb": 0,
    "cpu_offload_params": set(),
    "offload_group_size": 0,
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
    "offload_params": set(),
    "gpu_memory_utilization": 0.92,
    "long_prefill_token_threshold": 0,
    "max_logprobs": 20,
    "logprobs_mode": "raw_logprobs",
    "hf_overrides": {},
    "model_class_overrides": {},
    "limit_mm_per_prompt": {},
    "media_io_kwargs": {},
    "mm_processor_cache_gb": 4,
    "mm_processor_cache_type": "lru",
    "mm_hasher_algorithm": "blake3",
    "mm_shm_cache_max_object_size_mb": 128,
    "mm_encoder_tp_mode": "weights",
    "mm_encoder_fp8_scale_save_margin": 1.5,
    "renderer_num_workers": 1,
    "video_pruning_method": "evs",
    "mm_tensor_ipc": "direct_rpc",
    "mm_ipc_gpu_memory_gb": 0,
    "mm_device_do_normalize": True,
    "max_loras": 1,
    "max_lora_rank": 16,
    "model_loader_extra_config": {},
    "ignore_patterns": ["original/**/*"],
    "scheduler_reserve_full_isl": True,
    "prefill_schedule_interval": 1,
    "watermark": 0.0,
    "reasoning_parser": "",
    "per_request_spec_decode_metrics": "none",
    "kv_cache_metrics_sample": 0.01,
    "jit_monitor_mode": "warn",
    "scheduling_policy": "fcfs",
    "worker_extension_cls": "",
    "sleep_preserve_parameter_names": [],
    "override_generation_config": {},
    "kv_cache_dtype_skip_layers": [],
    "mamba_cache_mode": "none",
    "replayssm_buffer_len": 16,
    "mamba_backend": "triton",
    "mamba_cache_philox_rounds": 0,
    "additional_config": {},
    "use_tqdm_on_load": True,
    "pt_load_map_location": "cpu",
    "stream_interval": 1,
    "swa_bounded_replay": True,
    "optimization_level": 2,
    "performance_mode": "balanced",
    "kv_offloading_backend": "native",
    "shutdown_timeout": 0,
}
