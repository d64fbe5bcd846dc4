"""Transactions on the event loop and on native threads: the same order, answers and faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gevent
import pytest
from support.disk_paces import FastDisk, SlowDisk
from support.replicas import Group, eventually, replicas

from portalmq.broker.partition.disk_pace import SMALL_MESSAGES
from portalmq.broker.partition.partition import PAUSED_MS, Partition
from portalmq.broker.storage.batch import Batch, BatchKind, Record
from portalmq.broker.storage.errors import DiskFull, StorageFault
from portalmq.broker.storage.log import Log
from portalmq.errors import NotLeader, StorageFull, Unavailable


@contextmanager
def on_disk(path: Path, disk: Callable[[], SlowDisk | FastDisk], brokers: int = 1) -> Iterator[Group]:
    with replicas(path, brokers) as group:
        for host in group.hosts.values():
            host.disk_pace = disk()
        eventually(lambda: group.leader.serves and group.leader._writer.is_idle)
        yield group


def on_loop(group: Group) -> int:
    pace = group.hosts[group.leader.host.broker_id].disk_pace
    return pace.on_loop if isinstance(pace, FastDisk) else 0


def sent(partition: Partition, *values: bytes) -> tuple[int, int]:
    return partition.append(tuple([Record(value) for value in values]), sum([len(value) for value in values]))


def stored(partition: Partition) -> list[bytes]:
    batches = partition.log.read(0)
    return [record.value for batch in batches if batch.kind == BatchKind.MESSAGES for record in batch.records]


def test_small_transactions_are_written_on_the_event_loop_and_large_ones_are_not(tmp_path):
    with on_disk(tmp_path, FastDisk) as group:
        before = on_loop(group)
        sent(group.leader, b"small")
        assert on_loop(group) == before + 1
        sent(group.leader, *[b"x"] * (SMALL_MESSAGES + 1))
        assert on_loop(group) == before + 1
        assert len(stored(group.leader)) == SMALL_MESSAGES + 2


def test_requests_of_the_same_turn_share_a_transaction(tmp_path, monkeypatch):
    with on_disk(tmp_path, FastDisk) as group:
        transactions: list[int] = []
        append = group.leader.log.append_at_once

        def counted(batches: list[Batch]) -> bool:
            transactions.append(len(batches))
            return append(batches)

        monkeypatch.setattr(group.leader.log, "append_at_once", counted)
        sends = [gevent.spawn(sent, group.leader, b"x") for _ in range(16)]
        gevent.joinall(sends, raise_error=True)
        assert transactions == [16]


def test_partitions_that_write_at_the_same_time_do_so_on_native_threads(tmp_path):
    with on_disk(tmp_path, FastDisk) as group:
        pace, before = group.leader.host.disk_pace, on_loop(group)
        pace.writers += 1
        sent(group.leader, b"beside another")
        assert on_loop(group) == before
        pace.writers -= 1
        sent(group.leader, b"alone")
        assert on_loop(group) == before + 1
        eventually(lambda: pace.writers == 0)
        assert stored(group.leader) == [b"beside another", b"alone"]


def test_a_commit_that_would_wait_for_another_change_goes_to_a_native_thread(tmp_path):
    with on_disk(tmp_path, FastDisk) as group:
        lock = group.leader.log._writing
        assert lock.try_acquire()
        before = on_loop(group)
        send = gevent.spawn(sent, group.leader, b"x")
        eventually(lambda: on_loop(group) == before + 1)
        assert not send.ready()
        lock.__exit__()
        send.get(timeout=60)
        assert stored(group.leader) == [b"x"]


@pytest.mark.parametrize("disk", [SlowDisk, FastDisk])
def test_what_the_disk_has_no_room_for_is_refused_and_the_next_is_stored(tmp_path, monkeypatch, disk):
    with on_disk(tmp_path, disk) as group:
        sent(group.leader, b"before")

        def refused(log: Log, batches: list[Batch], *, waits: bool = True) -> bool:
            raise DiskFull("no room")

        with monkeypatch.context() as patch:
            patch.setattr(Log, "_append", refused)
            with pytest.raises(StorageFull) as refusal:
                sent(group.leader, b"refused")
        assert refusal.value.outcome == "not_applied"
        eventually(lambda: group.leader.serves and group.leader._writer.is_idle)
        sent(group.leader, b"after")
        assert stored(group.leader) == [b"before", b"after"]
        assert (on_loop(group) > 0) == (disk is FastDisk)


@pytest.mark.parametrize("disk", [SlowDisk, FastDisk])
def test_a_fault_ends_the_broker_and_leaves_the_outcome_unknown(tmp_path, monkeypatch, disk):
    with on_disk(tmp_path, disk) as group:

        def failed(log: Log, batches: list[Batch], *, waits: bool = True) -> bool:
            raise StorageFault("fsync said no")

        monkeypatch.setattr(Log, "_append", failed)
        with pytest.raises(Unavailable) as fault:
            sent(group.leader, b"x")
        assert fault.value.outcome == "unknown"
        assert str(group.hosts[1].faults.pop()) == "fsync said no"


def test_followers_are_sent_a_batch_before_the_event_loop_waits_for_its_commit(tmp_path, monkeypatch):
    with on_disk(tmp_path, FastDisk, 3) as group:
        leader = group.leader
        sent(leader, b"first")
        eventually(lambda: len(leader.serving.parked) == 2)
        sent_ahead: list[bool] = []
        append = leader.log.append_at_once

        def noted(batches: list[Batch]) -> bool:
            sent_ahead.append(leader.serving.sent_end == batches[-1].end_offset)
            return append(batches)

        monkeypatch.setattr(leader.log, "append_at_once", noted)
        sent(leader, b"second")
        assert sent_ahead == [True]
        eventually(lambda: all(stored(replica) == [b"first", b"second"] for replica in group.partitions()))


def test_a_leader_whose_event_loop_stood_still_in_a_commit_answers_nothing_as_if_it_still_led(tmp_path, monkeypatch):
    with on_disk(tmp_path, FastDisk, 3) as group:
        leader = group.leader
        append = leader.log.append_at_once

        def stalled(batches: list[Batch]) -> bool:
            group.clock._lived_s += 2 * PAUSED_MS / 1000
            return append(batches)

        with monkeypatch.context() as patch:
            patch.setattr(leader.log, "append_at_once", stalled)
            with pytest.raises(NotLeader) as moved:
                sent(leader, b"x")
        assert moved.value.outcome == "unknown"
