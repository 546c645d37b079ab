"""Who may speak to the server: keys, and the two checks that keep foreign web pages out.

A browser sends the page's origin along and leaves the decision to the server, so a page from anywhere could use a
server on its visitor's machine; and a name that suddenly points to this machine (DNS rebinding) makes such a page look
like the server's own. The first is told by `Origin`, the second by `Host`.
"""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import urlsplit

import attrs

from triolet.protocol.errors import WireError

THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
ANY = "*"


@attrs.frozen(kw_only=True)
class Access:
    """The rules of one server.

    Args:
        listens_on: the address that it listens on.
        api_keys: bearer keys; without any, everybody is let in.
        allowed_origins: of web pages that may connect, beside the server's own; `*` is any.
        allowed_hosts: names that are answered; `*` is any. Without one: this machine's names, where there are no keys
            and the server listens on this machine only, and otherwise any.
    """

    listens_on: str = "127.0.0.1"
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()

    def owner(self, authorization: str | None) -> str | None:
        """Whose request it is: a name for the key, which is not the key. None where there are no keys.

        Args:
            authorization: the header.
        Raises:
            WireError: 401, there is no key or a wrong one.
        """
        if not self.api_keys:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip().encode() if scheme.lower() == "bearer" else b""
        # Every key is compared, and each in constant time: how long it takes tells nothing.
        if not sum(hmac.compare_digest(given, known.encode()) for known in self.api_keys):
            raise WireError(
                "A valid API key must be given, as Authorization: Bearer KEY.",
                code="invalid_api_key",
                status=401,
                type="authentication_error",
            )
        return hashlib.sha256(given).hexdigest()[:16]

    def check_host(self, host: str | None) -> None:
        """Hold the Host header to the names of this server.

        Raises:
            WireError: 403.
        """
        if self._allowed_hosts == (ANY,) or _name_of(host) in self._allowed_hosts:
            return
        raise WireError(
            "The server does not answer to this name (--allowed-hosts).",
            code="host_not_allowed",
            status=403,
            type="permission_error",
        )

    @property
    def _allowed_hosts(self) -> tuple[str, ...]:
        if ANY in self.allowed_hosts:
            return (ANY,)
        if self.allowed_hosts:
            return tuple(name.lower() for name in self.allowed_hosts)
        return THIS_MACHINE if not self.api_keys and self.listens_on in THIS_MACHINE else (ANY,)

    def is_allowed_origin(self, origin: str | None, host: str | None) -> bool:
        """Whether a page of this origin may use the server; None is no page at all.

        Args:
            origin: the header.
            host: the Host header of the same request; a page from there is the server's own.
        """
        if origin is None or ANY in self.allowed_origins or origin in self.allowed_origins:
            return True
        try:
            return host is not None and urlsplit(origin).netloc.lower() == host.lower()
        except ValueError:
            return False

    def check_origin(self, origin: str | None, host: str | None) -> None:
        """Hold the Origin header to the pages that may use the server.

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


def _name_of(host: str | None) -> str:
    """A Host header without its port."""
    try:
        return (urlsplit(f"//{host or ''}").hostname or "").lower()
    except ValueError:
        return ""
