"""Which messages an order removes: the same on each replica, whichever orders it carried out and whatever it copied."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.log_files import Writer, everything, open_log

from portalmq.broker.core.queue.records import Compact, ranges_of
from portalmq.broker.partition.compaction import _newest_order, _next_compact
from portalmq.broker.storage.batch import HOLE, BatchKind, Record, batch_of_frame, checksum, frame_of, verified_header
from portalmq.broker.storage.compaction import Compaction
from portalmq.compression import compressed

KEPT_MS = 300


class Replicas:
    """Logs with the same records. The first is the leader's and carries out each order at once; `late` carries out
    none before `finish`, and `other` some; `copied` is copied from the leader, within KEPT_MS."""

    def __init__(self, root):
        self.leader, self.late, self.other, self.copied = self.logs = [open_log(root / str(n)) for n in range(4)]
        self.now_ms = self.caught_up_ms = 1_000
        self.sent = {}
        self.cancelled = set()
        self.newest = None

    def wait(self, ms):
        if self.now_ms + ms >= self.caught_up_ms + KEPT_MS:
            self.copy()
        self.now_ms += ms

    def put(self, *records, is_compressed=False):
        batch = Writer(self.leader, at_ms=self.now_ms).messages_batch(records)
        if is_compressed:
            batch = replace(batch, compressed=compressed([record.value for record in records]))
            batch = replace(batch, crc=checksum(batch))
        self.append(batch)
        self.sent.update(enumerate(records, batch.base_offset))

    def put_control(self, kind, body=b"", group=""):
        self.append(Writer(self.leader, at_ms=self.now_ms).control_batch(kind, body, group))

    def append(self, batch):
        for log in self.logs[:3]:
            log.append([batch])

    def order(self, share=1.0, *, by_other=False):
        """Let a leader order a compaction, and carry it out."""
        for log in self.logs[: 3 if by_other else 1 : 2]:
            log.roll()
            log.seal(log.end_offset)
        log = self.other if by_other else self.leader
        reached = self.newest.upto if self.newest else 0
        upto = max(reached + 1, int(share * log.sealed_upto))
        if upto > log.sealed_upto:
            return
        self.newest = _next_compact(log, upto, KEPT_MS)
        self.put_control(BatchKind.STATE, b"all of it")
        self.put_control(BatchKind.COMPACT, msgspec.msgpack.encode(self.newest))
        self.carry_out(self.leader)

    def carry_out(self, log, steps=1_000_000):
        """Carry out the newest order that the log has; no more than so many steps of it."""
        order = _newest_order(log, log.end_offset, ranges_of(list(self.cancelled)))
        if order is None:
            return
        log.roll_below(order.upto)
        log.seal(log.end_offset)
        work = Compaction(log, order)
        while steps and work.step():
            steps -= 1
        work.close()
        assert not steps or log.is_compacted(order.upto, order.tombstones_before_ms)

    def copy(self, batches=1_000_000):
        """Let `copied` fetch that many batches from the leader."""
        if self.copied.end_offset < self.leader.log_start_offset:
            self.copied.reset(*self.leader.replica_start())
        there = self.leader.read_to_copy(self.copied.end_offset, max_bytes=1 << 30, below=self.leader.end_offset)
        frames = [frame_of(batch) for batch in there[:batches]]
        self.copied.append([batch_of_frame(frame, verified_header(frame)) for frame in frames])
        if self.copied.end_offset == self.leader.end_offset:
            self.caught_up_ms = self.now_ms

    def rebuild(self):
        """Let `copied` begin again from nothing."""
        self.copied.reset(*self.leader.replica_start())
        self.caught_up_ms = self.now_ms

    def purge(self, upto):
        for log in self.logs:
            log.advance_log_start(max(log.log_start_offset, min(upto, log.end_offset)))
        self.leader.drop_segments_below(upto)
        self.cancelled = {offset for offset in self.cancelled if offset >= upto}

    def finish(self):
        """Let all replicas have all records and the last order carried out, and compare them."""
        self.copy()
        for log in self.logs:
            self.carry_out(log)
        for log in self.logs[1:]:
            assert everything(log) == everything(self.leader)

    def there(self, log=None):
        """Return offset -> record of what the leader has."""
        return {
            offset: record
            for batch in everything(log or self.leader)
            for offset, record in enumerate(batch.records, batch.base_offset)
            if record is not HOLE
        }

    def values(self):
        return [record.value for record in self.there().values()]


@pytest.fixture
def replicas(tmp_path):
    them = Replicas(tmp_path)
    yield them
    them.finish()
    for log in them.logs:
        log.close()


def test_a_tombstone_stays_until_each_delayed_message_before_it_was_due_at_an_order(replicas):
    replicas.put(Record(b"later", key=b"a", deliver_at_ms=3_000), Record(b"", key=b"a"), Record(b"b1", key=b"b"))
    replicas.now_ms = 1_100
    replicas.put(Record(b"b2", key=b"b"))
    for now_ms in (1_200, 1_600, 2_000):
        replicas.now_ms = now_ms
        replicas.put(Record(b"", key=b"c"))
        replicas.order()
    assert replicas.values()[:2] == [b"later", b""], "it waits, and would come back"
    replicas.now_ms = 3_000
    replicas.put(Record(b"", key=b"c"))
    replicas.order()
    assert replicas.values()[:2] == [b"", b"b2"], "who has copied the message needs the tombstone"
    replicas.now_ms = 3_000 + KEPT_MS
    replicas.put(Record(b"", key=b"c"))
    replicas.order()
    assert replicas.values() == [b"b2", b""]


def test_a_message_whose_id_kept_it_goes_when_the_id_is_old(replicas):
    replicas.put(Record(b"1", key=b"a", message_id=b"1" * 16), Record(b"2", key=b"a"))
    replicas.now_ms = 1_100
    replicas.put(Record(b"3", key=b"b"))
    replicas.order()
    assert replicas.values() == [b"1", b"2", b"3"]
    replicas.now_ms = 1_100 + KEPT_MS
    replicas.put(Record(b"4", key=b"b"))
    replicas.order()
    assert replicas.values() == [b"2", b"4"]


def test_who_copies_during_an_order_learns_of_the_removal_of_a_message_that_its_id_kept(replicas):
    replicas.put(Record(b"1", key=b"a", message_id=b"1" * 16))
    replicas.put(Record(b"", key=b"a"))
    replicas.now_ms = 1_100
    replicas.put(Record(b"3", key=b"b"))
    replicas.order()
    replicas.now_ms = 1_100 + KEPT_MS
    replicas.put(Record(b"4", key=b"b"))
    replicas.copy(1)
    replicas.order()
    replicas.copy()
    assert replicas.values() == [b"", b"4"]
    replicas.wait(KEPT_MS)
    replicas.put(Record(b"5", key=b"b"))
    replicas.order()
    assert replicas.values() == [b"5"]


def test_an_order_of_an_earlier_version_has_one_time_for_tombstones_and_ids(replicas):
    replicas.put(Record(b"1", key=b"a", message_id=b"1" * 16), Record(b"2", key=b"a"), Record(b"", key=b"b"))
    replicas.now_ms = 1_100
    replicas.put(Record(b"3", key=b"a", message_id=b"3" * 16), Record(b"4", key=b"a"), Record(b"", key=b"b"))
    replicas.leader.roll()
    replicas.leader.seal(replicas.leader.end_offset)
    replicas.put_control(BatchKind.COMPACT, msgspec.msgpack.encode([6, 1_050]))
    replicas.carry_out(replicas.leader)
    assert replicas.values() == [b"3", b"4", b""]
    assert _next_compact(replicas.leader, 7, KEPT_MS) == Compact(7, 1_050, 1_050)


# --- random logs ------------------------------------------------------------------------------------------------------

messages = st.tuples(
    st.sampled_from([b"a", b"a", b"a", b"b", None]),
    st.booleans(),
    st.sampled_from([None, None, 50, 700, 2_000]),
    st.integers(0, 2),
    st.integers(0, 2),
)
puts = st.tuples(st.just("put"), st.lists(messages, min_size=1, max_size=3), st.booleans())
orders = st.tuples(
    st.just("order"),
    st.sampled_from([100, 301, 301, 800]),
    st.sampled_from([0, 0, 1, 2, 4]),
    st.sampled_from([1.0, 0.5]),
    st.booleans(),
)
actions = st.lists(
    st.one_of(
        puts,
        puts,
        orders,
        orders,
        st.one_of(
            st.tuples(st.just("ack")),
            st.tuples(st.just("carry out"), st.booleans(), st.sampled_from([1_000_000, 2, 4, 7])),
            st.tuples(st.just("copy"), st.sampled_from([1, 2, 4, 1_000_000])),
            st.tuples(st.just("roll"), st.integers(0, 3)),
            st.tuples(st.just("cancel"), st.integers(0, 3)),
            st.tuples(st.just("purge"), st.floats(0, 0.3)),
        ),
    ),
    min_size=8,
    max_size=30,
)


def records_of(rows, now_ms, number):
    """Return the records of drawn messages; values differ, and are long enough to be worth a compression."""
    records = []
    for key, is_tombstone, delay_ms, id_of_three, priority in rows:
        number += 1
        value = b"" if is_tombstone else b"%d" % number + b"." * 300
        name = b"%016d" % number if id_of_three == 2 else None
        due_ms = None if delay_ms is None else now_ms + delay_ms
        records.append(Record(value, key=key, deliver_at_ms=due_ms, message_id=name, priority=priority))
    return records


def do(replicas, action, *what):
    if action == "put":
        records = records_of(what[0], replicas.now_ms, replicas.leader.end_offset)
        replicas.put(*records, is_compressed=what[1] and all(record.value for record in records))
    elif action == "ack":
        replicas.put_control(BatchKind.ACK, b"body", "g")
    elif action == "order":
        replicas.wait(what[0])
        replicas.put(Record(b"new", key=b"z"))
        if what[1]:
            replicas.rebuild()
            replicas.copy(what[1])
        replicas.order(what[2], by_other=what[3])
    elif action == "carry out":
        replicas.carry_out(replicas.other if what[0] else replicas.copied, what[1])
    elif action == "copy":
        replicas.copy(*what)
    elif action == "roll":
        replicas.logs[what[0]].roll()
    elif action == "cancel":
        waiting = [offset for offset, record in replicas.sent.items() if (record.deliver_at_ms or 0) > replicas.now_ms]
        replicas.cancelled.update(waiting[what[0] :][:1])
    else:
        replicas.purge(int(what[0] * replicas.leader.end_offset))


def is_left(replicas, batch, offset, record, last, order):
    """Return whether the order leaves a message; `last` is the last one of each key that was due."""
    if offset >= order.upto or record.key is None or (record.deliver_at_ms or 0) > order.at_ms:
        return True
    at_ms = batch.appended_at_ms
    if record.message_id is not None and at_ms >= max(order.tombstones_before_ms, order.ids_before_ms):
        return True
    is_old = not record.value and max(at_ms, record.deliver_at_ms or 0) < order.tombstones_before_ms
    return last.get(record.key, -1) <= offset and not is_old


@settings(max_examples=40, deadline=None)
@given(actions)
def test_replicas_agree_whichever_orders_they_carried_out(tmp_path_factory, todo):
    replicas = Replicas(tmp_path_factory.mktemp("logs"))
    for action in todo:
        do(replicas, *action)
    order = _newest_order(replicas.late, replicas.late.end_offset, ranges_of(list(replicas.cancelled)))
    if order is not None:
        before = everything(replicas.late)
        judged = {
            offset: record
            for offset, record in replicas.there(replicas.late).items()
            if offset < order.upto and record.key is not None and (record.deliver_at_ms or 0) <= order.at_ms
        }
        last = {record.key: offset for offset, record in judged.items() if offset not in replicas.cancelled}
        expected = {
            offset: record
            for batch in before
            for offset, record in enumerate(batch.records, batch.base_offset)
            if batch.kind == BatchKind.MESSAGES and is_left(replicas, batch, offset, record, last, order)
        }
        replicas.finish()
        assert replicas.there() == expected
        for key, offset in last.items():
            if offset not in expected:
                earlier = [each for each, record in expected.items() if each < offset and record.key == key]
                assert earlier == [], "a deleted message would come back"
    else:
        replicas.finish()
    for log in replicas.logs:
        log.close()
