"""Configuration of the server."""

from __future__ import annotations

import pytest

from triolet.config.server import GatewayConfig
from triolet.errors import ConfigError
from triolet.protocol.access import Access

ORIGINS = [
    "*",
    "https://chat.example",
    "http://localhost:3000",
    "http://127.0.0.1",
    "http://[::1]:8080",
    "chrome-extension://abcdefghijklmnop",
    "http://some_name",
]


@pytest.mark.parametrize("origin", ORIGINS)
def test_an_origin_is_allowed_as_browsers_write_it(origin: str) -> None:
    config = GatewayConfig.from_texts({"allowed_origins": origin})
    assert config.allowed_origins == (origin,)
    assert Access(allowed_origins=config.allowed_origins).is_allowed_origin(origin, "other.example")


@pytest.mark.parametrize(
    "entry",
    [
        '["*"]',
        "chat.example",
        "localhost:3000",
        "https://chat.example/",
        "https://chat.example/page",
        "https://*.example",
        "https://Chat.example",
        "HTTPS://chat.example",
        "https://chat.example:port",
        "https://me@chat.example",
        "https://",
        "null",
        "**",
    ],
)
def test_an_origin_that_could_match_no_page_is_refused(entry: str) -> None:
    rule = "a tuple of texts, each * or scheme://host[:port] without capitals, as browsers write it"
    with pytest.raises(ConfigError) as caught:
        GatewayConfig.from_texts({"allowed_origins": f"https://good.example,{entry}"})
    got = ("https://good.example", entry)
    assert str(caught.value) == f"allowed_origins must be {rule}; got {got!r}"
