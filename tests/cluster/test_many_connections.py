"""Idle connections do not keep others from being served."""

from __future__ import annotations

import http.client
import socket
import time
from contextlib import ExitStack, closing

import pytest
from support.broker_process import BrokerProcess

pytestmark = pytest.mark.cluster

WITHIN_S = 60.0
REQUEST = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


def opened(stack, broker):
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", broker.port), timeout=WITHIN_S))
    connection.setblocking(False)
    return connection


def ended(connections):
    """The number of connections that the broker has closed."""
    count = 0
    for connection in connections:
        try:
            count += connection.recv(1) == b""
        except BlockingIOError:
            continue
        except ConnectionResetError:
            count += 1
    return count


def is_served(connection):
    """Return whether a request on the connection is answered."""
    try:
        connection.request("GET", "/livez")
        answer = connection.getresponse()
        return (answer.status, bool(answer.read())) == (200, True)
    except (OSError, http.client.HTTPException):
        connection.close()
        return False


def wait_until(condition):
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)


def test_idle_connections_leave_room_for_those_that_ask(tmp_path):
    options = ("--worker-connections", "40", "--parked-receives-max", "20")
    with BrokerProcess(tmp_path, *options) as broker, ExitStack() as stack:
        idle = [opened(stack, broker) for _ in range(200)]
        for _ in range(5):
            assert broker.request("GET", "/livez").status == 200
        wait_until(lambda: ended(idle) >= 160)


def test_an_address_has_so_many_connections_and_no_more(tmp_path):
    options = ("--connections-per-address-max", "10", "--connections-per-address-loopback")
    with BrokerProcess(tmp_path, *options) as broker, ExitStack() as stack:
        idle = [opened(stack, broker) for _ in range(30)]
        wait_until(lambda: ended(idle) >= 20)
        assert broker.request("GET", "/livez").status == 200


def test_a_new_connection_has_a_moment_for_its_first_head_and_a_kept_one_more(tmp_path):
    hasty = "import portalmq.broker.server.http.connection as http\nhttp.FIRST_HEAD_S = 1.0\n"
    with BrokerProcess(tmp_path, prelude=hasty) as broker, ExitStack() as stack:
        kept = stack.enter_context(closing(http.client.HTTPConnection("127.0.0.1", broker.port, timeout=WITHIN_S)))
        wait_until(lambda: is_served(kept))  # on a machine that pauses here the time limit may be over
        own = kept.sock
        silent, slow = opened(stack, broker), opened(stack, broker)
        slow.sendall(REQUEST[:10])
        wait_until(lambda: ended([silent, slow]) == 2)
        assert is_served(kept)
        assert kept.sock is own
