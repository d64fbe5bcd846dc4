"""Reader of HTTP/1.x answers, of brokers and of any other correct server or proxy (RFC 9112).

The end of an answer follows from its head alone. A head that leaves it in doubt is refused: two lengths, a length
beside chunks, an unknown coding, a bare CR. So no byte of an answer is ever taken for the next one. Heads are alike but
for their date and length, so parsed ones are kept.
"""

from __future__ import annotations

import io
import re
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import msgspec

PIECE_BYTES = 64 * 1024
# More than any broker or proxy sends: a head, a line of a chunk, or the trailer.
HEAD_BYTES_MAX = 64 * 1024
INTERIM_ANSWERS_MAX = 16
HEADS_KEPT = 256
KEPT_HEAD_BYTES_MAX = 1024
# No broker answers with more; room for a body is taken before its bytes arrive.
BODY_BYTES_MAX = 1 << 30
# Statuses whose answers have no body, whatever their heads say.
_WITHOUT_BODY = frozenset({204, 304})
# Fields that are lists: several lines count as one. Of all other fields the first line counts.
_LISTS = frozenset({"content-length", "transfer-encoding", "connection"})

_BEGINNING = b"HTTP/1."
_STATUS_LINE = re.compile(r"HTTP/1\.([0-9]) ([1-9][0-9]{2})(?: [^\r\0]*)?\r?")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\r\0]*+)\r?")
_FOLD = re.compile(r"\r?\n[ \t]+")
_LENGTH = re.compile(r"[0-9]{1,18}")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n\0]*)?")


class BrokenAnswer(ValueError):
    """The bytes are not a whole answer in HTTP/1.x."""


class CutOff(BrokenAnswer):
    """The bytes are the beginning of an answer."""


class Readable(Protocol):
    """A connection. Both methods wait for bytes, and return none, or 0, once it is closed."""

    def recv(self, at_most: int, /) -> bytes: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...


class Fields(dict[str, str]):
    """The header fields of an answer, by lower-case name. Answers with the same head share one: never change it."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field's value, whatever the case of its name."""
        return super().get(name.lower(), default)


class HttpAnswer(msgspec.Struct, frozen=True):
    """A complete HTTP answer; its connection is free again. `is_repeat`: a try before may have been executed, too."""

    status: int
    headers: Fields
    body: bytes
    is_repeat: bool = False


class _Head(NamedTuple):
    """`length` of the body; None if it is chunked, or else lasts until the connection is closed."""

    status: int
    fields: Fields
    is_chunked: bool
    length: int | None
    is_kept: bool


def read_answer(connection: Readable, method: str, piece: bytes) -> tuple[HttpAnswer, bool]:
    """Return the answer that begins with the bytes `piece`, and whether its connection is reusable. Raises OSError, or
    BrokenAnswer if it is not a whole answer."""
    if not piece:
        raise ConnectionResetError("the connection was closed without an answer")
    for _ in range(INTERIM_ANSWERS_MAX):
        while (size := _head_size(piece)) == 0:
            if piece[:7] != _BEGINNING[: len(piece)]:
                raise BrokenAnswer(f"it begins with {piece[:80]!r}, which is not HTTP/1.x")
            piece += _more(connection)
        head = _parse(piece[:size]) if size <= KEPT_HEAD_BYTES_MAX else _parse.__wrapped__(piece[:size])
        rest = piece[size:]
        if head.status >= 200:
            break
        piece = rest
    else:
        raise BrokenAnswer("interim answers, and no final one")
    if method == "HEAD" or head.status in _WITHOUT_BODY:
        body, is_end = b"", not rest
    elif head.length == len(rest):
        body, is_end = rest, True
    else:
        source = _Source(connection, rest)
        unread = io.BufferedReader(source, PIECE_BYTES)
        if head.length is not None:
            body = _take(unread, head.length)
        else:
            body = _chunks(unread) if head.is_chunked else unread.read()
        is_end = source.has_ended_with(unread)
    return HttpAnswer(head.status, head.fields, body), is_end and head.is_kept


class Arrived:
    """Bytes that came from a connection, all at once: a Readable that is closed behind them."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def recv(self, at_most: int, /) -> bytes:
        piece = self._content[self._at : self._at + at_most]
        self._at += len(piece)
        return piece

    def recv_into(self, buffer: memoryview, /) -> int:
        piece = self.recv(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


class AnswerEnd:
    """Says when all bytes of one answer have come, for a connection that is not read but told of them."""

    def __init__(self, method: str) -> None:
        self._method = method
        # The size of the answer with its heads, and whether that is still to be found.
        self._size = 0
        self._is_sought = True
        self._is_chunked = False

    def is_in(self, arrived: bytearray) -> bool:
        """Return whether `read_answer` would wait for no more bytes. False for an answer that ends with its
        connection."""
        if self._is_sought:
            try:
                self._seek(arrived)
            except BrokenAnswer:
                return True
        if self._is_chunked:
            return arrived.endswith(b"\r\n\r\n") and self._is_read(arrived)
        return 0 < self._size <= len(arrived)

    def _seek(self, arrived: bytearray) -> None:
        start = 0
        for _ in range(INTERIM_ANSWERS_MAX):
            ahead = bytes(arrived[start : start + HEAD_BYTES_MAX + 4])
            size = _head_size(ahead)
            if not size:
                if ahead[:7] != _BEGINNING[: len(ahead)]:
                    raise BrokenAnswer("it is not HTTP/1.x")
                return
            head, start = _parse(ahead[:size]), start + size
            if head.status >= 200:
                break
        else:
            raise BrokenAnswer("interim answers, and no final one")
        self._is_sought = False
        if self._method == "HEAD" or head.status in _WITHOUT_BODY:
            self._size = start
        elif head.length is not None:
            self._size = start + (head.length if head.length <= BODY_BYTES_MAX else 0)
        self._is_chunked = not self._size and head.is_chunked

    def _is_read(self, arrived: bytearray) -> bool:
        content = bytes(arrived)
        try:
            read_answer(Arrived(b""), self._method, content)
        except CutOff:
            return False
        except BrokenAnswer:
            return True
        return True


def _head_size(piece: bytes) -> int:
    """Return the size of the head with its empty line; 0 if it is not complete. A line may end with LF alone."""
    end = piece.find(b"\n\r\n")
    bare = piece.find(b"\n\n", 0, end + 1 if end >= 0 else len(piece))
    size = bare + 2 if bare >= 0 else end + 3 if end >= 0 else 0
    if (size or len(piece)) > HEAD_BYTES_MAX:
        raise BrokenAnswer(f"its head is longer than {HEAD_BYTES_MAX} bytes")
    return size


@lru_cache(HEADS_KEPT)
def _parse(head: bytes) -> _Head:
    first, *lines = _FOLD.sub(" ", head.decode("latin-1")).split("\n")
    status_line = _STATUS_LINE.fullmatch(first)
    if status_line is None:
        raise BrokenAnswer(f"it begins with {first[:80]!r}, which is not HTTP/1.x")
    fields = _fields_of(lines[:-2])
    minor, status = int(status_line[1]), int(status_line[2])
    if status == 101:
        raise BrokenAnswer("it switches to a protocol that nobody asked for")
    codings, lengths = fields.get("transfer-encoding"), fields.get("content-length")
    length = None
    if codings is not None:
        if lengths is not None or minor == 0 or codings.lower() != "chunked":
            raise BrokenAnswer(f"its length is in doubt: Transfer-Encoding {codings!r}, Content-Length {lengths!r}")
    elif lengths is not None:
        [size, *others] = {each.strip(" \t") for each in lengths.split(",")}
        if others or not _LENGTH.fullmatch(size):
            raise BrokenAnswer(f"its Content-Length is {lengths!r}")
        length = int(size)
    options = {each.strip(" \t").lower() for each in fields.get("connection", "").split(",")}
    has_end = status in _WITHOUT_BODY or length is not None or codings is not None
    is_kept = has_end and "close" not in options and (minor > 0 or "keep-alive" in options)
    return _Head(status, fields, codings is not None, length, is_kept)


def _fields_of(lines: list[str]) -> Fields:
    fields = Fields()
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise BrokenAnswer(f"{line[:80]!r} is not a header field")
        name, value = field[1].lower(), field[2].strip(" \t")
        if name not in fields:
            fields[name] = value
        elif name in _LISTS:
            fields[name] += f", {value}"
    return fields


def _take(unread: io.BufferedReader[Any], size: int) -> bytes:
    """Return the next `size` bytes. The reader fills them in place: joining pieces of a megabyte takes four times as
    long."""
    if size > BODY_BYTES_MAX:
        raise BrokenAnswer(f"its body has {size} bytes, more than any answer of a broker")
    taken = unread.read(size)
    if len(taken) < size:
        raise _cut_off()
    return taken


def _line(unread: io.BufferedReader[Any]) -> bytes:
    """Return the next line, without its CRLF."""
    line = unread.readline(HEAD_BYTES_MAX + 2)
    if line.endswith(b"\r\n"):
        return line[:-2]
    if len(line) > HEAD_BYTES_MAX:
        raise BrokenAnswer(f"a line is longer than {HEAD_BYTES_MAX} bytes")
    raise BrokenAnswer(f"{line[:80]!r} does not end with CRLF") if line.endswith(b"\n") else _cut_off()


def _chunks(unread: io.BufferedReader[Any]) -> bytes:
    """Return a chunked body. Its trailer is read and dropped."""
    body = []
    while True:
        line = _line(unread)
        size = _CHUNK_SIZE.fullmatch(line)
        if size is None:
            raise BrokenAnswer(f"a chunk begins with {line[:80]!r}")
        if not int(size[1], 16):
            break
        body.append(_take(unread, int(size[1], 16)))
        if _take(unread, 2) != b"\r\n":
            raise BrokenAnswer("a chunk is longer than its size")
    trailer: list[str] = []
    while line := _line(unread):
        trailer.append(line.decode("latin-1"))
        if sum(map(len, trailer)) > HEAD_BYTES_MAX:
            raise BrokenAnswer(f"its trailer is longer than {HEAD_BYTES_MAX} bytes")
    _fields_of(trailer)
    return b"".join(body)


class _Source(io.RawIOBase):
    """The bytes of a connection after a head, of which `piece` is read already."""

    def __init__(self, connection: Readable, piece: bytes) -> None:
        super().__init__()
        self._connection = connection
        self._piece = piece
        self._is_over = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        if self._piece:
            size = min(len(view), len(self._piece))
            view[:size], self._piece = self._piece[:size], self._piece[size:]
            return size
        return 0 if self._is_over else self._connection.recv_into(view)

    def has_ended_with(self, unread: io.BufferedReader[Any]) -> bool:
        """Return whether `unread`, which reads from this, returned all bytes that came. No more can be read then."""
        self._is_over = True
        return not unread.peek(1)


def _more(connection: Readable) -> bytes:
    piece = connection.recv(PIECE_BYTES)
    if not piece:
        raise _cut_off()
    return piece


def _cut_off() -> CutOff:
    return CutOff("the connection was closed before the end of the answer")
