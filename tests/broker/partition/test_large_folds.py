"""The fold of groups with very many leases: loading it and taking it over do not block other work."""

from __future__ import annotations

import gevent
import gevent.event
import msgspec
import pytest
from gevent import monkey
from support.replicas import eventually, replicas, send

from portalmq.broker.core import fold as folds
from portalmq.broker.core.fold import (
    DeadFold,
    GroupFold,
    PartitionFold,
    ProducerFold,
    SpanFold,
    StreamFold,
    decode_fold,
    encode_fold,
)
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.records import Ack, Grant, GroupStart
from portalmq.broker.partition import folding, following, partition
from portalmq.broker.storage.batch import BatchKind

HOUR_MS = 3_600_000
native_thread = monkey.get_original("_thread", "get_ident")

FULL = PartitionFold(
    30,
    2,
    [(1, 0), (2, 9)],
    [ProducerFold(7, 1, [(0, 5, 2, 1_000)])],
    [
        GroupFold("empty", 0, 0, []),
        GroupFold(
            "g",
            2,
            20,
            [SpanFold(2, 5, 1, 0, True, 10, 40, 3, 1, "me", 2), SpanFold(6, 7, 2, 1, False, 11, 12)],
            {"a": (40, [(2, 5)])},
            11,
            [(3, 0, 9)],
            [(3, 0, 12)],
            [DeadFold(8, 9, 3, 12, "max_deliveries", 0, 1)],
            [(b"commit", 14)],
            {"a": (2, [2])},
        ),
    ],
    [StreamFold("s", 4, 1, "member", 9)],
    [(14, "g")],
    [(17, 18)],
    5,
)


def test_a_large_fold_is_decoded_row_by_row_and_is_the_same(monkeypatch):
    old = msgspec.msgpack.encode({"applied": 3, "groups": [["g", 0, 3, [[1, 2, 1, 0, True, 5, 6]]]]})
    whole = [decode_fold(encode_fold(fold)) for fold in (FULL, PartitionFold())] + [decode_fold(old)]
    monkeypatch.setattr(folds, "LARGE_BYTES", 0)
    assert [decode_fold(encode_fold(fold)) for fold in (FULL, PartitionFold())] + [decode_fold(old)] == whole
    assert whole[0] == FULL


@pytest.mark.parametrize(
    "spans", [5, [5], [[1, 2]], [[1, 2, 1, 0, True, 5, "6"]]], ids=["no list", "no row", "a short row", "a wrong type"]
)
def test_a_large_malformed_fold_is_refused(monkeypatch, spans):
    monkeypatch.setattr(folds, "LARGE_BYTES", 0)
    with pytest.raises(msgspec.MsgspecError):
        decode_fold(msgspec.msgpack.encode({"groups": [["g", 0, 3, spans]]}))


def test_a_follower_loads_a_state_record_on_a_native_thread(tmp_path, monkeypatch):
    threads = []

    def decoded(body: bytes) -> PartitionFold:
        threads.append(native_thread())
        return decode_fold(body)

    monkeypatch.setattr(folding, "decode_fold", decoded)
    monkeypatch.setattr(following, "LARGE_BYTES", 0)
    with replicas(tmp_path, 2, lag_ms=HOUR_MS) as group:
        eventually(lambda: group.leader.serves)
        leader, follower = group.leader, group.partition(2)
        leader.append_group_record("g", GroupStart(0, 1)).wait()
        send(leader, "a", "b", "c")
        held = leader.append_group_record("g", Grant(((2, 3, 1),), 3, 1, 2))
        held.wait()
        threads.clear()
        leader.retention.write_state().wait()
        eventually(lambda: follower.groups.state_offset == leader.groups.state_offset)
        assert threads
        assert native_thread() not in threads
        assert follower.delivery["g"].snapshot() == leader.delivery["g"].snapshot()


def test_a_state_record_is_dropped_when_its_leader_is_replaced_during_the_load(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "LARGE_BYTES", 0)
    with replicas(tmp_path, 2, lag_ms=HOUR_MS) as group:
        eventually(lambda: group.leader.serves and group.agree())
        leader, follower = group.leader, group.partition(2)
        end = follower.replica.next_offset
        load, ends = following.FollowerReplication._state, []

        def deposed(*arguments):
            loaded = load(*arguments)
            if not ends:
                ends.append(follower.replica.next_offset)
                group.elect(2)
            return loaded

        monkeypatch.setattr(following.FollowerReplication, "_state", deposed)
        leader.retention.write_state()
        eventually(lambda: ends and follower.serves)
        assert ends == [end]
        assert follower.groups.state_offset == -1, "it leads, and its log continues without the record"
        eventually(group.agree)
        assert not group.hosts[2].faults


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_an_unreadable_state_record_is_not_written(tmp_path, monkeypatch, large):
    if large:
        monkeypatch.setattr(following, "LARGE_BYTES", 0)
    with replicas(tmp_path, 2) as group:
        eventually(lambda: group.leader.serves and group.agree())
        leader, follower = group.leader, group.partition(2)
        end = follower.log.end_offset
        leader.append_control(BatchKind.STATE, msgspec.msgpack.encode({"producers": [], "groups": [5]}))
        eventually(lambda: follower.following._pause is not None)
        assert (follower.log.end_offset, follower.replica.next_offset) == (end, end)
        assert not group.hosts[2].faults


def test_messages_settled_during_a_takeover_stay_settled():
    group = GroupDelivery(GroupFold("g", 0, 0, []))
    group.apply(Grant(tuple((start, start + 1, 1) for start in range(10)), 10, 1_000, 1_100))
    seen = []

    def paced(spans):
        for span in spans:
            seen.append(span.start)
            if span.start == 4:
                group.apply(Ack(((6, 8),), 1_000))
            yield span

    group.take_over(500, paced)
    assert seen == list(range(10))
    assert [(span.start, span.available_at_ms) for span in group.spans()] == [
        (start, 600) for start in (0, 1, 2, 3, 4, 5, 8, 9)
    ]
    assert group.next_wakeup_ms() == 600
    assert not group.has_returned(599)
    assert [span.start for span in group.available(600)] == [0, 1, 2, 3, 4, 5, 8, 9]


def test_a_new_leader_checks_no_lease_when_none_is_ahead_of_its_clock():
    group = GroupDelivery(GroupFold("g", 0, 0, []))
    group.apply(Grant(((0, 1, 1),), 10, 400, 1_100))
    looked = []
    group.take_over(400, lambda spans: looked.extend(spans) or spans)
    assert looked == []
    group.take_over(399, lambda spans: looked.extend(spans) or spans)
    assert len(looked) == 1
    old = GroupDelivery(GroupFold("g", 0, 1, [SpanFold(0, 1, 1, 0, True, 400, 1_100)]))
    old.take_over(300)
    assert old.next_wakeup_ms() == 1_000, "a snapshot of an older version lacks the time of the last activity"


@pytest.mark.parametrize("deposed", [False, True], ids=["stays leader", "loses the leadership"])
def test_a_leader_with_very_many_leases_serves_once_it_has_taken_them_over(tmp_path, monkeypatch, deposed):
    monkeypatch.setattr(partition, "TAKEN_OVER_AT_ONCE", 3)
    monkeypatch.setattr("portalmq.broker.partition.yielding.TURN_S", 0.0)
    pauses, may_go_on = [], gevent.event.Event()

    def pause() -> None:
        if gevent.getcurrent() in taking_over:
            pauses.append(group.partition(2).serves)
            may_go_on.wait()

    taking_over = []
    take_over = partition.Partition._take_over_in_turns

    def noted(self, tracker) -> None:
        taking_over.append(gevent.getcurrent())
        take_over(self, tracker)

    monkeypatch.setattr("portalmq.broker.partition.yielding.give_way", pause)
    monkeypatch.setattr(partition.Partition, "_take_over_in_turns", noted)
    with replicas(tmp_path, 2, lag_ms=HOUR_MS) as group:
        eventually(lambda: group.leader.serves)
        first, second = group.leader, group.partition(2)
        first.append_group_record("g", GroupStart(0, 1)).wait()
        send(first, *"abcde")
        ahead_ms = group.clock.now_ms() + HOUR_MS
        ranges = tuple((offset, offset + 1, 1) for offset in range(2, 7))
        first.append_group_record("g", Grant(ranges, 7, ahead_ms, ahead_ms + 60_000)).wait()
        group.elect(2)
        eventually(lambda: pauses)
        monkeypatch.setattr(partition, "TAKEN_OVER_AT_ONCE", 100)
        second._begin_to_serve()
        assert not second.serves, "the high watermark moved, and the leases are still being taken over"
        if deposed:
            group.elect(1)
            eventually(lambda: not second.replica.leading)
        may_go_on.set()
        gevent.joinall(taking_over)
        assert True not in pauses
        assert second.serves is not deposed
        spans = second.delivery["g"].spans()
        assert len(spans) == 5
        if deposed:
            assert {span.available_at_ms for span in spans} == {ahead_ms + 60_000}, "the next leader converts them"
        else:
            assert all(span.available_at_ms <= group.clock.now_ms() + 60_000 for span in spans)
