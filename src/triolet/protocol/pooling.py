"""Request bodies and answer objects of pooled requests: `/v1/embeddings`, `/classify` and `/pooling`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Self

import attrs

from triolet.core.json_text import giving_way
from triolet.core.output.pooling_outputs import PoolingOutput, PoolingRequestOutput
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.prompt import Prompt, TokenIds
from triolet.errors import InvalidRequest, UnsupportedFeature
from triolet.protocol.chat_completions import ChatMessages
from triolet.protocol.errors import WireError, missing, of_exception, wrong
from triolet.protocol.field_limits import check_names
from triolet.protocol.json.structuring import CONVERTER, Wrong, structure
from triolet.protocol.sampling import refuse_field

MAX_INPUTS = 2048  # OpenAI's
ENCODINGS = ("float", "base64")
NOT_OFFERED: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (False,),
    "add_special_tokens": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "data": (),
    "embed_dtype": ("float32",),
    "endianness": ("native",),
    "items": (),
    "max_tokens_per_doc": (0,),
    "max_tokens_per_query": (0,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "normalize": (),
    "padding": (False,),
    "request_id": (),
}
"""Fields of vLLM's bodies that are not offered, and the values that ask for what is done anyway."""


@attrs.frozen
class Inputs:
    """One input or several, each a text or token ids."""

    prompts: tuple[Prompt, ...]

    @classmethod
    def of(cls, value: Any, _: Any = None) -> Inputs:
        """Build the inputs from a text, a list of texts, a list of token ids, or a list of such lists."""
        if isinstance(value, str):
            return cls((value,))
        if isinstance(value, list) and value and _are(int, value):
            return cls((TokenIds(value),))
        if isinstance(value, list) and 0 < len(value) <= MAX_INPUTS and _are_inputs(value):
            return cls(tuple(one if isinstance(one, str) else TokenIds(one) for one in value))
        raise Wrong(f"a text, token ids, or a list of 1 to {MAX_INPUTS} of either", value)


def _are(kind: type, values: list[Any]) -> bool:
    return all(type(value) is kind for value in giving_way(values))


def _are_inputs(values: list[Any]) -> bool:
    return _are(str, values) or all(isinstance(one, list) and _are(int, one) for one in values)


CONVERTER.register_structure_hook(Inputs, Inputs.of)


@attrs.frozen(kw_only=True)
class PooledRequest:
    """Fields that bodies of pooled requests have in common; see `GenerationRequest` for those about scheduling."""

    model: str = ""  # name of the model; empty for the first one of the server
    user: str | None = None
    # Length to which longer inputs are cut, tokens; -1 is the longest that fits.
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None  # the side that is cut off: right, the default, or left
    use_activation: bool | None = None  # see `PoolingParams`
    timeout: float | None = None
    priority: int = 0
    client: str | None = None
    cache_salt: str | None = None

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> Self:
        """Build and check the request from its body.

        Raises:
            WireError: names the field, the rule and the value.
        """
        for name, harmless in NOT_OFFERED.items():
            refuse_field(payload, name, harmless)
        request = structure(payload, cls)
        if request.timeout is not None and request.timeout <= 0:
            raise wrong("timeout", "above 0 seconds", request.timeout)
        check_names(request)
        request.check()
        return request

    def check(self) -> None:
        """Check the rules that the types of the fields do not express."""

    def refusal(self, error: InvalidRequest) -> WireError:
        """Return the error for a request that the engine refuses."""
        if isinstance(error, UnsupportedFeature) and error.field == "task":
            return WireError(str(error), code="unsupported_model", param="model")
        return of_exception(error, self.field_names())

    def field_names(self) -> Mapping[str, str]:
        """Return the names of the engine's fields in the body."""
        return {"prompt": "input", "prompt_token_ids": "input"}


@attrs.frozen(kw_only=True)
class InputRequest(PooledRequest):
    """Fields of the bodies with inputs, whose results are vectors."""

    input: Inputs | None = None
    messages: ChatMessages | None = None  # a chat in place of the input
    encoding_format: str = "float"
    dimensions: int | None = None

    def check(self) -> None:
        if self.input is None and self.messages is None:
            raise missing("input or messages")
        if self.input is not None and self.messages is not None:
            raise wrong("messages", "left out beside input", self.messages.messages)
        if self.encoding_format not in ENCODINGS:
            raise wrong("encoding_format", " or ".join(ENCODINGS), self.encoding_format)
        if self.dimensions is not None and self.dimensions < 1:
            raise wrong("dimensions", "at least 1", self.dimensions)

    @property
    def prompts(self) -> tuple[Any, ...]:
        """Prompts of the inputs."""
        if self.input is not None:
            return self.input.prompts
        assert self.messages is not None
        return ({"messages": list(self.messages.messages), "add_generation_prompt": False},)

    def _encoded(self, output: PoolingOutput) -> Any:
        if self.encoding_format == "float":
            return output.data.tolist()
        return base64.b64encode(
            output.data
        ).decode()  # the numbers are little-endian on every supported machine


@attrs.frozen(kw_only=True)
class EmbeddingsRequest(InputRequest):
    """Body of `/v1/embeddings`."""

    def params(self) -> PoolingParams:
        """Return the parameters for the engine."""
        return PoolingParams(task="embed", dimensions=self.dimensions, use_activation=self.use_activation)

    def answer(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> dict[str, Any]:
        """Return the response."""
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._encoded(output.outputs)}
                for index, output in enumerate(outputs)
            ],
            "model": self.model,
            "usage": usage_of(outputs),
        }


@attrs.frozen(kw_only=True)
class PoolingRequest(InputRequest):
    """Body of `/pooling`: any task, by default that of the model."""

    task: str | None = None
    step_tag_id: int | None = None  # see `PoolingParams`, as for the next one
    returned_token_ids: tuple[int, ...] | None = None

    def params(self) -> PoolingParams:
        """Return the parameters for the engine."""
        try:
            return PoolingParams(
                task=self.task,
                dimensions=self.dimensions,
                use_activation=self.use_activation,
                step_tag_id=self.step_tag_id,
                returned_token_ids=self.returned_token_ids,
            )
        except InvalidRequest as error:
            raise self.refusal(error) from error

    def answer(
        self, response_id: str, created: int, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]
    ) -> dict[str, Any]:
        """Return the response.

        Args:
            response_id: id of it.
            created: seconds since the epoch.
            outputs: of the inputs.
        """
        return {
            "id": f"pool-{response_id}",
            "object": "list",
            "created": created,
            "model": self.model,
            "data": [
                {"object": "pooling", "index": index, "data": self._encoded(output.outputs)}
                for index, output in enumerate(outputs)
            ],
            "usage": usage_of(outputs),
        }


@attrs.frozen(kw_only=True)
class ClassifyRequest(PooledRequest):
    """Body of `/classify`."""

    input: Inputs

    def params(self) -> PoolingParams:
        """Return the parameters for the engine."""
        return PoolingParams(task="classify", use_activation=self.use_activation)

    def answer(
        self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], labels: Sequence[str]
    ) -> dict[str, Any]:
        """Return the response; `labels` are the names of the classes."""
        entries = []
        for index, output in enumerate(outputs):
            probs = output.outputs.data.tolist()
            label = labels[probs.index(max(probs))]
            entries.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
        return {"object": "list", "data": entries, "model": self.model, "usage": usage_of(outputs)}


def usage_of(outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> dict[str, Any]:
    """Return the counts of tokens of a call."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
