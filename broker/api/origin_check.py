"""Protection of a broker without a token against web pages.

A browser on the machine reaches `localhost` for every open page. A page of another origin may send a simple POST
without a preflight request, and an <img> sends a GET. A page whose host name resolves to 127.0.0.1 (DNS rebinding) has
the broker's own origin, and can read the answers. The browser reports the first two by `Origin` and `Sec-Fetch-Site`,
and the last by `Host`; pages cannot set these headers. Programs send neither of the first two, and as `Host` an address
or a name of this broker.

With a token in the request no check is needed: pages do not know it. A browser sends its session (sessions.py) by
itself, so a change that has only that needs the origin of this broker.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Protocol
from urllib.parse import urlsplit

from portalmq.broker.api.http_request import HttpRequest
from portalmq.errors import Forbidden

READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Paths at which older queues' protocols consume messages by GET.
TAKING_PATHS = frozenset({"/message", "/v1/consumer"})
HOSTS_REMEMBERED = 256


class BrokerNames(Protocol):
    """The settings that name a broker."""

    @property
    def host(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def names_allowed(self) -> list[str]: ...


class OriginCheck:
    """Refuses requests of web pages of another origin, and requests to a host name that is not the broker's."""

    def __init__(self, config: BrokerNames) -> None:
        names = {config.host, urlsplit(config.url).hostname or "", *config.names_allowed}
        self._names = {_normalized(name) for name in names}
        self._advertised = urlsplit(config.url).netloc.lower()
        self._is_ours = lru_cache(HOSTS_REMEMBERED)(self._is_our_name)

    def check(self, request: HttpRequest) -> None:
        """Raise Forbidden for a foreign origin or host. Costs three lookups for most requests."""
        host = request.headers.get("host", "")
        if not self._is_ours(host):
            raise Forbidden(
                f"this broker needs no token, and {host[:100]!r} is not one of its names, as in DNS rebinding by a web "
                "page: use its address, or add the name with --advertised-url or --allowed-hosts"
            )
        if "origin" in request.headers or "sec-fetch-site" in request.headers:
            self._check_page(request, host)

    def check_session(self, request: HttpRequest) -> None:
        """Raise Forbidden for a change that a browser's session alone orders, unless a page of this broker sent it:
        browsers name the origin of every such request."""
        if not is_reading(request) and "origin" not in request.headers:
            raise Forbidden("a session changes something only from a page of this broker: the request names no Origin")
        self._check_page(request, request.headers.get("host", ""))

    def check_page(self, request: HttpRequest) -> None:
        """Raise Forbidden for a change that a page of another origin orders."""
        self._check_page(request, request.headers.get("host", ""))

    def _check_page(self, request: HttpRequest, host: str) -> None:
        if is_reading(request):
            return  # without CORS headers in the answer, another origin cannot read it
        origin = request.headers.get("origin")
        is_foreign = request.headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}
        if is_foreign or (origin is not None and _host_of(origin) not in {host.lower(), self._advertised}):
            shown = "another origin" if origin is None else repr(origin[:100])
            raise Forbidden(f"a web page of {shown} may change nothing here without a token")

    def _is_our_name(self, host: str) -> bool:
        name = _normalized(_without_port(host))
        # A name without a dot is in no public zone, so no page can use it for rebinding.
        return "." not in name or name in self._names or name.endswith(".localhost") or _is_address(name)


def is_reading(request: HttpRequest) -> bool:
    """Return whether a request, by its method and path, changes nothing."""
    return request.method in READING_METHODS and request.path.rstrip("/") not in TAKING_PATHS


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and (":" not in name or name.startswith("[")) else host


def _normalized(name: str) -> str:
    return name.strip().lower().removesuffix(".").removeprefix("[").removesuffix("]")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_of(origin: str) -> str:
    """Return the host and port of an origin, in the form of `Host`; "" for `null`."""
    return origin.strip().lower().partition("://")[2]
