"""The official openai client over HTTP, sync and async: it did not come from here, and it is satisfied."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.server import Server, serve

openai = pytest.importorskip("openai")

MODEL = "triolet-nano"
HELLO: Any = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--api-keys", "test-key", "--max-logprobs", "50") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="test-key", max_retries=0) as client:
        yield client


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == (MODEL, 2048)
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"


def test_a_chat_whole_and_streamed(client: Any) -> None:
    wish = {"model": MODEL, "messages": HELLO, "temperature": 0}
    whole = client.chat.completions.create(**wish, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content.startswith("H")
    assert "".join(one.token for one in choice.logprobs.content).startswith(choice.message.content)
    assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    chunks = list(client.chat.completions.create(**wish, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens + whole.usage.completion_tokens == whole.usage.total_tokens


def test_vendor_events_leave_every_stream_of_the_sdk_whole(client: Any) -> None:
    chat = {"model": MODEL, "messages": HELLO, "temperature": 0}
    told: dict[str, Any] = {"extra_body": {"triolet_events": True}}
    text = client.chat.completions.create(**chat).choices[0].message.content

    chunks = list(client.chat.completions.create(**chat, **told, stream=True))
    # How many there are is for chance to decide: an answer that begins at once waits for nothing.
    assert all(chunk.model_extra["triolet"]["type"] for chunk in chunks if not chunk.choices)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    with client.chat.completions.stream(**chat, **told) as stream:
        assert stream.get_final_completion().choices[0].message.content == text

    response = {"model": MODEL, "input": "Hello!", "temperature": 0}
    events = list(client.responses.create(**response, **told, stream=True))
    assert events[-1].response.output_text == text
    with client.responses.stream(**response, **told) as stream:
        assert "".join(one.delta for one in stream if one.type == "response.output_text.delta") == text
        assert stream.get_final_response().output_text == text

    quiet = list(client.responses.create(**response, stream=True))
    assert not [event for event in quiet if event.type.startswith("triolet:")]


def test_the_helper_for_streams_is_satisfied(client: Any) -> None:
    with client.chat.completions.stream(model=MODEL, messages=HELLO, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_is_scored_as_evaluations_by_log_likelihood_ask_for_it(client: Any, max_tokens: int) -> None:
    prompts = [[72, 101, 108, 108, 111], [104, 105]]  # lm-eval sends token ids, several prompts at once
    answer = client.completions.create(
        model=MODEL, prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1234
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        logprobs = choice.logprobs
        num_tokens = len(prompt) + max_tokens
        assert {len(column) for column in vars(logprobs).values()} == {num_tokens}
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        for value, top in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True):
            assert value <= max(top.values()) <= 0
        if max_tokens:  # the greedy answer is the most likely token
            assert logprobs.token_logprobs[-1] == max(logprobs.top_logprobs[-1].values())
        assert choice.finish_reason in ("length", "stop") if max_tokens else choice.finish_reason == "length"
    assert answer.usage.completion_tokens == max_tokens * len(prompts)


def test_an_echoed_prompt_is_scored_in_a_stream_too(client: Any) -> None:
    wish = {"model": MODEL, "prompt": "Hello there", "echo": True, "logprobs": 2, "temperature": 0}
    whole = client.completions.create(**wish, max_tokens=3)
    chunks = list(client.completions.create(**wish, max_tokens=3, stream=True))
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [one for chunk in chunks for one in getattr(chunk.choices[0].logprobs, name)]
        assert streamed == getattr(whole.choices[0].logprobs, name)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_as_many_likely_tokens_as_the_engine_allows_are_told_and_more_are_refused_with_its_limit(
    client: Any,
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "logprobs": True, "max_tokens": 1}
    [choice] = client.chat.completions.create(**asked, top_logprobs=50).choices
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [50]
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**asked, top_logprobs=51)
    assert error.value.param == "top_logprobs"
    assert "max allowed: 50 (max_logprobs)" in error.value.message


def test_a_prompt_that_is_too_long_is_refused_in_words_that_clients_look_for(client: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: client.completions.create(model=MODEL, prompt=[5] * 3000),
        lambda: client.chat.completions.create(
            model=MODEL, messages=[{**HELLO[0], "content": "a b " * 3000}]
        ),
        lambda: client.responses.create(model=MODEL, input="a b " * 3000),
    ]
    for call in calls:
        with pytest.raises(openai.BadRequestError) as error:
            call()
        assert error.value.code == "context_length_exceeded"
        assert "This model's maximum context length is 2048 tokens. However, " in error.value.message


def test_several_answers_and_a_stop(client: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "count from 1 to 9"}], n=2, seed=1, stop=["5"]
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert not any("5" in choice.message.content for choice in answer.choices)


def test_a_form_that_is_asked_for_is_kept(client: Any) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}},
        },
    )
    assert json.loads(answer.choices[0].message.content)["ok"] in (True, False)


def test_the_model_calls_a_tool_and_uses_its_result(client: Any) -> None:
    schema = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
    tool: Any = {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the current weather in a given location",
            "parameters": {**schema, "additionalProperties": False},
        },
    }
    wish = {"model": MODEL, "tools": [tool], "temperature": 0, "max_tokens": 100}
    messages: list[Any] = [{"role": "user", "content": "What is the weather like in Boston?"}]
    choice = client.chat.completions.create(messages=messages, **wish).choices[0]
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "get_current_weather")
    assert json.loads(call.function.arguments) == {"location": "Boston"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "The weather in Boston is sunny."}
    answer = client.chat.completions.create(messages=[*messages, choice.message, result], **wish).choices[0]
    assert answer.finish_reason == "stop" and "sunny" in answer.message.content


def test_a_call_can_be_forced(client: Any) -> None:
    side = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
    tool: Any = {
        "type": "function",
        "function": {"name": "turn", "parameters": {**side, "additionalProperties": False}},
    }
    for choice in ("required", {"type": "function", "function": {"name": "turn"}}):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            tools=[tool],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=100,
        )
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "turn"
        assert json.loads(call.function.arguments)["side"] in ("left", "right")


def test_completions_whole_and_streamed(client: Any) -> None:
    wish = {"model": MODEL, "prompt": "Once upon", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**wish, logprobs=1)
    assert (whole.object, whole.choices[0].finish_reason) == ("text_completion", "length")
    assert len(whole.choices[0].logprobs.tokens) == 8
    chunks = list(client.completions.create(**wish, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_ids_of_tokens_come_with_an_answer_and_in_place_of_texts(client: Any) -> None:
    ids = {"extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True}}
    chat: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 5, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**chat, top_logprobs=1, **ids)
    [choice] = whole.choices
    assert [one.token for one in choice.logprobs.content] == [f"token_id:{one}" for one in choice.token_ids]
    assert b"".join(bytes(one.bytes) for one in choice.logprobs.content).decode() == choice.message.content
    # Greedy: the chosen token is the most likely one.
    assert [one.top_logprobs[0].token for one in choice.logprobs.content] == [
        one.token for one in choice.logprobs.content
    ]
    chunks = list(client.chat.completions.create(**chat, stream=True, **ids))
    streamed = [one for chunk in chunks for one in getattr(chunk.choices[0], "token_ids", ())]
    assert streamed == choice.token_ids and chunks[0].prompt_token_ids == whole.prompt_token_ids
    tokenized = client.post("/../tokenize", body={"messages": HELLO}, cast_to=object)
    assert tokenized["tokens"] == whole.prompt_token_ids

    text: Any = {"model": MODEL, "prompt": whole.prompt_token_ids, "max_tokens": 5, "temperature": 0}
    [again] = client.completions.create(**text, logprobs=1, **ids).choices
    assert (again.prompt_token_ids, again.token_ids) == (whole.prompt_token_ids, choice.token_ids)
    assert again.logprobs.tokens == [f"token_id:{one}" for one in choice.token_ids]
    assert [list(top) for top in again.logprobs.top_logprobs] == [[one] for one in again.logprobs.tokens]


def test_responses_whole_streamed_remembered_and_forgotten(client: Any) -> None:
    wish = {"model": MODEL, "input": "Hello!", "temperature": 0}
    whole = client.responses.create(**wish)
    assert (whole.status, whole.output[0].type) == ("completed", "message")
    events = list(client.responses.create(**wish, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == whole.output_text
    with client.responses.stream(**wish) as stream:
        assert stream.get_final_response().output_text == whole.output_text
    assert client.responses.retrieve(whole.id).output_text == whole.output_text
    more = client.responses.create(**{**wish, "input": "And you?"}, previous_response_id=whole.id)
    assert more.usage.input_tokens > whole.usage.input_tokens + whole.usage.output_tokens
    client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)


def test_the_tokens_of_an_input_are_counted_as_its_response_counts_them(client: Any) -> None:
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    first = client.responses.create(model=MODEL, input="Hello!", max_output_tokens=4)
    for wish in (
        {"model": MODEL, "input": "Hello!"},
        {"input": "And you?", "instructions": "Be brief.", "previous_response_id": first.id},
        {"input": [{"role": "user", "content": "Hello!"}], "tools": [tool]},
    ):
        counted = client.responses.input_tokens.count(**wish)
        asked = client.responses.create(**wish, max_output_tokens=1)
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", asked.usage.input_tokens)


def test_stored_items_are_referred_to_in_place_of_being_sent(client: Any) -> None:
    first = client.responses.create(model=MODEL, input="Hello!", max_output_tokens=8)
    [question] = client.responses.input_items.list(first.id).data
    more: Any = {"role": "user", "content": "And you?"}
    ids = [question.id, first.output[0].id]
    referring: Any = [*({"type": "item_reference", "id": one} for one in ids), more]
    told = client.responses.create(model=MODEL, input=referring, temperature=0)
    continued = client.responses.create(
        model=MODEL, input=[more], previous_response_id=first.id, temperature=0
    )
    assert told.output_text == continued.output_text
    assert told.usage.input_tokens == continued.usage.input_tokens
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_none"}])
    assert (error.value.code, error.value.type) == ("item_not_found", "invalid_request_error")
    assert "Item with id 'msg_none' not found" in error.value.message


def test_the_input_of_a_response_is_listed_page_by_page(client: Any) -> None:
    first = client.responses.create(model=MODEL, input="Hello!", max_output_tokens=4)
    wish = {"input": "And you?", "previous_response_id": first.id, "instructions": "Be brief."}
    second = client.responses.create(model=MODEL, max_output_tokens=4, **wish)
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert [item.content[0].text for item in items] == ["Hello!", first.output_text, "And you?"]
    newest = client.responses.input_items.list(second.id, limit=1)
    assert newest.data[0].id == items[-1].id
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_none")


def test_a_response_is_cancelled_by_its_id(client: Any, server: Server) -> None:
    stream = client.responses.create(
        model=MODEL, input="Tell me a story.", stream=True, extra_body={"ignore_eos": True}
    )
    created = next(iter(stream))
    cancelled = client.responses.cancel(created.response.id)
    assert (cancelled.id, cancelled.status) == (created.response.id, "cancelled")
    last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert _waits_for(lambda: server.metrics()["num_requests_running"] == 0)
    assert client.responses.cancel(created.response.id).status == "cancelled"
    assert client.responses.retrieve(created.response.id).output_text == cancelled.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")


def test_errors_are_the_clients_own_kinds(client: Any, server: Server) -> None:
    for wish, kind, code in (
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": 5}, openai.BadRequestError, "invalid_value"),
        ({"extra_body": {"functions": [{}]}}, openai.BadRequestError, "unsupported_parameter"),
        (
            {"messages": [{"role": "user", "content": "no " * 3000}]},
            openai.BadRequestError,
            "context_length_exceeded",
        ),
    ):
        with pytest.raises(kind) as error:
            client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **wish})
        assert error.value.code == code
        assert error.value.request_id
    with pytest.raises(openai.BadRequestError) as error:
        client.embeddings.create(model=MODEL, input="hi")
    assert error.value.code == "unsupported_model"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_the_async_client_too(server: Server) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="test-key") as client:
            chat: Any = {"model": MODEL, "messages": HELLO, "temperature": 0}
            text: Any = {"model": MODEL, "prompt": "Once", "max_tokens": 5, "temperature": 0}
            response: Any = {"model": MODEL, "input": "Hello!", "temperature": 0}
            answers = await asyncio.gather(
                client.chat.completions.create(**chat),
                client.completions.create(**text),
                client.responses.create(**response),
                client.models.list(),
            )
            said = ["", "", ""]
            async for chunk in await client.chat.completions.create(**chat, stream=True):
                said[0] += chunk.choices[0].delta.content or ""
            async for chunk in await client.completions.create(**text, stream=True):
                said[1] += chunk.choices[0].text
            async for event in await client.responses.create(**response, stream=True):
                said[2] += event.delta if event.type == "response.output_text.delta" else ""
            assert said[0] == answers[0].choices[0].message.content
            assert said[1] == answers[1].choices[0].text
            assert said[2] == answers[2].output_text
            assert answers[3].data[0].id == MODEL

    asyncio.run(run())


def test_a_stream_that_is_closed_stops_the_engine(client: Any, server: Server) -> None:
    aborted = 'request_success_total{finished_reason="abort"}'
    num_before = server.metrics()[aborted]
    with client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        for _ in zip(range(3), stream, strict=False):
            pass
        assert server.metrics()["num_requests_running"] == 1
    assert _waits_for(lambda: server.metrics()["num_requests_running"] == 0)
    assert server.metrics()['kv_blocks{state="in_use"}'] == 0
    assert server.metrics()[aborted] == num_before + 1, "it did not run to its end"


def _waits_for(condition: Any, within_s: float = 300.0) -> bool:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > within_s:
            return False
        time.sleep(0.01)
    return True
