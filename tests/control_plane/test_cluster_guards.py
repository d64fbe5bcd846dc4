"""What brokers and controllers leave alone in the control plane: each guard on its own, with what only it keeps out."""

from __future__ import annotations

import msgspec
import pytest
from support.interrupted import Interrupted

from portalmq import wire
from portalmq.control_plane import state
from portalmq.control_plane.catalog import BrokerIdTaken, Catalog, PartitionChange
from portalmq.control_plane.plane import Create, Node, Op, Set
from portalmq.control_plane.state import BrokerState


def broker(number: int, *, incarnation: int = 1, store: str = "") -> BrokerState:
    return BrokerState(f"http://localhost:500{number}", incarnation, store or f"store-{number}")


@pytest.fixture
def changes(catalog: Catalog) -> list[PartitionChange]:
    topic, *_ = catalog.create_topic("t", wire.CreateTopic(partitions=2), brokers={1: broker(1)})
    return [
        PartitionChange(topic.topic_id, number, msgspec.structs.replace(each.value, leader_epoch=9), each.version)
        for number, each in catalog.partitions(topic).items()
    ]


class TestExposedSecrets:
    def test_without_a_note_nothing_is_replaced(self, catalog: Catalog) -> None:
        secret = catalog.cluster_secret()
        assert catalog.renew_exposed()
        assert catalog.cluster_secret() == secret

    def test_those_that_were_seen_are_replaced_once_no_broker_uses_them(self, catalog: Catalog) -> None:
        before = catalog.cluster_secret()
        catalog.note_exposed({state.CLUSTER_SECRET: 0})
        catalog.register_broker(1, broker(1))
        assert not catalog.renew_exposed()
        assert catalog.cluster_secret() == before
        catalog.unregister_broker(1)
        assert catalog.renew_exposed()
        assert catalog.cluster_secret() != before


class TestBrokers:
    def test_a_registered_broker_claims_its_own_id_again(self, catalog: Catalog) -> None:
        assert catalog.claim_broker_id("store-1", 1) == 1
        catalog.register_broker(1, broker(1))
        assert catalog.claim_broker_id("store-1", 1) == 1

    def test_a_node_that_is_no_number_claims_nothing(self, plane: Interrupted, catalog: Catalog) -> None:
        catalog.claim_broker_id("a")
        plane.commit(Create(f"{state.STORES}/note", b"by hand"))
        assert list(catalog.claims()) == [1]

    def test_an_entry_of_another_data_directory_is_not_replaced(self, catalog: Catalog) -> None:
        catalog.register_broker(1, broker(1, store="theirs"))
        with pytest.raises(BrokerIdTaken, match="another data directory"):
            catalog.register_broker(1, broker(1, incarnation=9, store="ours"))

    def test_an_equal_entry_of_an_earlier_session_is_replaced(self, plane: Interrupted, catalog: Catalog) -> None:
        """It would go when that session ends."""
        catalog.register_broker(1, broker(1))
        plane.commits = 0
        catalog.register_broker(1, broker(1))
        assert plane.commits == 0
        plane.session = 2
        catalog.register_broker(1, broker(1))
        assert plane.commits == 1


class TestCommits:
    def test_a_change_that_conflicted_is_left_out_whatever_a_late_read_shows(
        self, plane: Interrupted, catalog: Catalog, changes: list[PartitionChange], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = changes
        before = plane.get_many([first.path, second.path])
        plane.commit(Set(first.path, b"other", first.version))
        tries = []
        commit = plane.commit

        def counted(*ops: Op) -> list[int]:
            tries.append(ops)
            assert len(tries) < 5, "it tries for ever"
            return commit(*ops)

        def late(paths: list[str]) -> list[Node | None]:
            return [node for node in before if node is not None and node.path in paths]

        monkeypatch.setattr(plane, "commit", counted)
        monkeypatch.setattr(plane, "get_many", late)
        assert catalog.commit_fitting(changes) == [second]

    def test_after_an_unknown_outcome_another_clients_change_is_not_taken_for_the_own(
        self, plane: Interrupted, catalog: Catalog, changes: list[PartitionChange]
    ) -> None:
        first, second = changes
        other = msgspec.structs.replace(first.state, leader_epoch=8)

        def others() -> None:
            plane.lose_requests = 0
            plane.commit(Set(first.path, state.encode(other), first.version))
            plane.commit(Set(second.path, state.encode(other), second.version))
            plane.commit(Set(second.path, state.encode(second.state), second.version + 1))
            plane.lose_requests = 1

        plane.meanwhile.append(others)
        plane.lose_requests = 1
        assert catalog.commit_fitting(changes) == []
