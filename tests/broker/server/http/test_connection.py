"""A connection: requests in order, answers in the framing that the client understands, and its end."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import gevent
import pytest
from flask import Response
from gevent import socket
from gevent.event import Event
from gevent.ssl import SSLContext
from support.http_server import BODY_BYTES_MAX, Served, rest_of
from support.tls import key, pem

from portalmq.broker.api.request_context import ResponseParts, current
from portalmq.broker.server.http import connection as http
from portalmq.broker.server.http.answers import JOIN_BYTES_MAX

GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/topics/t/messages HTTP/1.1\r\nHost: x\r\n"


def last(request: bytes) -> bytes:
    return request.replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n")


def posted(value: bytes, *fields: bytes) -> bytes:
    return (
        POST + b"".join([field + b"\r\n" for field in fields]) + b"Content-Length: %d\r\n\r\n%b" % (len(value), value)
    )


def next_answer(client: Any) -> tuple[bytes, bytes]:
    """Return the head and the body of the next answer, which has a length."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += client.recv(1)
    length = int(received.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
    body = b""
    while len(body) < length:
        body += client.recv(length - len(body))
    return received, body


def until(condition: Any) -> None:
    with gevent.Timeout(60):
        while not condition():
            gevent.sleep(0.001)


def values(served: Any) -> list[bytes]:
    return [each.value for each in served.broker.logs["t"][0]]


# --- requests --------------------------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order(served: Any) -> None:
    answer = served.exchange(b"".join([posted(b"%d" % n) for n in range(20)]) + GET + last(posted(b"last")))
    assert values(served) == [b"%d" % n for n in range(20)] + [b"last"]
    offsets = [
        int(part.partition(b'"offset":')[2].partition(b",")[0]) for part in answer.split(b"HTTP/1.1 200 OK")[1:21]
    ]
    assert offsets == sorted(offsets)
    assert answer.index(b'"status":"ok"') > answer.index(b'"offset":19')


@pytest.mark.parametrize("size", [1, 7, 100])
def test_requests_arrive_in_pieces_of_any_size(served: Any, size: int) -> None:
    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nA: b\r\n\r\n"
    data = posted(b"first") + chunked + last(posted(b"last"))
    answer = served.exchange(*[data[begin : begin + size] for begin in range(0, len(data), size)])
    assert answer.count(b"200 OK") == 3
    assert values(served) == [b"first", b"abcde", b"last"]


def test_a_large_body_is_read_to_its_end_and_no_further(served: Any) -> None:
    large = bytes(range(256)) * 390
    assert served.exchange(posted(large) + last(posted(b"last"))).count(b"200 OK") == 2
    assert values(served) == [large, b"last"]


def test_a_connection_that_pipelines_does_not_keep_the_others_waiting(served: Any) -> None:
    """While one connection has hundreds of requests here, another one is answered after a few of them."""
    answered = 0

    def counted(*arguments: Any) -> None:
        nonlocal answered
        answered += 1

    served.metrics.request = counted
    with served.connect() as busy, served.connect() as other:
        busy.sendall(GET * 500)
        until(lambda: answered)
        other.sendall(last(GET))
        assert b"200 OK" in rest_of(other)
        assert answered < 400


@pytest.mark.parametrize(
    ("version", "field", "kept"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"Connection: close\r\n", False),
        (b"1.1", b"Connection: x, Close\r\n", False),
        (b"1.1", b"Connection: keep-alive\r\nConnection: close\r\n", False),
        (b"1.0", b"", False),
        (b"1.0", b"Connection: Keep-Alive\r\n", True),
        (b"1.0", b"Connection: keep-alive, close\r\n", False),
    ],
)
@pytest.mark.parametrize("path", [b"GET /livez", b"POST /v1/topics/t/messages"])
def test_a_connection_is_kept_as_the_client_asks(
    served: Any, version: bytes, field: bytes, kept: bool, path: bytes
) -> None:
    with served.connect() as client:
        client.sendall(path + b" HTTP/%b\r\nHost: x\r\n%bContent-Length: 0\r\n\r\n" % (version, field))
        head, _ = next_answer(client)
        assert head.startswith(b"HTTP/%b 200 OK\r\n" % version)
        assert (b"Connection: keep-alive" in head, b"Connection: close" in head) == (kept, not kept)
        if kept:
            client.sendall(last(GET))
            assert b"200 OK" in rest_of(client)
        else:
            assert rest_of(client) == b""


def test_a_body_that_is_not_read_ends_the_connection(served: Any) -> None:
    answer = served.exchange(posted(b"x").replace(b"/v1/topics/t/messages", b"/nothing") + posted(b"smuggled"))
    assert answer.count(b"HTTP/1.1") == answer.count(b"404 NOT FOUND") == 1
    assert served.broker.logs == {}


# --- 100 Continue ----------------------------------------------------------------------------------------------------

EXPECTS = b"Expect: 100-continue"


def test_a_client_that_waits_for_it_is_asked_for_its_body(served: Any) -> None:
    with served.connect() as client:
        client.sendall(POST + EXPECTS + b"\r\nContent-Length: 2\r\n\r\n")
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"ok")
        assert b"200 OK" in next_answer(client)[0]
        client.sendall(POST + EXPECTS + b"\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"2\r\nok\r\n0\r\n\r\n")
        assert b"200 OK" in next_answer(client)[0]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (POST + EXPECTS + b"\r\nContent-Length: %d\r\n\r\n" % (BODY_BYTES_MAX + 1), b"413"),
        (POST.replace(b"topics/t", b"topics/a%20b") + EXPECTS + b"\r\nContent-Length: 1\r\n\r\n", b"400"),
        (POST.replace(b"/v1", b"/nothing") + EXPECTS + b"\r\nContent-Length: 1\r\n\r\n", b"404"),
        (posted(b"it did not wait", EXPECTS, b"Connection: close"), b"200"),
    ],
)
def test_otherwise_it_is_answered_at_once(served: Any, request_: bytes, status: bytes) -> None:
    assert served.exchange(request_).startswith(b"HTTP/1.1 " + status)


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def answering(served: Any) -> Any:
    """Let a route answer with any response."""

    def serve(response: Any) -> None:
        served.app.view_functions["GET /livez"] = response

    return serve


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (lambda: Response(b"abc"), b"Content-Length: 3\r\n\r\nabc"),
        (lambda: Response([b"ab", b"", b"c"]), b"Content-Length: 3\r\n\r\nabc"),
        (lambda: Response(iter([b"ab", b"", b"c"])), b"\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"),
        (lambda: Response(iter([])), b"\r\n\r\n0\r\n\r\n"),
        (lambda: Response(iter([b"abcdef"]), headers={"Content-Length": "3"}), b"Content-Length: 3\r\n\r\nabc"),
        (lambda: Response(b"x" * 200_000), b"Content-Length: 200000\r\n\r\n" + b"x" * 200_000),
    ],
)
def test_an_answer_of_flask_has_its_length_or_chunks(
    served: Any, answering: Any, response: Any, expected: bytes
) -> None:
    answering(response)
    head, _, body = expected.partition(b"\r\n\r\n")
    answer = served.exchange(GET + last(GET))
    assert answer.count(b"200 OK") == 2
    assert answer.endswith(b"\r\n\r\n" + body)
    assert answer.count(b"\r\n\r\n" + body) == 2
    assert (b"Transfer-Encoding: chunked" in answer) == (not head)
    assert head in answer


@pytest.mark.parametrize(
    "response", [lambda: Response(status=204), lambda: Response(status=304), lambda: Response(b"", status=204)]
)
def test_an_answer_without_a_body_has_neither(served: Any, answering: Any, response: Any) -> None:
    answering(response)
    answer = served.exchange(GET + last(GET))
    assert answer.count(b"HTTP/1.1") == 2
    assert b"Transfer-Encoding" not in answer
    assert answer.endswith(b"\r\n\r\n")


def test_http_1_0_gets_an_unknown_length_up_to_the_end_of_the_connection(served: Any, answering: Any) -> None:
    answering(lambda: Response(iter([b"ab", b"c"])))
    answer = served.exchange(b"GET /livez HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + GET)
    assert answer.startswith(b"HTTP/1.0 200 OK")
    assert b"Connection: close" in answer
    assert answer.endswith(b"\r\n\r\nabc")


@pytest.mark.parametrize("length", [True, False])
def test_head_has_the_head_alone(served: Any, answering: Any, length: bool) -> None:
    answering(lambda: Response(b"abc" if length else iter([b"abc"])))
    answer = served.exchange(GET.replace(b"GET", b"HEAD") + last(GET.replace(b"GET", b"HEAD")))
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.endswith(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in answer
    assert (b"Content-Length: 3" in answer) == length
    assert b"\r\n\r\n" in served.exchange(last(GET).replace(b"GET /livez", b"HEAD /internal/v1/echo"))[-4:]


def test_an_answer_that_fails_midway_shows_that_it_is_not_complete(served: Any, answering: Any, caplog: Any) -> None:
    def parts() -> Iterator[bytes]:
        yield b"ab"
        raise LookupError("ours")

    answering(lambda: Response(parts()))
    answer = served.exchange(GET + GET)
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"2\r\nab\r\n")
    assert "ours" in caplog.text


def test_an_answer_that_is_shorter_than_its_length_ends_the_connection(served: Any, answering: Any) -> None:
    answering(lambda: Response(iter([b"ab"]), headers={"Content-Length": "3"}))
    assert served.exchange(GET + GET).endswith(b"\r\n\r\nab")


@pytest.mark.parametrize("value", ["a\x00b", "a\x1bb"])
def test_a_header_that_is_not_valid_is_not_sent(served: Any, answering: Any, value: str, caplog: Any) -> None:
    answering(lambda: Response(b"abc", headers={"A": value}))
    answer = served.exchange(GET + GET)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert (answer.count(b"HTTP/1.1"), b'"outcome":"unknown"' in answer) == (1, True)
    assert value not in caplog.text


@pytest.mark.parametrize("size", [10, JOIN_BYTES_MAX, JOIN_BYTES_MAX + 1, 30_000_000])
def test_an_answer_of_any_size_arrives_whole(served: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    body = bytes(range(250)) * (size // 250)
    monkeypatch.setattr(served.http.application, "answer", lambda request: ResponseParts(body))
    with served.connect() as client:
        client.sendall(GET)
        assert next_answer(client)[1] == body


def test_a_small_answer_is_one_segment(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = socket.socket.send

    def watched(self: Any, data: bytes, *more: Any, **options: Any) -> Any:
        sent.append(len(data))
        return send(self, data, *more, **options)

    monkeypatch.setattr(socket.socket, "send", watched)
    answer = served.exchange(last(posted(b"hello")))
    assert len(answer) in sent


def test_the_room_of_an_answer_is_released_when_its_client_is_gone(served: Any) -> None:
    released = []
    application = served.http.application
    application.answer = lambda request: ResponseParts(bytes(30_000_000))
    application.sent = released.append
    with served.connect() as client:
        client.sendall(GET)
        client.recv(10)
    until(lambda: released)


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_head_has_a_limited_time(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_HEAD_S", 0.05)
    assert served.exchange(b"") == b""
    assert served.exchange(GET[:10]) == b""


def test_the_time_runs_while_a_head_is_awaited_and_at_no_other_time(served: Any, answering: Any) -> None:
    timers: list[Any] = []

    def view() -> Response:
        timers.append(current().client._timer)  # type: ignore[union-attr]
        return Response(str(timers[-1].active))

    answering(view)
    with served.connect() as client:
        for _ in range(3):
            client.sendall(GET)
            assert next_answer(client)[1] == b"False"
            until(lambda: timers[-1].active)
        client.sendall(GET[:10])
        until(lambda: timers[-1].active)
        timers[-1].callback(*timers[-1].args)  # the time is over
        assert rest_of(client) == b""
    until(lambda: len(served.connections) == 0)


def test_an_idle_connection_that_is_hung_up_ends_and_a_request_that_has_arrived_is_served(served: Any) -> None:
    with served.connect() as client:
        client.sendall(GET)
        next_answer(client)
        until(lambda: served.connections.make_room())
        assert rest_of(client) == b""


def test_a_busy_connection_is_not_hung_up(served: Any, answering: Any) -> None:
    rooms: list[bool] = []

    def view() -> Response:
        rooms.append(served.connections.make_room())
        return Response(b"done")

    answering(view)
    assert served.exchange(last(GET)).endswith(b"done")
    assert rooms == [False]


def test_an_address_at_its_limit_is_not_served(served: Any) -> None:
    served.connections._per_address_max, served.connections._with_loopback = 1, True
    proceed = Event()
    served.app.view_functions["GET /livez"] = lambda: (proceed.wait(), Response(b"done"))[1]
    with served.connect() as busy:
        busy.sendall(last(GET))
        until(lambda: served.http.in_flight)
        assert served.exchange(b"") == b""
        proceed.set()
        assert rest_of(busy).endswith(b"done")


def test_a_broker_that_drains_ends_each_connection_with_its_answer(served: Any, answering: Any) -> None:
    proceed = Event()
    answering(lambda: (proceed.wait(), Response(b"done"))[1])
    with served.connect() as client:
        client.sendall(GET)
        until(lambda: served.http.in_flight)
        served.http.draining = True
        proceed.set()
        answer = rest_of(client)
    assert b"Connection: close" in answer
    assert answer.endswith(b"done")
    assert b"Connection: close" in served.exchange(posted(b"x"))
    assert served.http.in_flight == 0


def test_a_client_that_still_sends_can_read_why_it_is_refused(served: Any) -> None:
    def send(client: Any) -> None:
        for _ in range(100):
            client.sendall(bytes(100_000))

    with served.connect() as client:
        client.sendall(POST + b"Content-Length: 10000000\r\n\r\n")
        sending = gevent.spawn(send, client)
        assert rest_of(client).startswith(b"HTTP/1.1 413 ")
        sending.get()


def test_a_failed_connection_leaves_nothing_behind(served: Any, caplog: Any) -> None:
    for data in (b"", GET[:5], POST, POST + b"Content-Length: 10\r\n\r\nhal", GET + GET[:9]):
        client = served.connect()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # a reset
        client.sendall(data)
        gevent.sleep(0)
        client.close()
    until(lambda: len(served.connections) == 0)
    assert served.http.in_flight == 0
    assert "Traceback" not in caplog.text


def test_two_connections_have_watchers_of_their_own(served: Any) -> None:
    """A descriptor is used again at once."""
    for _ in range(50):
        assert b"200 OK" in served.exchange(last(GET))


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def secured() -> Iterator[Served]:
    context = SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem("server"), key("server"))
    started = Served(ssl_context=context, do_handshake_on_connect=False)
    yield started
    started.close()


def trusting(client: Any) -> Any:
    context = SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(pem("authority"))
    return context.wrap_socket(client, server_hostname="localhost")


def test_requests_over_tls_are_served_in_order_with_several_in_one_record(secured: Any) -> None:
    with trusting(secured.connect()) as client:
        client.sendall(b"".join([posted(b"%d" % n) for n in range(30)]) + posted(bytes(90_000)) + last(posted(b"last")))
        answer = rest_of(client)
    assert answer.count(b"200 OK") == 32
    assert values(secured) == [b"%d" % n for n in range(30)] + [bytes(90_000), b"last"]


def test_a_client_without_tls_gets_nothing_and_others_are_served(secured: Any) -> None:
    with secured.connect() as silent:
        with suppress(ConnectionResetError):
            assert b"200 OK" not in secured.exchange(GET)
        with trusting(secured.connect()) as client:
            client.sendall(last(GET))
            assert b"200 OK" in rest_of(client)
        silent.close()
    until(lambda: len(secured.connections) == 0)


def test_a_tls_client_that_says_nothing_is_left_without_an_error_in_the_log(
    secured: Any, caplog: pytest.LogCaptureFixture
) -> None:
    secured.http.keepalive_s = 0.01
    with secured.connect() as silent:
        assert rest_of(silent) == b""
    until(lambda: len(secured.connections) == 0)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
