"""vLLM's names: what its arguments are here, or why there is nothing."""

from __future__ import annotations

from collections.abc import Mapping
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
