"""Access rules: API keys, and the two checks against foreign web pages.

A browser sends the page's origin and leaves the decision to the server, so a page from anywhere could use a server on
its visitor's machine. With DNS rebinding, a foreign name points to this machine, and the page looks like the server's
own. `Origin` shows the first, `Host` the second.
"""

from __future__ import annotations

import hashlib
import hmac
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

import attrs

from triolet.protocol.errors import WireError

THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
ANY = "*"
METHODS = "GET, POST, DELETE, OPTIONS"
SHOWN_HEADERS = "x-request-id, retry-after"
PREFLIGHT_S = "600"


@attrs.frozen(kw_only=True)
class Access:
    """Access rules of one server."""

    listens_on: str = "127.0.0.1"  # the address that it listens on
    api_keys: tuple[str, ...] = ()  # bearer keys; without any, every client is accepted
    # Keys that may give a request a priority below 0; without keys every client may.
    priority_keys: tuple[str, ...] = ()
    # Origins of web pages that may connect, besides the server's own; `*` means any.
    allowed_origins: tuple[str, ...] = ()
    # Names accepted in the Host header, besides this machine's names and `listens_on`; `*` means any. Without any, all
    # names are accepted if there are keys.
    allowed_hosts: tuple[str, ...] = ()

    def owner(self, authorization: str | None) -> str | None:
        """Return the name of the key, a hash of it; None where there are no keys.

        Raises:
            WireError: 401, there is no key or a wrong one.
        """
        if not self.api_keys:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip().encode() if scheme.lower() == "bearer" else b""
        # Every key is compared, in constant time, so that the time does not depend on the key.
        if not sum(hmac.compare_digest(given, known.encode()) for known in self.api_keys):
            raise WireError(
                "A valid API key must be given, as Authorization: Bearer KEY.",
                code="invalid_api_key",
                status=401,
                type="authentication_error",
            )
        return owner_name(given)

    def check_priority(self, owner: str | None, priority: int) -> None:
        """Check the priority of a request.

        Args:
            owner: name of its key, from `owner`.
            priority: lower runs first.
        Raises:
            WireError: 403, the priority is better than the default, and the key has no permission for it.
        """
        permitted = {owner_name(key.encode()) for key in self.priority_keys}
        if priority >= 0 or not self.api_keys or owner in permitted:
            return
        raise WireError(
            "This API key may not set a priority below 0 (--priority-keys).",
            code="priority_not_allowed",
            status=403,
            type="permission_error",
            param="priority",
        )

    def check_operator(self, owner: str | None) -> None:
        """Check that a client may see and stop the models of a server, and pause generation.

        Raises:
            WireError: 403, there are keys, and this one is none of the priority keys.
        """
        if not self.api_keys or owner in {owner_name(key.encode()) for key in self.priority_keys}:
            return
        raise WireError(
            "This API key is no operator's (--priority-keys).",
            code="operator_key_needed",
            status=403,
            type="permission_error",
        )

    def check_host(self, host: str | None) -> None:
        """Check the Host header.

        Raises:
            WireError: 403.
        """
        if not self._is_allowed_host(_name_of(host)):
            raise WireError(
                "The server does not answer to this name in the Host header; --allowed-hosts NAME allows it.",
                code="host_not_allowed",
                status=403,
                type="permission_error",
            )

    def _is_allowed_host(self, name: str) -> bool:
        if ANY in self.allowed_hosts or (self.api_keys and not self.allowed_hosts):
            return True  # a page that is bound to a foreign name does not have the key
        allowed = (*THIS_MACHINE, self.listens_on, *self.allowed_hosts)
        if name in map(str.lower, allowed):
            return True
        # An address is no name that can be bound anew, so a page from there comes from this server.
        return not self.listens_on_loopback and _address_of(name) is not None

    @property
    def listens_on_loopback(self) -> bool:
        """True if only this machine can connect."""
        address = _address_of(self.listens_on)
        return self.listens_on == "localhost" or (address is not None and address.is_loopback)

    def is_allowed_origin(self, origin: str | None, host: str | None) -> bool:
        """Return whether a page of this origin may use the server; None means no page.

        Args:
            host: the Host header of the same request; a page from there is the server's own.
        """
        if origin is None or ANY in self.allowed_origins or origin in self.allowed_origins:
            return True
        try:
            return host is not None and urlsplit(origin).netloc.lower() == host.lower()
        except ValueError:
            return False

    def check_origin(self, origin: str | None, host: str | None) -> None:
        """Check the Origin header.

        Raises:
            WireError: 403.
        """
        if not self.is_allowed_origin(origin, host):
            raise WireError(
                "Pages of this origin may not use the server (--allowed-origins).",
                code="origin_not_allowed",
                status=403,
                type="permission_error",
            )

    def cross_origin_headers(self, origin: str | None, host: str | None) -> dict[str, str]:
        """Return the headers that let a page of another origin read the answer, if it may."""
        if origin is None or not self.is_allowed_origin(origin, host):
            return {}
        return {
            "access-control-allow-origin": ANY if ANY in self.allowed_origins else origin,
            "access-control-expose-headers": SHOWN_HEADERS,
            # Caches must not answer one origin with the headers of another.
            "vary": "Origin",
        }


def preflight_headers(asked: str | None) -> dict[str, str]:
    """Return the headers of the answer to a CORS preflight; the origin was found to be allowed.

    Args:
        asked: the Access-Control-Request-Headers header.
    """
    return {
        "access-control-allow-methods": METHODS,
        "access-control-allow-headers": asked or ANY,
        "access-control-max-age": PREFLIGHT_S,
    }


def owner_name(key: bytes) -> str:
    """Return the name of a key, a hash of it."""
    return hashlib.sha256(key).hexdigest()[:16]


def _name_of(host: str | None) -> str:
    """Return a Host header without its port."""
    try:
        return (urlsplit(f"//{host or ''}").hostname or "").lower()
    except ValueError:
        return ""


def _address_of(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None
