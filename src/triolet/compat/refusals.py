"""Methods and arguments of vLLM that triolet does not offer: refused by name, with a typed error, never ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from triolet.errors import InvalidRequest, UnsupportedFeature, shown

Face = TypeVar("Face", bound=type)

NO_ENCODE = "add_request() takes PoolingParams"
NO_PROMPT_ADAPTER = "AsyncLLM takes prompt adapters; vLLM has dropped them"
NO_RELEASE = "sleep() gives up the KV cache together with the weights"
NO_PROFILER = "the folder of traces is `profile_dir` of EngineConfig"
NO_TRANSFER = "update_weights() takes tensors by name, and reload_weights() a folder"
NO_ITERATIONS = "a profile lasts from start_profile() to stop_profile()"
NO_RENDERER = "prompts are rendered by the engine; pass texts, token ids or chat messages"

NO_OTHER_ENGINES = "there is one engine, on one machine"

METHODS: Mapping[str, str] = {"release_kv_cache_memory": NO_RELEASE}
WEIGHT_METHODS: Mapping[str, str] = dict.fromkeys(
    ("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_draft_weight_update"),
    NO_TRANSFER,
)
ENGINE_METHODS: Mapping[str, str] = {**METHODS, "encode": NO_ENCODE}
ASYNC_METHODS: Mapping[str, str] = {
    **METHODS,
    **WEIGHT_METHODS,
    "compute_weight_checksums": "get_weight_version() names the weights in use",
    "checkpoint_prepare": "drain() gives a snapshot of what is not finished",
    "checkpoint_restore": "resume() takes up a snapshot",
    "check_admission": "generate() raises Overloaded where a request is not admitted",
    "get_num_queued_tokens": "see statistics()",
    "wait_for_requests_to_drain": "see drain()",
    "get_status": "see check_health()",
    "handle_fault": "the engine restarts its crashed parts itself",
    "get_kv_event_sources": NO_OTHER_ENGINES,
    "notify_kv_transfer_request_rejected": NO_OTHER_ENGINES,
    "scale_elastic_ep": NO_OTHER_ENGINES,
    "get_external_elastic_ep_status": NO_OTHER_ENGINES,
    "get_input_preprocessor": NO_RENDERER,
}
OFFLINE_METHODS: Mapping[str, str] = {
    **METHODS,
    **WEIGHT_METHODS,
    "enqueue_chat": "chat() takes all conversations at once",
    "enqueue": "generate() takes all prompts at once; LLMEngine takes them one by one",
    "wait_for_completion": "generate() waits",
}
PARAMETERS: Mapping[str, str] = {
    "executor_class": "LLM and LLMEngine compute in this process: AsyncLLM takes others",
    "input_registry": "there are no inputs but texts and tokens",
    "mm_registry": "there are no inputs but texts and tokens",
    "use_cached_outputs": "vLLM has dropped it",
    "worker_use_ray": "the configuration says it: runner is 'ray'",
    "engine_use_ray": "vLLM has dropped it",
    "client_addresses": "one engine has one process",
    "client_count": "one engine has one process",
    "client_index": "one engine has one process",
    "aggregate_engine_logging": "there is one engine",
    "prompt_adapter_request": NO_PROMPT_ADAPTER,
    "prefix_pos": "vLLM has dropped it",
    "chat_template": "the texts of a score are joined as the model was trained with: `instruction` is what varies",
    "arrival_time": "a request arrives when it is made",
    "prompt_text": "pass {'prompt_token_ids': ..., 'prompt': ...} to have both",
    "tokenization_kwargs": "prompts are encoded in one way",
    "session_id": "beginnings are shared through the prefix cache",
    "kv_hints": "beginnings are shared through the prefix cache",
    "reasoning_ended": "reasoning is told from the answer",
    "reasoning_parser_kwargs": "reasoning is told from the answer",
    "chat_template_content_format": "the template gets the messages as they are",
    "mm_processor_kwargs": "there are no inputs but texts and tokens",
    "concurrency_limit": "the engine's own limits hold",
    "multiprocess_mode": "LLMEngine runs the model in the thread that calls step()",
    "profiler": NO_PROFILER,
    "headless": NO_OTHER_ENGINES,
    "reset_connector": "KV is not kept outside of the engine",
    "delay_iterations": NO_ITERATIONS,
    "max_iterations": NO_ITERATIONS,
    "profiler_kwargs": NO_PROFILER,
    "enable_multiprocessing": "LLMEngine runs the model in the thread that calls step()",
}


NO_INTERNALS = "it is a part of vLLM's engine; `engine` is triolet's"
ASYNC_ATTRIBUTES: Mapping[str, str] = dict.fromkeys(
    (
        *(
            "request_streams",
            "client_aborted_requests",
            "processor",
            "detokenizer",
            "engine_core",
            "output_handler",
        ),
        *("input_processor", "output_processor", "renderer", "logger_manager"),
    ),
    NO_INTERNALS,
)
ENGINE_ATTRIBUTES: Mapping[str, str] = dict.fromkeys(
    ("renderer", "input_processor", "output_processor", "engine_core", "logger_manager", "model_executor"),
    "it is a part of vLLM's engine; apply_model() calls a function with the model",
)


class AttributeNotOffered(UnsupportedFeature, AttributeError):
    """An attribute of vLLM's that triolet does not offer; `hasattr` is False for it."""


class UsageContext(StrEnum):
    """Places where vLLM says it is used; no usage is reported here."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def check_usage_context(usage_context: object) -> None:
    """Check where vLLM would say that it is used; no usage is reported, whatever the place.

    Raises:
        InvalidRequest: it is none of vLLM's places.
    """
    if usage_context is not None and usage_context not in list(UsageContext):
        raise InvalidRequest(
            f"usage_context must be a UsageContext; got {shown(usage_context)}",
            field="usage_context",
            got=usage_context,
        )


def refuse(name: str, reason: str, got: object = None) -> NoReturn:
    """Raise the error for a thing that is not offered.

    Raises:
        UnsupportedFeature: always.
    """
    raise UnsupportedFeature(f"{name} is not offered: {reason}", field=name, got=got)


def refuse_given(given: Mapping[str, object]) -> None:
    """Refuse keywords of vLLM's that have a value.

    Raises:
        UnsupportedFeature: naming the first of them.
        TypeError: a keyword that vLLM does not have either.
    """
    for name, value in given.items():
        if name not in PARAMETERS:
            raise TypeError(f"Unexpected keyword argument {name!r}")
        # Programs spell defaults out; only a value that asks for something is refused.
        if value is not None and value is not False:
            refuse(name, PARAMETERS[name], value)


def check_rank(data_parallel_rank: int | None) -> None:
    """Check that the rank is that of the only engine, 0, or None.

    Raises:
        InvalidRequest: it is another one; a ValueError.
    """
    if data_parallel_rank not in (None, 0):
        raise InvalidRequest(
            f"data_parallel_rank must be in [0, 1), got {data_parallel_rank}",
            field="data_parallel_rank",
            got=data_parallel_rank,
        )


def key_of(request_id: object) -> str:
    """Return a request id as `AsyncLLM` takes it: programs for early versions of vLLM number their requests.

    Raises:
        TypeError: it is neither a string nor a number.
    """
    is_number = isinstance(request_id, int) and not isinstance(request_id, bool)
    return str(request_id) if is_number else check_request_id(request_id)


def check_request_id(request_id: object) -> str:
    """Check a request id as vLLM does, and return it.

    Raises:
        TypeError: it is no string.
    """
    if not isinstance(request_id, str):
        raise TypeError(f"request_id must be a string, got {type(request_id)}")
    return request_id


def refusing(
    methods: Mapping[str, str], attributes: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Face], Face]:
    """Return a class decorator that adds methods of these names, which raise `UnsupportedFeature`, and attributes."""

    def decorate(face: Face) -> Face:
        for name, reason in methods.items():
            setattr(face, name, _refusing_method(name, reason))
        for name, reason in attributes.items():
            setattr(face, name, _refusing_property(name, reason))
        return face

    return decorate


def _refusing_method(name: str, reason: str) -> Callable[..., Any]:
    def method(self: object, *args: object, **kwargs: object) -> NoReturn:
        refuse(name, reason)

    # `help()` and error messages show the name that the caller used.
    method.__name__ = name
    method.__doc__ = f"Not offered: {reason}.\n\nRaises:\n    UnsupportedFeature: always.\n"
    return method


def _refusing_property(name: str, reason: str) -> property:
    def read(self: object) -> NoReturn:
        raise AttributeNotOffered(f"{name} is not offered: {reason}", field=name)

    return property(read, doc=f"Not offered: {reason}.\n\nRaises:\n    AttributeNotOffered: always.\n")


_NO_MODEL_CLASSES = (
    "models are families of triolet's own or those of transformers, also with a class in the model's folder "
    "(`trust_remote_code`)"
)
_NO_MODEL_LIST = "a model is judged by its folder when it is loaded; docs/models.md lists the families"


@refusing(
    dict.fromkeys(
        (
            *("get_supported_archs", "resolve_model_cls", "inspect_model_cls", "is_text_generation_model"),
            *("is_pooling_model", "is_multimodal_model", "is_pp_supported_model", "is_hybrid_model"),
            *("is_attention_free_model", "is_transcription_model"),
        ),
        _NO_MODEL_LIST,
    )
)
class ModelRegistryView:
    """Registry of vLLM for classes of models, which can be imported; all of its methods are refused."""

    def register_model(self, model_arch: str, model_cls: object) -> NoReturn:
        """Refuse a class of models.

        Raises:
            UnsupportedFeature: always.
        """
        refuse("register_model", _NO_MODEL_CLASSES, model_arch)


ModelRegistry = ModelRegistryView()


def initialize_ray_cluster(parallel_config: object, ray_address: str | None = None) -> NoReturn:
    """Refuse to join a cluster by hand.

    Raises:
        UnsupportedFeature: always.
    """
    refuse("initialize_ray_cluster", "an engine with the runner 'ray' joins the cluster when it opens")


STAND_INS: Mapping[str, str] = {
    **dict.fromkeys(("InputPreprocessor", "InputRegistry", "MultiModalRegistry"), NO_RENDERER),
    **dict.fromkeys(("Processor", "Detokenizer", "OutputProcessor", "EngineCoreClient"), NO_INTERNALS),
    **dict.fromkeys(("SchedulerOutputs", "SamplerOutput", "ModelRunnerOutput"), NO_INTERNALS),
}
"""Classes that programs for vLLM import, with the reason why none is made here."""


def stand_in(name: str) -> type:
    """Return a class of that name, which can be imported and named in annotations; making one is refused."""

    def refuse_making(self: object, *args: object, **kwargs: object) -> NoReturn:
        refuse(name, STAND_INS[name])

    doc = f"Not offered: {STAND_INS[name]}.\n\nRaises:\n    UnsupportedFeature: always.\n"
    return type(name, (), {"__init__": refuse_making, "__doc__": doc, "__module__": "triolet.compat"})


def request_ids(request_id: str | Iterable[str]) -> list[str]:
    """Return one id, or several, as a list."""
    return [request_id] if isinstance(request_id, str) else list(request_id)


def request_keys(request_id: str | int | Iterable[str | int]) -> list[str]:
    """Return one id, or several, as `AsyncLLM` takes them; see `key_of`."""
    return [key_of(one) for one in ([request_id] if isinstance(request_id, str | int) else request_id)]
