"""Compaction of whole partitions: the leader orders it, every replica applies it equally and keeps serving."""

from __future__ import annotations

import threading

import gevent
import msgspec
import pytest
from support.domain import HandClock, running
from support.replicas import contents, eventually, replicas

from portalmq import wire
from portalmq.broker.core.queue.records import Ack, Grant, GroupStart
from portalmq.broker.partition import compaction as compaction_module
from portalmq.broker.partition.compaction import Compactor
from portalmq.broker.storage.batch import HOLE, BatchKind, Record, frame_of, verified_header
from portalmq.errors import PortalMQError, Unavailable
from portalmq.streams.fetch_buffer import _with_offsets

HOUR_MS = 3_600_000
# Of a group whose followers stay in the ISR, however slowly the machine lets them fetch.
NEVER_LATE_MS = 3_600_000


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Make a compaction due as soon as anything is new; only a test starts one."""
    monkeypatch.setattr("portalmq.broker.cluster.maintenance.COMPACT_EVERY_S", 3_600.0)
    monkeypatch.setattr(compaction_module, "DIRTY_BYTES_MIN", 1)
    monkeypatch.setattr(compaction_module, "DIRTY_A_CLEAN", 0)


def put(partition, *pairs, **more):
    records = tuple(Record(value, key=key, **more) for key, value in pairs)
    return partition.append(records, sum(len(record.value) for record in records))


def there(partition):
    """Return offset -> (key, value) of the messages in the files."""
    return {
        offset: (record.key, record.value)
        for batch in partition.log.read(partition.log.log_start_offset)
        for offset, record in enumerate(batch.records, batch.base_offset)
        if record is not HOLE
    }


def rounds(partition, count=3, keys=4):
    for number in range(count):
        put(partition, *[(b"key %d" % key, b"%d" % number) for key in range(keys)])


def latest(partition):
    """Return key -> value after a read of the whole log."""
    return dict(message for _, message in sorted(there(partition).items()))


def is_run(compactor, partition):
    """Run the compaction. Return False where it must be tried again later, as maintenance does."""
    try:
        compactor.compact_if_due(partition, keeps_last=True)
    except PortalMQError:
        return False
    return True


class Everywhere:
    """The compaction of all hosts of a group, run by hand."""

    def __init__(self, group):
        self.group = group
        self.by_host = {}
        self.removed = {}

    def run(self, *broker_ids):
        for broker_id, host in tuple(self.group.hosts.items()):
            if broker_ids and broker_id not in broker_ids:
                continue
            removed = self.removed.setdefault(broker_id, [])
            compactor = self.by_host.setdefault((broker_id, id(host)), Compactor(host, removed.append))
            eventually(lambda compactor=compactor, host=host: is_run(compactor, host.partition))

    def are_alike(self):
        """Return whether every replica has applied the newest order, and all hold the same messages."""
        self.run()
        reached = self.group.leader.groups.compacted
        return (
            reached > 0
            and all(partition.groups.compacted == reached for partition in self.group.partitions())
            and all(partition.log.is_compacted(reached, 0) for partition in self.group.partitions())
            and self.group.agree()
        )


def settle(group):
    eventually(lambda: group.leader.serves and group.agree())


# --- replicas ---------------------------------------------------------------------------------------------------------


def test_all_replicas_compact_alike_and_offsets_stay(tmp_path):
    with replicas(tmp_path, 3, lag_ms=NEVER_LATE_MS) as group:
        settle(group)
        everywhere = Everywhere(group)
        rounds(group.leader)
        before = there(group.leader)
        everywhere.run(1)
        put(group.leader, (b"key 0", b"after"))
        eventually(everywhere.are_alike)
        for partition in group.partitions():
            found = there(partition)
            assert latest(partition) == {b"key %d" % n: b"2" for n in (1, 2, 3)} | {b"key 0": b"after"}
            assert len(found) == 4
            assert found.items() - {max(found): found[max(found)]}.items() <= before.items()
        assert {broker_id: sum(counts) for broker_id, counts in everywhere.removed.items()} == {1: 9, 2: 9, 3: 9}


def test_an_order_of_a_former_leader_is_applied(tmp_path):
    with replicas(tmp_path, 3, lag_ms=NEVER_LATE_MS) as group:
        settle(group)
        everywhere = Everywhere(group)
        rounds(group.leader)
        everywhere.run(1)
        assert len(there(group.partition(1))) == 4
        end = group.partition(1).replica.next_offset
        eventually(lambda: all(partition.high_watermark == end for partition in group.partitions()))
        assert len(there(group.partition(2))) == 12
        group.elect(2)
        eventually(lambda: group.partition(2).serves)
        everywhere.run(2)
        assert len(there(group.partition(2))) == 4
        eventually(everywhere.are_alike)


def test_a_replica_that_is_rebuilt_from_a_compacted_log_equals_the_others(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        everywhere = Everywhere(group)
        rounds(group.leader)
        eventually(everywhere.are_alike)
        rounds(group.leader)
        everywhere.run(1)
        broken = group.partition(3)
        broken.report_damage("reported by the test")
        eventually(lambda: group.partition(3) is not broken)
        eventually(everywhere.are_alike)
        assert contents(group.partition(3)) == contents(group.leader)
        assert len(there(group.partition(3))) == 4


def test_a_replica_that_was_down_applies_the_orders_it_missed(tmp_path):
    with replicas(tmp_path, 3, least=2) as group:
        settle(group)
        everywhere = Everywhere(group)
        rounds(group.leader)
        settle(group)
        group.stop(3)
        eventually(lambda: 3 not in group.state.isr)
        rounds(group.leader)
        everywhere.run(1, 2)
        group.start(3, incarnation=2)
        eventually(everywhere.are_alike)
        assert len(there(group.partition(3))) == 4


def test_a_replica_whose_log_begins_again_compacts_alike(tmp_path):
    with replicas(tmp_path, 3, least=2) as group:
        settle(group)
        everywhere = Everywhere(group)
        group.stop(3)
        eventually(lambda: 3 not in group.state.isr)
        rounds(group.leader, 2)
        group.leader.retention.purge(None)
        rounds(group.leader, 3)
        everywhere.run(1, 2)
        start = group.leader.log.log_start_offset
        assert start > 8
        group.start(3, incarnation=2)
        eventually(everywhere.are_alike)
        assert group.partition(3).log.base_offset == start
        assert len(there(group.partition(3))) == 4
        files = group.partition(3).log
        assert files.messages_before(files.end_offset) - files.messages_before(start) == 4


def test_an_uncommitted_order_is_not_applied(tmp_path):
    with replicas(tmp_path, 2, least=2, lag_ms=NEVER_LATE_MS) as group:
        settle(group)
        rounds(group.leader)
        settle(group)
        group.cut(2)
        everywhere = Everywhere(group)
        ordering = gevent.spawn(everywhere.run, 1)
        eventually(lambda: group.partition(1).groups.compacted)
        Compactor(group.hosts[1]).compact_if_due(group.partition(1), keeps_last=False)
        assert len(there(group.partition(1))) == 12
        group.mend(2)
        ordering.join(60)
        eventually(everywhere.are_alike)
        assert len(there(group.partition(1))) == 4


def test_appends_and_reads_continue_during_a_compaction(tmp_path, monkeypatch):
    stepped, enough, steps = compaction_module._stepped, threading.Event(), []

    def in_the_midst(work):
        """Hold the second step back until the log has grown."""
        steps.append(work)
        assert len(steps) != 2 or enough.wait(60)
        return stepped(work)

    monkeypatch.setattr(compaction_module, "_stepped", in_the_midst)
    with replicas(tmp_path, 2, lag_ms=NEVER_LATE_MS) as group:
        settle(group)
        for _ in range(20):
            rounds(group.leader, keys=50)
        done = gevent.spawn(Everywhere(group).run, 1)
        eventually(lambda: len(steps) == 2)
        sent = 0
        while not done.ready():
            put(group.leader, (b"live", b"%d" % sent))
            sent += 1
            pieces = group.leader.reader.pieces(0, group.leader.high_watermark, 10_000)
            read = [record for piece in pieces for record in piece.records()]
            assert {record.key for record in read} >= {b"key %d" % key for key in range(50)}
            assert read[-1].value == b"%d" % (sent - 1)
            if sent == 6:
                assert len(steps) == 2, "the step is still in progress"
                enough.set()
            gevent.sleep(0)
        done.get()
        assert sent >= 6
        assert len(there(group.leader)) <= 50 + sent


# --- one broker -------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def fixture(tmp_path, clock):
    with running(tmp_path, clock) as it:
        it.broker.create_topic("t", wire.CreateTopic(config={"cleanup": "compact"}))
        yield it


def partition_of(fixture, topic="t"):
    partition = fixture.broker.topics.get(topic).local[0]
    eventually(lambda: partition.serves)
    return partition


def compact(fixture):
    fixture.broker.maintenance.compact()


def test_a_topic_that_deletes_is_not_compacted(fixture):
    fixture.broker.create_topic("plain", wire.CreateTopic())
    partition = partition_of(fixture, "plain")
    rounds(partition)
    compact(fixture)
    assert (len(there(partition)), partition.groups.compacted) == (12, 0)


def test_a_compacted_topic_removes_nothing_by_age_unless_configured(fixture, clock):
    broker = fixture.broker
    assert broker.topics.get("t").state.config.retention_ms is None
    broker.create_topic("both", wire.CreateTopic(config={"cleanup": "compact", "retention_ms": HOUR_MS}))
    assert broker.topics.get("both").state.config.retention_ms == HOUR_MS
    for name, left in (("t", 4), ("both", 0)):
        partition = partition_of(fixture, name)
        rounds(partition)
        compact(fixture)
        clock.advance(24 * 30 * HOUR_MS)
        put(partition, (b"new", b"1"))
        partition.log.roll()
        broker.maintenance.retain()
        assert len(there(partition)) == left + 1, name
    broker.topics.alter("t", wire.AlterTopic(config={"cleanup": "delete"}))
    assert broker.topics.get("t").state.config.retention_ms == wire.TopicConfig().retention_ms
    broker.topics.alter("t", wire.AlterTopic(config={"cleanup": "compact"}))
    assert broker.topics.get("t").state.config.retention_ms is None


def test_a_compaction_is_due_once_as_much_is_new_as_is_left(fixture, monkeypatch):
    partition = partition_of(fixture)
    monkeypatch.setattr(compaction_module, "DIRTY_A_CLEAN", 1.0)
    monkeypatch.setattr(compaction_module, "DIRTY_BYTES_MIN", 200_000)
    rounds(partition, count=2)
    compact(fixture)
    assert partition.groups.compacted == 0, "the log is too small"
    for number in range(20):
        put(partition, *[(b"%d" % key, b"x" * 1_000 + b"%d" % number) for key in range(20)])
    compact(fixture)
    first = partition.groups.compacted
    assert first > 400
    assert len(there(partition)) == 24
    assert b"portalmq_messages_compacted_total 384.0" in fixture.broker.metrics.exposition()
    put(partition, (b"0", b"one more"))
    compact(fixture)
    assert partition.groups.compacted == first, "almost all is clean"


def test_a_slow_log_is_compacted_once_a_day(fixture, clock, monkeypatch):
    monkeypatch.setattr(compaction_module, "DIRTY_BYTES_MIN", 1 << 30)
    partition = partition_of(fixture)
    partition.log.segment_bytes = 1 << 30
    rounds(partition)
    compact(fixture)
    assert len(there(partition)) == 12
    clock.advance(25 * HOUR_MS)
    compact(fixture)
    assert len(there(partition)) == 4
    reached = partition.groups.compacted
    clock.advance(25 * HOUR_MS)
    compact(fixture)
    assert partition.groups.compacted == reached, "nothing is new"


def test_a_tombstone_stays_for_a_day_after_the_first_compaction_that_saw_it(fixture, clock):
    partition = partition_of(fixture)
    put(partition, (b"gone", b"1"), (b"stays", b"1"))
    put(partition, (b"gone", b""))
    clock.advance(1_000)
    rounds(partition, 1)
    compact(fixture)
    assert latest(partition)[b"gone"] == b""
    assert (b"gone", b"1") not in there(partition).values()
    clock.advance(23 * HOUR_MS)
    rounds(partition, 3)
    compact(fixture)
    assert b"gone" in latest(partition)
    clock.advance(2 * HOUR_MS)
    rounds(partition, 6)
    compact(fixture)
    assert b"gone" not in latest(partition)
    assert latest(partition)[b"stays"] == b"1"


def test_compaction_continues_after_a_restart_and_the_order_is_still_known(tmp_path, clock):
    with running(tmp_path, clock) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(config={"cleanup": "compact"}))
        partition = partition_of(fixture)
        rounds(partition)
        compactor = fixture.broker.compactor
        partition.log.seal(partition.high_watermark)
        compactor._order(partition)
        assert len(there(partition)) == 12
        partition.retention.save_state()
    with running(tmp_path, clock) as fixture:
        partition = partition_of(fixture)
        assert partition.groups.compacted > 0
        fixture.broker.compactor.compact_if_due(partition, keeps_last=False)
        assert len(there(partition)) == 4


def test_messages_needed_by_an_open_order_of_the_outbox_stay(fixture, monkeypatch):
    partition = partition_of(fixture)
    rounds(partition)
    needed = sorted(there(partition))[5]
    monkeypatch.setattr(partition.groups, "ordered_from", lambda: needed)
    compact(fixture)
    assert partition.groups.compacted == needed
    compact(fixture)
    assert partition.groups.compacted == needed, "no segment is rolled without need"
    assert len(partition.log.sealed_segments) == 1
    assert sorted(there(partition)) == [*range(needed - 4, needed), *range(needed, 13)]
    monkeypatch.setattr(partition.groups, "ordered_from", lambda: None)
    rounds(partition)
    compact(fixture)
    assert len(there(partition)) == 4


def test_scheduled_messages_wait_and_cancelled_ones_supersede_nothing(fixture, clock):
    partition = partition_of(fixture)
    due_ms = clock.wall_ms() + HOUR_MS
    put(partition, (b"a", b"now"), (b"b", b"now"))
    put(partition, (b"a", b"later"), (b"b", b"cancelled"), deliver_at_ms=due_ms)
    cancelled = max(there(partition))
    partition.groups.cancelled.add(cancelled)
    compact(fixture)
    assert len(there(partition)) == 4
    clock.advance(2 * HOUR_MS)
    rounds(partition, 1)
    compact(fixture)
    assert (b"a", b"now") not in there(partition).values()
    assert {(b"a", b"later"), (b"b", b"now")} <= set(there(partition).values())


def test_the_lag_of_a_group_counts_remaining_messages(fixture):
    partition = partition_of(fixture)
    rounds(partition)
    compact(fixture)
    files = partition.log
    assert files.messages_before(partition.high_watermark) - files.messages_before(0) == 4


def test_browsing_skips_removed_messages(fixture):
    partition = partition_of(fixture)
    rounds(partition)
    compact(fixture)
    settings = {"position": "earliest", "at_ms": None, "wait_ms": 0, "peer": None}
    page = fixture.broker.browser.browse("t", 0, offset=None, limit=3, **settings)
    assert [message.record.value for message in page.messages] == [b"2"] * 3
    rest = fixture.broker.browser.browse("t", 0, offset=page.next_offset, limit=3, **settings)
    assert [message.record.key for message in rest.messages] == [b"key 3"]
    assert rest.next_offset == partition.high_watermark


def test_a_stream_reader_gets_the_remaining_messages(fixture):
    partition = partition_of(fixture)
    put(partition, (b"a", b"1"), (b"b", b"1"), (b"c", b"1"))
    put(partition, (b"a", b"2"), (b"c", b"2"))
    compact(fixture)
    frames = [frame_of(batch) for batch in partition.log.read(0) if batch.kind == BatchKind.MESSAGES]
    heads = [verified_header(frame) for frame in frames]
    read = [_with_offsets(head, frame.body, 0) for frame, head in zip(frames, heads, strict=True)]
    assert [[(offset - heads[0].base_offset, record.key) for offset, record in batch] for batch in read] == [
        [(1, b"b")],
        [(3, b"a"), (4, b"c")],
    ]
    assert _with_offsets(heads[0], frames[0].body, 2) == []


def test_leased_messages_that_are_removed_are_done_for_the_group(fixture, clock):
    partition = partition_of(fixture)
    rounds(partition, 2)
    request = wire.ReceiveRequest(["t"], max_messages=6, visibility_timeout_ms=30_000)
    held = fixture.broker.receive_handler.receive("g", request, None)
    assert len(held) == 6
    compact(fixture)
    assert len(there(partition)) == 4
    clock.advance(30_001)
    again = fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"], max_messages=10), None)
    assert sorted((message.record.key, message.record.value) for message in again) == [
        (b"key %d" % key, b"1") for key in range(4)
    ]
    assert all(fixture.broker.settlement.settle("g", [message.receipt for message in again]))
    assert partition.delivery["g"].outstanding == 0
    assert fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"], wait_ms=0), None) == []
    assert fixture.broker.describe_group("g").lag == 0


def test_the_state_of_groups_outlives_its_records(tmp_path, clock):
    """The first compaction removes their records: the STATE record before its order has the state."""

    def fold_of(partition):
        return msgspec.structs.replace(partition.snapshot(), applied=0, producers=[])

    with running(tmp_path, clock) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(config={"cleanup": "compact"}))
        partition = partition_of(fixture)
        for _ in range(5):
            rounds(partition, 1)
            for message in fixture.broker.receive_handler.receive(
                "g", wire.ReceiveRequest(["t"], max_messages=3), None
            ):
                fixture.broker.settlement.settle("g", [message.receipt])
        held = fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"], max_messages=1), None)
        before = fold_of(partition)
        compact(fixture)
        kinds = [batch.kind for batch in partition.log.read(0)]
        assert kinds.count(BatchKind.BLANK) > 10
        assert BatchKind.ACK not in kinds[: kinds.index(BatchKind.STATE)]
        reached = partition.groups.compacted
        assert fold_of(partition) == msgspec.structs.replace(before, compacted=reached)
    next((tmp_path / "partitions").rglob("state.sqlite")).unlink()
    with running(tmp_path, clock) as fixture:
        partition = partition_of(fixture)
        found = fold_of(partition)
        assert (found.groups, found.compacted) == (before.groups, reached)
        assert fixture.broker.settlement.settle("g", [held[0].receipt]) == [True]


def test_a_rebuilt_replica_has_the_groups_of_a_compacted_log(tmp_path):
    with replicas(tmp_path, 2) as group:
        settle(group)
        everywhere = Everywhere(group)
        leader = group.leader
        leader.append_group_record("g", GroupStart(0, 1)).wait()
        rounds(leader)
        leader.append_group_record("g", Grant(((2, 6, 1),), 6, 1, 1 << 50)).wait()
        leader.append_group_record("g", Ack(((2, 4),), 1)).wait()
        eventually(everywhere.are_alike)
        broken = group.partition(2)
        broken.report_damage("reported by the test")
        eventually(lambda: group.partition(2) is not broken)
        eventually(everywhere.are_alike)
        assert group.partition(2).delivery["g"].snapshot() == leader.delivery["g"].snapshot()
        assert [(span.start, span.end) for span in group.partition(2).delivery["g"].spans()] == [(4, 6)]


def test_receipts_of_removed_messages_are_accepted(fixture):
    partition = partition_of(fixture)
    rounds(partition, 2)
    held = fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"], max_messages=6), None)
    compact(fixture)
    assert all(fixture.broker.settlement.settle("g", [message.receipt for message in held]))
    rest = fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"], max_messages=10), None)
    assert [message.record.key for message in rest] == [b"key 2", b"key 3"]


def test_a_damaged_file_is_reported_and_nothing_is_compacted(fixture, tmp_path):
    partition = partition_of(fixture)
    rounds(partition)
    fixture.broker.compactor._order(partition)
    file = next(iter(sorted((tmp_path / "partitions").rglob("0*.sqlite"))))
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content)
    compact(fixture)
    assert "SHA-256" in partition.fault
    assert file.read_bytes() == content
    assert not fixture.faults


def test_a_full_disk_postpones_a_compaction(fixture):
    partition = partition_of(fixture)
    rounds(partition)
    fixture.disk.is_full = True
    compact(fixture)
    assert len(there(partition)) == 12
    fixture.disk.is_full = False
    compact(fixture)
    assert len(there(partition)) == 4


def test_the_record_of_an_order_has_its_end_offset(fixture):
    partition = partition_of(fixture)
    rounds(partition)
    compact(fixture)
    record = partition.log.newest_control(BatchKind.COMPACT)
    assert compaction_module._decode(record.body).upto == partition.groups.compacted <= record.base_offset


def test_a_partition_that_cannot_commit_now_is_tried_again(fixture, monkeypatch):
    partition = partition_of(fixture)
    rounds(partition)

    def refuse(*_):
        raise Unavailable("not now")

    with monkeypatch.context() as patch:
        patch.setattr(partition, "wait_committed", refuse)
        compact(fixture)
    assert len(there(partition)) == 12
    compact(fixture)
    assert len(there(partition)) == 4
