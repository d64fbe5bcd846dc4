"""Requests that two servers could read differently, or that are not HTTP, are refused and end their connection. Nothing
behind them is served: each is followed by a request that would be visible."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from portalmq.broker.server.http.heads import RefusedHead, parse_fields

LINE = b"POST /v1/topics/t/messages HTTP/1.1\r\n"
HEAD = LINE + b"Host: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
HIDDEN = b"POST /v1/topics/smuggled/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx"


def with_fields(*lines: bytes) -> bytes:
    return HEAD + b"".join([line + b"\r\n" for line in lines]) + b"\r\n"


HEADS: dict[str, tuple[bytes, int]] = {
    # Two lengths, or none that is sure.
    "a length and chunks": (with_fields(b"Content-Length: 5", b"Transfer-Encoding: chunked") + b"0\r\n\r\n", 400),
    "chunks and a length": (with_fields(b"Transfer-Encoding: chunked", b"Content-Length: 5") + b"0\r\n\r\n", 400),
    "two lengths": (with_fields(b"Content-Length: 1", b"Content-Length: 2") + b"ab", 400),
    "the same length twice": (with_fields(b"Content-Length: 1", b"Content-Length: 1") + b"a", 400),
    "a list of lengths": (with_fields(b"Content-Length: 1, 1") + b"a", 400),
    "a negative length": (with_fields(b"Content-Length: -1"), 400),
    "a signed length": (with_fields(b"Content-Length: +1") + b"a", 400),
    "a length in hexadecimal": (with_fields(b"Content-Length: 0x1") + b"a", 400),
    "a length with a space": (with_fields(b"Content-Length: 1 0") + b"a", 400),
    "a length in other digits": (with_fields("Content-Length: ²".encode("latin-1")), 400),
    "an empty length": (with_fields(b"Content-Length:"), 400),
    "a length beyond any number": (with_fields(b"Content-Length: " + b"9" * 100), 400),
    # Codings.
    "identity": (with_fields(b"Transfer-Encoding: identity"), 400),
    "gzip": (with_fields(b"Transfer-Encoding: gzip") + b"0\r\n\r\n", 400),
    "gzip and chunks": (with_fields(b"Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n", 415),
    "identity and chunks": (with_fields(b"Transfer-Encoding: identity, chunked") + b"0\r\n\r\n", 415),
    "chunks and gzip": (with_fields(b"Transfer-Encoding: chunked, gzip") + b"0\r\n\r\n", 400),
    "chunks twice": (with_fields(b"Transfer-Encoding: chunked, chunked") + b"0\r\n\r\n", 400),
    "chunks in two fields": (with_fields(*[b"Transfer-Encoding: chunked"] * 2) + b"0\r\n\r\n", 400),
    "xchunked": (with_fields(b"Transfer-Encoding: xchunked") + b"0\r\n\r\n", 415),
    "chunked with a quote": (with_fields(b'Transfer-Encoding: "chunked"') + b"0\r\n\r\n", 415),
    "chunked with a parameter": (with_fields(b"Transfer-Encoding: chunked;q=1") + b"0\r\n\r\n", 415),
    "chunked with a vertical tab": (with_fields(b"Transfer-Encoding: \x0bchunked") + b"0\r\n\r\n", 400),
    "an empty coding": (with_fields(b"Transfer-Encoding:") + b"0\r\n\r\n", 415),
    "chunked with a space before the colon": (with_fields(b"Transfer-Encoding : chunked") + b"0\r\n\r\n", 400),
    "chunks to HTTP/1.0": (LINE.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    # Lines and fields.
    "a folded line": (with_fields(b"A: b", b" c"), 400),
    "a folded line with a tab": (with_fields(b"A: b", b"\tc"), 400),
    "a fold before the first field": (LINE + b" Host: x\r\nHost: x\r\n\r\n", 400),
    "bare line feeds": (HEAD.replace(b"\r\n", b"\n") + b"\n", 400),
    "a bare line feed after the request line": (LINE[:-2] + b"\nHost: x\r\n\r\n", 400),
    "a bare line feed after a field": (HEAD + b"A: b\nContent-Length: 5\r\n\r\n", 400),
    "a bare line feed at the end": (HEAD + b"\n", 400),
    "a bare carriage return": (with_fields(b"A: b\rContent-Length: 5"), 400),
    "a bare carriage return in the request line": (LINE[:-2] + b"\r\rHost: x\r\n\r\n", 400),
    "a zero byte in a value": (with_fields(b"A: \x00"), 400),
    "a zero byte in a name": (with_fields(b"A\x00: b"), 400),
    "a space before a colon": (with_fields(b"A : b"), 400),
    "a tab before a colon": (with_fields(b"Content-Length\t: 1") + b"a", 400),
    "a space in a name": (with_fields(b"A b: c"), 400),
    "an empty name": (with_fields(b": b"), 400),
    "no colon": (with_fields(b"A"), 400),
    "a name of other bytes": (with_fields(b"\xc3\xa9: b"), 400),
    "two types": (with_fields(b"Content-Type: a/b", b"Content-Type: a/c"), 400),
    # The host and the target.
    "no host": (LINE + b"Content-Length: 0\r\n\r\n", 400),
    "two hosts": (with_fields(b"Host: y"), 400),
    "the same host twice": (with_fields(b"Host: x"), 400),
    "a host with a path": (LINE + b"Host: x/y\r\n\r\n", 400),
    "a host with a user": (LINE + b"Host: y@x\r\n\r\n", 400),
    "a list of hosts": (LINE + b"Host: x, y\r\n\r\n", 400),
    "a URL of another host": (b"GET http://y/livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a URL of another protocol": (b"GET ftp://x/livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a host as target": (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a path without a slash": (b"GET livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a fragment": (b"GET /livez#a HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "other bytes in the path": (b"GET /liv\xe9z HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a space in the path": (b"GET /livez HTTP/1.1 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "two spaces": (b"GET  /livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a tab": (b"GET\t/livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a space at the end": (b"GET /livez HTTP/1.1 \r\nHost: x\r\n\r\n", 400),
    "* of GET": (b"GET * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    # Versions and methods.
    "HTTP/0.9": (b"GET /livez\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/9.9": (b"GET /livez HTTP/9.9\r\nHost: x\r\n\r\n", 400),
    "HTTP/1.10": (b"GET /livez HTTP/1.10\r\nHost: x\r\n\r\n", 400),
    "http/1.1": (b"GET /livez http/1.1\r\nHost: x\r\n\r\n", 400),
    "a method in lower case": (b"get /livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a method of other bytes": (b"G\xcbT /livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a short method": (b"GE /livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a long method": (b"G" * 30 + b" /livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "two empty lines first": (b"\r\n\r\nGET /livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    # Sizes.
    "a long line": (b"GET /" + b"x" * 9_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    "a long line without an end": (b"GET /" + b"x" * 100_000, 414),
    "a long field": (with_fields(b"A: " + b"x" * 9_000), 431),
    "many fields": (with_fields(*[b"A: b"] * 100), 431),
    "a large head": (with_fields(*[b"A%d: " % n + b"b" * 8_000 for n in range(9)]), 431),
    "a large head without an end": (HEAD + (b"A: " + b"b" * 8_000 + b"\r\n") * 9, 431),
    "an unknown expectation": (with_fields(b"Expect: the-unexpected", b"Content-Length: 1"), 417),
}

CHUNKS: dict[str, bytes] = {
    "a prefix": b"0x5\r\nhello\r\n0\r\n\r\n",
    "a plus": b"+5\r\nhello\r\n0\r\n\r\n",
    "a minus": b"-5\r\nhello\r\n0\r\n\r\n",
    "a space before the size": b" 5\r\nhello\r\n0\r\n\r\n",
    "a space after the size": b"5 \r\nhello\r\n0\r\n\r\n",
    "an underscore": b"0_5\r\nhello\r\n0\r\n\r\n",
    "no size": b"\r\nhello\r\n0\r\n\r\n",
    "no number": b"zz\r\nhello\r\n0\r\n\r\n",
    "a size beyond any number": b"1" + b"0" * 16 + b"\r\nhello\r\n0\r\n\r\n",
    "a bare line feed after the size": b"5\nhello\r\n0\r\n\r\n",
    "a bare carriage return after the size": b"5\rX\r\nhello\r\n0\r\n\r\n",
    "a bare line feed after the data": b"5\r\nhello\n0\r\n\r\n",
    "data longer than the size": b"5\r\nhelloX\r\n0\r\n\r\n",
    "no end of the data": b"5\r\nhello0\r\n\r\n",
    "an extension of other bytes": b"5;\x00\r\nhello\r\n0\r\n\r\n",
    "an extension without a name": b"5;=a\r\nhello\r\n0\r\n\r\n",
    "an extension with an open quote": b'5;a="b\r\nhello\r\n0\r\n\r\n',
    "a huge extension": b"5;" + b"a" * 9_000 + b"\r\nhello\r\n0\r\n\r\n",
    "a length as trailer": b"5\r\nhello\r\n0\r\nContent-Length: 5\r\n\r\n",
    "a coding as trailer": b"5\r\nhello\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a secret as trailer": b"5\r\nhello\r\n0\r\nAuthorization: x\r\n\r\n",
    "a trailer without a colon": b"5\r\nhello\r\n0\r\nA\r\n\r\n",
    "a trailer that is folded": b"5\r\nhello\r\n0\r\nA: b\r\n c\r\n\r\n",
    "a trailer with a bare line feed": b"5\r\nhello\r\n0\r\nA: b\nB: c\r\n\r\n",
    "many trailers": b"5\r\nhello\r\n0\r\n" + b"A: b\r\n" * 101 + b"\r\n",
    "large trailers": b"5\r\nhello\r\n0\r\n" + (b"A: " + b"b" * 8_000 + b"\r\n") * 9 + b"\r\n",
}


def check_refused(served: Any, answer: bytes, status: int) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"\r\nConnection: close" in head
    assert b"\r\nContent-Type: application/problem+json" in head
    problem = json.loads(body)  # and nothing more
    assert (problem["status"], problem["outcome"]) == (status, "not_applied")
    assert problem["type"].startswith("urn:portalmq:error:")
    assert served.broker.logs == {}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_not_strictly_http_ends_its_connection(served: Any, name: str) -> None:
    data, status = HEADS[name]
    check_refused(served, served.exchange(data + HIDDEN), status)


@pytest.mark.parametrize("name", HEADS)
def test_it_is_refused_in_small_pieces_too(served: Any, name: str) -> None:
    data, status = HEADS[name]
    size = max(1, len(data) // 40)
    pieces = [data[begin : begin + size] for begin in range(0, len(data), size)]
    try:
        answer = served.exchange(*pieces, HIDDEN)
    except OSError:
        pytest.fail("the connection was reset, which may destroy the answer")
    check_refused(served, answer, status)


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_that_are_not_strictly_http_end_their_connection(served: Any, name: str) -> None:
    check_refused(served, served.exchange(CHUNKED + CHUNKS[name] + HIDDEN), 400)


@pytest.mark.parametrize("name", CHUNKS)
def test_they_are_refused_when_they_follow_their_head(served: Any, name: str) -> None:
    check_refused(served, served.exchange(CHUNKED, CHUNKS[name], HIDDEN), 400)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (with_fields(b"Content-Length: 00005") + b"hello", "hello"),
        (with_fields(b"content-length:5\t ") + b"hello", "hello"),
        (with_fields(b"Transfer-Encoding:\tCHUNKED ") + b"5\r\nhello\r\n0\r\n\r\n", "hello"),
        (CHUNKED + b"00005\r\nhello\r\n000\r\n\r\n", "hello"),
        (CHUNKED + b'2;a=b ; c="d;\\"e"\r\nhe\r\nA\r\nllo, there\r\n0;end\r\nA: b\r\n\r\n', "hello, there"),
        (b"\r\n" + with_fields(b"Content-Length: 5") + b"hello", "hello"),
        (b"POST http://X/v1/topics/t/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\na", "a"),
        (b"POST http://x/v1/topics/t/messages HTTP/1.0\r\nContent-Length: 1\r\n\r\na", "a"),
        (LINE.replace(b"1.1", b"1.7") + b"Host: [::1]:80\r\nContent-Length: 1\r\n\r\na", "a"),
        (LINE + b"Host:\r\nContent-Length: 1\r\n\r\na", "a"),
        (with_fields(b"Content_Length: 9", b"Content-Length: 1") + b"a", "a"),
        (with_fields(b"A: \xff\t\x80", b"A: again", b"Content-Length: 1") + b"a", "a"),
    ],
)
def test_what_is_allowed_is_served_and_the_next_request_too(served: Any, data: bytes, value: str) -> None:
    answer = served.exchange(data.replace(b"HTTP/1.0\r\n", b"HTTP/1.0\r\nConnection: keep-alive\r\n") + HIDDEN)
    assert answer.count(b"200 OK\r\n") == 2, answer
    values = {topic: [each.value for each in logs[0]] for topic, logs in served.broker.logs.items()}
    assert values == {"t": [value.encode()], "smuggled": [b"x"]}


def seconds_of(parse: Any, line: str) -> float:
    began = time.perf_counter()
    with pytest.raises(RefusedHead):
        parse([line])
    return time.perf_counter() - began


def test_a_field_of_blanks_is_refused_as_quickly_as_any_other() -> None:
    """Once it took the square of its length: 10,000 times as long."""
    blanks = min(seconds_of(parse_fields, f"a:{' ' * 8_000}\0") for _ in range(5))
    letters = min(seconds_of(parse_fields, f"a:{'x' * 8_000}\0") for _ in range(5))
    assert blanks < 500 * letters
