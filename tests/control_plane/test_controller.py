from __future__ import annotations

import msgspec

from portalmq.control_plane.controller import elect
from portalmq.control_plane.state import BrokerState, PartitionState


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
