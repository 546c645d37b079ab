"""vLLM's `EngineArgs`: its names for the fields of `EngineConfig`."""

from __future__ import annotations

import copy
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import Field, field, make_dataclass
from enum import Enum
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final, TypeVar

import attrs

from triolet.compat.operations.flags import add_flags
from triolet.compat.prompts import check_max_log_len
from triolet.compat.refusals import refuse
from triolet.compat.speculation import speculation_fields
from triolet.config.engine import EngineConfig
from triolet.config.vllm_names import DROPPED, ELSEWHERE, FIXED, IN_VLLM, RENAMED
from triolet.errors import ConfigError, shown

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
        "speculative_config": None,
        "hf_overrides": None,
    }
)
# Pairs of which one says the opposite of the other.
_OPPOSITES: Final = (("enable_log_requests", "disable_log_requests"), ("log_stats", "disable_log_stats"))
Parser = TypeVar("Parser", bound=ArgumentParser)
# Fields that have a value here where vLLM's default is None, its own choice.
_CHOSEN_FOR_NONE: Final = frozenset(
    {
        *("seed", "enable_prefix_caching", "max_num_seqs", "max_queued_requests", "max_queued_tokens"),
        *("attention_backend", "quantization"),
    }
)


# Fields of `EngineConfig` that follow from other arguments, by vLLM's names, where they are not given themselves.
_DERIVED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "log_stats": ("disable_log_stats",),
        "classifier_from_token": ("hf_overrides",),
        **dict.fromkeys(
            ("speculative", "num_speculative_tokens", "prompt_lookup_min"), ("speculative_config",)
        ),
        "runner": ("distributed_executor_backend", "worker_use_ray"),
    }
)


class _DataclassFields:
    """Fields of `EngineArgs` for the functions of `dataclasses`, which programs for vLLM call on its arguments."""

    def __get__(self, args: EngineArgs | None, owner: type[EngineArgs]) -> dict[str, Field[Any]]:
        """Return the fields by name: of an object also what was given beside vLLM's names."""
        given = () if args is None else vars(args)
        names = [
            name
            for name in dict.fromkeys((*_NAMES, *(IN_VLLM.get(name, name) for name in given)))
            # What follows from another argument is not said twice: a copy may change that argument.
            if name in given or not set(_DERIVED.get(name, ())).intersection(given)
        ]
        made = ((name, _field_of(name, logs_requests=owner._LOGS_REQUESTS)) for name in names)
        return {name: found for name, found in made if found is not None}


_NAMES: Final = tuple(
    dict.fromkeys(
        (
            *(IN_VLLM.get(one.name, one.name) for one in attrs.fields(EngineConfig)),
            *("disable_log_stats", "enable_log_requests", "speculative_config", "hf_overrides"),
            *("distributed_executor_backend", *FIXED, *DROPPED, *ELSEWHERE),
        )
    )
)


@cache
def _field_of(name: str, *, logs_requests: bool) -> Field[Any] | None:
    """Return the dataclass field of an argument; None for one that only says the opposite of another."""
    if name == "disable_log_requests" or (name == "max_log_len" and not logs_requests):
        return None
    owner = AsyncEngineArgs if logs_requests else EngineArgs
    default = getattr(owner(), name)
    options: Any = {"default": default}
    if type(default).__hash__ is None:
        options = {"default_factory": partial(copy.copy, default)}
    made: Any = make_dataclass(owner.__name__, [(name, Any, field(**options))])
    found: Field[Any] = made.__dataclass_fields__[name]
    return found


class EngineArgs:
    """Arguments of an engine under vLLM's names; every field of `EngineConfig` is also accepted by its own name.

    Setting an argument afterwards is the same as giving it, and `vars()` are the arguments. For `dataclasses` they are
    fields: `asdict`, `fields` and `replace` work.

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

    # Beside the arguments, so that `vars()` has these alone.
    __slots__ = ("__dict__", "_settled", "config")
    _LOGS_REQUESTS = False
    __dataclass_fields__ = _DataclassFields()

    config: EngineConfig
    _settled: dict[str, Any]

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
        self._settled = {name: value for name, value in arguments.items() if _is_settled(name, value)}
        fields = {
            RENAMED.get(name, name): value for name, value in arguments.items() if name not in self._settled
        }
        # vLLM's kinds of models, and not its processes: what a model pools, its folder says.
        if fields.get("runner") in ("auto", "generate", "pooling"):
            del fields["runner"]
        if fields.get("convert") == "none":
            fields["convert"] = "auto"
        if fields.get("reasoning_parser") == "":
            fields["reasoning_parser"] = "auto"
        for name in _CHOSEN_FOR_NONE & fields.keys():
            if fields[name] is None:
                del fields[name]
        if fields.get("replicas") == 1:  # vLLM's default
            del fields["replicas"]
        if fields.get("max_model_len") in (-1, "auto"):  # the longest that fits, which is the default here
            del fields["max_model_len"]
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
        given = {
            "model": model,
            "disable_log_stats": disable_log_stats or fields.get("log_stats") is False,
            "enable_log_requests": enable_log_requests,
            "disable_log_requests": not enable_log_requests,
            "max_log_len": check_max_log_len(max_log_len),
            **arguments,
        }
        self.config = EngineConfig.create(EngineConfig(model=model), **fields)
        self.__dict__ = given

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or name in EngineArgs.__slots__:
            object.__setattr__(self, name, value)
            return
        # A new object first: a value that is refused changes nothing.
        field = RENAMED.get(name, name)
        others = {key: given for key, given in vars(self).items() if RENAMED.get(key, key) != field}
        for pair in _OPPOSITES:
            if name in pair:
                others = {key: given for key, given in others.items() if key not in pair}
        changed = type(self)(**others, **{name: value})
        self._settled, self.config, self.__dict__ = changed._settled, changed.config, vars(changed)

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
    def add_cli_args(cls, parser: Parser) -> Parser:
        """Add a flag for each argument to a parser, which is returned; those that are not honoured are not in its help.

        What is parsed goes to `from_cli_args`, or as `LLM(**vars(args))`.
        """
        add_flags(parser, cls(), logs_requests=cls._LOGS_REQUESTS)
        return parser

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

    __slots__ = ()
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
