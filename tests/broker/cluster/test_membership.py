"""The membership of a broker: registration, sessions, controller; on a real ZooKeeper and on a single broker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gevent
import msgspec
import pytest
from support.members import Members, members, until, url_of
from support.zookeeper import Wire, fresh_chroot

from portalmq import wire
from portalmq.broker.cluster.failure_detector import Probe
from portalmq.broker.cluster.membership import ClusterGone, Membership
from portalmq.broker.cluster.rpc.brokers import LogEndRequest, ReplicaLogEnd, Suspicion, SuspicionNoted
from portalmq.broker.core.replica.events import IsrAnswered, Outcome, ProposeIsr
from portalmq.broker.partition.clock import Clock
from portalmq.control_plane import state
from portalmq.control_plane.catalog import BrokerIdTaken, Catalog, ControllerFenced, PartitionChange
from portalmq.control_plane.embedded import EmbeddedZooKeeper
from portalmq.control_plane.plane import Delete, Op, OutcomeUnknown, PlaneState, PlaneUnavailable, Set
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.state import BrokerState
from portalmq.control_plane.zookeeper import ZooKeeper
from portalmq.errors import NotFound, PartitionNotFound

PATIENT_S = 60.0


@pytest.fixture
def cluster(zookeeper_server: EmbeddedZooKeeper) -> Iterator[Members]:
    with members(zookeeper_server.hosts + fresh_chroot()) as running:
        yield running


@pytest.mark.cluster
class TestRegistering:
    def test_members_know_each_other_and_one_is_controller(self, cluster: Members) -> None:
        first, second, third = cluster.start_all(1, 2, 3)
        assert first.membership.mirror.brokers == third.membership.mirror.brokers
        assert second.membership.mirror.url_of(3) == url_of(3)
        assert cluster.controllers == [1]
        until(lambda: third.membership.mirror.controller is not None)

    def test_the_entry_of_an_earlier_start_is_replaced_at_once(self, cluster: Members) -> None:
        cluster.start(1)
        cluster.kill(1)
        cluster.probes.clear()
        began = time.monotonic()
        again = cluster.start(1, incarnation=2)
        assert time.monotonic() - began < cluster.session_timeout_s
        cluster.expire(1)
        until(lambda: again.membership.mirror.brokers[1].incarnation == 2)
        assert again.membership.registered

    def test_a_second_broker_with_the_same_id_and_another_disk_is_refused(self, cluster: Members) -> None:
        first = cluster.start(1)
        began = time.monotonic()
        with pytest.raises(BrokerIdTaken, match="another data directory"):
            cluster.start(1, store_uuid="another", url="http://elsewhere.test:5000")
        assert time.monotonic() - began < cluster.session_timeout_s, "the first broker answers: no wait"
        assert first.membership.registered

    def test_registering_waits_for_the_entry_of_a_dead_broker_of_another_disk(self, cluster: Members) -> None:
        cluster.start(1)
        cluster.kill(1)
        gevent.spawn_later(0.5, cluster.expire, 1)
        again = cluster.start(1, store_uuid="an emptied disk")
        assert again.membership.registered

    def test_a_removed_registration_is_made_again(self, cluster: Members) -> None:
        first, second = cluster.start_all(1, 2)
        second.plane.commit(Delete(state.broker_path(1), 0))
        until(lambda: (node := second.plane.get(state.broker_path(1))) and node.owner == first.plane.session_id)
        assert first.lost == 0

    def test_a_broker_replaced_by_a_later_start_ends(self, cluster: Members) -> None:
        ghost = cluster.start(1)
        cluster.members.pop(1)
        later = cluster.start(1, incarnation=2)
        until(lambda: ghost.fatal)
        assert isinstance(ghost.fatal[0], BrokerIdTaken)
        assert later.membership.registered
        ghost.close()


@contextmanager
def seen_from_elsewhere(hosts: str) -> Iterator[ZooKeeper]:
    plane = ZooKeeper(hosts, session_timeout_s=10.0, handler="gevent")
    plane.start()
    try:
        yield plane
    finally:
        plane.close()


@pytest.mark.cluster
class TestSessions:
    def test_a_lost_session_is_reported_first_and_the_broker_registers_again(
        self, zookeeper_server: EmbeddedZooKeeper
    ) -> None:
        port = int(zookeeper_server.hosts.rpartition(":")[2])
        with Wire(port) as line, members(line.hosts + (chroot := fresh_chroot()), session_timeout_s=3.0) as cluster:
            member = cluster.start(1)
            topic = cluster.create_topic()
            until(lambda: (topic.topic_id, 0) in member.membership.mirror.partitions)
            told: list[str] = []
            cut_ms: list[int] = []

            def lost() -> None:
                told.append("lost")
                assert member.membership.answered_ms() <= cut_ms[0], "the new session renews no old lease"
                told.append("checked")

            member.membership.on_session_lost.append(lost)
            member.membership.on_changed.append(lambda changes: told.append("all" if changes.everything else "some"))
            before = member.plane.session_id
            line.cut()
            told.clear()
            cut_ms.append(Clock().now_ms() + 2)  # two clocks, which round
            with seen_from_elsewhere(zookeeper_server.hosts + chroot) as elsewhere:
                until(lambda: elsewhere.get(state.broker_path(1)) is None, "the session has ended")
            line.heal()
            until(lambda: "all" in told and "lost" in told and member.membership.registered)
            assert told.index("lost") < told.index("checked") < told.index("all")
            assert member.membership.answered_ms() > cut_ms[0]
            assert member.plane.session_id != before
            until(lambda: member.is_controller, "the controller is elected anew")
            assert member.partition(topic).value.leader == 1

    def test_an_outage_shorter_than_a_session_changes_nothing(self, zookeeper_server: EmbeddedZooKeeper) -> None:
        port = int(zookeeper_server.hosts.rpartition(":")[2])
        with Wire(port) as line, members(line.hosts + fresh_chroot()) as cluster:
            member = cluster.start(1)
            topic = cluster.create_topic()
            line.cut()
            gevent.sleep(0.3)  # there is no condition to wait for: the connection is silent
            line.heal()
            member.told.clear()
            until(lambda: any(changes.everything for changes in member.told))
            assert (member.lost, member.fatal) == (0, [])
            assert member.partition(topic).value.leader_epoch == 1

    def test_the_lease_counts_from_the_last_answer(self, zookeeper_server: EmbeddedZooKeeper) -> None:
        port = int(zookeeper_server.hosts.rpartition(":")[2])
        with Wire(port) as line, members(line.hosts + fresh_chroot(), session_timeout_s=6.0) as cluster:
            member = cluster.start(1)
            clock = Clock()
            began_ms = clock.now_ms() - 2  # two clocks, which round
            member.plane.sync()
            assert member.membership.answered_ms() >= began_ms
            assert member.membership.lease_ms == 4_000
            line.cut()
            until(lambda: member.plane.state is not PlaneState.CONNECTED)
            cut_ms = clock.now_ms()
            gevent.sleep(0.3)
            assert member.membership.answered_ms() <= cut_ms
            line.heal()

    def test_a_control_plane_that_was_emptied_ends_the_broker(self, cluster: Members) -> None:
        member = cluster.start(1)
        node = member.plane.get(state.CLUSTER_ID)
        assert node is not None
        member.plane.commit(Delete(state.CLUSTER_ID, node.version), Delete(state.broker_path(1), 0))
        until(lambda: member.fatal)
        assert isinstance(member.fatal[0], ClusterGone)
        assert "portalmq adopt" in str(member.fatal[0])


@pytest.mark.cluster
class TestTheController:
    def test_a_dead_leader_is_replaced_without_waiting_for_its_session(self, cluster: Members) -> None:
        first, _, _ = cluster.start_all(1, 2, 3)
        topic = cluster.create_topic(partitions=3)
        until(lambda: len(first.membership.mirror.partitions) == 3)
        led = next(n for n in range(3) if first.partition(topic, n).value.leader == 3)
        cluster.kill(3)
        first.membership.suspect(3, 1, refused=True)
        until(lambda: first.partition(topic, led).value.leader in (1, 2))
        assert 3 in first.membership.mirror.brokers, "its session has not expired"
        held = first.partition(topic, led).value
        assert (held.leader_epoch, 3 in held.isr) == (2, False)

    def test_a_suspicion_reaches_the_controller_which_probes_itself(
        self, cluster: Members, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("portalmq.broker.cluster.failure_detector.PROBE_EVERY_S", 3_600.0)
        cluster.start_all(1, 2, 3)
        until(lambda: cluster.members[2].membership.mirror.controller is not None)
        topic = cluster.create_topic(partitions=3)
        until(lambda: len(cluster.members[1].membership.mirror.partitions) == 3)
        cluster.probed.clear()
        cluster.members[2].membership.suspect(3, 1, refused=True)
        until(lambda: (1, url_of(3)) in cluster.probed, "at once, and not at the next turn")
        gevent.sleep(1.2)  # time for a reaction, which must not come: broker 3 answers the controller
        held = [cluster.members[1].partition(topic, number).value for number in range(3)]
        assert [partition.leader_epoch for partition in held] == [1, 1, 1]

    def test_a_paused_leader_is_replaced_after_two_silent_probes(self, cluster: Members) -> None:
        first, _, _ = cluster.start_all(1, 2, 3)
        topic = cluster.create_topic(partitions=3)
        until(lambda: len(first.membership.mirror.partitions) == 3)
        cluster.probes[url_of(3)] = Probe.SILENT
        until(lambda: all(first.partition(topic, n).value.leader in (1, 2) for n in range(3)))
        cluster.probes[url_of(3)] = Probe.ANSWERED
        until(lambda: 3 in first.membership.controller_loop.live())
        assert all(first.partition(topic, n).value.leader in (1, 2) for n in range(3))

    def test_one_silence_is_not_enough(self, cluster: Members) -> None:
        first, _, _ = cluster.start_all(1, 2, 3)
        answers = iter([Probe.SILENT, Probe.ANSWERED] * 100)
        seen: list[Probe] = []

        def slow(by: int, url: str) -> Probe:
            found = next(answers) if url == url_of(3) else Probe.ANSWERED
            seen.append(found)
            return found

        cluster.probe = slow  # type: ignore[method-assign]
        until(lambda: seen.count(Probe.SILENT) >= 2 and 3 in first.membership.controller_loop.live())
        assert first.membership.failure_detector.gone() == set()

    @pytest.mark.parametrize("found", [Probe.REFUSED, Probe.SILENT])
    def test_a_dead_controller_is_replaced_and_so_are_its_leaders(self, cluster: Members, found: Probe) -> None:
        cluster.start_all(1, 2, 3)
        assert cluster.controllers == [1]
        topic = cluster.create_topic(partitions=3)
        cluster.kill(1)
        cluster.probes[url_of(1)] = found
        until(lambda: cluster.controllers in ([2], [3]))
        successor = cluster.members[cluster.controllers[0]]
        until(lambda: all(successor.partition(topic, n).value.leader in (2, 3) for n in range(3)))
        controller = successor.catalog.controller()
        assert controller is not None
        assert controller.value.epoch == 2

    @pytest.mark.parametrize("found", [Probe.REFUSED, Probe.SILENT])
    def test_a_controller_that_others_reach_is_not_removed(self, cluster: Members, found: Probe) -> None:
        asked: list[tuple[int, str]] = []

        def deaf(by: int, url: str) -> Probe:
            asked.append((by, url))
            return found if {by, url} in ({1, url_of(2)}, {2, url_of(1)}) else Probe.ANSWERED

        cluster.start_all(1, 2, 3)
        assert cluster.controllers == [1]
        until(lambda: cluster.members[2].membership.mirror.controller is not None)
        cluster.probe = deaf  # type: ignore[method-assign]
        until(lambda: asked.count((2, url_of(1))) > 6, "time for more than one decision")
        held = cluster.members[3].catalog.controller()
        assert held is not None
        assert (held.value.broker_id, held.value.epoch) == (1, 1)

    def test_two_brokers_that_do_not_reach_each_other_do_not_remove_each_other_for_ever(
        self, cluster: Members, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("portalmq.broker.cluster.controller_loop.REMOVE_AGAIN_MS", 3_600_000)
        cluster.start_all(1, 2)
        catalog = cluster.members[2].catalog
        cluster.cut(1, 2)
        until(lambda: (held := catalog.controller()) is not None and held.value.epoch >= 2)
        cluster.probed.clear()
        until(lambda: len(cluster.probed) > 12, "time for more than two decisions")
        held = catalog.controller()
        assert held is not None
        assert held.value.epoch <= 3

    @pytest.mark.parametrize("alone", [1, 3])
    def test_a_broker_that_is_cut_off_loses_its_partitions_and_removes_no_controller(
        self, cluster: Members, alone: int
    ) -> None:
        """A broker that two others reach is live; one that no other broker reaches is not, controller (1) or not."""
        cluster.start_all(1, 2, 3)
        other = cluster.members[2]
        topic = cluster.create_topic(partitions=3)
        until(lambda: len(other.membership.mirror.partitions) == 3)
        cluster.cut(alone, *({1, 2, 3} - {alone}))
        others = {1, 2, 3} - {alone}
        until(lambda: all(other.partition(topic, n).value.leader in others for n in range(3)))
        until(lambda: (held := other.catalog.controller()) is not None and held.value.broker_id != alone)
        epochs = [other.partition(topic, n).value.leader_epoch for n in range(3)]
        controller = other.catalog.controller()
        cluster.probed.clear()
        until(lambda: sum(by == alone for by, _ in cluster.probed) > 6, "it keeps asking")
        assert [other.partition(topic, n).value.leader_epoch for n in range(3)] == epochs
        assert other.catalog.controller() == controller

    def test_the_epoch_fences_one_of_two_brokers_that_act_as_controller(self, cluster: Members) -> None:
        first, second = cluster.start_all(1, 2)
        topic = cluster.create_topic()
        old = first.membership.controller_loop.held
        assert old is not None
        assert second.catalog.remove_controller(old)
        assert not second.catalog.remove_controller(old), "a term ends once"
        new = second.catalog.elect_controller(2, 1)
        assert new is not None
        assert new.value.epoch == old.value.epoch + 1
        held = second.catalog.partition(topic.topic_id, 0)
        assert held is not None
        raised = msgspec.structs.replace(held.value, leader_epoch=99)
        change = PartitionChange(topic.topic_id, 0, raised, held.version)
        with pytest.raises(ControllerFenced):
            first.catalog.commit_as_controller(old, [change])
        assert second.catalog.partition(topic.topic_id, 0) == held
        until(lambda: not first.is_controller, "the first learns of it")
        assert second.catalog.commit_as_controller(new, [change]) == [change]

    def test_replicas_are_added_as_brokers_join(self, cluster: Members) -> None:
        first = cluster.start(1)
        topic = cluster.create_topic(partitions=4)
        assert topic.replication_factor == 3
        cluster.start(2)
        until(lambda: all(len(first.partition(topic, n).value.replicas) == 2 for n in range(4)))
        cluster.start(3)
        until(lambda: all(len(first.partition(topic, n).value.replicas) == 3 for n in range(4)))
        held = first.partition(topic).value
        assert (held.leader, held.leader_epoch, held.isr, held.store_uuids) == (1, 1, (1,), {1: "store-1"})

    def test_draining_hands_over_leadership_and_the_controller_role(
        self, cluster: Members, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("portalmq.broker.cluster.membership.DRAIN_WITHIN_S", PATIENT_S)
        first, second, third = cluster.start_all(1, 2, 3)
        topic = cluster.create_topic(partitions=6)
        until(lambda: len(first.membership.mirror.partitions) == 6)
        began = time.monotonic()
        first.membership.drain()
        assert time.monotonic() - began < PATIENT_S, "it ends before the timeout"
        until(lambda: all(second.partition(topic, n).value.leader in (2, 3) for n in range(6)))
        assert all(1 in first.partition(topic, n).value.isr for n in range(6)), "it follows until it ends"
        until(lambda: cluster.controllers in ([2], [3]))
        first.membership.close()
        until(lambda: third.membership.mirror.brokers.keys() == {2, 3})
        until(lambda: all(set(third.partition(topic, n).value.isr) == {2, 3} for n in range(6)))

    def test_a_broker_alone_drains_at_once(self, cluster: Members, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("portalmq.broker.cluster.membership.DRAIN_WITHIN_S", PATIENT_S)
        member = cluster.start(1)
        topic = cluster.create_topic()
        until(lambda: member.membership.mirror.partitions)
        began = time.monotonic()
        member.membership.drain()
        assert time.monotonic() - began < PATIENT_S
        assert member.partition(topic).value.leader == 1

    def test_files_of_a_deleted_topic_are_confirmed_gone_and_its_tombstone_forgotten(self, cluster: Members) -> None:
        first, second = cluster.start_all(1, 2)
        files = {"kept": True}
        for member in (first, second):
            member.catalog.claim_broker_id(f"store-{member.broker_id}", member.broker_id)
        first.membership._has_files = lambda topic_id: files["kept"]
        second.membership._has_files = lambda topic_id: False
        topic = cluster.create_topic()
        first.catalog.delete_topic("t", now_ms=0)
        until(lambda: first.catalog.confirmations(topic.topic_id) == {2})
        first.membership.controller_loop._maintain()
        assert list(first.catalog.tombstones()) == [topic.topic_id]
        files["kept"] = False
        first.membership.mirror.note(None)
        until(lambda: first.catalog.confirmations(topic.topic_id) == {1, 2})
        first.membership.controller_loop._maintain()
        assert first.catalog.tombstones() == {}


@pytest.mark.cluster
class TestALeaderThatItsFollowersDoNotReach:
    """A firewall between them rejects connections; the controller is another broker, and reaches all."""

    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("portalmq.broker.cluster.controller_loop.ASK_REACH_AGAIN_MS", 20)

    @pytest.fixture
    def led(self, cluster: Members) -> tuple[Members, state.TopicState, int, tuple[int, ...]]:
        """The cluster with broker 4 as controller, a topic on the others, its leader, and its followers."""
        cluster.start_all(4, 1, 2, 3)
        catalog = cluster.members[4].catalog
        brokers = {number: broker for number, broker in catalog.brokers().items() if number != 4}
        topic = catalog.create_topic("t", wire.CreateTopic(partitions=1, replication_factor=3), brokers=brokers)[0]
        held = cluster.members[4].partition(topic).value
        for number in held.replicas:
            cluster.members[number].partition(topic)
        self.join(cluster, topic)
        leader = cluster.members[4].partition(topic).value.leader
        assert leader is not None
        return cluster, topic, leader, tuple({1, 2, 3} - {leader})

    def join(self, cluster: Members, topic: state.TopicState) -> None:
        """Add all replicas to the ISR."""
        catalog = cluster.members[4].catalog
        held = catalog.partition(topic.topic_id, 0)
        assert held is not None
        stores = {number: f"store-{number}" for number in held.value.replicas}
        full = msgspec.structs.replace(
            held.value, isr=held.value.replicas, store_uuids=stores, incarnations=dict.fromkeys(held.value.replicas, 1)
        )
        catalog.commit_fitting([PartitionChange(topic.topic_id, 0, full, held.version)])
        until(lambda: cluster.members[4].partition(topic).value.isr == held.value.replicas)

    def suspect(self, cluster: Members, by: tuple[int, ...], broker_id: int) -> None:
        for number in by:
            cluster.members[number].membership.suspect(broker_id, 1, refused=True)

    def keep_suspecting(self, cluster: Members, leader: int) -> None:
        """Suspect the leader for more rounds of votes than a decision takes."""
        loop = cluster.members[4].membership.controller_loop
        rounds = {loop._ask_reach_ms}

        def asked_again() -> bool:
            loop.note_suspicion(leader, 1)
            rounds.add(loop._ask_reach_ms)
            return len(rounds) > 5

        until(asked_again)

    def test_is_replaced_by_one_that_they_reach_once(
        self, led: tuple[Members, state.TopicState, int, tuple[int, ...]]
    ) -> None:
        cluster, topic, leader, followers = led
        cluster.cut(leader, *followers)

        def replaced() -> bool:
            self.suspect(cluster, followers, leader)
            return cluster.members[4].partition(topic).value.leader in followers

        until(replaced)
        held = cluster.members[4].partition(topic).value
        assert set(held.isr) == set(followers)
        assert cluster.controllers == [4]
        self.keep_suspecting(cluster, leader)
        assert cluster.members[4].partition(topic).value == held, "nothing changes while the links stay the same"

    def test_stays_while_enough_brokers_reach_it(
        self, led: tuple[Members, state.TopicState, int, tuple[int, ...]]
    ) -> None:
        cluster, topic, leader, followers = led
        held = cluster.members[4].partition(topic).value
        cluster.cut(leader, followers[0])
        self.keep_suspecting(cluster, leader)
        assert cluster.members[4].partition(topic).value == held

    def test_stays_when_no_other_replica_is_reached_by_more_brokers(
        self, led: tuple[Members, state.TopicState, int, tuple[int, ...]]
    ) -> None:
        cluster, topic, leader, followers = led
        held = cluster.members[4].partition(topic).value
        cluster.cut(leader, *followers)
        cluster.cut(*followers)
        self.keep_suspecting(cluster, leader)
        assert cluster.members[4].partition(topic).value == held

    def test_is_replaced_when_it_is_the_controller(self, cluster: Members) -> None:
        """The followers cannot report to the controller that they do not reach it: their overdue fetches show it."""
        cluster.start_all(1, 2, 3, 4)
        catalog = cluster.members[1].catalog
        brokers = {number: broker for number, broker in catalog.brokers().items() if number != 4}
        topic = catalog.create_topic("t", wire.CreateTopic(partitions=1, replication_factor=3), brokers=brokers)[0]
        held = cluster.members[1].partition(topic)
        stores = {number: f"store-{number}" for number in (1, 2, 3)}
        full = msgspec.structs.replace(
            held.value, leader=1, isr=(1, 2, 3), store_uuids=stores, incarnations=dict.fromkeys((1, 2, 3), 1)
        )
        catalog.commit_fitting([PartitionChange(topic.topic_id, 0, full, held.version)])
        until(lambda: cluster.members[1].partition(topic).value.leader == 1)
        real = cluster.probe

        def inward_refused(by: int, url: str) -> Probe:
            return Probe.REFUSED if by in (2, 3) and url == url_of(1) else real(by, url)

        cluster.probe = inward_refused  # type: ignore[method-assign]

        def replaced() -> bool:
            cluster.members[1].membership.suspect(2, 1, refused=False)
            return cluster.members[1].partition(topic).value.leader in (2, 3)

        until(replaced)
        assert cluster.controllers == [1], "broker 4 reaches it"


@pytest.mark.cluster
class TestAfterAnOutage:
    def test_absence_proves_nothing_for_one_session(self, cluster: Members) -> None:
        first, _ = cluster.start_all(1, 2)
        topic = cluster.create_topic(partitions=2)
        until(lambda: len(first.membership.mirror.partitions) == 2)
        led = next(n for n in range(2) if first.partition(topic, n).value.leader == 2)
        began = time.monotonic()
        loop = first.membership.controller_loop
        loop.begin_grace(2.0)
        cluster.kill(2)
        cluster.probes.clear()  # its port answers: only the registration is gone
        cluster.expire(2)
        until(lambda: 2 not in first.membership.mirror.brokers)
        assert 2 in loop.live() or not loop._in_grace()
        until(lambda: first.partition(topic, led).value.leader == 1)
        assert time.monotonic() - began > 1.9

    def test_a_refused_connection_proves_absence_during_the_grace_period_too(self, cluster: Members) -> None:
        first, _ = cluster.start_all(1, 2)
        topic = cluster.create_topic(partitions=2)
        until(lambda: len(first.membership.mirror.partitions) == 2)
        first.membership.controller_loop.begin_grace(60.0)
        cluster.kill(2)
        cluster.expire(2)
        until(lambda: all(first.partition(topic, n).value.leader == 1 for n in range(2)))


class LosingPlane(Standalone):
    """A control plane that loses answers, or is unavailable, when a test sets it so."""

    fault: Exception | None = None

    def commit(self, *ops: Op) -> list[int]:
        versions = super().commit(*ops)
        if self.fault is not None:
            raise self.fault
        return versions


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[LosingPlane]:
    made = LosingPlane(tmp_path)
    made.start()
    yield made
    made.close()


@pytest.fixture
def alone(plane: LosingPlane) -> Iterator[Membership]:
    member = Membership(
        Catalog(plane), 1, BrokerState("http://localhost:5000", 2, "store"), Clock(), on_fatal=pytest.fail
    )
    yield member
    member.close()


def make_topic(plane: Standalone, partitions: int = 1) -> state.TopicState:
    brokers = {1: BrokerState("http://localhost:5000", 1, "store")}
    return Catalog(plane).create_topic("t", wire.CreateTopic(partitions=partitions), brokers=brokers)[0]


class TestAlone:
    def test_it_leads_all_partitions_when_start_returns(self, plane: LosingPlane, alone: Membership) -> None:
        topic = make_topic(plane, partitions=230)
        told: list[int] = []
        alone.on_changed.append(lambda changes: told.append(len(changes.partitions)))
        alone.start()
        assert alone.is_controller
        held = alone.mirror.partitions
        assert len(held) == 230
        assert {(each.value.leader, each.value.leader_epoch) for each in held.values()} == {(1, 2)}
        assert told == [230]
        assert held[(topic.topic_id, 0)].value.incarnations == {1: 2}

    def test_a_partition_of_another_store_is_not_led(self, plane: LosingPlane) -> None:
        make_topic(plane)
        member = Membership(
            Catalog(plane), 1, BrokerState("http://localhost:5000", 2, "emptied"), Clock(), on_fatal=pytest.fail
        )
        member.start()
        try:
            assert [held.value.leader for held in member.mirror.partitions.values()] == [None]
        finally:
            member.close()

    def test_a_failing_subscriber_does_not_stop_the_others(self, alone: Membership) -> None:
        told: list[bool] = []
        alone.on_changed += [lambda changes: 1 / 0, lambda changes: told.append(True)]  # type: ignore[list-item,func-returns-value]
        alone.start()
        assert told == [True]

    def test_any_broker_answers_a_suspicion(self, alone: Membership) -> None:
        alone.start()
        assert alone.peer_queries.on_report(Suspicion(9, 1, True)) == SuspicionNoted()


class OldBrokers:
    """Brokers of the previous version, which report one log end a call; number 1 is not open there."""

    def call(self, broker_id: int, name: str, asked: LogEndRequest, kind: object, *, timeout_s: float) -> ReplicaLogEnd:
        if name != "standing":
            raise NotFound(f"brokers do not ask each other for {name!r}")
        if asked.number == 1:
            raise PartitionNotFound("no replica of this partition is open here")
        return ReplicaLogEnd("s2", 1, 7, asked.number, 0)


def test_a_broker_of_the_previous_version_reports_its_log_ends(alone: Membership) -> None:
    alone.peer_queries.peers = OldBrokers()  # type: ignore[assignment]
    told = alone.peer_queries.log_ends(2, [("id", 0), ("id", 1), ("id", 2)])
    assert [standing and standing.end for standing in told] == [0, None, 2]


def test_a_broker_of_the_previous_version_has_no_vote_on_leaders_and_controllers(alone: Membership) -> None:
    """It does not have this call: its refusal makes no leader count as cut off, and keeps no controller elected."""
    alone.peer_queries.peers = OldBrokers()  # type: ignore[assignment]
    alone.mirror.brokers = {number: BrokerState(f"http://b{number}:5000", 1, f"s{number}") for number in (1, 2, 3)}
    assert alone.peer_queries.reachability_of([2]) == {2: {1: True}}
    assert not alone.peer_queries.is_reached_by_others(2, 1)


class TestChangingTheIsr:
    def propose(self, member: Membership, topic: state.TopicState, **fields: object) -> IsrAnswered:
        proposal = {"isr": frozenset({1}), "version": 1, "store_uuids": {}, "incarnations": {}, **fields}
        return member.change_isr(topic.topic_id, 0, ProposeIsr(**proposal), None)  # type: ignore[arg-type]

    def test_a_change_that_fits_is_applied_and_answered_with_the_new_state(
        self, plane: LosingPlane, alone: Membership
    ) -> None:
        topic = make_topic(plane)
        alone.start()
        answered = self.propose(alone, topic, store_uuids={1: "store/1"}, incarnations={1: 9})
        assert (answered.outcome, answered.version) == (Outcome.APPLIED, 1)
        assert answered.partition_state is not None
        assert (answered.partition_state.version, answered.partition_state.store_uuids) == (2, {1: "store/1"})
        held = Catalog(plane).partition(topic.topic_id, 0)
        assert held is not None
        assert (held.version, held.value.incarnations) == (2, {1: 9})

    @pytest.mark.parametrize("version", [0, 2, 7])
    def test_another_version_is_a_conflict(self, plane: LosingPlane, alone: Membership, version: int) -> None:
        topic = make_topic(plane)
        alone.start()
        assert self.propose(alone, topic, version=version) == IsrAnswered(version, Outcome.CONFLICT)

    def test_a_change_that_the_mirror_has_not_seen_is_a_conflict(self, plane: LosingPlane, alone: Membership) -> None:
        topic = make_topic(plane)
        alone.start()
        path = state.partition_path(topic.topic_id, 0)
        node = plane.get(path)
        assert node is not None
        plane.commit(Set(path, node.data, node.version))
        assert self.propose(alone, topic).outcome is Outcome.CONFLICT

    def test_a_partition_that_is_gone_is_a_conflict(self, plane: LosingPlane, alone: Membership) -> None:
        topic = make_topic(plane)
        alone.start()
        Catalog(plane).delete_topic("t", now_ms=1)
        assert self.propose(alone, topic).outcome is Outcome.CONFLICT

    @pytest.mark.parametrize(
        "fault", [OutcomeUnknown("lost"), PlaneUnavailable("away"), RuntimeError("a mistake of ours")]
    )
    def test_any_other_failure_is_an_unknown_outcome_and_raises_nothing(
        self, plane: LosingPlane, alone: Membership, fault: Exception
    ) -> None:
        topic = make_topic(plane)
        alone.start()
        plane.fault = fault
        assert self.propose(alone, topic) == IsrAnswered(1, Outcome.UNKNOWN)
        plane.fault = None

    def test_after_a_leader_resigns_the_controller_elects_a_clean_replica(
        self, plane: LosingPlane, alone: Membership
    ) -> None:
        topic = make_topic(plane)
        alone.start()
        answered = self.propose(alone, topic, isr=frozenset(), resigns=True)
        assert answered.partition_state is not None
        assert (answered.partition_state.leader, answered.partition_state.isr) == (None, frozenset())


class TestReadingAgain:
    def test_the_state_carries_the_number_of_the_refresh(self, plane: LosingPlane, alone: Membership) -> None:
        topic = make_topic(plane)
        alone.start()
        word = alone.reread(topic.topic_id, 0, 7, None)
        assert word is not None
        assert (word.refresh, word.leader, word.version) == (7, 1, 1)

    def test_a_missing_or_unreadable_partition_is_none(self, plane: LosingPlane, alone: Membership) -> None:
        alone.start()
        assert alone.reread("nothing", 0, 1, None) is None
        plane.close()
        assert alone.reread("nothing", 0, 1, None) is None
        plane.start()
