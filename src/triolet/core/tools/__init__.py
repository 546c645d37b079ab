"""Tool calls: how they are requested, and how an answer that contains them is parsed.

    plan = plan_tools(
        tools, tool_choice, tool_parser="hermes", reasoning_parser="qwen3", tokenizer=engine.tokenizer
    )
    prompt = {"messages": messages, "tools": plan.template_tools}
    params = SamplingParams(
        structured_outputs=plan.structured_outputs, skip_special_tokens=plan.skip_special_tokens
    )
    parser = plan.parser(output.prompt)
    for event in (*parser.feed(delta), *parser.finish()):
        ...  # TextPiece, ReasoningPiece, ToolCallBegin, ToolCallArguments, ToolCallEnd

Everything here is a pure function of the text; the protocol layer gives the calls their ids.
"""

from triolet.core.tools.answer import AnswerParser
from triolet.core.tools.choice import FunctionTool, ToolPlan, parse_tools, plan_tools
from triolet.core.tools.events import (
    AnswerEvent,
    ReasoningPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from triolet.core.tools.formats import TOOL_FORMATS
from triolet.core.tools.reasoning import REASONING_FORMATS

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "AnswerEvent",
    "AnswerParser",
    "FunctionTool",
    "ReasoningPiece",
    "TextPiece",
    "ToolCallArguments",
    "ToolCallBegin",
    "ToolCallEnd",
    "ToolPlan",
    "parse_tools",
    "plan_tools",
]
