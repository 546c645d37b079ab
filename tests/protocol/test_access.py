"""Which clients may speak to the server."""

from __future__ import annotations

import pytest

from triolet.protocol.access import Access
from triolet.protocol.errors import WireError


def test_without_keys_every_client_is_let_in_and_none_has_a_name() -> None:
    assert Access().owner(None) is None
    assert Access().owner("Bearer whatever") is None


def test_a_key_has_a_name_that_is_not_the_key() -> None:
    access = Access(api_keys=("first", "second"))
    names = {access.owner("Bearer first"), access.owner("bearer second")}
    assert len(names) == 2
    assert not names & {"first", "second"}


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer firs", "Bearer first2", "Basic first", "first"]
)
def test_any_other_header_is_refused(header: str | None) -> None:
    with pytest.raises(WireError) as refused:
        Access(api_keys=("first",)).owner(header)
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST"])
def test_a_server_of_this_machine_answers_to_its_names(host: str) -> None:
    Access().check_host(host)
    assert Access().is_allowed_origin(f"http://{host}", host)


@pytest.mark.parametrize(
    "host", [None, "", "evil.example", "localhost.evil.example", "[", "127.0.0.1.evil.example"]
)
def test_a_name_that_is_bent_to_this_machine_is_refused(host: str | None) -> None:
    with pytest.raises(WireError) as refused:
        Access().check_host(host)
    assert refused.value.code == "host_not_allowed"


@pytest.mark.parametrize(
    "access",
    [
        Access(listens_on="0.0.0.0", api_keys=("key",)),
        Access(api_keys=("key",)),
        Access(allowed_hosts=("api.example",)),
        Access(listens_on="0.0.0.0", allowed_hosts=("Api.example",)),
        Access(listens_on="api.example"),
        Access(listens_on="0.0.0.0", allowed_hosts=("*",)),
    ],
)
def test_a_public_server_answers_to_other_names(access: Access) -> None:
    access.check_host("api.example:8000")
    assert not access.is_allowed_origin("http://evil.example", "api.example")


def test_a_public_server_without_keys_answers_to_addresses_and_to_no_foreign_name() -> None:
    access = Access(listens_on="0.0.0.0", allowed_hosts=("api.example",))
    for host in ("192.0.2.7:8000", "[2001:db8::1]:8000", "localhost", "127.0.0.1:1", "api.example"):
        access.check_host(host)
    for foreign in ("evil.example:8000", None, "192.0.2.7.evil.example"):
        with pytest.raises(WireError) as refused:
            access.check_host(foreign)
        assert (refused.value.status, refused.value.code) == (403, "host_not_allowed")
    assert "--allowed-hosts" in str(refused.value)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://[", "https://localhost:1"])
def test_a_foreign_page_is_refused(origin: str) -> None:
    with pytest.raises(WireError) as refused:
        Access().check_origin(origin, "localhost:8000")
    assert refused.value.code == "origin_not_allowed"


def test_a_page_may_come_from_a_listed_origin_or_from_anywhere_if_so_said() -> None:
    Access(allowed_origins=("https://chat.example",)).check_origin("https://chat.example", "localhost")
    Access(allowed_origins=("*",)).check_origin("null", "localhost")
    assert not Access(allowed_origins=("https://chat.example",)).is_allowed_origin(
        "https://chat.example.evil", None
    )
