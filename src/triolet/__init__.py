"""triolet: an LLM inference engine built as actors on Trio structured concurrency.

    async with triolet.open_engine() as engine:
        async with engine.generate("Hello!") as stream:
            async for output in stream:
                print(output.text)

Names that need Trio or torch are imported on first use, so that naming a parameter or an error stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from triolet import errors
from triolet.config.engine import EngineConfig
from triolet.core.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from triolet.core.load_progress import LoadProgress
from triolet.core.metrics.iteration_stats import EngineStatistics
from triolet.core.output.output_processor import RequestProgress
from triolet.core.output.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput
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
from triolet.core.request.repetition_detection import RepetitionDetectionParams
from triolet.core.request.request import FinishReason, RequestMetrics, RequestStatus
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.errors import TrioletError

if TYPE_CHECKING:
    from triolet.engine.beam_search import beam_search
    from triolet.engine.engine import Engine
    from triolet.engine.open_engine import open_engine
    from triolet.engine.pooling import PoolingStream
    from triolet.engine.token_stream import TokenStream
    from triolet.ipc.snapshot import Snapshot

__version__ = "0.2.0"

__all__ = [
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStatistics",
    "FinishReason",
    "FlatLogprobs",
    "LoRARequest",
    "PromptAdapterRequest",
    "LoadProgress",
    "Logprob",
    "RepetitionDetectionParams",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestProgress",
    "RequestStatus",
    "SamplingParams",
    "StructuredOutputsParams",
    "Snapshot",
    "TokenStream",
    "TrioletError",
    "beam_search",
    "errors",
    "open_engine",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PoolingStream",
    "ScoringOutput",
    "ScoringRequestOutput",
]

_ON_FIRST_USE = {
    "beam_search": "triolet.engine.beam_search",
    "Engine": "triolet.engine.engine",
    "open_engine": "triolet.engine.open_engine",
    "PoolingStream": "triolet.engine.pooling",
    "Snapshot": "triolet.ipc.snapshot",
    "TokenStream": "triolet.engine.token_stream",
}


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return getattr(import_module(_ON_FIRST_USE[name]), name)
    if name in _packages():
        return import_module(f"triolet.{name}")
    raise AttributeError(f"module 'triolet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_packages(), "__version__"})


def _packages() -> set[str]:
    # The two modules are interfaces of their own, as a package is.
    return {
        module.name for module in iter_modules(__path__) if module.ispkg or module.name in ("aio", "blocking")
    }
