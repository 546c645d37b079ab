"""The page at `/` in a browser: the first steps of a user who has just started the server."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.page.browser import (
    PATIENCE_S,
    answers,
    ask_with,
    opened,
    send,
    wait_for_idle,
    wait_for_text,
    wait_until,
)
from tests.e2e.server import Server, serve

ACTIVE, DONE = ".turn[data-state=active]", ".turn[data-state=done]"
# Long enough to do something meanwhile: the model may not end it.
ENDLESS = {"ignore_eos": True, "seed": 1}


@pytest.mark.slow
def test_a_question_is_answered_and_the_next_one_continues_it(page: Any) -> None:
    assert page.inner_text("#model") == "triolet-nano"
    assert page.is_visible("#welcome")
    page.click("#suggestions button:first-child")
    page.wait_for_selector(DONE)
    assert "triolet-nano" in answers(page)[0]
    assert not page.is_visible("#welcome")
    send(page, "Hello!")
    page.wait_for_selector(f"{DONE}:nth-child(2)")
    facts = page.inner_text(".turn:nth-child(2) .facts").replace("\xa0", " ")
    assert "TTFT" in facts and "tokens/s" in facts and "cached" in facts


@pytest.mark.slow
def test_the_first_words_say_which_model_it_is_and_what_to_try(browser: Any, server: Server) -> None:
    def words() -> tuple[str, str, int]:
        shown = page.inner_text(".lead"), page.inner_text("#first-words")
        return (*shown, len(page.query_selector_all("#suggestions button")))

    with opened(browser, server.url) as page:
        lead, hint, count = words()
        assert (lead, count) == ("Ask triolet-nano.", 4)
        assert f"reads up to {server.model()['max_model_len']:,} tokens" in hint
        card = {"id": "other<b>", "root": "/models/other", "max_model_len": 4096}
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))
        page.reload()
        page.wait_for_selector("#connection[data-state=open]", state="attached")
        lead, hint, count = words()
        assert (lead, count) == ("Ask other<b>.", 4)
        assert "reads up to 4,096 tokens" in hint and "comes with triolet" not in hint


def test_an_answer_streams_and_can_be_stopped(page: Any, server: Server) -> None:
    ask_with(page, **ENDLESS)
    send(page, "Count from 1 to 40")
    wait_for_text(page, 5)
    assert page.is_visible("#stop") and not page.is_visible("#send")
    early = answers(page)[0]
    wait_for_text(page, len(early) + 5)
    assert answers(page)[0].startswith(early)
    page.keyboard.press("Escape")
    page.wait_for_selector(".turn[data-state=stopped]")
    assert "stopped" in page.inner_text(".facts .state")
    assert page.is_visible("#send")
    wait_for_idle(server)


@pytest.mark.slow
def test_a_fork_answers_beside_the_first(page: Any) -> None:
    send(page, "Hello!")
    page.wait_for_selector(DONE)
    page.keyboard.press("Alt+f")
    page.wait_for_selector("[data-lane=b]")
    assert answers(page, "b") == answers(page, "a")
    send(page, "Who are you?")
    for lane in "ab":
        page.wait_for_selector(f"[data-lane={lane}] {DONE}:nth-child(2)")
    page.check("#target input[value=b]", force=True)
    send(page, "Count from 1 to 3")
    page.wait_for_selector(f"[data-lane=b] {DONE}:nth-child(3)")
    assert (len(answers(page, "a")), len(answers(page, "b"))) == (2, 3)
    page.click("[data-lane=a] h2 button")
    assert page.query_selector("[data-lane=a]") is None
    send(page, "Hello!")
    page.wait_for_selector(f"[data-lane=b] {DONE}:nth-child(4)")


@pytest.mark.slow
def test_two_lanes_answer_at_the_same_time_and_stop_together(page: Any) -> None:
    ask_with(page, **ENDLESS)
    send(page, "Hello!")
    wait_for_text(page, 5)
    page.click("#stop")
    page.wait_for_selector(".turn[data-state=stopped]")
    page.click("#fork")
    send(page, "Tell me a story")
    wait_for_text(page, 5, "a")
    wait_for_text(page, 5, "b")
    assert len(page.query_selector_all(ACTIVE)) == 2
    page.keyboard.press("Escape")
    page.wait_for_selector(ACTIVE, state="detached")


@pytest.mark.slow
def test_a_lost_connection_comes_back_and_the_answer_goes_on(page: Any) -> None:
    # The page's WebSocket is broken from outside while an answer streams, as a change of networks breaks it.
    page.add_init_script(
        "const Real = WebSocket; window.sockets = [];"
        "window.WebSocket = class extends Real { constructor(...a) { super(...a); window.sockets.push(this); } };"
    )
    page.reload()
    ask_with(page, **ENDLESS)
    send(page, "Tell me a story")
    wait_for_text(page, 5)
    page.evaluate("window.sockets.at(-1).close()")
    page.wait_for_selector("#connection[data-state=waiting]", state="attached")
    heard = answers(page)[0]
    page.wait_for_selector("#connection[data-state=open]", state="attached")
    wait_for_text(page, len(heard) + 5)
    assert answers(page)[0].startswith(heard)
    page.keyboard.press("Escape")
    page.wait_for_selector(".turn[data-state=stopped]")


# Every message of a WebSocket takes this much longer, in either direction.
SLOW_SOCKET = """
    const Fast = window.WebSocket;
    window.WebSocket = class extends Fast {
        send(data) { setTimeout(() => super.send(data), LATENCY_MS); }
        set onmessage(hear) { super.onmessage = (message) => setTimeout(() => hear(message), LATENCY_MS); }
    };
"""


ROUNDS = range(20)
"""Delays from 0 to 400 ms in each direction; every round waits for another time before New."""


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [[2], ROUNDS], ids=["one", "twenty"])
def test_a_new_chat_during_an_answer_shows_the_new_answer(
    browser: Any, server: Server, rounds: Sequence[int]
) -> None:
    for number in rounds:
        latency_ms = 400 * number // (len(ROUNDS) - 1)
        with opened(browser, server.url) as page:
            page.add_init_script(SLOW_SOCKET.replace("LATENCY_MS", str(latency_ms)))
            ask_with(page, **ENDLESS)
            # New before the first event of an answer, and in its middle.
            for wait_ms in (0, 30, 2 * latency_ms, 2 * latency_ms + 300):
                send(page, "Tell me a story")
                page.wait_for_timeout(wait_ms)
                page.click("#new")
                send(page, "Count from 1 to 3")
                wait_for_text(page, 8)
                [answer] = answers(page)
                assert answer.startswith("1, 2, 3"), (latency_ms, wait_ms, answer)
                assert page.query_selector(".turn[data-state=failed]") is None
                page.click("#new")
                page.wait_for_timeout(
                    2 * latency_ms + 100
                )  # the cancel of the last answer has to leave the page


@pytest.mark.slow
def test_closing_the_page_frees_what_it_had_asked_for(browser: Any, server: Server) -> None:
    with opened(browser, server.url) as page:
        ask_with(page, **ENDLESS)
        send(page, "Tell me a story")
        wait_for_text(page, 5)
        assert server.metrics()["num_requests_running"] == 1
        page.close(run_before_unload=False)
    wait_for_idle(server)


@pytest.mark.slow
def test_a_reload_frees_it_even_if_the_last_message_is_lost(browser: Any, server: Server) -> None:
    with opened(browser, server.url) as page:
        page.add_init_script(
            "const send = WebSocket.prototype.send; WebSocket.prototype.send = function (data) {"
            "if (!data.includes('response.cancel')) send.call(this, data); };"
        )
        ask_with(page, **ENDLESS)
        send(page, "Tell me a story")
        wait_for_text(page, 5)
        assert server.metrics()["num_requests_running"] == 1
        page.reload()
        wait_for_idle(server)


@pytest.mark.slow
def test_parameters_go_along(page: Any) -> None:
    page.click("#show-settings")
    page.fill("#settings [name=max_output_tokens]", "3")
    page.fill("#settings [name=seed]", "1")
    send(page, "Tell me a story")
    page.wait_for_selector(".turn[data-state=cut]")
    assert "3\xa0tokens" in page.inner_text(".facts")
    page.fill("#settings [name=max_output_tokens]", "0")
    assert page.query_selector("#settings .wrong") is not None
    page.click("#settings > button")
    assert page.input_value("#settings [name=max_output_tokens]") == ""


@pytest.mark.slow
def test_the_numbers_of_the_page_are_the_sum_over_the_models_of_the_server(page: Any) -> None:
    lines = [
        f'triolet:{name}model_name="{model}"}} {number}'
        for name in ("num_requests_running{", "generation_tokens_total{", 'kv_blocks{state="free",')
        for model, number in (("one", "2.0"), ("two", "3.0"))
    ]
    parse = "async (text) => (await import('/static/metrics.js')).parse(text)"
    shown = page.evaluate(parse, "\n".join(lines))
    assert (shown["running"], shown["tokens"], shown["blocks"]) == (5, 5, {"free": 5})


@pytest.mark.slow
def test_the_engine_is_shown_as_it_is(page: Any) -> None:
    send(page, "Tell me a short story")
    page.wait_for_selector(DONE)
    wait_until(page, "['ttft', 'gap'].every((id) => document.getElementById(id).textContent !== '–')")
    wait_until(page, "document.getElementById('in_use').textContent === '0'")
    wait_until(page, "[...document.querySelectorAll('.curve')].every((one) => one.getAttribute('d'))")
    total, *states = (
        int(page.inner_text(f"#{name}").replace(",", ""))
        for name in ("blocks-total", "free", "cached", "in_use")
    )
    assert total == sum(states)
    assert states[1] > 0
    for chart, names in (
        ("rates", ("answers", "prompts")),
        ("requests", ("running", "waiting")),
        ("gaps", ("mean",)),
    ):
        assert [one.get_attribute("d")[0] for one in page.query_selector_all(f"#{chart} .curve")] == [
            "M"
        ] * len(names)
        label = page.get_attribute(f"#{chart}", "aria-label")
        assert all(f"{name} " in label for name in names) and "; most " in label


@pytest.mark.slow
def test_numbers_of_a_server_that_is_away_are_said_to_be_old(browser: Any) -> None:
    with serve() as server, opened(browser, server.url) as page:
        send(page, "Tell me a short story")
        page.wait_for_selector(DONE)
        page.wait_for_selector("#ttft:not(:text-is('–'))")
        fresh = _colour(page, "#running")
        assert page.inner_text("#engine-note") == ""

        server.process.send_signal(signal.SIGSTOP)
        page.wait_for_selector("#engine[data-stale]")
        assert "The server does not answer. These numbers are from " in page.inner_text("#engine-note")
        assert _colour(page, "#running") != fresh
        server.process.send_signal(signal.SIGCONT)
        page.wait_for_selector("#engine:not([data-stale])")
        assert (page.inner_text("#engine-note"), _colour(page, "#running")) == ("", fresh)

        server.stop()
        page.wait_for_selector("#engine[data-stale]")
        old = page.inner_text("#cached")
        assert old != "0"
        note = page.inner_text("#engine-note")
        page.wait_for_timeout(2500)
        assert page.inner_text("#engine-note") == note  # the time of the numbers, not of the attempt
        with serve("--port", str(server.port)) as other:
            page.wait_for_selector("#engine:not([data-stale])")
            assert (page.inner_text("#cached"), page.inner_text("#ttft")) == ("0", "–")
            page.wait_for_selector("#connection[data-state=open]", state="attached")
            send(page, "Tell me a short story")
            page.wait_for_selector(f"{DONE}:nth-child(2)")
            page.wait_for_selector("#ttft:not(:text-is('–'))")
            cached = round(other.metrics()['kv_blocks{state="cached"}'])
            page.wait_for_selector(f"#cached:text-is('{cached}')")


# Colours of the border of everything that has one and can be used, and of what lies on both of its sides.
BORDERS = """() => {
    const isClear = (colour) => colour === "transparent" || colour.endsWith(", 0)");
    const under = (node) => {
        const colour = getComputedStyle(node).backgroundColor;
        return isClear(colour) ? under(node.parentElement) : colour;
    };
    const found = {};
    const controls = "button, textarea, select, .line, #target span, input:not([type=range])";
    for (const one of document.querySelectorAll(controls)) {
        const style = getComputedStyle(one);
        const isShown = one.checkVisibility({ opacityProperty: true }) && style.borderTopStyle === "solid";
        if (!isShown || parseFloat(style.borderTopWidth) === 0 || isClear(style.borderTopColor)) continue;
        found[one.id || one.name || one.className || one.textContent] =
            [style.borderTopColor, under(one), under(one.parentElement)];
    }
    return found;
}"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_borders_of_controls_have_a_contrast_of_three(browser: Any, server: Server, scheme: str) -> None:
    with opened(browser, server.url, color_scheme=scheme) as page:
        page.click("#show-settings")
        found = page.evaluate(BORDERS)
        send(page, "Hello!")
        page.wait_for_selector(DONE)
        page.click("#show-chats")
        page.hover(".turn")
        page.click("button[aria-label='Edit the question']")
        found |= {f"chats {name}": colours for name, colours in page.evaluate(BORDERS).items()}
        page.click("#fork")
        found |= page.evaluate(BORDERS)
        page.evaluate("document.getElementById('key').showModal()")
        found |= page.evaluate(BORDERS)
    assert {
        "Who are you?",
        "line",
        "instructions",
        "seed",
        "stop",
        "both",
        "key-value",
        "format",
        "chats search",
    } <= found.keys()
    low = {
        name: (round(_contrast(border, inside), 2), round(_contrast(border, outside), 2))
        for name, (border, inside, outside) in found.items()
        if min(_contrast(border, inside), _contrast(border, outside)) < 3
    }
    assert low == {}


COLOUR_OF = """(name) => {
    const probe = document.body.appendChild(document.createElement("i"));
    probe.style.color = `var(${name})`;
    const colour = getComputedStyle(probe).color;
    probe.remove();
    return colour;
}"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_small_text_has_a_contrast_of_four_and_a_half(browser: Any, server: Server, scheme: str) -> None:
    with opened(browser, server.url, color_scheme=scheme) as page:
        grounds = [page.evaluate(COLOUR_OF, name) for name in ("--paper", "--raised")]
        for name in ("--ink", "--soft", "--accent", "--warn"):
            colour = page.evaluate(COLOUR_OF, name)
            assert min(_contrast(colour, ground) for ground in grounds) >= 4.5, name


# Where each character of a text is, by the element that holds it.
LEFTS = """([selector, text]) => {
    const walker = document.createTreeWalker(document.querySelector(selector), NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const start = node.data.indexOf(text);
        if (start < 0) continue;
        return [...text].map((_, at) => {
            const range = document.createRange();
            range.setStart(node, start + at);
            range.setEnd(node, start + at + 1);
            return range.getBoundingClientRect().left;
        });
    }
}"""
OVERRIDE = "\u202e"


@pytest.mark.slow
def test_a_text_of_the_other_direction_turns_nothing_round_outside_of_it(
    browser: Any, server: Server
) -> None:
    def lefts(selector: str, text: str) -> list[float]:
        found: list[float] = tab.evaluate(LEFTS, [selector, text])
        return found

    def answer(socket: Any, message: str) -> None:
        asked = json.loads(message)
        response = {"id": "resp_1", "status": "incomplete", "usage": {"output_tokens": 3, "input_tokens": 5}}
        text = f"abc {OVERRIDE}def\nplain\n\u05e9\u05dc\u05d5\u05dd\nlast"
        events: tuple[dict[str, Any], ...] = (
            {"type": "response.created", "response": {"id": "resp_1"}},
            {"type": "response.output_text.delta", "delta": text},
            {"type": "response.incomplete", "response": response},
        )
        for number, event in enumerate(events):
            said = {**event, "sequence_number": number, "stream_id": asked["stream_id"]}
            socket.send(json.dumps(said))

    with browser.new_context(viewport={"width": 1200, "height": 800}) as window:
        tab = window.new_page()
        models = {"data": [{"id": f"model{OVERRIDE}name"}]}
        tab.route("**/v1/models", lambda route: route.fulfill(json=models))
        tab.route_web_socket(
            "**/v1/responses", lambda socket: socket.on_message(lambda message: answer(socket, message))
        )
        tab.goto(server.url)
        tab.evaluate(f"localStorage.setItem('triolet.options', '{json.dumps(dict(stop=OVERRIDE, seed=12))}')")
        tab.reload()
        tab.wait_for_selector("#connection[data-state=open]", state="attached")
        send(tab, f"asked {OVERRIDE}this")
        tab.wait_for_selector(".turn[data-state=cut]")
        tab.click("#fork")

        override = lefts(".answer", "def")
        assert override == sorted(override, reverse=True)  # inside, the text is as it was written
        for selector, text in (
            ("#connection", "connected"),
            ("[data-lane=a] h2", "seed"),
            (".answer", "plain"),
            (".answer", "last"),
            (".facts .state", "cut at the limit"),
        ):
            positions = lefts(selector, text)
            assert positions and positions == sorted(positions), selector
        assert lefts("#model", "model")[0] < lefts("#connection", "c")[0]
        # A line in Hebrew begins at the right, and those around it at the left.
        hebrew = lefts(".answer", "\u05e9\u05dc\u05d5\u05dd")
        assert hebrew == sorted(hebrew, reverse=True)
        assert min(hebrew) > max(lefts(".answer", "plain") + lefts(".answer", "last"))


@pytest.mark.slow
def test_an_answer_that_has_not_begun_says_what_it_waits_for(browser: Any, server: Server) -> None:
    sockets: list[Any] = []
    asked: list[dict[str, Any]] = []

    def hear(socket: Any, message: str) -> None:
        sockets.append(socket)
        asked.append(json.loads(message))
        tell({"type": "response.created", "response": {"id": "resp_1"}, "sequence_number": 0})

    def tell(event: dict[str, Any]) -> None:
        sockets[-1].send(json.dumps({"stream_id": "a", "response_id": "resp_1", **event}))

    def shows(text: str) -> None:
        tab.wait_for_selector(f".waits:text-is('{text}')")

    with browser.new_context() as window:
        tab = window.new_page()
        tab.set_default_timeout(1000 * PATIENCE_S)
        tab.route_web_socket(
            "**/v1/responses", lambda socket: socket.on_message(lambda message: hear(socket, message))
        )
        tab.goto(server.url)
        tab.wait_for_selector("#connection[data-state=open]", state="attached")
        send(tab, "Hello!")
        tab.wait_for_selector(ACTIVE)
        while not asked:
            tab.wait_for_timeout(20)
        assert asked[0]["triolet_events"] is True
        for position, text in ((22, "23rd"), (11, "12th"), (2, "3rd"), (1, "2nd")):
            tell({"type": "triolet:queue", "position": position})
            shows(f"waiting, {text} in line")
        tell({"type": "triolet:queue", "position": 9, "response_id": "resp_0"})  # of another answer
        tell({"type": "triolet:queue", "position": 0})
        shows("waiting, next in line")
        tell({"type": "triolet:prefill", "num_computed_tokens": 409, "num_prompt_tokens": 1000})
        shows("reading the prompt 40 %")
        tell({"type": "triolet:restart", "restarting": ["model_runner", "scheduler"]})
        shows("engine restarting")
        tell({"type": "triolet:restart", "restarting": []})
        shows("reading the prompt 40 %")
        tell({"type": "response.output_text.delta", "delta": "Hi", "sequence_number": 1})
        tab.wait_for_selector(".waits", state="hidden")
        assert answers(tab) == ["Hi"]
        tell({"type": "triolet:restart", "restarting": ["model_runner"]})  # in the middle of an answer, too
        shows("engine restarting")
        tell({"type": "response.output_text.delta", "delta": "!", "sequence_number": 2})
        tell({"type": "triolet:restart", "restarting": []})
        tab.wait_for_selector(".waits", state="hidden")
        assert answers(tab) == ["Hi!"]


@pytest.mark.slow
def test_a_question_behind_another_one_is_shown_in_line_and_then_answered(browser: Any) -> None:
    with serve("--max-num-seqs", "1") as server, opened(browser, server.url) as page:
        ask_with(page, **ENDLESS)
        send(page, "Tell me a story")
        wait_for_text(page, 5)
        with opened(browser, server.url) as other:
            send(other, "Who are you?")
            other.wait_for_selector(".waits:text-is('waiting, next in line')")
            page.keyboard.press("Escape")
            other.wait_for_selector(DONE)
            assert "triolet-nano" in answers(other)[0]
            assert not other.is_visible(".waits")


def runner_of(server: Server) -> int:
    """Return the process that computes the model: the child of the server's fork server."""
    fork_servers: set[int] = set()
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            process_id = int(path.parent.name)
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if b"triolet.workers.fork_server" in path.read_bytes():
                parents[process_id] = parent
                if parent == server.process.pid:
                    fork_servers.add(process_id)
    [runner] = [process_id for process_id, parent in parents.items() if parent in fork_servers]
    return runner


@pytest.mark.slow
def test_a_crash_in_the_middle_of_an_answer_is_shown_until_the_answer_goes_on(browser: Any) -> None:
    with serve() as server, opened(browser, server.url) as page:
        ask_with(page, **ENDLESS)
        send(page, "Tell me a story")
        wait_for_text(page, 5)
        os.kill(runner_of(server), signal.SIGKILL)
        page.wait_for_selector(".waits:text-is('engine restarting')")
        [before] = answers(page)
        page.wait_for_selector(".waits", state="hidden")
        wait_for_text(page, len(before) + 5)
        assert answers(page)[0].startswith(before)


def test_markup_in_a_text_stays_text(page: Any) -> None:
    send(page, "<img src=x onerror=alert(1)><b>bold</b>")
    page.wait_for_selector(".turn")
    assert page.inner_text(".asked") == "<img src=x onerror=alert(1)><b>bold</b>"
    assert page.query_selector(".asked *") is None


@pytest.mark.slow
def test_a_key_is_asked_for_where_there_are_keys(browser: Any) -> None:
    with serve("--api-keys", "secret-key") as server, browser.new_context() as window:
        page = window.new_page()
        page.goto(server.url)
        page.wait_for_selector("#key[open]")
        page.fill("#key-value", "secret-key")
        page.keyboard.press("Enter")
        page.wait_for_selector("#connection[data-state=open]", state="attached")
        send(page, "Hello!")
        page.wait_for_selector(DONE)
        assert answers(page)[0]


@pytest.mark.slow
def test_a_key_of_any_visible_characters_opens_the_page_and_a_refused_one_is_asked_for_again(
    browser: Any,
) -> None:
    right = "pN3/xQ==-~;"
    with serve("--api-keys", right) as server, browser.new_context() as window:
        page = window.new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(server.url)
        page.wait_for_selector("#key[open]")
        assert not page.is_visible("#key-refused")
        for wrong in ("ключ", "other"):
            page.evaluate("document.getElementById('key-refused').hidden = true")
            page.fill("#key-value", wrong)
            page.keyboard.press("Enter")
            page.wait_for_selector("#key-refused:not([hidden])")
            assert page.inner_text("#key-refused") == "This key is refused."
            assert page.evaluate("sessionStorage.length") == 0
        page.fill("#key-value", right)
        page.keyboard.press("Enter")
        page.wait_for_selector("#connection[data-state=open]", state="attached")
        page.reload()
        page.wait_for_selector("#connection[data-state=open]", state="attached")
        page.evaluate("sessionStorage.setItem('triolet.key', 'changed meanwhile')")
        page.reload()
        page.wait_for_selector("#key[open]")
        assert page.is_visible("#key-refused")
        page.reload()  # the page is left before it was connected
        page.wait_for_selector("#key[open]")
    assert complaints == []


@pytest.mark.slow
def test_a_message_that_is_too_long_for_the_server_fails_with_its_reason_and_is_not_sent_again(
    browser: Any,
) -> None:
    with serve("--max-message-bytes", "4096") as server, opened(browser, server.url) as page:
        page.fill("#prompt", "x" * 5000)
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn[data-state=failed]")
        said = page.inner_text(".turn .state")
        assert said == "The server refused this: a message must have at most 4096 bytes."
        page.wait_for_selector("#connection[data-state=open]", state="attached")
        send(page, "Hello!")
        page.wait_for_selector(DONE)
        assert page.evaluate("document.querySelectorAll('.turn[data-state=active]').length") == 0


@pytest.mark.slow
def test_a_page_that_cannot_begin_says_why(browser: Any, server: Server) -> None:
    with browser.new_context() as window:
        page = window.new_page()
        refusal = {"error": {"message": "The server does not answer to this name."}}
        page.route("**/v1/models", lambda route: route.fulfill(status=403, json=refusal))
        page.goto(server.url)
        page.wait_for_selector("#connection[data-state=failed]", state="attached")
        said = "The server does not answer to this name. Reload the page to try again."
        assert page.inner_text("#unsent") == said
        page.unroute("**/v1/models")
        page.add_init_script(
            "window.WebSocket = class { constructor() { throw new SyntaxError('This socket is invalid'); } };"
        )
        page.reload()
        page.wait_for_selector("#connection[data-state=failed]", state="attached")
        assert page.inner_text("#unsent") == "This socket is invalid. Reload the page to try again."


@pytest.mark.slow
def test_light_and_dark_can_be_turned_and_are_remembered(page: Any) -> None:
    was_light = _lightness(page.evaluate("getComputedStyle(document.body).backgroundColor")) > 384
    for is_light in (not was_light, was_light):
        page.click("#theme")
        page.reload()
        page.wait_for_selector("#connection[data-state=open]", state="attached")
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (_lightness(paper) > 384) == is_light


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (360, "light"),
        (1440, "dark"),
        *(
            pytest.param(width, scheme, marks=pytest.mark.slow)
            for width, scheme in ((360, "dark"), (768, "light"), (768, "dark"), (1440, "light"))
        ),
    ],
)
def test_nothing_sticks_out_at_any_width(
    width: int, scheme: str, browser: Any, server: Server, tmp_path: Path
) -> None:
    with opened(browser, server.url, color_scheme=scheme) as page:
        page.set_viewport_size({"width": width, "height": 800})
        ask_with(page, max_output_tokens=80)
        send(page, "Tell me a short story " + "very " * 40 + "long" * 60)
        page.wait_for_selector(".turn:not([data-state=active])")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelector('.turns').scrollWidth") <= width
        for control in ("#prompt", "#send", "#fork", "#show-settings", "#theme"):
            box = page.query_selector(control).bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width, control
            assert box["y"] >= 0 and box["y"] + box["height"] <= 800, control
        if page.is_hidden("#engine"):
            page.click("#show-engine")
        for chart in ("#rates", "#requests", "#gaps", "#blocks"):
            box = page.query_selector(chart).bounding_box()
            assert box is not None and box["width"] >= 100, chart
            assert box["x"] >= 0 and box["x"] + box["width"] <= width, chart
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.query_selector("#prompt").bounding_box()["y"] < 800
        ink, paper = (
            page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")
        )
        assert (_lightness(ink) > _lightness(paper)) == (scheme == "dark")
        page.screenshot(path=os.environ.get("TRIOLET_SCREENSHOTS", tmp_path) / Path(f"{scheme}-{width}.png"))


def _lightness(colour: str) -> int:
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")[:3])


def _colour(page: Any, selector: str) -> str:
    colour: str = page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).color")
    return colour


def _contrast(one: str, other: str) -> float:
    """Contrast ratio of two opaque colours. Source: WCAG 2.2, "contrast ratio"."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    red, green, blue = (
        part / 3294.6 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4  # 3294.6 = 255 * 12.92
        for part in map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
