"""Replicas are compared up to the committed point, and the first batch that differs is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import apsw
import msgspec
import pytest
from support.log_files import Writer, numbered, open_log

from portalmq import wire
from portalmq.broker.storage import digest
from portalmq.broker.storage.batch import BatchKind, Record
from portalmq.broker.storage.compaction import Compaction, CompactionOrder
from portalmq.broker.storage.digest import digest_of
from portalmq.broker.storage.errors import CorruptBatch, OffsetPurged
from portalmq.broker.storage.log import Log
from portalmq.broker.verify.compare import PartitionFinding, ReplicaComparison
from portalmq.errors import Unavailable


class LoggedReplica:
    """A replica that is a log, and a committed point."""

    def __init__(self, broker_id: int, log: Log, high_watermark: int | None = None) -> None:
        self.broker_id = broker_id
        self.log = log
        self.high_watermark = log.end_offset if high_watermark is None else high_watermark
        self.compacted_upto = 0
        self.asked: list[tuple[int, int]] = []
        self.is_down = False
        self.purged_at: int | None = None
        self.listing: Callable[[LoggedReplica], None] = lambda replica: None

    def digest(self, offset: int, below: int, *, batches: bool = False) -> wire.ReplicaDigest:
        if self.is_down:
            raise Unavailable("broker is down")
        if batches:
            self.listing(self)
        if offset == self.purged_at:
            self.purge()
        if below <= offset:
            return self._answer(offset)
        self.asked.append((offset, below))
        try:
            part = digest_of(self.log, offset, below, lists=batches)
        except OffsetPurged:
            return self._answer(offset)
        except CorruptBatch as fault:
            return msgspec.structs.replace(self._answer(fault.offset), fault=str(fault))
        return msgspec.structs.replace(self._answer(part.next_offset), sha256=part.sha256, batches=part.batches)

    def purge(self) -> None:
        self.log.advance_log_start(20)
        self.log.seal(20)
        self.log.drop_segments_below(20)

    def check_file(self, offset: int) -> wire.ReplicaDigest:
        if self.is_down:
            raise Unavailable("broker is down")
        try:
            return self._answer(self.log.check_file(offset))
        except CorruptBatch as fault:
            return msgspec.structs.replace(self._answer(fault.offset), fault=str(fault))

    def _answer(self, offset: int) -> wire.ReplicaDigest:
        log = self.log
        return wire.ReplicaDigest(
            self.broker_id, log.log_start_offset, self.high_watermark, log.end_offset, self.compacted_upto, offset
        )


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "PART_BYTES", 300)
    monkeypatch.setattr(digest, "READ_OFFSETS", 10)


def a_log(directory: Path, values: list[bytes] | None = None, batch: int = 10) -> Log:
    """Sixty messages in batches of ten and in two files."""
    log = open_log(directory)
    writer = Writer(log)
    values = values or numbered(60)
    for at in range(0, len(values), batch):
        if at == 30:
            log.roll()
        writer.put(*values[at : at + batch])
    return log


def three(tmp_path: Path) -> list[LoggedReplica]:
    return [LoggedReplica(number, a_log(tmp_path / str(number))) for number in (1, 2, 3)]


def compared(replicas: list[LoggedReplica], leader: int | None = 1) -> PartitionFinding:
    found = ReplicaComparison("t", 0, replicas, leader=leader).run()
    for replica in replicas:
        replica.log.close()
    return found


def states(found: PartitionFinding) -> list[str]:
    return [each.state for each in found.replicas]


def test_replicas_with_the_same_batches_have_the_same_rolling_hash(tmp_path):
    replicas = three(tmp_path)
    found = compared(replicas)
    assert states(found) == ["same"] * 3
    assert len({each.sha256 for each in found.replicas}) == 1
    assert (found.start, found.committed) == (0, 60)
    assert {each.compared_to for each in found.replicas} == {60}
    assert len(replicas[0].asked) >= 4  # part by part


@pytest.mark.parametrize("changed", [0, 25, 34, 59])
def test_the_first_batch_that_differs_is_named(tmp_path, changed):
    values = numbered(60)
    values[changed] = b"another value"
    replicas = [
        LoggedReplica(1, a_log(tmp_path / "1")),
        LoggedReplica(2, a_log(tmp_path / "2", values)),
        LoggedReplica(3, a_log(tmp_path / "3")),
    ]
    found = compared(replicas)
    assert states(found) == ["same", "differs", "same"]
    assert found.replicas[1].first_difference == changed // 10 * 10
    assert f"offset {changed // 10 * 10} " in found.replicas[1].problem
    assert found.replicas[0].compared_to == found.replicas[2].compared_to == 60


def test_most_replicas_are_right_even_if_the_leader_is_not(tmp_path):
    values = numbered(60)
    values[3] = b"another value"
    replicas = three(tmp_path)
    replicas[0].log.close()
    replicas[0] = LoggedReplica(1, a_log(tmp_path / "other", values))
    assert states(compared(replicas)) == ["differs", "same", "same"]


def test_batches_with_other_borders_differ(tmp_path):
    replicas = [LoggedReplica(1, a_log(tmp_path / "1")), LoggedReplica(2, a_log(tmp_path / "2", batch=15))]
    found = compared(replicas)
    assert states(found) == ["same", "differs"]
    assert found.replicas[1].first_difference == 0


def test_what_is_not_committed_may_differ(tmp_path):
    values = numbered(60)
    values[55] = b"another value"
    replicas = three(tmp_path)
    replicas[2].log.close()
    replicas[2] = LoggedReplica(3, a_log(tmp_path / "other", values))
    for replica in replicas:
        replica.high_watermark = 50
    assert states(compared(replicas)) == ["same"] * 3


def test_a_replica_that_is_behind_is_neither_the_same_nor_different(tmp_path):
    replicas = three(tmp_path)
    replicas[1].log.truncate(40)
    replicas[1].high_watermark = 40
    found = compared(replicas)
    assert states(found) == ["same", "behind", "same"]
    assert found.replicas[1].compared_to == 40


def test_the_end_of_a_former_leader_that_is_to_be_truncated_is_no_difference(tmp_path):
    values = numbered(60)
    values[45] = b"another value"
    replicas = three(tmp_path)
    replicas[2].log.close()
    replicas[2] = LoggedReplica(3, a_log(tmp_path / "other", values), high_watermark=40)
    assert states(compared(replicas)) == ["same", "same", "behind"]


def test_a_broker_that_is_down_leaves_its_replica_unknown(tmp_path):
    replicas = three(tmp_path)
    replicas[2].is_down = True
    found = compared(replicas)
    assert states(found) == ["same", "same", "unknown"]
    assert "down" in found.replicas[2].problem


def test_logs_that_begin_at_different_offsets_are_compared_from_the_last_of_them(tmp_path):
    replicas = three(tmp_path)
    replicas[0].log.advance_log_start(25)
    found = compared(replicas, leader=2)
    assert (found.start, states(found)) == (25, ["unknown", "same", "same"])  # it lacks what the leader has
    replicas = [LoggedReplica(each.broker_id, open_log(tmp_path / str(each.broker_id))) for each in replicas]
    assert states(compared(replicas, leader=1)) == ["same"] * 3  # the others will follow the leader


def test_a_purge_during_the_comparison_moves_it_on(tmp_path):
    replicas = three(tmp_path)
    for replica in replicas:
        replica.log.close()
    replicas = [LoggedReplica(n, a_small_file_log(tmp_path / f"small-{n}")) for n in (1, 2, 3)]
    for replica in replicas:
        replica.purged_at = 10
    found = compared(replicas)
    assert states(found) == ["same"] * 3
    assert len({each.sha256 for each in found.replicas}) == 1


def a_small_file_log(directory: Path, first: bytes = b"message 0") -> Log:
    log = open_log(directory)
    writer = Writer(log)
    for at in range(0, 60, 10):
        writer.put(*[first, *numbered(60)[1:]][at : at + 10])
        log.roll()
    return log


@pytest.mark.parametrize("file", ["sealed", "active"])
def test_a_damaged_batch_is_named(tmp_path, file):
    replicas = three(tmp_path)
    log = replicas[1].log
    log.park()
    at, base = (15, 0) if file == "sealed" else (45, 30)
    with apsw.Connection(str(tmp_path / "2" / f"{base:020d}.sqlite")) as connection:
        connection.execute("UPDATE messages SET value = 'spoilt' WHERE offset = ?", (at,))
    connection.close()
    if file == "sealed":
        log.seal(30)
    found = compared(replicas)
    assert states(found) == ["same", "damaged", "same"]
    assert found.replicas[1].first_difference == at // 10 * 10


def test_replicas_that_are_compacted_differently_are_neither_the_same_nor_different(tmp_path):
    values = [Record(b"value %d" % number, key=b"key %d" % (number % 3)) for number in range(60)]
    replicas = [LoggedReplica(n, a_log(tmp_path / str(n), values)) for n in (1, 2, 3)]
    for replica in replicas:
        Writer(replica.log).put_control(BatchKind.COMPACT, b"")
        replica.high_watermark = 61
        replica.log.seal(30)
        replica.compacted_upto = 30
    for replica in replicas[:1]:
        compact(replica.log, 30)
    found = ReplicaComparison("t", 0, replicas, leader=1).run()
    assert states(found) == ["unknown", "same", "same"]
    assert "compacted" in found.replicas[0].problem
    for replica in replicas[1:]:
        compact(replica.log, 30)
    assert states(compared(replicas)) == ["same"] * 3


def compact(log: Log, upto: int) -> None:
    compaction = Compaction(log, CompactionOrder(upto, 0, 10_000))
    while compaction.step():
        pass
    compaction.close()
    assert compaction.removed


def unlike(directory: Path, changed: int, **more: int) -> LoggedReplica:
    values = numbered(60)
    values[changed] = b"another value"
    return LoggedReplica(int(directory.name), a_log(directory, values), **more)


def test_a_difference_that_cannot_be_named_is_not_forgotten(tmp_path):
    def fails(replica: LoggedReplica) -> None:
        raise Unavailable("busy")

    replicas = [LoggedReplica(1, a_log(tmp_path / "1")), unlike(tmp_path / "2", 5)]
    replicas[0].listing = fails
    found = compared(replicas)
    assert states(found) == ["unknown", "unknown"]
    assert "differs from broker 1" in found.replicas[1].problem


def test_a_tail_that_most_have_and_none_counts_as_committed_is_behind(tmp_path):
    replicas = [
        LoggedReplica(1, a_log(tmp_path / "1")),
        unlike(tmp_path / "2", 45, high_watermark=40),
        unlike(tmp_path / "3", 45, high_watermark=30),
    ]
    found = compared(replicas)
    assert states(found) == ["same", "behind", "behind"]
    assert [each.compared_to for each in found.replicas] == [60, 40, 40]


def test_a_difference_that_is_purged_before_it_is_named_is_unknown(tmp_path):
    first, second = a_small_file_log(tmp_path / "1"), a_small_file_log(tmp_path / "2", b"other")
    replicas = [LoggedReplica(1, first), LoggedReplica(2, second)]
    replicas[1].listing = LoggedReplica.purge
    found = compared(replicas)
    assert states(found) == ["same", "unknown"]
    assert "purged" in found.replicas[1].problem


def test_replicas_of_which_nothing_says_what_is_committed_are_unknown(tmp_path):
    replicas = three(tmp_path)
    for replica in replicas:
        replica.high_watermark = 0
    assert states(compared(replicas)) == ["unknown"] * 3
