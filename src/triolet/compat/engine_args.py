"""vLLM's `EngineArgs`: its names for the fields of `EngineConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

import attrs

from triolet.compat.prompts import check_max_log_len
from triolet.compat.refusals import refuse
from triolet.compat.speculation import speculation_fields
from triolet.config.engine import QUANTIZATIONS, EngineConfig
from triolet.errors import ConfigError, shown

RENAMED: Final = {
    "num_gpu_blocks_override": "num_kv_blocks",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "scheduling_policy": "policy",
    "max_num_queued_reqs": "max_queued_requests",
    "max_num_queued_tokens": "max_queued_tokens",
    "data_parallel_size": "replicas",
}
# vLLM's names that differ; others are the same here, or refused.
REASONING_PARSERS: Final = {"": "auto", "openai_gptoss": "gpt_oss"}
# torch's names, which vLLM takes as well.
DTYPES: Final = {"half": "float16", "float": "float32"}

# Where the model is computed, by vLLM's names; remote is triolet's own.
BACKENDS: Final = {"uni": "thread", "mp": "process", "ray": "ray", "remote": "remote"}
# The same by the names of classes, vLLM's and triolet's, which are given themselves or as `module.Class`.
EXECUTOR_CLASSES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "UniProcExecutor": ("thread", "inline"),
        "MultiprocExecutor": ("process",),
        "RayDistributedExecutor": ("ray",),
        "RayExecutorV2": ("ray",),
        "InlineExecutor": ("inline",),
        "ThreadExecutor": ("thread",),
        "ProcessExecutor": ("process",),
        "LocalGroup": ("process",),
        "RemoteExecutor": ("remote", "ray"),
        "RemoteGroup": ("remote", "ray"),
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
    kv_transfer_config kv_events_config ec_transfer_config ec_manager_config reasoning_config generation_config
    sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator
    enable_nccl_comm_suspend override_generation_config model_impl kv_cache_dtype_skip_layers
    mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size prefix_match_unit mamba_cache_mode
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
# Defaults of vLLM 0.32 that are no plain "nothing": a program that spells one out asks for what is done anyway.
_SPELLED_OUT: Final[Mapping[str, object]] = MappingProxyType(
    {
        "safetensors_prefetch_num_threads": 8,
        "safetensors_prefetch_block_size": 16777216,
        "master_addr": "127.0.0.1",
        "master_port": 29501,
        "nnodes": 1,
        "node_rank": 0,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "dcp_kv_cache_interleave_size": 1,
        "data_parallel_backend": "mp",
        "all2all_backend": "allgather_reducescatter",
        "ubatch_size": 0,
        "dbo_decode_token_threshold": 32,
        "dp_sync_interval": 16,
        "dbo_prefill_token_threshold": 512,
        "expert_placement_strategy": "linear",
        "prefix_caching_hash_algo": "sha256",
        "prefix_cache_retention_interval": 0,
        "offload_group_size": 0,
        "offload_num_in_group": 1,
        "offload_prefetch_step": 1,
        "long_prefill_token_threshold": 0,
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
        "ignore_patterns": ["original/**/*"],
        "scheduler_reserve_full_isl": True,
        "prefill_schedule_interval": 1,
        "watermark": 0.0,
        "per_request_spec_decode_metrics": "none",
        "kv_cache_metrics_sample": 0.01,
        "jit_monitor_mode": "warn",
        "mamba_cache_mode": "none",
        "replayssm_buffer_len": 16,
        "mamba_backend": "triton",
        "mamba_cache_philox_rounds": 0,
        "use_tqdm_on_load": True,
        "pt_load_map_location": "cpu",
        "swa_bounded_replay": True,
        "optimization_level": 2,
        "performance_mode": "balanced",
        "kv_offloading_backend": "native",
        "shutdown_timeout": 0,
        "_api_process_count": 1,
        "_api_process_rank": 0,
    }
)
DEFAULTS: Final[Mapping[str, object]] = MappingProxyType(
    {
        **_SPELLED_OUT,
        **{name: choices[0] for name, choices in FIXED.items()},
        "distributed_executor_backend": None,
        "worker_use_ray": False,
        "engine_use_ray": False,
        "swap_space": 4,
        "cpu_offload_gb": 0,
        "preemption_mode": None,
        "max_seq_len_to_capture": 8192,
    }
)
# Fields that have a value here where vLLM's default is None, its own choice.
_CHOSEN_FOR_NONE: Final = frozenset(
    {"seed", "enable_prefix_caching", "max_num_seqs", "max_queued_requests", "max_queued_tokens"}
)


class EngineArgs:
    """Arguments of an engine under vLLM's names; every field of `EngineConfig` is also accepted by its own name.

    Args:
        model: folder, GGUF file or hub id; by default triolet-nano.
        disable_log_stats: no line in the log every ten seconds.
        enable_log_requests: lines in the log about every request of an `AsyncLLM`; see `AsyncEngineArgs`.
        disable_log_requests: True asks for no such lines; the name that early versions of vLLM have.
        max_log_len: characters or token ids of a prompt in the log; None for all.
        **arguments: such as `max_model_len`, `max_num_seqs`, `scheduling_policy`, `num_gpu_blocks_override`.
    Raises:
        UnsupportedFeature: an argument of vLLM's that is not honoured.
        ConfigError: an unknown argument, or a value out of range.
    """

    _LOGS_REQUESTS = False

    def __init__(
        self,
        model: str | None = None,
        *,
        disable_log_stats: bool = False,
        enable_log_requests: bool = False,
        disable_log_requests: bool | None = None,
        max_log_len: int | None = None,
        **arguments: Any,
    ) -> None:
        if not self._LOGS_REQUESTS and (enable_log_requests or max_log_len is not None):
            name = "enable_log_requests" if enable_log_requests else "max_log_len"
            refuse(name, "AsyncEngineArgs has it: AsyncLLM logs requests")
        if enable_log_requests and disable_log_requests:
            raise ConfigError("enable_log_requests", "False beside disable_log_requests=True", True)
        self.enable_log_requests, self.disable_log_requests = enable_log_requests, not enable_log_requests
        self.max_log_len = check_max_log_len(max_log_len)
        self._settled = {name: value for name, value in arguments.items() if _is_settled(name, value)}
        fields = {
            RENAMED.get(name, name): value for name, value in arguments.items() if name not in self._settled
        }
        if isinstance(names := fields.get("served_model_name"), list | tuple):
            # vLLM serves a model under several names at a time.
            if len(names) != 1:
                raise ConfigError("served_model_name", "one name", names)
            fields["served_model_name"] = names[0]
        # vLLM's kinds of models, and not its processes: what a model pools, its folder says.
        if fields.get("runner") in ("auto", "generate", "pooling"):
            del fields["runner"]
        if fields.get("convert") == "none":
            fields["convert"] = "auto"
        if isinstance(reasoning := fields.get("reasoning_parser"), str):
            fields["reasoning_parser"] = REASONING_PARSERS.get(reasoning, reasoning)
        for name in _CHOSEN_FOR_NONE & fields.keys():
            if fields[name] is None:
                del fields[name]
        if fields.get("replicas") == 1:  # vLLM's default
            del fields["replicas"]
        if "dtype" in fields:
            fields["dtype"] = DTYPES.get(fields["dtype"], fields["dtype"])
        # vLLM's None is its own choice, and here the default.
        if (backend := fields.get("attention_backend", "")) is None:
            del fields["attention_backend"]
        elif backend == "TRITON_ATTN":
            fields["attention_backend"] = "triton"
        # vLLM's None is `none` here, the default.
        if (quantization := fields.get("quantization", "none")) is None:
            del fields["quantization"]
        elif quantization not in QUANTIZATIONS:
            allowed = " or ".join(map(repr, QUANTIZATIONS))
            refuse(f"quantization={quantization!r}", f"it must be None or {allowed}", quantization)
        self._settled |= {
            name: fields[name]
            for name in ("distributed_executor_backend", "worker_use_ray")
            if name in fields
        }
        fields |= _runner_fields(
            fields.pop("distributed_executor_backend", None), fields.pop("worker_use_ray", None)
        )
        fields |= _classifier_fields(fields.pop("hf_overrides", None))
        fields |= speculation_fields(fields.pop("speculative_config", None))
        if disable_log_stats:
            fields["log_stats"] = False
        self.config = EngineConfig.create(EngineConfig(model=model), **fields)

    def __getattr__(self, name: str) -> Any:
        # `config` is missing in an object that is being copied or unpickled: looking it up would recurse.
        if name == "config" or (name.startswith("_") and name not in _SPELLED_OUT):
            raise AttributeError(name)
        if name in self._settled:
            return self._settled[name]
        if name == "data_parallel_size":
            return self.config.num_replicas
        if name in (*DEFAULTS, *ELSEWHERE) and name not in attrs.fields_dict(EngineConfig):
            return DEFAULTS.get(name)
        return getattr(self.config, RENAMED.get(name, name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EngineArgs):
            return NotImplemented
        return self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash(self._facts())

    def _facts(self) -> tuple[object, ...]:
        return self.config, self.enable_log_requests, self.max_log_len

    @classmethod
    def from_cli_args(cls, args: object) -> EngineArgs:
        """Make arguments from the attributes of an `argparse.Namespace`; attributes of other names are left alone."""
        # A namespace of vLLM's parser has many attributes that are none of an engine's.
        known = {field.name for field in attrs.fields(EngineConfig)} | {*RENAMED, *DEFAULTS, *ELSEWHERE}
        known |= {"disable_log_stats", "speculative_config", "hf_overrides"}
        if cls._LOGS_REQUESTS:
            known |= {"enable_log_requests", "disable_log_requests", "max_log_len"}
        return cls(**{name: value for name, value in vars(args).items() if name in known})

    def create_engine_config(self) -> EngineConfig:
        """Return triolet's configuration with the same meaning."""
        return self.config


class AsyncEngineArgs(EngineArgs):
    """Arguments of an `AsyncLLM`; the same as `EngineArgs`, and those of the lines about requests."""

    _LOGS_REQUESTS = True


def _is_settled(name: str, value: object) -> bool:
    """Return True for an argument that asks for the fixed behaviour; refuse one that asks for another."""
    if name in DROPPED:
        if value is not None and not _is_same(value, DEFAULTS[name]):
            refuse(name, DROPPED[name], value)
        return True
    if name in ELSEWHERE and name not in attrs.fields_dict(EngineConfig):
        if not _asks_for_nothing(value, DEFAULTS.get(name)):
            refuse(name, ELSEWHERE[name], value)
        return True
    if name not in FIXED:
        return False
    if value not in FIXED[name]:
        allowed = " or ".join(repr(choice) for choice in FIXED[name])
        refuse(f"{name}={value!r}", f"it must be {allowed}", value)
    return True


def _asks_for_nothing(value: object, default: object) -> bool:
    value = value.value if isinstance(value, Enum) else value
    if (
        value is None
        or value is False
        or value in ({}, [], (), set(), "", "auto")
        or _is_same(value, default)
    ):
        return True
    # vLLM's arguments of an engine hold whole configurations, whose defaults are those of their classes.
    return hasattr(value, "__dataclass_fields__") and value == type(value)()


def _is_same(value: object, default: object) -> bool:
    # False == 0 in Python, and means something else here.
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def _runner_fields(backend: object, uses_ray: object) -> dict[str, Any]:
    """Return the field for vLLM's names of where the model is computed."""
    if uses_ray not in (None, False, True):
        raise ConfigError("worker_use_ray", "true or false", uses_ray)
    if backend is None:
        return {"runner": "ray"} if uses_ray else {}
    runner = runners_of("distributed_executor_backend", backend)[0]
    if uses_ray and runner != "ray":
        raise ConfigError("worker_use_ray", f"False beside distributed_executor_backend={backend!r}", True)
    return {"runner": runner}


def runners_of(field: str, executor: object) -> tuple[str, ...]:
    """Return the runners that an executor's name or class stands for, the one that it chooses first.

    Args:
        field: named in the error.
        executor: a name of vLLM's, such as `mp`, a class of vLLM's or triolet's, or such a class as `module.Class`.
    Raises:
        UnsupportedFeature: it is another one; programs cannot bring classes of their own.
    """
    if isinstance(executor, str) and executor in BACKENDS:
        return (BACKENDS[executor],)
    name = executor.rpartition(".")[2] if isinstance(executor, str) else getattr(executor, "__name__", "")
    if name not in EXECUTOR_CLASSES:
        allowed = ", ".join((*map(repr, BACKENDS), *EXECUTOR_CLASSES))
        refuse(field, f"it must be None or one of {allowed}; got {shown(executor)}", executor)
    return EXECUTOR_CLASSES[name]


def with_executor(config: EngineConfig, executor: object) -> EngineConfig:
    """Return the configuration with the runner that `executor_class` stands for.

    Raises:
        ConfigError: the configuration names another one.
        UnsupportedFeature: see `runners_of`.
    """
    if executor is None:
        return config
    runners = runners_of("executor_class", executor)
    if config.runner == "auto":
        return attrs.evolve(config, runner=runners[0])
    if config.runner not in runners:
        raise ConfigError("executor_class", f"one for the configuration's runner {config.runner!r}", executor)
    return config


def _classifier_fields(overrides: object) -> dict[str, Any]:
    """Return the fields for vLLM's `hf_overrides` of a two-token reranker; any other override is refused."""
    if overrides is None or overrides == {}:
        return {}
    # what the architecture and the flag stand for in vLLM follows from the tokens here
    known = {"classifier_from_token", "architectures", "is_original_qwen3_reranker"}
    if not isinstance(overrides, Mapping) or not {"classifier_from_token"} <= overrides.keys() <= known:
        refuse("hf_overrides", "of config.json only classifier_from_token can be set", overrides)
    return {"classifier_from_token": tuple(overrides["classifier_from_token"])}
