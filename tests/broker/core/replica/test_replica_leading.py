"""A replica that leads others: which fetches it answers, what it commits, and when its leadership ends."""

from __future__ import annotations

from msgspec.structs import replace

from portalmq.broker.core.replica.events import (
    AnswerDuplicate,
    Append,
    Appended,
    AppendRequested,
    BelowStart,
    BrokersChanged,
    Diverging,
    Fetch,
    FetchReceived,
    FollowerRefused,
    HighWatermarkAdvanced,
    IsrAnswered,
    LeaderAnswered,
    LeaseRenewed,
    Outcome,
    PartitionStateChanged,
    ProposeIsr,
    Refresh,
    Refuse,
    Rejected,
    RememberEpoch,
    ReplyFetch,
    SendFetch,
    SessionLost,
    Stamp,
    StepDown,
    Tick,
    Truncated,
)
from portalmq.broker.core.replica.leader import UNCOMMITTED_MAX
from portalmq.broker.core.replica.producers import Producers
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.broker.core.replica.state import SUCCESSOR_WAITS_MS, VOUCHED_FOR_MS
from portalmq.errors import NotEnoughReplicas, NotLeader, OutOfOrderSequence, Unavailable

STORES = {1: "a", 2: "b", 3: "c"}
BROKERS = {1: (1, "a"), 2: (1, "b"), 3: (1, "c")}
LEASE_MS = 4_000


def word(leader: int | None = 1, epoch: int = 3, isr: tuple[int, ...] = (1, 2), **more) -> PartitionStateChanged:
    settings = {"store_uuids": STORES, "incarnations": {1: 1, 2: 1, 3: 1}, **more}
    return PartitionStateChanged(leader, epoch, frozenset(isr), (1, 2, 3), 2, **settings)


def leader(isr: tuple[int, ...] = (1, 2)) -> PartitionReplica:
    """A leader with records [0, 10) of epoch 1, which leads in epoch 3 from offset 10 on."""
    replica = PartitionReplica(
        1,
        producers=Producers([]),
        epochs=[(1, 0)],
        end_offset=10,
        high_watermark=6,
        highest_epoch=1,
        last_timestamp_ms=0,
        incarnation=1,
        store_uuid="a",
        lease_ms=LEASE_MS,
    )
    replica.step(BrokersChanged(BROKERS), 0)
    replica.step(LeaseRenewed(0), 0)
    assert replica.step(word(isr=isr), 0) == [RememberEpoch(3), Append(None, 10, 3, 0)]
    replica.step(Appended(11), 0)
    return replica


def fetched(replica: PartitionReplica, broker_id: int, offset: int, last_epoch: int = 3, now_ms: int = 0, **more):
    fetch = Fetch(broker_id, 1, STORES[broker_id], 3, offset, offset, last_epoch)
    return replica.step(FetchReceived("t", replace(fetch, **more)), now_ms)


# --- committing ------------------------------------------------------------------------------------------------------


def test_nothing_of_the_epoch_is_committed_before_its_start_is():
    replica = leader()
    assert fetched(replica, 2, 10, last_epoch=1) == [ReplyFetch("t", 10, None)]
    assert replica.high_watermark == 6
    assert fetched(replica, 2, 11) == [HighWatermarkAdvanced(11), ReplyFetch("t", 11, None)]


def test_it_counts_itself_when_its_own_disk_has_it():
    replica = leader()
    replica.step(AppendRequested("a", 4), 0)
    assert fetched(replica, 2, 11)[0] == HighWatermarkAdvanced(11)
    assert replica.step(Appended(15), 0) == []
    assert fetched(replica, 2, 15)[0] == HighWatermarkAdvanced(15)


def test_the_uncommitted_tail_is_bounded():
    replica = leader()
    replica.step(AppendRequested("a", UNCOMMITTED_MAX), 0)
    (refusal,) = replica.step(AppendRequested("b", 1), 0)
    assert isinstance(refusal.error, NotEnoughReplicas)
    (own,) = replica.step(AppendRequested("c", 1, is_control=True), 0)
    assert isinstance(own, Append)


def test_with_members_that_do_not_fetch_a_batch_is_refused_at_once():
    replica = leader()
    replica.step(Tick(), 3_001)
    replica.step(LeaseRenewed(3_001), 3_001)
    for now_ms in range(3_200, 7_000, 200):
        replica.step(Tick(), now_ms)
        replica.step(LeaseRenewed(now_ms), now_ms)
    (refusal,) = replica.step(AppendRequested("a", 1), 7_000)
    assert isinstance(refusal.error, NotEnoughReplicas)


def test_a_repeat_is_answered_where_a_new_batch_would_be_refused():
    """The first copy is in the log, and is committed once the followers return: no repeat may deny that."""
    replica = leader()
    stamp = Stamp(7, 0, 0)
    (first,) = replica.step(AppendRequested("a", UNCOMMITTED_MAX, stamp), 0)
    repeat = AppendRequested("b", UNCOMMITTED_MAX, stamp)
    assert replica.step(repeat, 0) == [AnswerDuplicate("b", first.base_offset, first.appended_at_ms)]
    for now_ms in range(0, 7_000, 200):
        replica.step(Tick(), now_ms)
        replica.step(LeaseRenewed(now_ms), now_ms)
    assert replica.step(repeat, 7_000) == [AnswerDuplicate("b", first.base_offset, first.appended_at_ms)]
    for new in (Stamp(7, 0, UNCOMMITTED_MAX), Stamp(7, 0, UNCOMMITTED_MAX + 1), Stamp(7, 1, 0)):
        (refusal,) = replica.step(AppendRequested("c", 1, new), 7_000)
        assert isinstance(refusal.error, NotEnoughReplicas)


# --- fetches ----------------------------------------------------------------------------------------------------------


def test_diverging_logs_learn_their_common_end():
    replica = leader()
    assert fetched(replica, 2, 12, last_epoch=2) == [ReplyFetch("t", 12, Diverging(1, 10))]
    assert fetched(replica, 2, 12, last_epoch=1) == [ReplyFetch("t", 12, Diverging(1, 10))]
    assert replica.high_watermark == 6


def test_a_fetch_below_the_log_start_gets_the_start_and_its_epochs():
    replica = leader()
    fetched(replica, 2, 11)
    replica.log_start_offset = 8
    assert fetched(replica, 3, 0, last_epoch=0) == [ReplyFetch("t", 0, BelowStart(8, ((1, 0), (3, 10))))]


def test_a_lower_epoch_is_rejected_and_a_higher_one_ends_leadership():
    replica = leader()
    assert fetched(replica, 2, 11, leader_epoch=2) == [ReplyFetch("t", 11, Rejected(3))]
    assert fetched(replica, 2, 11, leader_epoch=4) == [
        RememberEpoch(4),
        StepDown(None),
        Refresh(1),
        ReplyFetch("t", 11, Rejected(4)),
    ]
    assert not replica.leading
    assert replica.step(word(version=1), 0) == []  # a state of the previous epoch
    assert isinstance(replica.step(word(leader=2, epoch=4, version=2), 0)[-1], SendFetch)


def test_an_unknown_replica_is_rejected_and_the_state_refreshed():
    replica = leader()
    fetch = Fetch(9, 1, "z", 3, 11, 11, 3)
    assert replica.step(FetchReceived("t", fetch), 1_000) == [Refresh(1), ReplyFetch("t", 11, Rejected(3))]
    assert replica.step(FetchReceived("t", fetch), 1_001) == [ReplyFetch("t", 11, Rejected(3))]


def test_a_fetch_of_an_earlier_life_is_rejected():
    replica = leader()
    fetched(replica, 2, 10, last_epoch=1, incarnation=2)
    assert fetched(replica, 2, 11) == [ReplyFetch("t", 11, Rejected(3))]
    assert replica.high_watermark == 6


# --- the ISR ---------------------------------------------------------------------------------------------------------


def joining() -> PartitionReplica:
    """Replica 3 is about to join the ISR {1, 2}."""
    replica = leader()
    fetched(replica, 2, 11)
    assert ProposeIsr(frozenset({1, 2, 3}), 0, {3: "c"}, {3: 1}) in fetched(replica, 3, 11)
    return replica


def commits_without_3(replica: PartitionReplica) -> bool:
    replica.step(AppendRequested("a", 1), 0)
    replica.step(Appended(replica.next_offset), 0)
    fetched(replica, 2, replica.next_offset)
    return replica.high_watermark == replica.next_offset


def test_a_joining_replica_counts_before_the_proposal_is_sent():
    assert not commits_without_3(joining())


def test_an_unknown_outcome_stays_unknown_until_a_synced_state():
    replica = joining()
    assert replica.step(IsrAnswered(0, Outcome.UNKNOWN), 0) == [Refresh(1)]
    replica.step(word(version=0), 0)  # a watch may deliver an older state
    assert not commits_without_3(replica)
    assert replica.in_sync.maximal == {1, 2, 3}
    assert HighWatermarkAdvanced(12) in replica.step(replace(word(version=0), refresh=1), 600)
    assert replica.in_sync.proposed is None


def test_after_a_conflict_the_refreshed_state_counts():
    replica = joining()
    assert replica.step(IsrAnswered(0, Outcome.CONFLICT), 0) == [Refresh(1)]
    replica.step(word(version=4, refresh=1), 0)
    assert replica.in_sync.state.version == 4


def test_an_applied_proposal_counts_at_once():
    replica = joining()
    replica.step(IsrAnswered(0, Outcome.APPLIED, word(isr=(1, 2, 3), version=1)), 0)
    assert replica.in_sync.proposed is None
    assert replica.in_sync.state.isr == {1, 2, 3}
    assert replica.step(IsrAnswered(0, Outcome.UNKNOWN), 0) == []  # answered twice


def test_a_removed_replica_counts_until_the_removal_is_confirmed():
    replica = leader(isr=(1, 2, 3))
    fetched(replica, 2, 11)
    for now_ms in range(200, 3_200, 200):
        replica.step(Tick(), now_ms)
        fetched(replica, 2, 11, now_ms=now_ms)
    (proposal,) = replica.step(Tick(), 3_200)
    assert proposal.isr == {1, 2}
    assert replica.high_watermark == 6
    applied = IsrAnswered(0, Outcome.APPLIED, word(version=1))
    assert replica.step(applied, 3_200) == [HighWatermarkAdvanced(11)]


def test_a_member_whose_port_refuses_is_removed_at_once():
    replica = leader(isr=(1, 2, 3))
    fetched(replica, 2, 11, now_ms=600)
    (proposal,) = replica.step(FollowerRefused(3), 600)
    assert proposal.isr == {1, 2}


def test_a_follower_ignores_a_refused_port():
    replica = leader()
    replica.step(word(leader=2, epoch=4, version=1), 0)
    assert replica.step(FollowerRefused(3), 600) == []


# --- late states and answers ------------------------------------------------------------------------------------------


def test_an_older_state_of_the_same_epoch_is_ignored():
    """A read of the whole tree may return the version before the one in the answer to a compare-and-set."""
    replica = leader()
    replica.step(word(isr=(1, 2, 3), version=1), 0)
    assert replica.step(word(isr=(1, 2), version=0), 0) == []
    assert fetched(replica, 2, 11) == [ReplyFetch("t", 11, None)], "the commit waits for the joining replica"
    assert HighWatermarkAdvanced(11) in fetched(replica, 3, 11)
    replica.step(word(isr=(1, 3), version=2), 0)
    assert replica.in_sync.state.isr == {1, 3}, "a later state counts"


def test_the_answer_to_another_compare_and_set_does_not_resolve_the_current_one():
    replica = joining()
    assert replica.step(IsrAnswered(7, Outcome.UNKNOWN), 0) == []
    assert replica.step(IsrAnswered(7, Outcome.APPLIED, word(version=8)), 0) == []
    assert replica.in_sync.maximal == {1, 2, 3}
    assert replica.step(IsrAnswered(0, Outcome.UNKNOWN), 0) == [Refresh(1)]


# --- the end of leadership --------------------------------------------------------------------------------------------


def test_it_serves_while_the_control_plane_answers_or_all_others_fetch():
    replica = leader()
    assert replica.may_serve(LEASE_MS)
    assert not replica.may_serve(LEASE_MS + 1)
    (refusal,) = replica.step(AppendRequested("a", 1), LEASE_MS + 1)
    assert isinstance(refusal.error, Unavailable)
    fetched(replica, 2, 11, now_ms=LEASE_MS + 2)
    assert replica.may_serve(2 * LEASE_MS)


def test_a_leader_alone_in_the_isr_serves_alone():
    assert leader(isr=(1,)).may_serve(1 << 40)
    assert leader(isr=(1,)).may_deliver(1 << 40)


# --- deliveries, and the answers of a successor -----------------------------------------------------------------------


def vouched(replica: PartitionReplica, broker_id: int, sent_after_ms: int | None, now_ms: int) -> None:
    fetch = Fetch(broker_id, 1, STORES[broker_id], 3, 11, 11, 3)
    replica.step(FetchReceived("t", fetch, sent_after_ms), now_ms)


def test_messages_are_delivered_while_all_possible_successors_vouched_recently():
    replica = leader(isr=(1, 2, 3))
    replica.step(LeaseRenewed(1 << 40), 0)
    assert not replica.may_deliver(0), "the lease of the control plane alone is not enough"
    vouched(replica, 2, 100, 150)
    assert not replica.may_deliver(150)
    vouched(replica, 3, 200, 250)
    assert replica.may_deliver(100 + VOUCHED_FOR_MS)
    assert not replica.may_deliver(101 + VOUCHED_FOR_MS)
    now_ms = 101 + VOUCHED_FOR_MS
    (refusal,) = replica.step(AppendRequested("a", 1, is_control=True, delivers=True), now_ms)
    assert isinstance(refusal.error, Unavailable)
    (own,) = replica.step(AppendRequested("b", 1, is_control=True), now_ms)
    assert isinstance(own, Append), "an ack is still accepted"


def test_a_gap_in_the_sequence_is_reported_only_while_followers_vouch():
    """The missing batch may be with a successor that this leader does not know of."""
    replica = leader()
    replica.step(LeaseRenewed(1 << 40), 0)
    gap = AppendRequested("a", 1, Stamp(7, 0, 5))
    for now_ms, error in ((100 + VOUCHED_FOR_MS, OutOfOrderSequence), (101 + VOUCHED_FOR_MS, Unavailable)):
        vouched(replica, 2, 100, 100)
        (refusal,) = replica.step(gap, now_ms)
        assert isinstance(refusal, Refuse)
        assert isinstance(refusal.error, error)


def test_no_other_broker_led_at_a_time_that_all_possible_successors_vouched_for():
    replica = leader(isr=(1, 2, 3))
    replica.step(LeaseRenewed(1 << 40), 0)
    vouched(replica, 2, 200, 250)
    assert not replica.led_at(100)
    vouched(replica, 3, 100, 260)
    assert replica.led_at(100)
    assert not replica.led_at(101), "another may have been elected since"
    assert leader(isr=(1,)).led_at(1 << 40)


def test_a_delayed_fetch_vouches_for_the_time_after_which_it_was_sent():
    replica = leader()
    vouched(replica, 2, 100, 5_000)
    assert replica.may_serve(5_000)
    assert not replica.may_deliver(5_000)
    vouched(replica, 2, 50, 5_001)
    vouched(replica, 2, 4_900, 5_002)
    vouched(replica, 2, 4_800, 5_003)
    assert replica.may_deliver(4_900 + VOUCHED_FOR_MS), "an older copy does not lower the time"


def test_a_fetch_without_a_send_time_vouches_for_its_arrival():
    replica = leader()
    vouched(replica, 2, None, 500)
    assert replica.may_deliver(500 + VOUCHED_FOR_MS)
    assert not replica.may_deliver(501 + VOUCHED_FOR_MS)


def test_the_first_leader_of_a_new_partition_answers_acks_at_once():
    replica = PartitionReplica(
        1,
        producers=Producers([]),
        epochs=[],
        end_offset=0,
        high_watermark=0,
        highest_epoch=0,
        last_timestamp_ms=0,
        incarnation=1,
        store_uuid="a",
        began_ms=500,
    )
    replica.step(word(epoch=1, refresh=1), 600)
    replica.step(word(epoch=1), 600)
    assert replica.leading
    assert replica.may_settle(600)


def test_a_successor_answers_no_ack_while_its_predecessor_may_deliver():
    replica = leader()
    replica.step(word(leader=2, epoch=4, version=1), 100)
    replica.step(LeaderAnswered(700), 700)
    replica.step(LeaderAnswered(600), 700)
    replica.step(word(leader=1, epoch=5, version=2), 800)
    assert replica.leading
    assert not replica.may_settle(700 + VOUCHED_FOR_MS)
    assert not replica.may_settle(699 + SUCCESSOR_WAITS_MS)
    assert replica.may_settle(700 + SUCCESSOR_WAITS_MS)


def test_a_leader_that_followed_no_other_answers_acks_at_once():
    replica = leader()
    assert replica.may_settle(0)
    replica.step(word(leader=1, epoch=4, version=1), 100)
    assert replica.may_settle(100)


def test_a_leader_waits_for_the_time_its_earlier_incarnation_vouched_for():
    replica = PartitionReplica(
        1,
        producers=Producers([]),
        epochs=[(1, 0)],
        end_offset=10,
        high_watermark=6,
        highest_epoch=1,
        last_timestamp_ms=0,
        incarnation=1,
        store_uuid="a",
        began_ms=500,
    )
    replica.step(word(refresh=1), 600)
    replica.step(word(isr=(1,)), 600)
    assert replica.leading
    assert not replica.may_settle(499 + SUCCESSOR_WAITS_MS)
    assert replica.may_settle(500 + SUCCESSOR_WAITS_MS)


def test_a_lost_session_ends_leadership_until_a_synced_state_shows_no_other_election():
    replica = leader()
    replica.step(AppendRequested("a", 1), 0)
    assert replica.step(SessionLost(), 100) == [StepDown(None), Refresh(1)]
    (refusal,) = replica.step(AppendRequested("b", 1), 100)
    assert isinstance(refusal, Refuse)
    assert isinstance(refusal.error, NotLeader)
    assert replica.step(word(version=0), 100) == []  # from a watch: it may be older than the loss
    assert not replica.leading
    assert replica.step(word(version=0, refresh=1), 200) == []
    assert replica.leading
    assert replica.epochs == [(1, 0), (3, 10)]  # no second start


def test_an_election_of_an_earlier_incarnation_is_not_followed_by_leadership():
    replica = leader()
    replica.step(word(epoch=4, version=1, incarnations={1: 0}), 0)
    assert not replica.leading
    assert replica.highest_epoch == 4


def test_a_refused_transaction_keeps_the_leader_and_its_tracker():
    replica = leader()
    fetched(replica, 2, 11)
    replica.step(AppendRequested("a", 4, Stamp(7, 0, 0)), 0)
    assert replica.step(Truncated(11, Producers([])), 0) == []
    assert replica.leading
    assert replica.step(AppendRequested("b", 4, Stamp(7, 0, 0)), 0) == [Append("b", 11, 3, 0)]
    replica.step(Appended(15), 0)
    assert fetched(replica, 2, 15)[0] == HighWatermarkAdvanced(15)


def test_an_epoch_whose_start_the_disk_refused_starts_again():
    replica = leader()
    replica.step(word(leader=2, epoch=4, version=1), 0)
    replica.step(word(leader=1, epoch=5, version=2), 0)
    assert replica.step(Truncated(11, Producers([])), 0) == [Append(None, 11, 5, 0)]
    assert replica.epochs == [(1, 0), (3, 10), (5, 11)]


def test_followers_get_records_that_the_leader_is_still_writing():
    replica = leader(isr=(1, 2, 3))
    replica.step(AppendRequested("a", 1), 0)
    assert (replica.durable_end, replica.sendable_end) == (11, 12)
    fetched(replica, 2, 12)
    assert fetched(replica, 3, 12) == [HighWatermarkAdvanced(11), ReplyFetch("t", 12, None)]
    assert replica.step(Appended(12), 0) == [HighWatermarkAdvanced(12)]


def test_a_leader_that_lost_records_its_followers_may_have_gives_up_the_epoch():
    replica = leader(isr=(1, 2, 3))
    replica.step(AppendRequested("a", 1), 0)
    actions = replica.step(Truncated(11, Producers([]), sent_end=12), 0)
    assert [type(action) for action in actions] == [StepDown, Refresh]
    (given_up,) = replica.step(word(isr=(1, 2, 3), version=1, refresh=1), 0)
    assert (given_up.resigns, given_up.isr) == (True, {1, 2, 3})


def test_a_reopened_log_leads_only_after_a_synced_state():
    """An earlier proposal of the replica may have been applied."""
    before = leader()
    replica = PartitionReplica(
        1,
        producers=Producers([]),
        epochs=before.epochs,
        end_offset=11,
        high_watermark=6,
        highest_epoch=3,
        last_timestamp_ms=0,
        incarnation=1,
        store_uuid="a",
    )
    assert replica.step(word(), 0) == [Refresh(1)]
    assert replica.step(word(), 0) == []
    (given_up,) = replica.step(word(isr=(1, 2, 3), version=1, refresh=1), 0)
    assert (given_up.resigns, given_up.isr) == (True, {1, 2, 3})  # followers may have more of its epoch than this log
    assert not replica.leading
    replica.step(word(isr=(1, 2, 3), version=3, epoch=4), 0)
    assert replica.in_sync.maximal == {1, 2, 3}
