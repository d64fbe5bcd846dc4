"""Answers of brokers, and of other HTTP/1.1 servers, read from their first bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.client import HTTPException, IncompleteRead, RemoteDisconnected

import pytest

from portalmq.network import http_answer
from portalmq.network.http_answer import PIECE_BYTES, HttpAnswer, read_answer

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


@pytest.fixture
def by_library(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The first pieces of answers that http.client read."""
    left: list[bytes] = []
    read_by_library: Callable[..., tuple[HttpAnswer, bool]] = http_answer._read_by_library

    def note(connection: socket.socket, method: str, piece: bytes) -> tuple[HttpAnswer, bool]:
        left.append(piece)
        return read_by_library(connection, method, piece)

    monkeypatch.setattr(http_answer, "_read_by_library", note)
    return left


def test_an_ordinary_answer_is_read_without_the_library(by_library: list[bytes]) -> None:
    answer, is_reusable = read(PLAIN)
    assert (answer.status, answer.body, is_reusable) == (200, b"body", True)
    assert answer.headers.get("Content-Type") == answer.headers.get("CONTENT-TYPE") == "application/json"
    assert answer.headers.get("Retry-After", "none") == "none"
    assert not by_library


def test_its_body_may_come_in_pieces(by_library: list[bytes]) -> None:
    body = bytes(range(256)) * 100
    sent = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 25600\r\n\r\n" + body
    answer, is_reusable = read(sent, first_bytes=100)
    assert (answer.status, answer.body, is_reusable) == (503, body, True)
    assert not by_library


@pytest.mark.parametrize("first_bytes", [1, 12, 40, 100, PIECE_BYTES])
@pytest.mark.parametrize(
    ("sent", "method", "expected"),
    [
        (PLAIN, "POST", (200, b"body", True)),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n",
            "GET",
            (200, b"abcd", True),
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, "POST", (200, b"body", True)),
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


def test_a_large_body_is_whole(by_library: list[bytes]) -> None:
    body = bytes(range(256)) * 4_096
    answer, is_reusable = read(b"HTTP/1.1 200 OK\r\nContent-Length: 1048576\r\n\r\n" + body, first_bytes=1_000)
    assert answer.body == body
    assert is_reusable
    assert len(by_library) == 1


def test_the_first_of_two_equal_fields_counts() -> None:
    answer, _ = read(b"HTTP/1.1 200 OK\r\nA: 1\r\na: 2\r\nContent-Length: 0\r\n\r\n")
    assert answer.headers.get("A") == "1"


def test_a_connection_with_more_than_the_answer_is_not_used_again() -> None:
    answer, is_reusable = read(PLAIN + b"HTTP/1.1 200 OK\r\n")
    assert answer.body == b"body"
    assert not is_reusable


@pytest.mark.parametrize(
    ("sent", "fault"),
    [
        (b"", RemoteDisconnected),
        (PLAIN[:-1], IncompleteRead),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", HTTPException),
        (b"HTTP/1.1 2x0 OK\r\nContent-Length: 0\r\n\r\n", HTTPException),
    ],
)
def test_a_partial_answer_is_refused(sent: bytes, fault: type[Exception]) -> None:
    with pytest.raises(fault):
        read(sent)
