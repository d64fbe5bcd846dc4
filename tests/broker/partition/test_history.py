"""The life of a message and the past of a group on several replicas: over kills and fail-overs, and as a follower that
is cut off knows them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.replicas import Group, eventually, replicas, send

from portalmq.broker.core.queue.records import Ack, Compact, Extend, Grant, GroupStart, Nack
from portalmq.broker.partition import history, past
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.past import PastGroups
from portalmq.broker.storage.batch import BatchKind
from portalmq.errors import MessageNotFound, OffsetOutOfRange, Unavailable


def write(partition: Partition, *records: Any, group: str = "g") -> None:
    for record in records:
        partition.append_group_record(group, record).wait()


def told(partition: Partition, offset: int) -> list[tuple[str, int | None, int | None]]:
    return [(each.event, each.broker, each.leader_epoch) for each in history.trace(partition, offset).biography.events]


def serve(group: Group, broker_id: int) -> Partition:
    group.elect(broker_id)
    eventually(lambda: group.leader.serves)
    return group.leader


def test_each_replica_tells_the_same_life_over_a_kill_and_a_fail_over(tmp_path: Path) -> None:
    with replicas(tmp_path, 3, least=2) as group:
        eventually(lambda: group.leader.serves)
        leader = group.leader
        now_ms = leader.host.clock.now_ms()
        offset, _ = send(leader, "a")
        message = (offset, offset + 1)
        write(leader, GroupStart(0, now_ms), Grant(((*message, 1),), message[1], now_ms, now_ms + 60_000, "ann"))
        group.stop(1, saves=False)
        leader = serve(group, 2)
        write(leader, Nack(((*message, now_ms),), now_ms + 1, "no"))
        group.start(1, 2)
        leader = serve(group, 3)
        write(leader, Grant(((*message, 2),), message[1], now_ms, now_ms + 60_000, "bob"), Ack((message,), now_ms + 2))
        eventually(group.agree)
        life = [
            ("appended", 1, 1),
            ("delivered", 1, 1),
            ("nacked", 2, 2),
            ("delivered", 3, 3),
            ("acked", 3, 3),
        ]
        for partition in group.partitions():
            assert told(partition, offset) == life
            found = history.trace(partition, offset)
            assert (found.as_of.is_leader, found.as_of.broker) == (partition is leader, partition.host.broker_id)
            holders = [1, 2, 3] if partition is leader else [partition.host.broker_id]
            assert found.replicas.holders == holders


def test_a_follower_that_is_cut_off_tells_no_more_than_it_knows(tmp_path: Path) -> None:
    with replicas(tmp_path, 3, least=2) as group:
        eventually(lambda: group.leader.serves)
        leader, follower = group.leader, group.partition(3)
        now_ms = leader.host.clock.now_ms()
        offset, _ = send(leader, "a")
        message = (offset, offset + 1)
        # by the clocks, this lease runs out: but the follower cannot know that it was not extended
        write(leader, GroupStart(0, now_ms))
        write(leader, Grant(((*message, 1),), message[1], now_ms, now_ms + 3_600_000, "ann"))
        lease_ms = 0
        while lease_ms <= leader.replica.last_timestamp_ms:
            lease_ms = leader.replica.last_timestamp_ms + 500
            write(leader, Extend((message,), lease_ms, now_ms))
        eventually(lambda: follower.high_watermark == leader.high_watermark)
        group.cut(3)
        eventually(lambda: leader.host.clock.now_ms() > lease_ms)
        extended = leader.append_group_record("g", Extend((message,), lease_ms + 60_000, now_ms))
        eventually(lambda: group.state.isr == (1, 2))
        extended.wait()
        known = [event for event, *_ in told(follower, offset)]
        assert set(known[2:]) == {"extended"}
        assert [event for event, *_ in told(leader, offset)] == [*known, "extended"]
        later, _ = send(leader, "b")
        with pytest.raises(Unavailable):
            history.trace(follower, later)
        group.mend(3)


def test_the_past_is_the_same_on_all_replicas(tmp_path: Path) -> None:
    with replicas(tmp_path, 2) as group:
        eventually(lambda: group.leader.serves)
        leader = group.leader
        now_ms = leader.host.clock.now_ms()
        offsets = [send(leader, str(number))[0] for number in range(4)]
        grant = Grant(((offsets[0], offsets[-1] + 1, 1),), offsets[-1] + 1, now_ms, now_ms + 60_000)
        write(leader, GroupStart(0, now_ms), grant)
        times = []
        for offset in offsets:
            write(leader, Ack(((offset, offset + 1),), now_ms))
            times.append(leader.replica.last_timestamp_ms)
            eventually(lambda: leader.host.clock.wall_ms() > times[-1])
        eventually(group.agree)
        for partition in group.partitions():
            groups = PastGroups()
            left = [groups.view(partition, "g", at_ms).groups.delivery["g"].outstanding for at_ms in times]
            assert left == [3, 2, 1, 0]


def test_a_past_that_takes_long_to_read_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "SCAN_OFFSETS", 16)
    monkeypatch.setattr(past, "THREAD_WITHIN_S", 0.0)
    with replicas(tmp_path, 1) as group:
        eventually(lambda: group.leader.serves)
        leader = group.leader
        for number in range(200):
            leader.append_group_record("g", Grant((), number, 0, 0), is_soft=True)
        write(leader, GroupStart(0, 0), Grant((), 2_999, 0, 0))
        groups, tries = PastGroups(), 0
        while True:
            tries += 1
            with suppress(Unavailable):
                view = groups.view(leader, "g", leader.host.clock.wall_ms(), until=0.0)
                break
        assert view.groups.delivery["g"].next == 2_999
        assert tries > 3


def test_what_retention_has_removed_is_out_of_reach(tmp_path: Path) -> None:
    with replicas(tmp_path, 1, segment_bytes=16 * 1024) as group:
        eventually(lambda: group.leader.serves)
        leader = group.leader
        now_ms = leader.host.clock.now_ms()
        offset, _ = send(leader, "first")
        end = offset + 1
        write(leader, GroupStart(0, now_ms), Grant(((offset, end, 1),), end, now_ms, now_ms + 60_000))
        before_ms = leader.replica.last_timestamp_ms
        eventually(lambda: leader.host.clock.wall_ms() > before_ms)
        write(leader, Ack(((offset, end),), now_ms))
        for _ in range(8):
            last, _ = send(leader, "x" * 10_000)
        write(leader, Grant((), last + 1, now_ms, now_ms))
        after_ms = leader.replica.last_timestamp_ms
        eventually(lambda: leader.host.clock.wall_ms() > after_ms)
        assert PastGroups().view(leader, "g", before_ms).groups.delivery["g"].outstanding == 1
        leader.retention.purge(last)
        leader.retention.retain(None, None, 0)
        assert leader.log.base_offset > offset
        with pytest.raises(OffsetOutOfRange):
            PastGroups().view(leader, "g", before_ms)
        with pytest.raises(MessageNotFound):
            history.trace(leader, offset)
        assert PastGroups().view(leader, "g", leader.host.clock.wall_ms()).groups.delivery["g"].outstanding == 0


@pytest.mark.parametrize("drops_files", [False, True])
def test_what_was_asked_before_a_purge_tells_nothing_of_an_earlier_time(tmp_path: Path, drops_files: bool) -> None:
    with replicas(tmp_path, 1, segment_bytes=16 * 1024) as group:
        eventually(lambda: group.leader.serves)
        leader = group.leader
        now_ms = leader.host.clock.now_ms()
        offset, _ = send(leader, "first")
        end = offset + 1
        write(leader, GroupStart(0, now_ms), Grant(((offset, end, 1),), end, now_ms, now_ms + 60_000))
        before_ms = leader.replica.last_timestamp_ms
        eventually(lambda: leader.host.clock.wall_ms() > before_ms)
        write(leader, Ack(((offset, end),), now_ms))
        for _ in range(8 * drops_files):
            end = send(leader, "x" * 10_000)[0] + 1
        write(leader, Grant((), end + 1, now_ms, now_ms))
        after_ms = leader.replica.last_timestamp_ms
        eventually(lambda: leader.host.clock.wall_ms() > after_ms)
        groups = PastGroups()
        kept = groups.view(leader, "g", after_ms)
        assert kept.groups.delivery["g"].outstanding == 0
        leader.retention.purge(kept.high_watermark)
        if drops_files:
            leader.retention.retain(None, None, 0)
        assert leader.log.log_start_offset > offset
        assert (leader.log.base_offset > offset) == drops_files
        for past_groups in (groups, PastGroups()):
            with pytest.raises(OffsetOutOfRange):
                past_groups.view(leader, "g", before_ms)


def test_a_group_that_began_in_records_that_are_gone_is_told_by_the_state_after_them(tmp_path: Path) -> None:
    with replicas(tmp_path, 1, segment_bytes=16 * 1024) as group:
        eventually(lambda: group.leader.serves)
        leader = group.leader
        now_ms = leader.host.clock.now_ms()
        first, _ = send(leader, "x" * 10_000)
        before_ms = leader.replica.last_timestamp_ms
        eventually(lambda: leader.host.clock.wall_ms() > before_ms)
        groups = PastGroups()
        assert "g" not in groups.view(leader, "g", before_ms).groups.delivery
        write(leader, GroupStart(0, now_ms))
        last = [send(leader, "x" * 10_000)[0] for _ in range(8)][-1]
        write(leader, Grant(((last, last + 1, 1),), last + 1, now_ms, now_ms + 60_000))
        leader.retention.purge(last)
        leader.retention.retain(None, None, 0)
        assert leader.log.base_offset > first
        at_ms = leader.replica.last_timestamp_ms
        assert groups.view(leader, "g", at_ms).groups.delivery["g"].outstanding == 1


def test_compaction_says_what_it_hides(tmp_path: Path) -> None:
    with replicas(tmp_path, 1) as group:
        eventually(lambda: group.leader.serves)
        leader = group.leader
        now_ms = leader.host.clock.now_ms()
        offset, _ = send(leader, "a")
        write(leader, GroupStart(0, now_ms), Grant(((offset, offset + 1, 1),), offset + 1, now_ms, now_ms + 60_000))
        before_ms = leader.replica.last_timestamp_ms
        assert history.trace(leader, offset).incomplete_below is None
        eventually(lambda: leader.host.clock.wall_ms() > before_ms)
        end = leader.replica.next_offset
        leader.append_control(BatchKind.COMPACT, msgspec.msgpack.encode(Compact(end, 0))).wait()
        leader.groups.compacted = end
        assert history.trace(leader, offset).incomplete_below == end
        with pytest.raises(OffsetOutOfRange):  # the message was unfinished, and may have been removed
            PastGroups().view(leader, "g", before_ms)
