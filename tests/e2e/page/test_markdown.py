"""What the page makes of Markdown, code and maths."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.page.browser import opened, says, send
from tests.e2e.server import Server

DONE = ".turn[data-state=done]"
SAMPLE = r"""# A title

Some *emphasis*, **strength**, ~~nothing~~ and `code`, with a [link](https://example.org/a "Example").

1. first
2. second
   - inner

> A quotation

| name | number |
| :--- | -----: |
| one  | 1      |
| two  | 22     |

```python
def double(number: int) -> int:
    # twice
    return "x" * number
```

Inline $a^2 + b^2 = c^2$ and \(x_1\), and for $5 or $10 nothing:

$$
\frac{1}{\sqrt{2\pi}} \int_{-\infty}^{\infty} e^{-x^2/2}\,dx = 1
$$

\[ \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} \]

Last line &amp; the end."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "scheme"),
    [(390, "light"), (390, "dark"), (1200, "light"), (1200, "dark")],
)
def test_markdown_code_tables_and_maths_are_shown_as_what_they_are(
    browser: Any, server: Server, scheme: str, width: int, tmp_path: Path
) -> None:
    viewport = {"width": width, "height": 1000}
    with opened(browser, server.url, says(SAMPLE), color_scheme=scheme, viewport=viewport) as page:
        send(page, "Show me")
        page.wait_for_selector(f"{DONE} .answer math >> nth=3")
        page.wait_for_selector(".hljs-keyword")
        count = {
            tag: len(page.query_selector_all(f".answer {tag}"))
            for tag in (
                "h3",
                "em",
                "strong",
                "del",
                "ol > li",
                "ol ul > li",
                "blockquote",
                "th",
                "td",
                "math",
            )
        }
        assert count == {
            "h3": 1, "em": 1, "strong": 1, "del": 1, "ol > li": 2, "ol ul > li": 1, "blockquote": 1, "th": 2,
            "td": 4, "math": 4,
        }  # fmt: skip
        assert "for $5 or $10 nothing:" in page.inner_text(".answer")
        assert page.inner_text(".answer > :last-child") == "Last line & the end."
        [link] = page.query_selector_all(".answer a")
        assert link.get_attribute("href") == "https://example.org/a"
        assert "noopener" in link.get_attribute("rel")
        assert page.inner_text(".hljs-string") == '"x"'
        assert page.eval_on_selector("td:last-child", "one => getComputedStyle(one).textAlign") == "right"
        assert page.eval_on_selector(".answer mfrac", "one => one.getBoundingClientRect().height") > 30
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        name = Path(f"markdown-{scheme}-{width}.png")
        page.screenshot(path=os.environ.get("TRIOLET_SCREENSHOTS", tmp_path) / name)


@pytest.mark.slow
def test_code_is_copied_as_it_was_written(browser: Any, server: Server) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    with opened(browser, server.url, says(SAMPLE), permissions=permissions) as page:
        send(page, "Show me")
        page.wait_for_selector(".hljs-keyword")
        page.click(".code button")
        page.wait_for_selector(".code button:text-is('Copied')")
        copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == 'def double(number: int) -> int:\n    # twice\n    return "x" * number'


@pytest.mark.slow
def test_a_growing_answer_ends_as_one_that_came_at_once(browser: Any, server: Server) -> None:
    pieces = [SAMPLE[at : at + 3] for at in range(0, len(SAMPLE), 3)]
    shown = []
    for texts in ([SAMPLE], pieces):
        with opened(browser, server.url, says(*texts)) as page:
            # Every piece is drawn, not only what there is at the next frame.
            page.evaluate("void (window.requestAnimationFrame = (draw) => { draw(); return 1; })")
            send(page, "Show me")
            page.wait_for_selector(f"{DONE} .answer math >> nth=3")
            page.wait_for_selector(".hljs-keyword")
            shown.append(page.eval_on_selector(".answer", "one => one.innerHTML"))
    assert shown[0] == shown[1]


@pytest.mark.slow
def test_a_selection_in_an_answer_outlives_what_comes_after_it(browser: Any, server: Server) -> None:
    said: list[Any] = []
    with opened(browser, server.url) as page:
        page.route_web_socket(
            "**/v1/responses", lambda socket: socket.on_message(lambda _: said.append(socket))
        )
        page.reload()
        page.wait_for_selector("#connection[data-state=open]", state="attached")
        send(page, "Show me")
        while not said:
            page.wait_for_timeout(20)

        def tell(number: int, **event: Any) -> None:
            said[-1].send(json.dumps({"stream_id": "a", "sequence_number": number, **event}))

        tell(0, type="response.created", response={"id": "resp_1"})
        tell(1, type="response.output_text.delta", delta="First *block*.\n\nSecond")
        page.wait_for_selector(".answer p:nth-child(2)")
        page.evaluate("getSelection().selectAllChildren(document.querySelector('.answer em'))")
        for number, text in enumerate((" grows", ".\n\n- and\n", "- so on\n\n", "# more"), 2):
            tell(number, type="response.output_text.delta", delta=text)
            page.wait_for_timeout(60)
        page.wait_for_selector(".answer h3")
        assert page.evaluate("getSelection().toString()") == "block"
