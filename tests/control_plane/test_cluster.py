"""The cluster and its brokers: claimed ids, one controller at a time, and fenced commits."""

from __future__ import annotations

import msgspec
import pytest
from support.interrupted import Interrupted

from portalmq import wire
from portalmq.control_plane import state
from portalmq.control_plane.catalog import BrokerIdTaken, Catalog, ControllerFenced, PartitionChange, Versioned
from portalmq.control_plane.plane import Create, Delete, PlaneUnavailable, Set
from portalmq.control_plane.state import BrokerState, ControllerState, StoreState


def broker(number: int, *, incarnation: int = 1, store: str = "") -> BrokerState:
    return BrokerState(f"http://localhost:500{number}", incarnation, store or f"store-{number}")


class TestTheCluster:
    def test_the_secret_is_made_once(self, plane: Interrupted, catalog: Catalog) -> None:
        secret = catalog.cluster_secret()
        assert len(bytes.fromhex(secret)) == 32
        assert Catalog(plane).cluster_secret() == secret

    def test_a_broker_can_bring_a_cluster_id_if_none_exists(self, catalog: Catalog) -> None:
        assert catalog.find_cluster_id() is None
        assert catalog.cluster_id("brought along") == "brought along"
        assert catalog.cluster_id("another") == catalog.find_cluster_id() == "brought along"


class TestClaimingAnId:
    def test_ids_are_given_from_1_on_and_kept(self, catalog: Catalog) -> None:
        assert [catalog.claim_broker_id(store) for store in ("a", "b", "c")] == [1, 2, 3]
        assert [catalog.claim_broker_id(store) for store in ("c", "a", "b")] == [3, 1, 2]

    def test_the_smallest_free_one_is_given(self, catalog: Catalog) -> None:
        catalog.claim_broker_id("a", 2)
        assert [catalog.claim_broker_id(store) for store in ("b", "c")] == [1, 3]

    def test_two_concurrent_claims_get_two_ids(self, plane: Interrupted, catalog: Catalog) -> None:
        plane.meanwhile.append(lambda: Catalog(plane).claim_broker_id("other"))
        assert catalog.claim_broker_id("own") == 2

    @pytest.mark.parametrize("lost", ["lose_answers", "lose_requests"])
    def test_a_lost_answer_takes_no_second_id(self, plane: Interrupted, catalog: Catalog, lost: str) -> None:
        setattr(plane, lost, 1)
        assert catalog.claim_broker_id("a") == 1
        assert list(catalog.claims()) == [1]

    def test_a_broker_with_an_emptied_disk_gets_its_free_id_back(self, catalog: Catalog) -> None:
        catalog.claim_broker_id("old", 1)
        catalog.next_incarnation(1, "old", 6)
        assert catalog.claim_broker_id("new", 1) == 1
        assert catalog.claims()[1].value == StoreState("new", 7)
        with pytest.raises(BrokerIdTaken, match="another data directory"):
            catalog.next_incarnation(1, "old")

    def test_the_id_of_a_registered_broker_is_not_given_to_another(self, catalog: Catalog) -> None:
        catalog.claim_broker_id("store-1", 1)
        catalog.register_broker(1, broker(1))
        with pytest.raises(BrokerIdTaken, match="http://localhost:5001") as taken:
            catalog.claim_broker_id("new", 1)
        assert taken.value.url == "http://localhost:5001"
        assert catalog.claims()[1].value.store_uuid == "store-1"

    def test_a_broker_that_registers_in_between_keeps_it(self, plane: Interrupted, catalog: Catalog) -> None:
        catalog.claim_broker_id("store-1", 1)
        plane.meanwhile.append(lambda: Catalog(plane).register_broker(1, broker(1)))
        with pytest.raises(BrokerIdTaken):
            catalog.claim_broker_id("new", 1)
        assert catalog.brokers() == {1: broker(1)}


class TestIncarnations:
    def test_incarnations_rise_whatever_the_disk_remembers(self, catalog: Catalog) -> None:
        catalog.claim_broker_id("a", 1)
        assert [catalog.next_incarnation(1, "a", before) for before in (0, 0, 7, 3)] == [1, 2, 8, 9]

    def test_a_claim_that_was_wiped_is_made_again_above_what_the_disk_remembers(self, catalog: Catalog) -> None:
        assert catalog.next_incarnation(3, "a", 40) == 41
        assert catalog.claims()[3].value == StoreState("a", 41)


class TestRegistering:
    def test_a_change_keeps_the_node(self, plane: Interrupted, catalog: Catalog) -> None:
        catalog.register_broker(1, broker(1))
        draining = msgspec.structs.replace(broker(1), draining=True)
        catalog.register_broker(1, draining)
        node = plane.get(state.broker_path(1))
        assert node is not None
        assert (node.version, node.ephemeral, catalog.brokers()) == (1, True, {1: draining})

    def test_an_earlier_start_cannot_replace_the_entry_of_a_later_one(self, catalog: Catalog) -> None:
        catalog.register_broker(1, broker(1, incarnation=5))
        with pytest.raises(BrokerIdTaken, match="started later"):
            catalog.register_broker(1, broker(1, incarnation=4))

    def test_a_broker_removes_only_its_own_entry(self, plane: Interrupted, catalog: Catalog) -> None:
        catalog.register_broker(1, broker(1))
        plane.session = 2
        catalog.unregister_broker(1)
        assert list(catalog.brokers()) == [1]
        plane.session = 1
        catalog.unregister_broker(1)
        catalog.unregister_broker(1)
        assert catalog.brokers() == {}


class TestElectingAController:
    def test_an_election_raises_the_epoch(self, catalog: Catalog) -> None:
        held = catalog.elect_controller(1, 7)
        assert held == Versioned(ControllerState(1, 7, 1), 0)
        assert catalog.controller() == held
        assert catalog.elect_controller(2, 1) is None
        assert held is not None
        assert catalog.remove_controller(held)
        assert catalog.elect_controller(2, 1) == Versioned(ControllerState(2, 1, 2), 0)

    def test_of_two_concurrent_elections_one_wins(self, plane: Interrupted, catalog: Catalog) -> None:
        catalog.plane.commit(Create(state.CONTROLLER_EPOCH))
        plane.meanwhile.append(lambda: Catalog(plane).elect_controller(2, 1))
        assert catalog.elect_controller(1, 1) is None
        held = catalog.controller()
        assert held is not None
        assert held.value == ControllerState(2, 1, 1)

    @pytest.mark.parametrize("lost", ["lose_answers", "lose_requests"])
    @pytest.mark.parametrize("counter_is_there", [True, False])
    def test_a_lost_answer_is_looked_up(
        self, plane: Interrupted, catalog: Catalog, lost: str, counter_is_there: bool
    ) -> None:
        if counter_is_there:
            plane.commit(Create(state.CONTROLLER_EPOCH))
        setattr(plane, lost, 1)
        held = catalog.elect_controller(1, 1)
        assert held is not None
        assert held == catalog.controller()
        assert held.value.epoch == 1

    def test_a_broker_replaces_the_controller_entry_of_its_earlier_session(
        self, plane: Interrupted, catalog: Catalog
    ) -> None:
        first = catalog.elect_controller(1, 1)
        plane.session = 2
        second = catalog.elect_controller(1, 1)
        assert first is not None
        assert second is not None
        assert second.value.epoch == first.value.epoch + 1

    def test_a_broker_replaces_the_controller_entry_of_its_earlier_start(self, catalog: Catalog) -> None:
        catalog.elect_controller(1, 1)
        second = catalog.elect_controller(1, 2)
        assert second is not None
        assert second.value == ControllerState(1, 2, 2)

    def test_deposing_ends_no_later_term(self, plane: Interrupted, catalog: Catalog) -> None:
        first = catalog.elect_controller(1, 1)
        assert first is not None
        catalog.remove_controller(first)
        second = catalog.elect_controller(2, 1)
        assert not catalog.remove_controller(first), "the node has the same version again"
        assert catalog.controller() == second


class TestCommittingAsController:
    @pytest.fixture
    def topic(self, catalog: Catalog) -> state.TopicState:
        return catalog.create_topic("t", wire.CreateTopic(partitions=250), brokers={1: broker(1)})[0]

    @pytest.fixture
    def held(self, catalog: Catalog) -> Versioned[ControllerState]:
        held = catalog.elect_controller(1, 1)
        assert held is not None
        return held

    def raised(self, catalog: Catalog, topic: state.TopicState) -> list[PartitionChange]:
        return [
            PartitionChange(topic.topic_id, number, msgspec.structs.replace(each.value, leader_epoch=9), each.version)
            for number, each in catalog.partitions(topic).items()
        ]

    def test_hundreds_take_few_commits(
        self, plane: Interrupted, catalog: Catalog, topic: state.TopicState, held: Versioned[ControllerState]
    ) -> None:
        changes = self.raised(catalog, topic)
        plane.commits = 0
        assert catalog.commit_as_controller(held, changes) == changes
        assert plane.commits == 3
        assert {each.value.leader_epoch for each in catalog.partitions(topic).values()} == {9}

    def test_a_change_that_does_not_fit_delays_no_other(
        self, plane: Interrupted, catalog: Catalog, topic: state.TopicState, held: Versioned[ControllerState]
    ) -> None:
        changes = self.raised(catalog, topic)
        stale = {3, 50, 98, 99, 240}
        for number in stale:
            node = plane.get(state.partition_path(topic.topic_id, number))
            assert node is not None
            plane.commit(Set(node.path, node.data, node.version))
        gone = plane.get(state.partition_path(topic.topic_id, 7))
        assert gone is not None
        plane.commit(Delete(gone.path, gone.version))
        plane.commits = 0
        applied = catalog.commit_as_controller(held, changes)
        assert {change.number for change in applied} == set(range(250)) - stale - {7}
        assert plane.commits <= 6
        epochs = {number: each.value.leader_epoch for number, each in catalog.partitions(topic).items()}
        assert {number for number, epoch in epochs.items() if epoch == 1} == stale

    def test_a_deposed_controller_changes_nothing(
        self, catalog: Catalog, topic: state.TopicState, held: Versioned[ControllerState]
    ) -> None:
        catalog.remove_controller(held)
        catalog.elect_controller(2, 1)
        with pytest.raises(ControllerFenced):
            catalog.commit_as_controller(held, self.raised(catalog, topic))
        assert {each.value.leader_epoch for each in catalog.partitions(topic).values()} == {1}

    def test_a_controller_that_is_deposed_between_commits_stops(
        self, plane: Interrupted, catalog: Catalog, topic: state.TopicState, held: Versioned[ControllerState]
    ) -> None:
        other = Catalog(plane)
        plane.meanwhile = [lambda: None, lambda: (other.remove_controller(held), other.elect_controller(2, 1))]
        with pytest.raises(ControllerFenced):
            catalog.commit_as_controller(held, self.raised(catalog, topic))
        epochs = [each.value.leader_epoch for each in catalog.partitions(topic).values()]
        assert epochs.count(9) == 99

    @pytest.mark.parametrize(("lost", "applied"), [("lose_answers", 250), ("lose_requests", 151)])
    def test_an_unknown_outcome_is_looked_up(
        self,
        plane: Interrupted,
        catalog: Catalog,
        topic: state.TopicState,
        held: Versioned[ControllerState],
        lost: str,
        applied: int,
    ) -> None:
        changes = self.raised(catalog, topic)
        setattr(plane, lost, 1)
        assert len(catalog.commit_as_controller(held, changes)) == applied
        epochs = [each.value.leader_epoch for each in catalog.partitions(topic).values()]
        assert epochs.count(9) == applied

    def test_nothing_to_change_is_fine(self, catalog: Catalog, held: Versioned[ControllerState]) -> None:
        assert catalog.commit_as_controller(held, []) == []


class TestTombstones:
    def test_tombstones_are_removed_with_their_confirmations(self, plane: Interrupted, catalog: Catalog) -> None:
        topic, _ = catalog.create_topic("t", wire.CreateTopic(), brokers={1: broker(1)})
        catalog.delete_topic("t", now_ms=1)
        catalog.confirm_removed(topic.topic_id, 1)
        catalog.confirm_removed(topic.topic_id, 2)
        catalog.confirm_removed(topic.topic_id, 1)
        assert catalog.confirmations(topic.topic_id) == {1, 2}
        plane.meanwhile.append(lambda: catalog.confirm_removed(topic.topic_id, 3))
        catalog.forget_tombstone(topic.topic_id)
        catalog.forget_tombstone(topic.topic_id)
        assert catalog.tombstones() == {}
        assert plane.children(state.DELETED) == []


class TestStrays:
    def test_a_sweep_removes_the_named_strays_and_no_topic(self, plane: Interrupted, catalog: Catalog) -> None:
        topic, _ = catalog.create_topic("t", wire.CreateTopic(), brokers={1: broker(1)})
        for name in ("young", "old"):
            plane.commit(Create(f"/partitions/{name}", name.encode()), Create(f"/partitions/{name}/0", b"{}"))
        assert catalog.strays() == {"young", "old"}
        assert catalog.sweep(["old", topic.topic_id, "unknown"]) == 1
        assert plane.children(state.PARTITIONS) == sorted([topic.topic_id, "young"])


def test_an_unavailable_plane_is_reported(plane: Interrupted, catalog: Catalog) -> None:
    plane.close()
    for call in (
        lambda: catalog.claim_broker_id("a"),
        lambda: catalog.elect_controller(1, 1),
        lambda: catalog.next_incarnation(1, "a"),
    ):
        with pytest.raises(PlaneUnavailable):
            call()
    plane.start()
