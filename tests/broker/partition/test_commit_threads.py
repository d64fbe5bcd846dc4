"""Transactions on the event loop and on native threads: the same order, answers and faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import apsw
import gevent
import pytest
from support.disk_paces import FastDisk, SlowDisk
from support.replicas import Group, eventually, replicas

from portalmq.broker.partition.disk_pace import SMALL_MESSAGES, DiskPace
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


def test_a_call_that_is_alone_commits_without_a_change_of_greenlets(tmp_path):
    with on_disk(tmp_path, FastDisk) as group:
        sent(group.leader, b"the first", b"alone")
        eventually(lambda: group.leader._writer.is_idle)
        switched: list[bool] = []
        gevent.get_hub().loop.run_callback(switched.append, True)
        sent(group.leader, b"something else is ready to run")
        assert switched
        eventually(lambda: group.leader._writer.is_idle)
        before = on_loop(group)
        beside = gevent.spawn_later(0, switched.append, False)
        sent(group.leader, b"nothing else is")
        assert on_loop(group) == before + 1
        assert switched == [True]
        assert group.leader._writer.is_idle
        beside.join(timeout=60)
        sent(group.leader, b"the last")
        assert stored(group.leader)[-2:] == [b"nothing else is", b"the last"]


def test_requests_of_the_same_turn_share_a_transaction(tmp_path, monkeypatch):
    with on_disk(tmp_path, FastDisk) as group:
        sent(group.leader, b"begins the epoch")
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


def test_a_commit_that_would_wait_for_another_change_goes_to_a_native_thread(tmp_path, monkeypatch):
    with on_disk(tmp_path, FastDisk) as group:
        tried: list[bool] = []
        append = group.leader.log.append_at_once

        def noted(batches: list[Batch]) -> bool:
            tried.append(append(batches))
            return tried[-1]

        monkeypatch.setattr(group.leader.log, "append_at_once", noted)
        lock = group.leader.log._writing
        assert lock.try_acquire()
        before = on_loop(group)
        send = gevent.spawn(sent, group.leader, b"x")
        eventually(lambda: tried)
        assert not send.ready()
        lock.__exit__()
        send.get(timeout=60)
        assert stored(group.leader) == [b"x"]
        assert tried == [False]
        assert on_loop(group) == before, "what wrote nothing is no sample of the disk's pace"


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


class MeasuredDisk(DiskPace):
    """Keep the samples; `fast` decides the thread."""

    fast = False

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[tuple[float, bool]] = []

    def is_fast(self, now_s: float) -> bool:
        return self.fast

    def committed(self, seconds: float, now_s: float, *, on_loop: bool) -> None:
        self.samples.append((seconds, on_loop))


@pytest.mark.parametrize("fast", [False, True])
def test_only_commits_are_samples_of_the_pace(tmp_path, monkeypatch, fast):
    with on_disk(tmp_path, SlowDisk) as group:
        pace = group.leader.host.disk_pace = MeasuredDisk()
        pace.fast = fast

        def refused(log: Log, batches: list[Batch], *, waits: bool = True) -> bool:
            raise DiskFull("no room")

        with monkeypatch.context() as patch:
            patch.setattr(Log, "_append", refused)
            with pytest.raises(StorageFull):
                sent(group.leader, b"refused")
        assert pace.samples == []
        eventually(lambda: group.leader.serves and group.leader._writer.is_idle)
        sent(group.leader, b"written")
        assert {on_loop for _, on_loop in pace.samples} == {fast}


def test_a_sample_is_the_time_of_its_own_commit(tmp_path, monkeypatch):
    """Another thread may start a new segment between the append and the look at its time."""
    with on_disk(tmp_path, SlowDisk) as group:
        pace = group.leader.host.disk_pace = MeasuredDisk()
        log = group.leader.log
        append = log.append

        def then_rolled(batches: list[Batch]) -> None:
            append(batches)
            log.roll()

        monkeypatch.setattr(log, "append", then_rolled)
        sent(group.leader, b"x")
        assert all(seconds > 0 for seconds, _ in pace.samples)


def test_a_checkpoint_that_a_foreign_reader_holds_up_is_left_to_the_next_append(tmp_path, monkeypatch):
    monkeypatch.setattr("portalmq.broker.storage.log.WAL_BYTES_DUE", 1)
    with on_disk(tmp_path, FastDisk) as group:
        log, pace = group.leader.log, group.leader.host.disk_pace
        with closing(apsw.Connection(str(log._active.path), flags=apsw.SQLITE_OPEN_READONLY)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM batches").fetchall()
            sent(group.leader, b"one")
            eventually(lambda: group.leader._writer.is_idle)
            assert log.checkpoint_due
            assert pace.writers == 0
        sent(group.leader, b"two")
        eventually(lambda: group.leader._writer.is_idle)
        assert not log.checkpoint_due


def test_a_partition_that_checkpoints_is_no_writer(tmp_path, monkeypatch):
    monkeypatch.setattr("portalmq.broker.storage.log.WAL_BYTES_DUE", 1)
    with on_disk(tmp_path, SlowDisk) as group:
        log, pace = group.leader.log, group.leader.host.disk_pace
        writers: list[int] = []
        checkpoint = log.checkpoint

        def noted() -> None:
            writers.append(pace.writers)
            checkpoint()

        monkeypatch.setattr(log, "checkpoint", noted)
        sent(group.leader, b"x")
        eventually(lambda: writers)
        assert set(writers) == {0}


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


def test_a_leader_with_followers_writes_on_a_native_thread_and_they_on_the_event_loop(tmp_path):
    with on_disk(tmp_path, FastDisk, 3) as group:
        sent(group.leader, b"first")
        eventually(lambda: all(stored(replica) == [b"first"] for replica in group.partitions()))
        paces = {replica: replica.host.disk_pace for replica in group.partitions()}
        before = {replica: pace.on_loop for replica, pace in paces.items()}
        sent(group.leader, b"second")
        eventually(lambda: all(stored(replica) == [b"first", b"second"] for replica in group.partitions()))
        assert {replica for replica, pace in paces.items() if pace.on_loop > before[replica]} == (
            set(group.partitions()) - {group.leader}
        )


def test_a_leader_whose_event_loop_stood_still_in_a_commit_answers_nothing_as_if_it_still_led(tmp_path, monkeypatch):
    with on_disk(tmp_path, FastDisk, 3) as group:
        leader = group.leader
        leader._writer.has_followers = False  # as if it needed its event loop for nothing else
        append = leader.log.append_at_once

        def stalled(batches: list[Batch]) -> bool:
            group.clock._lived_s += 2 * PAUSED_MS / 1000
            return append(batches)

        with monkeypatch.context() as patch:
            patch.setattr(leader.log, "append_at_once", stalled)
            with pytest.raises(NotLeader) as moved:
                sent(leader, b"x")
        assert moved.value.outcome == "unknown"
