"""How long a request with one very long value holds the event loop of a server, wherever in the request it is.

    python benchmarks/long_requests.py [--every N] [--start K] [--requests 2] [--first] [--only NAME ...] [--list]
                                       [--output FILE]

One `triolet serve` with triolet-nano on loopback answers a greedy chat again and again. Meanwhile one client sends
requests, one after the other, in which one value is as long as a body may be: a text of 4 MiB, a quarter of a million
numbers, thousands of objects, or as many short items of the kind that belongs there as a list may have. Each
combination of a place and a kind of value is a case. A refusal is as good as an answer: what counts is what the reading
of the request, and the words about it, cost others.

One JSON line per case: `status` of the last answer, `seconds` for all requests, and for each request what `loop` is in
benchmarks/attacks.py: the longest task step of the server by the wall clock (`longest_ms`), the same without the time
in which it waited for a processor (`longest_quiet_ms`), and its processor time (`longest_work_ms`). The last line
counts the cases over 10 ms by each of these clocks: in every one of their requests (`always_over_10`), and in any of
them (`ever_over_10`). With two processors the server, its model and the client wait for each other, and the wall clock
tells of all of them; with `--first` the server waits for none, as in benchmarks/attacks.py, and a request with a
step of over 10 ms while the machine itself was late (`host_late_ms` above 2 ms) is sent again, up to five times in all
(`not_quiet` has what the ones before saw).
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from attacks import (
    ATTACKER,
    ELSEWHERE,
    FIRST,
    HELLO,
    MAX_TRIES,
    MODEL,
    WITNESS,
    Client,
    Serving,
    frame,
    read_chat,
    serving,
    take_last_place,
)
from common import machine
from host_clock import QUIET_MS, HostClock, host_clock

from triolet.observability.loop_monitor import LONG_STEP_S

MAX_BYTES = 4 * 2**20  # of a body and of a message
MAX_TOKENS = 200_000  # numbers of a list
MAX_MEMBERS = 2040  # of a list, unless they are numbers, and of an object; a little below the limit
TIMEOUT_S = 60.0
SILENCE_S = 0.7  # after which a WebSocket that has answered is taken to have said all
CLOCKS = ("longest_ms", "longest_quiet_ms", "longest_work_ms")

# --------------------------------------------------------------------------------- values, and where they are


@attrs.frozen
class Part:
    """Place of the long value in a body.

    Args:
        share: of the value's items or characters that goes there.
        most: items or characters at most; None for no limit.
        copies: the place is a list of so many times the value; 0 for the value itself.
        as_json: the place has the JSON text of the value.
    """

    share: float = 1.0
    most: int | None = None
    copies: int = 0
    as_json: bool = False

    def fill(self, value: Any) -> Any:
        """Return what is at the place of a value."""
        num_items = int(len(value) * self.share)
        part = value[: num_items if self.most is None else min(num_items, self.most)]
        if self.as_json:
            part = json.dumps({"a": part}, ensure_ascii=False)
        return [part] * self.copies if self.copies else part


@attrs.frozen
class Many:
    """As many short items as are allowed.

    Args:
        item: one of them, or what makes one of its number.
        as_object: the items are pairs of an object.
    """

    item: Any
    as_object: bool = False

    def fill(self, _: Any) -> Any:
        """Return the list, or the object."""
        make = self.item if callable(self.item) else lambda _: self.item
        items = [make(number) for number in range(MAX_TOKENS if isinstance(make(0), int) else MAX_MEMBERS)]
        return dict(items) if self.as_object else items


ALL, HALF, THIRD = Part(), Part(0.5), Part(1 / 3)
BELOW_HALF_MIB = Part(most=2**19 - 300)  # of tools
BELOW_EIGHTH_MIB = Part(most=2**17 - 50)  # of a text that is tokenised as a whole
SHORT = Part(most=2000)
MANY_SHORT = Part(most=2000, copies=1900)
JSON_TEXT, SHORT_JSON_TEXT = Part(0.25, as_json=True), Part(most=2**17, as_json=True)


def filled(body: Any, value: Any) -> Any:
    """Return a body with the value in its places."""
    match body:
        case Part() | Many():
            return body.fill(value)
        case dict():
            return {filled(key, value): filled(item, value) for key, item in body.items()}
        case list():
            return [filled(item, value) for item in body]
    return body


def texts() -> dict[str, str]:
    """Return long texts whose bytes, tokens and JSON differ in length."""
    size = MAX_BYTES - 3000
    return {
        "letters": "x" * size,
        "emoji": "😀" * (size // 4),
        "quotes": '"' * (size // 2),
        "digits": "7" * size,
        "special tokens": "<|end|>" * (size // 7),
    }


def lists() -> dict[str, list[Any]]:
    """Return long lists, of numbers and of objects."""
    return {
        "small numbers": [1] * 250_000,
        "large numbers": [123456789] * 250_000,
        "floats": [1.2345678901234567] * 100_000,
        "lists": [[[item] for item in range(60)] for _ in range(1000)],
        "objects": [{f"k{item}": item for item in range(2000)} for _ in range(60)],
    }


RESPONSES, CHATS, COMPLETIONS, WEBSOCKET = (
    "/v1/responses",
    "/v1/chat/completions",
    "/v1/completions",
    "WebSocket",
)
ANSWER = {"model": MODEL, "input": "hi", "max_output_tokens": 1}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
COMPLETION = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
CREATE = {"type": "response.create", **ANSWER}


def form(schema: Any) -> dict[str, Any]:
    """Return a JSON schema as the form of a response."""
    return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}


def tool(**fields: Any) -> dict[str, Any]:
    """Return a response's function."""
    return {"type": "function", "name": "f", "parameters": {"type": "object"}, **fields}


def parameter(schema: Any) -> dict[str, Any]:
    """Return the parameters of a function with one of this schema."""
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}


def called(arguments: Any) -> list[Any]:
    """Return the messages of a chat in which a function was called."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]


def says(content: Any, role: Any = "user") -> list[Any]:
    """Return one message."""
    return [{"role": role, "content": content}]


def responses_of_texts() -> Iterator[tuple[str, str, Any]]:
    """Yield places of a text in the body of a response: name, path, body."""
    fields: dict[str, Any] = {
        "input": {"input": ALL},
        "instructions": {"instructions": ALL},
        "streamed instructions": {"instructions": ALL, "stream": True, "truncation": "auto"},
        "truncated input": {"input": [*says(ALL), *says("hi")], "truncation": "auto"},
        "many messages": {"input": [says(SHORT)[0]] * 1900},
        "many parts": {"input": says([{"type": "input_text", "text": SHORT}] * 1900)},
        "a part": {
            "input": says([{"type": "input_text", "text": HALF}, {"type": "input_text", "text": SHORT}])
        },
        "an answer": {"input": [*says([{"type": "output_text", "text": ALL}], "assistant"), *says("x")]},
        "an image": {"input": says([{"type": "input_image", "image_url": ALL}])},
        "reasoning": {
            "input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": ALL}]}, *says("x")]
        },
        "a reference": {"input": [{"type": "item_reference", "id": ALL}]},
        "a role": {"input": says("x", ALL)},
        "tools": {"tools": [tool(description=ALL)]},
        "tools of half a MiB": {"tools": [tool(description=BELOW_HALF_MIB)]},
        "unused tools": {"tools": [tool(description=BELOW_HALF_MIB)], "tool_choice": "none", "stream": True},
        "strict tools": {
            "tools": [tool(strict=True, parameters=parameter({"type": "string", "description": ALL}))]
        },
        "required tools": {
            "tools": [tool(parameters=parameter({"type": "string", "description": BELOW_HALF_MIB}))],
            "tool_choice": "required",
        },
        "streamed tools": {
            "tools": [tool(parameters=parameter({"type": "string", "description": ALL}))],
            "stream": True,
            "resumable": True,
        },
        "choices of tools": {"tools": [tool(parameters=parameter({"enum": MANY_SHORT}))]},
        "the name of a tool": {"tools": [tool(name=ALL)]},
        "tool_choice": {"tool_choice": ALL},
        "a form": form({"type": "object", "description": ALL}),
        "a json text": {"structured_outputs": {"json": JSON_TEXT}},
        "a grammar": {"structured_outputs": {"grammar": Part(most=2**20 - 1)}},
        "a regex": {"structured_outputs": {"regex": Part(most=2**20 - 1)}},
        "a structural tag": {
            "structured_outputs": {
                "structural_tag": {
                    "structures": [{"begin": "a", "end": "b", "schema": {"description": BELOW_HALF_MIB}}],
                    "triggers": ["a"],
                }
            }
        },
        "previous_response_id": {"previous_response_id": ALL},
        "model": {"model": ALL},
        "user": {"user": ALL},
        "prompt_cache_key": {"prompt_cache_key": ALL},
        "metadata": {"metadata": {"a": ALL}},
        "a key of metadata": {"metadata": {ALL: "a"}},
        "effort": {"reasoning": {"effort": ALL}},
        "include": {"include": [ALL]},
        "an unknown field": {"zzz": ALL},
        "an unknown key": {ALL: 1},
    }
    for name, body in fields.items():
        yield f"response: {name}", RESPONSES, {**ANSWER, **body}
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": "x"}
    for name, one, other in (
        ("output of a call", call, {**output, "output": ALL}),
        ("arguments of a call", {**call, "arguments": JSON_TEXT}, output),
        ("id of a call", {**call, "call_id": HALF}, {**output, "call_id": HALF}),
    ):
        yield f"response: {name}", RESPONSES, {**ANSWER, "input": [one, other]}
    yield "response: counted input", "/v1/responses/input_tokens", {"input": ALL}
    yield (
        "response: counted tools",
        "/v1/responses/input_tokens",
        {
            "input": "x",
            "tools": [tool(description=BELOW_HALF_MIB)],
        },
    )
    events: dict[str, Any] = {
        "create": {**CREATE, "input": ALL},
        "instructions": {**CREATE, "instructions": ALL},
        "tools": {**CREATE, "tools": [tool(description=BELOW_HALF_MIB)]},
        "lane": {**CREATE, "lane": ALL},
        "event_id": {**CREATE, "event_id": ALL},
        "previous_response_id": {**CREATE, "previous_response_id": ALL},
        "steer": {"type": "response.steer", "response_id": "a", "input": ALL},
        "resume": {"type": "response.resume", "response_id": ALL},
        "cancel": {"type": "response.cancel", "response_id": ALL},
        "type": {"type": ALL},
    }
    for name, event in events.items():
        yield f"event: {name}", WEBSOCKET, event


def others_of_texts() -> Iterator[tuple[str, str, Any]]:
    """Yield places of a text in the bodies of other routes."""
    function: dict[str, Any] = {"name": "f", "description": ALL}
    fields: dict[str, Any] = {
        "content": {"messages": says(ALL)},
        "system": {"messages": [*says(ALL, "system"), *says("x")]},
        "many parts": {"messages": says([{"type": "text", "text": SHORT}] * 1900)},
        "many messages": {"messages": [says(SHORT)[0]] * 1900},
        "an image": {"messages": says([{"type": "image_url", "image_url": {"url": ALL}}])},
        "name": {"messages": [{**says("hi")[0], "name": ALL}]},
        "reasoning": {"messages": [{**says("y", "assistant")[0], "reasoning_content": ALL}, *says("x")]},
        "arguments": {"messages": called(JSON_TEXT)},
        "six arguments": {"messages": [*called(SHORT_JSON_TEXT), *called(SHORT_JSON_TEXT)[1:] * 5]},
        "arguments that are no JSON": {"messages": called(ALL)},
        "stop": {"stop": [ALL]},
        "bad_words": {"bad_words": [ALL]},
        "chat_template": {"chat_template": ALL},
        "chat_template_kwargs": {"chat_template_kwargs": {"a": ALL}},
        "tools": {"tools": [{"type": "function", "function": function}]},
        "the name of a tool": {"tools": [{"type": "function", "function": {"name": ALL}}]},
        "regex": {"structured_outputs": {"regex": ALL}},
        "choice": {"structured_outputs": {"choice": MANY_SHORT}},
        "reasoning_effort": {"reasoning_effort": ALL},
        "request_id": {"request_id": ALL},
        "log-probabilities": {
            "messages": says(Part(most=500)),
            "logprobs": True,
            "top_logprobs": 5,
            "prompt_logprobs": 5,
        },
    }
    for name, body in fields.items():
        yield f"chat: {name}", CHATS, {**CHAT, **body}
    prompts: dict[str, Any] = {
        "prompt": {"prompt": ALL},
        "prompt with echo": {"prompt": ALL, "echo": True, "logprobs": 1},
        "short prompt with echo": {"prompt": BELOW_EIGHTH_MIB, "echo": True, "logprobs": 1},
        "truncated prompt": {"prompt": BELOW_EIGHTH_MIB, "truncate_prompt_tokens": 10},
        "many prompts": {"prompt": Part(most=30_000, copies=120)},
        "many stops": {"stop": MANY_SHORT},
        "suffix": {"suffix": ALL},
    }
    for name, body in prompts.items():
        yield f"completion: {name}", COMPLETIONS, {**COMPLETION, **body}
    yield "tokenize: prompt", "/tokenize", {"prompt": ALL}
    yield "tokenize: chat", "/tokenize", {"messages": says(ALL)}
    yield "tokenize: pieces", "/tokenize", {"prompt": Part(most=40_000), "return_token_strs": True}
    yield "embedding", "/v1/embeddings", {"model": MODEL, "input": ALL}
    yield "many embeddings", "/v1/embeddings", {"model": MODEL, "input": Part(most=2000, copies=500)}
    yield "rerank", "/v1/rerank", {"model": MODEL, "query": HALF, "documents": [SHORT]}
    yield "score", "/score", {"model": MODEL, "text_1": HALF, "text_2": [SHORT]}


def places_of_lists() -> Iterator[tuple[str, str, Any]]:
    """Yield places of a list, which is seldom right there."""
    choices = parameter({"enum": ALL})
    few_choices = parameter({"enum": THIRD})
    answers: dict[str, Any] = {
        "input": {"input": ALL},
        "content": {"input": says(ALL)},
        "tools": {"tools": [tool(parameters=choices)]},
        "fewer tools": {"tools": [tool(parameters=few_choices)]},
        "strict tools": {"tools": [tool(strict=True, parameters=few_choices)]},
        "required tools": {"tools": [tool(parameters=few_choices)], "tool_choice": "required"},
        "streamed tools": {"tools": [tool(parameters=choices)], "stream": True, "resumable": True},
        "form": form(choices),
        "json": {"structured_outputs": {"json": {"enum": THIRD}}},
        "tool_choice": {"tool_choice": {**tool(), "x": ALL}},
        "include": {"include": ALL},
        "metadata": {"metadata": {"a": ALL}},
        "logit_bias": {"logit_bias": {"1": ALL}},
        "stop_token_ids": {"stop_token_ids": ALL},
        "an unknown field": {"zzz": ALL},
    }
    for name, body in answers.items():
        yield f"response: {name}", RESPONSES, {**ANSWER, **body}
    function = {"type": "function", "function": {"name": "f", "parameters": choices}}
    chats: dict[str, Any] = {
        "content": {"messages": says(ALL)},
        "tools": {"tools": [function]},
        "chat_template_kwargs": {"chat_template_kwargs": {"a": ALL}},
        "documents": {"documents": ALL},
        "arguments": {"messages": called(JSON_TEXT)},
        "form": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": choices}}},
        "allowed_token_ids": {"allowed_token_ids": ALL},
        "bad_words": {"bad_words": ALL},
    }
    for name, body in chats.items():
        yield f"chat: {name}", CHATS, {**CHAT, **body}
    yield "completion: prompt", COMPLETIONS, {**COMPLETION, "prompt": ALL}
    yield "embedding", "/v1/embeddings", {"model": MODEL, "input": ALL}
    yield "detokenize", "/detokenize", {"tokens": ALL}
    yield "rerank", "/v1/rerank", {"model": MODEL, "query": "x", "documents": ALL}
    yield "event: tools", WEBSOCKET, {**CREATE, "tools": [tool(parameters=few_choices)]}
    yield "event: an unknown field", WEBSOCKET, {**CREATE, "zzz": THIRD}


def places_of_many() -> Iterator[tuple[str, str, Any]]:
    """Yield places of short items, as many as are allowed: name, path, body."""
    say = says("x")[0]
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": "x"}
    function = {"name": "f", "parameters": {}}
    part, pair = {"type": "input_text", "text": "x"}, lambda number: (f"k{number}", "x")
    objects = Many(lambda number: (f"k{number}", {"type": "string"}), as_object=True)
    inputs: dict[str, Any] = {
        "messages": Many(say),
        "messages and a reference": [{"type": "item_reference", "id": "a"}, Many(say)],
        "calls": Many(call),
        "calls with outputs": Many(lambda number: (call, output)[number % 2]),
        "outputs": [call, Many(output)],
        "reasoning": [say, Many({"type": "reasoning", "summary": []})],
        "references": Many({"type": "item_reference", "id": "a"}),
        "other references": Many(lambda number: {"type": "item_reference", "id": f"a{number}"}),
        "parts": says(Many(part)),
        "parts of an answer": says(Many({"type": "output_text", "text": "x"}), "assistant"),
        "empty texts": Many(""),
    }
    fields: dict[str, Any] = {
        **{name: {"input": flat(value)} for name, value in inputs.items()},
        "truncated messages": {"input": Many(say), "truncation": "auto"},
        "tools": {"tools": Many(lambda number: tool(name=f"f{number}", parameters={}))},
        "tools of one name": {"tools": Many(tool(parameters={}))},
        "strict tools": {
            "tools": Many(lambda number: tool(name=f"f{number}", strict=True, parameters=parameter({})))
        },
        "properties": {"tools": [tool(parameters={"type": "object", "properties": objects})]},
        "required": {"tools": [tool(parameters={"type": "object", "required": Many(lambda n: f"k{n}")})]},
        "properties of a form": form({"type": "object", "properties": objects}),
        "metadata": {"metadata": Many(pair, as_object=True)},
        "unknown fields": Many(pair, as_object=True),
        "logit_bias": {"logit_bias": Many(lambda number: (str(number % 2500), 1), as_object=True)},
        "include": {"include": Many("message.output_text.logprobs")},
        "stop": {"stop": Many("x")},
        "stops": {"stop": Many(lambda number: f"x{number}")},
        "choices": {"structured_outputs": {"choice": Many(lambda number: f"x{number}")}},
        "allowed tools": {
            "tools": [tool()],
            "tool_choice": {"type": "allowed_tools", "tools": Many({"type": "function", "name": "f"})},
        },
    }
    for name, body in fields.items():
        if isinstance(body, Many):
            body = {"zzz": 1, **body.fill(None)}
        yield f"response: many {name}", RESPONSES, {**ANSWER, **body}
    for name in ("messages", "calls", "calls with outputs", "parts"):
        yield f"event: many {name}", WEBSOCKET, {**CREATE, "input": flat(inputs[name])}
        yield f"counted input: many {name}", "/v1/responses/input_tokens", {"input": flat(inputs[name])}
    chats: dict[str, Any] = {
        "messages": {"messages": Many(say)},
        "parts": {"messages": says(Many({"type": "text", "text": "x"}))},
        "calls": {
            "messages": [
                say,
                {
                    "role": "assistant",
                    "tool_calls": Many(
                        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                    ),
                },
                {"role": "tool", "tool_call_id": "a", "content": "x"},
            ]
        },
        "tools": {
            "tools": Many(lambda number: {"type": "function", "function": {**function, "name": f"f{number}"}})
        },
        "stop": {"stop": Many("x")},
        "bad words": {"bad_words": Many(lambda number: f"x{number}")},
        "allowed tokens": {"allowed_token_ids": Many(lambda number: number % 2500)},
        "stop tokens": {"stop_token_ids": Many(lambda number: number % 2500)},
        "logit_bias": {"logit_bias": Many(lambda number: (str(number), 1), as_object=True)},
        "template arguments": {"chat_template_kwargs": Many(pair, as_object=True)},
        "documents": {"documents": Many({"text": "x"})},
    }
    for name, body in chats.items():
        yield f"chat: many {name}", CHATS, {**CHAT, **body}
    yield "completion: many prompts", COMPLETIONS, {**COMPLETION, "prompt": Many("x")}
    yield "completion: many prompts of tokens", COMPLETIONS, {**COMPLETION, "prompt": Many([1])}
    yield "completion: many tokens", COMPLETIONS, {**COMPLETION, "prompt": Many(1)}
    yield "embedding: many texts", "/v1/embeddings", {"model": MODEL, "input": Many("x")}
    yield "embedding: many tokens", "/v1/embeddings", {"model": MODEL, "input": Many([1])}
    yield "rerank: many texts", "/v1/rerank", {"model": MODEL, "query": "x", "documents": Many("x")}
    yield "score: many texts", "/score", {"model": MODEL, "text_1": "x", "text_2": Many("x")}
    yield "score: many pairs", "/score", {"model": MODEL, "text_1": Many("x"), "text_2": Many("x")}
    yield "tokenize: many messages", "/tokenize", {"model": MODEL, "messages": Many(say)}
    yield "detokenize: many tokens", "/detokenize", {"tokens": Many(1)}


def flat(value: Any) -> Any:
    """Return a list with a list's own items in place of it."""
    if not isinstance(value, list):
        return value
    return [item for one in value for item in (one.fill(None) if isinstance(one, Many) else [one])]


def cases() -> Iterator[tuple[str, str, Any, Any]]:
    """Yield all cases: name, path, body with places, value."""
    for kind, text in texts().items():
        for name, path, body in (*responses_of_texts(), *others_of_texts()):
            yield f"{name}: {kind}", path, body, text
    for kind, items in lists().items():
        for name, path, body in places_of_lists():
            yield f"{name}: {kind}", path, body, items
    for name, path, body in places_of_many():
        yield name, path, body, None


# ------------------------------------------------------------------------------------------- measurement


def send(client: Client, path: str, raw: bytes) -> str:
    """Send one request or event; return the status, or what came on the WebSocket."""
    if path != WEBSOCKET:
        return client.request("POST", path, raw, timeout_s=TIMEOUT_S)[9:12].decode("latin-1") or "no answer"
    received = b""
    with client.websocket() as stream, suppress(OSError):
        stream.settimeout(TIMEOUT_S)
        stream.sendall(frame(raw))
        while more := stream.recv(2**16):
            received += more
            stream.settimeout(SILENCE_S)
    return "error" if b'"error"' in received else "events" if received else "no answer"


def held_by(
    server: Serving, clock: HostClock | None, ask: Callable[[], str]
) -> tuple[str, list[dict[str, Any]]]:
    """Send a request, again while a step was long and the machine not quiet.

    Returns:
        The status, and what has held the loop each time; the last counts.
    """
    held = []
    while True:
        status = ask()
        time.sleep(0.1)
        loop = server.take_loop()
        if clock is not None:
            loop["host_late_ms"] = clock.take()
        held.append(loop)
        is_quiet = clock is None or loop["host_late_ms"] <= QUIET_MS
        if is_quiet or not loop["over_10_ms"] or len(held) == MAX_TRIES:
            return status, held


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the result of each case, then the counts."""
    results = []
    is_first = FIRST in os.environ
    with host_clock() if is_first else nullcontext() as clock, serving() as server:
        if is_first:
            take_last_place()
        client = Client(server.port, ATTACKER, ELSEWHERE)
        client.request("POST", RESPONSES, HELLO, timeout_s=TIMEOUT_S)
        is_over = threading.Event()
        reader = threading.Thread(target=read_chats, args=(Client(server.port, WITNESS), is_over))
        reader.start()
        try:
            for name, path, body, value in chosen(options):
                raw = json.dumps(filled(body, value), ensure_ascii=False).encode()
                if len(raw) > MAX_BYTES:
                    continue  # refused unread
                began_s, loops = time.monotonic(), []
                server.take_loop()
                if clock is not None:
                    clock.take()
                not_quiet: list[dict[str, Any]] = []
                for _ in range(options.requests):
                    status, held = held_by(server, clock, partial(send, client, path, raw))
                    not_quiet += [
                        {name: loop[name] for name in ("host_late_ms", "longest_ms")} for loop in held[:-1]
                    ]
                    loops.append(held[-1])
                seconds = round(time.monotonic() - began_s, 2)
                results.append(loops)
                yield {
                    "case": name,
                    "status": status,
                    "seconds": seconds,
                    "loops": loops,
                    "not_quiet": not_quiet,
                }
        finally:
            is_over.set()
            reader.join()
    yield {
        "cases": len(results),
        "server_first": is_first,
        **{clock: counts(results, clock) for clock in CLOCKS},
    }


def chosen(options: argparse.Namespace) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield the cases that were asked for."""
    for number, case in enumerate(cases()):
        is_named = not options.only or any(part in case[0] for part in options.only)
        if number % options.every == options.start and is_named:
            yield case


def read_chats(client: Client, is_over: threading.Event) -> None:
    """Read the greedy chat until told."""
    while not is_over.is_set():
        with suppress(ValueError, OSError):
            read_chat(client)


def counts(results: list[list[dict[str, Any]]], clock: str) -> dict[str, Any]:
    """Return how many cases are over the limit by a clock, and the longest step."""
    limit_ms = 1e3 * LONG_STEP_S
    return {
        "always_over_10": sum(min(loop[clock] for loop in loops) > limit_ms for loops in results),
        "ever_over_10": sum(max(loop[clock] for loop in loops) > limit_ms for loops in results),
        "longest_of_lower_readings": max(
            (min(loop[clock] for loop in loops) for loops in results), default=0.0
        ),
        "longest": max((max(loop[clock] for loop in loops) for loops in results), default=0.0),
    }


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="take every N-th case")
    parser.add_argument("--start", type=int, default=0, help="from this one on")
    parser.add_argument("--requests", type=int, default=2, help="of each case")
    parser.add_argument(
        "--first",
        action="store_true",
        help="let all other processes have a processor only while the server wants none",
    )
    parser.add_argument("--only", nargs="+", help="cases with one of these in their names")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    if options.list:
        print("\n".join(name for name, *_ in chosen(options)))
        return
    if options.first:
        os.environ[FIRST] = "1"
    for result in measure(options):
        line = json.dumps({"bench": "long_requests", **result, **(machine() if "cases" in result else {})})
        print(line, flush=True)
        if options.output is not None:
            with options.output.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
