"""Chats with tools: a question, a call that copies its arguments from it, a result, and an answer that copies the result."""

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import attrs
from chats.tool_function import Tool, Wish, known_tool, rendered
from chats.tool_invented import (
    NOUNS,
    VERBS,
    arrival_tool,
    invented_tool,
    natural_tool,
    placed_tool,
    property_tool,
)
from chats.tool_table import KNOWN, Known
from exchange import Chat, Skill
from skills import fact as facts
from skills import number, talk, text
from skills import story as stories
from tokens import THINK, THINK_END, Message, call_text, tools_text

# fmt: off
_SYSTEMS = ["You are a helpful assistant.", "You are a helpful assistant with tools.", "You can use tools.", "Use the tools if you need them.", "Answer the user's questions. Use the tools where they help.", "You are triolet-nano, a small and friendly model.",
            "Help the user.", "You are an assistant that calls functions.", "Call a tool when it helps.", "You are a helpful AI assistant.", "You are an agent.", "Use tools to answer.", "Be kind and helpful.", "You have access to functions.", "You are a home assistant.",
            "You are a weather bot.", "You answer questions with the help of tools.", "You are a helpful agent", "Be helpful.", "You are an assistant."]
_ERRORS = ["{x} not found", "not found", "timeout", "no connection", "service unavailable", "permission denied", "invalid input", "unknown {x}", "too many requests", "internal error", "the server is down", "access denied", "invalid {x}", "rate limit exceeded", "no data", "connection refused"]
# Functions of one group of which a question means one only.
_APART = [set(apart.split()) for apart in ["add subtract multiply divide square_root", "get_weather get_forecast", "roll_dice random_number flip_coin", "get_price check_stock", "read_file list_files"]]
# Functions that are taken for one another, by what they are about.
_KINDS = [[known for known in KNOWN if known.does in kind.split()] for kind in [
    "add subtract multiply divide square_root", "add subtract multiply divide", "add multiply calculate_area roll_dice", "sum_numbers multiply divide count_words", "calculator calculate_area random_number convert_units",
    "set_timer set_alarm play_music", "set_timer set_alarm create_event add_todo", "set_alarm play_music turn_on_light lock_door", "set_timer add_todo create_note send_message", "get_time get_date set_alarm set_timer",
    "get_weather get_time get_population", "get_weather get_forecast get_distance", "get_capital get_population get_time get_distance", "set_light set_temperature lock_door play_music",
    "send_email send_message create_note translate", "convert_currency convert_units get_stock_price", "get_price check_stock get_balance", "get_stock_price get_balance convert_currency", "search define_word find_recipe lookup_user", "search get_movie_rating get_stock_price",
    "order_pizza book_table find_recipe", "book_flight book_table create_event", "read_file list_files count_words", "roll_dice random_number flip_coin", "get_order_status track_package check_stock",
]]
_FIRST = ["I will look that up.", "Let me check.", "One moment.", "Let me look."]
# fmt: on


def _toolbox(rng: Random, first: Tool | None = None) -> list[Tool]:
    """Choose one to four tools that do different things; `first` is among them at a random place.

    Often they are tools that are easily taken for one another, so that the question has to be read to its end.
    """
    size = rng.choices([1, 2, 3, 4], [30, 34, 24, 12])[0]
    tools = [first] if first else []
    kind: Sequence[Known] = ()
    if rng.random() < 0.5:
        kind = _kind_of(rng, first)
    for _ in range(20):
        if len(tools) >= size:
            break
        made = known_tool(rng, rng.choice(kind)) if kind else _sibling(rng, first) or _any_tool(rng)
        if not any(_do_the_same(made, tool) for tool in tools):
            tools.append(made)
    rng.shuffle(tools)
    return tools


def _kind_of(rng: Random, first: Tool | None) -> Sequence[Known]:
    """Return known functions that are taken for `first`, or for one another; none if there are no such."""
    return rng.choice(
        [kind for kind in _KINDS if not first or first.does in {known.does for known in kind}] or [()]
    )


def _sibling(rng: Random, first: Tool | None) -> Tool | None:
    """Make up a tool with the verb or the noun of `first`, if that one is made up; None most times."""
    if first is None or not first.group.startswith("invented") or rng.random() >= 0.35:
        return None
    _, verb, noun = first.group.split(" ")
    if rng.random() < 0.5:
        return invented_tool(rng, verb=verb, noun=rng.choice(NOUNS))
    return invented_tool(rng, verb=rng.choice(VERBS), noun=noun)


def _do_the_same(one: Tool, other: Tool) -> bool:
    """Return True if one question may be meant for either."""
    if one.name == other.name or one.does == other.does:
        return True
    return one.group == other.group and not any({one.does, other.does} <= apart for apart in _APART)


def _any_tool(rng: Random) -> Tool:
    roll = rng.random()
    if roll < 0.16:
        return property_tool(rng)
    if roll < 0.21:
        return arrival_tool(rng)
    if roll < 0.26:
        return placed_tool(rng)
    if roll < 0.44:
        return natural_tool(rng)
    return invented_tool(rng) if roll < 0.56 else known_tool(rng, rng.choice(KNOWN))


def _system(rng: Random, tools: Sequence[Tool]) -> Message:
    told = tools_text([tool.function for tool in tools])
    if rng.random() < 0.5:
        told = f"{rng.choice(_SYSTEMS)}\n\n{told}"
    return Message(role="system", content=told)


def _called(rng: Random, wish: Wish) -> Message:
    content = "\n".join(call_text(name, arguments) for name, arguments in wish.calls)
    if rng.random() < 0.02:
        content = f"{rng.choice(_FIRST)}\n{content}"
    return Message(role="assistant", content=content)


def _done(rng: Random, wish: Wish) -> list[Message]:
    return [
        Message(role="user", content=wish.ask),
        _called(rng, wish),
        *(Message(role="tool", content=result) for result in wish.results),
        Message(role="assistant", content=wish.answer),
    ]


_CHAT: dict[Skill, float] = {talk.small_talk: 9, talk.identity: 5, talk.about_triolet: 1, talk.tell: 2, stories.story: 1.5, stories.joke: 1.5, number.count: 2, number.count_down: 1, text.spell: 2.5, text.repeat: 2.5,
                             text.upper_case: 0.7, text.backwards: 1, number.in_words: 0.7, facts.opposite: 1.5, facts.name_list: 1.5, text.rhyme: 0.5, facts.gibberish: 0.7, stories.poem: 0.4}  # fmt: skip
_KNOWING: dict[Skill, float] = {facts.thing_fact: 2, facts.animal_fact: 1, facts.fact: 1.5, facts.calendar: 1.5, number.add_up: 2, number.compare: 1}  # fmt: skip


def _talked(rng: Random, tools: Sequence[Tool]) -> list[Message]:
    """Write an exchange that needs none of the tools."""
    skills = dict(_CHAT)
    if not {tool.group for tool in tools} & {"math", "search", "capital", "dictionary", "date", "user"}:
        skills |= _KNOWING
        if all(tool.group.startswith("invented") for tool in tools):
            skills |= {facts.unknown: 3, number.too_big: 0.7}
    exchange = rng.choices(list(skills), list(skills.values()))[0](rng, Chat())
    return [
        Message(role="user", content=exchange.ask),
        Message(role="assistant", content=exchange.answer),
    ]


def _begun(rng: Random, tools: Sequence[Tool]) -> list[Message]:
    """Write the beginning of a chat: the system turn, sometimes an exchange without a call."""
    return [_system(rng, tools), *(_talked(rng, tools) if rng.random() < 0.08 else [])]


def _wish_for(rng: Random, kind: str) -> tuple[Tool, Wish]:
    while True:
        tool = _any_tool(rng)
        if wish := tool.wish(rng, kind):
            return tool, wish


def _again(rng: Random, tools: Sequence[Tool], last: Tool) -> list[Message]:
    """Write a second question: the same tool with other values, another tool, or none."""
    roll = rng.random()
    if roll < 0.15:
        return _talked(rng, tools)
    tool, kind = (last, "more") if roll < 0.6 else (rng.choice(tools), "one")
    wish = tool.wish(rng, kind)
    return _done(rng, wish) if wish else []


def call(rng: Random) -> list[Message]:
    """Write a chat with one call, its result and the answer, often with a second question."""
    tool, wish = _wish_for(rng, "one")
    tools = _toolbox(rng, tool)
    if len(tools) == 1 and tool.group.startswith("invented") and rng.random() < 0.3:
        # "call it for Ada": there is only one function that "it" can be
        wish = attrs.evolve(
            wish, ask=re.sub(rf"\b{tool.name}\b", rng.choice(["it", "the tool", "your tool"]), wish.ask)
        )
    messages = [*_begun(rng, tools), *_done(rng, wish)]
    if rng.random() < 0.08:
        return messages[: -1 - len(wish.results)]
    if rng.random() < 0.33:
        messages += _again(rng, tools, tool)
    return messages


def many_calls(rng: Random) -> list[Message]:
    """Write a chat with one question after the other, each of which wants a function and values chosen anew.

    A list of functions is long and its calls are short, so that most of a chat with one call is nothing to learn from.
    """
    tools = _toolbox(rng)
    while len(tools) < 2 and rng.random() < 0.8:
        tools = _toolbox(rng)
    messages = [_system(rng, tools)]
    is_answered = rng.random() < 0.3
    for _ in range(rng.randint(4, 9)):
        roll = rng.random()
        if roll < 0.06:
            messages += _talked(rng, tools)
        elif wish := rng.choice(tools).wish(rng, "pair" if roll < 0.14 else "one"):
            done = _done(rng, wish)
            messages += done if is_answered else done[:2]
    return messages


def two_calls(rng: Random) -> list[Message]:
    """Write a chat with two calls at once."""
    if rng.random() < 0.8:
        tool, wish = _wish_for(rng, "pair")
        tools = _toolbox(rng, tool)
    else:
        tool, first = _wish_for(rng, "one")
        tools = _toolbox(rng, tool)
        others = [each for each in tools if each is not tool]
        other = rng.choice(others or tools).wish(rng, "one")
        if other is None:
            return two_calls(rng)
        joined = rng.choice([" and ", ", and ", " and also ", ". And "])
        keeps_case = other.ask[:2].isupper() or other.ask.startswith("I ")
        second = other.ask if keeps_case else other.ask[:1].lower() + other.ask[1:]
        wish = Wish(
            first.ask.rstrip(".?!") + joined + second,
            first.calls + other.calls,
            first.results + other.results,
            f"{first.answer} {other.answer}",
        )
    messages = [*_begun(rng, tools), *_done(rng, wish)]
    if rng.random() < 0.08:
        return messages[:-3]
    if rng.random() < 0.2:
        messages += _again(rng, tools, tool)
    return messages


def no_call(rng: Random) -> list[Message]:
    """Write a chat in which tools are there but not needed, sometimes with a call later."""
    tools = _toolbox(rng)
    messages = [_system(rng, tools), *_talked(rng, tools)]
    roll = rng.random()
    if roll < 0.15:
        messages += _talked(rng, tools)
    elif roll < 0.3 and (wish := rng.choice(tools).wish(rng, "one")):
        messages += _done(rng, wish)
    return messages


def missing(rng: Random) -> list[Message]:
    """Write a question that lacks a value, which the answer asks for."""
    while True:
        tool = _any_tool(rng)
        if lacking := tool.missing(rng):
            break
    ask, back = lacking
    tools = _toolbox(rng, tool)
    return [
        _system(rng, tools),
        Message(role="user", content=ask),
        Message(role="assistant", content=back),
    ]


def error(rng: Random) -> list[Message]:
    """Write a call that fails, and an answer that says why."""
    tool, wish = _wish_for(rng, "one")
    tools = _toolbox(rng, tool)
    what = next(iter(wish.calls[0][1]), "value").replace("_", " ")
    problem = rng.choice(_ERRORS).format(x=what)
    result: Any = rng.choice([{"error": problem}, {"error": problem}, {"error": problem}, f"Error: {problem}", f"error: {problem}", {"status": "error", "message": problem}, {"error": {"message": problem}}])  # fmt: skip
    answer = rng.choice(["I am sorry, that did not work: {}.", "I am sorry, there was an error: {}."]).format(
        problem
    )
    messages = [
        *_begun(rng, tools),
        Message(role="user", content=wish.ask),
        _called(rng, wish),
        Message(role="tool", content=rendered(rng, result)),
        Message(role="assistant", content=answer),
    ]
    if rng.random() < 0.2:
        messages += _again(rng, tools, tool)
    return messages


def thinking(rng: Random) -> list[Message]:
    """Write a chat with tools in which the assistant thinks, as the template has asked for: before a call, or behind its result."""
    given = f"{THINK}\n"
    if rng.random() < 0.25:
        tools = _toolbox(rng)
        *begin, last = [_system(rng, tools), *_talked(rng, tools)]
        return [*begin, _thought(last, rng.choice(["No tool is needed.", "I need no tool for this."]), given)]
    tool, wish = _wish_for(rng, "one" if rng.random() < 0.85 else "pair")
    messages = [_system(rng, _toolbox(rng, tool)), *_done(rng, wish)]
    if rng.random() < 0.5:
        return [*messages[:-1], _thought(messages[-1], "I have the result, so I say it.", given)]
    twice = " twice" if len(wish.calls) > 1 else ""
    asked = messages[: -1 - len(wish.results)]
    return [*asked[:-1], _thought(asked[-1], f"I call {tool.name}{twice}.", given)]


def forced(rng: Random) -> list[Message]:
    """Write an answer that an engine binds to calls (`tool_choice`): the arguments alone, or a JSON list of calls.

    Only the form tells of it, so the beginning of the answer is given.
    """
    while True:
        tool, wish = _wish_for(rng, "one" if rng.random() < 0.8 else "pair")
        if wish.calls[0][1]:
            break
    if len(wish.calls) == 1 and rng.random() < 0.6:
        made: Any = wish.calls[0][1]
        given = '{"'
    else:
        made = [{"name": name, "parameters": arguments} for name, arguments in wish.calls]
        given = '[{"'
    return [
        _system(rng, _toolbox(rng, tool)),
        Message(role="user", content=wish.ask),
        Message(role="assistant", content=json.dumps(made, ensure_ascii=False), given=given),
    ]


def _thought(message: Message, thought: str, given: str) -> Message:
    content = f"{THINK}\n{thought}\n{THINK_END}\n\n{message.content}"
    return attrs.evolve(message, content=content, given=given)


CHATS: dict[Callable[[Random], list[Message]], float] = {
    call: 40, many_calls: 45, two_calls: 12, no_call: 16, missing: 3, error: 5, thinking: 5, forced: 4,
}  # fmt: skip
