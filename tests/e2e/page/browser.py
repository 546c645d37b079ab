"""The page in Chromium: what its tests do, and an engine that says what a test wants."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.e2e.server import Server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

PATIENCE_S = 120.0  # on a busy machine; nothing takes this long when all is well

Event = dict[str, Any]
Answer = Callable[[dict[str, Any]], list[Event]]
"""What is said to one event of the page, without stream and number."""


@contextmanager
def opened(browser: Any, url: str, answer: Answer | None = None, **context: Any) -> Iterator[Any]:
    """The page, connected; it must not have complained when the scope is left.

    Args:
        browser: Chromium.
        url: of the server.
        answer: stands for the engine; None for the server's own.
        **context: options of the window.
    """
    complaints: list[str] = []
    with browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **context}) as window:
        page = window.new_page()
        page.set_default_timeout(1000 * PATIENCE_S)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        if answer is not None:
            page.route_web_socket("**/v1/responses", lambda socket: listen(socket, answer))
        page.goto(url)
        wait_until_connected(page)
        yield page
    assert [one for one in complaints if "WebSocket" not in one and "ERR_" not in one] == []


def listen(socket: Any, answer: Answer) -> None:
    def hear(message: str) -> None:
        asked = json.loads(message)
        for number, event in enumerate(answer(asked)):
            socket.send(json.dumps({"stream_id": asked["stream_id"], "sequence_number": number, **event}))

    socket.on_message(hear)


def wait_until_connected(page: Any) -> None:
    page.wait_for_selector("#connection[data-state=open]", state="attached")


def wait_until(page: Any, expression: str, argument: object = None) -> None:
    """Wait until an expression of the page holds.

    Playwright's `wait_for_function` does so where it holds at once only: later it lets the page evaluate a text, which
    the page forbids.
    """
    until_s = time.monotonic() + PATIENCE_S
    while not page.evaluate(expression, argument):
        assert time.monotonic() < until_s, f"it has not come true: {expression}"
        page.wait_for_timeout(20)


def wait_for_idle(server: Server) -> None:
    """Wait until the server computes nothing."""
    until_s = time.monotonic() + PATIENCE_S
    while server.metrics()["num_requests_running"] or server.metrics()['kv_blocks{state="in_use"}']:
        assert time.monotonic() < until_s, "it computes what nothing waits for"
        time.sleep(0.05)


def response_of(
    *texts: str, identity: str = "resp_1", status: str = "completed", **fields: Any
) -> list[Event]:
    """Events of an answer that comes in these pieces."""
    usage = {"input_tokens": 5, "output_tokens": len(texts)}
    return [
        {"type": "response.created", "response": {"id": identity}},
        *({"type": "response.output_text.delta", "delta": text} for text in texts),
        {
            "type": f"response.{status}",
            "response": {"id": identity, "status": status, "usage": usage, **fields},
        },
    ]


def says(*texts: str) -> Answer:
    """An engine that always answers this."""

    def answer(asked: dict[str, Any]) -> list[Event]:
        return response_of(*texts) if asked["type"] == "response.create" else []

    return answer


def send(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def answers(page: Any, lane: str = "a") -> list[str]:
    return [one.inner_text() for one in page.query_selector_all(f"[data-lane={lane}] .answer")]


def ask_with(page: Any, **options: Any) -> None:
    """Begin again, with these parameters."""
    page.evaluate(f"localStorage.setItem('triolet.options', '{json.dumps(options)}')")
    page.reload()
    wait_until_connected(page)


def wait_for_text(page: Any, length: int, lane: str = "a") -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not answers(page, lane) or len(answers(page, lane)[-1]) <= length:
        assert time.monotonic() < until_s, f"no text in lane {lane}: {answers(page, lane)}"
        page.wait_for_timeout(20)
