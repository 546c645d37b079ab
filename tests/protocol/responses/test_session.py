from __future__ import annotations

import pytest

from tests.protocol.make import NOW, types
from tests.protocol.talk import Talk, code, context, endings
from triolet.core.request.request import FinishReason
from triolet.errors import EngineDead, Overloaded, PromptTooLong
from triolet.protocol.errors import of_exception
from triolet.protocol.responses import response_items
from triolet.protocol.responses.requests import MAX_GIVEN_BACK_BYTES
from triolet.protocol.responses.store import ResponseStore


def test_a_turn_is_started_told_and_ended() -> None:
    talk = Talk()
    assert talk.create(input="Hello", instructions="Be brief.") == []
    [turn] = talk.started
    assert turn.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    assert types(talk.begin(turn)) == ["created", "in_progress"]
    assert types(talk.finish(turn))[-1] == "completed"
    assert all("stream_id" not in event for event in talk.said)
    assert talk.conversation.active == []


def test_turns_of_one_lane_never_overlap_and_keep_their_order() -> None:
    talk = Talk()
    for text in "abc":
        talk.create(input=text, stream_id="x")
    for text in "abc":
        turn = talk.started[-1]
        assert turn.messages[0]["content"] == text
        assert len(talk.conversation.active) == 1
        talk.finish(turn)
    assert len(talk.started) == 3 and endings(talk.said) == ["x:response.completed"] * 3


def test_lanes_run_beside_each_other_and_each_event_names_its_lane() -> None:
    talk = Talk()
    for lane in ("a", "b", None):
        talk.create(stream_id=lane)
    a, b, nameless = talk.started
    talk.begin(b)
    talk.begin(a)
    talk.begin(nameless)
    assert [event.get("stream_id") for event in talk.said] == ["b", "b", "a", "a", None, None]


def test_one_more_than_may_be_active_waits_for_a_place() -> None:
    talk = Talk(context(max_active=2))
    for lane in ("a", "b", "c", "d"):
        talk.create(stream_id=lane)
    talk.create(stream_id="a")
    assert [turn.stream_id for turn in talk.started] == ["a", "b"]
    talk.finish(talk.started[1])
    assert [turn.stream_id for turn in talk.started] == ["a", "b", "c"]
    talk.finish(talk.started[0])
    talk.finish(talk.started[2])
    assert [turn.stream_id for turn in talk.started] == ["a", "b", "c", "d", "a"]


def test_a_lane_too_many_is_refused_and_the_others_go_on() -> None:
    talk = Talk(context(max_lanes=2))
    for lane in ("a", "b", None):
        assert talk.create(stream_id=lane) == []
    assert code(talk.create(stream_id="c")) == "websocket_stream_limit_reached"
    talk.finish(talk.started[0])
    assert code(talk.create(stream_id="c")) == "websocket_stream_limit_reached"
    assert talk.create(stream_id="a") == []


def test_what_waits_is_bounded() -> None:
    talk = Talk(context(max_queued=2))
    for _ in range(3):
        assert talk.create() == []
    refusal = talk.create()
    assert code(refusal) == "rate_limit_exceeded" and refusal[0]["status"] == 429


def test_a_wrong_create_is_answered_when_its_turn_has_come() -> None:
    talk = Talk()
    talk.create()
    assert talk.create(temperature=9) == [] and talk.create(model="other") == []
    talk.create()
    talk.finish(talk.started[0])
    assert endings(talk.said) == [":response.completed", ":error", ":error"]
    first, second = (event["error"] for event in talk.said[-2:])
    assert (first["code"], first["param"]) == ("invalid_value", "temperature")
    assert (second["code"], talk.said[-1]["status"]) == ("model_not_found", 404)
    assert len(talk.started) == 2


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("{", "invalid_json"),
        ("[]", "invalid_json"),
        ("[" * 100_000, "invalid_json"),
        ('{"type": NaN}', "invalid_json"),
        ('{"type": "response.create", "input": "\\ud800"}', "invalid_json"),
        ('{"type": ' + "9" * 5000 + "}", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        ("{}", "unknown_event_type"),
        ('{"type": ["response.create"]}', "unknown_event_type"),
        ('{"type": "session.update"}', "unknown_event_type"),
        ('{"type": "response.steer", "stream_id": "*"}', "invalid_input"),
        ('{"type": "response.create"}', "missing_required_parameter"),
        ('{"type": "response.create", "model": "m", "input": "", "stream_id": ""}', "invalid_stream_id"),
        ('{"type": "response.create", "model": "m", "input": "", "stream_id": 5}', "invalid_value"),
        ('{"type": "response.create", "model": "m", "input": []}', "invalid_value"),
        ('{"type": "response.create", "model": "m", "input": "x", "background": true}', "unsupported_parameter"),
        ('{"type": "response.create", "model": "m", "input": "x", "prompt": {}}', "unsupported_parameter"),
        ('{"type": "response.cancel"}', "response_not_found"),
        ('{"type": "response.cancel", "response_id": 5}', "invalid_value"),
        ('{"type": "response.resume"}', "missing_required_parameter"),
        ('{"type": "response.resume", "response_id": "resp_x"}', "response_not_found"),
    ],
)  # fmt: skip
def test_whatever_is_wrong_gets_one_error_and_the_conversation_goes_on(
    message: str | bytes, expected: str
) -> None:
    talk = Talk()
    assert code(talk.hear(message)) == expected
    talk.create()
    talk.finish(talk.started[0])
    assert endings(talk.said)[-1] == ":response.completed"


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (PromptTooLong(50, 20), 400, "context_length_exceeded"),
        (Overloaded("max_queued_requests", 4, 1.5), 429, "rate_limit_exceeded"),
        (EngineDead("secrets of the crash"), 503, "service_unavailable"),
        (RuntimeError("secrets of the crash"), 500, "server_error"),
    ],
)
def test_what_the_engine_refuses_is_an_error_and_no_response(
    error: Exception, status: int, expected: str
) -> None:
    talk = Talk()
    talk.create(stream_id="a")
    said = talk.take(talk.conversation.refuse(talk.started[0], of_exception(error), NOW))
    assert code(said) == expected and said[0]["status"] == status and said[0]["stream_id"] == "a"
    assert "secrets" not in said[0]["error"]["message"]


def test_what_fails_after_its_beginning_is_a_failed_response_and_no_error() -> None:
    talk = Talk()
    talk.create()
    talk.begin(talk.started[0])
    said = talk.take(talk.conversation.refuse(talk.started[0], of_exception(RuntimeError("x")), NOW))
    assert types(said) == ["failed"] and talk.conversation.active == []
    assert said[0]["response"]["finish_reason"] == "error"


@pytest.mark.parametrize("is_dead", [False, True], ids=["shutdown", "death"])
def test_a_response_that_ends_with_its_server_says_so(is_dead: bool) -> None:
    talk = Talk()
    talk.create()
    talk.begin(talk.started[0])
    conversation, death = talk.conversation, of_exception(EngineDead("x"))
    said = talk.take(conversation.refuse(talk.started[0], death, NOW) if is_dead else conversation.end(NOW))
    assert types(said)[0] == "failed"
    assert said[0]["response"]["finish_reason"] == "shutdown"


# ------------------------------------------------------------------------------------------ chats


def test_a_chat_goes_on_without_the_instructions_of_its_turns() -> None:
    talk = Talk()
    talk.create(input="One", instructions="Be brief.", store=False)
    response_id = talk.finish(talk.started[0], "Two")[-1]["response"]["id"]
    talk.create(input="Three", previous_response_id=response_id, instructions="Be long.")
    assert talk.started[1].messages == [
        {"role": "system", "content": "Be long."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "Three"},
    ]


def test_a_lane_may_continue_what_another_lane_said() -> None:
    talk = Talk()
    talk.create(input="One", stream_id="a", store=False)
    response_id = talk.finish(talk.started[0], "Two")[-1]["response"]["id"]
    for lane in ("a", "b"):
        talk.create(input="Three", stream_id=lane, previous_response_id=response_id)
    assert [len(turn.messages) for turn in talk.started] == [1, 3, 3]


def test_what_is_not_stored_is_known_on_its_own_connection_only() -> None:
    store = ResponseStore(10, 2**20)
    first, second = Talk(context(store=store)), Talk(context(store=store))
    first.create(store=False)
    response_id = first.finish(first.started[0])[-1]["response"]["id"]
    assert code(second.create(previous_response_id=response_id)) == "previous_response_not_found"
    first.create(store=True)
    stored_id = first.finish(first.started[1])[-1]["response"]["id"]
    assert second.create(previous_response_id=stored_id) == []


def test_no_key_continues_what_another_one_said() -> None:
    store = ResponseStore(10, 2**20)
    mine, theirs = Talk(context(store=store), "key 1"), Talk(context(store=store), "key 2")
    mine.create()
    response_id = mine.finish(mine.started[0])[-1]["response"]["id"]
    assert code(theirs.create(previous_response_id=response_id)) == "previous_response_not_found"


def test_an_input_that_was_only_taken_in_can_be_continued() -> None:
    talk = Talk()
    talk.create(input="Long", generate=False, store=False)
    [turn] = talk.started
    assert turn.planned is not None and turn.planned.params.max_tokens == 1
    [*_, last] = talk.put(turn, "x", FinishReason.LENGTH)
    assert last["type"] == "response.completed" and last["response"]["output"] == []
    talk.create(input="Go on", previous_response_id=last["response"]["id"])
    assert [message["content"] for message in talk.started[1].messages] == ["Long", "Go on"]


# ----------------------------------------------------------------------------------- cancel and steer


@pytest.mark.parametrize("by", ["response_id", "lane"])
def test_a_cancelled_turn_ends_at_once_and_the_next_of_its_lane_begins(by: str) -> None:
    talk = Talk()
    talk.create(stream_id="a")
    talk.create(stream_id="a")
    [turn] = talk.started
    response_id = talk.begin(turn)[0]["response"]["id"]
    talk.put(turn, "Hi")
    wish = {"response_id": response_id} if by == "response_id" else {"stream_id": "a"}
    said = talk.hear({"type": "response.cancel", **wish})
    assert types(said)[-1] == "incomplete" and said[-1]["response"]["status"] == "cancelled"
    assert said[-1]["stream_id"] == "a"
    assert talk.stopped == [turn] and len(talk.started) == 2
    assert talk.put(turn, "late") == [], "what comes after the end is dropped"


def test_a_turn_that_was_cancelled_before_it_began_has_one_ending() -> None:
    talk = Talk()
    talk.create()
    said = talk.hear({"type": "response.cancel"})
    assert types(said) == ["created", "in_progress", "incomplete"]
    assert talk.begin(talk.started[0]) == []


def test_a_steered_turn_ends_and_its_successor_continues_it() -> None:
    talk = Talk()
    talk.create(input="Tell", stream_id="a", temperature=0.5)
    talk.create(input="Later", stream_id="a")
    response_id = talk.begin(talk.started[0])[0]["response"]["id"]
    talk.put(talk.started[0], "Once")
    said = talk.hear({"type": "response.steer", "previous_response_id": response_id, "input": "Shorter"})
    assert types(said)[0] == "steer.accepted" and types(said)[-1] == "incomplete"
    assert said[-1]["response"]["incomplete_details"] == {"reason": "steered"}
    assert [event["sequence_number"] for event in talk.said] == list(range(len(talk.said)))
    successor = talk.started[1]
    assert [message["content"] for message in successor.messages] == ["Tell", "Once", "Shorter"]
    assert successor.planned is not None and successor.planned.params.temperature == 0.5
    talk.finish(successor)
    assert talk.started[2].messages[0]["content"] == "Later"


@pytest.mark.parametrize(
    ("steer", "expected"),
    [
        ({"previous_response_id": "resp_x", "input": "Hi"}, "response_not_found"),
        ({"previous_response_id": "resp_1"}, "invalid_input"),
        ({"previous_response_id": "resp_1", "input": []}, "invalid_input"),
        ({"previous_response_id": "resp_1", "input": [{"role": "system", "content": "x"}]}, "invalid_input"),
    ],
)
def test_a_steer_that_can_not_be_is_given_back(steer: dict[str, object], expected: str) -> None:
    talk = Talk()
    talk.create()
    said = talk.hear({"type": "response.steer", **steer})
    assert types(said) == ["steer.failed"] and code(said) == expected
    assert talk.stopped == []


def test_a_steer_is_given_back_with_its_input_only_if_its_message_is_short() -> None:
    talk = Talk()
    for size in (MAX_GIVEN_BACK_BYTES - 200, MAX_GIVEN_BACK_BYTES):
        steer = {"previous_response_id": "resp_x", "input": "x" * size}
        [failed] = talk.hear({"type": "response.steer", **steer})
        is_short = size < MAX_GIVEN_BACK_BYTES
        assert failed["steer"] == {
            "previous_response_id": "resp_x",
            "input": steer["input"] if is_short else "",
        }


def test_what_is_over_can_not_be_steered() -> None:
    talk = Talk()
    talk.create()
    response_id = talk.finish(talk.started[0])[-1]["response"]["id"]
    said = talk.hear({"type": "response.steer", "previous_response_id": response_id, "input": "x"})
    assert code(said) == "response_already_completed"


def test_a_chat_has_a_longest_length_and_the_turn_that_passes_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(response_items, "MAX_CHAT_MESSAGES", 4)
    talk = Talk()
    talk.create()
    response_id = talk.finish(talk.started[0])[-1]["response"]["id"]
    talk.create(previous_response_id=response_id, input=[{"role": "user", "content": "a"}] * 3)
    assert (code(talk.said[-1:]), talk.said[-1]["error"]["param"]) == ("invalid_value", "input")
    assert "at most 4 messages" in talk.said[-1]["error"]["message"]
    talk.create(previous_response_id=response_id, input=[{"role": "user", "content": "a"}] * 2)
    assert len(talk.started) == 2


# ------------------------------------------------------------------------------------- the way down


def test_a_draining_conversation_finishes_what_is_active_and_refuses_the_rest_in_its_order() -> None:
    talk = Talk()
    talk.create()
    talk.create()
    talk.create(temperature=9)
    assert talk.take(talk.conversation.drain(NOW)) == [] and talk.closes == []
    assert talk.create() == []  # its error, too, would be taken for the end of the active one
    talk.finish(talk.started[0])
    assert endings(talk.said) == [":response.completed", *[":error"] * 3]
    codes = [event["error"]["code"] for event in talk.said if event["type"] == "error"]
    assert codes == ["service_unavailable", "invalid_value", "service_unavailable"]
    assert [close.code for close in talk.closes] == [1001]


def test_a_draining_conversation_refuses_at_once_what_waits_for_a_place_and_not_for_its_lane() -> None:
    talk = Talk(context(max_active=1))
    talk.create(stream_id="a")
    talk.create(stream_id="b")
    talk.create(stream_id="a")
    talk.take(talk.conversation.drain(NOW))
    assert endings(talk.said) == ["b:error"] and talk.closes == []
    talk.take(talk.conversation.end(NOW))
    assert endings(talk.said) == ["b:error", "a:error", "a:error"]  # nothing was told of the active one
    assert [close.code for close in talk.closes] == [1001]


def test_an_idle_conversation_closes_as_soon_as_it_drains() -> None:
    talk = Talk()
    talk.take(talk.conversation.drain(NOW))
    assert talk.closes and talk.hear("{") == []


def test_what_has_not_finished_by_then_is_ended_and_said_to_be() -> None:
    talk = Talk()
    for lane in ("a", "b"):
        talk.create(stream_id=lane)
    talk.begin(talk.started[0])
    talk.take(talk.conversation.end(NOW))
    assert endings(talk.said) == ["a:response.failed", "b:error"]
    assert talk.stopped == talk.started and talk.closes


def test_a_connection_that_is_too_old_says_so_before_it_closes() -> None:
    talk = Talk()
    [said] = talk.take(talk.conversation.expire(NOW))
    assert said["error"]["code"] == "websocket_connection_limit_reached" and talk.closes


@pytest.mark.slow
def test_every_create_has_exactly_one_ending_whatever_happens() -> None:
    """A walk: creates, news, cancels, steers and refusals, drawn from a fixed list of numbers."""
    talk = Talk(context(max_active=3, max_lanes=4))
    state, num_creates = 1, 0
    for _ in range(3000):
        state = state * 48271 % (2**31 - 1)
        lane = "abcd"[state % 4]
        active = talk.conversation.active
        turn = active[state // 16 % len(active)] if active else None
        choice = state // 4 % 8
        if choice < 3 or turn is None or turn.answer is None:
            num_creates += 1
            talk.create(stream_id=lane, temperature=3 if state % 7 == 0 else 1)
        elif choice == 3:
            talk.put(turn, "x")
        elif choice == 4:
            talk.finish(turn)
        elif choice == 5:
            talk.take(talk.conversation.refuse(turn, of_exception(EngineDead("x")), NOW))
        elif choice == 6:
            talk.hear({"type": "response.cancel", "response_id": turn.answer.response_id})
        elif turn.was_told:
            num_creates += 1  # the successor
            talk.hear(
                {
                    "type": "response.steer",
                    "previous_response_id": turn.answer.response_id,
                    "input": "x",
                }
            )
        assert len(talk.conversation.active) <= 3
    talk.take(talk.conversation.end(NOW))
    assert len(endings(talk.said)) == num_creates
    assert talk.closes


def test_what_waits_is_bounded_in_bytes_too() -> None:
    talk = Talk(context(max_queued_bytes=1000))
    talk.create()
    assert talk.create(input="x" * 700) == []
    assert code(talk.create(input="x" * 700)) == "rate_limit_exceeded"
    talk.finish(talk.started[0])
    assert talk.create(input="x" * 700) == []


# ------------------------------------------------------------------------- tools and forms of answers

ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}


def test_tools_are_shown_to_the_model_and_their_calls_can_be_answered() -> None:
    talk = Talk(context(tool_parser="hermes"))
    talk.create(tools=[ADD])
    [turn] = talk.started
    assert turn.request is not None and turn.answer is not None
    prompt = turn.request.prompt(turn.messages, turn.answer.plan)
    assert isinstance(prompt, dict) and prompt["tools"][0]["function"]["name"] == "add"
    last = talk.finish(turn, '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>')[-1]
    [call] = last["response"]["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    talk.create(input=[result], previous_response_id=last["response"]["id"], tools=[ADD])
    assert [message["role"] for message in talk.started[1].messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("continues", [False, True])
def test_the_output_of_a_call_that_the_chat_does_not_have_is_refused(continues: bool) -> None:
    talk = Talk(context(tool_parser="hermes"))
    talk.create(tools=[ADD])
    first = talk.finish(talk.started[0], '<tool_call>{"name": "add", "arguments": {}}</tool_call>')[-1]
    [call] = first["response"]["output"]
    other = {"type": "function_call", "call_id": "other", "name": "add", "arguments": "{}"}
    # A call is known from the history that is continued, or from the input itself, and by its own id only.
    call_id = call["id"] if continues else call["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "2"}
    before = {"previous_response_id": first["response"]["id"]} if continues else {}
    talk.create(input=[other, result], tools=[ADD], **before)
    error = talk.said[-1]["error"]
    assert error["message"] == f"No tool call found for function call output with call_id {call_id}."
    assert (error["code"], error["param"], len(talk.started)) == ("invalid_value", "input", 1)


def test_a_chat_that_is_sent_again_has_the_calls_of_one_answer_in_one_message() -> None:
    talk = Talk(context(tool_parser="hermes"))
    calls = [
        {"type": "function_call", "call_id": str(number), "name": "add", "arguments": "{}"}
        for number in (1, 2)
    ]
    results = [{"type": "function_call_output", "call_id": str(number), "output": "2"} for number in (1, 2)]
    talk.create(input=[{"role": "user", "content": "Add."}, *calls, *results], tools=[ADD])
    roles = [message["role"] for message in talk.started[0].messages]
    assert roles == ["user", "assistant", "tool", "tool"]
    assert len(talk.started[0].messages[1]["tool_calls"]) == 2


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"text": {"format": {"type": "json_object"}}}, {"json_object": True}),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}},
            {"json": '{"type": "object"}'},
        ),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ("yes", "no")}),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}},
            {"json": '{"type": "object"}'},
        ),
        (
            {"tools": [{**ADD, "strict": True}], "parallel_tool_calls": False},
            {
                "tool_calls": '{"format": "hermes", "tools": [{"name": "add", "parameters": {"type": "object"}}], '
                '"parallel": false}'
            },
        ),
        (
            {"tools": [{**ADD, "strict": True}], "text": {"format": {"type": "json_object"}}},
            {
                "tool_calls": '{"format": "hermes", "tools": [{"name": "add", "parameters": {"type": "object"}}], '
                '"parallel": true, "form": {"type": "object"}}'
            },
        ),
        (
            {
                "tools": [ADD],
                "text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": 1}}},
                "parallel_tool_calls": False,
            },
            {
                "tool_calls": '{"format": "hermes", "tools": [{"name": "add", "parameters": {"type": "object"}}], '
                '"parallel": false, "form": {"const": 1}}'
            },
        ),
        (
            {"tools": [ADD], "tool_choice": "none", "text": {"format": {"type": "json_object"}}},
            {"json_object": True},
        ),
        (
            {
                "tools": [{**ADD, "name": "sub"}, ADD],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "add"}],
                },
                "parallel_tool_calls": False,
            },
            {
                "json": '{"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "object", "properties": '
                '{"name": {"const": "add"}, "parameters": {"type": "object"}}, "required": ["name", "parameters"], '
                '"additionalProperties": false}]}, "maxItems": 1}'
            },
        ),
    ],
)
def test_the_form_of_an_answer_can_be_asked_for(fields: dict[str, object], form: dict[str, object]) -> None:
    talk = Talk(context(tool_parser="hermes"))
    talk.create(**fields)
    [turn] = talk.started
    assert turn.planned is not None and turn.planned.params.structured_outputs is not None
    for name, value in form.items():
        assert getattr(turn.planned.params.structured_outputs, name) == value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.tools",
        ),
        (
            {"tools": [ADD], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "tool_choice",
        ),
        ({"structured_outputs": {"nothing": 1}}, "structured_outputs"),
        (
            {"structured_outputs": {"choice": ["a"]}, "text": {"format": {"type": "json_object"}}},
            "structured_outputs",
        ),
    ],
)
def test_a_form_that_can_not_be_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    [error] = Talk(context(tool_parser="hermes")).create(**fields)
    assert error["error"]["param"] == param


def test_the_tools_of_a_response_are_planned_once(count_plans: list[str | None]) -> None:
    talk = Talk(context(tool_parser="hermes"))
    talk.create(tools=[ADD])
    [turn] = talk.started
    assert turn.answer is not None and turn.planned is not None
    assert turn.answer.plan is turn.planned.tools
    assert count_plans == ["hermes"]


def test_a_model_with_calls_that_can_not_be_read_refuses_tools() -> None:
    assert code(Talk().create(tools=[ADD])) == "unsupported_parameter"
    assert Talk().create(tools=[], tool_choice="auto") == []
