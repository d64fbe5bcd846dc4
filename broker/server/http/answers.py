"""Answers as bytes, and the sending of them."""

from __future__ import annotations

import re
import time
from email.utils import formatdate
from functools import lru_cache
from typing import Any

from portalmq.broker.api.dispatch import status_line
from portalmq.broker.api.request_context import ResponseParts

# A larger body is sent by itself, instead of being copied behind its head.
JOIN_BYTES_MAX = 64 * 1024

_is_valid_field = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+: [^\x00-\x08\x0a-\x1f\x7f]*").fullmatch


class InvalidAnswer(Exception):
    """A header of the application that would break the answer's framing."""


def send(socket: Any, head: bytes, body: bytes) -> None:
    """Send the head and the body of an answer, together if the body is small."""
    if len(body) > JOIN_BYTES_MAX:
        socket.sendall(head)
        socket.sendall(body)
        return
    data = head + body
    sent = socket.send(data)
    if sent < len(data):
        socket.sendall(memoryview(data)[sent:])


def head_of(answer: ResponseParts, minor: int, *, keeps: bool) -> bytes:
    """Return the head of an answer with its body's length."""
    opening = _opening(status_line(answer.status), minor, keeps, int(time.time()), answer.content_type)
    if answer.headers:
        opening += _fields(answer.headers)
    return b"%bContent-Length: %d\r\n\r\n" % (opening, len(answer.body))


def streamed_head(status: str, headers: list[tuple[str, str]], minor: int, *, keeps: bool, chunked: bool) -> bytes:
    """Return the head of an answer of a WSGI application. Raises InvalidAnswer."""
    coding = b"Transfer-Encoding: chunked\r\n" if chunked else b""
    return _opening(status, minor, keeps, int(time.time())) + coding + _fields(headers) + b"\r\n"


@lru_cache(64)
def _opening(status: str, minor: int, keeps: bool, second: int, content_type: str | None = None) -> bytes:
    """Return the lines that most answers within this second have in common."""
    kept = "keep-alive" if keeps else "close"
    typed = "" if content_type is None else f"Content-Type: {content_type}\r\n"
    date = formatdate(second, usegmt=True)
    return f"HTTP/1.{minor} {status}\r\nServer: portalmq\r\nDate: {date}\r\nConnection: {kept}\r\n{typed}".encode()


def _fields(headers: Any) -> bytes:
    lines = [f"{name}: {value}" for name, value in headers]
    for line in lines:
        if _is_valid_field(line) is None:
            raise InvalidAnswer(line.partition(":")[0])  # the value may be a secret
    return "".join([f"{line}\r\n" for line in lines]).encode("latin-1")
