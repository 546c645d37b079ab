"""Let the model call a function: read the call while it is written, then run the function.

The call is forced (`tool_choice`), so that there is one even where the model knows the answer; `--auto` lets it decide.
The chat template shows it the function. triolet-nano is small: every second of its calls is wrong.

python examples/tools.py [--model PATH_OR_HUB_ID] [--auto] [QUESTION]
"""

import argparse
import json

import attrs
import trio

import triolet
from triolet.core.tools import TextPiece, ToolCallArguments, ToolCallBegin, ToolCallEnd, plan_tools

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 100},
                "b": {"type": "integer", "minimum": 0, "maximum": 100},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def add(a: int, b: int) -> int:
    return a + b


async def main(model: str | None, question: str, is_auto: bool) -> None:
    async with triolet.open_engine(model=model) as engine:
        plan = plan_tools(
            [ADD],
            "auto" if is_auto else {"type": "function", "function": {"name": "add"}},
            tool_parser=engine.tool_parser,
            reasoning_parser=engine.reasoning_parser,
            tokenizer=engine.tokenizer,
        )
        prompt = {"messages": [{"role": "user", "content": question}], "tools": plan.template_tools}
        params = attrs.evolve(
            engine.default_sampling_params(),
            structured_outputs=plan.structured_outputs,
            skip_special_tokens=plan.skip_special_tokens,
            max_tokens=200,
            output_kind=triolet.RequestOutputKind.DELTA,
        )
        async with engine.generate(prompt, params) as stream:
            parser = None
            async for output in stream:
                parser = parser or plan.parser(output.prompt)
                for event in (*parser.feed(output.text), *(parser.finish() if output.finished else ())):
                    match event:
                        case TextPiece(text=text) | ToolCallArguments(text=text):
                            print(text, end="", flush=True)
                        case ToolCallBegin(name=name):
                            print(f"calls {name} with ", end="")
                        case ToolCallEnd(arguments=arguments, is_valid=True):
                            print(f"\nwhich gives {add(**json.loads(arguments))}")


if __name__ == "__main__":
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    command.add_argument("question", nargs="?", default="What is 12 plus 30?")
    command.add_argument("--model", help="folder or hub id; by default triolet-nano")
    command.add_argument("--auto", action="store_true", help="let the model decide whether to call")
    given = command.parse_args()
    trio.run(main, given.model, given.question, given.auto)
