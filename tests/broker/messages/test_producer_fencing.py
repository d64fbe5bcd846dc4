"""Every broker refuses the older instances of a named producer once a newer instance has its identity."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace

import gevent
import pytest
from support.domain import HandClock, records, running

from portalmq import wire
from portalmq.broker.cluster.peers import NotAnswered
from portalmq.broker.cluster.rpc.messages import Fence
from portalmq.broker.core.replica.producers import Stamp
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.messages.producer_fencing import ASK_AGAIN_MS, ProducerFencing
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.plane import PlaneState, PlaneUnavailable
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.state import BrokerState
from portalmq.errors import Fenced, InvalidRequest, Unavailable


class FakeMembership:
    registered = True
    lease_ms = 4_000

    def __init__(self, clock: HandClock) -> None:
        self.clock = clock
        self.silent_ms = 0

    def answered_ms(self) -> int:
        return self.clock.now_ms() - self.silent_ms


class Wires:
    """Calls between the brokers of one test: each call runs the other broker's `serve`, unless its wire is cut."""

    def __init__(self) -> None:
        self.producer_fencing: dict[int, ProducerFencing] = {}
        self.cut: set[int] = set()
        self.on_cut: Callable[[int], None] = lambda broker_id: None

    def call(self, broker_id, name, request, kind, *, timeout_s):
        assert name == "fence"
        if broker_id in self.cut:
            self.on_cut(broker_id)
            raise NotAnswered("cut")
        return self.producer_fencing[broker_id].on_fence(request)


class Brokers:
    def __init__(self, plane: Standalone) -> None:
        self.plane = plane
        self.catalog = Catalog(plane)
        self.clock = HandClock()
        self.wires = Wires()
        self.memberships: dict[int, FakeMembership] = {}

    def start(self, broker_id: int, incarnation: int = 1) -> ProducerFencing:
        self.catalog.register_broker(broker_id, BrokerState(f"http://b{broker_id}", incarnation, f"store-{broker_id}"))
        self.memberships[broker_id] = FakeMembership(self.clock)
        fences = ProducerFencing(broker_id, self.catalog, self.memberships[broker_id], self.wires, self.clock)
        self.wires.producer_fencing[broker_id] = fences
        fences.on_cluster_changed()
        return fences


@pytest.fixture
def brokers(tmp_path):
    plane = Standalone(tmp_path)
    plane.start()
    with closing(plane):
        yield Brokers(plane)


def stamp(identity: wire.ProducerIdentity, sequence: int = 0) -> Stamp:
    return Stamp(identity.id, identity.epoch, sequence)


def test_every_live_broker_has_the_fence_before_a_takeover_is_answered(brokers):
    first, second = brokers.start(1), brokers.start(2)
    zombie = first.take_over("billing")
    heir = second.take_over("billing")
    assert (heir.id, heir.epoch) == (zombie.id, zombie.epoch + 1)
    for each in (first, second):
        each.check(stamp(heir))
        with pytest.raises(Fenced) as refused:
            each.check(stamp(zombie))
        assert refused.value.outcome == "not_applied"


def test_a_broker_that_starts_later_reads_the_fences(brokers):
    first = brokers.start(1)
    zombie = first.take_over("billing")
    first.take_over("billing")
    with pytest.raises(Fenced):
        brokers.start(2).check(stamp(zombie))


def test_a_broker_that_has_not_read_the_fences_refuses_stamped_batches(brokers):
    fences = ProducerFencing(1, brokers.catalog, FakeMembership(brokers.clock), brokers.wires, brokers.clock)
    with pytest.raises(Unavailable) as refused:
        fences.check(Stamp(1, 0, 0))
    assert refused.value.outcome == "not_applied"
    gevent.sleep(0)  # a background read follows the call
    fences.check(Stamp(1, 0, 0))


def test_a_silent_broker_is_waited_for_until_it_is_given_up(brokers):
    first = brokers.start(1)
    brokers.start(2)
    brokers.wires.cut.add(2)
    asked: list[int] = []

    def third_time_gone(broker_id: int) -> None:
        asked.append(broker_id)
        if len(asked) == 3:
            brokers.catalog.unregister_broker(2)

    brokers.wires.on_cut = third_time_gone
    assert first.take_over("billing").epoch == 0
    assert asked == [2, 2, 2]


def test_a_silent_broker_that_stays_makes_the_outcome_unknown(brokers, monkeypatch):
    monkeypatch.setattr("portalmq.broker.messages.producer_fencing.FENCE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("portalmq.broker.messages.producer_fencing.CONFIRM_WITHIN_SESSIONS", 0)
    first = brokers.start(1)
    brokers.start(2)
    brokers.wires.cut.add(2)
    with pytest.raises(Unavailable, match="broker 2") as refused:
        first.take_over("billing")
    assert refused.value.outcome == "unknown"


def test_a_named_producer_needs_the_control_plane_and_an_unnamed_one_does_not(brokers):
    first = brokers.start(1)
    named = first.take_over("billing")
    brokers.memberships[1].silent_ms = 4_000
    with pytest.raises(Unavailable):
        first.check(stamp(named))
    first.check(Stamp(named.id + 1, 0, 0))
    brokers.memberships[1].silent_ms = 3_999
    first.check(stamp(named))


class AskedCatalog:
    """A catalog that counts the queries for allocated ids. Queries fail while the plane is away."""

    def __init__(self, state: PlaneState) -> None:
        self.plane = SimpleNamespace(state=state, session_id=1)
        self.away = False
        self.asked = 0

    def producer_ids_below(self) -> int:
        self.asked += 1
        if self.away:
            raise PlaneUnavailable("away")
        return 1


@pytest.mark.parametrize("state", [PlaneState.SUSPENDED, PlaneState.LOST])
def test_an_id_is_not_checked_at_a_disconnected_control_plane(brokers, state):
    catalog = AskedCatalog(state)
    fences = ProducerFencing(1, catalog, FakeMembership(brokers.clock), brokers.wires, brokers.clock)
    fences.check_given(1 << 40)
    assert catalog.asked == 0
    catalog.plane.state = PlaneState.CONNECTED
    with pytest.raises(InvalidRequest, match="never allocated"):
        fences.check_given(1 << 40)


def test_an_unavailable_control_plane_is_not_asked_for_each_batch(brokers):
    catalog = AskedCatalog(PlaneState.CONNECTED)
    catalog.away = True
    fences = ProducerFencing(1, catalog, FakeMembership(brokers.clock), brokers.wires, brokers.clock)
    for _ in range(3):
        fences.check_given(1 << 40)
    assert catalog.asked == 1
    catalog.away = False
    brokers.clock.advance(ASK_AGAIN_MS)
    with pytest.raises(InvalidRequest, match="never allocated"):
        fences.check_given(1 << 40)


def test_an_instance_that_renews_does_not_fence_its_successor(brokers):
    first = brokers.start(1)
    zombie = first.take_over("billing", "one")
    assert first.take_over("billing", "one", renews=True).epoch == zombie.epoch + 1
    heir = first.take_over("billing", "two")
    with pytest.raises(Fenced):
        first.take_over("billing", "one", renews=True)
    first.check(stamp(heir))


def test_an_older_fence_does_not_replace_a_newer_one(brokers):
    first = brokers.start(1)
    first.on_fence(Fence(9, 5))
    first.on_fence(Fence(9, 3))
    with pytest.raises(Fenced):
        first.check(Stamp(9, 4, 0))


@pytest.mark.parametrize("way", ["range", "batch"])
def test_a_zombie_is_fenced_on_a_partition_that_its_successor_has_not_reached(tmp_path, way):
    with running(tmp_path) as fixture:
        broker = fixture.broker
        broker.create_topic("t", wire.CreateTopic(partitions=2))
        zombie = broker.new_producer("billing")

        def send(identity, sequence, partition):
            producer = wire.ProducerStamp(identity.id, identity.epoch, sequence)
            if way == "range":
                return broker.produce_range("t", ProduceRequest(records("x"), partition=partition, producer=producer))
            return broker.produce("t", ProduceRequest(records("x"), partition=partition, producer=producer))

        send(zombie, 0, 0)
        heir = broker.new_producer("billing")
        for partition in (0, 1):
            with pytest.raises(Fenced) as refused:
                send(zombie, 1 - partition, partition)
            assert refused.value.outcome == "not_applied"
        send(heir, 0, 1)
    with running(tmp_path) as again:
        producer = wire.ProducerStamp(zombie.id, zombie.epoch, 1)
        with pytest.raises(Fenced):
            again.broker.produce_range("t", ProduceRequest(records("x"), partition=0, producer=producer))
