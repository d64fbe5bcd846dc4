"""Web pages are kept out of a broker that asks for no token.

A browser on the machine reaches `localhost` for every page that is open in it. A page of another origin may send a
simple POST without asking first, and an <img> sends a GET. A page whose own name is made to resolve to 127.0.0.1 (DNS
rebinding) counts as the broker's own origin, and reads the answers as well. The browser itself tells of the first two
with `Origin` and `Sec-Fetch-Site`, and of the last with `Host`: no page can set these headers. Programs send neither of
the first two, and a `Host` of an address or of a name that this broker is known by.

With a token none of this is needed: a page does not know it.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import urlsplit

from portalmq.errors import Forbidden

READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# What older queues' protocols take out by GET.
TAKING_PATHS = frozenset({"/message", "/v1/consumer"})
HOSTS_REMEMBERED = 256


class Names(Protocol):
    """The settings that name a broker."""

    @property
    def host(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def names_allowed(self) -> list[str]: ...


class Visitors:
    """Refuses what a web page of another origin sends, and what comes under a name that is not the broker's."""

    def __init__(self, config: Names) -> None:
        names = {config.host, urlsplit(config.url).hostname or "", *config.names_allowed}
        self._names = {_plain(name) for name in names}
        self._advertised = urlsplit(config.url).netloc.lower()
        self._is_ours = lru_cache(HOSTS_REMEMBERED)(self._is_our_name)

    def check(self, environ: dict[str, Any]) -> None:
        """Raises Forbidden. Most requests cost it three look-ups."""
        host = environ.get("HTTP_HOST", "")
        if not self._is_ours(host):
            raise Forbidden(
                f"this broker asks for no token, and {host[:100]!r} is no name of it, as when a web page had its own "
                "name lead here: use its address, or name it with --advertised-url or --allowed-hosts"
            )
        if "HTTP_ORIGIN" in environ or "HTTP_SEC_FETCH_SITE" in environ:
            self._check_page(environ, host)

    def _check_page(self, environ: dict[str, Any], host: str) -> None:
        if environ["REQUEST_METHOD"] in READING_METHODS and environ["PATH_INFO"].rstrip("/") not in TAKING_PATHS:
            return  # there is no CORS header here, so another origin cannot read the answer
        origin = environ.get("HTTP_ORIGIN")
        is_foreign = environ.get("HTTP_SEC_FETCH_SITE", "none") not in {"none", "same-origin"}
        if is_foreign or (origin is not None and _place(origin) not in {host.lower(), self._advertised}):
            shown = "another origin" if origin is None else repr(origin[:100])
            raise Forbidden(f"a web page of {shown} may change nothing on a broker that asks for no token")

    def _is_our_name(self, host: str) -> bool:
        name = _plain(_without_port(host))
        # A name without a dot is in nobody's public zone, so no page can come from it by rebinding.
        return "." not in name or name in self._names or name.endswith(".localhost") or _is_address(name)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and (":" not in name or name.startswith("[")) else host


def _plain(name: str) -> str:
    return name.strip().lower().removesuffix(".").removeprefix("[").removesuffix("]")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _place(origin: str) -> str:
    """The host and port of an origin, as `Host` gives them; nothing for `null`."""
    return origin.strip().lower().partition("://")[2]
