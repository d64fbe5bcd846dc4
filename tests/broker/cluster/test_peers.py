"""Failed calls between brokers: the outcome that the error shows, and the listener that is notified."""

from __future__ import annotations

import threading

import msgspec
import pytest
from support.ports import kept_ports
from support.scripted_broker import Call, Reply, ScriptedBroker, hang_up, hold, problem

from portalmq.broker.cluster.peers import NotAnswered, NotReached, Peers, credential
from portalmq.broker.cluster.rpc.queues import EndGroup, LookAt
from portalmq.control_plane.state import BrokerState
from portalmq.errors import NotLeader

SECRET = "s" * 64
PATH = "/internal/v1/known"
ASK = EndGroup("g", "id")


def peers_of(url: str, trouble: list[tuple[int, int, bool]] | None = None) -> Peers:
    brokers, noted = {2: BrokerState(url, 7, "store")}, [] if trouble is None else trouble
    return Peers(lambda: brokers, SECRET, on_trouble=lambda *reported: noted.append(reported))


def echo(broker: ScriptedBroker, call: Call) -> Reply:
    return Reply(200, call.body, "application/vnd.msgpack")


def test_a_call_sends_the_secret_and_returns_the_answer_on_a_kept_connection() -> None:
    with ScriptedBroker() as broker:
        broker.script("POST", PATH, [echo, echo])
        peers = peers_of(broker.url)
        for _ in range(2):
            assert peers.call(2, "known", ASK, EndGroup, timeout_s=60) == ASK
        assert {call.headers["authorization"] for call in broker.calls} == {credential(SECRET)}
        assert len({call.connection for call in broker.calls}) == 1
        assert SECRET not in str([call.headers for call in broker.calls])
        peers.close()


def test_a_refused_connection_is_reported_as_refused_and_not_applied() -> None:
    with kept_ports(1) as [port]:
        trouble: list[tuple[int, int, bool]] = []
        peers = peers_of(f"http://127.0.0.1:{port}", trouble)
        with pytest.raises(NotReached) as caught:
            peers.call(2, "known", ASK, LookAt, timeout_s=60)
    assert (caught.value.outcome, caught.value.refused) == ("not_applied", True)
    assert trouble == [(2, 7, True)]


def test_a_broker_that_is_not_registered_is_not_reached() -> None:
    trouble: list[tuple[int, int, bool]] = []
    with pytest.raises(NotReached):
        peers_of("http://127.0.0.1:1", trouble).call(9, "known", ASK, LookAt, timeout_s=60)
    assert trouble == [], "the mirror already shows that it is gone"


def test_an_answer_that_is_lost_leaves_the_outcome_unknown() -> None:
    trouble: list[tuple[int, int, bool]] = []
    with ScriptedBroker() as broker:
        broker.script("POST", PATH, [hang_up])
        with pytest.raises(NotAnswered) as caught:
            peers_of(broker.url, trouble).call(2, "known", ASK, LookAt, timeout_s=60)
    assert caught.value.outcome == "unknown"
    assert trouble == [(2, 7, False)]


def test_a_call_to_a_silent_broker_ends_at_its_timeout() -> None:
    answered = threading.Event()
    trouble: list[tuple[int, int, bool]] = []
    with ScriptedBroker() as broker:
        broker.script("POST", PATH, [echo, hold(answered)])
        peers = peers_of(broker.url, trouble)
        peers.call(2, "known", ASK, EndGroup, timeout_s=60)  # connected: the second call waits for an answer only
        with pytest.raises(NotAnswered):
            peers.call(2, "known", ASK, LookAt, timeout_s=0.2)
        answered.set()
    assert trouble == [(2, 7, False)]


def test_a_refusal_of_the_other_broker_is_raised_here() -> None:
    error = NotLeader("not me", leader=3, leader_url="http://three", retry_after_s=0.25)
    with ScriptedBroker() as broker:
        broker.script("POST", PATH, [lambda broker, call: problem(error)])
        with pytest.raises(NotLeader) as caught:
            peers_of(broker.url).call(2, "known", ASK, LookAt, timeout_s=60)
    assert (caught.value.outcome, caught.value.retry_after_s) == ("not_applied", 0.25)
    assert caught.value.extra == {"leader": 3, "leader_url": "http://three"}


def test_an_answer_in_another_form_is_no_answer() -> None:
    with ScriptedBroker() as broker:
        broker.script("POST", PATH, [lambda broker, call: Reply(200, msgspec.json.encode("hello"))])
        with pytest.raises(NotAnswered):
            peers_of(broker.url).call(2, "known", ASK, LookAt, timeout_s=60)
