"""Fields that the bodies of all routes share: sampling parameters, derived from `SAMPLING_PARAMETERS`, and tools.

A parameter is read under the name that the table gives it for the family of the route, with the strict type that its
annotation says. Values stay as the client wrote them: `SamplingParams` checks their ranges.

Known fields: OpenAI or vLLM document them, and this server does not act on them. A field whose effect is only on the
client's side of the API (bookkeeping, billing, hints about caches) is accepted and has no effect. A field that would
change the answer is refused, unless its value is the documented default. Names that neither API documents are ignored,
as vLLM does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeVar

import attrs

from triolet.core.request.param_validation import ApiFamily, SamplingParameter
from triolet.core.request.params import MIN_TEMPERATURE, SAMPLING_PARAMETERS, SamplingParams
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.request.tokenizer_interface import TokenizerInterface
from triolet.core.tools import ToolPlan, plan_tools
from triolet.errors import InvalidRequest
from triolet.protocol.errors import WireError, unsupported, wrong
from triolet.protocol.field_limits import check_choices
from triolet.protocol.json.structuring import CONVERTER, Wrong, structure, structure_field


@attrs.frozen
class Strings:
    """One string or several."""

    values: tuple[str, ...]


@attrs.frozen
class TokenBiases:
    """Biases by token id, which JSON writes as a string."""

    values: dict[int, float]


def _strings(value: Any, _: Any) -> Strings:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(type(item) is str for item in values):
        raise Wrong("a string or a list of strings", value)
    return Strings(tuple(values))


def _token_biases(value: Any, _: Any) -> TokenBiases:
    if not isinstance(value, dict):
        raise Wrong("an object", value)
    biases = {}
    for token_id, bias in value.items():
        # 18 digits fit in 64 bits; longer texts would cost time to read as a number.
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= 18):
            raise Wrong("an object with token ids as keys", token_id)
        if type(bias) not in (int, float):
            raise Wrong("a number", bias, at=token_id)
        biases[int(token_id)] = bias
    return TokenBiases(biases)


CONVERTER.register_structure_hook(Strings, _strings)
CONVERTER.register_structure_hook(TokenBiases, _token_biases)

_WIRE_TYPES: Final[Mapping[str, Any]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "tuple[int, ...]": tuple[int, ...],
    "tuple[str, ...]": tuple[str, ...],
    "Mapping[int, float]": TokenBiases,
    "RepetitionDetectionParams": Mapping[str, Any],
    "StructuredOutputsParams": Mapping[str, Any],
}


def _wire_type(parameter: SamplingParameter) -> Any:
    return Strings if parameter.spec.may_be_single else _WIRE_TYPES[parameter.value_type]


# Looked up at import, so that a parameter of a new type cannot be forgotten here.
_READERS: Final = {
    family: tuple(
        (parameter.name, name, _wire_type(parameter))
        for parameter in SAMPLING_PARAMETERS
        if (name := parameter.wire_name(family)) is not None
    )
    for family in ApiFamily
}
WIRE_NAMES: Final[Mapping[ApiFamily, Mapping[str, str]]] = {
    family: {field: name for field, name, _ in readers} for family, readers in _READERS.items()
}
"""Name on the wire of each field of `SamplingParams` that the family takes."""

_DEFAULTS_ELSEWHERE: Final[Mapping[str, tuple[Any, ...]]] = {"logprobs": (False,), "top_logprobs": (0,)}
"""Values that ask for nothing in Chat Completions, by names that mean something else or nothing elsewhere."""


def read_sampling(payload: Mapping[str, Any], family: ApiFamily) -> dict[str, Any]:
    """Return the sampling parameters of a body, by field of `SamplingParams`; null is the same as absent.

    Raises:
        WireError: a value has the wrong type; names the field as the client wrote it.
    """
    found = {}
    for field, name, kind in _READERS[family]:
        if (value := payload.get(name)) is not None:
            structured = structure_field(name, value, kind)
            found[field] = structured.values if isinstance(structured, Strings | TokenBiases) else structured
    return found


def write_sampling(sampling: Mapping[str, Any], family: ApiFamily) -> dict[str, Any]:
    """Return the fields of a body that `read_sampling` reads as `sampling`."""
    return {WIRE_NAMES[family][field]: _as_json(value) for field, value in sampling.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return value


def refuse_sampling(payload: Mapping[str, Any], family: ApiFamily, declared: frozenset[str]) -> None:
    """Refuse sampling parameters that the family does not take, or takes under another name.

    Args:
        payload: body of the request.
        declared: names that the route reads itself.
    Raises:
        WireError: names the parameter and the reason.
    """
    taken = declared | set(WIRE_NAMES[family].values())
    for parameter in SAMPLING_PARAMETERS:
        reason = parameter.spec.refused.get(family)
        names = {parameter.name, *filter(None, map(parameter.wire_name, ApiFamily))} - taken
        for name in sorted(names):
            value = payload.get(name)
            # A client that spells defaults out asks for nothing.
            if (
                value is None
                or _is_one_of(value, _DEFAULTS_ELSEWHERE.get(name, ()))
                or _is_default(parameter, value)
            ):
                continue
            if reason is not None:
                raise unsupported(name, f"{name} is not supported here: {reason}")
            raise unsupported(name, f"{name} is called {parameter.wire_name(family)} in {family.value}")


def _is_one_of(value: object, values: tuple[object, ...]) -> bool:
    # False == 0 in Python, and means something else here.
    return any(type(value) is type(one) and value == one for one in values)


def _is_default(parameter: SamplingParameter, value: object) -> bool:
    default = parameter.default
    if isinstance(default, tuple):
        return value == list(default)
    return type(value) is type(default) and value == default


def sampling_params(defaults: SamplingParams, **fields: Any) -> SamplingParams:
    """Return the model's default parameters with the fields of a request over them.

    A temperature that is too small to divide by is raised here, without the warning that `SamplingParams` gives: a
    client could not read it.

    Raises:
        InvalidParams: a value is out of its range.
    """
    if 0 < (fields.get("temperature") or 0) < MIN_TEMPERATURE:
        fields["temperature"] = MIN_TEMPERATURE
    return attrs.evolve(defaults, **fields)


def check_object_fields(name: str, value: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return `value`, whose keys must all be fields of the attrs class `kind`.

    Raises:
        WireError: a key is not; names it by its path.
    """
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(kind)
    known = {field.name for field in fields}
    for key in value:
        if key not in known:
            raise wrong(name, "an object of " + ", ".join(sorted(known)), key)
    return dict(value)


class SampledRequest(attrs.AttrsInstance, Protocol):
    """Request with sampling parameters beside its declared fields."""

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Sampling parameters, by field of `SamplingParams`."""
        ...


T = TypeVar("T", bound=SampledRequest)

UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "access_programs": (),
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_media_domains": (),
    "audio": (),
    "background": (False,),
    "background_options": (),
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
    "lora_request": (),
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
    "prompt_adapter_request": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_min_count": (0,),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),  # Chat and Completions declare it, as the next one
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

HINTS: Final[Mapping[str, str]] = {
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
    "guided_json": "use structured_outputs.json",
    "guided_regex": "use structured_outputs.regex",
    "lora_request": "ask for the adapter by its name, as the model",
    "normalize": "use use_activation",
    "max_repetition_pattern_size": "use repetition_detection.max_pattern_size",
    "min_repetition_pattern_size": "use repetition_detection.min_pattern_size",
    "prompt_adapter_request": "ask for the adapter by its name, as the model",
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
    Raises:
        WireError: a field that is known and not supported, or a value of the wrong type.
    """
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(kind)
    declared = frozenset(field.name for field in fields) - {"sampling"}
    refuse_sampling(payload, family, declared)
    refuse_known_fields(payload, family, declared | set(WIRE_NAMES[family].values()))
    check_choices(payload, family)
    sampling = read_sampling(payload, family)
    request = structure({name: value for name, value in payload.items() if name in declared}, kind)
    return attrs.evolve(request, sampling=sampling)  # type: ignore[misc]


def refuse_known_fields(payload: Mapping[str, Any], family: ApiFamily, taken: frozenset[str]) -> None:
    """Refuse fields of `UNSUPPORTED` that a route does not take and that ask for something.

    Raises:
        WireError: names the field.
    """
    for name, harmless in UNSUPPORTED.items():
        if name not in taken:
            refuse_field(payload, name, harmless, f" in {family.value}")


def refuse_field(payload: Mapping[str, Any], name: str, harmless: tuple[Any, ...], place: str = "") -> None:
    """Refuse a field that asks for something.

    Args:
        payload: body of the request.
        name: of the field.
        harmless: values that ask for nothing, beside null.
        place: words for the routes that refuse it.
    Raises:
        WireError: names the field, and what to use instead.
    """
    if (value := payload.get(name)) is not None and value not in harmless:
        hint = f"; {HINTS[name]}" if name in HINTS else ""
        raise unsupported(name, f"{name} is not supported by this server{place}{hint}")


class Offer(Protocol):
    """Fields of a request that concern tools."""

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Functions that the model may call."""
        ...

    @property
    def tool_choice(self) -> str | Mapping[str, Any] | None:
        """`none`, `auto`, `required`, or the function that must be called; None for the default."""
        ...

    @property
    def parallel_tool_calls(self) -> bool:
        """True if one answer may have several calls."""
        ...

    def form(self) -> StructuredOutputsParams | None:
        """Return the form that the text of the answer must have; None for any text."""
        ...

    def refusal(self, error: BaseException) -> WireError:
        """Return the error to send for an exception."""
        ...


class OffersTools:
    """Mixin that plans the tools of a request with the fields of `Offer`."""

    __slots__ = ()

    def plan(
        self: Offer,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        tokenizer: TokenizerInterface | None = None,
    ) -> ToolPlan:
        """Return the plan of the tools: their descriptions in the prompt, the forced form, the parsers of the answer.

        Args:
            tool_parser: format of the model's tool calls.
            reasoning_parser: format of the model's reasoning.
            tokenizer: the model's.
        Raises:
            WireError: a wrong tool, choice or form, or one that this model cannot serve.
        """
        try:
            return plan_tools(
                self.tools,
                self.tool_choice,
                tool_parser=tool_parser,
                reasoning_parser=reasoning_parser,
                parallel_tool_calls=self.parallel_tool_calls,
                form=self.form(),
                tokenizer=tokenizer,
            )
        except InvalidRequest as error:
            raise self.refusal(error) from None
