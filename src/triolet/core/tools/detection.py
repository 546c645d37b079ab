"""Detection of the tool-call format and the reasoning markers from a model's chat template."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class TemplateOwner(Protocol):
    """A tokenizer that has a chat template."""

    @property
    def template_source(self) -> str:
        """Source of the template; empty if there is none."""
        ...


NO_TOOLS = "none"


def tool_parser_of(template: str) -> str | None:
    """Return the name of the format in which a model with this chat template calls tools.

    Returns:
        A key of `TOOL_FORMATS`; `none` if the template has no place for tools; None if the format cannot be told.
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
    """Return the name of the reasoning markers of a model with this chat template; None if it has none."""
    if "[THINK]" in template:
        return "mistral"
    if "</think>" not in template:
        return None
    # DeepSeek's own templates strip reasoning from history by its end alone, and R1 always reasons.
    is_deepseek = "<\uff5cAssistant\uff5c>" in template and "<think>" in template
    return "deepseek_r1" if is_deepseek else "qwen3"


def tool_parser_named(name: str, tokenizer: object) -> str | None:
    """Return the tool-call format that a configuration names; for `auto`, detect it."""
    if name != "auto":
        return name
    return tool_parser_of(tokenizer.template_source) if isinstance(tokenizer, TemplateOwner) else None


def reasoning_parser_named(name: str, tokenizer: object) -> str | None:
    """Return the reasoning markers that a configuration names; for `auto`, detect them."""
    if name != "auto":
        return None if name == "none" else name
    return reasoning_parser_of(tokenizer.template_source) if isinstance(tokenizer, TemplateOwner) else None
