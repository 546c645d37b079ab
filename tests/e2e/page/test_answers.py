"""What an answer can be beside text: reasoning, JSON, calls of tools, probabilities; and which model gives it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.page.browser import Event, answers, ask_with, opened, response_of, send, wait_until_connected
from tests.e2e.server import Server, serve

DONE = ".turn[data-state=done]"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]


class Scribe:
    """An engine that says these things, one after the other, and writes down what it was asked."""

    def __init__(self, *said: list[Event]) -> None:
        self.said = list(said)
        self.asked: list[dict[str, Any]] = []

    def __call__(self, asked: dict[str, Any]) -> list[Event]:
        if asked["type"] != "response.create":
            return []
        self.asked.append(asked)
        return self.said[len(self.asked) - 1]


def with_events(*events: Event, identity: str = "resp_1") -> list[Event]:
    first, *last = response_of(identity=identity)
    return [first, *events, *last]


def shot(page: Any, name: str, tmp_path: Path) -> None:
    page.screenshot(path=os.environ.get("TRIOLET_SCREENSHOTS", tmp_path) / Path(name))


@pytest.mark.slow
def test_reasoning_is_folded_and_can_be_opened(browser: Any, server: Server) -> None:
    thought = {"type": "response.reasoning_text.delta", "delta": "Let me <b>see</b>."}
    text = {"type": "response.output_text.delta", "delta": "Yes."}
    with opened(browser, server.url, Scribe(with_events(thought, text))) as page:
        send(page, "Is it?")
        page.wait_for_selector(DONE)
        assert not page.is_visible(".thought")
        page.click("summary:text-is('Thoughts')")
        assert (page.inner_text(".thought"), answers(page)) == ("Let me <b>see</b>.", ["Yes."])


@pytest.mark.slow
def test_structured_output_is_asked_for_and_shown_as_json(browser: Any, server: Server) -> None:
    scribe = Scribe(*[response_of('{"name":', ' "x~~~"}')] * 3)
    with opened(browser, server.url, scribe) as page:
        page.click("#show-settings")
        assert not page.is_visible("#settings [name=schema]")
        page.select_option("#settings [name=format]", "json_schema")
        page.fill("#settings [name=schema]", "{")
        assert page.get_attribute("#settings [name=schema]", "aria-invalid") == "true"
        assert "It must be JSON" in page.inner_text("#settings .of-json:has([name=schema]) .why")
        page.fill("#settings [name=schema]", json.dumps(SCHEMA))
        assert page.get_attribute("#settings [name=schema]", "aria-invalid") == "false"
        send(page, "Who?")
        page.wait_for_selector(f"{DONE} .hljs-attr")
        assert page.inner_text(".answer code") == '{\n  "name": "x~~~"\n}'
        page.select_option("#settings [name=format]", "json_object")
        send(page, "Who?")
        page.wait_for_selector(f"{DONE}:nth-child(2)")
        page.select_option("#settings [name=format]", "")
        send(page, "Who?")
        page.wait_for_selector(f"{DONE}:nth-child(3)")
        assert page.query_selector(".turn:nth-child(3) code") is None
    formats = [one.get("text") for one in scribe.asked]
    assert formats == [
        {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}},
        {"format": {"type": "json_object"}},
        None,
    ]
    assert all("schema" not in one and "format" not in one for one in scribe.asked)


@pytest.mark.slow
def test_nothing_is_asked_with_a_parameter_that_is_wrong(browser: Any, server: Server) -> None:
    scribe = Scribe(*[response_of("Yes.", identity=f"resp_{number}") for number in range(4)])
    wrong = "Not sent. Parameters to correct: JSON schema."
    with opened(browser, server.url, scribe) as page:
        send(page, "Who?")
        page.wait_for_selector(DONE)
        ask_with(page, format="json_schema")
        page.click("#show-settings")
        why = page.locator("#settings .of-json:has([name=schema]) .why")
        assert why.inner_text() == "It must be given."
        for text in ("", '{"type": '):
            page.fill("#settings [name=schema]", text)
            page.wait_for_selector("#unsent", state="hidden")
            send(page, "Who?")
            assert (page.inner_text("#unsent"), page.input_value("#prompt")) == (wrong, "Who?")
        page.click("#new")  # what was typed stays, and stays wrong
        assert page.input_value("#settings [name=schema]") == '{"type": '
        page.click("#suggestions button:first-child")
        assert page.inner_text("#unsent") == wrong
        page.fill("#settings [name=schema]", json.dumps(SCHEMA))
        send(page, "Who?")
        page.wait_for_selector(DONE)
        assert not page.is_visible("#unsent")

        page.fill("#settings [name=max_output_tokens]", "0")
        page.fill("#settings [name=schema]", "{")
        page.hover(".turn")
        page.click("button[aria-label='Regenerate the answer']")
        assert (
            page.inner_text("#unsent")
            == "Not sent. Parameters to correct: Longest answer, tokens; JSON schema."
        )
        page.select_option("#settings [name=format]", "")  # without it the schema is not needed
        page.hover(".turn")
        page.click("button[aria-label='Edit the question']")
        page.fill(".editor textarea", "Who else?")
        page.keyboard.press("Enter")
        assert page.inner_text("#unsent") == "Not sent. Parameters to correct: Longest answer, tokens."
        page.fill("#settings [name=max_output_tokens]", "")
        page.click(".editor button:text-is('Send')")
        page.wait_for_selector(f"{DONE} .asked:text-is('Who else?')")
    assert [(one["input"][0]["content"], one.get("text")) for one in scribe.asked] == [
        ("Who?", None),
        ("Who?", {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}),
        ("Who else?", None),
    ]


@pytest.mark.slow
def test_a_call_of_a_tool_is_shown_and_answered(browser: Any, server: Server, tmp_path: Path) -> None:
    item = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": ""}
    whole = {**item, "arguments": '{"city": "Riga"}'}
    called = with_events(
        {"type": "response.output_item.added", "item": item},
        {"type": "response.function_call_arguments.delta", "delta": '{"city": '},
        {"type": "response.function_call_arguments.delta", "delta": '"Riga"}'},
        {"type": "response.output_item.done", "item": whole},
    )
    scribe = Scribe(called, response_of("It is cold.", identity="resp_2"))
    with opened(browser, server.url, scribe) as page:
        page.click("#show-settings")
        page.fill("#settings [name=tools]", '[{"name": "weather"}]')
        assert "list of" in page.inner_text("#settings .of-json:has([name=tools]) .why")
        page.fill("#settings [name=tools]", json.dumps(TOOLS))
        send(page, "How is the weather?")
        page.wait_for_selector(f"{DONE} .calls .hljs-attr")
        assert "calls weather" in page.inner_text(".call")
        assert page.inner_text(".calls pre") == '{\n  "city": "Riga"\n}'
        shot(page, "calls.png", tmp_path)
        page.fill(".calls textarea", "-5 degrees")
        page.click(".calls button[type=submit]")
        page.wait_for_selector(f"{DONE}:nth-child(2)")
        assert answers(page)[-1] == "It is cold."
        assert page.inner_text(".turn:nth-child(2) .asked") == "-5 degrees"
        assert not page.is_visible(".turn:nth-child(1) .calls textarea")
    assert scribe.asked[0]["tools"] == TOOLS
    output = {"type": "function_call_output", "call_id": "call_1", "output": "-5 degrees"}
    assert (scribe.asked[1]["input"], scribe.asked[1]["previous_response_id"]) == ([output], "resp_1")


@pytest.mark.slow
def test_probabilities_of_tokens_are_shown_by_mouse_and_by_keys(
    browser: Any, server: Server, tmp_path: Path
) -> None:
    def token(text: str, share: float, *others: tuple[str, float]) -> dict[str, Any]:
        top = [{"token": name, "logprob": math.log(value)} for name, value in ((text, share), *others)]
        return {"token": text, "logprob": math.log(share), "top_logprobs": top}

    tokens = [token("Yes", 0.95, ("No", 0.04)), token(" sir", 0.25, ("\n", 0.5)), token("<b>", 0.001)]
    told = [
        {"type": "response.output_text.delta", "delta": one["token"], "logprobs": [one]} for one in tokens
    ]
    scribe = Scribe(with_events(*told))
    with opened(browser, server.url, scribe) as page:
        page.click("#show-settings")
        page.check("#settings [name=probabilities]")
        send(page, "Is it?")
        page.wait_for_selector(DONE)
        page.hover(".turn")
        page.click("button[aria-label='Probabilities of tokens']")
        shown = [
            (one.inner_text(), one.get_attribute("class")) for one in page.query_selector_all(".tokens span")
        ]
        assert shown == [("Yes", "level0"), (" sir", "level3"), ("<b>", "level4")]
        page.hover(".tokens span:nth-child(2)")
        assert page.inner_text(".card").replace("\xa0", " ") == "␣sir 25 % · ↵ 50 %"
        shot(page, "tokens.png", tmp_path)
        page.focus(".tokens")
        page.keyboard.press("ArrowLeft")
        assert page.inner_text(".card").replace("\xa0", " ") == "Yes 95 % · No 4.0 %"
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.inner_text(".card").replace("\xa0", " ") == "<b> 0.1 %"
        page.click("button[aria-label='Probabilities of tokens']")
        assert page.is_visible(".answer") and not page.is_visible(".tokens")
    assert scribe.asked[0]["top_logprobs"] == 5
    assert scribe.asked[0]["include"] == ["message.output_text.logprobs"]


@pytest.mark.slow
def test_the_engine_takes_what_the_page_asks_with(browser: Any, server: Server) -> None:
    with opened(browser, server.url) as page:
        common = {
            "min_p": 0.05,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "seed": 1,
            "max_output_tokens": 8,
        }
        for form in ({"tools": json.dumps(TOOLS)}, {"format": "json_schema", "schema": json.dumps(SCHEMA)}):
            ask_with(page, **common, **form)
            send(page, "Hello!")
            page.wait_for_selector(".turn:not([data-state=active])")
            state = page.get_attribute(".turn", "data-state")
            assert state in ("done", "cut"), page.inner_text(".facts")
        ask_with(page, **common, format="json_object", probabilities=True)
        send(page, "Hello!")
        page.wait_for_selector(".turn:not([data-state=active])")
        page.hover(".turn")
        page.click("button[aria-label='Probabilities of tokens']")
        assert page.inner_text(".tokens").lstrip().startswith("{")


@pytest.mark.slow
def test_a_chat_that_fills_the_context_goes_on_by_truncation_and_has_a_way_out(browser: Any) -> None:
    with serve("--max-model-len", "64") as server, opened(browser, server.url) as page:
        ask_with(page, ignore_eos=True)
        send(page, "Tell me a story")
        page.wait_for_selector(".turn[data-state=cut]")
        assert page.inner_text(".facts .state") == "cut: the context is full"
        ask_with(page, ignore_eos=True, max_output_tokens=30)
        for number, question in enumerate(("Tell me a story", "And then?", "And then?"), start=1):
            send(page, question)  # the beginning of the chat makes room for it
            page.wait_for_selector(f":nth-match(.turn, {number})")
            page.wait_for_selector(".turn[data-state=active]", state="detached")
            assert page.query_selector(".turn[data-state=failed]") is None
            assert len(answers(page)) == number and answers(page)[-1]
        ask_with(page)
        send(page, "very " * 100)  # no truncation makes room for that
        page.wait_for_selector(".turn[data-state=failed]")
        page.click("button:text-is('New chat with this question')")
        assert page.query_selector(".turn") is None
        assert page.input_value("#prompt").startswith("very very")
        page.fill("#prompt", "Hello!")
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn:not([data-state=active])")
        assert answers(page)[0]


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1200])
def test_a_model_can_be_chosen_where_there_are_several(
    browser: Any, server: Server, width: int, tmp_path: Path
) -> None:
    cards = [{"id": name, "max_model_len": 100} for name in ("small", "large")]
    scribe = Scribe(*[response_of("Hi.")] * 3)
    with opened(browser, server.url, scribe, viewport={"width": width, "height": 800}) as page:
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": cards}))
        for name in ("small", "large", "large"):  # the choice outlives the page
            page.reload()
            wait_until_connected(page)
            if len(scribe.asked) == 1:
                page.select_option("#model select", "large")
            send(page, "Hello!")
            page.wait_for_selector(DONE)
            assert scribe.asked[-1]["model"] == name
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        shot(page, f"models-{width}.png", tmp_path)
