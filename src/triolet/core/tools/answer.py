"""Streaming parser of an answer: text in; text, reasoning and tool calls out.

The tool-call format and the reasoning markers are detected from the model's chat template.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol, runtime_checkable

from triolet.core.tools.events import AnswerEvent, TextPiece, ToolCallArguments, ToolCallBegin, ToolCallEnd
from triolet.core.tools.formats import ToolFormat
from triolet.core.tools.harmony import CHANNEL, MESSAGE
from triolet.core.tools.reasoning import HARMONY
from triolet.core.tools.scanning import WHITESPACE


class Splitter(Protocol):
    """Object that takes text in pieces and returns events."""

    def feed(self, text: str) -> list[AnswerEvent]: ...

    def finish(self) -> list[AnswerEvent]: ...


class AnswerParser:
    """Parser that turns the text of one answer into events, the same ones however the text is cut into pieces.

    Whitespace between a call and its neighbours is dropped.

    Args:
        reasoning: splits the reasoning off, if the model gives any.
        tools: finds the calls, if there can be any.
        one_call: True delivers the first call only and drops those after it.
    """

    def __init__(
        self,
        reasoning: Splitter | None = None,
        tools: ToolFormat | None = None,
        *,
        one_call: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._one_call = one_call
        self._num_calls = 0
        # Whitespace that is held back, in pieces: joined for each new one, a long run would take its length squared.
        self._spacing: list[str] = []
        self._follows_call = False

    def feed(self, text: str) -> tuple[AnswerEvent, ...]:
        """Take the next piece of text; return the events that are certain with it, often none."""
        events = self._reasoning.feed(text) if self._reasoning else [TextPiece(text)]
        return tuple(self._spaced(self._allowed(self._with_calls(events))))

    def finish(self) -> tuple[AnswerEvent, ...]:
        """End the answer and return the events held back; calls that are open end."""
        events = list(self._with_calls(self._reasoning.finish() if self._reasoning else []))
        events += self._tools.finish() if self._tools else []
        found = list(self._spaced(self._allowed(events)))
        # Whitespace at the end of a text is part of it; behind a call it is not.
        spacing, self._spacing = "".join(self._spacing), []
        if spacing and not self._follows_call:
            found.append(TextPiece(spacing))
        return tuple(found)

    def _allowed(self, events: Iterable[AnswerEvent]) -> Iterator[AnswerEvent]:
        """Drop calls after the first, if only one is wanted: a free answer may hold more than the model was told to."""
        for event in events:
            self._num_calls += isinstance(event, ToolCallBegin)
            is_call = isinstance(event, ToolCallBegin | ToolCallArguments | ToolCallEnd)
            if not (self._one_call and is_call and self._num_calls > 1):
                yield event

    def _with_calls(self, events: Iterable[AnswerEvent]) -> Iterator[AnswerEvent]:
        """Find the calls in text; reasoning holds none, whatever it looks like."""
        for event in events:
            if isinstance(event, TextPiece) and self._tools is not None:
                yield from self._tools.feed(event.text)
            else:
                yield event

    def _spaced(self, events: Iterable[AnswerEvent]) -> Iterator[AnswerEvent]:
        """Hold whitespace back until it is known whether a call follows it."""
        if self._tools is None:
            yield from (event for event in events if event != TextPiece(""))
            return
        for event in events:
            match event:
                case TextPiece(text=text):
                    said = text.rstrip(WHITESPACE)
                    if said:
                        yield TextPiece("".join([*self._spacing, said]))
                        self._follows_call = False
                        self._spacing.clear()
                    self._spacing.append(text[len(said) :])
                case ToolCallBegin():
                    self._spacing.clear()
                    yield event
                case ToolCallEnd():
                    self._follows_call = True
                    yield event
                case _:
                    yield event


@runtime_checkable
class TemplateOwner(Protocol):
    """A tokenizer that has a chat template."""

    @property
    def template_source(self) -> str:
        """Source of the template; empty if there is none."""
        ...

    @property
    def tool_template_source(self) -> str:
        """Source of the template for chats with tools; empty if that is the same one."""
        ...

    @property
    def template_variables(self) -> frozenset[str]:
        """Names of the values that the template reads beside messages and tools."""
        ...

    @property
    def thinking_prompt(self) -> str:
        """Text of a short chat in which the switch of reasoning is on; empty if the template has no switch."""
        ...


NO_TOOLS = "none"
_OTHER_MARK = re.compile(r"<[^<>\s]*(?:tool|function)_?calls?[^<>\s]*>|<function=", re.IGNORECASE)


def tool_parser_of(template: str) -> str | None:
    """Return the name of the format in which a model with this chat template calls tools.

    Returns:
        A key of `TOOL_FORMATS`; `none` if the template has no place for tools; None if the format cannot be told.
    """
    if "tools" not in template:
        return NO_TOOLS
    if _is_harmony(template):
        return HARMONY
    # GLM and Qwen3-Coder write this mark, too, but no JSON behind it.
    if "<tool_call>" in template and "<arg_key>" not in template and "<function=" not in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    # Llama 3 writes bare JSON without a mark, so its template is known by its tokens and by the key of the arguments.
    # Models that are made of it have the tokens, too, and may have marks of their own around calls.
    has_key = '"parameters"' in template.replace('\\"', '"')
    is_llama = "<|python_tag|>" in template or ("<|start_header_id|>" in template and has_key)
    return "llama3_json" if is_llama and _OTHER_MARK.search(template) is None else None


def _is_harmony(template: str) -> bool:
    return CHANNEL in template and MESSAGE in template


def reasoning_parser_of(template: str) -> str | None:
    """Return the name of the reasoning markers of a model with this chat template; None if it has none."""
    if _is_harmony(template):
        return HARMONY
    if "[THINK]" in template:
        return "mistral"
    if "</think>" not in template:
        return None
    # DeepSeek's own templates strip reasoning from history by its end alone, and R1 always reasons. V3.1 has a switch,
    # and opens the reasoning itself where it is on.
    is_deepseek = "<\uff5cAssistant\uff5c>" in template and "<think>" in template
    has_switch = any(switch in template for switch in THINKING_SWITCHES)
    return "deepseek_r1" if is_deepseek and not has_switch else "qwen3"


def tool_parser_named(name: str, tokenizer: object) -> str | None:
    """Return the tool-call format that a configuration names; for `auto`, detect it."""
    if name != "auto":
        return name
    if not isinstance(tokenizer, TemplateOwner):
        return None
    return tool_parser_of(tokenizer.tool_template_source or tokenizer.template_source)


def reasoning_parser_named(name: str, tokenizer: object) -> str | None:
    """Return the reasoning markers that a configuration names; for `auto`, detect them."""
    if name != "auto":
        return None if name == "none" else name
    return reasoning_parser_of(tokenizer.template_source) if isinstance(tokenizer, TemplateOwner) else None


# Qwen and most others; DeepSeek-V3.1 and Granite.
THINKING_SWITCHES: Final = ("enable_thinking", "thinking")


def thinking_switch_among(variables: Container[str]) -> str | None:
    """Return the value of a chat template that switches reasoning on and off; None if the template has none."""
    return next((name for name in THINKING_SWITCHES if name in variables), None)


# Chat templates can switch reasoning on or off, and `minimal` is nearest to off.
EFFORTS: Final[Mapping[str, bool]] = MappingProxyType(
    {"none": False, "minimal": False, "low": True, "medium": True, "high": True, "xhigh": True, "max": True}
)
"""Efforts of OpenAI's API, and whether they ask for reasoning."""


def thinks_at(effort: str | None) -> bool | None:
    """Return whether an effort of OpenAI's API asks for reasoning; None if it does not say."""
    return EFFORTS.get(effort or "")


def thinking_switch_of(tokenizer: object) -> str | None:
    """Return the value of a tokenizer's chat template that switches reasoning on and off; None if it has none."""
    return (
        thinking_switch_among(tokenizer.template_variables) if isinstance(tokenizer, TemplateOwner) else None
    )


EFFORT_VARIABLE: Final = "reasoning_effort"
"""Value of a chat template, such as that of gpt-oss, that says how much the model is to reason."""

# Every template that reads the value takes low, medium and high; each further one is known by its name in quotes.
_NEAREST_EFFORT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "none": "low",
        "minimal": "low",
        "low": "low",
        "medium": "medium",
        "high": "high",
        "xhigh": "high",
        "max": "high",
    }
)


def template_efforts_of(tokenizer: object) -> Mapping[str, str]:
    """Return what a tokenizer's chat template takes as `reasoning_effort` for each of `EFFORTS`; empty for no such."""
    if not isinstance(tokenizer, TemplateOwner) or EFFORT_VARIABLE not in tokenizer.template_variables:
        return {}
    template = tokenizer.template_source
    return {
        effort: effort if f"'{effort}'" in template or f'"{effort}"' in template else nearest
        for effort, nearest in _NEAREST_EFFORT.items()
    }


def effort_values(effort: str | None, switch: str | None, efforts: Mapping[str, str]) -> dict[str, Any]:
    """Return the values for a chat template that an effort of OpenAI's API stands for.

    Args:
        effort: one of `EFFORTS`; None for that of the template.
        switch: see `thinking_switch_of`.
        efforts: see `template_efforts_of`.
    """
    values: dict[str, Any] = {}
    if switch is not None and (thinks := thinks_at(effort)) is not None:
        values[switch] = thinks
    if effort is not None and effort in efforts:
        values[EFFORT_VARIABLE] = efforts[effort]
    return values
