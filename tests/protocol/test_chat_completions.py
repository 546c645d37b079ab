"""Bodies of chat completions, and the pieces of an answer."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from triolet.core.chat_template import ChatTemplate
from triolet.core.output.logprobs import Logprob
from triolet.core.output.outputs import CompletionOutput
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import FinishReason
from triolet.core.tools import ToolPlan, plan_tools
from triolet.protocol.chat_completions import ChatChoice, ChatRequest
from triolet.protocol.errors import WireError
from triolet.protocol.responses.requests import CreateResponse

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


def refused(**fields: Any) -> WireError:
    with pytest.raises(WireError) as error:
        params_of("hermes", **fields)
    return error.value


def params_of(tool_parser: str | None = None, **fields: Any) -> SamplingParams:
    request = ChatRequest.of(body(**fields))
    return request.params(SamplingParams(max_tokens=None, temperature=0.7), request.plan(tool_parser))


def test_what_is_not_said_is_the_models_own_wish() -> None:
    params = params_of(top_p=0.5)
    assert (params.temperature, params.top_p, params.max_tokens, params.logprobs) == (0.7, 0.5, None, None)


def test_null_is_the_same_as_nothing() -> None:
    fields = (
        "temperature",
        "n",
        "stop",
        "tools",
        "tool_choice",
        "response_format",
        "stream_options",
        "functions",
    )
    assert params_of(**dict.fromkeys(fields)) == params_of()


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_longest_answer_has_two_names(name: str) -> None:
    named: dict[str, Any] = {name: 7}
    assert params_of(**named).max_tokens == 7


def test_the_newer_name_of_the_longest_answer_counts_beside_the_older_one() -> None:
    assert params_of(max_tokens=1, max_completion_tokens=7).max_tokens == 7


def test_unknown_keys_are_let_pass() -> None:
    assert params_of(verbosity="low", something_new=[1]) == params_of()


def test_labels_of_a_request_change_nothing() -> None:
    labels: dict[str, Any] = {"user": "u" * 64, "safety_identifier": "x", "prompt_cache_key": "y"}
    assert params_of(**labels, metadata={"k" * 64: "v" * 512}, store=True) == params_of()
    assert params_of(metadata=None, store=None, user=None) == params_of()


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_value"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_value"),
        ({"temperature": "0.5"}, "temperature", "invalid_value"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_value"),
        ({"n": 2.0}, "n", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 2**70}, "n", "invalid_value"),
        ({"stream": 1}, "stream", "invalid_value"),
        ({"stop": [1]}, "stop", "invalid_value"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"1": "a"}}, "logit_bias.1", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 2**70}, "max_completion_tokens", "invalid_value"),
        ({"max_tokens": 1, "max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "invalid_value",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "unsupported_parameter"),
        ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
        ({"tool_choice": 3}, "tool_choice", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
        ({"structured_outputs": {"xml": "x"}}, "structured_outputs", "invalid_value"),
        ({"timeout": -1}, "timeout", "invalid_value"),
        ({"user": "u" * 65}, "user", "invalid_value"),
        ({"safety_identifier": "u" * 65}, "safety_identifier", "invalid_value"),
        ({"metadata": "x"}, "metadata", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata", "invalid_value"),
        ({"metadata": {"k" * 65: ""}}, "metadata", "invalid_value"),
        ({"metadata": {"a": "v" * 513}}, "metadata.a", "invalid_value"),
        ({"metadata": {str(place): "" for place in range(17)}}, "metadata", "invalid_value"),
        ({"store": "yes"}, "store", "invalid_value"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "invalid_value",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(**fields)
    assert (error.param, error.code, error.status) == (param, code, 400)
    assert error.message


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ({"id": "a"}, ""),
        (["a"], "[0]"),
        ([{"id": "a", "type": "function"}], "[0].function"),
        ([{"type": "custom", "custom": {"name": "f", "input": "x"}}], "[0].function"),
        ([{"function": {"arguments": "{}"}}], "[0].function.name"),
        (
            [{"function": {"name": "f"}}, {"function": {"name": "f", "arguments": [1]}}],
            "[1].function.arguments",
        ),
    ],
)
def test_what_is_wrong_in_an_earlier_call_is_refused_by_name(calls: Any, param: str) -> None:
    error = refused(messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}])
    assert (error.param, error.code) == (f"messages[1].tool_calls{param}", "invalid_value")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"stream_options": {"include_usage": True}},
            "stream_options must be left out where stream is false; got {'include_usage': True}",
        ),
        ({"stream_options": {}}, "stream_options must be left out where stream is false; got {}"),
        (
            {"logprob_token_ids": [5]},
            "logprob_token_ids must be left out where logprobs are not asked for; got (5,)",
        ),
    ],
)
def test_a_field_that_does_not_go_with_another_is_refused_with_its_own_value(
    fields: dict[str, Any], sentence: str
) -> None:
    assert str(refused(**fields)) == sentence


@pytest.mark.parametrize(
    "fields", [{"modalities": ["text"]}, {"best_of": 1}, {"functions": []}, {"length_penalty": 1.0}]
)
def test_what_asks_for_nothing_is_not_refused(fields: dict[str, Any]) -> None:
    assert params_of(**fields) == params_of()


@pytest.mark.parametrize(
    "said", [{"content": None, "refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}]
)
def test_a_refusal_in_the_history_is_what_the_assistant_said(said: dict[str, Any]) -> None:
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", **said},
        {"role": "user", "content": "y"},
    ]
    request = ChatRequest.of({"model": "m", "messages": history})
    assert ChatTemplate("{{ messages[1].content }}").render(request.messages.messages) == "No."


@pytest.mark.parametrize("said", [{"content": None}, {}, {"content": None, "tool_calls": []}])
def test_an_answer_without_a_text_or_a_call_is_an_empty_text_in_the_history(said: dict[str, Any]) -> None:
    history = [{"role": "assistant", **said}, {"role": "user", "content": "y"}]
    request = ChatRequest.of({"model": "m", "messages": history})
    assert request.messages.messages[0]["content"] == ""
    assert ChatTemplate("{{ messages[0].content }}|").render(request.messages.messages) == "|"


def test_an_answer_of_calls_alone_has_no_text_in_the_history() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    request = ChatRequest.of({"model": "m", "messages": [message]})
    assert request.messages.messages == (message,)


def test_a_schema_becomes_a_constraint() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    params = params_of(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    )
    assert params.structured_outputs is not None
    assert params.structured_outputs.kind == "json"
    unseen = params_of(tools=[TOOL], tool_choice="none", response_format={"type": "json_object"})
    assert unseen.structured_outputs is not None and unseen.structured_outputs.kind == "json_object"


def test_a_forced_call_is_a_constraint_and_leaves_no_room_for_another() -> None:
    forced = {"type": "function", "function": {"name": "look_up"}}
    assert params_of(tools=[TOOL], tool_choice=forced).structured_outputs is not None
    error = refused(tools=[TOOL], tool_choice=forced, structured_outputs={"regex": "a"})
    assert error.param == "tool_choice"
    # A form of the text does not matter to an answer that is nothing but a call.
    both = params_of(tools=[TOOL], tool_choice=forced, response_format={"type": "json_object"})
    assert both == params_of(tools=[TOOL], tool_choice=forced)


def test_strict_tools_bind_calls_and_a_form_that_is_asked_for_leaves_room_for_them() -> None:
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    bound = params_of("hermes", tools=[strict]).structured_outputs
    assert bound is not None and bound.kind == "tool_calls"
    assert params_of("hermes", tools=[TOOL]).structured_outputs is None
    for tool in (TOOL, strict):
        either = params_of("hermes", tools=[tool], response_format={"type": "json_object"}).structured_outputs
        assert either is not None and either.tool_calls is not None
        assert json.loads(either.tool_calls)["form"] == {"type": "object"}
    whole = params_of("hermes", tools=[strict], structured_outputs={"regex": "a"}).structured_outputs
    assert whole is not None and whole.kind == "regex"


def test_some_of_the_tools_are_allowed() -> None:
    other = {"type": "function", "function": {"name": "forget"}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "forget"}}]}
    request = ChatRequest.of(
        body(tools=[TOOL, other], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    )
    prompt = request.prompt(request.plan("hermes"))
    assert [tool["function"]["name"] for tool in prompt["tools"]] == ["forget"]
    error = refused(tools=[TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert error.param == "tool_choice.tools[0]"


def test_a_developer_is_a_system_to_the_template() -> None:
    request = ChatRequest.of(body(messages=[{"role": "developer", "content": "x"}]))
    assert request.prompt(request.plan())["messages"] == [{"role": "system", "content": "x"}]


def test_tools_and_wishes_for_the_template_go_along() -> None:
    request = ChatRequest.of(body(tools=[TOOL], reasoning_effort="none", chat_template_kwargs={"a": 1}))
    prompt = request.prompt(request.plan("hermes"), "enable_thinking")
    assert prompt["messages"] == body()["messages"]
    assert [tool["function"]["name"] for tool in prompt["tools"]] == ["look_up"]
    assert prompt["chat_template_kwargs"] == {"a": 1, "enable_thinking": False}
    # A template without a switch would refuse the value.
    assert request.prompt(request.plan("hermes"), None)["chat_template_kwargs"] == {"a": 1}


@pytest.mark.parametrize(
    ("effort", "values"),
    [("none", {"thinking": False}), ("minimal", {"thinking": False}), (None, {})]
    + [(effort, {"thinking": True}) for effort in ("low", "medium", "high", "xhigh", "max")],
)
def test_an_effort_sets_the_switch_of_the_template(effort: str | None, values: dict[str, bool]) -> None:
    messages: list[Any] = [{"role": "user", "content": "x"}]
    reasoning = {"effort": effort} if effort else None
    response = CreateResponse.of({"model": "m", "input": "x", "reasoning": reasoning})
    prompt = response.prompt(messages, plan_tools(), "thinking")
    assert (prompt["chat_template_kwargs"] if isinstance(prompt, dict) else {}) == values
    request = ChatRequest.of(body(reasoning_effort=effort))
    assert request.prompt(request.plan("hermes"), "thinking")["chat_template_kwargs"] == values
    request = ChatRequest.of(body(reasoning_effort=effort, chat_template_kwargs={"thinking": False}))
    assert request.prompt(request.plan("hermes"), "thinking")["chat_template_kwargs"] == {"thinking": False}


def test_a_template_that_reads_an_effort_gets_it_unless_the_client_sets_the_value_itself() -> None:
    efforts = {"low": "low", "high": "high"}
    response = CreateResponse.of({"model": "m", "input": "x", "reasoning": {"effort": "high"}})
    prompt: Any = response.prompt([{"role": "user", "content": "x"}], plan_tools(), None, efforts)
    assert prompt["chat_template_kwargs"] == {"reasoning_effort": "high"}
    request = ChatRequest.of(body(reasoning_effort="high"))
    assert request.prompt(plan_tools(), None, efforts)["chat_template_kwargs"] == {"reasoning_effort": "high"}
    request = ChatRequest.of(body(reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"}))
    assert request.prompt(plan_tools(), None, efforts)["chat_template_kwargs"] == {"reasoning_effort": "low"}
    assert ChatRequest.of(body()).prompt(plan_tools(), None, efforts)["chat_template_kwargs"] == {}


# ------------------------------------------------------------------------------------------ answers


def choice(plan: ToolPlan | None = None, num_top: int | None = None) -> ChatChoice:
    numbers = itertools.count()
    parser = (plan or plan_tools()).parser("")
    return ChatChoice(
        index=0, parser=parser, num_top=num_top, new_id=lambda prefix: f"{prefix}_{next(numbers)}"
    )


def output(text: str, reason: FinishReason | None = None, **fields: Any) -> CompletionOutput:
    return CompletionOutput(index=0, text=text, token_ids=(1,), finish_reason=reason, **fields)


def test_the_ending_has_a_piece_of_its_own() -> None:
    answer = choice()
    assert answer.begin()["delta"] == {"role": "assistant", "content": ""}
    (piece,) = answer.add(output("Hi"))
    assert (piece["delta"], piece["finish_reason"]) == ({"content": "Hi"}, None)
    last, ending = answer.add(output(" you", FinishReason.STOP))
    assert (last["delta"], last["finish_reason"]) == ({"content": " you"}, None)
    assert (ending["delta"], ending["finish_reason"]) == ({}, "stop")
    assert answer.whole()["message"]["content"] == "Hi you"


@pytest.mark.parametrize(
    ("reason", "said", "detail"),
    [
        (FinishReason.STOP, "stop", None),
        (FinishReason.LENGTH, "length", None),
        (FinishReason.DEADLINE, "length", "deadline"),
        (FinishReason.REPETITION, "repetition", None),
        (FinishReason.SHUTDOWN, "length", "shutdown"),
    ],
)
def test_reasons_are_openais_words(reason: FinishReason, said: str, detail: str | None) -> None:
    answer = choice()
    answer.add(output("x", reason))
    whole = answer.whole()
    assert (whole["finish_reason"], whole["stop_reason"]) == (said, detail)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_what_could_not_be_finished_is_an_error(reason: FinishReason) -> None:
    with pytest.raises(WireError) as error:
        choice().add(output("x", reason))
    assert error.value.status in (500, 503)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_of_tools_come_in_pieces_that_add_up(size: int) -> None:
    text = 'So:<tool_call>{"name": "look_up", "arguments": {"word": "owl"}}</tool_call>'
    plan = plan_tools([TOOL], "auto", tool_parser="hermes")
    answer = choice(plan)
    pieces = [piece for at in range(0, len(text), size) for piece in answer.add(output(text[at : at + size]))]
    pieces += answer.add(output("", FinishReason.STOP))
    calls = [call for piece in pieces for call in piece["delta"].get("tool_calls", [])]
    assert calls[0]["id"] == "call_0"
    assert calls[0]["function"]["name"] == "look_up"
    arguments = "".join(call["function"]["arguments"] for call in calls)
    whole = answer.whole()
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "So:"
    assert whole["message"]["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    ]
    assert arguments == '{"word": "owl"}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"name": "look_up", "arguments": {"word": "owl', "stop"),
        ('{"name": "look_up", "arguments": {"word": "owl"}', "tool_calls"),
        (
            '{"name": "look_up", "arguments": {}}</tool_call><tool_call>{"name": "look_up", "arguments": {',
            "stop",
        ),
        ('{"name": "look_up", "arguments": {]}</tool_call><tool_call>{"name": "look_up"}', "tool_calls"),
    ],
)
def test_an_answer_that_stops_amid_the_arguments_of_a_call_does_not_end_for_calls(
    text: str, said: str
) -> None:
    answer = choice(plan_tools([TOOL], "auto", tool_parser="hermes"))
    pieces = answer.add(output(f"<tool_call>{text}", FinishReason.STOP))
    assert (answer.whole()["finish_reason"], pieces[-1]["finish_reason"]) == (said, said)


def test_reasoning_is_told_apart() -> None:
    plan = plan_tools(reasoning_parser="qwen3")
    answer = choice(plan)
    pieces = answer.add(output("<think>hm</think>\n\nYes", FinishReason.STOP))
    for name in ("reasoning", "reasoning_content"):
        assert "".join(piece["delta"].get(name, "") for piece in pieces) == "hm"
    assert answer.num_reasoning_tokens == 1
    message = answer.whole()["message"]
    assert message["reasoning"] == message["reasoning_content"] == "hm"
    assert message["content"].strip() == "Yes"


def test_reasoning_can_be_left_out() -> None:
    plan = plan_tools(reasoning_parser="qwen3")
    choice = ChatChoice(
        index=0, parser=plan.parser(), num_top=None, new_id=lambda prefix: prefix, includes_reasoning=False
    )
    text = "<think>hm</think>yes"
    completion = CompletionOutput(index=0, text=text, token_ids=(1, 2), finish_reason=FinishReason.STOP)
    pieces = choice.add(completion)
    assert "reasoning" not in str(pieces)
    assert choice.whole()["message"] == {"role": "assistant", "content": "yes", "refusal": None}
    assert choice.num_reasoning_tokens == 2


def test_the_template_gets_no_special_tokens_unless_they_are_asked_for() -> None:
    plan = plan_tools()
    assert ChatRequest.of(body()).prompt(plan)["add_special_tokens"] is False
    assert ChatRequest.of(body(add_special_tokens=False)).prompt(plan)["add_special_tokens"] is False
    assert ChatRequest.of(body(add_special_tokens=True)).prompt(plan)["add_special_tokens"] is True


def test_log_probabilities_of_held_back_tokens_come_with_the_next_piece() -> None:
    answer = choice(num_top=1)
    at = {1: Logprob(-0.5, 2, "é"), 2: Logprob(-0.1, 1, "a")}
    assert answer.add(output("", logprobs=(at,))) == []
    piece, ending = answer.add(output("é", FinishReason.LENGTH, logprobs=(at,)))
    assert len(piece["logprobs"]["content"]) == 2
    assert piece["logprobs"]["content"][0] == {
        "token": "é",
        "bytes": [195, 169],
        "logprob": -0.5,
        "top_logprobs": [{"token": "a", "bytes": [97], "logprob": -0.1}],
    }
    assert ending["logprobs"] is None


def test_an_impossible_token_is_still_a_number() -> None:
    answer = choice(num_top=0)
    answer.add(output("x", FinishReason.STOP, logprobs=({1: Logprob(float("-inf"), None, "x")},)))
    assert answer.whole()["logprobs"]["content"][0]["logprob"] == -9999.0


def test_every_id_of_a_token_is_sent_once_also_where_its_text_is_held_back() -> None:
    plan = plan_tools(reasoning_parser="qwen3")
    answer = ChatChoice(
        index=0, parser=plan.parser(), num_top=None, new_id=lambda prefix: prefix, includes_token_ids=True
    )
    assert "token_ids" not in answer.begin()
    sent: list[int] = []
    for number, text in enumerate(["<th", "ink>", "hm", "</think>", "yes", ""]):
        reason = FinishReason.STOP if number == 5 else None
        completion = CompletionOutput(index=0, text=text, token_ids=(number,), finish_reason=reason)
        sent += [token_id for piece in answer.add(completion) for token_id in piece.get("token_ids", ())]
    assert sent == answer.whole()["token_ids"] == [0, 1, 2, 3, 4, 5]


def test_a_token_is_named_by_its_id_beside_the_bytes_of_its_text() -> None:
    answer = ChatChoice(
        index=0, parser=plan_tools().parser(), num_top=1, new_id=lambda prefix: prefix, shows_ids=True
    )
    logprobs = ({1: Logprob(-1.0, 2, "a"), 2: Logprob(-0.5, 1, "b")},)
    answer.add(output("a", FinishReason.STOP, logprobs=logprobs))
    likeliest = {"token": "token_id:2", "bytes": [98], "logprob": -0.5}
    assert answer.whole()["logprobs"]["content"] == [
        {"token": "token_id:1", "bytes": [97], "logprob": -1.0, "top_logprobs": [likeliest]}
    ]
