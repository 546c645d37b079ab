"""The chat's backend of a server: replies over a WebSocket, lost connections, and servers that have forgotten."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from openai.types.responses import ResponseStreamEvent
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from pydantic import TypeAdapter
from trio_websocket import ConnectionClosed, WebSocketConnection, WebSocketRequest, serve_websocket

from tests.e2e.test_serving import serving_whole
from triolet.cli.backends import remote
from triolet.cli.backends.base import ReplyRequest
from triolet.cli.backends.events import RefusedByServer, ResponseReader, waiting_sentence
from triolet.cli.backends.remote import RemoteBackend
from triolet.cli.chat import Chat, ChatOptions
from triolet.cli.conversation import ChatHistory, SavedChat
from triolet.cli.interrupts import Interrupts
from triolet.cli.prompt import Prompt
from triolet.cli.reply import Reply
from triolet.cli.screen import Screen
from triolet.cli.slash import ChatState
from triolet.client.address import ServerAddress, ServerError
from triolet.core.request.request import FinishReason
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.tools.answer import thinking_switch_of

Event = Mapping[str, Any]
QUESTION = ReplyRequest(messages=[{"role": "user", "content": "Hi"}])


@attrs.define
class Heard:
    """A sink that notes what it gets."""

    texts: list[str] = attrs.field(factory=list)
    reasons: list[str] = attrs.field(factory=list)
    notices: list[str] = attrs.field(factory=list)
    events: list[Event] = attrs.field(factory=list)

    def text(self, text: str) -> None:
        self.texts.append(text)

    def reasoning(self, text: str) -> None:
        self.texts.append(f"({text})")

    def waits_for(self, reason: Callable[[], str]) -> None:
        self.reasons.append(reason())

    def notice(self, sentence: str) -> None:
        self.notices.append(sentence)

    def starts_over(self) -> None:
        self.texts.clear()

    def event(self, event: Event) -> None:
        self.events.append(event)


# ---------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("url", "websocket", "http"),
    [
        ("ws://127.0.0.1:8000", "ws://127.0.0.1:8000/v1/responses", "http://127.0.0.1:8000/v1"),
        ("http://host:80/v1/", "ws://host/v1/responses", "http://host/v1"),
        ("wss://host/v1/responses", "wss://host/v1/responses", "https://host/v1"),
        ("https://[::1]:8443/api", "wss://[::1]:8443/api/responses", "https://[::1]:8443/api"),
        ("localhost:8000", "ws://localhost:8000/v1/responses", "http://localhost:8000/v1"),
    ],
)
def test_one_url_gives_the_addresses_of_both_protocols(url: str, websocket: str, http: str) -> None:
    address = ServerAddress.of(url)
    assert (address.websocket_url, str(address)) == (websocket, http)


@pytest.mark.parametrize("url", ["ftp://host", "host", "ws://", "http://host:99999", "ws://host/?a=b"])
def test_an_address_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="a URL such as"):
        ServerAddress.of(url)


# ------------------------------------------------------------------------------ the server of triolet


@pytest.fixture(scope="module")
def known_event() -> Callable[[object], object]:
    """The official SDK's reading of one event of a stream."""
    return TypeAdapter(ResponseStreamEvent).validate_python


async def test_a_reply_comes_over_the_socket_with_its_figures_in_events_that_the_sdk_knows(
    known_event: Callable[[object], object],
) -> None:
    async with serving_whole() as (engine, _, _, port):
        backend = await RemoteBackend.open(ServerAddress.of(f"127.0.0.1:{port}"))
        backend.wants_vendor_events = False
        assert (backend.model, backend.max_model_len) == (engine.model_name, engine.max_model_len)
        assert (
            backend.thinking_switch is thinking_switch_of(engine.tokenizer) is None
        )  # as the model's card says
        reply, heard = Reply(asked_s=trio.current_time()), Heard()
        await backend.reply(attrs.evolve(QUESTION, sampling={"max_tokens": 5}), reply, heard)
        assert reply.text == "".join(heard.texts)
        assert (reply.num_prompt_tokens, reply.num_output_tokens) == (2, 5)
        assert reply.finish_reason is FinishReason.LENGTH
        assert reply.ttft_s is not None
        for event in heard.events:
            known_event(event)
        with pytest.raises(ServerError, match="has no model 'other'; it has"):
            await backend.switch("other")
        assert backend.model == engine.model_name


# ---------------------------------------------------------------------------------- a scripted server

Turn = Callable[[WebSocketConnection], Awaitable[None]]


def event(number: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", "sequence_number": number, **fields}


def created(number: int = 0, name: str = "resp_1") -> dict[str, Any]:
    return event(number, "created", response={"id": name})


def delta(number: int, text: str) -> dict[str, Any]:
    return event(number, "output_text.delta", delta=text)


def completed(number: int) -> dict[str, Any]:
    usage = {"input_tokens": 3, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 2}}
    response = {"status": "completed", "finish_reason": "stop", "usage": usage, "metrics": {"decode_s": 1.5}}
    return event(number, "completed", response=response)


GONE = {"type": "error", "status": 404, "error": {"code": "response_not_found", "message": "Gone."}}


def script(wanted: list[dict[str, Any]], *events: Event, lost: bool = False) -> Turn:
    """A connection that notes one message and answers with events, and then lingers or is lost."""

    async def turn(socket: WebSocketConnection) -> None:
        wanted.append(json.loads(await socket.get_message()))
        for one in events:
            if one.get("type") == "await":
                wanted.append(json.loads(await socket.get_message()))
            else:
                await socket.send_message(json.dumps(one))
        if lost:
            await trio.aclose_forcefully(socket._stream)
        else:
            await socket.get_message()

    return turn


@asynccontextmanager
async def scripted(*turns: Turn, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[RemoteBackend]:
    """A backend, and the server that serves its connections one after the other in this way."""
    monkeypatch.setattr(remote, "FIRST_DELAY_S", 0.0)
    following = iter(turns)

    async def serve(request: WebSocketRequest) -> None:
        socket = await request.accept()
        try:
            await next(following)(socket)
        except ConnectionClosed:
            return

    async with trio.open_nursery() as nursery:
        server = await nursery.start(serve_websocket, serve, "127.0.0.1", 0, None)
        yield RemoteBackend(ServerAddress.of(f"127.0.0.1:{server.port}"), "m")
        nursery.cancel_scope.cancel()


async def test_a_lost_connection_is_resumed_after_the_last_event_that_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[dict[str, Any]] = []
    reply, heard = Reply(asked_s=trio.current_time()), Heard()
    turns = (
        script(said, created(), delta(1, "Hel"), lost=True),
        script(said, delta(1, "Hel"), delta(2, "lo"), completed(3)),
    )
    async with scripted(*turns, monkeypatch=monkeypatch) as backend:
        await backend.reply(QUESTION, reply, heard)
    assert said[1] == {"type": "response.resume", "response_id": "resp_1", "starting_after": 1}
    assert reply.text == "Hello"  # what came twice counts once
    assert len(heard.notices) == 1
    assert reply.stats_line().endswith("4 tok · 2.0 tok/s · prompt 3 (2 cached)")


@pytest.mark.parametrize(
    ("code", "sentence"), [(1009, "no message this long .*; /clear begins"), (1008, "close code 1008: No")]
)
async def test_what_a_server_refuses_by_the_code_of_its_close_frame_is_not_sent_again(
    monkeypatch: pytest.MonkeyPatch, code: int, sentence: str
) -> None:
    heard = Heard()

    async def refuse(socket: WebSocketConnection) -> None:
        await socket.get_message()
        await socket.aclose(code, "No")

    async with scripted(refuse, monkeypatch=monkeypatch) as backend:
        with pytest.raises((RefusedByServer, ServerError), match=sentence):
            await backend.reply(QUESTION, Reply(asked_s=trio.current_time()), heard)
    assert heard.notices == []


async def test_a_text_in_another_script_is_sent_as_it_is_and_not_as_escapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[str] = []

    async def turn(socket: WebSocketConnection) -> None:
        sent.append(str(await socket.get_message()))
        for one in (created(), completed(1)):
            await socket.send_message(json.dumps(one))

    request = attrs.evolve(QUESTION, messages=[{"role": "user", "content": "日本語"}])
    async with scripted(turn, monkeypatch=monkeypatch) as backend:
        await backend.reply(request, Reply(asked_s=trio.current_time()), Heard())
    assert "日本語" in sent[0]


async def test_a_server_that_has_forgotten_the_response_is_asked_again_with_the_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[dict[str, Any]] = []
    reply, heard = Reply(asked_s=trio.current_time()), Heard()
    turns = (
        script(said, created(), delta(1, "Hel"), lost=True),
        script(said, GONE, {"type": "await"}, created(name="resp_2"), delta(1, "Bye"), completed(2)),
    )
    async with scripted(*turns, monkeypatch=monkeypatch) as backend:
        await backend.reply(QUESTION, reply, heard)
    assert [one["type"] for one in said] == ["response.create", "response.resume", "response.create"]
    assert said[0] == said[2]
    assert "asking again with the whole conversation" in heard.notices[1]
    assert (reply.text, heard.texts) == ("Bye", ["Bye"])


async def test_a_reply_that_is_stopped_is_cancelled_in_the_server_and_keeps_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[dict[str, Any]] = []
    reply = Reply(asked_s=trio.current_time())
    turn = script(said, created(), delta(1, "Hel"), {"type": "await"}, completed(2))
    scope = trio.CancelScope()

    class Stopping(Heard):
        def text(self, text: str) -> None:
            scope.cancel()

    async with scripted(turn, monkeypatch=monkeypatch) as backend:
        with scope:
            await backend.reply(QUESTION, reply, Stopping())
    assert said[1] == {"type": "response.cancel", "response_id": "resp_1"}
    assert (reply.text, reply.num_output_tokens) == ("Hel", 4)


async def test_a_request_has_the_users_sampling_the_form_and_no_reasoning_if_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[dict[str, Any]] = []
    schema = {"type": "object"}
    request = attrs.evolve(
        QUESTION,
        sampling={"max_tokens": 5, "stop": ("a",)},
        thinks=False,
        form=StructuredOutputsParams(json=schema),
    )
    async with scripted(script(said, created(), completed(1)), monkeypatch=monkeypatch) as backend:
        await backend.reply(request, Reply(asked_s=0.0), Heard())
    asked = said[0]
    assert (asked["max_output_tokens"], asked["stop"]) == (5, ["a"])
    assert asked["reasoning"] == {"effort": "none"}
    assert asked["chat_template_kwargs"] == {"enable_thinking": False}
    assert asked["text"]["format"]["schema"] == schema
    assert asked["input"] == [{"type": "message", "role": "user", "content": "Hi"}]


async def test_a_conversation_outlives_a_server_that_is_gone_for_good_and_can_be_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(remote, "GIVE_UP_AFTER_S", -1.0)
    out, path, interrupts = io.StringIO(), tmp_path / "kept.json", Interrupts()
    turns = (script([], created(), delta(1, "Hello."), completed(2)), script([], lost=True))
    async with scripted(*turns, monkeypatch=monkeypatch) as backend, trio.open_nursery() as nursery:
        state = ChatState(conversation=ChatHistory(), defaults=backend.defaults, knows_defaults=False)
        with create_pipe_input() as keys:
            prompt = Prompt(colour=False, keys=keys, output=DummyOutput())
            screen, options = Screen(out, live=False, colour=False), ChatOptions()
            keys.send_text(f"Hi\rAnd now?\r/save {path}\r\x04")
            await Chat(backend, state, screen, prompt, interrupts, nursery, options).run()
    lost, told = out.getvalue().split("no connection to ")
    assert "/save" not in lost.split("Hello.")[1]
    assert "The conversation is still here; /save FILE keeps it" in told
    assert [one.question for one in SavedChat.read(path).history.exchanges] == ["Hi"]


def test_an_error_in_place_of_an_answer_is_told_and_ends_nothing_else() -> None:
    reader = ResponseReader(Reply(asked_s=0.0), Heard())
    error = {"code": "context_length_exceeded", "message": "Too long."}
    with pytest.raises(RefusedByServer, match=r"Too long\.; /clear begins"):
        reader.take({"type": "error", "status": 400, "error": error}, 0.0)


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        ({"type": "triolet:queue", "position": 2}, "waiting, number 3 in line"),
        ({"type": "triolet:prefill", "num_computed_tokens": 409, "num_prompt_tokens": 1000}, "reading the prompt 40 %"),
        ({"type": "triolet:restart", "restarting": ["model_runner"]}, "the engine restarts"),
        ({"type": "triolet:restart", "restarting": []}, ""),
    ],
)  # fmt: skip
def test_vendor_events_say_what_a_reply_waits_for(event: Event, sentence: str) -> None:
    assert waiting_sentence(event) == sentence
