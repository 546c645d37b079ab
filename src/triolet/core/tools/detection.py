"""How a model writes calls of tools and marks its reasoning, as far as its chat template tells."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class TemplateOwner(Protocol):
    """A tokenizer that has a chat template."""

    @property
    def template_source(self) -> str:
        """The template; empty if there is none."""
        ...


NO_TOOLS = "none"


def tool_parser_of(template: str) -> str | None:
    """Name of the format in which a model with this chat template calls tools.

    Returns:
        A key of `TOOL_FORMATS`; `none` if the template has no place for tools; None if the format can not be told.
    """
    if "tools" not in template:
        return NO_TOOLS
    if "<tool_call>" in template and "<arg_key>" not in template and "<function=" not in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
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


def tool_parser_named(name: str, tokenizer: object) -> str | None:
    """The format of calls that a configuration names, or, for `auto`, the one that the template tells of."""
    if name != "auto":
        return name
    return tool_parser_of(tokenizer.template_source) if isinstance(tokenizer, TemplateOwner) else None


def reasoning_parser_named(name: str, tokenizer: object) -> str | None:
    """The marks of reasoning that a configuration names, or, for `auto`, those that the template tells of."""
    if name != "auto":
        return None if name == "none" else name
    return reasoning_parser_of(tokenizer.template_source) if isinstance(tokenizer, TemplateOwner) else None
