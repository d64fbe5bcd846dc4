"""MiniQ's server over the client's own transport: what its loop begins, and what becomes of it in trouble."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.scripted_broker import Call, Reply, ScriptedBroker, hang_up, refuse
from support.zeromq import service_at, serving

from portalmq import wire
from portalmq.errors import TopicNotFound
from portalmq.zeromq.cluster import Cluster
from portalmq.zeromq.server import Server
from portalmq.zeromq.service import MiniQService

WITHIN_S = 10.0
RECEIVE = "/v1/groups/default/receive"
FIRST_TRY = wire.HEADER_FIRST_TRY.lower()


class Broker(ScriptedBroker):
    """With MiniQ's commands, and queues that are empty."""

    def work(self, call: Call) -> Reply:
        if call.path == RECEIVE:
            return Reply(200, b'{"messages": []}')
        if call.path == "/miniq/command":
            return Reply(200, msgspec.json.encode({"status": "ok", "deleted": [True]}))
        return super().work(call)


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker() as started:
        for queue in ("q", "other"):
            started.fill(queue, [])
        yield started


@pytest.fixture
def cluster(broker: Broker) -> Iterator[Cluster]:
    made = Cluster(broker.url, token=None, timeout_s=WITHIN_S, buffer_messages=100, buffer_bytes=1 << 20)
    yield made
    made.close(WITHIN_S)


@pytest.fixture
def server(cluster: Cluster) -> Iterator[Server]:
    with serving(cluster) as started:  # type: ignore[arg-type]
        yield started


@pytest.fixture
def miniq(server: Server) -> Iterator[MiniQService]:
    with service_at(server.ports) as service:
        yield service


def carried_out(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What threads ask for from now on."""
    asked: list[str] = []
    attempt = cluster._transport.attempt

    def told(request: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(request.path.partition("?")[0])
        return attempt(request, *arguments, **options)

    monkeypatch.setattr(cluster._transport, "attempt", told)
    return asked


def test_one_client_alone_is_served_by_the_loop(
    broker: Broker, cluster: Cluster, miniq: MiniQService, monkeypatch: pytest.MonkeyPatch
) -> None:
    miniq.produce("q", "first")
    assert miniq.consume("q") is None
    asked = carried_out(cluster, monkeypatch)
    miniq.produce("q", "second")
    assert miniq.consume("q") is None
    miniq.delete("0-0", "q")
    assert asked == [], "no thread was needed"
    assert broker.values("q") == [b"first", b"second"]
    assert FIRST_TRY in broker.calls_of("POST", RECEIVE)[-1].headers


def test_a_broker_that_is_silent_holds_up_no_other_queue_and_is_asked_again(
    broker: Broker, miniq: MiniQService, server: Server
) -> None:
    for queue in ("q", "other"):
        miniq.consume(queue)
    silent = threading.Event()

    def be_silent(broker: ScriptedBroker, call: Call) -> Reply:
        assert silent.wait(WITHIN_S)
        return broker.work(call)

    asked = len(broker.calls_of("POST", RECEIVE))
    broker.script("POST", RECEIVE, [be_silent])
    answered: list[Any] = []
    waiting = threading.Thread(target=lambda: answered.append(miniq.consume("q")))
    waiting.start()
    broker.wait_for(lambda: len(broker.calls_of("POST", RECEIVE)) == asked + 1)
    miniq.delete("0-0", "other")
    miniq.produce("other", "meanwhile")
    assert answered == [], "it waits, and they do not"
    ((begun, _),) = server._begun.values()
    begun.deadline = 0.0
    waiting.join(WITHIN_S)
    assert answered == [None]
    silent.set()
    first, again = broker.calls_of("POST", RECEIVE)[asked:]
    assert first.json()["attempt_id"] == again.json()["attempt_id"], "what was leased by the first is not lost"
    assert FIRST_TRY in first.headers
    assert FIRST_TRY not in again.headers


def test_a_broker_that_hangs_up_or_is_overloaded_is_asked_again(broker: Broker, miniq: MiniQService) -> None:
    miniq.produce("q", "0")
    miniq.consume("q")
    broker.script("POST", "/v1/topics/q/messages", [hang_up])
    miniq.produce("q", "1")
    broker.script("POST", RECEIVE, [hang_up, refuse(503, "unavailable")])
    assert miniq.consume("q") is None
    broker.script("POST", "/miniq/command", [refuse(503, "unavailable")])
    miniq.delete("0-0", "q")
    assert broker.values("q") == [b"0", b"1"]


def test_what_a_broker_refuses_is_told_at_once(broker: Broker, miniq: MiniQService) -> None:
    miniq.consume("q")
    broker.script("POST", RECEIVE, [refuse(404, "topic_not_found")])
    with pytest.raises(TopicNotFound):
        miniq.consume("q")
    assert len(broker.calls_of("POST", RECEIVE)) == 2
    assert miniq.consume("q") is None


def test_connections_that_were_dropped_meanwhile_are_noticed(broker: Broker, miniq: MiniQService) -> None:
    for number in range(3):
        miniq.produce("q", str(number))
        assert miniq.consume("q") is None
        broker.drop_connections()
    assert broker.values("q") == [b"0", b"1", b"2"]
