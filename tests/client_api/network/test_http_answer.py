"""Answers of brokers, and of other HTTP/1.1 servers, read from their first bytes."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from portalmq.network.http_answer import HEAD_BYTES_MAX, PIECE_BYTES, BrokenAnswer, HttpAnswer, read_answer

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 4\r\nConnection: keep-alive\r\n\r\nbody"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def read(sent: bytes, method: str = "POST", first_bytes: int = PIECE_BYTES) -> tuple[HttpAnswer, bool]:
    """Return the answer read from these bytes, whose first piece has at most `first_bytes` bytes."""
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(60)

        def send() -> None:
            there.sendall(sent)
            there.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            return read_answer(here, method, here.recv(first_bytes) if sent else b"")
        finally:
            sender.join()


def test_an_ordinary_answer_is_read() -> None:
    answer, is_reusable = read(PLAIN)
    assert (answer.status, answer.body, is_reusable) == (200, b"body", True)
    assert answer.headers.get("Content-Type") == answer.headers.get("CONTENT-TYPE") == "application/json"
    assert answer.headers.get("Retry-After", "none") == "none"


@pytest.mark.parametrize("first_bytes", [1, 12, 40, 100, PIECE_BYTES])
@pytest.mark.parametrize(
    ("sent", "method", "expected"),
    [
        (PLAIN, "POST", (200, b"body", True)),
        (CHUNKED + b"3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n", "GET", (200, b"abcd", True)),
        (
            CHUNKED + b'3;a=b;c="d"\r\nabc\r\n00c ; e\r\nde\r\n67890\r\n\r\r\n0\r\n\r\n',
            "GET",
            (200, b"abcde\r\n67890\r\n\r", True),
        ),
        (CHUNKED + b"4\r\nbody\r\n000;last\r\nA: 1\r\nContent-Length: 7\r\n\r\n", "GET", (200, b"body", True)),
        (CHUNKED.replace(b"chunked", b" Chunked\t") + b"0\r\n\r\n", "GET", (200, b"", True)),
        (CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: x, CLOSE\r\n\r\n") + b"0\r\n\r\n", "GET", (200, b"", False)),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, "POST", (200, b"body", True)),
        (b"HTTP/1.1 100\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + PLAIN, "POST", (200, b"body", True)),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", "GET", (304, b"", True)),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "DELETE", (204, b"", True)),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "HEAD", (200, b"", True)),
        (b"HTTP/1.1 200 OK\r\ncontent-LENGTH:\t 4 \t\r\nX:\r\n\r\nbody", "GET", (200, b"body", True)),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: 4 , 4\r\n\r\nbody", "GET", (200, b"body", True)),
        (b"HTTP/1.1 200 \xe9t\xe9\r\nX: \xe9\r\nContent-Length: 4\r\n\r\nbody", "GET", (200, b"body", True)),
        (
            b"HTTP/1.1 200 OK\r\nConnection: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
            "GET",
            (200, b"", False),
        ),
        (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 4\r\n\r\nbody", "GET", (200, b"body", True)),
        (b"HTTP/1.0 200 OK\r\n\r\n", "GET", (200, b"", False)),
        (b"HTTP/1.1 200 OK\nX: 1\r\n\nto the end\r\n\r\n", "GET", (200, b"to the end\r\n\r\n", False)),
        (b"HTTP/1.1 200 OK\r\n\n\r\n\r\n", "GET", (200, b"\r\n\r\n", False)),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 9\r\n\r\n", "DELETE", (204, b"", True)),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", "HEAD", (200, b"", True)),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nbody", "GET", (200, b"body", False)),
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", "GET", (200, b"to the end", False)),
        (b"HTTP/1.1 200\r\nContent-Length: 4\r\nConnection: Close\r\n\r\nbody", "GET", (200, b"body", False)),
        (b"HTTP/1.1 200 OK\nContent-Length: 4\n\nbody", "GET", (200, b"body", True)),
        (b"HTTP/1.1 200 OK\r\nVia: a,\r\n b\r\nVia: c\r\nContent-Length: 4\r\n\r\nbody", "GET", (200, b"body", True)),
    ],
)
def test_an_answer_is_the_same_in_one_piece_or_many(
    sent: bytes, method: str, expected: tuple[int, bytes, bool], first_bytes: int
) -> None:
    answer, is_reusable = read(sent, method, first_bytes)
    assert (answer.status, answer.body, is_reusable) == expected


@pytest.mark.parametrize(
    "head", [b"Content-Length: 1048576", b"Transfer-Encoding: chunked", b"Content-Type: to-the-end"], ids=repr
)
def test_a_large_body_is_whole(head: bytes) -> None:
    body = bytes(range(256)) * 4_096
    sent = body if b"chunked" not in head else b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (9, body[:9], 1048567, body[9:])
    answer, is_reusable = read(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + sent, first_bytes=1_000)
    assert answer.body == body
    assert is_reusable == (b"Content-Type" not in head)


def test_the_first_of_two_equal_fields_counts() -> None:
    answer, _ = read(b"HTTP/1.1 200 OK\r\nA: 1\r\na: 2\r\nContent-Length: 0\r\n\r\n")
    assert answer.headers.get("A") == "1"


def test_a_connection_with_more_than_the_answer_is_not_used_again() -> None:
    answer, is_reusable = read(PLAIN + b"HTTP/1.1 200 OK\r\n")
    assert answer.body == b"body"
    assert not is_reusable


def test_a_chunked_answer_with_more_behind_it_is_not_followed_by_another() -> None:
    answer, is_reusable = read(CHUNKED + b"0\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert (answer.body, is_reusable) == (b"", False)


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("first_bytes", [1, PIECE_BYTES])
@pytest.mark.parametrize(
    "sent",
    [
        PLAIN[:-1],
        PLAIN[:30],
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\r\n" + PLAIN,
        PLAIN.replace(b"200", b"2x0"),
        PLAIN.replace(b"200", b"020"),
        PLAIN.replace(b"200", b"2000"),
        PLAIN.replace(b"HTTP/1.1", b"HTTP/2.0"),
        PLAIN.replace(b"HTTP/1.1", b"http/1.1"),
        PLAIN.replace(b"HTTP/1.1 ", b"HTTP/1.1"),
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 100 + PLAIN,
        HEAD + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nbody!",
        HEAD + b"Content-Length: 4, 5\r\n\r\nbody!",
        HEAD + b"Content-Length: +4\r\n\r\nbody",
        HEAD + b"Content-Length: -4\r\n\r\nbody",
        HEAD + b"Content-Length: 0x4\r\n\r\nbody",
        HEAD + b"Content-Length: 4_0\r\n\r\nbody",
        HEAD + b"Content-Length: \xb2\r\n\r\nbody",
        HEAD + b"Content-Length:\r\n\r\n",
        HEAD + b"Content-Length: 1\r\n 2\r\n\r\nbody",
        HEAD + b"Content-Length : 4\r\n\r\nbody",
        HEAD + b"Content-Length: 4\rX: 1\r\n\r\nbody",
        HEAD + b"X: a\0b\r\nContent-Length: 4\r\n\r\nbody",
        HEAD + b"no colon\r\nContent-Length: 4\r\n\r\nbody",
        HEAD + b": no name\r\nContent-Length: 4\r\n\r\nbody",
        HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\nbody",
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n",
        CHUNKED + b"4\r\nbody\r\n",
        CHUNKED + b"4\r\nbody0\r\n\r\n",
        CHUNKED + b"4\nbody\r\n0\r\n\r\n",
        CHUNKED + b"0x4\r\nbody\r\n0\r\n\r\n",
        CHUNKED + b"-4\r\nbody\r\n0\r\n\r\n",
        CHUNKED + b" 4\r\nbody\r\n0\r\n\r\n",
        CHUNKED + b"\r\nbody\r\n0\r\n\r\n",
        CHUNKED + b"4 x\r\nbody\r\n0\r\n\r\n",
        CHUNKED + b"ffffffffffffffff\r\nbody\r\n0\r\n\r\n",
        CHUNKED + b"0\r\nno colon\r\n\r\n",
        CHUNKED + b"0\r\n",
    ],
)  # fmt: skip
def test_a_partial_or_ambiguous_answer_is_refused(sent: bytes, first_bytes: int) -> None:
    with pytest.raises(BrokenAnswer):
        read(sent, first_bytes=first_bytes)


@pytest.mark.parametrize("start", [HEAD, CHUNKED, CHUNKED + b"0\r\n"], ids=["head", "chunk", "trailer"])
def test_a_head_a_chunk_line_and_a_trailer_are_bounded(start: bytes) -> None:
    with pytest.raises(BrokenAnswer, match="longer than"):
        read(start + b"A: b\r\n" * (HEAD_BYTES_MAX // 3) if start != CHUNKED else start + b"1" * 3 * HEAD_BYTES_MAX)


def test_a_closed_connection_has_no_answer() -> None:
    with pytest.raises(ConnectionResetError):
        read(b"")


def test_an_answer_that_announces_more_than_any_broker_sends_is_broken() -> None:
    with pytest.raises(BrokenAnswer, match="more than any"):
        read(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000000\r\n\r\nabc")


def test_a_field_of_blanks_is_read_as_quickly_as_any_other() -> None:
    def seconds_of(filling: bytes) -> float:
        began = time.perf_counter()
        with pytest.raises(BrokenAnswer):
            read(b"HTTP/1.1 200 OK\r\nA:" + filling + b"\0\r\nContent-Length: 0\r\n\r\n")
        return time.perf_counter() - began

    assert min(seconds_of(b" " * 3_000) for _ in range(3)) < 100 * min(seconds_of(b"x" * 3_000) for _ in range(3))
