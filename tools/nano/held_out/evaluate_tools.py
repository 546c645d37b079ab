"""Ask triolet-nano hand-written questions with tools and questions to think about, and print how many are right.

    python tools/nano/held_out/evaluate_tools.py [--model src/triolet/nano] [--strict] [--show]

The questions run greedily through an engine, with `tool_choice` "auto". A call is right when there are no others, its name is
right and so are all arguments; letter case does not count. The questions were not taken from the training text, but that text
is made at random, so a simple ask ("What is 12 plus 30?", "Hello!") can come up in it by chance, word for word. Of the functions
that the training text does not have, a few are close in kind to some that it has: a property to look up, a value to set.

With `--strict` the functions are `strict`, as the Agents SDK and other clients of the Responses API have them: the engine binds a call to
the names and the schemas of the functions.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import attrs
import trio

import triolet
from triolet.core.tools import ReasoningPiece, TextPiece, ToolCallEnd, plan_tools

FOLDER = Path(__file__).parents[3] / "src" / "triolet" / "nano"
Calls = list[tuple[str, dict[str, Any]]]


def tool(name: str, description: str, *parameters: str) -> dict[str, Any]:
    """Write a function as OpenAI's APIs take it.

    Args:
        parameters: each `name: type`, with `?` behind the name if it may be left out; an enum is written `one|two`.
    """
    properties: dict[str, dict[str, Any]] = {}
    required = []
    for parameter in parameters:
        key, kind = parameter.split(": ")
        is_enum = "|" in kind
        properties[key.rstrip("?")] = (
            {"type": "string", "enum": kind.split("|")} if is_enum else {"type": kind}
        )
        if not key.endswith("?"):
            required.append(key)
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


WEATHER = tool(
    "get_weather", "Get the current weather for a city.", "city: string", "unit?: celsius|fahrenheit"
)
CURRENT = tool("get_current_weather", "Get the current weather in a given location", "location: string")
ADD = tool("add", "Add two numbers.", "a: integer", "b: integer")
MULTIPLY = tool("multiply", "Multiply two integers together.", "first_int: integer", "second_int: integer")
CALCULATOR = tool("calculator", "Evaluates a mathematical expression.", "expression: string")
TIME = tool("get_time", "Tells the current time in a city.", "city: string")
SEARCH = tool("web_search", "Search the web for pages.", "query: string")
MAIL = tool("send_email", "Send an email.", "to: string", "subject: string", "body: string")
MONEY = tool("convert_currency", "Convert an amount of money.", "amount: number", "from_currency: string", "to_currency: string")  # fmt: skip
STOCK = tool("get_stock_price", "Look up the price of a stock.", "symbol: string")
TIMER = tool("set_timer", "Start a kitchen timer.", "minutes: integer")
ALARM = tool("set_alarm", "Set an alarm clock.", "time: string")
SONG = tool("play_music", "Play a song.", "song: string")
TRANSLATE = tool("translate", "Translate text to a language.", "text: string", "language: string")
USER = tool("get_user", "Fetch a user's record.", "name: string")
EVENT = tool("create_event", "Create a calendar event.", "title: string", "date: string")
DICE = tool("roll_dice", "Roll a die.", "sides: integer")
CAPITAL = tool("get_capital", "Returns the capital of a country.", "country: string")
LIGHT = tool("turn_on_light", "Turn on the light in a room.", "room: string")
AREA = tool("calculate_area", "Compute the area of a rectangle.", "width: number", "height: number")
PIZZA = tool("order_pizza", "Order a pizza.", "size: small|medium|large", "topping: string")
ORDER = tool("get_order_status", "Get the status of an order.", "order_id: string")
FLIGHT = tool("book_flight", "Book a flight.", "origin: string", "destination: string", "date: string")
# functions that the training text does not have
VOLUME = tool("set_volume", "Set the loudness of the speaker.", "level: integer")
PING = tool("ping_host", "Check whether a host answers.", "host: string")
BUS = tool("next_bus", "When the next bus leaves a stop.", "stop: string", "line?: integer")
HOROSCOPE = tool("get_horoscope", "Today's horoscope for a sign.", "sign: string")
PLANTS = tool(
    "water_plants", "Water the plants in a bed for some seconds.", "bed: string", "seconds: integer"
)
TAXI = tool("call_taxi", "Call a taxi to an address.", "address: string")
RESIZE = tool(
    "resize_image", "Change the size of an image.", "path: string", "width: integer", "height: integer"
)
GRADE = tool("submit_grade", "Enter a grade for a student.", "student: string", "grade: A|B|C|D")
HASH = tool("hash_text", "Hash a text.", "text: string", "algorithm: md5|sha1|sha256")
MOVE = tool("moveRobot", "Moves the robot.", "direction: left|right|forward|back", "steps: integer")
COFFEE = tool("brew_coffee", "Make coffee.", "kind: espresso|latte|mocha", "cups?: integer")
SECRET = tool("get_secret_number", "Returns the secret number of a person.", "person: string")
BLORP = tool("blorp", "Blorps a thing.", "thing: string")
BATTERY = tool("battery_level", "How full the battery of a device is.", "device: string")
FEEDING = tool("feed_animal", "Feed an animal with some food.", "animal: string", "food: string")
VOTES = tool("count_votes", "Count the votes for a candidate.", "candidate: string")
RENAME = tool("rename_file", "Rename a file.", "old: string", "new: string")


@attrs.frozen
class Case:
    """A question with tools, the calls that it needs, and where a result is given, the pattern of the answer."""

    tools: list[dict[str, Any]]
    ask: str
    calls: Calls
    results: tuple[str, ...] = ()
    pattern: str = ""
    system: str = ""


# fmt: off
CASES = [
    Case([WEATHER], "What's the weather like in Paris today?", [("get_weather", {"city": "Paris"})], ('{"temperature": 18, "condition": "cloudy"}',), r"18.*cloudy.*Paris|Paris.*cloudy.*18"),
    Case([WEATHER], "what is the weather in Tokyo in celsius?", [("get_weather", {"city": "Tokyo", "unit": "celsius"})]),
    Case([ADD, WEATHER], "Is it cold in Reykjavik right now?", [("get_weather", {"city": "Reykjavik"})]),
    Case([CURRENT], "What is the weather like in Boston?", [("get_current_weather", {"location": "Boston"})], ("The weather in Boston is sunny.",), r"Boston.*sunny"),
    Case([CURRENT, TIME], "Weather in San Francisco please", [("get_current_weather", {"location": "San Francisco"})]),
    Case([WEATHER], "What is the weather in Berlin and Madrid?", [("get_weather", {"city": "Berlin"}), ("get_weather", {"city": "Madrid"})]),
    Case([ADD], "What is 12 plus 30?", [("add", {"a": 12, "b": 30})], ("42",), r"\b42\b"),
    Case([ADD], "please add 4711 and 815", [("add", {"a": 4711, "b": 815})], ('{"result": 5526}',), r"\b5526\b"),
    Case([MULTIPLY, ADD], "What is 23 times 47?", [("multiply", {"first_int": 23, "second_int": 47})], ("1081",), r"\b1081\b"),
    Case([ADD, MULTIPLY], "Add 3 and 4, and also 10 and 20.", [("add", {"a": 3, "b": 4}), ("add", {"a": 10, "b": 20})]),
    Case([CALCULATOR], "Calculate (17 + 4) * 3", [("calculator", {"expression": "(17 + 4) * 3"})]),
    Case([SEARCH, CALCULATOR], "How much is 128 * 64?", [("calculator", {"expression": "128 * 64"})]),
    Case([TIME, WEATHER, ADD], "What time is it in Sydney?", [("get_time", {"city": "Sydney"})], ('{"time": "21:47"}',), r"21:47"),
    Case([SEARCH], "Search the web for trio cancel scopes", [("web_search", {"query": "trio cancel scopes"})]),
    Case([BATTERY, SEARCH], "what is the battery level of my phone?", [("battery_level", {"device": "phone"})]),
    Case([MAIL], "Send an email to kim@example.com with the subject \"Lunch\" and the body \"See you at noon\".", [("send_email", {"to": "kim@example.com", "subject": "Lunch", "body": "See you at noon"})]),
    Case([MONEY, STOCK], "Convert 75 USD to EUR.", [("convert_currency", {"amount": 75, "from_currency": "USD", "to_currency": "EUR"})]),
    Case([STOCK], "What's the stock price of MSFT?", [("get_stock_price", {"symbol": "MSFT"})], ('{"symbol": "MSFT", "price": 417.32}',), r"417\.32"),
    Case([TIMER, ALARM, SONG], "Set a timer for 7 minutes", [("set_timer", {"minutes": 7})]),
    Case([TIMER, ALARM, SONG], "Wake me up at 06:30.", [("set_alarm", {"time": "06:30"})]),
    Case([TIMER, ALARM, SONG], "Play Space Oddity", [("play_music", {"song": "Space Oddity"})]),
    Case([TRANSLATE], "Translate \"good morning\" into Spanish", [("translate", {"text": "good morning", "language": "Spanish"})]),
    Case([USER, MAIL], "look up the user Grace Hopper", [("get_user", {"name": "Grace Hopper"})]),
    Case([FEEDING, EVENT], "Feed the goat with some hay", [("feed_animal", {"animal": "goat", "food": "hay"})]),
    Case([DICE], "Roll a 20 sided die!", [("roll_dice", {"sides": 20})], ('{"result": 17}',), r"\b17\b"),
    Case([CAPITAL, TIME], "What is the capital of Mongolia?", [("get_capital", {"country": "Mongolia"})], ("Ulaanbaatar",), r"Ulaanbaatar"),
    Case([LIGHT], "Turn on the light in the kitchen, please.", [("turn_on_light", {"room": "kitchen"})]),
    Case([RENAME, AREA], "Rename the file draft.txt to final.txt", [("rename_file", {"old": "draft.txt", "new": "final.txt"})]),
    Case([PIZZA], "I'd like a large pizza with mushrooms", [("order_pizza", {"size": "large", "topping": "mushrooms"})]),
    Case([ORDER, USER, SEARCH], "Where is my order 88213?", [("get_order_status", {"order_id": "88213"})]),
    Case([VOLUME, SONG], "Set the volume to 40.", [("set_volume", {"level": 40})]),
    Case([PING], "ping the host db.example.com", [("ping_host", {"host": "db.example.com"})]),
    Case([BUS], "When does the next bus leave Market Street?", [("next_bus", {"stop": "Market Street"})]),
    Case([HOROSCOPE, WEATHER], "What is the horoscope for Leo?", [("get_horoscope", {"sign": "Leo"})]),
    Case([PLANTS], "Water the plants in the rose bed for 30 seconds.", [("water_plants", {"bed": "rose", "seconds": 30})]),
    Case([TAXI, TIME], "call a taxi to 12 Baker Street", [("call_taxi", {"address": "12 Baker Street"})]),
    Case([RESIZE], "resize cat.png to width 320 and height 200", [("resize_image", {"path": "cat.png", "width": 320, "height": 200})]),
    Case([GRADE], "Give the student Mila the grade B.", [("submit_grade", {"student": "Mila", "grade": "B"})]),
    Case([HASH], "hash the text \"hello\" with sha256", [("hash_text", {"text": "hello", "algorithm": "sha256"})]),
    Case([MOVE], "Move the robot forward 3 steps", [("moveRobot", {"direction": "forward", "steps": 3})]),
    Case([COFFEE, TIMER], "brew a latte", [("brew_coffee", {"kind": "latte"})]),
    Case([SECRET], "What is the secret number of Ada?", [("get_secret_number", {"person": "Ada"})], ('{"secret": 7391}',), r"\b7391\b"),
    Case([BLORP], "blorp the lamp", [("blorp", {"thing": "lamp"})]),
    Case([FEEDING, VOTES, RENAME, BATTERY], "Count the votes for Lopez", [("count_votes", {"candidate": "Lopez"})]),
    Case([WEATHER], "Hello!", []),
    Case([ADD, SEARCH], "Who are you?", []),
    Case([WEATHER, TIMER], "Tell me a story about a fox.", []),
    Case([STOCK], "count from 1 to 10", []),
    Case([MAIL, USER], "Thank you very much!", []),
    Case([BLORP, PING], "How do you spell garden?", []),
]
THOUGHTS = [
    ("What is 347 + 285?", r"\b632\b"), ("What is 58 plus 67?", r"\b125\b"), ("999 + 1", r"\b1000\b"), ("How much is 405 + 96?", r"\b501\b"), ("add 712 and 219", r"\b931\b"),
    ("What is 500 - 123?", r"\b377\b"), ("83 minus 47", r"\b36\b"), ("take 19 from 401", r"\b382\b"), ("What is 642 minus 641?", r"is 1\b"), ("What is 7 times 8?", r"\b56\b"),
    ("12 * 12", r"\b144\b"), ("What is 9 x 6?", r"\b54\b"), ("How many letters are in elephant?", r"\b8 letters"), ("How many letters are in the word concurrency?", r"\b11 letters"),
    ("how many letters does Wednesday have", r"\b9 letters"), ("How many r are in strawberry?", r"\b3 times"), ("How many s are in mississippi?", r"\b4 times"), ("how many times does e come in cheese", r"\b3 times"),
    ("How many a's are in banana?", r"\b3 times"), ("Spell lantern backwards.", r"n-r-e-t-n-a-l"), ("reverse the word triolet", r"t-e-l-o-i-r-t"), ("Which is bigger, 8123 or 8132?", r"^8132 is bigger"),
    ("What is smaller, 99 or 101?", r"^99 is smaller"), ("Is 7413 even or odd?", r"\bodd\b"), ("Is 96 even or odd?", r"\beven\b"), ("What day is three days after Monday?", r"Thursday\.$"),
    ("What day is five days after Friday?", r"Wednesday\.$"), ("Ada has 24 stamps and buys 19 more. How many stamps does Ada have?", r"\b43 stamps"), ("Max has 6 boxes with 7 pencils in each. How many pencils are there?", r"\b42 pencils"),
    ("Lena had 50 marbles and lost 18. How many marbles are left?", r"\b32 marbles"),
]
# fmt: on


@attrs.frozen
class Said:
    """What the model said: its thought, its text, its calls."""

    thought: str
    text: str
    calls: list[tuple[str, str]]
    has_stopped: bool


async def said(
    engine: triolet.Engine,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    thinks: bool = False,
) -> Said:
    """Return the next answer of a chat."""
    plan = plan_tools(
        tools or None,
        "auto" if tools else None,
        tool_parser=engine.tool_parser,
        reasoning_parser=engine.reasoning_parser,
        tokenizer=engine.tokenizer,
    )
    prompt: dict[str, Any] = {"messages": messages}
    if tools:
        prompt["tools"] = plan.template_tools
    if thinks:
        prompt["chat_template_kwargs"] = {"enable_thinking": True}
    params = triolet.SamplingParams(
        temperature=0.0,
        max_tokens=400,
        skip_special_tokens=plan.skip_special_tokens,
        structured_outputs=plan.structured_outputs,
    )
    output = await engine.complete(prompt, params)
    parser = plan.parser(output.prompt)
    events = [*parser.feed(output.text), *parser.finish()]
    return Said(
        thought="".join(event.text for event in events if isinstance(event, ReasoningPiece)).strip(),
        text="".join(event.text for event in events if isinstance(event, TextPiece)).strip(),
        calls=[(event.name, event.arguments) for event in events if isinstance(event, ToolCallEnd)],
        has_stopped=output.finish_reason == "stop",
    )


def _folded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _folded(each) for key, each in value.items()}
    return value.casefold() if isinstance(value, str) else value


def is_right(calls: list[tuple[str, str]], expected: Calls) -> bool:
    """Return True if the calls are those expected; letter case of texts does not count."""
    try:
        made = [(name, _folded(json.loads(arguments))) for name, arguments in calls]
    except ValueError:
        return False
    return made == [(name, _folded(arguments)) for name, arguments in expected]


def _with_calls(case: Case) -> list[dict[str, Any]]:
    calls = [
        {
            "id": f"call_{at}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for at, (name, arguments) in enumerate(case.calls)
    ]
    results = [
        {"role": "tool", "tool_call_id": f"call_{at}", "content": result}
        for at, result in enumerate(case.results)
    ]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


def _strict(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "function": {**function["function"], "strict": True}}


async def evaluate(model: str, strict: bool, show: bool) -> None:
    """Ask all questions and print the shares."""
    num_calls = num_answers = num_thoughts = num_thinking = 0
    with_result = [case for case in CASES if case.results]
    async with triolet.open_engine(model=model) as engine:
        for case in CASES:
            messages = [{"role": "system", "content": case.system}] if case.system else []
            messages.append({"role": "user", "content": case.ask})
            tools = [_strict(function) for function in case.tools] if strict else case.tools
            answer = await said(engine, messages, tools)
            right = is_right(answer.calls, case.calls) and bool(answer.calls or answer.text)
            num_calls += right
            if show and not right:
                print(f"  call: {case.ask!r} -> {answer.calls or answer.text!r}, not {case.calls}")
            if case.results:
                answer = await said(engine, messages + _with_calls(case), tools)
                right = re.search(case.pattern, answer.text) is not None and not answer.calls
                num_answers += right
                if show and not right:
                    print(f"  answer: {case.ask!r}, {case.results} -> {answer.text!r} {answer.calls or ''}")
        for ask, pattern in THOUGHTS:
            answer = await said(engine, [{"role": "user", "content": ask}], [], thinks=True)
            right = re.search(pattern, answer.text) is not None and answer.has_stopped
            num_thoughts += right
            num_thinking += bool(answer.thought)
            if show and not right:
                print(f"  thought: {ask!r} -> {answer.thought!r}, {answer.text!r}, not {pattern}")
    print(f"calls right      {num_calls:3} of {len(CASES)}")
    print(f"answers right    {num_answers:3} of {len(with_result)}")
    print(f"thoughts right   {num_thoughts:3} of {len(THOUGHTS)}, {num_thinking} with a thought")


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate triolet-nano's calls of tools and its thinking.")
    parser.add_argument("--model", default=str(FOLDER), help="folder of the model")
    parser.add_argument("--strict", action="store_true", help="bind calls to the functions' schemas")
    parser.add_argument("--show", action="store_true", help="show the wrong answers")
    options = parser.parse_args()
    trio.run(evaluate, options.model, options.strict, options.show)


if __name__ == "__main__":
    main()
