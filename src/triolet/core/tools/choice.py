"""Tool planning: from a request's tools and `tool_choice` to the constraint on its answer and the parser of the answer.

    auto      the model decides; the answer is searched for the format's markers
    none      the tools are not shown to the model
    required  at least one call: the answer is a JSON list of calls, by a grammar made from the tools
    a name    that function is called: the answer is its arguments, by a grammar made from its parameters

`allowed_tools` is auto or required with a subset of the tools; only these are shown to the model. Under auto, `strict`
tools constrain the answer: free text, in which every call follows its schema. If a JSON format is requested besides,
the answer is either calls or that JSON.

Schema and messages follow vLLM's where vLLM has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from triolet.core import json_text
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.request.tokenizer_interface import Tokenize, TokenizerInterface
from triolet.core.tools.answer import NO_TOOLS, AnswerParser, Splitter
from triolet.core.tools.call_schema import advisory, call_schema, pattern_that_looks_around
from triolet.core.tools.either import CallsOrForm
from triolet.core.tools.forced import ArgumentsFormat, CallListFormat
from triolet.core.tools.formats import MAX_NAME_CHARS, SPECIAL_MARKS, TOOL_FORMATS, ToolFormat
from triolet.core.tools.harmony import HarmonyFormat
from triolet.core.tools.reasoning import HARMONY, REASONING_FORMATS, ReasoningSplitter
from triolet.errors import InvalidRequest, UnsupportedFeature, shown


def object_schema(tool: FunctionTool) -> dict[str, Any]:
    """Return the schema of a function's arguments: an object, with or without properties."""
    return dict(tool.parameters) if tool.parameters else {"type": "object", "properties": {}}


def bound_calls(
    tools: Sequence[FunctionTool], tool_parser: str | None, may_be_several: bool
) -> dict[str, Any]:
    """Return the value of `StructuredOutputsParams.tool_calls`; a tool that is not strict takes any object."""
    listed = [
        # Without `strict` a schema only advises the model, as with OpenAI.
        {"name": tool.name, "parameters": object_schema(tool) if tool.strict else {"type": "object"}}
        for tool in tools
    ]
    return {"format": tool_parser, "tools": listed, "parallel": may_be_several}


def leaves_room_for_calls(form: StructuredOutputsParams) -> bool:
    """Return True if an answer may be of this form or else calls."""
    return form.kind in ("json", "json_object") and not form.disable_additional_properties


def schema_of(form: StructuredOutputsParams) -> dict[str, Any]:
    """Return the schema of a form that is JSON."""
    schema = json_text.loads(form.json) if form.json is not None else {"type": "object"}
    # A schema may also be just true or false.
    return schema if isinstance(schema, dict) else {"anyOf": [schema]}


def calls_schema(tools: Sequence[FunctionTool], may_be_several: bool) -> dict[str, Any]:
    """Return the schema of a list of calls."""
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for tool in tools:
        call, needed = call_schema(tool.name, object_schema(tool), "parameters")
        calls.append(call)
        definitions |= needed
    whole: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not may_be_several:
        whole["maxItems"] = 1
    if definitions:
        whole["$defs"] = definitions
    return whole


# OpenAI's limit.
MAX_TOOLS = 128

# Length of the descriptions and schemas of all tools as JSON, characters, about: a template writes them in C calls that
# hold the GIL, for 5 ms at this length. They would be more than 100,000 tokens of the prompt.
MAX_TOOLS_CHARS = 2**19


@attrs.frozen(kw_only=True)
class FunctionTool:
    """Function that the model may call.

    Args:
        name: letters, digits, `_`, `-` and `.`.
        description: what it is for.
        parameters: JSON schema of its arguments.
        strict: the arguments must follow the schema.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = attrs.field(factory=dict)
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the function in the form that chat templates expect."""
        function: dict[str, Any] = {"name": self.name, "parameters": dict(self.parameters)}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


def parse_tools(tools: object) -> tuple[FunctionTool, ...]:
    """Parse the tools of a request, in the form of Chat Completions or of Responses.

    Args:
        tools: a list of `{"type": "function", "function": {"name": ...}}` or `{"type": "function", "name": ...}`.
    Raises:
        InvalidRequest: names the place and the rule.
        UnsupportedFeature: a tool that is no function.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise wrong("tools", "must be a list", tools)
    if len(tools) > MAX_TOOLS:
        raise wrong("tools", f"must have at most {MAX_TOOLS} entries", len(tools))
    parsed = tuple(_parse_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools))
    if parsed and json_text.is_longer(
        [(tool.description, tool.parameters) for tool in parsed], MAX_TOOLS_CHARS
    ):
        rule = f"must have at most {MAX_TOOLS_CHARS} characters of descriptions and schemas in all"
        raise InvalidRequest(f"tools {rule}, got more", field="tools")
    names = [tool.name for tool in parsed]
    for name in names:
        # A call names its function, so two of one name could not be told apart.
        if names.count(name) > 1:
            raise wrong("tools", "must have names of their own", name)
    return parsed


def _parse_tool(tool: object, field: str) -> FunctionTool:
    if isinstance(tool, FunctionTool):
        return tool
    if not isinstance(tool, Mapping):
        raise wrong(field, "must be a mapping", tool)
    if (kind := tool.get("type", "function")) != "function":
        raise UnsupportedFeature(
            f"{field}.type must be 'function', got {shown(kind)}", field=f"{field}.type", got=kind
        )
    # In Responses the function's fields stand beside its type.
    function = tool.get("function", tool)
    if function is not tool:
        field = f"{field}.function"
    if not isinstance(function, Mapping):
        raise wrong(field, "must be a mapping", function)
    name, description = function.get("name"), function.get("description")
    parameters, strict = function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_CHARS or not _is_plain(name):
        raise wrong(
            f"{field}.name", f"must have 1 to {MAX_NAME_CHARS} letters, digits, '_', '-' or '.'", name
        )
    if description is not None and not isinstance(description, str):
        raise wrong(f"{field}.description", "must be a string", description)
    if parameters is not None and not isinstance(parameters, Mapping):
        raise wrong(f"{field}.parameters", "must be a JSON schema", parameters)
    if strict is not None and not isinstance(strict, bool):
        raise wrong(f"{field}.strict", "must be true or false", strict)
    if strict and (found := pattern_that_looks_around(parameters)) is not None:
        place, pattern = found
        rule = "must not look around or refer back in a strict function, of whose pattern a grammar is made"
        raise wrong(f"{field}.parameters.{place}", rule, pattern)
    return FunctionTool(name=name, description=description, parameters=parameters or {}, strict=strict)


def _is_plain(name: str) -> bool:
    return all((char.isalnum() and char.isascii()) or char in "_-." for char in name)


def wrong(field: str, sentence: str, got: object) -> InvalidRequest:
    """Return the error for a wrong field of a request."""
    return InvalidRequest(f"{field} {sentence}, got {shown(got)}", field=field, got=got)


def _parse_allowed(choice: object, tools: Sequence[FunctionTool]) -> tuple[object, Sequence[FunctionTool]]:
    """Return mode and tools of `allowed_tools`, as Chat Completions or Responses write it; other choices unchanged."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return choice, tools
    allowed = choice.get("allowed_tools", choice)
    mode, listed = (allowed.get(name) if isinstance(allowed, Mapping) else None for name in ("mode", "tools"))
    if mode not in ("auto", "required"):
        raise wrong("tool_choice.mode", "must be auto or required", mode)
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes) or not listed:
        raise wrong("tool_choice.tools", "must be a list of tools, not empty", listed)
    names = {_named(tool, f"tool_choice.tools[{place}]", tools).name for place, tool in enumerate(listed)}
    return mode, [tool for tool in tools if tool.name in names]


def _named(choice: object, field: str, tools: Sequence[FunctionTool]) -> FunctionTool:
    """Return the tool that `{"type": "function", "name": ...}` means; the name may stand within `function`."""
    if not isinstance(choice, Mapping):
        raise wrong(field, "must be a mapping", choice)
    if (kind := choice.get("type")) != "function":
        raise UnsupportedFeature(f"{field}.type must be 'function', got {shown(kind)}", field=field, got=kind)
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    for tool in tools:
        if tool.name == name:
            return tool
    raise wrong(field, "must name one of the tools", name)


def _parse_choice(choice: object, tools: Sequence[FunctionTool]) -> str | FunctionTool:
    """Return `none`, `auto`, `required`, or the named function."""
    if choice is None:
        return "auto" if tools else "none"
    if choice in ("none", "auto", "required"):
        if choice == "required" and not tools:
            raise wrong("tool_choice", "must be none or auto where there are no tools", choice)
        return str(choice)
    if not isinstance(choice, Mapping):
        raise wrong("tool_choice", "must be none, auto, required, allowed_tools or a function's name", choice)
    return _named(choice, "tool_choice", tools)


@attrs.frozen(kw_only=True)
class ToolPlan:
    """Consequences of a request's tools for its prompt, its sampling and the parsing of its answer.

    Args:
        template_tools: for the chat prompt, `{"messages": ..., "tools": plan.template_tools}`; None for none, also
            where the model cannot be told of them.
        structured_outputs: for `SamplingParams`; None if the answer is not constrained.
        skip_special_tokens: for `SamplingParams`; False where marks of calls or of reasoning are special tokens.
        tool_parser: name of the format in which calls are searched; None for no search, or for forced calls that are
            plain JSON.
        is_forced: the answer consists of calls only.
    """

    template_tools: tuple[dict[str, Any], ...] | None
    structured_outputs: StructuredOutputsParams | None
    skip_special_tokens: bool
    tool_parser: str | None
    is_forced: bool = False
    _is_either: bool = False
    _one_call: bool = False
    _names: tuple[str, ...] = ()
    _barred: tuple[str, ...] = ()
    _named: str | None = None
    _reasoning: str | None = None

    def parser(self, prompt: str | None = None) -> AnswerParser:
        """Return a new parser for one answer; each of several answers needs its own.

        Args:
            prompt: its text (`RequestOutput.prompt`), where it is known: reasoning may begin or end there.
        """
        splitter: Splitter | None = None
        if HARMONY in (self._reasoning, self.tool_parser):
            splitter = self._harmony(prompt or "")
        elif self._reasoning is not None:
            splitter = ReasoningSplitter(REASONING_FORMATS[self._reasoning], prompt or "")
        return AnswerParser(splitter, self._format(), one_call=self._one_call)

    def _harmony(self, prompt: str) -> HarmonyFormat:
        """Return the parser of messages, which also finds the calls that are messages."""
        form = self.structured_outputs
        return HarmonyFormat(
            self._names,
            self._barred,
            prompt=prompt,
            finds_calls=self.tool_parser == HARMONY,
            splits_reasoning=self._reasoning == HARMONY,
            has_preambles=form is None or form.kind == "tool_calls",
        )

    def _format(self) -> ToolFormat | None:
        if self.tool_parser == HARMONY:
            return None
        if self._named is not None:
            return ArgumentsFormat(self._named)
        if self.is_forced:
            return CallListFormat()
        if self.tool_parser is None:
            return None
        calls = TOOL_FORMATS[self.tool_parser](self._names, self._barred)
        return CallsOrForm(calls) if self._is_either else calls


def plan_tools(
    tools: object = None,
    tool_choice: object = None,
    *,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    parallel_tool_calls: bool = True,
    form: StructuredOutputsParams | None = None,
    tokenizer: TokenizerInterface | None = None,
) -> ToolPlan:
    """Decide how tools are offered, and how the answer is read.

    Args:
        tools: see `parse_tools`; None or an empty list for none.
        tool_choice: `none`, `auto`, `required`, `{"type": "function", "function": {"name": ...}}` or `{"type":
            "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}` (or both with what is within beside the
            type); by default `auto` where there are tools.
        tool_parser: the model's format of calls (`Engine.tool_parser`); `none` for a model that cannot be told of
            tools, whose calls can only be forced; None if the format is not known.
        reasoning_parser: the model's marks of reasoning (`Engine.reasoning_parser`).
        parallel_tool_calls: False: `required` asks for exactly one call, and under `auto` at most one is delivered; an
            answer that is bound to a form ends with it, of a free one further calls are dropped.
        form: that the text of the answer is to have. JSON leaves room for calls: an answer is either calls or that,
            and where calls are forced the form is unused. Any other form is that of the whole answer.
        tokenizer: the model's (`Engine.tokenizer`), which knows the marks that are special tokens; None takes the marks
            to be special tokens that are it in the family of models that the format is named after.
    Raises:
        InvalidRequest: a wrong tool or choice, or a form of the whole answer where calls are forced.
        UnsupportedFeature: a tool that is no function; `auto` and a model whose format of calls is not known.
    """
    for field, name, known in (
        ("tool_parser", tool_parser, (*TOOL_FORMATS, NO_TOOLS)),
        ("reasoning_parser", reasoning_parser, tuple(REASONING_FORMATS)),
    ):
        if name is not None and name not in known:
            raise wrong(field, f"must be one of {', '.join(known)}", name)
    all_functions = parse_tools(tools)
    allowed, functions = _parse_allowed(tool_choice, all_functions)
    choice = _parse_choice(allowed, functions)
    marks = () if reasoning_parser is None else REASONING_FORMATS[reasoning_parser].marks
    if choice == "none":
        return ToolPlan(
            template_tools=None,
            structured_outputs=form,
            skip_special_tokens=not _are_special(marks, tokenizer),
            tool_parser=None,
            reasoning=reasoning_parser,
        )
    if choice == "auto" and functions and tool_parser in (None, NO_TOOLS):
        problem = (
            "its chat template has no place for tools" if tool_parser else "how it writes calls is not known"
        )
        raise UnsupportedFeature(
            "tool_choice must be none, required or a function's name: the model cannot choose, since "
            f"{problem} (tool_parser)",
            field="tool_choice",
            got=tool_choice,
        )
    is_auto = choice == "auto" and bool(functions)
    is_forced = choice != "auto"
    # This format has one form of answers with calls, forced or not.
    is_searched = is_auto or (is_forced and tool_parser == HARMONY)
    if is_searched and tool_parser is not None:
        marks += TOOL_FORMATS[tool_parser].MARKS
    # A form in JSON is that of the text, and an answer that is nothing but calls has none.
    if is_forced and form is not None and not leaves_room_for_calls(form):
        raise wrong(
            "tool_choice", "must be auto or none where a form of the whole answer is asked for", tool_choice
        )
    return ToolPlan(
        template_tools=None
        if tool_parser == NO_TOOLS
        else tuple(map(FunctionTool.for_template, functions)) or None,
        structured_outputs=_forced(choice, functions, tool_parser, parallel_tool_calls)
        if is_forced
        else _chosen(functions, tool_parser, parallel_tool_calls, form),
        skip_special_tokens=not _are_special(marks, tokenizer),
        tool_parser=tool_parser if is_searched else None,
        is_forced=is_forced,
        one_call=not parallel_tool_calls,
        is_either=is_auto and form is not None and leaves_room_for_calls(form),
        names=tuple(tool.name for tool in functions),
        barred=tuple(tool.name for tool in all_functions if tool not in functions),
        named=choice.name if isinstance(choice, FunctionTool) else None,
        reasoning=reasoning_parser,
    )


def _are_special(marks: Sequence[str], tokenizer: TokenizerInterface | None) -> bool:
    """Return True if one of the marks is a special token, so that it is text only where those are shown."""
    if tokenizer is None or not marks:
        return not SPECIAL_MARKS.isdisjoint(marks)
    encoded = tokenizer.tokenize(Tokenize(None, marks=tuple(marks))).marks_token_ids
    with_special, without = (
        [tokenizer.decode(ids, skip_special_tokens=skips) for ids in encoded] for skips in (False, True)
    )
    return with_special != without


def _forced(
    choice: str | FunctionTool,
    functions: Sequence[FunctionTool],
    tool_parser: str | None,
    may_be_several: bool,
) -> StructuredOutputsParams:
    """Return the constraint of an answer that must be a call."""
    called = [choice] if isinstance(choice, FunctionTool) else functions
    bound = [
        tool if tool.strict else attrs.evolve(tool, parameters=advisory(tool.parameters), strict=True)
        for tool in called
    ]
    if tool_parser == HARMONY:
        calls = bound_calls(bound, tool_parser, may_be_several)
        return StructuredOutputsParams(tool_calls={**calls, "required": True})
    if isinstance(choice, FunctionTool):
        return StructuredOutputsParams(json=object_schema(bound[0]))
    return StructuredOutputsParams(json=calls_schema(bound, may_be_several))


def _chosen(
    functions: Sequence[FunctionTool],
    tool_parser: str | None,
    may_be_several: bool,
    form: StructuredOutputsParams | None,
) -> StructuredOutputsParams | None:
    """Return the constraint of an answer that may contain calls, if it has one."""
    if not functions:
        return form
    calls = bound_calls(functions, tool_parser, may_be_several)
    if form is None:
        is_bound = any(function.strict for function in functions)
        return StructuredOutputsParams(tool_calls=calls) if is_bound else None
    if not leaves_room_for_calls(form):
        return form
    calls["form"] = schema_of(form)
    return attrs.evolve(form, json=None, json_object=None, tool_calls=calls)
