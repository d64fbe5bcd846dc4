"""HTTP on the wire, from clients that are wrong, slow, greedy or gone."""

from __future__ import annotations

import json
import select
import socket
import statistics
import time
from contextlib import ExitStack

import psutil
import pytest
from support.broker_process import BrokerProcess

pytestmark = pytest.mark.cluster

MESSAGES = "/v1/topics/t/messages"
HEAD = b"POST /v1/topics/t/messages HTTP/1.1\r\nHost: x\r\n"
LIMIT = 65_536
# Below the 60 s of a waiting call.
WITHIN_S = 45.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    directory = tmp_path_factory.mktemp("broker")
    # A client of these tests may pause for longer than the broker reads after an early answer.
    patient = "import portalmq.broker.server.http.connection as http\nhttp.LINGER_S = 60.0\n"
    with BrokerProcess(directory, "--body-bytes-max", str(LIMIT), prelude=patient) as broker:
        yield broker


@pytest.fixture(autouse=True)
def emptied(broker):
    broker.request("PUT", "/v1/topics/t")
    yield
    broker.request("DELETE", MESSAGES)
    assert broker.request("GET", "/readyz").status == 200


def stored(broker):
    return [message["value"] for message in broker.request("GET", MESSAGES).json()["messages"]]


class Wire:
    """A raw connection."""

    def __init__(self, broker):
        self.socket = socket.create_connection(("127.0.0.1", broker.port), timeout=WITHIN_S)
        self.file = self.socket.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)
        return self

    def answer(self):
        """Return (status, headers in lower case, body) of the next answer."""
        status = int(self.file.readline().split()[1])
        headers = {}
        while line := self.file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return status, headers, self.file.read(int(headers["content-length"]))

    def at_end(self):
        return self.file.read(1) == b""


def refusal(broker, data, status, *, closed=True):
    with Wire(broker) as wire:
        found, headers, body = wire.send(data).answer()
        assert found == status, body
        assert headers["content-type"] == "application/problem+json"
        problem = json.loads(body)
        assert problem["status"] == status
        if closed:
            assert headers["connection"] == "close"
            assert wire.at_end()
    return problem


def chunked(*chunks):
    parts = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(parts)


def test_a_chunked_body_is_a_message(broker):
    with Wire(broker) as wire:
        assert wire.send(chunked(b"hel", b"lo") + b"0\r\n\r\n").answer()[0] == 200
    assert stored(broker) == ["hello"]


def test_a_chunked_body_over_the_limit_is_413_while_it_streams(broker):
    problem = refusal(broker, chunked(b"x" * LIMIT, b"x"), 413)
    assert problem["code"] == "message_too_large"
    assert stored(broker) == []


def test_an_announced_body_over_the_limit_is_413_without_being_read(broker):
    refusal(broker, HEAD + b"Content-Length: 999999999999\r\n\r\n", 413)


def test_a_client_that_sends_on_after_413_can_read_why(broker):
    answer = broker.request("POST", MESSAGES, b"x" * 20_000_000)
    assert answer.status == 413


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /" + b"x" * 5_000_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /livez HTTP/1.1\r\n" + (b"A: " + b"b" * 8_000 + b"\r\n") * 600 + b"\r\n", 431),
    ],
    ids=["line", "fields"],
)
def test_a_client_that_sends_on_after_its_head_was_refused_can_read_why(broker, head, status):
    refusal(broker, head, status)


def test_an_oversize_upload_gets_no_100_continue(broker):
    head = HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    refusal(broker, head % (LIMIT + 1), 413)
    with Wire(broker) as wire:
        wire.send(head % 2)
        assert wire.file.readline() == b"HTTP/1.1 100 Continue\r\n"
        assert wire.file.readline() == b"\r\n"
        assert wire.send(b"ok").answer()[0] == 200


def test_a_body_that_is_cut_short_is_400_and_not_applied(broker):
    for data in (HEAD + b"Content-Length: 10\r\n\r\nhalf", chunked(b"half"), chunked(b"half") + b"5\r\nab"):
        with Wire(broker) as wire:
            wire.send(data)
            wire.socket.shutdown(socket.SHUT_WR)
            status, _, body = wire.answer()
            assert (status, json.loads(body)["outcome"]) == (400, "not_applied")
    assert stored(broker) == []


def test_a_client_that_stalls_within_a_body_is_disconnected(tmp_path):
    with BrokerProcess(tmp_path, "--body-timeout-s", "1.5") as hasty:
        hasty.request("PUT", "/v1/topics/t")
        problem = refusal(hasty, HEAD + b"Content-Length: 10\r\n\r\nhalf", 400)
        assert "in time" in problem["detail"]
        assert stored(hasty) == []


def test_broken_chunks_are_400_and_not_applied(broker):
    for chunk in (
        b"zz\r\n",
        b"-5\r\nhello\r\n",
        b"5\r\nhelloX\r\n0\r\n\r\n",
        b"5;\x00\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
    ):
        refusal(broker, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"\r\n\r\n", 400)
    assert stored(broker) == []


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\r\n\x00\x01garbage\r\n\r\n", 400),
        (b"GET /livez\r\n\r\n", 400),
        (b"GET /livez HTTP/9.9\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost x\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nA: \x00\r\n\r\n", 400),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /livez HTTP/1.1\r\nA: " + b"x" * 9000 + b"\r\n\r\n", 431),
        (b"GET /livez HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 415),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n", 415),
        (b"GET /livez HTTP/1.1\r\n" + (b"A: " + b"b" * 8000 + b"\r\n") * 9 + b"\r\n", 431),
        (b"GET /livez HTTP/1.1\n\n", 400),
        (HEAD + b"Expect: the-unexpected\r\nContent-Length: 0\r\n\r\n", 417),
    ],
    ids=lambda value: value[:60].decode("latin-1").replace("\r\n", " ") if isinstance(value, bytes) else None,
)
def test_unsupported_http_is_answered_with_a_problem(broker, data, status):
    refusal(broker, data, status)
    assert stored(broker) == []


def test_the_body_of_a_refused_call_is_not_read_as_the_next_request(broker):
    hidden = HEAD + b"Content-Length: 8\r\n\r\nsmuggled"
    for path in (b"/v1/nothing", b"/livez", b"/v1/topics/a%20b/messages"):
        data = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path, len(hidden)) + hidden
        with Wire(broker) as wire:
            assert wire.send(data).answer()[0] in (400, 404, 405)
    assert stored(broker) == []


def test_pipelined_requests_are_answered_in_order(broker):
    with Wire(broker) as wire:
        wire.send(b"".join(HEAD + b"Content-Length: 1\r\n\r\n%d" % n for n in range(5)))
        assert [wire.answer()[0] for _ in range(5)] == [200] * 5
    assert stored(broker) == ["0", "1", "2", "3", "4"]


def test_a_connection_is_kept_after_a_problem_whose_body_was_read(broker):
    with Wire(broker) as wire:
        request = b"POST /v1/groups/g/receive HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
        for _ in range(2):
            status, headers, _ = wire.send(request).answer()
            assert (status, headers["connection"]) == (400, "keep-alive")


def receive(wait_ms, group="g"):
    body = json.dumps({"topics": ["t"], "wait_ms": wait_ms}).encode()
    head = f"POST /v1/groups/{group}/receive HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def waiting(broker):
    lines = broker.request("GET", "/metrics").body.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(b"portalmq_waiting_calls "))


def wait_for(condition, within_s=30.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)


def test_a_client_that_has_disconnected_receives_nothing(broker):
    gone = Wire(broker)
    gone.send(receive(60_000, "gone"))
    wait_for(lambda: waiting(broker) == 1)
    gone.__exit__()
    wait_for(lambda: waiting(broker) == 0)
    broker.request("POST", MESSAGES, b"precious")
    with Wire(broker) as wire:
        messages = json.loads(wire.send(receive(0, "gone")).answer()[2])["messages"]
    assert [(message["value"], message["delivery_count"]) for message in messages] == [("precious", 1)]


def test_a_client_that_pipelines_while_it_waits_is_served(broker):
    with Wire(broker) as wire:
        wire.send(receive(60_000, "pipelined"))
        wait_for(lambda: waiting(broker) == 1)
        wire.send(receive(0, "pipelined"))
        broker.request("POST", MESSAGES, b"x")
        assert len(json.loads(wire.answer()[2])["messages"]) == 1
        assert len(json.loads(wire.answer()[2])["messages"]) == 0


def test_slow_connections_do_not_slow_down_the_others(broker):
    slow = [socket.create_connection(("127.0.0.1", broker.port)) for _ in range(500)]
    try:
        for connection in slow:
            connection.sendall(HEAD + b"Content-Le")
        durations = []
        for _ in range(100):
            started = time.monotonic()
            assert broker.request("POST", MESSAGES, b"x").status == 200
            durations.append(time.monotonic() - started)
        assert statistics.median(durations) < 1
    finally:
        for connection in slow:
            connection.close()


def test_busy_connections_do_not_starve_each_other(broker):
    """Each client sends its next request as soon as it is answered. While one waits, the others may get only some
    further answers. The bound counts answers, and one thread reads them all, so pauses of the machine do not matter."""
    request = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
    with ExitStack() as stack:
        wires = {wire.socket: wire for wire in (stack.enter_context(Wire(broker)) for _ in range(8))}
        answered = 0
        asked_at = dict.fromkeys(wires, 0)
        longest = 0
        for wire in wires.values():
            assert wire.send(request).answer()[0] == 200  # the broker has taken the connection
        for wire in wires.values():
            wire.send(request)
        while answered < 2_000:
            ready = select.select(list(wires), [], [], WITHIN_S)[0]
            assert ready, "no connection is answered"
            for each in ready:
                assert wires[each].answer()[0] == 200
                answered += 1
                longest = max(longest, answered - asked_at[each])
                asked_at[each] = answered
                wires[each].send(request)
        longest = max(longest, answered - min(asked_at.values()))
    assert longest <= 25 * len(wires), f"one connection was answered after {longest} answers to all"


def test_a_flood_of_nonsense_leaves_the_broker_up_and_small(broker):
    import random

    dice = random.Random(7)
    pieces = [HEAD, b"\r\n", b"\r\n\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"\x00" * 50]
    pieces += [b"5\r\nhello\r\n", b"0\r\n\r\n", b"GET / HTTP/1.1\r\n", b"A:" + b"b" * 5000, b"\xff" * 300, b"PUT "]
    before = psutil.Process(broker.worker.pid).memory_info().rss
    for _ in range(1000):
        with socket.create_connection(("127.0.0.1", broker.port)) as connection:
            connection.sendall(b"".join(dice.choices(pieces, k=dice.randint(1, 6))))
    wait_for(lambda: broker.request("GET", "/livez").status == 200)
    assert psutil.Process(broker.worker.pid).memory_info().rss - before < 30 * 1024 * 1024
    assert "Traceback" not in broker.stderr()
