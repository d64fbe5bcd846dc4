"""A request that no thread waits for: sent over a kept connection, and read by an event loop when its answer is there.

    begin() --> [loop: readable] --> read() --> None, not whole yet
                                           |--> Answer: the connection goes back to the pool
                                           `--> NoAnswer: it is closed; what became of the request is not known

To hand a request to a thread and its answer back takes two thread switches, a tenth of a millisecond each and more on a
busy machine, which is what a client notices that has one request on its way. This is a first try and no more: where no
kept connection is idle, or anything but an answer comes of it, a thread carries out the call as it always would.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http.client import HTTPMessage

from portalmq.connection import Address, Answer, Connection, ConnectionPool, NoAnswer

# What a socket takes at once without anybody reading, by far.
REQUEST_BYTES_MAX = 16 * 1024
HEAD_BYTES_MAX = 64 * 1024
PIECE_BYTES = 64 * 1024


class Begun:
    """A request on its way. For one thread; `deadline` is until when its answer is worth waiting for, on `clock`."""

    def __init__(self, pool: ConnectionPool, address: Address, connection: Connection, deadline: float) -> None:
        self.deadline = deadline
        self._pool = pool
        self._address = address
        self._connection = connection
        self._received = bytearray()
        self._head: tuple[int, HTTPMessage, int, int] | None = None

    def fileno(self) -> int:
        return self._connection.fileno()

    def read(self) -> Answer | None:
        """What there is to be read. None while the answer is not whole; raises NoAnswer when it never will be. After an
        answer or NoAnswer this is over."""
        try:
            piece = self._connection.receive(PIECE_BYTES)
            if piece is None:
                return None
            if not piece:
                raise NoAnswer("the broker closed the connection")
            self._received += piece
            return self._answer()
        except (OSError, ValueError) as fault:
            self.end()
            raise NoAnswer(str(fault)) from fault
        except NoAnswer:
            self.end()
            raise

    def _answer(self) -> Answer | None:
        if self._head is None:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                if len(self._received) > HEAD_BYTES_MAX:
                    raise NoAnswer("the head of the answer has no end")
                return None
            status, headers = _head_of(bytes(self._received[:end]))
            length = headers.get("Content-Length")
            if status == 204:
                length = "0"
            if length is None or status < 200:
                raise NoAnswer("the answer does not tell its length")
            self._head = status, headers, end + 4, end + 4 + int(length)
        status, headers, start, stop = self._head
        if len(self._received) < stop:
            return None
        closes = headers.get("Connection", "").lower() == "close" or len(self._received) > stop
        self.end(is_whole=not closes)
        return Answer(status, headers, bytes(self._received[start:stop]))

    def end(self, *, is_whole: bool = False) -> None:
        """Give the connection back; without a whole answer it is closed."""
        self._connection.reusable = is_whole
        self._pool.give_back(self._address, self._connection)


def _head_of(head: bytes) -> tuple[int, HTTPMessage]:
    """The status and the headers. Raises ValueError."""
    first, *lines = head.decode("latin-1").split("\r\n")
    protocol, status, *_ = first.split(" ", 2)
    if not protocol.startswith("HTTP/1.1"):
        raise ValueError(f"the answer is no HTTP/1.1: {first[:100]!r}")
    headers = HTTPMessage()
    for line in lines:
        name, _, value = line.partition(":")
        headers[name] = value.strip()
    return int(status), headers


def begin(
    pool: ConnectionPool,
    address: Address,
    head: bytes,
    body: bytes,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Begun | None:
    """Send a request and return at once. None, with nothing sent that a broker would take for a request, where no kept
    connection is idle, or the request is too large or the address too far for that."""
    if address.scheme == "https" or len(head) + len(body) > REQUEST_BYTES_MAX:
        return None
    connection = pool.borrow(address)
    if connection is None:
        return None
    if not connection.send_at_once(head + body):
        pool.give_back(address, connection)
        return None
    return Begun(pool, address, connection, clock() + timeout_s)
