"""vLLM's interface over triolet's engine: its class names, methods, parameters and meanings.

    from triolet.compat import AsyncEngineArgs, AsyncLLM, LLM, LLMEngine, SamplingParams

A method or argument that vLLM has and triolet does not exists by its name and raises `UnsupportedFeature`; nothing is
ignored. Only `AsyncLLM`, `RequestManager` and `stream_generate` need Trio: the others are imported without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from triolet.compat.engine_args import AsyncEngineArgs, EngineArgs
from triolet.compat.operations.flags import FlexibleArgumentParser
from triolet.compat.operations.metrics import Counter, Gauge, Histogram, Metric, Vector
from triolet.compat.prompts import EngineCoreRequest, TextPrompt, TokensPrompt
from triolet.compat.refusals import (
    STAND_INS,
    ModelRegistry,
    UsageContext,
    initialize_ray_cluster,
    stand_in,
)
from triolet.core.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from triolet.core.output.logprobs import Logprob
from triolet.core.output.outputs import CompletionOutput, RequestOutput
from triolet.core.output.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from triolet.core.request.lora import LoRARequest
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.prompt_adapter import PromptAdapterRequest
from triolet.core.request.request import RequestMetrics, RequestStatus
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.errors import EngineDead as EngineDeadError
from triolet.errors import InvalidRequest as VLLMValidationError
from triolet.errors import Overloaded as QueueOverflowError
from triolet.errors import RequestFailed as EngineGenerateError

if TYPE_CHECKING:
    from triolet.compat.async_facts import (
        EngineClient,
        PromptType,
        VllmConfig,
    )
    from triolet.compat.async_llm import AsyncLLM, AsyncLLMEngine
    from triolet.compat.generation import Generation, TextPieces
    from triolet.compat.llm import LLM
    from triolet.compat.llm_engine import LLMEngine
    from triolet.compat.operations.stat_loggers import StatLoggerBase
    from triolet.compat.request_manager import RequestManager, StreamingRequest
    from triolet.compat.views import AnyTokenizer, ModelConfig

__all__ = [
    "LLM",
    "AnyTokenizer",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Counter",
    "EngineArgs",
    "EngineClient",
    "EngineCoreRequest",
    "EngineDeadError",
    "EngineGenerateError",
    "FlexibleArgumentParser",
    "Gauge",
    "Generation",
    "Histogram",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "Metric",
    "ModelConfig",
    "ModelRegistry",
    "PromptAdapterRequest",
    "PromptType",
    "QueueOverflowError",
    "RequestManager",
    "RequestMetrics",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStatus",
    "SamplingParams",
    "StatLoggerBase",
    "StreamingRequest",
    "StructuredOutputsParams",
    "TextPieces",
    "TextPrompt",
    "TokensPrompt",
    "UsageContext",
    "Vector",
    "VllmConfig",
    "VLLMValidationError",
    "initialize_ray_cluster",
    "stream_generate",
]

_ON_FIRST_USE = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "AsyncLLMEngine": "async_llm",
    "Generation": "generation",
    "LLMEngine": "llm_engine",
    "RequestManager": "request_manager",
    "StreamingRequest": "request_manager",
    "ModelConfig": "views",
    "AnyTokenizer": "views",
    "StatLoggerBase": "operations.stat_loggers",
    "TextPieces": "generation",
    **dict.fromkeys(
        (*("EngineClient", "PromptType", "VllmConfig"),),
        "async_facts",
    ),
}


def stream_generate(engine: AsyncLLM, prompt: Any, *arguments: Any, **keywords: Any) -> TextPieces:
    """Generate the text of one answer, piece by piece, with `AsyncLLM.stream_generate`."""
    return engine.stream_generate(prompt, *arguments, **keywords)


def __getattr__(name: str) -> Any:
    if name in STAND_INS:
        return globals().setdefault(name, stand_in(name))
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'triolet.compat' has no attribute {name!r}")
    return getattr(import_module(f"triolet.compat.{_ON_FIRST_USE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE, *STAND_INS})
