"""docs/deploy/nginx.conf: the requests that nginx repeats, and its own answers. The servers behind it close
connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.broker_process import Answer
from support.nginx import Nginx, needs_nginx
from support.ports import kept_ports

pytestmark = [needs_nginx, pytest.mark.timeout(60)]

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


class Behind:
    """A server that reads a request's head and then answers, or closes the connection, as a broker that is killed."""

    def __init__(self, answer: bytes = b"") -> None:
        self.heads: list[bytes] = []
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    head = b""
                    while b"\r\n\r\n" not in head and (more := connection.recv(65_536)):
                        head += more
                    self.heads.append(head)
                    connection.sendall(self._answer)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


@pytest.fixture
def dying() -> Iterator[list[Behind]]:
    """Yield three servers that close every connection."""
    servers = [Behind() for _ in range(3)]
    yield servers
    for server in servers:
        server.close()


def asked(servers: list[Behind]) -> int:
    return sum(len(server.heads) for server in servers)


PRODUCE = "/v1/topics/t/messages"


@pytest.mark.parametrize(
    ("method", "path", "headers", "times"),
    [
        ("POST", PRODUCE, {}, 1),
        ("POST", PRODUCE + "?partition=0", {}, 1),
        ("POST", PRODUCE, {"Idempotency-Key": "order-7"}, 3),
        ("GET", PRODUCE, {}, 3),
        ("PUT", "/v1/topics/t", {}, 3),
        ("POST", "/v1/groups/g/receive", {}, 1),
        ("POST", "/v1/groups/g/nack", {}, 1),
        ("POST", "/v1/groups/g/ack", {}, 3),
        ("POST", "/v1/groups/g/commit", {}, 3),
        ("POST", "/publish", {}, 1),
        ("POST", "/consume", {}, 1),
        ("POST", "/message", {}, 1),
        ("GET", "/message", {}, 3),
        ("POST", "/v1/publish", {}, 1),
        ("GET", "/v1/consumer?cid=7&limit=1", {}, 3),
        ("DELETE", "/v1/consumer?cid=7&id=1", {}, 3),
    ],
)
def test_only_repeatable_requests_are_repeated(
    dying: list[Behind], tmp_path: Path, method: str, path: str, headers: dict[str, str], times: int
):
    with Nginx(tmp_path, [server.port for server in dying]) as nginx:
        answer = nginx.request(method, path, b"{}" if method != "GET" else None, headers)
    assert asked(dying) == times
    problem(answer, 503, "unavailable", "unknown")
    assert answer.headers["Retry-After"] == "1"


def problem(answer: Answer, status: int, code: str, outcome: str) -> None:
    """Assert that the answer is a problem document of the API."""
    assert (answer.status, answer.headers["Content-Type"]) == (status, "application/problem+json"), answer
    told = answer.json()
    assert (told["status"], told["code"], told["outcome"]) == (status, code, outcome)
    assert told["type"] == f"urn:portalmq:error:{code}"
    assert told["title"]
    assert told["detail"]
    assert told["retryable"] is (code != "message_too_large")


@pytest.fixture
def refused_ports() -> Iterator[list[int]]:
    """Yield ports that are bound, so that no other process gets them, and not listening."""
    with kept_ports(2) as ports:
        yield ports


@pytest.mark.parametrize("path", [PRODUCE, "/publish", "/v1/groups/g/receive"])
def test_requests_are_answered_while_a_broker_is_down(tmp_path: Path, refused_ports: list[int], path: str):
    living = Behind(ANSWER)
    try:
        with Nginx(tmp_path, [refused_ports[0], living.port, refused_ports[1]]) as nginx:
            for _ in range(10):
                assert nginx.request("POST", path, b"{}").body == b"ok"
    finally:
        living.close()
    assert len(living.heads) == 10, "each request arrives once"


def test_the_request_is_passed_on_unchanged(tmp_path: Path):
    living = Behind(ANSWER)
    try:
        with Nginx(tmp_path, [living.port]) as nginx:
            nginx.request(
                "POST", PRODUCE + "?partition=0", b"x", {"Authorization": "Bearer s", "Idempotency-Key": "a b"}
            )
    finally:
        living.close()
    (head,) = living.heads
    lines = head.decode().split("\r\n")
    assert lines[0] == f"POST {PRODUCE}?partition=0 HTTP/1.1"
    assert {"Authorization: Bearer s", "Idempotency-Key: a b"} <= set(lines)
    assert not [line for line in lines if line.lower().startswith("connection:")], "the connection may be kept"


def test_an_oversize_request_is_refused_with_a_problem(dying: list[Behind], tmp_path: Path):
    with Nginx(tmp_path, [server.port for server in dying]) as nginx:
        for path in (PRODUCE, "/publish"):
            answer = nginx.request("POST", path, None, {"Content-Length": str(10 * 1024 * 1024)})
            problem(answer, 413, "message_too_large", "not_applied")
    assert asked(dying) == 0


def test_one_address_has_a_request_limit(tmp_path: Path):
    living = Behind(ANSWER)
    slow = ((r"rate=5000r/s", "rate=1r/m"), (r"burst=5000", "burst=2"))
    try:
        with Nginx(tmp_path, [living.port], *slow) as nginx:
            answers = [nginx.request("POST", PRODUCE, b"x", {"Idempotency-Key": "k"}) for _ in range(4)]
    finally:
        living.close()
    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    problem(answers[3], 429, "backpressure", "not_applied")


def test_internal_paths_are_closed(dying: list[Behind], tmp_path: Path):
    with Nginx(tmp_path, [server.port for server in dying]) as nginx:
        assert nginx.request("POST", "/internal/v1/fetch", b"").status == 404
        assert nginx.request("GET", "/metrics").status == 404
    assert asked(dying) == 0
