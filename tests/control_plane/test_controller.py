from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from portalmq import wire
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.controller import elect, take_over
from portalmq.control_plane.plane import Op, VersionMismatch
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.state import BrokerState, PartitionState
from portalmq.errors import Unavailable


def broker(number: int, *, incarnation: int = 1, store: str | None = None) -> BrokerState:
    return BrokerState(f"http://localhost:500{number}", incarnation, store or f"store-{number}")


HELD = PartitionState(
    leader=1,
    leader_epoch=7,
    isr=(1, 2),
    replicas=(1, 2, 3),
    store_uuids={1: "store-1", 2: "store-2", 3: "store-3"},
    incarnations={1: 1, 2: 1, 3: 1},
)


class TestElections:
    def test_the_same_leader_is_elected_under_a_new_epoch(self) -> None:
        elected = elect(HELD, {1: broker(1, incarnation=2)})
        assert (elected.leader, elected.leader_epoch) == (1, 8)
        assert elected.incarnations == {1: 2, 2: 1, 3: 1}
        assert (elected.isr, elected.replicas, elected.store_uuids) == (HELD.isr, HELD.replicas, HELD.store_uuids)

    def test_the_first_live_replica_in_sync_wins(self) -> None:
        assert elect(HELD, {number: broker(number) for number in (1, 2, 3)}).leader == 1
        assert elect(HELD, {number: broker(number) for number in (2, 3)}).leader == 2

    def test_a_replica_that_is_not_in_sync_is_never_elected(self) -> None:
        elected = elect(HELD, {3: broker(3)})
        assert (elected.leader, elected.leader_epoch, elected.isr) == (None, 8, (1, 2))

    def test_a_replica_whose_data_directory_was_replaced_is_never_elected(self) -> None:
        assert elect(HELD, {1: broker(1, store="emptied"), 2: broker(2)}).leader == 2
        assert elect(HELD, {1: broker(1, store="emptied")}).leader is None

    def test_a_registration_older_than_the_partition_proves_no_loss(self) -> None:
        """Brokers and partitions are read one after the other: what was read first may be the store of an earlier life,
        and the one that joined since must not be dropped below the floor for it."""
        held = msgspec.structs.replace(HELD, incarnations={1: 1, 2: 5, 3: 1})
        assert elect(held, {1: broker(1), 2: broker(2, incarnation=4, store="before")}).isr == (1, 2)
        assert elect(held, {1: broker(1), 2: broker(2, incarnation=6, store="emptied")}).isr == (1,)
        assert elect(held, {2: broker(2, incarnation=4)}).leader is None

    def test_a_stranger_is_never_elected(self) -> None:
        assert elect(HELD, {9: broker(9)}).leader is None


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    plane = Standalone(tmp_path)
    plane.start()
    yield Catalog(plane)
    plane.close()


class TestTakingOver:
    def test_a_restart_raises_the_epoch_of_every_partition(self, catalog: Catalog) -> None:
        for name, partitions in (("small", 1), ("large", 230)):
            catalog.create_topic(name, wire.CreateTopic(partitions=partitions), brokers={1: broker(1)})
        for incarnation in (2, 3):
            found = take_over(catalog, 1, broker(1, incarnation=incarnation))
            assert (found.led, found.leaderless) == (231, [])
        for topic in catalog.topics().values():
            for held in catalog.partitions(topic).values():
                assert (held.value.leader, held.value.leader_epoch) == (1, 3)
                assert held.value.incarnations == {1: 3}

    def test_partitions_of_another_data_directory_are_named_and_not_led(self, catalog: Catalog) -> None:
        catalog.create_topic("t", wire.CreateTopic(partitions=2), brokers={1: broker(1)})
        found = take_over(catalog, 1, broker(1, store="emptied"))
        assert (found.led, found.leaderless) == (0, [("t", 0), ("t", 1)])

    def test_nothing_to_take_over_is_fine(self, catalog: Catalog) -> None:
        assert take_over(catalog, 1, broker(1)).led == 0

    def test_a_rival_that_never_stops_is_reported(self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
        catalog.create_topic("t", wire.CreateTopic(), brokers={1: broker(1)})

        def beaten(*ops: Op) -> list[int]:
            raise VersionMismatch(ops[0].path)

        monkeypatch.setattr(catalog.plane, "commit", beaten)
        with pytest.raises(Unavailable, match="another broker"):
            take_over(catalog, 1, broker(1))
