"""Members of a cluster without their partitions: real memberships on greenlets of one process, over one ZooKeeper.

A test sets the result of a probe for each broker (`cluster.probes`); a broker without an entry answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import gevent
import msgspec

from portalmq import wire
from portalmq.broker.cluster.failure_detector import Probe
from portalmq.broker.cluster.membership import Membership
from portalmq.broker.cluster.peers import NotReached
from portalmq.broker.partition.clock import Clock
from portalmq.control_plane.catalog import Catalog, Versioned
from portalmq.control_plane.mirror import Changes
from portalmq.control_plane.state import BrokerState, PartitionState, TopicState
from portalmq.control_plane.zookeeper import ZooKeeper

T = TypeVar("T")

WITHIN_S = 60.0
# The longest session that the tests' servers grant: no pause of the machine ends it.
SESSION_S = 10.0


def until(holds: Callable[[], object], what: str = "", *, within_s: float = WITHIN_S) -> float:
    """Let greenlets run until the condition holds; return the seconds that it took."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > within_s:
            raise AssertionError(f"not within {within_s} s: {what or holds}")
        gevent.sleep(0.01)
    return time.monotonic() - began


def url_of(broker_id: int) -> str:
    return f"http://broker-{broker_id}.test:5000"


class Member:
    """One broker's membership, and the events that it received."""

    def __init__(
        self, cluster: Members, broker_id: int, *, incarnation: int, store_uuid: str, url: str, session_timeout_s: float
    ) -> None:
        self.broker_id = broker_id
        self.plane = ZooKeeper(cluster.hosts, session_timeout_s=session_timeout_s, handler="gevent")
        self.plane.start()
        self.catalog = Catalog(self.plane)
        self.fatal: list[BaseException] = []
        self.told: list[Changes] = []
        self.lost = 0
        self.membership = Membership(
            self.catalog,
            broker_id,
            BrokerState(url, incarnation, store_uuid),
            Clock(),
            on_fatal=self.fatal.append,
            probe=lambda url: cluster.probe(broker_id, url),
            peers=Line(cluster, broker_id),
        )
        self.membership.on_changed.append(self.told.append)
        self.membership.on_session_lost.append(self._count_lost)

    def _count_lost(self) -> None:
        self.lost += 1

    @property
    def is_controller(self) -> bool:
        return self.membership.is_controller

    def partition(self, topic: TopicState, number: int = 0) -> Versioned[PartitionState]:
        """The partition's state as this member knows it, which may take a moment when the topic is new."""
        until(lambda: (topic.topic_id, number) in self.membership.mirror.partitions)
        return self.membership.mirror.partitions[(topic.topic_id, number)]

    def close(self) -> None:
        self.membership.close()
        self.plane.close()


class Line:
    """Peers, as far as a membership needs them: the calls of one broker."""

    def __init__(self, cluster: Members, broker_id: int) -> None:
        self._cluster = cluster
        self._broker_id = broker_id

    def call(self, broker_id: int, name: str, request: msgspec.Struct, kind: type[T], *, timeout_s: float) -> T:
        if broker_id not in self._cluster.members or frozenset((self._broker_id, broker_id)) in self._cluster.cuts:
            raise NotReached(f"broker {broker_id} refuses", refused=True)
        other = self._cluster.members[broker_id].membership.peer_queries
        answers = {"suspect": other.on_report, "reach": other.answer_reach, "standings": other.answer_log_ends}
        answer: T = answers[name](request)
        return answer


class Members:
    """Members that call each other without HTTP."""

    def __init__(self, hosts: str, session_timeout_s: float = SESSION_S) -> None:
        self.hosts = hosts
        self.session_timeout_s = session_timeout_s
        self.members: dict[int, Member] = {}
        self.killed: dict[int, Member] = {}
        # By URL: the result of a probe.
        self.probes: dict[str, Probe] = {}
        self.probed: list[tuple[int, str]] = []
        self.cuts: set[frozenset[int]] = set()

    def start(self, broker_id: int, *, incarnation: int = 1, store_uuid: str = "", url: str = "") -> Member:
        member = Member(
            self,
            broker_id,
            incarnation=incarnation,
            store_uuid=store_uuid or f"store-{broker_id}",
            url=url or url_of(broker_id),
            session_timeout_s=self.session_timeout_s,
        )
        try:
            member.membership.start()
        except BaseException:
            member.plane.close()
            raise
        self.members[broker_id] = member
        return member

    def start_all(self, *broker_ids: int) -> list[Member]:
        started = [self.start(broker_id) for broker_id in broker_ids]
        for member in started:
            until(lambda member=member: len(member.membership.mirror.brokers) == len(self.members))  # type: ignore[misc]
        return started

    def kill(self, broker_id: int) -> None:
        """Its greenlets end and its port refuses; its session stays until its timeout."""
        member = self.members.pop(broker_id)
        self.killed[broker_id] = member
        member.membership.controller_loop.close()
        gevent.killall(member.membership._greenlets)
        member.membership.failure_detector.close()
        self.probes[url_of(broker_id)] = Probe.REFUSED

    def expire(self, broker_id: int) -> None:
        """End the session of a killed member."""
        self.killed.pop(broker_id).plane.close()

    def probe(self, by: int, url: str) -> Probe:
        self.probed.append((by, url))
        if any(url == url_of(other) for cut in self.cuts if by in cut for other in cut - {by}):
            return Probe.REFUSED
        return self.probes.get(url, Probe.ANSWERED)

    def cut(self, broker_id: int, *others: int) -> None:
        """Let the links between them refuse connections from now on, as a rejecting firewall does; links to ZooKeeper
        remain open."""
        self.cuts |= {frozenset((broker_id, other)) for other in others}

    @property
    def controllers(self) -> list[int]:
        return [broker_id for broker_id, member in self.members.items() if member.is_controller]

    def create_topic(self, name: str = "t", partitions: int = 1, **fields: object) -> TopicState:
        catalog = next(iter(self.members.values())).catalog
        request = wire.CreateTopic(partitions=partitions, **fields)  # type: ignore[arg-type]
        return catalog.create_topic(name, request, brokers=catalog.brokers())[0]


@contextmanager
def members(hosts: str, *, session_timeout_s: float = SESSION_S) -> Iterator[Members]:
    running = Members(hosts, session_timeout_s)
    try:
        yield running
    finally:
        for member in running.members.values():
            member.close()
        for member in running.killed.values():
            member.plane.close()
