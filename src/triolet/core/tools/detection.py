"""How a model writes calls of tools and marks its reasoning, as far as its chat template tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable


@runtime_checkable
class TemplateOwner(Protocol):
    """A tokenizer that has a chat template."""

    @property
    def template_source(self) -> str:
        """The template; empty if there is none."""
        ...


def tool_parser_of(template: str) -> str | None:
    """Name of the format in which a model with this chat template calls tools; None if it can not be told."""
    if "<tool_call>" in template and "<arg_key>" not in template and "<function=" not in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and "tools" in template):
        return "llama3_json"
    return None


def reasoning_parser_of(template: str) -> str | None:
    """Name of the format in which a model with this chat template marks its reasoning; None if it gives none."""
    if "[THINK]" in template:
        return "mistral"
    if "</think>" not in template:
        return None
    # DeepSeek's own templates strip reasoning from history by its end alone, and R1 always reasons.
    is_deepseek = "<\uff5cAssistant\uff5c>" in template and "<think>" in template
    return "deepseek_r1" if is_deepseek else "qwen3"


def parser_named(name: str, detect: Callable[[str], str | None], codec: object) -> str | None:
    """The parser that a configuration names: none, a certain one, or the one that the template tells of."""
    if name != "auto":
        return None if name == "none" else name
    return detect(codec.template_source) if isinstance(codec, TemplateOwner) else None
