"""What the epochs of many replicas cost: one fsync for all that begin at a time, and nothing in the files of a replica
alone before its first record."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import gevent
from support.replicas import TOPIC_ID, eventually, replicas, send, values

from portalmq.broker.core.replica.events import RememberEpoch, Truncate
from portalmq.broker.partition.action_queue import ActionQueue, EpochWriter
from portalmq.broker.partition.native import NativeThreads
from portalmq.broker.storage.epochs import EpochFile, Key
from portalmq.broker.storage.errors import DiskFull


class CountedEpochFile(EpochFile):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.saves: list[dict[Key, int]] = []
        self.is_full = False

    def save(self, epochs: dict[Key, int]) -> None:
        self.saves.append(dict(epochs))
        if self.is_full:
            raise DiskFull("no room")
        super().save(epochs)


def test_epochs_that_wait_for_the_disk_share_a_transaction(tmp_path):
    epochs = CountedEpochFile(tmp_path)
    writer = EpochWriter(NativeThreads(2), epochs)
    results = [gevent.spawn(writer.save, ("t", number), 7) for number in range(300)]
    gevent.joinall(results, raise_error=True)
    assert [each.value for each in results] == [None] * 300
    assert len(epochs.saves) <= 2
    assert [EpochFile(tmp_path).highest(("t", number)) for number in range(300)] == [7] * 300


def test_all_epochs_of_a_transaction_that_failed_are_saved_again(tmp_path):
    epochs = CountedEpochFile(tmp_path)
    writer = EpochWriter(NativeThreads(2), epochs)
    epochs.is_full = True
    results = [gevent.spawn(writer.save, ("t", number), 7) for number in range(3)]
    gevent.joinall(results, raise_error=True)
    assert all(isinstance(each.value, DiskFull) for each in results)
    epochs.is_full = False
    assert writer.save(("t", 1), 7) is None
    assert [epochs.highest(("t", number)) for number in range(3)] == [-1, 7, -1]


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_replica_alone_that_starts_again_serves_and_writes_to_its_files_with_the_first_record(tmp_path):
    with replicas(tmp_path, 1) as group:
        eventually(lambda: group.leader.serves)
        send(group.leader, "a")
        directory = group.leader.log.directory
        group.stop(1)
        before = content(directory)
        partition = group.start(1, incarnation=2)
        group.elect(1)
        eventually(lambda: partition.serves)
        partition.retention.save_state()
        assert content(directory) == before
        assert EpochFile(tmp_path / "1").highest((TOPIC_ID, 0)) == 2
        assert values(partition) == ["a"]
        send(partition, "b")
        assert values(partition) == ["a", "b"]
        assert [epoch for epoch, _ in partition.replica.epochs] == [1, 2]


def test_a_snapshot_in_the_log_of_a_replica_alone_has_the_epoch_that_it_is_of(tmp_path):
    """The STATE record is the first of the epoch: its fold would else lack the start of it, which is before it."""
    with replicas(tmp_path, 1) as group:
        eventually(lambda: group.leader.serves)
        send(group.leader, "a")
        group.stop(1)
        partition = group.start(1, incarnation=2)
        group.elect(1)
        eventually(lambda: partition.serves)
        partition.retention.write_state().wait()
        epochs = partition.replica.epochs
        assert [epoch for epoch, _ in epochs] == [1, 2]
        group.stop(1, saves=False)
        partition.state_file.path.unlink()
        assert group.start(1, incarnation=3).replica.epochs == epochs


def test_a_replica_alone_does_not_serve_before_its_epoch_is_on_disk(tmp_path, monkeypatch):
    def full(epochs: EpochFile, seen: dict[Key, int]) -> None:
        raise DiskFull("no room")

    with replicas(tmp_path, 1) as group:
        eventually(lambda: group.leader.serves)
        send(group.leader, "a")
        group.stop(1)
        with monkeypatch.context() as patch:
            patch.setattr(EpochFile, "save", full)
            partition = group.start(1, incarnation=2)
            group.elect(1)
            eventually(lambda: partition.action_queue.remembering is not None)
            assert partition.replica.leading
            assert not partition.serves
        eventually(lambda: partition.serves)


def test_a_replica_that_is_closed_before_its_epoch_is_on_disk_does_nothing_more(tmp_path, monkeypatch):
    """It could forget the epoch, and another replica of the partition may be open in its place."""
    monkeypatch.setattr("portalmq.broker.partition.action_queue.REMEMBER_AGAIN_S", 0)
    performed = list[object]()

    def full(key: Key, epoch: int) -> DiskFull:
        replica.closed = True
        return DiskFull("no room")

    replica, epochs = SimpleNamespace(closed=False, topic_id=TOPIC_ID, number=0), SimpleNamespace(save=full)
    queue = ActionQueue(replica, epochs, performed.append, lambda: performed.append("serves"))
    queue.performing, queue.remembering, queue._actions = True, RememberEpoch(2), [Truncate(3)]
    queue._remember(queue.remembering)
    queue.add([Truncate(2)])
    assert not performed


def test_a_replica_alone_that_was_killed_begins_its_epoch_at_once(tmp_path):
    """It does not know that its last records are committed: what was saved may be a second old."""
    with replicas(tmp_path, 1) as group:
        eventually(lambda: group.leader.serves)
        send(group.leader, "a")
        group.leader.retention.save_state()
        send(group.leader, "b")
        group.stop(1, saves=False)
        partition = group.start(1, incarnation=2)
        group.elect(1)
        eventually(lambda: partition.serves)
        assert [epoch for epoch, _ in partition.replica.epochs] == [1, 2]
        assert values(partition) == ["a", "b"]
