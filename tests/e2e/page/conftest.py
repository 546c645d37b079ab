"""One server and one Chromium for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.page.browser import CHROMIUM, opened
from tests.e2e.server import Server, serve


@pytest.fixture(scope="module")
def server(browser: Any) -> Iterator[Server]:
    with serve() as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    with opened(browser, server.url) as page:
        yield page
