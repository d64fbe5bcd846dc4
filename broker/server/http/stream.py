"""The bytes that a connection has received, and the bodies of requests in them."""

from __future__ import annotations

import re
from typing import Any

import gevent

from portalmq.broker.api.body import FramingError
from portalmq.broker.server.http.heads import (
    FIELDS_MAX,
    HEAD_BYTES_MAX,
    LINE_BYTES_MAX,
    HeadTooLarge,
    LineTooLong,
    RefusedHead,
    check_trailers,
)

RECEIVE_BYTES = 64 * 1024
BODY_RECEIVE_BYTES = 256 * 1024
# After so many chunks of a body, other greenlets run.
CHUNKS_A_TURN = 500
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_END = b"\r\n\r\n"
_bare_line_feed = re.compile(rb"(?<!\r)\n").search
_match_size = re.compile(
    # chunk-size, and chunk-ext of tokens and quoted strings (RFC 9112, section 7.1)
    rb"([0-9A-Fa-f]{1,16})"
    rb"(?:[ \t]*;[ \t]*[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
    rb"(?:[ \t]*=[ \t]*(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+|\"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*\"))?)*"
).fullmatch


class ReceivedBytes:
    """The received bytes of a connection that are not used yet: those of `data` from `at` on."""

    __slots__ = ("at", "data", "socket")

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.data = b""
        self.at = 0

    def has_some(self) -> bool:
        return self.at < len(self.data)

    def put(self, data: bytes) -> None:
        """Take received bytes in. All earlier ones are used."""
        self.data = data
        self.at = 0

    def skip(self, end: int) -> None:
        """Mark the bytes of `data` before `end` as used."""
        if end == len(self.data):
            self.data = b""  # a call may wait for long
            end = 0
        self.at = end

    def take(self, size: int) -> bytes:
        """Return up to `size` bytes, received now if there are none. Empty at the end."""
        data, at = self.data, self.at
        if at == len(data):
            return self.socket.recv(min(size, BODY_RECEIVE_BYTES))  # type: ignore[no-any-return]
        piece = data[at : at + size]
        self.skip(at + len(piece))
        return piece

    def line(self, bytes_max: int) -> bytes:
        """Return the bytes before the next CRLF. Raises FramingError for an LF or CR alone, and for too many."""
        looked = self.at
        while (end := self.data.find(b"\n", looked)) < 0 and len(self.data) - self.at <= bytes_max + 1:
            looked = len(self.data) - self.at
            more = self.socket.recv(RECEIVE_BYTES)
            if not more:
                raise FramingError("it ended within a chunk")
            self.data, self.at = self.data[self.at :] + more, 0
        line = self.data[self.at : end - 1]
        if end < 0 or len(line) > bytes_max:
            raise FramingError("a line is too long")
        if self.data[end - 1 : end] != b"\r" or end == self.at or b"\r" in line:
            raise FramingError("a line ends without CRLF")
        self.skip(end + 1)
        return line

    def head(self, receive: Any) -> bytes | None:
        """Return the next head, without its empty line, or None when the connection ends before. `receive` waits for
        bytes. Raises RefusedHead as soon as the bytes cannot be a head."""
        data, at = self.data, self.at
        if at == len(data):
            data, at = receive(), 0
        end = data.find(_END, at)
        if end >= 0 and end - at <= HEAD_BYTES_MAX:
            self.data = data
            self.skip(end + 4)
            return data[at:end]
        return self._gathered(data[at:], receive)

    def _gathered(self, piece: bytes, receive: Any) -> bytes | None:
        """Return the head that begins with `piece`. Only new bytes are searched, however small the pieces are."""
        head = bytearray()
        has_line = False
        while piece:
            looked = len(head)
            head += piece
            end = head.find(_END, max(0, looked - len(_END) + 1))
            has_line = has_line or head.find(b"\r\n", max(0, looked - 1), LINE_BYTES_MAX + 4) >= 0
            if not has_line and len(head) > LINE_BYTES_MAX + 2:
                raise LineTooLong
            if (end if end >= 0 else len(head)) > HEAD_BYTES_MAX:
                raise HeadTooLarge
            if end >= 0:
                self.data = bytes(head)
                self.skip(end + 4)
                return bytes(head[:end])
            if _bare_line_feed(head, looked):
                raise RefusedHead("a line ends without CRLF")
            piece = receive()
        return None


class RequestBody:
    """The body of a request whose bytes did not all come with its head. `asks`: the client waits for `100 Continue`."""

    def __init__(self, received: ReceivedBytes, length: int | None, *, asks: bool) -> None:
        self._received = received
        self._length = length
        self._asks = asks
        # Of the body, or of the current chunk.
        self._left = length or 0
        self._chunks = 0
        self._has_ended = False

    def read(self, size: int = -1) -> bytes:
        """Return `size` bytes, or all. Fewer at the end of the body. Raises FramingError, OSError."""
        if self._asks:
            self._asks = False
            if not self._received.has_some():
                self._received.socket.sendall(CONTINUE)
        parts = []
        wanted = size if size >= 0 else 1 << 62
        while wanted and not self._has_ended:
            if not self._left and not self._next_chunk():
                break
            part = self._received.take(min(self._left, wanted))
            if not part and self._length is None:
                raise FramingError("it ended within a chunk")
            if not part:
                break
            parts.append(part)
            wanted -= len(part)
            self._left -= len(part)
            if not self._left and self._length is None and self._received.line(0):
                raise FramingError("a chunk is longer than its size")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _next_chunk(self) -> bool:
        """Read the size of the next chunk; return False at the end of the body."""
        if self._length is None:
            found = _match_size(self._received.line(LINE_BYTES_MAX))
            if found is None:
                raise FramingError("the size of a chunk is not valid")
            self._left = int(found[1], 16)
            self._chunks += 1
            if self._chunks % CHUNKS_A_TURN == 0:
                gevent.sleep(0)
            if not self._left:
                self._skip_trailers()
        self._has_ended = not self._left
        return not self._has_ended

    def _skip_trailers(self) -> None:
        lines: list[str] = []
        left = HEAD_BYTES_MAX
        while line := self._received.line(min(left, LINE_BYTES_MAX)):
            left = max(0, left - len(line))
            lines.append(line.decode("latin-1"))
            if len(lines) > FIELDS_MAX:
                raise FramingError("the trailers are too many")
        try:
            check_trailers(lines)
        except RefusedHead as fault:
            raise FramingError(str(fault)) from None
