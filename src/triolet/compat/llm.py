"""vLLM's `LLM` for offline use: answers a list of prompts, in order, with a progress bar.

    llm = LLM()  # triolet-nano
    for output in llm.generate(["Hello!", "Who are you?"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)

A loop around `LLMEngine.step`. An exception, Ctrl-C included, leaves no request behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import attrs
from tqdm import tqdm

from triolet.compat.engine_args import EngineArgs
from triolet.compat.llm_engine import LLMEngine
from triolet.compat.operations.metrics import Metric
from triolet.compat.operations.offline import OfflineOperations
from triolet.compat.pooling import params_of_task
from triolet.compat.prompts import EngineCoreRequest
from triolet.compat.refusals import OFFLINE_METHODS, refuse_given, refusing
from triolet.compat.views import Tokenizer
from triolet.core.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from triolet.core.output.outputs import RequestOutput
from triolet.core.output.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from triolet.core.request.lora import LoRARequest
from triolet.core.request.param_validation import check_type
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.pooling_params import PoolingParams
from triolet.errors import InvalidPrompt, InvalidRequest, RequestFailed

Progress = bool | Callable[..., Any]
"""True to show a progress bar, or a function with the signature of `tqdm` that makes one."""

Adapters = LoRARequest | Sequence[LoRARequest | None] | None
"""LoRA adapter for all prompts, or one or None for each."""


@refusing(OFFLINE_METHODS)
class LLM(OfflineOperations):
    """A model for offline use.

    Args:
        model: folder, GGUF file or hub id; by default triolet-nano.
        engine: an engine that exists already, instead of a model.
        **engine_args: see `EngineArgs`.
    """

    def __init__(
        self, model: str | None = None, *, engine: LLMEngine | None = None, **engine_args: Any
    ) -> None:
        if engine is not None and (model is not None or engine_args):
            raise InvalidRequest("engine must come alone, without model and other arguments", field="engine")
        self.llm_engine = engine or LLMEngine.from_engine_args(EngineArgs(model, **engine_args))
        # As in vLLM: the ids of an LLM's requests are "0", "1" and so on.
        self._ids = map(str, itertools.count())

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Make an engine with these arguments."""
        return cls(engine=LLMEngine.from_engine_args(engine_args))

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        lora_request: Adapters = None,
        priority: int | Sequence[int] | None = None,
        **vllm_only: object,
    ) -> list[RequestOutput]:
        """Answer prompts; the batch is as large as the engine's limits allow.

        Args:
            prompts: one, or a list: texts, `{"prompt_token_ids": ...}` and the like. A list of ints is one prompt.
            sampling_params: for all, or one for each; by default the model's own.
            use_tqdm: whether a progress bar is shown, or the function that makes it.
            lora_request: LoRA adapter for all, or one or None for each; loaded now if it is not yet.
            priority: for all, or one for each.
        Returns:
            An output for each prompt, in their order.
        Raises:
            InvalidRequest: a prompt or an argument is wrong; nothing has been computed, and nothing stays queued.
            AdapterError: an adapter cannot be loaded; it is tried when its first prompt is queued.
        """
        refuse_given(vllm_only)
        listed = _as_list(prompts)
        all_params = self._params_for(sampling_params, listed)
        priorities = _priorities_for(priority, listed)
        adapters = _adapters_for(lora_request, len(listed))
        return self._run(listed, all_params, use_tqdm, priorities, adapters)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: Adapters = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str | None = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **vllm_only: object,
    ) -> list[RequestOutput]:
        """Answer conversations.

        Args:
            messages: one conversation (a list of messages), or a list of them.
            sampling_params: see `generate`.
            use_tqdm: see `generate`.
            lora_request: see `generate`.
            priority: for all, or one for each.
            chat_template: Jinja template instead of the model's.
            chat_template_content_format: `auto`, or None: the template gets the messages as they are.
            add_generation_prompt: whether the answer is a new message of the assistant.
            continue_final_message: whether it goes on with the last message; not beside `add_generation_prompt`.
            tools: tools that the model may call, in all of the conversations.
            chat_template_kwargs: further values for the chat template.
        """
        if chat_template_content_format != "auto":  # vLLM's default asks for nothing else
            vllm_only["chat_template_content_format"] = chat_template_content_format
        refuse_given(vllm_only)
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise InvalidRequest("messages must be a list of messages, or of such lists", field="messages")
        # One conversation is a list of mappings, several are a list of such lists.
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        asked = {
            "tools": tools or None,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        prompts = [{"messages": one, **asked} for one in conversations]
        priorities = _priorities_for(priority, prompts)
        params = self._params_for(sampling_params, prompts)
        adapters = _adapters_for(lora_request, len(prompts))
        return self._run(prompts, params, use_tqdm, priorities, adapters)

    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        pooling_task: str | None = None,
        lora_request: Adapters = None,
        **vllm_only: object,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Compute the numbers of a pooling task, as tensors.

        Args:
            prompts: see `generate`.
            pooling_params: for all, or one for each.
            use_tqdm: see `generate`.
            pooling_task: task, if the parameters name none; by default the model's.
            lora_request: see `generate`.
        Raises:
            InvalidRequest: a prompt or an argument is wrong, or the model does not do the task; a ValueError.
            RequestFailed: a result could not be computed.
        """
        refuse_given(vllm_only)
        listed = _as_list(prompts)
        given = _for_each("pooling_params", pooling_params, PoolingParams, "PoolingParams", len(listed))
        if pooling_params is None:
            given = [_own("pooling_params", prompt) for prompt in listed]
        params = [params_of_task(one, pooling_task) for one in given]
        adapters = _adapters_for(lora_request, len(listed))
        outputs: list[Any] = self._run(listed, params, use_tqdm, [0] * len(listed), adapters)
        for output in outputs:
            if output.error is not None:
                raise RequestFailed(output.request_id, output.error)
        return outputs

    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Adapters = None,
        **vllm_only: object,
    ) -> list[EmbeddingRequestOutput]:
        """Compute an embedding of each prompt; see `encode`."""
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="embed",
            lora_request=lora_request,
            **vllm_only,
        )
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def classify(
        self,
        prompts: Any,
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Adapters = None,
        **vllm_only: object,
    ) -> list[ClassificationRequestOutput]:
        """Compute the scores of the classes for each prompt; see `encode`."""
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="classify",
            lora_request=lora_request,
            **vllm_only,
        )
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def reward(
        self,
        prompts: Any,
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Adapters = None,
        **vllm_only: object,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Compute the scores of each token of each prompt; see `encode`."""
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="token_classify",
            lora_request=lora_request,
            **vllm_only,
        )

    def score(
        self,
        data_1: Any,
        data_2: Any,
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        lora_request: LoRARequest | None = None,
        **vllm_only: object,
    ) -> list[ScoringRequestOutput]:
        """Compute the scores of pairs of texts.

        Args:
            data_1: a text, which is compared with each of `data_2`, or as many texts as there are in `data_2`.
            data_2: a text or several.
            use_tqdm: see `generate`.
            pooling_params: of all requests; their task is set here.
            instruction: see `triolet.Engine.score`.
            lora_request: LoRA adapter of all requests.
            **vllm_only: see `generate`.
        Raises:
            InvalidRequest: a wrong argument, or a model without scores; a ValueError.
        """
        refuse_given(vllm_only)
        scoring = self.llm_engine.plan_scoring(data_1, data_2, pooling_params, instruction)
        outputs = self.encode(
            list(scoring.prompts), scoring.params, use_tqdm=use_tqdm, lora_request=lora_request
        )
        return scoring.scores(outputs)

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: Adapters = None,
        use_tqdm: Progress = False,
        concurrency_limit: int | None = None,
        priority: int | Sequence[int] | None = None,
        **vllm_only: object,
    ) -> list[BeamSearchOutput]:
        """Find the likeliest answers to each prompt; see `triolet.beam_search`, and `generate` for the others."""
        refuse_given({"concurrency_limit": concurrency_limit, **vllm_only})
        check_type("params", params, BeamSearchParams, "BeamSearchParams")
        bar = _bar(use_tqdm, len(listed := _as_list(prompts)), "Beam search")
        with bar:
            found = []
            adapters, priorities = _adapters_for(lora_request, len(listed)), _priorities_for(priority, listed)
            for prompt, adapter, one in zip(listed, adapters, priorities, strict=True):
                found.append(self._search(prompt, params, adapter, one))
                bar.update(1)
        return found

    def _search(
        self, prompt: Any, params: BeamSearchParams, adapter: LoRARequest | None, priority: int
    ) -> BeamSearchOutput:
        # As in vLLM, twice as many choices as beams: those that end an answer leave the beam.
        num_choices = min(2 * params.beam_width, self.llm_engine.model_config.vocab_size)
        asked = SamplingParams(
            max_tokens=1, logprobs=num_choices, temperature=params.temperature, detokenize=False
        )
        [first] = self._run([prompt], [asked], False, [priority], [adapter])
        beams = BeamSearch(params, self.llm_engine.eos_token_ids, first.prompt_token_ids)
        beams.advance(_choices([first]))
        room = self.llm_engine.max_model_len - len(first.prompt_token_ids)
        for _ in range(min(params.max_tokens, room) - 1):
            if not beams.live:
                break
            prompts = [{"prompt_token_ids": beam.tokens} for beam in beams.live]
            same = [asked] * len(prompts), False, [priority] * len(prompts), [adapter] * len(prompts)
            beams.advance(_choices(self._run(prompts, *same)))
        decode, is_plain = self.llm_engine.tokenizer.decode, params.skip_special_tokens
        return BeamSearchOutput(
            tuple(attrs.evolve(beam, text=decode(beam.tokens, is_plain)) for beam in beams.end())
        )

    def _params_for(
        self, params: SamplingParams | Sequence[SamplingParams] | None, prompts: Sequence[Any]
    ) -> list[SamplingParams]:
        if params is None:
            default = self.get_default_sampling_params()
            params = [_own("sampling_params", prompt) or default for prompt in prompts]
        listed = _for_each("params", params, SamplingParams, "SamplingParams", len(prompts), is_needed=True)
        # Only the last output of a request is returned, so no others are made.
        return [attrs.evolve(one, output_kind=RequestOutputKind.FINAL_ONLY) for one in listed]

    def _run(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams | PoolingParams],
        use_tqdm: Progress,
        priorities: Sequence[int],
        adapters: Sequence[LoRARequest | None] | None = None,
    ) -> list[Any]:
        """Keep as many requests queued as the engine admits, and step until all are answered."""
        if self.llm_engine.is_sleeping():  # there is no other thread that could wake it
            raise InvalidRequest("the engine sleeps or is paused; call wake_up() or resume it first")
        engine, adapters = self.llm_engine, adapters or [None] * len(prompts)
        # All before the first is computed, so that a wrong one costs nothing.
        prompts = [
            prompt if isinstance(prompt, EngineCoreRequest) else engine.prepare(prompt, one, lora)
            for prompt, one, lora in zip(prompts, params, adapters, strict=True)
        ]
        waiting = list(zip(prompts, params, priorities, strict=True))
        ids: list[str] = []  # an id comes before its request, so that no interruption leaves that behind
        unfinished: set[str] = set()
        outputs: dict[str, Any] = {}
        with _bar(use_tqdm, len(prompts), "Processed prompts") as bar:
            try:
                while len(outputs) < len(prompts):
                    # Not all at once: beyond its queue the engine refuses requests, and here they can just as
                    # well wait.
                    while len(ids) < len(prompts) and engine.has_place(_num_answers(waiting[len(ids)][1])):
                        prompt, one, priority = waiting[len(ids)]
                        lora = adapters[len(ids)]
                        # An engine that was passed in may have requests of others, too.
                        ids.append(next(name for name in self._ids if not engine.has_request(name)))
                        unfinished.add(ids[-1])
                        engine.add_request(ids[-1], prompt, one, lora_request=lora, priority=priority)
                    for output in engine.step_for(unfinished):
                        if output.finished:
                            outputs[output.request_id] = output
                            unfinished.remove(output.request_id)
                            bar.update(1)
            finally:
                # After an exception or Ctrl-C: a request that stayed would use up time of the next call.
                engine.discard([request_id for request_id in ids if request_id not in outputs])
        return [outputs[request_id] for request_id in ids]

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the model's folder names; `max_tokens` is 16, as in vLLM, if it names none."""
        params = self.llm_engine.default_sampling_params()
        return params if params.max_tokens is not None else attrs.evolve(params, max_tokens=16)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return 1, the number of workers."""
        return 1

    def get_metrics(self) -> list[Metric]:
        """Return all metrics; see `LLMEngine.get_metrics`."""
        return self.llm_engine.get_metrics()


def _adapters_for(given: Adapters, num_prompts: int) -> list[LoRARequest | None]:
    return _for_each("lora_request", given, LoRARequest, "a LoRARequest", num_prompts)


def _priorities_for(given: int | Sequence[int] | None, prompts: Sequence[Any]) -> list[int]:
    return [one or 0 for one in _for_each("priority", given, int, "an integer", len(prompts))]


def _for_each(
    name: str, given: Any, kind: type, rule: str, num_prompts: int, *, is_needed: bool = False
) -> list[Any]:
    """Return the argument for each prompt: the same for all, or those of a list, which is as long.

    Raises:
        InvalidRequest: another length, or a value of another type; None is one only where `is_needed`.
    """
    field = "sampling_params" if name == "params" else name
    is_list = isinstance(given, Iterable) and not isinstance(given, str | Mapping)
    listed = list(given) if is_list else [given] * num_prompts
    _check_lengths(range(num_prompts), name, listed)
    for one in listed if is_list else [given]:
        if one is not None or is_needed:
            check_type(field, one, kind, rule)
    return listed


def _own(name: str, prompt: Any) -> Any:
    """Return the parameters that a prompt brings itself; None if it brings none."""
    return getattr(prompt, name) if isinstance(prompt, EngineCoreRequest) else None


def _num_answers(params: SamplingParams | PoolingParams) -> int:
    return params.n if isinstance(params, SamplingParams) else 1


def _check_lengths(prompts: Sequence[Any], name: str, values: Sequence[Any]) -> None:
    if len(prompts) != len(values):
        raise InvalidRequest(
            f"The lengths of prompts ({len(prompts)}) and {name} ({len(values)}) must be the same.",
            field="sampling_params" if name == "params" else name,
        )


def _as_list(prompts: Any) -> list[Any]:
    if not hasattr(prompts, "__getitem__"):
        raise InvalidPrompt(
            f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}",
            field="prompts",
            got=prompts,
        )
    is_one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if is_one else list(prompts)


def _bar(use_tqdm: Progress, total: int, text: str) -> Any:
    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc=text, dynamic_ncols=True, disable=not use_tqdm)


def _choices(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [output.outputs[0].logprobs[0] for output in outputs if output.outputs[0].logprobs]
