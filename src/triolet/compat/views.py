"""Parts of vLLM's configuration as read-only views of triolet's, and a tokenizer with transformers' calls."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

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
    """

    model: str
    served_model_name: str
    tokenizer: str
    dtype: str
    max_model_len: int
    seed: int
    trust_remote_code: bool
    vocab_size: int

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
        )


@attrs.frozen(kw_only=True)
class ParallelConfig:
    """Number of workers of each kind."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    world_size: int = 1


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

        place = Path(self._folder)
        source = {"gguf_file": place.name} if place.suffix == ".gguf" else {}
        read: Any = AutoTokenizer.from_pretrained
        folder = place.parent if source else place
        return read(str(folder), trust_remote_code=self._trusts, local_files_only=True, **source)

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

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text as a prompt, with the special tokens that the model puts around it."""
        return list(self._tokenizer.tokenize(Tokenize(text)).token_ids)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        # transformers' `decode` takes a single id, too.
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **options: Any
    ) -> Any:
        """Return the prompt of a conversation.

        Args:
            conversation: its messages.
            tokenize: True for token ids, False for the text.
            **options: `tools`, `chat_template`, `chat_template_kwargs`, `continue_final_message` and
                `add_generation_prompt`, which is True by default here.
        """
        tokenized = self._tokenizer.tokenize(
            Tokenize(ChatPrompt.parse({"messages": conversation, **options}))
        )
        return list(tokenized.token_ids) if tokenize else tokenized.text


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
