"""Words that fields of `EngineConfig` allow, and other names of theirs that mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from triolet.core.scheduling.policies import registry as policies
from triolet.core.tools import REASONING_FORMATS, TOOL_FORMATS

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
# torch's names, which vLLM takes as well
DTYPE_ALIASES: Final[Mapping[str, str]] = MappingProxyType({"half": "float16", "float": "float32"})
CONVERSIONS: Final = ("auto", "embed", "classify")
CALIBRATIONS: Final = ("auto", "off", "force")
INT8_ACTIVATIONS: Final = "int8-activations"
FP8_ACTIVATIONS: Final = "fp8-activations"
# What is done with weights or inputs while the model is loaded.
ROUNDINGS: Final = ("none", "int8", "int4", INT8_ACTIVATIONS, FP8_ACTIVATIONS)
# How the weights are stored: found out by itself, and checked where it is named.
STORED_METHODS: Final = (
    *(
        "awq",
        "gptq",
        "auto-round",
        "fp8",
        "fbgemm_fp8",
        "compressed-tensors",
        "modelopt",
        "bitsandbytes",
        "mxfp4",
    ),
    "gguf",
)
QUANTIZATIONS: Final = (*ROUNDINGS, *STORED_METHODS)
# vLLM's names of its kernels for the same files
QUANTIZATION_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {"awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt_fp4": "modelopt"}
)
ATTENTION_BACKENDS: Final = ("triton", "auto", "fa2", "fa3", "fa4")
ATTENTION_ALIASES: Final[Mapping[str, str]] = MappingProxyType({"TRITON_ATTN": "triton"})  # vLLM's
KV_CACHE_DTYPES: Final = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")  # vLLM's
RUNNERS: Final = ("auto", "thread", "process", "inline", "remote", "ray")
POLICIES: Final = tuple(policies.POLICIES)
LOGPROBS_MODES: Final = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
TOOL_PARSERS: Final = ("auto", "none", *TOOL_FORMATS)
# vLLM's names of its parsers for gpt-oss
TOOL_PARSER_ALIASES: Final[Mapping[str, str]] = MappingProxyType({"openai": "gpt_oss"})
REASONING_PARSER_ALIASES: Final[Mapping[str, str]] = MappingProxyType({"openai_gptoss": "gpt_oss"})
REASONING_PARSERS: Final = ("auto", "none", *REASONING_FORMATS)
HOLD_BACKS: Final = ("exact", "blind")
SPECULATIVE: Final = ("none", "ngram")
GENERATION_CONFIGS: Final = ("auto", "vllm")  # vLLM's


def rounding_of(quantization: str) -> str | None:
    """Return what is rounded while a model is loaded, by the value of `EngineConfig.quantization`; None for nothing."""
    return quantization if quantization in ROUNDINGS[1:] else None
