"""Replicas of one partition in one process: acknowledged records are on all of them, with any leader."""

from __future__ import annotations

import contextlib
import time
from queue import SimpleQueue

import gevent
import pytest
from support.replicas import CLUSTER, TOPIC_ID, contents, eventually, replicas, send, values

from portalmq.broker.cluster.topic import Topic
from portalmq.broker.core.queue.records import Ack, Grant, GroupStart
from portalmq.broker.core.replica.events import Stamp
from portalmq.broker.partition import serving
from portalmq.broker.partition.fetch_answers import RecordsAnswer
from portalmq.broker.replication.fetch_protocol import (
    AskedPartition,
    ReplicaFetchAnswer,
    ReplicaFetchRequest,
    decode_answer,
    encode,
)
from portalmq.control_plane.state import TopicState
from portalmq.errors import NotEnoughReplicas, NotLeader, OffsetOutOfRange, PortalMQError, Unavailable
from portalmq.wire import TopicConfig

HOUR_MS = 3_600_000


def settle(group) -> None:
    eventually(lambda: group.leader.serves and group.agree())


def test_an_acknowledged_record_is_on_every_replica_in_sync(tmp_path):
    with replicas(tmp_path, 3, lag_ms=HOUR_MS) as group:
        eventually(lambda: group.leader.serves)
        for number in range(20):
            send(group.leader, f"m{number}")
            for partition in group.partitions():
                assert values(partition)[-1] == f"m{number}"
        settle(group)


def test_a_follower_refuses_messages_and_names_the_leader(tmp_path):
    with replicas(tmp_path) as group:
        settle(group)
        with pytest.raises(NotLeader) as refused:
            send(group.partition(2), "m")
        assert refused.value.extra == {"leader": 1, "leader_url": "http://broker-1"}


def test_a_leader_without_a_successor_denies_an_offset_past_the_end(tmp_path):
    with replicas(tmp_path, lag_ms=HOUR_MS) as group:
        settle(group)
        past = group.leader.replica.next_offset + 1

        def is_denied() -> bool:
            with contextlib.suppress(Unavailable):  # late followers do not vouch
                group.leader.check_offset(past)
            return False

        with pytest.raises(OffsetOutOfRange, match="past the end"):
            eventually(is_denied)


def test_a_leader_unaware_of_its_successor_denies_no_record_that_the_successor_committed(tmp_path):
    with replicas(tmp_path, 3, lag_ms=HOUR_MS) as group:
        settle(group)
        group.cut(1)
        group.elect(2, isr=(2, 3))
        eventually(lambda: group.leader.serves)
        base, _ = send(group.leader, "m")
        late = group.partition(1)
        assert late.serves, "its lease is valid"
        with pytest.raises(Unavailable, match="do not vouch"):
            late.check_offset(base + 1)


def test_idle_replicas_send_few_requests(tmp_path):
    with replicas(tmp_path) as group:
        settle(group)
        gevent.sleep(0.3)
        before, began = group.hosts[2].network.calls, time.monotonic()
        gevent.sleep(1.0)
        polls = group.hosts[2].network.calls - before
        assert polls <= (time.monotonic() - began) / 0.2 + 2, "a poll takes 200 ms"


def test_a_follower_learns_the_high_watermark_without_new_messages(tmp_path):
    with replicas(tmp_path) as group:
        settle(group)
        send(group.leader, "m")
        end = group.leader.high_watermark
        eventually(lambda: group.partition(2).high_watermark == end)


def test_a_new_leader_has_everything_and_the_old_one_follows(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        send(group.leader, "a", "b")
        group.elect(2)
        eventually(lambda: group.partition(2).serves)
        assert not group.partition(1).replica.leading
        assert group.stepped_down == [1]
        send(group.partition(2), "c")
        settle(group)
        assert all(values(partition) == ["a", "b", "c"] for partition in group.partitions())
        assert all(partition.readable_end == group.leader.readable_end for partition in group.partitions())


def test_waiters_get_an_unknown_outcome_when_the_leadership_moves(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        group.cut(2)
        group.cut(3)
        waiting = gevent.spawn(send, group.partition(1), "lost?")
        gevent.sleep(0.05)
        assert not waiting.ready(), "no other replica has it"
        group.severed = {1}
        group.elect(2)
        group.severed = set()
        group.announce()
        with pytest.raises(NotLeader) as told:
            waiting.get(timeout=20)
        assert told.value.outcome == "unknown"
        assert told.value.extra["leader_url"] == "http://broker-2"
        settle(group)


def test_records_that_only_the_old_leader_has_are_truncated(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        send(group.leader, "kept")
        group.severed = {1}
        for text in ("never", "acknowledged"):
            gevent.spawn(_attempt, group.partition(1), text)
        eventually(lambda: values(group.partition(1))[-1:] == ["acknowledged"])
        group.elect(2, isr=(2, 3))
        eventually(lambda: group.partition(2).serves)
        send(group.partition(2), "instead")
        group.mend(1)
        eventually(lambda: 1 in group.state.isr)
        settle(group)
        assert all(values(partition) == ["kept", "instead"] for partition in group.partitions())
        send(group.leader, "on")
        assert values(group.partition(1)) == ["kept", "instead", "on"]


def test_a_batch_within_which_logs_diverge_is_truncated_as_a_whole(tmp_path):
    with replicas(tmp_path, 3, lag_ms=1_000_000) as group:
        settle(group)
        send(group.leader, "kept")
        settle(group)
        group.cut(2)
        gevent.spawn(_attempt, group.partition(1), *"a batch of nine")
        eventually(lambda: group.partition(3).log.end_offset == group.partition(1).log.end_offset)
        eventually(lambda: len(values(group.partition(3))) > 1)
        stores = dict(group.state.store_uuids)
        for broker_id in (2, 3, 2, 3, 2):
            begins_an_epoch_alone(group, broker_id)
        assert (
            group.partition(2).log.end_offset
            < group.partition(3).log.replica_start(group.partition(3).log.end_offset - 2).offset
        )
        group.severed = set()
        group.announce()
        settle(group)
        assert all(values(partition) == ["kept"] for partition in group.partitions())
        assert group.state.store_uuids == stores


def begins_an_epoch_alone(group, broker_id):
    """Let a broker write an epoch start that is not committed."""
    log = group.partition(broker_id).log
    end = log.end_offset
    group.severed = {1, 2, 3} - {broker_id}
    group.elect(broker_id)
    eventually(lambda: log.end_offset == end + 1)


def _attempt(partition, *texts):
    with contextlib.suppress(PortalMQError):
        send(partition, *texts)


def test_a_follower_that_is_silent_leaves_the_isr_and_comes_back(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        group.cut(3)
        eventually(lambda: group.state.isr == (1, 2))
        send(group.leader, "without")
        group.mend(3)
        eventually(lambda: group.state.isr == (1, 2, 3))
        settle(group)
        assert values(group.partition(3)) == ["without"]


def test_with_too_few_in_sync_a_send_is_refused_and_not_applied(tmp_path):
    with replicas(tmp_path, 2) as group:
        settle(group)
        group.cut(2)
        eventually(lambda: group.leader.replica.in_sync.live_members(group.hosts[1].clock.now_ms()) < 2)
        with pytest.raises(NotEnoughReplicas) as refused:
            send(group.leader, "m")
        assert refused.value.outcome == "not_applied"
        assert group.state.isr == (1, 2), "the ISR is never smaller than what a commit needs"
        group.mend(2)
        eventually(lambda: group.leader.replica.in_sync.live_members(group.hosts[1].clock.now_ms()) == 2)
        send(group.leader, "m")


@pytest.mark.parametrize("saves", [True, False])
def test_a_broker_that_starts_again_continues_where_its_log_ends(tmp_path, saves):
    with replicas(tmp_path, 3) as group:
        settle(group)
        send(group.leader, *map(str, range(100)))
        settle(group)
        group.stop(3, saves=saves)
        send(group.leader, "meanwhile")
        group.start(3, incarnation=2)
        settle(group)
        assert values(group.partition(3))[-1] == "meanwhile"


def test_a_repeated_batch_is_answered_with_its_first_offsets_after_a_failover(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        first = send(group.leader, "a", "b", stamp=Stamp(7, 0, 0))
        group.elect(2)
        eventually(lambda: group.partition(2).serves)
        assert send(group.partition(2), "a", "b", stamp=Stamp(7, 0, 0)) == first
        send(group.partition(2), "c", stamp=Stamp(7, 0, 2))
        settle(group)
        assert all(values(partition) == ["a", "b", "c"] for partition in group.partitions())


def test_a_new_leader_knows_the_leases_and_acks_of_groups(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        leader = group.leader
        base, _ = send(leader, *map(str, range(10)))
        now_ms, granted_in = group.hosts[1].clock.now_ms(), leader.replica.leader_epoch
        leader.append_group_record("g", GroupStart(base, now_ms))
        leader.append_group_record("g", Grant(((base, base + 4, 1),), base + 4, now_ms, now_ms + 60_000), is_soft=True)
        leader.append_group_record("g", Ack(((base, base + 2),), now_ms)).wait()
        settle(group)
        folds = [partition.delivery["g"].snapshot() for partition in group.partitions()]
        assert folds[0] == folds[1] == folds[2]
        group.elect(3)
        eventually(lambda: group.partition(3).serves)
        delivery = group.partition(3).delivery["g"]
        assert (delivery.next, delivery.outstanding) == (base + 4, 2)
        assert delivery.holds(base + 2, 1, granted_in)
        assert not delivery.holds(base, 1, granted_in)


def test_large_batches_are_replicated(tmp_path):
    with replicas(tmp_path) as group:
        settle(group)
        sends = [gevent.spawn(send, group.leader, *[f"{n}-" + "x" * 1_000] * 500) for n in range(20)]
        gevent.joinall(sends, raise_error=True)
        settle(group)
        assert len(values(group.partition(2))) == 10_000


def test_a_late_follower_gets_records_from_disk_that_memory_has_dropped(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        group.cut(3)
        eventually(lambda: group.state.isr == (1, 2))
        group.hosts[1].cache.frames.bytes_max = 1
        for number in range(30):
            send(group.leader, *[f"{number}-" + "y" * 2_000] * 30)
        group.mend(3)
        eventually(lambda: group.state.isr == (1, 2, 3))
        settle(group)


def test_a_follower_that_ends_below_the_leaders_log_start_begins_again_there(tmp_path):
    with replicas(tmp_path, 3, segment_bytes=64 * 1024) as group:
        settle(group)
        send(group.leader, "old", stamp=Stamp(7, 3, 0))
        leader = group.leader
        now_ms = group.hosts[1].clock.now_ms()
        leader.append_group_record("g", GroupStart(0, now_ms)).wait()
        settle(group)
        group.cut(3)
        eventually(lambda: group.state.isr == (1, 2))
        for _ in range(20):
            send(leader, *["z" * 1_000] * 20)
        leader.append_group_record("g", Ack(((0, 300),), now_ms)).wait()
        leader.retention.purge(200)
        assert leader.log.log_start_offset == 200
        group.mend(3)
        eventually(lambda: group.state.isr == (1, 2, 3))
        settle_end(group)
        late = group.partition(3)
        assert late.log.base_offset == leader.start.offset <= 200
        assert late.log.messages_before(late.log.end_offset) == leader.log.messages_before(leader.log.end_offset)
        assert late.delivery["g"].snapshot() == leader.delivery["g"].snapshot()
        assert late.replica.producers.snapshot() == leader.replica.producers.snapshot()
        assert late.replica.epochs == leader.replica.epochs
        eventually(lambda: late.log.log_start_offset == 200)
        group.elect(3)
        eventually(lambda: group.partition(3).serves)
        send(group.partition(3), "new", stamp=Stamp(7, 3, 1))
        settle(group)


def settle_end(group) -> None:
    eventually(lambda: {p.high_watermark for p in group.partitions()} == {group.leader.replica.next_offset})


def test_a_follower_that_stops_after_a_reset_without_the_fold_begins_there_again(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        group.cut(3)
        eventually(lambda: group.state.isr == (1, 2))
        leader = group.leader
        for number in range(10):
            send(leader, f"m{number}")
        leader.retention.purge(6)
        # It gets the empty log, and none of its records.
        answers = group.hosts[3].network
        answers.alter = _only_the_first_frames_are_withheld
        group.mend(3)
        eventually(lambda: group.partition(3).log.base_offset == leader.start.offset)
        group.stop(3, saves=False)
        group.start(3, incarnation=2)
        eventually(lambda: group.state.isr == (1, 2, 3))
        settle_end(group)
        assert group.partition(3).replica.epochs == leader.replica.epochs
        assert group.partition(3).store_uuid == "store-3"


def _only_the_first_frames_are_withheld(answer: bytes) -> bytes:
    read = decode_answer(answer)
    return encode(
        ReplicaFetchAnswer(read.known, [each for each in read.partitions if not isinstance(each, RecordsAnswer)])
    )


def test_a_purge_on_the_leader_moves_the_log_start_of_followers_too(tmp_path):
    with replicas(tmp_path) as group:
        settle(group)
        send(group.leader, *"abcdef")
        group.leader.retention.purge(4)
        eventually(lambda: group.partition(2).log.log_start_offset == 4)
        group.elect(2)
        eventually(lambda: group.partition(2).serves)
        new = group.partition(2)
        readable = [
            record.value for piece in new.reader.pieces(0, new.high_watermark, 100) for record in piece.records()
        ]
        assert readable == [b"d", b"e", b"f"]


def test_the_next_leader_finishes_a_purge_of_a_leader_that_ended(tmp_path):
    with replicas(tmp_path) as group:
        settle(group)
        send(group.leader, *"abcdef")
        settle(group)
        purge = group.leader.append_control(3, b"\x91\x04")  # Kind.PURGE up to 4, and no STATE behind it
        group.leader.groups.purge(purge.base_offset, 4)
        purge.wait()
        settle_end(group)
        assert group.partition(2).log.log_start_offset == 0
        group.elect(2)
        eventually(lambda: group.partition(2).log.log_start_offset == 4)


def test_a_purge_finished_by_the_next_leader_moves_the_log_start_after_its_state_commits(tmp_path, monkeypatch):
    with replicas(tmp_path) as group:
        settle(group)
        send(group.leader, *"abcdef")
        settle(group)
        purge = group.leader.append_control(3, b"\x91\x04")  # Kind.PURGE up to 4, and no STATE behind it
        group.leader.groups.purge(purge.base_offset, 4)
        purge.wait()
        settle_end(group)
        new = group.partition(2)
        states_at_move: list[bool] = []
        advance = new.log.advance_log_start

        def advanced(offset: int) -> None:
            newest = new.log.newest_state()
            states_at_move.append(newest is not None and newest.end_offset <= new.high_watermark)
            advance(offset)

        monkeypatch.setattr(new.log, "advance_log_start", advanced)
        group.elect(2)
        eventually(lambda: new.log.log_start_offset == 4)
        settle(group)
        assert states_at_move == [True]
        newest = new.log.newest_state()
        assert newest is not None
        assert new.groups.state_offset == newest.base_offset


def test_the_same_log_is_there_after_many_failovers_under_load(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        acknowledged: list[str] = []
        stop = []

        def produce(name: str) -> None:
            number = 0
            while not stop:
                text = f"{name}-{number}"
                number += 1
                try:
                    send(group.leader, text)
                except (PortalMQError, AssertionError):
                    gevent.sleep(0.01)
                else:
                    acknowledged.append(text)

        producers = [gevent.spawn(produce, name) for name in "abcd"]
        for turn in range(10):
            eventually(lambda turn=turn: len(acknowledged) >= 6 * turn)
            gevent.sleep(0.05)
            group.elect(turn % 3 + 1)
        eventually(lambda: len(acknowledged) >= 60)
        stop.append(True)
        gevent.joinall(producers, timeout=60)
        eventually(lambda: group.leader.serves)
        settle(group)
        found = values(group.leader)
        assert set(acknowledged) <= set(found)
        assert len(set(map(contents, group.partitions()))) == 1


def test_a_paused_leader_verifies_its_leadership_before_it_answers(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        leader = group.leader
        leader._last_step_ms -= 5_000  # the process did not run
        with pytest.raises(Unavailable) as refused:
            send(leader, "m", acks="leader")
        assert refused.value.outcome == "not_applied"
        eventually(lambda: leader.serves)
        assert group.stepped_down == [1]
        send(leader, "m")
        settle(group)
        assert len(leader.replica.epochs) == 1, "no other broker was elected: it continues in its epoch"


@pytest.mark.parametrize("reads", [lambda topic: topic.partition(0), lambda topic: topic.led()[0]])
def test_a_paused_leader_verifies_its_leadership_before_reads(tmp_path, reads):
    """Browsing, stream fetches, offsets and counts look a partition up, and read it without a further check."""
    with replicas(tmp_path, 3) as group:
        settle(group)
        leader, host = group.leader, group.hosts[1]
        host.membership.mirror.partitions = {}
        topic = Topic(TopicState("t", TOPIC_ID, 1, 1, 3, TopicConfig()), host, lambda missing: None)
        topic.local[0] = leader
        assert reads(topic) is leader
        leader._last_step_ms -= 5_000  # the process did not run
        with pytest.raises((Unavailable, IndexError)):
            reads(topic)
        assert not leader.replica.leading
        eventually(lambda: leader.serves)
        assert group.stepped_down == [1]
        assert reads(topic) is leader, "no other broker was elected"


def test_a_read_from_before_a_new_epoch_does_not_enter_the_cache(tmp_path, monkeypatch):
    """The log may be truncated and written again while a native thread reads it."""
    read_frames = serving._read_frames
    with replicas(tmp_path, 3) as group:
        settle(group)
        send(group.leader, "a")
        settle(group)
        leader = group.leader
        offset = leader.readable_end - 1

        def read(epoch):
            leader.host.cache.drop(leader._cache_key)

            def meanwhile(*arguments):
                leader.replica.highest_epoch += epoch
                return read_frames(*arguments)

            with monkeypatch.context() as patched:
                patched.setattr(serving, "_read_frames", meanwhile)
                return leader.serving.frames(offset, 1_000)

        found = read(0)
        assert found, "the first read is from the file"
        assert leader.serving.frames(offset, 1_000) == found, "the second read is from memory"
        assert read(1) is None
        assert leader.host.cache.frames.find(leader._cache_key, offset) is None


class Caller:
    """The closed connection of a broker that no longer waits."""

    def gone(self) -> bool:
        return True

    def watch(self, on_gone):
        return lambda: None


def test_a_fetch_whose_sender_has_gone_is_ignored(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        host = group.hosts[1]
        book = group.leader.replica.in_sync
        request = ReplicaFetchRequest(
            CLUSTER, 2, 9, "store-2", 1, 1, 0, 1, [AskedPartition(TOPIC_ID, 0, None, 1, 1, 1, 1, 1, 0)], []
        )
        host.replication.serve(encode(request), Caller())
        assert book.joiner(2) == (1, "store-2"), "incarnation 9 of the fetch does not count"


def test_leases_a_new_leader_has_not_yet_written_end_by_its_own_clock(tmp_path, monkeypatch):
    with replicas(tmp_path, 3, lag_ms=HOUR_MS) as group:
        settle(group)
        send(group.leader, "a")
        settle(group)
        first, second = group.partition(1), group.partition(2)
        ahead_ms = first.host.clock.now_ms() + HOUR_MS
        gate, append = SimpleQueue(), second.log.append

        def waiting(batches):
            gate.get()
            gate.put(None)  # once open, it stays so
            return append(batches)

        monkeypatch.setattr(second.log, "append", waiting)
        start = first.log.log_start_offset
        first.append_group_record("g", GroupStart(start, ahead_ms))
        message = first.high_watermark - 1
        first.append_group_record("g", Grant(((message, message + 1, 1),), message + 1, ahead_ms, ahead_ms + 30_000))
        eventually(lambda: second.replica.next_offset == first.replica.next_offset)
        group.elect(2)
        gate.put(None)
        eventually(lambda: second.serves)
        (span,) = second.delivery["g"].spans()
        assert span.available_at_ms <= second.host.clock.now_ms() + 30_000


def test_a_snapshot_has_the_records_a_new_leader_had_not_yet_written(tmp_path, monkeypatch):
    with replicas(tmp_path, 3, lag_ms=HOUR_MS) as group:
        settle(group)
        first, second = group.partition(1), group.partition(2)
        gate, append = SimpleQueue(), second.log.append

        def waiting(batches):
            gate.get()
            gate.put(None)  # once open, it stays so
            return append(batches)

        monkeypatch.setattr(second.log, "append", waiting)
        first.append_group_record("g", GroupStart(0, first.host.clock.now_ms()))
        eventually(lambda: second.replica.next_offset == first.replica.next_offset)
        group.elect(2)
        eventually(lambda: second.replica.leading)
        second.retention.save_state()
        gate.put(None)
        eventually(lambda: second.serves)
        second.retention._save()  # a kill may follow at once
        if (saved := second.state_file.load()) is not None and saved[0].applied >= second.replica.next_offset:
            assert [each.group for each in saved[0].groups] == ["g"]
        second.retention.save_state()
        saved = second.state_file.load()
        assert saved is not None
        assert [each.group for each in saved[0].groups] == ["g"]


def test_followers_drop_segments_only_after_retention_on_their_leader(tmp_path):
    with replicas(tmp_path, 3) as group:
        eventually(lambda: group.leader.serves)
        for text in ("a", "b", "c"):
            send(group.leader, text)
            eventually(group.agree)
            for partition in group.partitions():
                partition.log.roll()
        for partition in group.partitions():
            partition.retention.retain(None, 1, HOUR_MS)
            if partition is not group.leader:
                assert partition.log.log_start_offset in (0, group.leader.log.log_start_offset)
        start = group.leader.log.log_start_offset
        assert start > 0
        eventually(lambda: {partition.log.log_start_offset for partition in group.partitions()} == {start})
        for partition in group.partitions():
            partition.retention.retain(None, 1, HOUR_MS)
            assert partition.log.base_offset == start
