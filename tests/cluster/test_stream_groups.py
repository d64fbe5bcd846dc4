"""A stream group over a cluster: members join and leave, brokers die, and the one owner of a partition processes its
messages.

`PORTALMQ_CHURN` sets how often the group loses a member and gains one (the suite: 4; the full run: 20), and
`PORTALMQ_CHURN_KILLS` how often the group's coordinator is killed (the suite: 1; the full run: 5).
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from support.cluster import Cluster, wait_until
from support.load import Load, loads

from portalmq import Consumer, Producer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CHURN = int(os.environ.get("PORTALMQ_CHURN", "4"))
KILLS = int(os.environ.get("PORTALMQ_CHURN_KILLS", "1"))
MEMBERS = 6
PARTITIONS = 12
LOADS = ("a", "b")
# A member is lost because it disappears, not because the machine pauses.
SESSION_S = 7.0
PAUSE_S = 0.004
# A partition that keeps its member is read while members come and go: it is never behind by more than the messages of
# two seconds, when all run at full speed. Counted in messages, since a paused machine sends none.
BEHIND_MAX = round(2.0 * len(LOADS) / (PAUSE_S * PARTITIONS))


@dataclass
class Sight:
    """A delivered message: time, place, member and generation."""

    at: float
    partition: int
    value: str
    member: str
    generation: int
    since: int


@dataclass
class Reader:
    """A member of the group in a thread. It notes every message before it asks for more."""

    consumer: Consumer
    sights: list[Sight] = field(default_factory=list)
    fault: BaseException | None = None

    def start(self) -> Reader:
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        return self

    def _read(self) -> None:
        member = self.consumer._stream
        assert member is not None
        try:
            for message in self.consumer:
                with member.buffers.lock:
                    feed = member.buffers.by_partition.get((message.topic, message.partition))
                    generation, since = member._commits.generation, feed.since if feed else -1
                self.sights.append(
                    Sight(time.monotonic(), message.partition, message.text, member.member_id, generation, since)
                )
        except BaseException as fault:  # noqa: BLE001 - the test reports it
            self.fault = fault

    @property
    def partitions(self) -> int:
        return len(self.consumer.assignment)

    def leave(self) -> None:
        self.consumer.close()
        self.thread.join(10)

    def vanish(self) -> None:
        """Stop as a killed process does: without a commit, and without leaving."""
        member = self.consumer._stream
        assert member is not None
        member._left = True
        member.buffers.close()
        self.consumer._receiving.close()
        member._settle_transport.close()
        self.thread.join(10)


class Group:
    """The members, including those that are gone."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self.live: list[Reader] = []
        self.all: list[Reader] = []

    def add(self) -> None:
        reader = Reader(
            Consumer(
                self._topic,
                group=f"group-{self._topic}",
                bootstrap=self._cluster.urls,
                mode="stream",
                session_timeout_s=SESSION_S,
            )
        ).start()
        self.live.append(reader)
        self.all.append(reader)

    def settle(self) -> None:
        """Wait until all partitions are assigned, evenly."""
        wait_until(self._is_settled, f"{PARTITIONS} partitions among {len(self.live)} members", 40)

    def _is_settled(self) -> bool:
        self.check_faults()
        counts = [reader.partitions for reader in self.live]
        return sum(counts) == PARTITIONS and max(counts) - min(counts) <= 1

    def check_faults(self) -> None:
        for reader in self.all:
            if reader.fault is not None:
                raise AssertionError(f"a member failed: {reader.fault!r}") from reader.fault

    def owners(self) -> dict[int, tuple[str, int]]:
        owned: dict[int, tuple[str, int]] = {}
        for reader in self.live:
            member = reader.consumer._stream
            assert member is not None
            with member.buffers.lock:
                for place, feed in member.buffers.by_partition.items():
                    owned[place[1]] = (member.member_id, feed.since)
        return owned

    @property
    def sights(self) -> list[Sight]:
        return [sight for reader in self.all for sight in tuple(reader.sights)]

    def close(self) -> None:
        for reader in self.live:
            reader.leave()


def coordinator(cluster: Cluster, topic: str) -> int:
    """The broker that coordinates the group: every broker names it in a call without forwarding."""
    path = f"/v1/groups/group-{topic}/members/nobody"

    def found() -> int | None:
        asked = cluster.running[0]
        answer = cluster.brokers[asked].request("DELETE", path, headers={"PortalMQ-No-Forward": "1"})
        if answer.status == 204:
            return asked
        leader: int | None = answer.json().get("leader") if answer.status == 421 else None
        return leader

    return wait_until(found, "the group has a coordinator")


def coordinator_other_than(cluster: Cluster, topic: str, before: int) -> int:
    def found() -> int | None:
        now = coordinator(cluster, topic)
        return now if now != before else None

    return wait_until(found, "another broker coordinates")


@pytest.mark.prove
def test_members_and_coordinators_come_and_go(cluster: Cluster, topic: str) -> None:
    cluster.admin().create_topic(topic, partitions=PARTITIONS)
    cluster.wait_in_sync(topic)
    group = Group(cluster, topic)
    kill_after = {round((turn + 1) * CHURN / (KILLS + 1)) for turn in range(KILLS)}
    furthest_behind = 0
    with loads(cluster.urls, LOADS, topic=topic, partitions=PARTITIONS, pause_s=PAUSE_S) as running:
        for _ in range(MEMBERS):
            group.add()
        group.settle()
        for turn in range(CHURN):
            began, before = time.monotonic(), group.owners()
            reader = group.live.pop(0)
            reader.leave() if turn % 2 else reader.vanish()
            group.settle()
            group.add()
            group.settle()
            furthest_behind = max(furthest_behind, _furthest_behind(group, running, began, before))
            if turn in kill_after:
                killed = coordinator(cluster, topic)
                cluster.kill(killed)
                group.settle()
                cluster.start(killed)
                cluster.wait_in_sync(topic)
                group.settle()
        for load in running:
            load.wait_for_acked(50)
    acked = {each.value for load in running for each in load.acked}
    wait_until(lambda: acked <= {sight.value for sight in group.sights}, "every message was processed", 60)
    group.close()
    group.check_faults()
    _check_owners(group.sights)
    again = len(group.sights) - len({sight.value for sight in group.sights})
    print(
        f"{CHURN} members lost and regained, {KILLS} coordinators killed: {len(acked)} messages, {again} repeated; "
        f"{furthest_behind} were acked, at most, while a partition that stayed stood still"
    )
    assert furthest_behind <= BEHIND_MAX


def _furthest_behind(group: Group, running: list[Load], began: float, before: dict[int, tuple[str, int]]) -> int:
    """The largest number of messages acked, since `began`, between two that a staying member read from a partition."""
    ended, after = time.monotonic(), group.owners()
    stayed = [partition for partition, owner in before.items() if after.get(partition) == owner]
    assert stayed, "a member that stays keeps most of its partitions"
    read: dict[int, list[float]] = defaultdict(list)
    for sight in group.sights:
        read[sight.partition].append(sight.at)
    acked: dict[int, list[float]] = defaultdict(list)
    for load in running:
        for each in tuple(load.acked):
            acked[each.partition].append(each.at)
    most = 0
    for partition in stayed:
        acks = sorted(at for at in acked[partition] if began <= at <= ended)
        moments = [began, *sorted(at for at in read[partition] if began <= at <= ended), ended]
        most = max(most, *(bisect(acks, later) - bisect(acks, earlier) for earlier, later in pairwise(moments)))
    return most


def _check_owners(sights: list[Sight]) -> None:
    """Assert that no partition has two owners in a generation."""
    by_generation: dict[tuple[int, int], set[str]] = defaultdict(set)
    by_since: dict[tuple[int, int], set[str]] = defaultdict(set)
    for sight in sights:
        if sight.since >= 0:  # the partition was not revoked while its message was noted
            by_generation[sight.partition, sight.generation].add(sight.member)
            by_since[sight.partition, sight.since].add(sight.member)
    for owners in (by_generation, by_since):
        twice = {where: members for where, members in owners.items() if len(members) > 1}
        assert not twice, twice


@pytest.mark.prove
def test_a_group_reads_on_without_zookeeper(cluster: Cluster, topic: str) -> None:
    """Its members heartbeat, read and commit without interruption: a ZooKeeper outage alone stops no partition."""
    cluster.admin().create_topic(topic, partitions=3)
    cluster.wait_in_sync(topic)
    group = Group(cluster, topic)
    with loads(cluster.urls, topic=topic, partitions=3, pause_s=PAUSE_S) as running:
        for _ in range(3):
            group.add()
        wait_until(lambda: [reader.partitions for reader in group.live] == [1, 1, 1], "each has one")
        before = group.owners()
        asked = coordinator(cluster, topic)
        cluster.zookeeper.kill()
        try:
            for load in running:
                load.wait_for_acked(500)
            ended = time.monotonic() + 1.5 * SESSION_S
            for load in running:
                while time.monotonic() < ended:
                    load.wait_for_acked(20)
            newest = {load.acked[-1].value for load in running}
            wait_until(lambda: newest <= {sight.value for sight in group.sights}, "all sent is read")

            def committed() -> list[int]:
                told = cluster.ask(f"/v1/groups/group-{topic}/offsets", asked)
                return [each["partition"] for each in told["offsets"] if each["committed"] > 0] if told else []

            wait_until(lambda: committed() == [0, 1, 2], "it commits, and the lag is known")
        finally:
            cluster.zookeeper.start()
        wait_until(lambda: cluster.live() == set(cluster.brokers), "every broker is registered again")
        for load in running:
            load.wait_for_acked(100)
        assert group.owners() == before
    acked = {each.value for load in running for each in load.acked}
    wait_until(lambda: acked <= {sight.value for sight in group.sights}, "every message was processed")
    group.close()
    group.check_faults()
    assert len(group.sights) == len(acked), "no message was delivered twice"


def test_a_coordinator_that_is_stopped_hands_over_without_a_reassignment(cluster: Cluster, topic: str) -> None:
    cluster.admin().create_topic(topic, partitions=3)
    cluster.wait_in_sync(topic)
    group = Group(cluster, topic)
    with loads(cluster.urls, topic=topic, partitions=3, pause_s=PAUSE_S) as running:
        for _ in range(2):
            group.add()
        wait_until(lambda: sorted(reader.partitions for reader in group.live) == [1, 2], "all is given out")
        before = group.owners()
        stopped = coordinator(cluster, topic)
        assert cluster.brokers[stopped].stop() == 0
        coordinator_other_than(cluster, topic, stopped)
        for load in running:
            load.wait_for_acked(100)
        assert group.owners() == before
        cluster.start(stopped)
    acked = {each.value for load in running for each in load.acked}
    wait_until(lambda: acked <= {sight.value for sight in group.sights}, "every message was processed")
    group.close()
    group.check_faults()
    assert len(group.sights) == len(acked), "no message was delivered twice"


def test_a_paused_coordinator_is_replaced(cluster: Cluster, topic: str) -> None:
    """When it continues, it changes nothing."""
    cluster.admin().create_topic(topic, partitions=3)
    cluster.wait_in_sync(topic)
    group = Group(cluster, topic)
    with loads(cluster.urls, topic=topic, partitions=3, pause_s=PAUSE_S) as running:
        for _ in range(3):
            group.add()
        wait_until(lambda: [reader.partitions for reader in group.live] == [1, 1, 1], "each has one")
        paused = coordinator(cluster, topic)
        cluster.pause(paused)
        other = coordinator_other_than(cluster, topic, paused)
        cluster.resume(paused)
        for load in running:
            load.wait_for_acked(100)
        wait_until(lambda: coordinator(cluster, topic) == other, "the one that took over stays")
        wait_until(lambda: [reader.partitions for reader in group.live] == [1, 1, 1], "each has one partition")
    acked = {each.value for load in running for each in load.acked}
    wait_until(lambda: acked <= {sight.value for sight in group.sights}, "every message was processed")
    group.close()
    group.check_faults()
    _check_owners(group.sights)


def test_a_recreated_topic_is_read_from_its_beginning(cluster: Cluster, topic: str) -> None:
    cluster.admin().create_topic(topic)
    with Producer(cluster.urls) as producer:
        producer.send(topic, "old").result(timeout=20)
    with Consumer(
        topic, group=f"group-{topic}", bootstrap=cluster.urls, mode="stream", session_timeout_s=SESSION_S
    ) as reading:
        assert [message.text for message in reading.poll(60)] == ["old"]
        cluster.admin().delete_topic(topic)
        cluster.admin().create_topic(topic)
        with Producer(cluster.urls) as producer:
            producer.send(topic, "new").result(timeout=20)
        assert [message.text for message in reading.poll(60)] == ["new"]


def test_former_members_and_deleted_groups_are_refused_at_every_broker(cluster: Cluster, topic: str) -> None:
    cluster.admin().create_topic(topic, partitions=6)
    cluster.wait_in_sync(topic)
    one, two, three = cluster.running
    path = f"/v1/groups/group-{topic}"

    def ask(broker_id: int, method: str, tail: str = "", **body: object) -> tuple[int, dict[str, object]]:
        headers = {"Content-Type": "application/json"}
        answer = cluster.brokers[broker_id].request(method, path + tail, body, headers)
        return answer.status, answer.json() if answer.status != 204 else {}

    offsets = [{"topic": topic, "partition": partition, "offset": 0} for partition in range(6)]
    for _ in range(5):
        status, member = ask(one, "POST", "/members", topics=[topic], member_id="a")
        assert status == 200
        commit = {"member_id": "a", "generation": member["generation"], "offsets": offsets}
        assert ask(two, "PUT", "/offsets", **commit)[0] == 200
        assert ask(two, "DELETE", "/members/a")[0] == 204
        for broker_id in (three, one):
            status, refused = ask(broker_id, "PUT", "/offsets", **commit)
            assert (status, refused["code"], refused["outcome"]) == (409, "illegal_generation", "not_applied")
        status, member = ask(one, "POST", "/members", topics=[topic], member_id="a")
        assert status == 200
        assert ask(three, "DELETE")[0] == 204
        for broker_id in (one, two, three):
            status, gone = ask(broker_id, "POST", "/members/a/heartbeat", generation=member["generation"])
            assert (status, gone["code"]) == (404, "group_not_found")
