"""Fields that OpenAI or vLLM document and this server does not act on: accepted without effect, or refused by name.

A field whose effect is only on the client's side of the API (bookkeeping, billing, hints about caches) is accepted and
has no effect. A field that would change the answer is refused, unless its value is the documented default. Names that
neither API documents are ignored, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeVar

import attrs

from triolet.core.request.param_spec import ApiFamily
from triolet.protocol.errors import unsupported
from triolet.protocol.sampling import WIRE_NAMES, read_sampling, refuse_sampling
from triolet.protocol.structuring import structure


class SampledRequest(attrs.AttrsInstance, Protocol):
    """Request with sampling parameters beside its declared fields."""

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Sampling parameters, by field of `SamplingParams`."""
        ...


T = TypeVar("T", bound=SampledRequest)

WITHOUT_EFFECT: Final = frozenset(
    {
        "metadata",  # kept with the answer by OpenAI; echoed by Responses
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "return_mm_kwargs",  # vLLM: of its render endpoints only
        "return_token_offsets",  # likewise
        "safety_identifier",
        "service_tier",
        "session_id",  # for routers
        "store",
        "stream_options",
        "user",
        "verbosity",  # a hint that models here do not know
    }
)

UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "access_programs": (),
    "add_generation_prompt": (True,),
    "add_special_tokens": (),  # Chat declares it; see DEFAULTS for Completions
    "allowed_media_domains": (),
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "context_management": (),
    "continue_final_message": (False,),
    "conversation": (),
    "documents": ([],),
    "ec_transfer_params": (),
    "echo": (False,),
    "enable_response_messages": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "image": (),
    "include_reasoning": (True,),
    "instructions": ("",),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora": (),
    "max_completion_tokens": (),
    "max_repetition_pattern_size": (0,),
    "max_tool_calls": (),
    "media_io_kwargs": ({},),
    "min_repetition_pattern_size": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "previous_input_messages": ([],),
    "previous_response": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_min_count": (0,),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "structural_tag": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "truncation": ("disabled",),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
"""Fields that are refused by every route that does not declare them, and the values that ask for nothing."""

DEFAULTS: Final[Mapping[tuple[ApiFamily, str], Any]] = {(ApiFamily.COMPLETIONS, "add_special_tokens"): True}
"""Values that ask for nothing in one family only."""

HINTS: Final[Mapping[str, str]] = {
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
    "guided_json": "use structured_outputs.json",
    "guided_regex": "use structured_outputs.regex",
    "max_repetition_pattern_size": "use repetition_detection.max_pattern_size",
    "min_repetition_pattern_size": "use repetition_detection.min_pattern_size",
    "reasoning_effort": "Responses have reasoning.effort",
    "repetition_min_count": "use repetition_detection.min_count",
    "request_id": "use the header X-Request-Id",
    "response_format": "use text.format",
    "structural_tag": "use structured_outputs.structural_tag",
    "truncate_prompt_tokens": "Responses have truncation",
}


def structure_request(payload: Mapping[str, Any], kind: type[T], family: ApiFamily) -> T:
    """Build the request of a route from its body: the declared fields, and `sampling` from the table of parameters.

    Args:
        payload: body of the request.
        kind: attrs class of the route's declared fields, with one more, `sampling`, which the client cannot write.
        family: of the route.
    Raises:
        WireError: a field that is known and not supported, or a value of the wrong type.
    """
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(kind)
    declared = frozenset(field.name for field in fields) - {"sampling"}
    refuse_sampling(payload, family, declared)
    refuse_known_fields(payload, family, declared | set(WIRE_NAMES[family].values()))
    sampling = read_sampling(payload, family)
    request = structure({name: value for name, value in payload.items() if name in declared}, kind)
    return attrs.evolve(request, sampling=sampling)  # type: ignore[misc]


def refuse_known_fields(payload: Mapping[str, Any], family: ApiFamily, taken: frozenset[str]) -> None:
    """Refuse fields of `UNSUPPORTED` that a route does not take and that ask for something.

    Raises:
        WireError: names the field.
    """
    for name, harmless in UNSUPPORTED.items():
        value = payload.get(name)
        if name in taken or value is None or value in harmless or value is DEFAULTS.get((family, name)):
            continue
        hint = f"; {HINTS[name]}" if name in HINTS else ""
        raise unsupported(name, f"{name} is not supported by this server in {family.value}{hint}")
