"""The page for those that see little, use the keyboard, or have it read out: axe-core's rules, and order."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.page.browser import Event, opened, response_of, says, send, wait_until
from tests.e2e.page.test_markdown import SAMPLE
from tests.e2e.server import Server

# axe-core 4.14.1 (MPL-2.0), axe.min.js of https://registry.npmjs.org/axe-core/-/axe-core-4.14.1.tgz
AXE = Path(__file__).parent / "axe" / "axe.min.js"
SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
DONE = ".turn[data-state=done]"
SETTLED = """new Promise(requestAnimationFrame).then(() => new Promise(requestAnimationFrame)).then(() => {
  const finite = document.getAnimations().filter((one) => one.effect.getComputedTiming().endTime < Infinity);
  return Promise.allSettled(finite.map((one) => one.finished)).then(() => true);
})"""
"""What is true once the transitions that are under way have ended."""


def violations(page: Any) -> list[tuple[str, list[Any]]]:
    """Rules of axe that the page breaks as it is now, with the elements."""
    page.evaluate(SETTLED)  # transitions of colour
    page.evaluate(AXE.read_text() + ";0")
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found["violations"]]


def test_the_rules_are_those_that_are_written_down() -> None:
    assert hashlib.sha256(AXE.read_bytes()).hexdigest() == SHA256


@pytest.mark.slow
def test_a_page_that_breaks_a_rule_is_found(browser: Any, server: Server) -> None:
    with opened(browser, server.url) as page:
        page.evaluate("document.body.append(document.createElement('img'))")
        assert "image-alt" in [name for name, _ in violations(page)]


def everything(asked: dict[str, Any]) -> list[Event]:
    """An answer with all that an answer can have."""
    if asked["type"] != "response.create":
        return []
    first, *rest = response_of(SAMPLE)
    item = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Riga"}'}
    token = {"token": "Yes", "logprob": -0.5, "top_logprobs": [{"token": "No", "logprob": -1}]}
    return [
        first,
        {"type": "response.reasoning_text.delta", "delta": "So it is."},
        {"type": "response.output_text.delta", "delta": "# Yes\n\n", "logprobs": [token]},
        *rest[:-1],
        {"type": "response.output_item.added", "item": item},
        {"type": "response.output_item.done", "item": item},
        rest[-1],
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "width"),
    [("dark", 390), ("light", 390), ("light", 1200), ("dark", 1200)],
)
def test_no_state_of_the_page_breaks_a_rule(
    browser: Any, server: Server, scheme: str, width: int, tmp_path: Path
) -> None:
    def shot(name: str) -> None:
        folder = os.environ.get("TRIOLET_SCREENSHOTS", tmp_path)
        page.screenshot(path=folder / Path(f"{name}-{scheme}-{width}.png"))

    viewport = {"width": width, "height": 800}
    with opened(browser, server.url, everything, color_scheme=scheme, viewport=viewport) as page:
        found = {"welcome": violations(page)}
        shot("welcome")
        send(page, "Show me")
        page.wait_for_selector(f"{DONE} .answer math >> nth=3")
        page.wait_for_selector(".hljs-keyword")
        page.click("summary")
        page.hover(".turn")
        found["answer"] = violations(page)
        page.click("button[aria-label='Regenerate the answer']")
        page.wait_for_selector(".branches:has-text('2/2')")
        page.hover(".turn")
        page.click("button[aria-label='Probabilities of tokens']")
        page.hover(".tokens span")
        page.click("button[aria-label='Edit the question']")
        found["tokens"] = violations(page)
        page.keyboard.press("Escape")
        page.click("#show-chats")
        found["chats"] = violations(page)
        shot("chats")
        page.click("#chat-list button[aria-label^=Rename]")
        found["rename"] = violations(page)
        page.keyboard.press("Escape")
        page.click("#show-settings")
        page.select_option("#settings [name=format]", "json_schema")
        page.fill("#settings [name=schema]", "{")
        found["settings"] = violations(page)
        shot("settings")
        send(page, "Who?")
        page.wait_for_selector("#unsent", state="visible")
        found["unsent"] = violations(page)
        page.click("#show-engine")
        page.wait_for_timeout(1500)
        found["engine"] = violations(page)
        shot("engine")
        page.route("**/metrics", lambda route: route.abort())
        page.wait_for_selector("#engine[data-stale]")
        found["stale"] = violations(page)
        page.click("#fork")
        found["fork"] = violations(page)
        shot("fork")
        page.evaluate("document.getElementById('key-refused').hidden = false")
        page.evaluate("document.getElementById('key').showModal()")
        found["key"] = violations(page)
    assert {name: broken for name, broken in found.items() if broken} == {}


@pytest.mark.slow
def test_everything_can_be_reached_by_keys(browser: Any, server: Server) -> None:
    with opened(browser, server.url, says(SAMPLE)) as page:
        send(page, "Show me")
        page.wait_for_selector(".hljs-keyword")
        page.focus(".skip")
        reached = []
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate(
                    "(({id, ariaLabel, textContent}) => id || ariaLabel || textContent)(document.activeElement)"
                )
            )
        order = [
            "show-chats",
            "new",
            "fork",
            "show-settings",
            "show-engine",
            "theme",
            "Lane A",
            "Table",
            "Copy",
        ]
        order += ["Copy the answer", "Edit the question", "Regenerate the answer", "prompt"]
        places = [reached.index(name) for name in order]
        assert places == sorted(places)
        # What has the focus can be seen: the buttons of a turn are else there for the mouse only.
        page.focus("button[aria-label='Copy the answer']")
        wait_until(page, "getComputedStyle(document.querySelector('.buttons')).opacity === '1'")
        page.keyboard.press("Alt+c")
        assert page.evaluate("document.activeElement.id") == "search"
        page.keyboard.press("Alt+n")
        assert page.evaluate("document.activeElement.id") == "prompt"
