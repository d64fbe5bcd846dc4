"""A purge removes messages from every group, in any state: leased, waiting in a lane, dead or committed."""

from __future__ import annotations

import gevent
import pytest
from support.domain import HandClock, running
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.core.queue.records import Claim
from portalmq.broker.core.replica.events import Tick
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition.retention import Retention
from portalmq.broker.queues.settle import SettleRequest
from portalmq.broker.storage.batch import Record
from portalmq.broker.storage.errors import LogClosed
from portalmq.errors import Backpressure, InvalidRequest, OffsetOutOfRange, PartitionNotFound, Unavailable

LATER_MS = 60_000


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def fixture(tmp_path, clock):
    with running(tmp_path, clock) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
        yield fixture


def send(fixture, *records: Record, partition: int = 0) -> list[int]:
    return [each.offset for each in fixture.broker.produce("t", ProduceRequest(list(records), partition=partition))]


def one_of_each(fixture, name: str, partition: int = 0) -> list[int]:
    """Send a plain message, one with a priority, a delayed one, and a delayed one with a priority."""
    due_ms = fixture.clock.wall_ms() + LATER_MS
    return send(
        fixture,
        Record(f"{name} plain".encode()),
        Record(f"{name} urgent".encode(), priority=9),
        Record(f"{name} later".encode(), deliver_at_ms=due_ms),
        Record(f"{name} later urgent".encode(), deliver_at_ms=due_ms, priority=9),
        partition=partition,
    )


def receive(fixture, group: str = "g"):
    request = wire.ReceiveRequest(["t"], max_messages=100, wait_ms=0)
    return fixture.broker.receive_handler.receive(group, request, None)


def texts(delivered) -> list[str]:
    return sorted(each.record.value.decode() for each in delivered)


def counts(fixture, group: str = "g"):
    return fixture.broker.describe_group(group)


def purge(fixture, *, partition: int | None = None, before_offset: int | None = None) -> None:
    fixture.broker.browser.purge("t", partition=partition, before_offset=before_offset)


NEW = ["new later", "new later urgent", "new plain", "new urgent"]


@pytest.mark.parametrize("begun", ["never", "before", "leased"])
def test_no_lane_delivers_purged_messages(fixture, clock, begun):
    if begun != "never":
        receive(fixture)
    one_of_each(fixture, "old")
    if begun == "leased":
        assert texts(receive(fixture)) == ["old plain", "old urgent"]
    purge(fixture)
    one_of_each(fixture, "new")
    assert begun == "never" or counts(fixture).lag == 4
    clock.advance(2 * LATER_MS)
    assert texts(receive(fixture)) == NEW
    assert texts(receive(fixture, "another")) == NEW
    assert counts(fixture).lag == 4


def test_a_group_that_begins_before_the_log_start_moves_gets_no_purged_messages(fixture, clock, monkeypatch):
    one_of_each(fixture, "old")
    monkeypatch.setattr(
        "portalmq.broker.partition.retention._advance", lambda log, upto: Unavailable("the disk is slow")
    )
    with pytest.raises(Unavailable):
        purge(fixture, partition=0)
    assert [each.log.log_start_offset for each in fixture.broker.topics.get("t").led()] == [0, 0]
    one_of_each(fixture, "new")
    clock.advance(2 * LATER_MS)
    assert texts(receive(fixture)) == NEW


def test_a_purge_up_to_an_offset_splits_a_batch_and_every_lane_in_it(fixture, clock):
    receive(fixture)
    first, second, _, last = one_of_each(fixture, "new")
    purge(fixture, partition=0, before_offset=second)
    assert counts(fixture).lag == 3
    assert texts(receive(fixture)) == ["new urgent"]
    purge(fixture, partition=0, before_offset=last)
    clock.advance(2 * LATER_MS)
    assert texts(receive(fixture)) == ["new later urgent"]
    assert first < second < last


def test_receipts_of_purged_messages_are_accepted_as_acked(fixture):
    one_of_each(fixture, "old")
    handed = receive(fixture)
    purge(fixture)
    assert all(fixture.broker.settlement.settle("g", [each.receipt for each in handed]))
    assert counts(fixture).lag == 0


def test_the_committed_offset_of_a_stream_group_moves_up_with_the_log_start(fixture):
    one_of_each(fixture, "old")
    partition = fixture.broker.topics.get("t").partition(0)
    start = partition.log.log_start_offset
    partition.append_group_record("readers", Claim("m", 1, start, fixture.clock.now_ms())).wait()
    purge(fixture, partition=0)
    stream = partition.streams["readers"]
    assert stream.committed == partition.log.log_start_offset > start
    below = stream.committed
    purge(fixture, partition=0, before_offset=1)
    assert partition.streams["readers"].committed == below, "a purge never goes back"


def test_one_partition_is_purged_and_the_other_stays(fixture):
    receive(fixture)
    one_of_each(fixture, "old", partition=0)
    one_of_each(fixture, "new", partition=1)
    purge(fixture, partition=0)
    assert texts(receive(fixture)) == ["new plain", "new urgent"]


def test_a_purge_survives_a_restart_in_every_lane(tmp_path):
    clock = HandClock()
    with running(tmp_path, clock) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic())
        receive(fixture)
        one_of_each(fixture, "old")
        handed = receive(fixture)
        assert texts(handed) == ["old plain", "old urgent"]
        purge(fixture)
        one_of_each(fixture, "new")
    with running(tmp_path, clock) as fixture:
        clock.advance(2 * LATER_MS)
        assert counts(fixture).lag == 4
        assert texts(receive(fixture)) == NEW
        with pytest.raises(OffsetOutOfRange):
            fixture.broker.browser.browse(
                "t", 0, offset=handed[0].offset, position=None, at_ms=None, limit=1, wait_ms=0, peer=None
            )


def test_dead_messages_go_with_a_purge(fixture, clock):
    fixture.broker.put_group("g", {"max_deliveries": 1, "dead_letter_topic": ""})
    one_of_each(fixture, "old")
    handed = receive(fixture)
    assert all(fixture.broker.settlement.settle("g", [each.receipt for each in handed], SettleRequest("nack", 0, "no")))
    assert counts(fixture).dead == 2
    purge(fixture)
    assert (counts(fixture).dead, counts(fixture).lag) == (0, 0)
    assert receive(fixture) == []


def test_an_offset_needs_a_partition_and_may_be_past_the_end(fixture):
    one_of_each(fixture, "old")
    with pytest.raises(InvalidRequest, match="partition="):
        purge(fixture, before_offset=2)
    with pytest.raises(PartitionNotFound):
        purge(fixture, partition=2)
    purge(fixture, partition=0, before_offset=1_000_000)
    assert list(fixture.broker.browser.read_all("t", None)) == []
    one_of_each(fixture, "new")
    assert texts(receive(fixture)) == ["new plain", "new urgent"]


def test_a_purge_is_answered_once_no_earlier_leader_can_deliver_the_messages(fixture, monkeypatch):
    """A repeat that finds the purge done is not answered sooner."""
    partition = fixture.broker.topics.known("t").local[0]
    end = send(fixture, Record(b"a"))[-1] + 1
    monkeypatch.setattr(PartitionReplica, "may_settle", lambda replica, now_ms: False)
    purges = [gevent.spawn(purge, fixture, partition=0, before_offset=end)]
    eventually(lambda: partition.log.log_start_offset == end)
    purges.append(gevent.spawn(purge, fixture, partition=0, before_offset=end))
    assert not gevent.wait(purges, timeout=0.2, count=1)
    monkeypatch.undo()
    partition.step(Tick())
    gevent.joinall(purges, timeout=50, raise_error=True)
    assert all(each.ready() for each in purges)


@pytest.mark.parametrize("step", ["write_state", "_advance"])
@pytest.mark.parametrize("refusal", [Backpressure, LogClosed])
def test_a_purge_that_is_refused_after_its_record_may_be_carried_out(fixture, monkeypatch, step, refusal):
    send(fixture, Record(b"a"))
    partition = fixture.broker.topics.known("t").local[0]

    def refuse(*_upto: int) -> Exception:
        if step == "write_state":
            raise refusal()
        return refusal()

    monkeypatch.setattr(fixture.broker.leaders, "_patience_s", 0.0)  # a refusal is not retried
    with monkeypatch.context() as patch:
        patch.setattr(Retention, step, staticmethod(refuse))
        with pytest.raises(refusal) as told:
            purge(fixture, partition=0)
    assert told.value.outcome == "unknown"
    partition.retention.finish_purges()  # as the next leader does
    eventually(lambda: partition.log.log_start_offset > 0)
