"""The effect of a topic's settings on produced messages."""

from __future__ import annotations

import gevent
import pytest
from support.domain import running
from support.held_writes import held_writes
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.storage.batch import Record
from portalmq.broker.storage.errors import CorruptFile
from portalmq.errors import (
    Backpressure,
    Fenced,
    InvalidRequest,
    OutOfOrderSequence,
    PortalMQError,
    StorageFull,
    Unavailable,
)


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as fixture:
        yield fixture


def send(fixture, *records: Record, way: str, **more) -> object:
    if way == "range":
        return fixture.broker.produce_range("t", ProduceRequest(list(records), partition=0, **more))
    return fixture.broker.produce("t", ProduceRequest(list(records), **more))


def stored(fixture) -> list[Record]:
    return [each.record for each in fixture.broker.browser.read_all("t", None)]


@pytest.mark.parametrize("way", ["range", "batch"])
def test_the_topics_time_to_live_is_for_messages_that_bring_none(fixture, way):
    fixture.broker.create_topic("t", wire.CreateTopic(config={"default_ttl_ms": 1_000}))
    now_ms = fixture.clock.wall_ms()
    send(fixture, Record(b"plain"), Record(b"own", expires_at_ms=now_ms + 5), way=way)
    send(fixture, Record(b"later", deliver_at_ms=now_ms + 500), Record(b"late", deliver_at_ms=7), way=way)
    assert {record.value: record.expires_at_ms for record in stored(fixture)} == {
        b"plain": now_ms + 1_000,
        b"own": now_ms + 5,
        b"later": now_ms + 1_500,
        b"late": now_ms + 1_000,
    }
    fixture.broker.alter_topic("t", wire.AlterTopic(config={"default_ttl_ms": None}))
    send(fixture, Record(b"for ever"), way=way)
    assert stored(fixture)[-1].expires_at_ms is None


def test_expired_messages_are_browsed_and_delivered_to_no_group(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(config={"default_ttl_ms": 1_000}))
    send(fixture, Record(b"old"), way="batch")
    fixture.clock.advance(1_000)
    send(fixture, Record(b"new"), way="batch")
    received = fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"], max_messages=10, wait_ms=0), None)
    assert [each.record.value for each in received] == [b"new"]
    assert [record.value for record in stored(fixture)] == [b"old", b"new"]


@pytest.mark.parametrize("way", ["range", "batch"])
def test_a_topic_that_keeps_the_last_message_of_each_key_takes_none_without_a_key(fixture, way):
    fixture.broker.create_topic("t", wire.CreateTopic(config={"cleanup": "compact"}))
    with pytest.raises(InvalidRequest, match="message 1 has no key") as refused:
        send(fixture, Record(b"a", key=b"k"), Record(b"b"), way=way)
    assert refused.value.outcome == "not_applied"
    assert stored(fixture) == []
    send(fixture, Record(b"a", key=b"k"), Record(b"", key=b"k"), Record(b"b", key=b""), way=way)
    assert len(stored(fixture)) == 3


def test_a_damaged_partition_refuses_its_own_messages_of_a_batch(fixture, monkeypatch):
    fixture.broker.create_topic("u", wire.CreateTopic(partitions=2))
    damaged = fixture.broker.topics.get("u").partition(0)

    def malformed(*_, **__):
        raise CorruptFile("0.sqlite: CorruptError: database disk image is malformed")

    for name in ("append", "append_at_once"):
        monkeypatch.setattr(damaged.log, name, malformed)
    request = ProduceRequest([Record(b"a"), Record(b"b")], partitions=[0, 1])
    refused, appended = fixture.broker.produce("u", request)
    assert isinstance(refused, Unavailable)
    assert refused.outcome == "unknown"
    assert isinstance(appended, wire.Produced)
    assert appended.partition == 1
    eventually(lambda: damaged.closed)
    assert fixture.faults == []


@pytest.mark.parametrize("way", ["range", "batch"])
@pytest.mark.parametrize("refusal", [StorageFull, Backpressure])
def test_a_stamped_repeat_needs_no_room(fixture, monkeypatch, way, refusal):
    fixture.broker.create_topic("t", wire.CreateTopic())
    identity = fixture.broker.new_producer(None)
    stamp, following = (wire.ProducerStamp(identity.id, identity.epoch, sequence) for sequence in (0, 1))
    first = send(fixture, Record(b"a"), way=way, producer=stamp)
    if refusal is StorageFull:
        fixture.disk.is_full = True
    else:
        monkeypatch.setattr("portalmq.broker.partition.appending.QUEUED_BYTES_MAX", -1)
    assert send(fixture, Record(b"a"), way=way, producer=stamp) == first
    with pytest.raises(refusal) as told:
        send(fixture, Record(b"b"), way=way, producer=following)
    assert told.value.outcome == "not_applied"
    assert len(stored(fixture)) == 1


@pytest.mark.parametrize("way", ["range", "batch"])
@pytest.mark.parametrize("refusal", [Fenced, OutOfOrderSequence])
def test_only_a_committed_batch_refuses_another_one_of_its_producer(fixture, monkeypatch, way, refusal):
    fixture.broker.create_topic("t", wire.CreateTopic())
    send(fixture, Record(b"a"), way=way, producer=wire.ProducerStamp(7, 0, 0))
    epoch = 1 if refusal is Fenced else 0
    # The next batch of a newer instance; or a longer batch in the place of the other one.
    other, refused = wire.ProducerStamp(7, epoch, 1 - epoch), wire.ProducerStamp(7, 0, 1)
    with held_writes(monkeypatch, fixture.broker.topics.get("t").local[0]) as writes:
        send(fixture, Record(b"b"), Record(b"c"), way=way, producer=other, acks="none")
        told = gevent.spawn(error_of, fixture, way, refused)
        gevent.idle()
        assert not told.ready()
        writes.refuse()
        error = told.get()
        assert isinstance(error, StorageFull)
        assert error.outcome == "unknown"
    assert error_of(fixture, way, refused) is None
    send(fixture, Record(b"b"), way=way, producer=wire.ProducerStamp(7, 1, 0))
    assert isinstance(error_of(fixture, way, wire.ProducerStamp(7, 1, 5)), OutOfOrderSequence)
    assert isinstance(error_of(fixture, way, wire.ProducerStamp(7, 0, 2)), Fenced)


def error_of(fixture, way: str, stamp: wire.ProducerStamp) -> PortalMQError | None:
    try:
        send(fixture, Record(b"x"), way=way, producer=stamp)
    except PortalMQError as error:
        return error
    return None
