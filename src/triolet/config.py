"""`EngineConfig`: every choice an operator has, each with its unit, its default and the reason for it.

One frozen value, the same whether it came from keyword arguments, command-line flags (`--max-num-seqs`) or
the environment (`TRIOLET_MAX_NUM_SEQS`): the command line is generated from the fields below and decides
nothing itself. Only what is honoured is a field; an unknown one is an error that names it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import attrs

from triolet.errors import ConfigError

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
DEVICES: Final = ("auto", "cpu", "cuda")
RUNNERS: Final = ("thread", "process", "inline")
POLICIES: Final = ("fcfs", "priority")
MAX_SECONDS: Final = 1e9  # thirty years; a longer wait is better called none
ENVIRONMENT_PREFIX: Final = "TRIOLET_"


def _one_of(choices: tuple[str, ...]) -> Any:
    def check(_config: EngineConfig, attribute: attrs.Attribute[str], value: object) -> None:
        if value not in choices:
            raise ConfigError(attribute.name, "one of " + ", ".join(choices), value)

    return check


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(minimum: int, *, optional: bool = False) -> Any:
    def check(_config: EngineConfig, attribute: attrs.Attribute[int], value: object) -> None:
        if optional and value is None:
            return
        if not _is_whole(value) or not minimum <= value < 2**63:  # type: ignore[operator]
            raise ConfigError(attribute.name, f"a whole number of at least {minimum}", value)

    return check


def _seconds(*, optional: bool = False) -> Any:
    def check(_config: EngineConfig, attribute: attrs.Attribute[float], value: object) -> None:
        if optional and value is None:
            return
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= MAX_SECONDS:  # type: ignore[operator]
            raise ConfigError(attribute.name, f"above 0 and at most {MAX_SECONDS:g} seconds", value)

    return check


def _text(*, optional: bool = False) -> Any:
    def check(_config: EngineConfig, attribute: attrs.Attribute[str], value: object) -> None:
        if optional and value is None:
            return
        if not isinstance(value, str) or not value:
            raise ConfigError(attribute.name, "a non-empty text", value)

    return check


def _flag(_config: EngineConfig, attribute: attrs.Attribute[bool], value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(attribute.name, "true or false", value)


def _option(text: str, *, default: Any, validator: Any) -> Any:
    """A field together with the sentence that `--help` prints for it."""
    return attrs.field(default=default, validator=validator, metadata={"help": text})


@attrs.frozen(kw_only=True)
class EngineConfig:
    """What an engine is started with.

    Raises:
        ConfigError: a field of the wrong type or out of range; names the field, the rule and what came.
    """

    model: str | None = _option(
        "Folder or hub id of the model; without one, the triolet-nano that ships in the package.",
        default=None,
        validator=_text(optional=True),
    )
    tokenizer: str | None = _option(
        "Folder of the tokenizer, if it is not the model's.", default=None, validator=_text(optional=True)
    )
    revision: str | None = _option(
        "Branch, tag or commit of a hub model.", default=None, validator=_text(optional=True)
    )
    dtype: str = _option(
        "Of weights, activations and KV; auto is what the checkpoint says.",
        default="auto",
        validator=_one_of(DTYPES),
    )
    device: str = _option("auto is cuda where there is one.", default="auto", validator=_one_of(DEVICES))
    runner: str = _option(
        # inline blocks the loop for the length of a step; it is for tests, which want one deterministic
        # thread.
        "Where the model runs: in a thread, in a process of its own (whose crash costs streams a pause), or inline "
        "in the event loop (for tests).",
        default="thread",
        validator=_one_of(RUNNERS),
    )
    max_model_len: int | None = _option(
        "Longest sequence, prompt and answer together, in tokens; by default what model and KV cache allow.",
        default=None,
        validator=_whole(2, optional=True),
    )
    block_size: int = _option(
        # vLLM's default: small enough that half a block wasted per request is nothing, large enough for short
        # tables.
        "Tokens in a KV block.",
        default=16,
        validator=_whole(1),
    )
    num_kv_blocks: int | None = _option(
        "Blocks in the KV cache; wins over --kv-cache-bytes.",
        default=None,
        validator=_whole(1, optional=True),
    )
    kv_cache_bytes: int | None = _option(
        "Size of the KV cache in bytes; by default a share of the memory that is free.",
        default=None,
        validator=_whole(1, optional=True),
    )
    max_num_seqs: int = _option(
        "Requests computed together in a step.",
        default=128,  # vLLM's
        validator=_whole(1),
    )
    max_num_batched_tokens: int | None = _option(
        # A step must stay short, or the decodes in it wait for the prefill chunk beside them: on a CPU 512
        # tokens of a 0.6B model take about as long as vLLM's 2048 take an 8B model on a GPU.
        "Tokens computed in a step; by default 2048 on a GPU and 512 on a CPU.",
        default=None,
        validator=_whole(1, optional=True),
    )
    max_queued_requests: int = _option(
        # Bounded by default: a queue that never says no turns an overload into an outage for everybody in it.
        "Requests that may wait; one more is refused as overloaded.",
        default=1024,
        validator=_whole(1),
    )
    max_queued_tokens: int = _option(
        # 2**20 tokens are minutes of prefill on any machine, and a few dozen MiB of token ids.
        "Prompt tokens that may wait; a request that finds this many waiting is refused as overloaded.",
        default=2**20,
        validator=_whole(1),
    )
    policy: str = _option(
        "Who goes first: fcfs (first come) or priority (lower numbers first).",
        default="fcfs",
        validator=_one_of(POLICIES),
    )
    enable_prefix_caching: bool = _option("Reuse the KV of equal beginnings.", default=True, validator=_flag)
    seed: int = _option(
        "Requests without a seed of their own draw theirs from this one.", default=0, validator=_whole(0)
    )
    served_model_name: str | None = _option(
        "Name under which the model is shown; by default its folder's or hub id's last part.",
        default=None,
        validator=_text(optional=True),
    )
    step_timeout: float | None = _option(
        # Twice what a step of 512 tokens takes a model of a few billion parameters on a few CPU cores, and more than
        # compiling kernels adds to a first one. Killing a step that would have ended is worse than a late rescue.
        "Seconds after which a step counts as hung: health turns bad, and a runner process is killed and started "
        "again; none is never.",
        default=60.0,
        validator=_seconds(optional=True),
    )
    trust_remote_code: bool = _option(
        "Let a model folder run Python code of its own.", default=False, validator=_flag
    )

    @classmethod
    def create(cls, config: EngineConfig | None = None, /, **fields: Any) -> EngineConfig:
        """The given configuration with some fields changed.

        Raises:
            ConfigError: an unknown or wrong field.
        """
        if unknown := sorted(fields.keys() - {field.name for field in attrs.fields(cls)}):
            known = ", ".join(field.name for field in attrs.fields(cls))
            raise ConfigError(unknown[0], f"a field of EngineConfig ({known})", fields[unknown[0]])
        return attrs.evolve(config or cls(), **fields)

    @classmethod
    def from_texts(cls, texts: Mapping[str, str]) -> EngineConfig:
        """Structure field texts, as flags and the environment bring them.

        Args:
            texts: by field name.
        Raises:
            ConfigError: an unknown or wrong field.
        """
        types = {field.name: str(field.type) for field in attrs.fields(cls)}
        fields = {name: _from_text(name, text, types.get(name, "str")) for name, text in texts.items()}
        return cls.create(**fields)

    @classmethod
    def environment_fields(cls, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Field texts from `TRIOLET_*` variables; others with that prefix are not ours to judge."""
        environ = os.environ if environ is None else environ
        names = (field.name for field in attrs.fields(cls))
        return {name: environ[key] for name in names if (key := ENVIRONMENT_PREFIX + name.upper()) in environ}

    @property
    def model_name(self) -> str:
        """The name to show for the model."""
        if self.served_model_name:
            return self.served_model_name
        return self.model.rstrip("/").rsplit("/", 1)[-1] if self.model else "triolet-nano"


_TRUTHS: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _from_text(name: str, text: str, type_name: str) -> object:
    if "int" in type_name:
        try:
            return int(text)
        except ValueError:
            raise ConfigError(name, "a whole number", text) from None
    if "float" in type_name:
        try:
            return None if text.lower() == "none" else float(text)
        except ValueError:
            raise ConfigError(name, "a number of seconds, or none", text) from None
    if "bool" in type_name:
        if text.lower() not in _TRUTHS:
            raise ConfigError(name, "true or false", text)
        return _TRUTHS[text.lower()]
    return text
