"""Reader of HTTP/1.1 answers.

Nearly all answers of a broker are alike: a short head with a Content-Length, followed by the body. Those are read here,
by one system call if they arrive in one piece. `http.client` reads all others, perhaps a proxy's, from their first
byte.
"""

from __future__ import annotations

import io
import socket
from dataclasses import dataclass
from http.client import HTTPResponse, IncompleteRead, RemoteDisconnected
from typing import Any, NamedTuple, cast

PIECE_BYTES = 64 * 1024
# Statuses whose answers have no body, whatever their heads say.
_WITHOUT_BODY = frozenset({204, 304})


class Fields(dict[str, str]):
    """The header fields of an answer, by lower-case name."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field's value, whatever the case of its name."""
        return super().get(name.lower(), default)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A complete HTTP answer; its connection is free again."""

    status: int
    headers: Fields
    body: bytes


class _Head(NamedTuple):
    """The content of an ordinary head, and its size in bytes."""

    status: int
    fields: Fields
    size: int
    body_bytes: int


def read_answer(connection: socket.socket, method: str, piece: bytes) -> tuple[HttpAnswer, bool]:
    """Return the answer that begins with the bytes `piece`, and whether its connection is reusable. Raises OSError,
    HTTPException or ValueError if it is not a whole answer."""
    if not piece:
        raise RemoteDisconnected("the connection was closed without an answer")
    head = _ordinary(piece) if method != "HEAD" else None
    if head is None or head.body_bytes - (len(piece) - head.size) > PIECE_BYTES:
        return _read_by_library(connection, method, piece)
    body = piece[head.size :]
    while len(body) < head.body_bytes:
        more = connection.recv(PIECE_BYTES)
        if not more:
            raise IncompleteRead(body, head.body_bytes - len(body))
        body += more
    is_reusable = len(body) == head.body_bytes and "close" not in head.fields.get("connection", "").lower()
    return HttpAnswer(head.status, head.fields, body[: head.body_bytes]), is_reusable


def _ordinary(piece: bytes) -> _Head | None:
    """Return the head if it is complete and ordinary."""
    end = piece.find(b"\r\n\r\n")
    if end < 0 or not piece.startswith(b"HTTP/1.1 "):
        return None
    text = piece[:end].decode("latin-1")
    first, *lines = text.split("\r\n")
    if text.count("\n") != len(lines) or text.count("\r") != len(lines):
        return None
    fields = Fields()
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or name in fields or name != name.strip():
            return None
        fields[name] = value.strip(" \t")
    status, length = first[9:12], fields.get("content-length", "")
    if not (status.isdecimal() and first[12:13] in {"", " "} and first.isascii()):
        return None
    if not (length.isdecimal() and length.isascii()) or "transfer-encoding" in fields:
        return None
    if int(status) < 200 or int(status) in _WITHOUT_BODY:
        return None
    return _Head(int(status), fields, end + 4, int(length))


def _read_by_library(connection: socket.socket, method: str, piece: bytes) -> tuple[HttpAnswer, bool]:
    response = HTTPResponse(cast(socket.socket, _PartlyRead(connection, piece)), method=method)
    try:
        response.begin()
        fields = Fields()
        for name, value in response.msg.items():
            fields.setdefault(name.lower(), value)
        answer = HttpAnswer(response.status, fields, response.read())
    finally:
        response.close()
    return answer, not response.will_close


class _PartlyRead(io.RawIOBase):
    """A connection whose first bytes are already read, as `http.client` needs it."""

    def __init__(self, connection: socket.socket, piece: bytes) -> None:
        super().__init__()
        self._connection = connection
        self._piece = piece

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._piece:
            return self._connection.recv_into(buffer)
        size = min(len(buffer), len(self._piece))
        buffer[:size], self._piece = self._piece[:size], self._piece[size:]
        return size
