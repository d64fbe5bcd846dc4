"""A request as views see it, independent of the server that parsed it and of WSGI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

REQUEST = "portalmq.request"


class BodySource(Protocol):
    """The rest of a body, on its way."""

    def read(self, size: int, /) -> bytes:
        """Return `size` bytes, or fewer at the end of the body."""
        ...


class Client(Protocol):
    """The connection of a request."""

    @property
    def socket(self) -> Any: ...
    def trust(self) -> None:
        """Exempt the connection from the limits of clients: it is another broker's."""
        ...


@dataclass(slots=True, eq=False, repr=False)
class HttpRequest:
    """One request.

    `headers` have names in lower case, and values that are bytes decoded as Latin-1; those of a repeated header are
    joined by commas. `path` is decoded from percent-encoding, also as Latin-1. A body has a `length`, or
    `is_chunked`; `received` is the whole body if it came with the head, otherwise `source` reads it.

    The fields below the line are the state of its processing. `must_close`: the connection ends after the answer.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    length: int | None = None
    is_chunked: bool = False
    received: bytes | None = None
    source: BodySource | None = None
    client: Client | None = None
    # ---
    body_was_read: bool = False
    must_close: bool = False
    body_bytes_held: int = 0
    answer_bytes_held: int = 0


def request_of(environ: dict[str, Any]) -> HttpRequest:
    """Return the request of a WSGI environment. The server puts it there; that of a test client is made here."""
    request: HttpRequest | None = environ.get(REQUEST)
    if request is None:
        headers = {
            name.removeprefix("HTTP_").lower().replace("_", "-"): value
            for name, value in environ.items()
            if name.startswith("HTTP_") or name in {"CONTENT_TYPE", "CONTENT_LENGTH"}
        }
        length = environ.get("CONTENT_LENGTH")
        request = environ[REQUEST] = HttpRequest(
            environ["REQUEST_METHOD"],
            environ["PATH_INFO"],
            environ.get("QUERY_STRING", ""),
            headers,
            int(length) if length else None,
            "transfer-encoding" in headers,
            source=environ["wsgi.input"],
        )
    return request
