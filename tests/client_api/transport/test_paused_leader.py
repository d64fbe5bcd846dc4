"""A leader that stands still: how long its clients wait for it while another broker leads already."""

from __future__ import annotations

import math

import msgspec
import pytest

from portalmq import wire
from portalmq.consumers.lease_calls import (
    GROUP_LOOK_TIMEOUT_S,
    GROUP_LOOK_TIMEOUT_S_MAX,
    HURRIED_LOOK_PAUSE,
    HURRIED_LOOK_TIMEOUT_S_MAX,
    LeaseCalls,
)
from portalmq.errors import Unavailable
from portalmq.network.connection import Address, NoAnswer, Watch
from portalmq.network.either import finish
from portalmq.network.http_answer import Fields, HttpAnswer
from portalmq.transport.cluster_metadata import ClusterMetadata
from portalmq.transport.request import Request, json_request
from portalmq.transport.retries import Backoff
from portalmq.transport.transport import Transport

ONE, TWO, THREE = "http://one:1", "http://two:2", "http://three:3"
# When the cluster has another leader; a client needs no more than half a second to follow it.
NEXT_LEADER_S = 2.9
FOLLOWED_S = 3.5

SEND = Request("POST", "/v1/topics/t/messages", b"{}", repeatable=True, leader_of=("t", 0))
LOOK_UP = json_request("POST", "/v1/producers", {}, anywhere=True)


def receive(wait_s: float) -> Request:
    return Request("POST", "/v1/groups/g/receive", b"{}", repeatable=True, near=("t", 0), wait_s=wait_s)


class PausedCluster:
    """Three brokers, of which the first leads, and stands still from time 0 on. Time passes only in waits."""

    def __init__(self) -> None:
        self.now = -1.0
        self.arrived: list[tuple[float, str, str]] = []
        self.empty_after_s = 0.0

    def transport(self, bootstrap: str = f"{ONE},{TWO},{THREE}", known: ClusterMetadata | None = None) -> Transport:
        return Transport(
            bootstrap,
            pool=self,
            clock=lambda: self.now,
            pause=self.wait,
            chance=lambda: 1.0,
            cluster_metadata=known,
        )

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def exchange(
        self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float, watch: Watch | None = None
    ) -> HttpAnswer:
        path = head.split()[1].decode()
        self.arrived.append((self.now, address.url, path.split("?")[0]))
        leader = ONE if self.now < NEXT_LEADER_S else TWO
        is_for_leader = not any(word in path for word in ("metadata", "producers", "livez"))
        if self.now + self.empty_after_s >= 0 and ONE in {address.url, leader if is_for_leader else ""}:
            # A broker that forwards to it hangs as well, until it has seen the election.
            self._hang(timeout_s, watch, math.inf if address.url == ONE else NEXT_LEADER_S + 0.3)
        self.now += 0.001
        if path.startswith("/v1/metadata"):
            return self._metadata(leader)
        if "receive" in path:
            self.now += self.empty_after_s
        if path == "/v1/groups/g":
            group = wire.GroupDescription("g", "queue", [], 0, 0, 0, 0, 0, 0, wire.GroupConfig("queue"))
            return HttpAnswer(200, Fields(), msgspec.json.encode(group))
        return HttpAnswer(200, Fields(), b"{}")

    def _hang(self, timeout_s: float, watch: Watch | None, until: float) -> None:
        limit = self.now + timeout_s
        pause_s = timeout_s if watch is None else watch.first_s
        while self.now + pause_s < min(limit, until) and watch is not None:
            self.now += pause_s
            if watch.gives_up():
                raise NoAnswer("another broker leads")
            pause_s = watch.every_s
        self.now = max(self.now, min(limit, until))
        if limit < until:
            raise NoAnswer("no answer in time")

    def _metadata(self, leader: str) -> HttpAnswer:
        document = wire.Metadata(
            [wire.BrokerDescription(number, url, True) for number, url in enumerate((ONE, TWO, THREE), 1)],
            [wire.TopicMetadata("t", [wire.PartitionLeader(0, 1, 1 if leader == ONE else 2, leader)])],
        )
        return HttpAnswer(200, Fields(), msgspec.json.encode(document))

    def rest(self) -> None:
        pass

    def hang_up(self) -> None:
        pass

    def close(self, answers_within_s: float = 0.0) -> None:
        pass


@pytest.fixture
def cluster() -> PausedCluster:
    return PausedCluster()


def test_a_send_follows_the_next_leader(cluster: PausedCluster) -> None:
    transport = cluster.transport()
    transport.metadata(["t"])
    cluster.now = 0.0
    transport.call(SEND)
    assert NEXT_LEADER_S < cluster.now < FOLLOWED_S
    assert cluster.arrived[-1][1:] == (TWO, "/v1/topics/t/messages")


@pytest.mark.parametrize("wait_s", [0.0, 0.5, 1.0, 10.0])
def test_a_receive_among_messages_that_keep_coming_follows_too(cluster: PausedCluster, wait_s: float) -> None:
    transport = cluster.transport()
    transport.metadata(["t"])
    transport.call(receive(wait_s))
    cluster.now = 0.0
    transport.call(receive(wait_s))
    assert NEXT_LEADER_S < cluster.now < FOLLOWED_S
    assert cluster.arrived[-1][1] == TWO


def test_a_receive_that_long_had_no_message_asks_rarely_and_follows_later(cluster: PausedCluster) -> None:
    transport = cluster.transport()
    transport.metadata(["t"])
    cluster.now, cluster.empty_after_s = -20.0, 10.0
    transport.call(receive(10.0))
    cluster.now = 0.0
    transport.call(receive(10.0))
    cluster.now -= cluster.empty_after_s
    assert cluster.now < NEXT_LEADER_S + 2.5 + 0.1
    asked = [at for at, _, path in cluster.arrived if path == "/v1/metadata" and at >= 0]
    assert len(asked) <= 3


def test_another_transport_of_the_client_leaves_the_paused_leader_with_it(cluster: PausedCluster) -> None:
    transport = cluster.transport()
    transport.metadata(["t"])
    another = cluster.transport(known=transport.calls.cluster_metadata)
    cluster.now = 0.0
    transport.call(receive(0.5))
    left_at = cluster.now
    another.call(json_request("POST", "/v1/groups/g/extend", {}))
    assert cluster.arrived[-1][1] != ONE
    assert cluster.now < left_at + 0.35


def test_transports_of_one_client_know_the_same() -> None:
    transport = Transport(ONE)
    another = transport.another()
    assert another.calls.cluster_metadata is transport.calls.cluster_metadata
    another.close()
    transport.close()


def test_looks_at_the_group_take_little_time_from_receives(cluster: PausedCluster) -> None:
    transport = cluster.transport()
    transport.metadata(["t"])
    calls = LeaseCalls(transport, "g", 30.0, lambda: cluster.now)
    cluster.now, looked_s, longest_s = 0.0, 0.0, 0.0
    while cluster.now < 30.0:
        began = cluster.now
        assert finish(calls.group_has_leases(hurried=True, rarely=True)) is None, "it stands still"
        longest_s = max(longest_s, cluster.now - began)
        looked_s += cluster.now - began
        assert transport.leader_of(("t", 0)) is not None, "no other call leaves the broker for that"
        cluster.wait(0.01)
    assert longest_s == pytest.approx(HURRIED_LOOK_TIMEOUT_S_MAX, abs=0.02)
    assert looked_s < 30.0 / HURRIED_LOOK_PAUSE


def test_a_look_at_the_group_that_no_receive_waits_for_takes_its_time(cluster: PausedCluster) -> None:
    transport = cluster.transport()
    transport.metadata(["t"])
    calls = LeaseCalls(transport, "g", 30.0, lambda: cluster.now)
    cluster.now = 0.0
    took_s = []
    for _ in range(6):
        began = cluster.now
        assert finish(calls.group_has_leases()) is None
        took_s.append(cluster.now - began)
    assert took_s == pytest.approx([0.3, 0.6, 1.2, 2.4, 4.8, GROUP_LOOK_TIMEOUT_S_MAX], rel=0.1)
    for pause_s, looks in ((0.0, False), (HURRIED_LOOK_PAUSE * HURRIED_LOOK_TIMEOUT_S_MAX, True)):
        cluster.wait(pause_s)
        began = cluster.now
        finish(calls.group_has_leases(hurried=True, rarely=True))
        assert (cluster.now > began) is looks


@pytest.mark.parametrize("hurried", [True, False])
def test_a_look_at_the_group_goes_where_receives_go(cluster: PausedCluster, hurried: bool) -> None:
    transport = cluster.transport()
    transport.metadata(["t"])
    calls = LeaseCalls(transport, "g", 30.0, lambda: cluster.now)
    calls.near = ("t", 0)
    cluster.now = 0.0
    transport.call(receive(0.5))
    began = cluster.now
    assert finish(calls.group_has_leases(hurried=hurried)) is True
    assert cluster.arrived[-1][1:] == (TWO, "/v1/groups/g")
    assert cluster.now < began + GROUP_LOOK_TIMEOUT_S


def test_a_fetch_at_a_leader_that_another_broker_named_follows_too(cluster: PausedCluster) -> None:
    transport = cluster.transport()
    assert transport.leader_reported(("t", 0), ONE), "without its epoch"
    fetch = Request("POST", "/v1/fetch", b"{}", repeatable=True, leader_of=("t", 0), wait_s=1.0)
    cluster.now = 0.0
    transport.call(fetch)
    assert NEXT_LEADER_S < cluster.now < FOLLOWED_S


@pytest.mark.parametrize("began", [0.0, 1.0, NEXT_LEADER_S - 0.01])
def test_a_client_that_begins_at_the_paused_broker_loses_a_moment(cluster: PausedCluster, began: float) -> None:
    cluster.now = began
    transport = cluster.transport()
    transport.metadata(["t"])
    transport.call(LOOK_UP)
    assert cluster.now < began + 0.5
    transport.call(SEND)
    assert NEXT_LEADER_S < cluster.now < FOLLOWED_S


ACK = Request("POST", "/v1/groups/g/ack", b"{}", repeatable=True)


def test_a_call_without_a_partition_leaves_a_broker_that_answers_nothing(cluster: PausedCluster) -> None:
    cluster.now = 0.0
    cluster.transport().call(ACK)
    (at, _, _), *_, (again_at, url, _) = [each for each in cluster.arrived if each[2] == ACK.path]
    assert (url, again_at - at < 1.5) == (TWO, True)
    assert cluster.now < FOLLOWED_S


def test_a_call_without_a_partition_waits_for_a_broker_that_lives(cluster: PausedCluster) -> None:
    cluster.now = 0.0
    cluster.transport(f"{TWO},{ONE},{THREE}").call(ACK)
    assert [url for _, url, path in cluster.arrived if path == ACK.path] == [TWO]
    assert {url for _, url, path in cluster.arrived if path == "/livez"} == {TWO}


def test_the_last_broker_may_take_its_time_for_what_any_broker_knows(cluster: PausedCluster) -> None:
    cluster.now = 0.0
    transport = cluster.transport(ONE)
    with pytest.raises(Unavailable):
        transport.metadata(["t"], deadline=100.0)
    assert cluster.now > 5.0, "no other broker is known"


def test_a_pause_between_tries_is_short_beside_the_goal() -> None:
    assert Backoff(lambda: 1.0).next_s() < 0.1
