from __future__ import annotations

import msgspec

from portalmq.control_plane.controller import decide, elect, is_cold
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

    def test_a_broker_outside_the_isr_is_not_elected_when_the_last_member_is_gone(self) -> None:
        """The last member may have led and acknowledged alone: without it the log's end is unknown, so none leads."""
        alone = elect(HELD, {2: broker(2), 3: broker(3)}, configured_min_insync=1)
        assert (alone.leader, alone.leader_epoch, alone.isr) == (2, 8, (2,))
        back = {1: broker(1, incarnation=2), 3: broker(3)}
        nobody = elect(alone, back, configured_min_insync=1)
        assert (nobody.leader, nobody.leader_epoch, nobody.isr) == (None, 9, (2,))
        assert decide(nobody, back, configured_min_insync=1) is None, (
            "it waits, and does not elect the same leader repeatedly"
        )
        assert elect(nobody, {**back, 2: broker(2, incarnation=2)}, configured_min_insync=1).leader == 2

    def test_a_replica_whose_data_directory_was_replaced_is_never_elected(self) -> None:
        assert elect(HELD, {1: broker(1, store="emptied"), 2: broker(2)}).leader == 2
        assert elect(HELD, {1: broker(1, store="emptied")}).leader is None

    def test_a_registration_older_than_the_partition_proves_no_loss(self) -> None:
        """Brokers and partitions are read one after the other. The broker's entry may name an earlier data directory; a
        replica that has joined the ISR since must not leave it below the floor for that reason."""
        held = msgspec.structs.replace(HELD, incarnations={1: 1, 2: 5, 3: 1})
        assert elect(held, {1: broker(1), 2: broker(2, incarnation=4, store="before")}).isr == (1, 2)
        assert elect(held, {1: broker(1), 2: broker(2, incarnation=6, store="emptied")}).isr == (1,)
        assert elect(held, {2: broker(2, incarnation=4)}).leader is None

    def test_a_broker_without_a_replica_is_never_elected(self) -> None:
        assert elect(HELD, {9: broker(9)}).leader is None


ALL_IN_SYNC = msgspec.structs.replace(HELD, isr=(1, 2, 3))
ANEW = {number: broker(number, incarnation=2) for number in (1, 2, 3)}


class TestColdElections:
    """All candidates have restarted: they have only the records on their disks."""

    def test_an_election_is_cold_when_every_candidate_has_restarted(self) -> None:
        assert is_cold(ALL_IN_SYNC, ANEW)
        assert is_cold(ALL_IN_SYNC, {2: ANEW[2]})
        assert not is_cold(ALL_IN_SYNC, {**ANEW, 2: broker(2)}), "this candidate saw the committed records"
        assert not is_cold(ALL_IN_SYNC, {}), "no candidate can be asked"

    def test_an_election_with_at_most_one_candidate_is_not_cold(self) -> None:
        assert not is_cold(ALL_IN_SYNC, {**ANEW, 1: broker(1)})
        assert not is_cold(msgspec.structs.replace(HELD, isr=(1,)), ANEW)

    def test_the_longest_log_of_the_highest_epoch_leads(self) -> None:
        assert elect(ALL_IN_SYNC, ANEW, log_ends={1: (7, 9), 2: (7, 10), 3: (6, 90)}).leader == 2
        assert elect(ALL_IN_SYNC, ANEW, log_ends={1: (7, 9), 3: (7, 9)}).leader == 1

    def test_replicas_behind_leave_the_isr_down_to_the_floor(self) -> None:
        assert elect(ALL_IN_SYNC, ANEW, log_ends={1: (7, 9), 2: (7, 10), 3: (7, 10)}).isr == (2, 3)
        assert elect(ALL_IN_SYNC, ANEW, log_ends={1: (7, 8), 2: (7, 10), 3: (7, 9)}).isr == (2, 3)
        assert elect(HELD, ANEW, log_ends={1: (7, 9), 2: (7, 10)}).isr == (1, 2)

    def test_a_replica_without_records_it_knew_committed_never_leads(self) -> None:
        assert elect(ALL_IN_SYNC, ANEW, log_ends={1: None, 2: (7, 10)}).leader == 2
        assert elect(ALL_IN_SYNC, {1: ANEW[1]}, log_ends={1: None}).leader is None

    def test_a_draining_leader_hands_over_to_no_freshly_restarted_broker(self) -> None:
        draining = msgspec.structs.replace(broker(1), draining=True)
        assert elect(ALL_IN_SYNC, {1: draining, 2: broker(2, incarnation=2)}).leader == 1
        assert elect(ALL_IN_SYNC, {1: draining, 2: broker(2)}).leader == 2
