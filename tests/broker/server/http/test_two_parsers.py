"""Random mutations of requests: what is accepted, another strict parser (gunicorn's) reads in the same way. A request
that two parsers read differently is what smuggling needs."""

from __future__ import annotations

import random
from typing import Any

from gunicorn.config import Config
from gunicorn.http.parser import RequestParser

from portalmq.broker.api.body import FramingError
from portalmq.broker.server.http.heads import RefusedHead, parse_head
from portalmq.broker.server.http.stream import ReceivedBytes, RequestBody

MUTATIONS = 6_000
SEED = 7

REQUESTS = [
    b"POST /a?b=c HTTP/1.1\r\nHost: x:80\r\nContent-Length: 5\r\nA: b\r\n\r\nhello",
    b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nX: y\r\n\r\n",
    b"GET http://x/a HTTP/1.1\r\nHost: x\r\nConnection: close, x\r\nExpect: 100-continue\r\n\r\n",
    b"GET /%41 HTTP/1.0\r\nA_b: c\r\n\r\n",
]
PIECES = [
    *(b"\r", b"\n", b"\r\n", b" ", b"\t", b"\x00", b"\x0b", b"\xa0", b"\xff"),
    *(b":", b",", b";", b"#", b"+", b"-", b"_", b"/", b'"', b"0", b"5", b"x"),
    *(b"chunked", b"HTTP/1.1", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: y\r\n"),
]

Read = tuple[str, str, dict[str, str], bytes]


class Received:
    """A socket with all its bytes here."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def recv(self, size: int) -> bytes:
        piece, self._data = self._data[:size], self._data[size:]
        return piece


def mutated(dice: random.Random) -> bytes:
    data = bytearray(dice.choice(REQUESTS))
    for _ in range(dice.randint(1, 3)):
        place, kind = dice.randrange(len(data)), dice.random()
        if kind < 0.5:
            data[place:place] = dice.choice(PIECES)
        elif kind < 0.75:
            data[place] = dice.randrange(256)
        else:
            del data[place : place + dice.randint(1, 3)]
    return bytes(data)


def read_by_the_broker(data: bytes) -> Read | None:
    received = ReceivedBytes(Received(data))
    try:
        raw = received.head(lambda: received.socket.recv(65_536))
        if raw is None:
            return None
        head = parse_head(raw)
        has_body = head.is_chunked or head.length is not None
        body = RequestBody(received, head.length, asks=False).read() if has_body else b""
    except (RefusedHead, FramingError):
        return None
    return head.method, head.target, head.headers, body


def read_by_gunicorn(data: bytes) -> Any:
    try:
        request = next(RequestParser(Config(), Received(data), ("192.0.2.1", 1)))
        fields: dict[str, str] = {}
        for name, value in request.headers:
            key = name.lower()
            fields[key] = f"{fields[key]},{value}" if key in fields else value
        has_body = not fields.keys().isdisjoint({"content-length", "transfer-encoding"})
        return request.method, request.uri, fields, request.body.read() if has_body else b""
    except Exception as fault:  # noqa: BLE001 - any refusal
        return fault


def test_what_the_broker_accepts_another_strict_parser_reads_alike() -> None:
    dice = random.Random(SEED)
    accepted = 0
    for _ in range(MUTATIONS):
        data = mutated(dice)
        read = read_by_the_broker(data)
        if read is not None:
            accepted += 1
            assert read == read_by_gunicorn(data), data
    assert accepted > MUTATIONS // 20
