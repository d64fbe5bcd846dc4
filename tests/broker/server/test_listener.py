"""A broker without free descriptors pauses accepting, and logs that once."""

from __future__ import annotations

import errno
import logging
from collections import deque

import gevent
import pytest
from gevent import socket
from gevent.server import StreamServer

from portalmq.broker.server import process
from portalmq.broker.server.connections import ClientConnection, Connections

FULL = OSError(errno.EMFILE, "Too many open files")


@pytest.fixture
def listener(monkeypatch):
    monkeypatch.setattr(process, "ACCEPT_AGAIN_S", 0.001)
    served = []
    server = process.Listener(("127.0.0.1", 0), handle=lambda client, address: served.append(client.recv(10)))
    server.connections = Connections(100, 0)
    server.served = served
    server.start()
    yield server
    server.close()


def test_a_shortage_of_descriptors_pauses_accepting_and_is_logged_once(listener, monkeypatch, caplog):
    caplog.set_level(logging.ERROR)
    faults = deque([FULL] * 5)
    accept = StreamServer.do_read

    def short(self):
        if faults:
            raise faults.popleft()
        return accept(self)

    monkeypatch.setattr(StreamServer, "do_read", short)
    hung_up = []
    listener.connections.enter(ClientConnection("192.0.2.1", lambda: hung_up.append(1)))
    with socket.create_connection(listener.address) as client:
        client.sendall(b"hello")
        with gevent.Timeout(50):
            while not listener.served:
                gevent.sleep(0.001)
    assert not faults
    assert listener.served == [b"hello"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "Too many open files" in caplog.text
    assert hung_up == [1], "an idle connection gives its descriptor up"
