"""Sends the head and a small body of an answer together.

gunicorn sends the head alone. Two small segments cost a second system call here, and a second wake-up of the client.
"""

from __future__ import annotations

import time
from email.utils import formatdate
from functools import lru_cache

from gunicorn.http import wsgi
from gunicorn.http.wsgi import Response

JOIN_BYTES_MAX = 64 * 1024


class JoinedResponse(Response):  # type: ignore[misc]
    """A response that sends its body together with its head, if the body is complete and small."""

    headers_sent: bool
    sent: int

    def write(self, arg: bytes) -> None:
        """Send a part of the body, and before the first one the head."""
        if (
            self.headers_sent
            or self.chunked
            or self._omits_body
            or len(arg) != self.response_length
            or len(arg) > JOIN_BYTES_MAX
            or not isinstance(arg, bytes)
        ):
            super().write(arg)
            return
        lines = [*self.default_headers(), *[f"{name}: {value}\r\n" for name, value in self.headers], "\r\n"]
        self.headers_sent = True
        self.sent = len(arg)
        self.sock.sendall("".join(lines).encode("latin-1") + arg)

    def default_headers(self) -> list[str]:
        """Return the status line, and the headers of every answer."""
        if self.upgrade or self.chunked:
            lines: list[str] = super().default_headers()
            return lines
        major, minor = self.req.version
        connection = "close" if self.should_close() else "keep-alive"
        return [
            f"HTTP/{major}.{minor} {self.status}\r\n",
            f"Server: {self.version}\r\nDate: {_date_of(int(time.time()))}\r\nConnection: {connection}\r\n",
        ]


def join_responses() -> None:
    """Make gunicorn use JoinedResponse."""
    wsgi.Response = JoinedResponse


@lru_cache(1)
def _date_of(second: int) -> str:
    return formatdate(second, usegmt=True)
