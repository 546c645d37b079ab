"""vLLM's `EngineArgs`: its names for the fields of `EngineConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from triolet.compat.prompts import check_max_log_len
from triolet.compat.refusals import refuse
from triolet.compat.speculation import speculation_fields
from triolet.config.engine import QUANTIZATIONS, EngineConfig
from triolet.errors import ConfigError

RENAMED: Final = {
    "num_gpu_blocks_override": "num_kv_blocks",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "scheduling_policy": "policy",
    "max_num_queued_reqs": "max_queued_requests",
    "max_num_queued_tokens": "max_queued_tokens",
}
# torch's names, which vLLM takes as well.
DTYPES: Final = {"half": "float16", "float": "float32"}

# Arguments whose effect is fixed here, with the values that ask for that effect; any other value is refused.
FIXED: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "tensor_parallel_size": (1,),
        "pipeline_parallel_size": (1,),
        "data_parallel_size": (1,),
        "enable_chunked_prefill": (True, None),
        "enforce_eager": (True, False),
        "fully_sharded_loras": (False,),
        "tokenizer_mode": ("auto",),
        "task": ("auto", "generate"),
        "runner_type": ("auto", "generate"),
        "load_format": ("auto", "safetensors"),
        "kv_cache_dtype": ("auto",),
        "distributed_executor_backend": (None,),
        "skip_tokenizer_init": (False,),
        "enable_sleep_mode": (False, True),  # sleep needs no preparation
        "limit_mm_per_prompt": (None,),
    }
)
# Arguments of vLLM's that are not honoured. A program that spells out a default of vLLM's asks for nothing.
DROPPED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "worker_use_ray": "vLLM has dropped it",
        "engine_use_ray": "vLLM has dropped it",
        "swap_space": "blocks are computed again and not swapped out; vLLM has dropped it, too",
        "cpu_offload_gb": "weights stay where they are",
        "gpu_memory_utilization": "say kv_cache_memory_bytes or num_gpu_blocks_override",
        "preemption_mode": "preemption is by recompute only; vLLM has dropped it, too",
        "max_seq_len_to_capture": "nothing is captured",
    }
)
DEFAULTS: Final[Mapping[str, object]] = MappingProxyType(
    {
        **{name: choices[0] for name, choices in FIXED.items()},
        "worker_use_ray": False,
        "engine_use_ray": False,
        "swap_space": 4,
        "cpu_offload_gb": 0,
        "gpu_memory_utilization": 0.9,
        "preemption_mode": None,
        "max_seq_len_to_capture": 8192,
    }
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
        fields = {
            RENAMED.get(name, name): value
            for name, value in arguments.items()
            if not _is_settled(name, value)
        }
        if isinstance(names := fields.get("served_model_name"), list | tuple):
            # vLLM serves a model under several names at a time.
            if len(names) != 1:
                raise ConfigError("served_model_name", "one name", names)
            fields["served_model_name"] = names[0]
        if "dtype" in fields:
            fields["dtype"] = DTYPES.get(fields["dtype"], fields["dtype"])
        if fields.get("seed") is None:  # None means the default, here as in vLLM
            fields.pop("seed", None)
        # vLLM's None is `none` here, the default.
        if (quantization := fields.get("quantization", "none")) is None:
            del fields["quantization"]
        elif quantization not in QUANTIZATIONS:
            allowed = " or ".join(map(repr, QUANTIZATIONS))
            refuse(f"quantization={quantization!r}", f"it must be None or {allowed}", quantization)
        fields |= _classifier_fields(fields.pop("hf_overrides", None))
        fields |= speculation_fields(fields.pop("speculative_config", None))
        if disable_log_stats:
            fields["log_stats"] = False
        self.config = EngineConfig.create(EngineConfig(model=model), **fields)

    def __getattr__(self, name: str) -> Any:
        # `config` is missing in an object that is being copied or unpickled: looking it up would recurse.
        if name.startswith("_") or name == "config":
            raise AttributeError(name)
        if name in DEFAULTS and name not in attrs.fields_dict(EngineConfig):
            return DEFAULTS[name]  # any other value was refused
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
        known = {field.name for field in attrs.fields(EngineConfig)} | {*RENAMED, *FIXED, *DROPPED}
        known |= {"disable_log_stats", "speculative_config"}
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
        default = DEFAULTS[name]
        if value is not None and (value != default or isinstance(value, bool) != isinstance(default, bool)):
            refuse(name, DROPPED[name], value)
        return True
    if name not in FIXED:
        return False
    if value not in FIXED[name]:
        allowed = " or ".join(repr(choice) for choice in FIXED[name])
        refuse(f"{name}={value!r}", f"it must be {allowed}", value)
    return True


def _classifier_fields(overrides: object) -> dict[str, Any]:
    """Return the fields for vLLM's `hf_overrides` of a two-token reranker; any other override is refused."""
    if overrides is None or overrides == {}:
        return {}
    # what the architecture and the flag stand for in vLLM follows from the tokens here
    known = {"classifier_from_token", "architectures", "is_original_qwen3_reranker"}
    if not isinstance(overrides, Mapping) or not {"classifier_from_token"} <= overrides.keys() <= known:
        refuse("hf_overrides", "of config.json only classifier_from_token can be set", overrides)
    return {"classifier_from_token": tuple(overrides["classifier_from_token"])}
