"""Branches of a chat, and chats that the browser keeps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.page.browser import (
    Event,
    answers,
    ask_with,
    listen,
    opened,
    response_of,
    send,
    wait_for_idle,
    wait_for_text,
    wait_until,
    wait_until_connected,
)
from tests.e2e.server import Server

DONE = ".turn[data-state=done]"


class Scribe:
    """An engine that numbers its answers, and can forget them."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.forgotten: set[str] = set()

    def __call__(self, asked: dict[str, Any]) -> list[Event]:
        if asked["type"] != "response.create":
            return []
        self.asked.append(asked)
        if asked.get("previous_response_id") in self.forgotten:
            return [
                {"type": "error", "error": {"code": "previous_response_not_found", "message": "forgotten"}}
            ]
        number = len(self.asked)
        return response_of(f"answer {number}", identity=f"resp_{number}")


@pytest.fixture
def scribe() -> Scribe:
    return Scribe()


@pytest.fixture
def page(browser: Any, server: Server, scribe: Scribe) -> Iterator[Any]:
    with opened(browser, server.url, scribe) as page:
        yield page


def ask(page: Any, text: str, number: int) -> None:
    """Ask; this is the answer's number."""
    send(page, text)
    wait_for_answer(page, number)


def wait_for_answer(page: Any, number: int) -> None:
    page.wait_for_selector(f"{DONE} .answer p:text-is('answer {number}')")


def press(page: Any, turn: int, label: str) -> None:
    """Press a button of a turn, counted from 1."""
    page.hover(f".turn:nth-child({turn})")
    page.click(f".turn:nth-child({turn}) button[aria-label='{label}']")


def questions(page: Any) -> list[str]:
    return [one.inner_text() for one in page.query_selector_all(".asked")]


@pytest.mark.slow
def test_an_answer_that_is_regenerated_stands_beside_the_first(page: Any, scribe: Scribe) -> None:
    ask(page, "one", 1)
    ask(page, "two", 2)
    press(page, 2, "Regenerate the answer")
    wait_for_answer(page, 3)
    assert answers(page) == ["answer 1", "answer 3"]
    assert "2/2" in page.inner_text(".turn:nth-child(2) .branches")
    assert [one["previous_response_id"] for one in scribe.asked] == [None, "resp_1", "resp_1"]
    assert scribe.asked[2]["input"] == scribe.asked[1]["input"] == [{"role": "user", "content": "two"}]
    press(page, 2, "Previous branch")
    wait_for_answer(page, 2)
    assert answers(page) == ["answer 1", "answer 2"]
    ask(page, "three", 4)
    assert scribe.asked[3]["previous_response_id"] == "resp_2"  # the branch that is shown
    press(page, 2, "Next branch")
    wait_for_answer(page, 3)
    assert answers(page) == ["answer 1", "answer 3"]


@pytest.mark.slow
def test_an_arrow_leads_to_what_was_asked_last_in_a_branch(page: Any, scribe: Scribe) -> None:
    ask(page, "one", 1)
    ask(page, "two", 2)
    press(page, 2, "Regenerate the answer")
    wait_for_answer(page, 3)
    press(page, 2, "Previous branch")
    wait_for_answer(page, 2)
    ask(page, "three", 4)
    press(page, 1, "Edit the question")
    page.fill(".editor textarea", "other")
    page.keyboard.press("Enter")
    wait_for_answer(page, 5)
    press(page, 1, "Previous branch")
    wait_for_answer(page, 4)
    assert questions(page) == ["one", "two", "three"]
    assert answers(page) == ["answer 1", "answer 2", "answer 4"]


@pytest.mark.slow
def test_a_question_that_is_edited_begins_a_branch_and_the_old_one_stays(page: Any, scribe: Scribe) -> None:
    ask(page, "one", 1)
    ask(page, "two", 2)
    press(page, 1, "Edit the question")
    page.fill(".editor textarea", "one, but better")
    page.keyboard.press("Escape")  # that leaves it as it was
    assert questions(page) == ["one", "two"]
    press(page, 1, "Edit the question")
    page.fill(".editor textarea", "other")
    page.keyboard.press("Enter")
    wait_for_answer(page, 3)
    assert (questions(page), scribe.asked[2]["previous_response_id"]) == (["other"], None)
    press(page, 1, "Previous branch")
    wait_for_answer(page, 2)
    assert questions(page) == ["one", "two"]
    scribe.forgotten = {"resp_2"}
    send(page, "three")
    wait_for_answer(page, 5)
    said = [(one["role"], one["content"]) for one in scribe.asked[-1]["input"]]
    assert said == [
        ("user", "one"), ("assistant", "answer 1"), ("user", "two"), ("assistant", "answer 2"), ("user", "three"),
    ]  # fmt: skip


def shown_chats(page: Any) -> list[str]:
    return [one.inner_text() for one in page.query_selector_all("#chat-list .chat bdi")]


def reload(page: Any) -> None:
    page.reload()
    wait_until_connected(page)
    page.click("#show-chats")


@pytest.mark.slow
def test_chats_are_kept_found_renamed_and_deleted(page: Any, tmp_path: Path) -> None:
    ask(page, "about whales", 1)
    press(page, 1, "Regenerate the answer")
    wait_for_answer(page, 2)
    page.click("#new")
    ask(page, "about trains", 3)
    page.reload()
    wait_until_connected(page)
    assert page.is_visible("#welcome")
    page.click("#show-chats")
    assert shown_chats(page) == ["about trains", "about whales"]
    page.screenshot(path=os.environ.get("TRIOLET_SCREENSHOTS", tmp_path) / Path("chats.png"))
    page.fill("#search", "ANSWER whales")
    assert shown_chats(page) == ["about whales"]
    page.fill("#search", "no such words")
    assert shown_chats(page) == []
    assert "No chat has these words." in page.inner_text("#chats-note")
    page.fill("#search", "")
    page.click("#chat-list .chat:has-text('whales')")
    assert (questions(page), answers(page)) == (["about whales"], ["answer 2"])
    press(page, 1, "Previous branch")
    wait_for_answer(page, 1)

    page.click("#chat-list button[aria-label='Rename about whales']")
    page.fill("#chat-list input", "The <b>sea</b>")
    page.keyboard.press("Enter")
    page.wait_for_selector("#chat-list .chat:has-text('The <b>sea</b>')")
    reload(page)
    assert shown_chats(page) == ["about trains", "The <b>sea</b>"]
    page.click("#chat-list button[aria-label='Delete about trains']")
    assert len(shown_chats(page)) == 2  # only the second click deletes
    page.click("#chat-list button[aria-label='Really delete about trains']")
    assert shown_chats(page) == ["The <b>sea</b>"]
    reload(page)
    assert shown_chats(page) == ["The <b>sea</b>"]


@pytest.mark.slow
def test_a_kept_chat_goes_on_where_it_was(page: Any, scribe: Scribe) -> None:
    ask(page, "one", 1)
    reload(page)
    page.click("#chat-list .chat")
    ask(page, "two", 2)
    assert scribe.asked[1]["previous_response_id"] == "resp_1"
    reload(page)
    assert shown_chats(page) == ["one"]
    scribe.forgotten = {"resp_2"}
    page.click("#chat-list .chat")
    ask(page, "three", 4)
    assert [one["content"] for one in scribe.asked[-1]["input"]] == [
        "one",
        "answer 1",
        "two",
        "answer 2",
        "three",
    ]


def export(page: Any) -> Any:
    with page.expect_download() as download:
        page.click("#export")
    return json.loads(Path(download.value.path()).read_text())


def take_in(page: Any, content: Any) -> str:
    """Import this file; what is said about it."""
    text = content if isinstance(content, str) else json.dumps(content)
    page.set_input_files(
        "#import-file", {"name": "x.json", "mimeType": "application/json", "buffer": text.encode()}
    )
    page.wait_for_selector("#chats-note:has-text('mported')")
    said: str = page.inner_text("#chats-note")
    page.evaluate("document.getElementById('chats-note').textContent = ''")
    return said


@pytest.mark.slow
def test_an_exported_file_brings_the_same_chats_back(page: Any) -> None:
    ask(page, "one", 1)
    press(page, 1, "Regenerate the answer")
    wait_for_answer(page, 2)
    ask(page, "two", 3)
    page.click("#show-chats")
    file = export(page)
    page.click("#chat-list button[aria-label='Delete one']")
    page.click("#chat-list button[aria-label='Really delete one']")
    assert shown_chats(page) == []
    assert take_in(page, file) == "1 chat imported."
    page.click("#chat-list .chat")
    assert (questions(page), answers(page)) == (["one", "two"], ["answer 2", "answer 3"])
    again = export(page)
    assert [{**chat, "key": ""} for chat in again["chats"]] == [{**chat, "key": ""} for chat in file["chats"]]
    assert take_in(page, again) == "1 chat imported."  # beside the one that is there
    assert shown_chats(page) == ["one", "one"]
    assert len({one["key"] for one in export(page)["chats"]}) == 2


@pytest.mark.slow
def test_a_file_that_is_wrong_is_refused_and_changes_nothing(page: Any) -> None:
    ask(page, "one", 1)
    page.click("#show-chats")
    good = export(page)

    def wrong(**fields: Any) -> Any:
        [chat] = good["chats"]
        [turn] = chat["turns"]
        return {**good, "chats": [chat, {**chat, "turns": [{**turn, **fields}]}]}

    for file, reason in (
        ("{", "the file must be JSON"),
        ([], "the file must have format"),
        ({**good, "version": 2}, "the file must have format"),
        ({**good, "chats": [None]}, "a chat must be an object; got null"),
        (
            {**good, "chats": [{**good["chats"][0], "turns": {}}]},
            "turns of a chat must be of type array; got object",
        ),
        (wrong(asked=5), "asked of a turn must be of type string; got number"),
        (wrong(state="odd"), 'state of a turn must be one of active, done, stopped, cut, failed; got "odd"'),
        (wrong(parent="none"), 'parent of a turn must be an earlier turn; got "none"'),
        (wrong(calls=[{"name": 1}]), "call_id of a call must be of type string; got undefined"),
    ):
        assert take_in(page, file).startswith(f"Not imported: {reason}"), file
        assert shown_chats(page) == ["one"]


@pytest.mark.slow
def test_an_answer_that_was_cut_off_by_leaving_is_kept_as_far_as_it_had_come(
    browser: Any, server: Server
) -> None:
    with opened(browser, server.url) as page:
        ask_with(page, ignore_eos=True, seed=1)
        send(page, "Tell me a story")
        wait_for_text(page, 20)
        [heard] = answers(page)
        reload(page)
        page.click("#chat-list .chat")
        page.wait_for_selector(".turn[data-state=stopped]")
        assert answers(page)[0].startswith(heard)
        assert page.is_visible("#send")


@pytest.mark.slow
def test_another_chat_can_be_opened_while_an_answer_streams(browser: Any, server: Server) -> None:
    with opened(browser, server.url) as page:
        ask_with(page, seed=1, ignore_eos=True, max_output_tokens=3)
        send(page, "Count from 1 to 3")
        page.wait_for_selector(".turn[data-state=cut]")
        kept = answers(page)
        page.click("#new")
        ask_with(page, seed=1, ignore_eos=True)
        page.click("#show-chats")
        send(page, "Tell me a story")
        wait_for_text(page, 5)
        page.click("#chat-list .chat:has-text('Count')")
        assert answers(page) == kept
        page.wait_for_timeout(300)
        assert answers(page) == kept
        page.click("#chat-list .chat:has-text('story')")
        page.wait_for_selector(".turn[data-state=stopped]")
        assert answers(page)[0]


@pytest.mark.slow
def test_a_chat_that_is_deleted_while_its_answer_streams_stays_deleted(browser: Any, server: Server) -> None:
    with opened(browser, server.url) as page:
        ask_with(page, ignore_eos=True, seed=1)
        page.click("#show-chats")
        send(page, "Tell me a story")
        wait_for_text(page, 5)
        page.click("#chat-list button[aria-label^=Delete]")
        page.click("#chat-list button[aria-label^='Really delete']")
        assert page.is_visible("#welcome")
        page.wait_for_timeout(500)
        assert shown_chats(page) == []
        reload(page)
        assert shown_chats(page) == []
        wait_for_idle(server)


@pytest.mark.slow
def test_chats_of_another_tab_are_there_when_the_panel_is_opened(browser: Any, server: Server) -> None:
    with opened(browser, server.url, Scribe()) as page:
        other = page.context.new_page()
        other.route_web_socket("**/v1/responses", lambda socket: None)
        other.goto(server.url)
        wait_until_connected(other)
        ask(page, "one", 1)
        other.click("#show-chats")
        other.wait_for_selector("#chat-list .chat:has-text('one')")
        assert shown_chats(other) == ["one"]
        page.click("#show-chats")
        page.click("#chat-list button[aria-label='Delete one']")
        page.click("#chat-list button[aria-label='Really delete one']")
        other.click("#show-chats")
        other.click("#show-chats")
        other.wait_for_selector("#chat-list .chat", state="detached")
        assert shown_chats(other) == []


@pytest.mark.slow
def test_two_tabs_that_write_the_same_chat_lose_nothing_of_it(browser: Any, server: Server) -> None:
    with opened(browser, server.url, Scribe()) as page:
        ask(page, "one", 1)
        other = page.context.new_page()
        scribe = Scribe()
        scribe.asked.append({})  # its answers are numbered from 2
        other.route_web_socket("**/v1/responses", lambda socket: listen(socket, scribe))
        other.goto(server.url)
        wait_until_connected(other)
        other.click("#show-chats")
        other.click("#chat-list .chat:has-text('one')")
        ask(other, "from the other tab", 2)
        rename(other, "one", "our chat")
        ask(page, "from this tab", 2)
        ask(page, "from this tab again", 3)
        ask(other, "from the other tab again", 3)
        asked = {
            "one",
            "from this tab",
            "from this tab again",
            "from the other tab",
            "from the other tab again",
        }
        for tab in (page, other):
            wait_until(tab, f"({KEPT})().then(([chat]) => chat.turns.length === {len(asked)})")
            tab.reload()
            wait_until_connected(tab)
            [chat] = tab.evaluate(KEPT)
            assert {turn["asked"] for turn in chat["turns"]} == asked
            assert {turn["state"] for turn in chat["turns"]} == {"done"}
            assert chat["name"] == "our chat"
            known = [turn["key"] for turn in chat["turns"]]
            assert all(
                turn["parent"] is None or turn["parent"] in known[:at]
                for at, turn in enumerate(chat["turns"])
            )
        if page.is_hidden("#chats"):
            page.click("#show-chats")
        page.click("#chat-list .chat:has-text('our chat')")
        # What both tabs have asked after the first answer stands side by side.
        page.wait_for_selector(".branches:not([hidden])")
        assert questions(page) == ["one", "from the other tab", "from the other tab again"]


KEPT = """() => new Promise((resolve) => {
  const opening = indexedDB.open("triolet", 1);
  opening.onsuccess = () => {
    const all = opening.result.transaction("chats").objectStore("chats").getAll();
    all.onsuccess = () => { opening.result.close(); resolve(all.result); };
  };
})"""
"""All records of the store."""


def rename(page: Any, title: str, name: str) -> None:
    page.click(f"#chat-list button[aria-label='Rename {title}']")
    page.fill("#chat-list input", name)
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#chat-list .chat:has-text('{name}')")


@pytest.mark.slow
def test_a_question_from_before_a_first_connection_that_fails_is_asked_once(
    page: Any, scribe: Scribe
) -> None:
    page.add_init_script(
        "const Real = WebSocket;"
        "window.WebSocket = function (...a) { window.WebSocket = Real;"
        " document.documentElement.dataset.first = 'made'; return (window.first = {}); };"
    )
    page.reload()
    page.wait_for_selector("#connection[data-state=connecting]", state="attached")
    page.wait_for_selector("[data-first=made]", state="attached")
    send(page, "one")
    page.evaluate("window.first.onclose(new CloseEvent('close'))")
    wait_for_answer(page, 1)
    ask(page, "two", 2)
    assert [one["input"][-1]["content"] for one in scribe.asked] == ["one", "two"]
    assert answers(page) == ["answer 1", "answer 2"]
