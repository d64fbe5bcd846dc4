"""A replica that follows: what it fetches, what it truncates, and which answers it ignores."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from portalmq.broker.core.fold import ProducerFold
from portalmq.broker.core.replica.events import (
    Append,
    Appended,
    AppendRequested,
    BatchHead,
    BelowStart,
    Diverging,
    Fetch,
    FetchReceived,
    FetchReplied,
    HighWatermarkAdvanced,
    IsrAnswered,
    LogReset,
    Outcome,
    PartitionStateChanged,
    ProposeIsr,
    Quarantine,
    Records,
    Refresh,
    Rejected,
    RememberEpoch,
    Replicate,
    ReplyFetch,
    ResetLog,
    SendFetch,
    SessionLost,
    Stamp,
    Tick,
    Truncate,
    Truncated,
)
from portalmq.broker.core.replica.producers import Producers
from portalmq.broker.core.replica.replica import PartitionReplica

NOBODY = Producers([])


def word(leader: int | None = 2, epoch: int = 3, **more) -> PartitionStateChanged:
    return PartitionStateChanged(leader, epoch, **{"isr": frozenset({2, 3}), "replicas": (1, 2, 3), **IN_SYNC, **more})


IN_SYNC = {"min_insync_replicas": 2, "store_uuids": {1: "a", 2: "b", 3: "c"}, "incarnations": {1: 1, 2: 1, 3: 1}}


def follower(end: int = 10, *, epochs: tuple = ((1, 0),), said: PartitionStateChanged | None = None, **more):
    """A replica of epoch 1 that knows the leader of epoch 3."""
    settings = {"high_watermark": 6, "highest_epoch": 1, "last_timestamp_ms": 0, **more}
    replica = PartitionReplica(
        1, producers=NOBODY, epochs=list(epochs), end_offset=end, incarnation=1, store_uuid="a", **settings
    )
    replica.step(said or word(), 0)
    return replica


def start(offset: int, epoch: int) -> BatchHead:
    return BatchHead(offset, 1, epoch, 50, is_epoch_start=True)


def answered(replica: PartitionReplica, reply):
    return replica.step(FetchReplied(replica.fetch, reply), 0)


def test_it_stores_the_epoch_and_fetches_from_its_end():
    replica = follower(said=word(epoch=2))
    assert replica.step(word(version=1), 0) == [
        RememberEpoch(3),
        SendFetch(2, Fetch(1, 1, "a", 3, 10, 10, last_epoch=1, number=2)),
    ]


def test_it_fetches_again_when_the_fetched_records_are_on_disk():
    replica = follower()
    fetch = replica.fetch
    assert answered(replica, Records((start(10, 3), BatchHead(11, 2, 3, 60)), 6)) == [Replicate(fetch)]
    assert replica.fetch is None
    assert replica.epochs == [(1, 0), (3, 10)]
    (asked,) = replica.step(Appended(13), 0)
    assert (asked.fetch.fetch_offset, asked.fetch.durable_offset, asked.fetch.last_epoch) == (13, 13, 3)


def test_its_high_watermark_follows_the_leaders_up_to_its_own_durable_end():
    replica = follower()
    fetch = replica.fetch
    records = Records((start(10, 3), BatchHead(11, 2, 3, 60)), 12)
    assert answered(replica, records) == [HighWatermarkAdvanced(10), Replicate(fetch)]
    assert replica.step(Appended(13), 0)[0] == HighWatermarkAdvanced(12)


def test_a_diverging_tail_is_truncated_step_by_step_until_the_logs_match():
    """Two fail-overs apart (KIP-279): one step back is not enough."""
    replica = follower(epochs=((1, 0), (2, 7)), high_watermark=3, highest_epoch=2)
    assert answered(replica, Diverging(1, 9)) == [Truncate(7)]  # its own records of epoch 1 end there
    assert replica.fetch is None
    assert replica.step(Tick(), 0) == []  # no fetch before the truncation is durable
    (asked,) = replica.step(Truncated(7, NOBODY), 0)
    assert (asked.fetch.fetch_offset, asked.fetch.last_epoch) == (7, 1)
    assert answered(replica, Diverging(1, 5)) == [Truncate(5)]


def test_a_late_or_repeated_reply_truncates_nothing():
    replica = follower(high_watermark=0)
    late = replica.fetch
    answered(replica, Records((), 0))
    assert replica.step(FetchReplied(late, Diverging(0, 0)), 0) == []
    assert replica.next_offset == 10


@pytest.mark.parametrize(
    "teach",
    [
        lambda replica: replica.step(word(leader=3, epoch=4, version=1), 0),
        lambda replica: replica.step(FetchReceived("t", Fetch(3, 1, "c", 4, 0, 0, 0)), 0),
    ],
)
def test_a_reply_of_an_earlier_epoch_is_ignored(teach):
    replica = follower(high_watermark=0)
    late = replica.fetch
    teach(replica)
    assert replica.highest_epoch == 4
    assert replica.step(FetchReplied(late, Diverging(0, 0)), 0) == []


def test_a_truncation_below_the_high_watermark_is_refused():
    replica = follower()
    (quarantine,) = answered(replica, Diverging(1, 5))
    assert isinstance(quarantine, Quarantine)
    assert replica.quarantined
    assert replica.step(Tick(), 5_000) == []
    assert replica.step(word(version=1), 5_000) == []


def test_a_quarantined_replica_resigns_from_the_isr():
    replica = follower(said=word(isr=frozenset({1, 2}), version=7))
    _, resigns = answered(replica, Diverging(1, 5))
    assert resigns == ProposeIsr(frozenset({2}), 7, {}, {}, resigns=True)
    assert replica.step(Tick(), 0) == []  # once
    assert replica.step(IsrAnswered(7, Outcome.CONFLICT), 0) == [Refresh(1)]
    again = word(isr=frozenset({1, 2, 3}), version=8, refresh=1)
    assert replica.step(again, 0) == [ProposeIsr(frozenset({2, 3}), 8, {}, {}, resigns=True)]
    assert replica.step(IsrAnswered(8, Outcome.APPLIED, word(version=9)), 0) == []


def test_an_unclean_election_lifts_the_quarantine_and_the_log_is_truncated():
    replica = follower()
    answered(replica, Diverging(1, 5))
    unclean = word(leader=3, epoch=4, isr=frozenset({3}), version=1, unclean_epochs=(4,))
    assert isinstance(replica.step(unclean, 0)[-1], SendFetch)
    assert not replica.quarantined
    assert answered(replica, Diverging(1, 5)) == [Truncate(5)]
    replica.step(Truncated(5, NOBODY), 0)
    assert replica.high_watermark == 5


def test_an_unclean_election_already_followed_does_not_lift_the_quarantine():
    replica = follower(epochs=((1, 0), (4, 2)), highest_epoch=4, said=word(epoch=5, unclean_epochs=(4,)))
    (quarantine,) = answered(replica, Diverging(4, 5))
    assert isinstance(quarantine, Quarantine)


def test_records_that_the_leader_no_longer_has_are_not_fetched_again():
    replica = follower(end=0, epochs=(), high_watermark=0, highest_epoch=0)
    epochs = ((1, 0), (2, 30), (3, 80))
    assert answered(replica, BelowStart(40, epochs)) == [ResetLog(40, epochs)]
    (asked,) = replica.step(LogReset(40, epochs, NOBODY), 0)
    assert (asked.fetch.fetch_offset, asked.fetch.last_epoch) == (40, 2)
    assert (replica.log_start_offset, replica.high_watermark, replica.next_offset) == (40, 40, 40)


def test_a_state_record_holds_producers_whose_batches_were_dropped():
    replica = follower()
    known = ProducerFold(9, 2, [(0, 3, 4, 20)])
    state = BatchHead(11, 1, 3, 60, producers=(known,))
    answered(replica, Records((start(10, 3), state, BatchHead(12, 2, 3, 70, stamp=Stamp(9, 2, 3))), 6))
    assert replica.producers.find_duplicate(Stamp(9, 2, 0), 3) == (4, 20)
    assert replica.producers.find_duplicate(Stamp(9, 2, 3), 2) == (12, 70)


def test_a_rejected_follower_refreshes_its_state_and_waits_a_tick():
    replica = follower()
    assert answered(replica, Rejected(3)) == [Refresh(1)]
    assert replica.step(Tick(), 100)[0].fetch.number == 2
    assert answered(replica, Rejected(3)) == []  # it fetched a moment ago
    assert isinstance(replica.step(Tick(), 200)[0], SendFetch)


def test_a_follower_rejected_by_a_later_epoch_fetches_in_it_or_not_at_all():
    replica = follower()
    assert answered(replica, Rejected(4)) == [RememberEpoch(4), Refresh(1)]
    assert replica.step(Tick(), 100) == []
    assert replica.step(word(epoch=3, version=1), 100) == []
    (asked,) = replica.step(word(leader=2, epoch=4, version=2), 100)
    assert asked.fetch.leader_epoch == 4


def test_a_refresh_is_repeated_and_any_later_answer_counts():
    """An answer that takes longer than the repetition interval would otherwise never be the newest."""
    replica = follower(said=word(leader=1, isr=frozenset({1, 2})))
    replica.step(Appended(11), 0)
    assert replica.step(SessionLost(), 1_000)[-1] == Refresh(1)
    assert replica.step(Tick(), 2_000) == [Refresh(2)]
    assert replica.step(Tick(), 3_000) == [Refresh(3)]
    replica.step(word(leader=1, isr=frozenset({1, 2}), refresh=2), 3_500)
    assert replica.leading
    assert replica.step(Tick(), 9_000)[:1] != [Refresh(4)]


def test_a_replica_elected_during_a_truncation_leads_after_it():
    replica = follower(epochs=((1, 0), (2, 8)), high_watermark=3, highest_epoch=2, said=word(isr=frozenset({1, 2})))
    assert answered(replica, Diverging(1, 8)) == [Truncate(8)]
    elected = word(leader=1, epoch=4, isr=frozenset({1, 2}), version=1)
    assert replica.step(elected, 0) == [RememberEpoch(4)]
    assert replica.step(Truncated(8, NOBODY), 0) == [Append(None, 8, 4, 0)]
    assert replica.epochs == [(1, 0), (4, 8)]


def test_a_replica_elected_during_a_reset_leads_after_it():
    replica = follower(end=0, epochs=(), high_watermark=0, highest_epoch=0)
    answered(replica, BelowStart(40, ((1, 0),)))
    replica.step(word(leader=1, epoch=4, isr=frozenset({1}), version=1, unclean_epochs=(4,)), 0)
    assert replica.step(LogReset(40, ((1, 0),), NOBODY), 0) == [Append(None, 40, 4, 0)]


def test_a_replica_on_another_store_resigns_and_follows():
    said = word(isr=frozenset({1, 2}), store_uuids={1: "old", 2: "b"}, version=4)
    replica = follower(end=0, epochs=(), high_watermark=0, said=word(leader=None, epoch=2))
    actions = replica.step(said, 0)
    assert actions[1] == ProposeIsr(frozenset({2}), 4, {}, {}, resigns=True)
    assert isinstance(actions[2], SendFetch)
    assert replica.step(replace(said, version=4), 0) == []  # the same state again, while the request is in flight


def test_a_replica_on_another_store_does_not_lead():
    said = word(leader=1, isr=frozenset({1}), store_uuids={1: "old"}, version=4)
    replica = follower(end=0, epochs=(), high_watermark=0, said=word(leader=None, epoch=2))
    assert replica.step(said, 0) == [
        RememberEpoch(3),
        ProposeIsr(frozenset(), 4, {}, {}, resigns=True),
    ]
    assert not replica.leading


def test_without_a_leader_or_a_replica_nothing_is_fetched():
    assert follower(said=word(leader=None)).fetch is None
    assert follower(said=word(replicas=(2, 3))).fetch is None


def test_a_follower_answers_no_fetch():
    replica = follower()
    fetch = Fetch(3, 1, "c", 3, 0, 0, 0)
    assert replica.step(FetchReceived("t", fetch), 0) == [ReplyFetch("t", 0, Rejected(3))]


def test_records_that_the_disk_refused_are_fetched_again():
    replica = follower()
    answered(replica, Records((start(10, 3), BatchHead(11, 2, 3, 60, stamp=Stamp(5, 0, 0))), 6))
    (asked,) = replica.step(Truncated(10, NOBODY), 0)
    assert (asked.fetch.fetch_offset, asked.fetch.last_epoch) == (10, 1)
    assert replica.epochs == [(1, 0)]


def test_batches_that_do_not_continue_the_log_fail_an_assertion():
    replica = follower()
    with pytest.raises(AssertionError):
        answered(replica, Records((start(12, 3),), 6))
    replica = follower()
    with pytest.raises(AssertionError):
        answered(replica, Records((BatchHead(10, 1, 3, 60),), 6))  # of an epoch that never began


def test_it_takes_no_appends():
    (refusal,) = follower().step(AppendRequested("a", 1), 0)
    assert refusal.error.extra["leader"] == 2
