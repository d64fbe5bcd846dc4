"""One replica's decisions: offsets, epochs, the high watermark, and refusals."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from portalmq.broker.core.replica.events import (
    AnswerDuplicate,
    Append,
    Appended,
    AppendRequested,
    EpochNeeded,
    HighWatermarkAdvanced,
    PartitionStateChanged,
    Refresh,
    Refuse,
    RememberEpoch,
    Stamp,
    StepDown,
)
from portalmq.broker.core.replica.producers import Producers
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.errors import NotEnoughReplicas, NotLeader


def new_replica(end: int = 0, **more) -> PartitionReplica:
    settings = {"epochs": [], "high_watermark": 0, "highest_epoch": 0, "last_timestamp_ms": 0, **more}
    return PartitionReplica(1, producers=Producers([]), end_offset=end, **settings)


def word(
    leader: int | None = 1,
    epoch: int = 1,
    isr: tuple[int, ...] = (1,),
    least: int = 1,
    replicas: tuple[int, ...] = (1, 2),
) -> PartitionStateChanged:
    return PartitionStateChanged(leader, epoch, frozenset(isr), replicas, least)


def alone(epoch: int = 1, **more) -> PartitionStateChanged:
    return word(epoch=epoch, replicas=(1,), **more)


def leader(end: int = 0, **more) -> PartitionReplica:
    replica = new_replica(end, **more)
    replica.step(word(epoch=replica.highest_epoch + 1), 10)
    replica.step(Appended(end + 1), 10)
    return replica


def test_a_new_leader_first_writes_the_start_of_its_epoch():
    replica = new_replica()
    assert replica.step(word(), 10) == [RememberEpoch(1), Append(None, 0, 1, 10)]
    assert replica.epochs == [(1, 0)]


def test_nothing_is_readable_before_the_epoch_start_is_on_disk():
    replica = new_replica(end=5)
    replica.step(word(), 10)
    assert replica.high_watermark == 0
    assert replica.step(Appended(6), 10) == [HighWatermarkAdvanced(6)]


def test_offsets_are_dense_and_in_the_order_of_the_requests():
    replica = leader()
    first = replica.step(AppendRequested("a", 3), 20)
    second = replica.step(AppendRequested("b", 2), 20)
    assert first == [Append("a", 1, 1, 20)]
    assert second == [Append("b", 4, 1, 20)]
    assert replica.next_offset == 6


def test_the_high_watermark_waits_for_the_disk():
    replica = leader()
    replica.step(AppendRequested("a", 3), 20)
    assert replica.high_watermark == 1
    assert replica.step(Appended(4), 20) == [HighWatermarkAdvanced(4)]


def test_timestamps_never_fall_when_the_clock_does():
    replica = leader(last_timestamp_ms=500)
    (append,) = replica.step(AppendRequested("a", 1), 100)
    assert append.appended_at_ms == 500


def test_a_follower_accepts_no_appends():
    replica = new_replica()
    (refusal,) = replica.step(AppendRequested("a", 1), 1)
    assert isinstance(refusal, Refuse)
    assert isinstance(refusal.error, NotLeader)
    replica.step(word(leader=2), 1)
    (refusal,) = replica.step(AppendRequested("a", 1), 1)
    assert refusal.error.extra["leader"] == 2


def test_with_too_few_in_sync_only_control_records_are_accepted():
    replica = new_replica()
    replica.step(word(isr=(1,), least=2), 1)
    (refusal,) = replica.step(AppendRequested("a", 1), 1)
    assert isinstance(refusal.error, NotEnoughReplicas)
    (append,) = replica.step(AppendRequested("a", 1, is_control=True), 1)
    assert isinstance(append, Append)


def test_with_too_few_in_sync_the_high_watermark_does_not_move():
    replica = new_replica()
    replica.step(word(isr=(1,), least=2), 1)
    assert replica.step(Appended(1), 1) == []
    assert replica.high_watermark == 0


def test_the_same_leader_elected_again_raises_its_epoch_and_steps_down_in_between():
    replica = leader()
    actions = replica.step(word(epoch=2), 10)
    assert actions == [RememberEpoch(2), StepDown(1), Append(None, 1, 2, 10)]
    assert replica.epochs == [(1, 0), (2, 1)]


def test_a_state_repeated_in_the_same_epoch_changes_nothing():
    replica = leader()
    assert replica.step(word(epoch=1), 10) == []


def test_a_state_of_an_older_epoch_is_ignored():
    replica = leader(highest_epoch=4)
    assert replica.leader_epoch == 5
    assert replica.step(word(leader=2, epoch=4), 10) == []
    assert replica.leading


def test_a_leader_that_is_replaced_steps_down():
    replica = leader()
    assert replica.step(word(leader=2, epoch=2), 10)[:2] == [RememberEpoch(2), StepDown(2)]
    assert not replica.leading


def test_a_replica_reloaded_within_its_epoch_writes_no_second_epoch_start():
    replica = new_replica(end=5, epochs=[(3, 2)], highest_epoch=3, high_watermark=4)
    assert replica.step(alone(epoch=3), 10) == [Refresh(1)]
    assert not replica.leading
    synced = replace(alone(epoch=3), refresh=1)
    assert replica.step(synced, 10) == [HighWatermarkAdvanced(5)]


def test_a_replica_alone_writes_the_start_of_its_epoch_with_the_first_record():
    """So a broker with ten thousand topics starts without writing to each."""
    replica = new_replica(end=5, epochs=[(3, 2)], highest_epoch=3, high_watermark=5)
    assert replica.step(alone(epoch=4), 10) == [RememberEpoch(4)]
    assert replica.epochs == [(3, 2)]
    assert replica.step(AppendRequested("a", 2), 20) == [Append(None, 5, 4, 20), Append("a", 6, 4, 20)]
    assert replica.epochs == [(3, 2), (4, 5)]
    assert replica.step(AppendRequested("b", 1), 20) == [Append("b", 8, 4, 20)]
    assert replica.high_watermark == 5
    assert replica.step(Appended(9), 30) == [HighWatermarkAdvanced(9)]


def test_an_epoch_that_is_needed_begins_once():
    replica = new_replica(end=5, epochs=[(3, 2)], highest_epoch=3, high_watermark=5)
    replica.step(EpochNeeded(), 5)
    replica.step(alone(epoch=4), 10)
    assert replica.step(EpochNeeded(), 20) == [Append(None, 5, 4, 20)]
    assert replica.step(EpochNeeded(), 20) == []


def test_a_repeat_begins_no_epoch():
    replica = new_replica(end=5, epochs=[(3, 2)], highest_epoch=3, high_watermark=5)
    replica.producers.add(Stamp(7, 0, 0), 3, 2, 5)
    replica.step(alone(epoch=4), 10)
    assert replica.step(AppendRequested("b", 3, Stamp(7, 0, 0)), 30) == [AnswerDuplicate("b", 2, 5)]
    assert replica.next_offset == 5


def test_a_replica_alone_begins_its_epoch_when_others_join_it():
    replica = new_replica(end=5, high_watermark=5)
    replica.step(alone(), 10)
    joined = replace(word(replicas=(1, 2, 3)), version=1)
    assert replica.step(joined, 20) == [Append(None, 5, 1, 20)]


@pytest.mark.parametrize(
    ("high_watermark", "settings"), [(5, {"least": 2}), (5, {"replicas": (1, 2)}), (4, {"replicas": (1,)})]
)
def test_a_replica_that_is_not_alone_or_has_records_to_commit_begins_at_once(high_watermark, settings):
    replica = new_replica(end=5, high_watermark=high_watermark)
    assert replica.step(word(**{"replicas": (1,), **settings}), 10)[1:] == [Append(None, 5, 1, 10)]


def test_a_repeated_batch_is_answered_and_not_written():
    replica = leader()
    replica.step(AppendRequested("a", 3, Stamp(7, 0, 0)), 20)
    assert replica.step(AppendRequested("b", 3, Stamp(7, 0, 0)), 30) == [AnswerDuplicate("b", 1, 20)]
    assert replica.next_offset == 4


@pytest.mark.parametrize("stamp", [Stamp(7, 0, 5), Stamp(8, 0, 1)])
def test_a_gap_is_refused_and_nothing_is_allotted(stamp):
    replica = leader()
    replica.step(AppendRequested("a", 3, Stamp(7, 0, 0)), 20)
    (refusal,) = replica.step(AppendRequested("b", 1, stamp), 20)
    assert isinstance(refusal, Refuse)
    assert replica.next_offset == 4


def test_sequences_may_be_pipelined_before_anything_is_on_disk():
    replica = leader()
    for sequence in range(3):
        (action,) = replica.step(AppendRequested(sequence, 1, Stamp(7, 0, sequence)), 20)
        assert isinstance(action, Append)
