"""Parts of vLLM's configuration as read-only views of triolet's, and a tokenizer with transformers' calls."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self

import attrs

from triolet.config.engine import EngineConfig
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.prompt import ChatPrompt
from triolet.core.request.tokenizer_interface import Tokenize, TokenizerInterface
from triolet.core.scheduling.budget import DEFAULT_BATCHED_TOKENS
from triolet.errors import UnsupportedFeature


@attrs.frozen(kw_only=True)
class ModelConfig:
    """Configuration of the model, in vLLM's fields.

    Args:
        model: as it was named.
        served_model_name: as it is shown.
        tokenizer: where the tokenizer was read.
        dtype: of weights and KV.
        max_model_len: longest sequence, tokens.
        seed: seed of the generator that requests without a seed get theirs from.
        trust_remote_code: whether its own code may run.
        vocab_size: token ids are below it.
        architectures: from config.json.
        folder: where the model lies, or its GGUF file; `hf_config` is read there.
    """

    model: str
    served_model_name: str
    tokenizer: str
    dtype: str
    max_model_len: int
    seed: int
    trust_remote_code: bool
    vocab_size: int
    architectures: tuple[str, ...] = ()
    folder: str = ""

    @cached_property
    def hf_config(self) -> Any:
        """Configuration as transformers reads it from the model's folder, on first use.

        Raises:
            OSError, ValueError: transformers cannot read it.
        """
        # Late, because transformers takes a second to import.
        from transformers import AutoConfig

        folder, source = _where(self.folder)
        read: Any = AutoConfig.from_pretrained
        return read(folder, trust_remote_code=self.trust_remote_code, local_files_only=True, **source)

    @property
    def hf_text_config(self) -> Any:
        """The part of `hf_config` that is about text, which is all of it for a model without images."""
        return self.hf_config.get_text_config()

    def get_hidden_size(self) -> int:
        """Return the size of a hidden state, numbers; 0 if the configuration does not have it."""
        return int(getattr(self.hf_text_config, "hidden_size", 0))

    def get_head_size(self) -> int:
        """Return the size of an attention head, numbers; 0 without attention heads."""
        text = self.hf_text_config
        if (size := getattr(text, "head_dim", None)) is not None:
            return int(size)
        num_heads = getattr(text, "num_attention_heads", 0)
        return self.get_hidden_size() // num_heads if num_heads else 0

    def get_vocab_size(self) -> int:
        """Return `vocab_size`."""
        return self.vocab_size

    @classmethod
    def of(cls, config: EngineConfig, info: ModelInfo) -> Self:
        """Make the view of an engine."""
        return cls(
            model=config.model or info.folder,
            served_model_name=config.model_name,
            tokenizer=config.tokenizer or info.folder,
            dtype=info.dtype,
            max_model_len=info.max_model_len,
            seed=config.seed,
            trust_remote_code=config.trust_remote_code,
            vocab_size=info.vocab_size,
            architectures=(info.architecture,),
            folder=info.folder,
        )


@attrs.frozen(kw_only=True)
class ParallelConfig:
    """Number of workers of each kind."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    world_size: int = 1

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Make the view of an engine."""
        size = config.tensor_parallel_size
        return cls(tensor_parallel_size=size, world_size=size, data_parallel_size=config.num_replicas)


@attrs.frozen(kw_only=True)
class SchedulerView:
    """Limits of a step.

    Args:
        max_num_seqs: requests computed together.
        max_num_batched_tokens: token budget of a step.
        max_model_len: longest sequence, tokens.
        policy: order in which requests are scheduled.
        enable_chunked_prefill: always True.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str
    enable_chunked_prefill: bool = True

    @classmethod
    def of(cls, config: EngineConfig, info: ModelInfo) -> Self:
        """Make the view of an engine."""
        return cls(
            max_num_seqs=config.max_num_seqs,
            # None leaves it to the scheduler, and vLLM's field is never None.
            max_num_batched_tokens=config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS,
            max_model_len=info.max_model_len,
            policy=config.policy,
        )


@attrs.frozen(kw_only=True)
class LoRAView:
    """Limits of LoRA adapters.

    Args:
        max_lora_rank: highest rank.
        max_loras: different adapters in one step.
        max_cpu_loras: adapters that are kept in memory.
        lora_dtype: in which they are kept.
    """

    max_lora_rank: int
    max_loras: int
    max_cpu_loras: int
    lora_dtype: str

    @classmethod
    def of(cls, config: EngineConfig) -> Self | None:
        """Make the view of an engine; None if adapters are not enabled."""
        if not config.enable_lora:
            return None
        return cls(
            max_lora_rank=config.max_lora_rank,
            max_loras=config.max_loras,
            max_cpu_loras=config.max_cpu_loras or config.max_loras,
            lora_dtype=config.lora_dtype,
        )


@attrs.frozen(kw_only=True)
class ObservabilityView:
    """Settings of traces.

    Args:
        otlp_traces_endpoint: where spans are sent; None for nowhere.
    """

    otlp_traces_endpoint: str | None = None


class ConfigView(EngineConfig):
    """Configuration of an engine, with its parts by vLLM's names, which are known once the model is loaded."""

    _info: Callable[[], ModelInfo]
    _model_config: ModelConfig | None

    @classmethod
    def over(cls, config: EngineConfig, info: Callable[[], ModelInfo]) -> Self:
        """Make the view of an engine.

        Args:
            config: that it was started with.
            info: returns what is known of the model; raises where it is not loaded.
        """
        view = object.__new__(cls)
        for field in attrs.fields(EngineConfig):
            object.__setattr__(view, field.name, getattr(config, field.name))
        object.__setattr__(view, "_info", info)
        object.__setattr__(view, "_model_config", None)
        return view

    def plain(self) -> EngineConfig:
        """Return the configuration alone, for another engine."""
        return EngineConfig(**{one.name: getattr(self, one.name) for one in attrs.fields(EngineConfig)})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EngineConfig):
            return NotImplemented
        return all(getattr(self, one.name) == getattr(other, one.name) for one in attrs.fields(EngineConfig))

    __hash__ = EngineConfig.__hash__

    @property
    def model_config(self) -> ModelConfig:
        """Configuration of the model."""
        # Kept, with what transformers has read, until other weights are loaded.
        if (present := ModelConfig.of(self, self._info())) != self._model_config:
            object.__setattr__(self, "_model_config", present)
        assert self._model_config is not None
        return self._model_config

    @property
    def scheduler_config(self) -> SchedulerView:
        """Limits of a step."""
        return SchedulerView.of(self, self._info())

    @property
    def parallel_config(self) -> ParallelConfig:
        """Number of workers of each kind."""
        return ParallelConfig.of(self)

    @property
    def lora_config(self) -> LoRAView | None:
        """Limits of LoRA adapters; None if they are not enabled."""
        return LoRAView.of(self)

    @property
    def observability_config(self) -> ObservabilityView:
        """Settings of traces."""
        return ObservabilityView(otlp_traces_endpoint=self.otlp_traces_endpoint)

    @property
    def cache_config(self) -> SimpleNamespace:
        """Layout of the KV cache, with `num_gpu_blocks` and `block_size` among its attributes."""
        layout = self._info().cache_config(enable_prefix_caching=self.enable_prefix_caching)
        return SimpleNamespace(**layout)


@attrs.frozen(kw_only=True)
class DecodingConfig:
    """Backend of structured outputs."""

    backend: str = "guidance"


class Tokenizer:
    """The model's tokenizer, with the methods of a transformers tokenizer.

    What is not defined here, such as `eos_token_id` or `batch_decode`, is transformers' own, read on first use. It may
    be awaited: `get_tokenizer` is asynchronous in some versions of vLLM.

    Args:
        tokenizer: of the engine.
        folder: where it was read.
        trust_remote_code: whether its own code may run.
    """

    def __init__(
        self, tokenizer: TokenizerInterface, folder: str = "", *, trust_remote_code: bool = False
    ) -> None:
        self._tokenizer, self._folder, self._trusts = tokenizer, folder, trust_remote_code

    @cached_property
    def _transformers(self) -> Any:
        # Late, because transformers takes a second to import.
        from transformers import AutoTokenizer

        folder, source = _where(self._folder)
        read: Any = AutoTokenizer.from_pretrained
        return read(folder, trust_remote_code=self._trusts, local_files_only=True, **source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._transformers, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode texts as transformers does."""
        return self._transformers(*args, **kwargs)

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        return len(self._transformers)

    def __bool__(self) -> bool:
        return True

    def __await__(self) -> Generator[Any, Any, Tokenizer]:
        yield from ()
        return self

    async def ping(self) -> None:
        """Return, which shows that it answers."""

    def encode(self, text: Any, *args: Any, add_special_tokens: bool = True, **options: Any) -> Any:
        """Return the token ids of a text as a prompt, as the engine encodes it.

        Args:
            text: of the prompt.
            *args: further arguments of transformers' `encode`, which has the call then.
            add_special_tokens: whether the special tokens come with it that the model puts around a text.
            **options: as `*args`, such as `return_tensors`.
        """
        if args or _given(options) or not isinstance(text, str):
            options["add_special_tokens"] = add_special_tokens
            return self._transformers.encode(text, *args, **options)
        message = Tokenize(text, add_special_tokens=add_special_tokens)
        return list(self._tokenizer.tokenize(message).token_ids)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """Return the text of token ids.

        Args:
            token_ids: a list, an array or a tensor of them, or a single one.
            skip_special_tokens: whether the texts of special tokens are left out.
            **options: of transformers' `decode`, which has the call then.
        """
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, int) else list(ids)
        if _given(options) or not all(isinstance(one, int) for one in ids):  # several sequences
            return self._transformers.decode(ids, skip_special_tokens=skip_special_tokens, **options)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Return the prompt of a conversation, or those of several.

        Args:
            conversation: its messages; a list of such lists for several.
            tools: see `ChatPrompt`, as for the four that follow.
            tokenize: True for token ids, False for the text.
            return_dict: whether token ids come with their attention mask, as transformers' own call gives them.
            tokenizer_kwargs: of that call, as are `padding`, `truncation`, `max_length` and `return_tensors`.
            **options: further values for the template, such as `enable_thinking`.
        Raises:
            InvalidRequest: the template refuses the conversation, or does not read a value.
        """
        ways = {name: options.pop(name) for name in _WAYS_TO_ENCODE & options.keys()}
        ways |= tokenizer_kwargs or {}
        chat = {
            "tools": tools,
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": {**(chat_template_kwargs or {}), **options},
        }
        is_one = not conversation or isinstance(conversation[0], Mapping)
        prompts = [
            self._tokenizer.tokenize(Tokenize(ChatPrompt.parse({"messages": messages, **chat})))
            for messages in ([conversation] if is_one else conversation)
        ]
        if not tokenize:
            found: list[Any] = [prompt.text for prompt in prompts]
        elif return_dict or _given(ways):
            texts: Any = [prompt.text for prompt in prompts]
            encoded = self._transformers(texts[0] if is_one else texts, add_special_tokens=False, **ways)
            return encoded if return_dict else encoded["input_ids"]
        else:
            found = [list(prompt.token_ids) for prompt in prompts]
        return found[0] if is_one else found


# Options of a call of transformers' tokenizer that `apply_chat_template` hands on.
_WAYS_TO_ENCODE: Final = frozenset(("padding", "truncation", "max_length", "return_tensors"))


def _where(folder: str) -> tuple[str, dict[str, str]]:
    """Return the folder that transformers reads, and the argument that names a GGUF file in it."""
    place = Path(folder)
    if place.suffix == ".gguf":
        return str(place.parent), {"gguf_file": place.name}
    return folder, {}


def _given(options: Mapping[str, Any]) -> bool:
    """Return True if an option has a value: programs spell defaults out."""
    return any(value is not None and value is not False for value in options.values())


def tokenizer_of(
    tokenizer: TokenizerInterface | None, folder: str = "", *, trust_remote_code: bool = False
) -> Tokenizer:
    """Wrap the engine's tokenizer.

    Raises:
        UnsupportedFeature: the model has none.
    """
    if tokenizer is None:
        raise UnsupportedFeature(
            "get_tokenizer is not offered: the model has no tokenizer", field="tokenizer"
        )
    return Tokenizer(tokenizer, folder, trust_remote_code=trust_remote_code)


AnyTokenizer = Tokenizer
"""Name that vLLM has for a tokenizer of any kind."""
