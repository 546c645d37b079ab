"""An address is a host and a port."""

from __future__ import annotations

import pytest

from triolet.config.address import Address


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":1", "host:x", "host:65536", "host:-1", "host..example:1", "h\xf6st..example:1"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Address.parse(text)


@pytest.mark.parametrize("text", ["127.0.0.1:7340", "[::1]:7340", "host.example:0"])
def test_an_address_reads_as_it_was_written(text: str) -> None:
    assert str(Address.parse(text)) == text
