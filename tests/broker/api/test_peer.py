"""The broker notices that a waiting client has disconnected. A pipelined request is no disconnect."""

from __future__ import annotations

import gevent
import pytest
from gevent import socket
from gevent.event import Event

from portalmq.broker.api import client_watch
from portalmq.broker.api.client_watch import SocketPeer, peer_of
from portalmq.broker.api.http_request import HttpRequest


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_waiting_client_is_connected(pair):
    assert not SocketPeer(pair[0]).gone()


def test_a_client_that_closed_is_gone(pair):
    pair[1].close()
    assert SocketPeer(pair[0]).gone()


def test_a_client_that_pipelined_is_connected_until_it_closes(pair):
    ours, theirs = pair
    theirs.sendall(b"GET / HTTP/1.1\r\n")
    assert not SocketPeer(ours).gone()
    theirs.close()
    assert SocketPeer(ours).gone()


def test_without_pollrdhup_a_client_that_closed_is_gone_once_its_requests_are_read(pair, monkeypatch):
    monkeypatch.setattr(client_watch, "_HALF_CLOSED", 0)
    ours, theirs = pair
    assert not SocketPeer(ours).gone()
    theirs.sendall(b"GET")
    theirs.shutdown(socket.SHUT_WR)
    assert not SocketPeer(ours).gone()
    assert ours.recv(3) == b"GET"
    assert SocketPeer(ours).gone()


def test_the_watch_rings_once_when_the_client_goes(pair):
    ours, theirs = pair
    rung = []
    gone = Event()
    stop = SocketPeer(ours).watch(lambda: (rung.append(1), gone.set()))
    assert not gone.wait(0.01)
    theirs.close()
    assert gone.wait(60)
    gevent.idle()
    stop()
    assert rung == [1]


def test_a_stopped_watch_is_silent(pair):
    ours, theirs = pair
    rung = []
    SocketPeer(ours).watch(lambda: rung.append(1))()
    theirs.close()
    gevent.idle()
    assert rung == []


def test_the_watch_does_not_ring_for_a_pipelined_request(pair):
    ours, theirs = pair
    rung = []
    stop = SocketPeer(ours).watch(lambda: rung.append(1))
    theirs.sendall(b"GET / HTTP/1.1\r\n")
    gevent.idle()
    stop()
    assert rung == []


def test_a_socket_closed_on_our_side_counts_as_gone(pair):
    pair[0].close()
    rung = []
    assert SocketPeer(pair[0]).gone()
    SocketPeer(pair[0]).watch(lambda: rung.append(1))()
    assert rung == [1]


def test_without_a_socket_there_is_no_peer():
    assert peer_of(HttpRequest("GET", "/", "", {})) is None
