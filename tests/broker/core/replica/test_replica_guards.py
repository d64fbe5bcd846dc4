"""What a replica ignores, refuses or waits for: each guard on its own, with the event that only it keeps out."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from portalmq.broker.core.replica.events import (
    Action,
    Append,
    Appended,
    AppendRequested,
    BatchHead,
    BrokersChanged,
    Diverging,
    Fetch,
    FetchReceived,
    FetchReplied,
    IsrAnswered,
    LeaseRenewed,
    Outcome,
    PartitionStateChanged,
    ProposeIsr,
    Records,
    Refresh,
    Refuse,
    Rejected,
    RememberEpoch,
    ReplyFetch,
    SendFetch,
    StepDown,
    Tick,
    Truncate,
    Truncated,
)
from portalmq.broker.core.replica.leader import UNCOMMITTED_MAX
from portalmq.broker.core.replica.producers import Producers
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.broker.core.replica.state import REFRESH_PAUSE_MS

STORES = {1: "a", 2: "b", 3: "c"}
NOBODY = Producers([])


def word(leader: int | None, epoch: int = 3, isr: tuple[int, ...] = (1, 2), **more: object) -> PartitionStateChanged:
    settings = {"store_uuids": STORES, "incarnations": {1: 1, 2: 1, 3: 1}, **more}
    return PartitionStateChanged(leader, epoch, frozenset(isr), (1, 2, 3), 2, **settings)  # type: ignore[arg-type]


def opened(*, incarnation: int = 1) -> PartitionReplica:
    """Replica 1 with records [0, 10) of epoch 1, of which it knows [0, 6) to be committed."""
    replica = PartitionReplica(
        1,
        producers=NOBODY,
        epochs=[(1, 0)],
        end_offset=10,
        high_watermark=6,
        highest_epoch=1,
        last_timestamp_ms=0,
        incarnation=incarnation,
        store_uuid="a",
    )
    replica.step(BrokersChanged({1: (incarnation, "a"), 2: (1, "b"), 3: (1, "c")}), 0)
    replica.step(LeaseRenewed(0), 0)
    return replica


def follower() -> PartitionReplica:
    """It follows 2 in epoch 3, and its fetch from 10 on is under way."""
    replica = opened()
    replica.step(word(2), 0)
    return replica


def leader(isr: tuple[int, ...] = (1, 2)) -> PartitionReplica:
    """It leads in epoch 3, which begins at 10."""
    replica = opened()
    replica.step(word(1, isr=isr), 0)
    replica.step(Appended(11), 0)
    return replica


def fetched(replica: PartitionReplica, broker_id: int, offset: int, last_epoch: int, now_ms: int = 0) -> list[Action]:
    fetch = Fetch(broker_id, 1, STORES[broker_id], 3, offset, offset, last_epoch)
    return replica.step(FetchReceived("t", fetch), now_ms)


def asks(actions: list[Action]) -> bool:
    return any(isinstance(action, SendFetch) for action in actions)


# --- a follower's next fetch -----------------------------------------------------------------------------------------


def test_without_a_state_nothing_is_fetched() -> None:
    assert opened().step(Tick(), 0) == []
    assert opened().step(Truncated(8, NOBODY), 0) == []


def test_in_an_epoch_that_is_over_nothing_is_fetched() -> None:
    """A fetch in it would acknowledge records to a leader that was deposed."""
    replica = follower()
    replica.step(FetchReplied(replica.fetch, Records((BatchHead(10, 1, 3, 0, is_epoch_start=True),), 6)), 0)
    later = Fetch(3, 1, "c", 4, 0, 0, 0)
    replica.step(FetchReceived("t", later), 0)
    assert replica.highest_epoch == 4
    assert not asks(replica.step(Appended(11), 0))


def test_during_a_truncation_nothing_is_fetched() -> None:
    replica = follower()
    assert replica.step(FetchReplied(replica.fetch, Diverging(1, 8)), 0) == [Truncate(8)]
    assert replica.step(word(2, version=1), 0) == []


def test_after_a_rejection_nothing_is_fetched_before_the_next_tick() -> None:
    replica = follower()
    replica.step(FetchReplied(replica.fetch, Rejected(3)), 0)
    assert not asks(replica.step(word(2, version=1), 0))
    assert asks(replica.step(Tick(), 100))


def test_nothing_is_fetched_while_records_are_being_written() -> None:
    replica = follower()
    replica.step(FetchReplied(replica.fetch, Records((BatchHead(10, 1, 3, 0, is_epoch_start=True),), 6)), 0)
    assert replica.step(word(2, version=1), 0) == []
    assert asks(replica.step(Appended(11), 0))


def test_an_answer_without_records_is_followed_by_the_next_fetch() -> None:
    replica = follower()
    (asked,) = replica.step(FetchReplied(replica.fetch, Records((), 6)), 0)
    assert isinstance(asked, SendFetch)


def test_a_log_is_truncated_down_to_its_high_watermark_and_no_further() -> None:
    replica = follower()
    assert replica.step(FetchReplied(replica.fetch, Diverging(1, 6)), 0) == [Truncate(6)]
    assert not replica.quarantined


def test_the_answer_of_a_leader_that_has_resigned_is_dropped() -> None:
    """It resigns within its epoch; the next leader's epoch is a higher one."""
    replica = follower()
    asked = replica.fetch
    assert replica.step(word(None, version=1), 0) == []
    assert replica.step(FetchReplied(asked, Records((BatchHead(10, 1, 3, 0, is_epoch_start=True),), 6)), 0) == []
    assert replica.next_offset == 10


# --- who leads -------------------------------------------------------------------------------------------------------


def test_an_election_that_is_over_when_a_truncation_ends_is_not_followed_by_leadership() -> None:
    """Its epoch is lower than one that this replica has promised not to act below."""
    replica = follower()
    replica.step(FetchReplied(replica.fetch, Diverging(1, 8)), 0)
    replica.step(word(1, epoch=4, version=1), 0)
    replica.step(FetchReceived("t", Fetch(3, 1, "c", 5, 0, 0, 0)), 0)
    assert replica.highest_epoch == 5
    assert replica.step(Truncated(8, NOBODY), 0) == []
    assert not replica.leading


def test_an_election_of_another_life_is_not_followed_by_leadership() -> None:
    replica = opened(incarnation=2)
    assert replica.step(word(1, incarnations={1: 3}), 0) == [RememberEpoch(3)], "a later one"
    assert replica.step(word(1, epoch=4, version=1, incarnations={1: 1}), 0) == [RememberEpoch(4)], "an earlier one"
    assert not replica.leading


def test_a_leader_that_lost_nothing_that_was_sent_keeps_its_epoch() -> None:
    replica = leader()
    replica.step(AppendRequested("a", 1), 0)
    assert replica.step(Truncated(11, NOBODY, sent_end=11), 0) == []
    assert replica.leading


def test_a_replica_that_does_not_lead_neither_serves_nor_steps_down() -> None:
    replica = follower()
    assert not replica.may_serve(0)
    assert not replica.may_deliver(0)
    assert not replica.led_at(0)
    assert replica.step(FetchReceived("t", Fetch(3, 1, "c", 4, 0, 0, 0)), REFRESH_PAUSE_MS) == [
        RememberEpoch(4),
        Refresh(1),
        ReplyFetch("t", 0, Rejected(4)),
    ]


def test_messages_are_not_delivered_when_the_lease_is_shorter_than_a_followers_word() -> None:
    replica = leader()
    replica.lease_ms = 500
    fetched(replica, 2, 11, 3, now_ms=0)
    assert replica.may_deliver(500)
    assert not replica.may_deliver(501)


@pytest.mark.parametrize("delivers", [False, True])
def test_a_refusal_says_what_the_leader_does_not_know(delivers: bool) -> None:
    replica = leader()
    fetched(replica, 2, 11, 3, now_ms=0)
    (refusal,) = replica.step(AppendRequested("a", 1, is_control=True, delivers=delivers), 60_000)
    assert isinstance(refusal, Refuse)
    assert "does not know whether it still leads" in str(refusal.error)


# --- a leader --------------------------------------------------------------------------------------------------------


def test_an_uncommitted_tail_of_exactly_the_bound_takes_one_more() -> None:
    replica = leader()
    fetched(replica, 2, 11, 3)
    replica.step(AppendRequested("a", UNCOMMITTED_MAX), 0)
    assert isinstance(replica.step(AppendRequested("b", 1), 0)[0], Append)
    assert isinstance(replica.step(AppendRequested("c", 1), 0)[0], Refuse)


def test_a_fetch_at_the_log_start_gets_records() -> None:
    """A follower that begins there would otherwise begin again for ever."""
    replica = leader()
    replica.log_start_offset = 8
    assert fetched(replica, 3, 8, 1) == [ReplyFetch("t", 8, None)]
    assert fetched(replica, 3, 7, 1) != [ReplyFetch("t", 7, None)]


def test_a_log_with_records_of_an_epoch_that_the_leaders_has_not_diverges() -> None:
    """However short it is: at these offsets the leader has other records."""
    replica = leader()
    assert fetched(replica, 3, 9, 2) == [ReplyFetch("t", 9, Diverging(1, 10))]


def test_followers_get_nothing_of_an_epoch_whose_start_is_being_written() -> None:
    """Not even that start: if the disk refuses it, the epoch may begin with another record."""
    replica = opened()
    replica.step(word(1), 0)
    assert (replica.durable_end, replica.next_offset) == (10, 11)
    assert replica.sendable_end == 10
    replica.step(Appended(11), 0)
    assert replica.sendable_end == 11


def test_no_change_of_the_isr_is_proposed_before_the_epoch_has_begun() -> None:
    replica = opened()
    replica.step(word(1, isr=(1, 2, 3)), 0)
    late_ms = 2 * replica.lag_ms
    for now_ms in range(0, late_ms, 100):
        assert replica.step(Tick(), now_ms) == []
    replica.step(Appended(11), late_ms)
    (proposed,) = replica.step(Tick(), late_ms)
    assert isinstance(proposed, ProposeIsr)
    assert proposed.isr == {1, 3}


@pytest.mark.parametrize("version", [1, 3])
def test_an_answer_to_an_earlier_or_later_proposal_resolves_nothing(version: int) -> None:
    replica = leader()
    replica.step(word(1, version=2), 0)
    fetched(replica, 2, 11, 3)
    proposed = fetched(replica, 3, 11, 3)
    assert [type(action) for action in proposed] == [ProposeIsr, ReplyFetch]
    assert replica.step(IsrAnswered(version, Outcome.UNKNOWN), 0) == []
    applied = word(1, isr=(1, 2, 3), version=version)
    assert replica.step(IsrAnswered(version, Outcome.APPLIED, applied), 0) == []
    assert replica.step(IsrAnswered(2, Outcome.UNKNOWN), 0) == [Refresh(1)]


def test_a_leader_hears_of_a_later_epoch_once() -> None:
    replica = leader()
    later = Fetch(3, 1, "c", 4, 0, 0, 0)
    assert StepDown(None) in replica.step(FetchReceived("t", later), 0)
    assert replica.step(FetchReceived("t", replace(later, number=1)), 0) == [ReplyFetch("t", 0, Rejected(4))]
