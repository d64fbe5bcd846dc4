"""The requests that Flask serves: a WSGI environment for each, and answers of any length (PEP 3333)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from io import BytesIO
from typing import Any

from portalmq.broker.api.http_request import REQUEST, HttpRequest
from portalmq.broker.server.http.answers import send, streamed_head
from portalmq.broker.server.http.heads import RequestHead

Environ = dict[str, Any]
Application = Callable[[Environ, Any], Iterable[bytes]]


def environ_of(request: HttpRequest, head: RequestHead, address: Any, local: Any, scheme: str) -> Environ:
    """Return the environment of a request from `address` to `local`."""
    environ: Environ = {
        REQUEST: request,
        "REQUEST_METHOD": head.method,
        "SCRIPT_NAME": "",
        "PATH_INFO": head.path,
        "QUERY_STRING": head.query,
        "RAW_URI": head.target,
        "SERVER_PROTOCOL": f"HTTP/1.{head.minor}",
        "SERVER_NAME": local[0],
        "SERVER_PORT": str(local[1]),
        "REMOTE_ADDR": address[0],
        "REMOTE_PORT": str(address[1]),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": scheme,
        "wsgi.input": request.source or BytesIO(request.received or b""),
        "wsgi.input_terminated": True,
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    for name, value in head.headers.items():
        key = name.upper().replace("-", "_")
        environ[key if key in {"CONTENT_TYPE", "CONTENT_LENGTH"} else f"HTTP_{key}"] = value
    return environ


class WsgiAnswer:
    """The answer of a WSGI application to one request. Its parts are sent as they come: with the length that the
    application gives, or else in chunks, to HTTP/1.0 up to the end of the connection. `keeps` says at last whether the
    connection can have a next request."""

    def __init__(self, socket: Any, head: RequestHead, keeps: Callable[[], bool]) -> None:
        self._socket = socket
        self._head = head
        self._may_keep = keeps
        self._status: str | None = None
        self._headers: list[tuple[str, str]] = []
        self._length: int | None = None
        self._sent = 0
        self._is_chunked = False
        self._has_body = True
        self.has_begun = False
        self.keeps = False

    def serve(self, application: Application, environ: Environ) -> None:
        parts = application(environ, self._start)
        try:
            for part in parts:
                if part:
                    self._send(part)
            self._end()
        finally:
            close = getattr(parts, "close", None)
            if close is not None:
                close()

    def _start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], None]:
        if exc_info and self.has_begun:
            raise exc_info[1].with_traceback(exc_info[2])
        code = int(status[:3])
        self._status = status
        self._headers = headers
        self._has_body = self._head.method != "HEAD" and code not in {204, 304}
        if code == 204:
            self._headers = [field for field in headers if field[0].lower() != "content-length"]
        lengths = [int(value) for name, value in self._headers if name.lower() == "content-length"]
        self._length = lengths[0] if lengths else None
        return self._send

    def _begin(self) -> bytes:
        assert self._status is not None, "the application has not called start_response"
        self._is_chunked = self._has_body and self._length is None and self._head.minor > 0
        ends_itself = self._is_chunked or self._length is not None or not self._has_body
        self.keeps = ends_itself and self._may_keep()
        head = streamed_head(self._status, self._headers, self._head.minor, keeps=self.keeps, chunked=self._is_chunked)
        self.has_begun = True
        return head

    def _send(self, part: bytes) -> None:
        head = b"" if self.has_begun else self._begin()
        if not self._has_body:
            part = b""
        elif self._length is not None:
            part = part[: self._length - self._sent]
        self._sent += len(part)
        if self._is_chunked and part:
            part = b"%x\r\n%b\r\n" % (len(part), part)
        if head or part:
            send(self._socket, head, part)

    def _end(self) -> None:
        if not self.has_begun:
            send(self._socket, self._begin(), b"0\r\n\r\n" if self._is_chunked else b"")
        elif self._is_chunked:
            self._socket.sendall(b"0\r\n\r\n")
        if self._has_body and self._length is not None and self._sent < self._length:
            self.keeps = False  # the client waits for the rest
