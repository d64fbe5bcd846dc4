"""Messages that came compressed are plain for everyone who asks for messages."""

from __future__ import annotations

import msgspec
import pytest
from support.compressed import compressed_request, data_of, reading_records, readings
from support.domain import running
from support.outputs import give_up, receive, settled, stored_in

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.broker.cluster.rpc import messages as calls
from portalmq.broker.messages.idempotency import identified
from portalmq.broker.messages.produce import ProduceRequest, _AppendOptions
from portalmq.broker.storage.batch import Record


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as it:
        for topic in ("in", "out"):
            it.broker.create_topic(topic, wire.CreateTopic(partitions=1))
        it.broker.put_group("g", {"start": "earliest"})
        yield it


def partition_of(fixture, topic="in"):
    return fixture.broker.topics.get(topic).partition(0)


def stored(fixture, topic="in"):
    log = partition_of(fixture, topic).log
    return [batch for batch in log.read_to_copy(0, max_bytes=1 << 30, below=log.end_offset) if batch.records]


def received(fixture, count):
    delivered = fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["in"], max_messages=count), None)
    return [message.record.value for message in delivered]


def browsed(fixture, topic="in"):
    page = fixture.broker.browser.browse(topic, 0, offset=0, limit=100)
    return [message.record.value for message in page.messages]


@pytest.mark.parametrize("where", ["memory", "files"])
def test_consumers_get_plain_values_from_memory_and_from_files(fixture, where):
    fixture.broker.produce("in", compressed_request(reading_records(50)))
    assert [batch.compressed for batch in stored(fixture)] == [data_of(reading_records(50))]
    if where == "files":
        partition_of(fixture).reader.forget()
    assert received(fixture, 100) == readings(50)


def test_the_range_call_stores_the_values_as_they_came(fixture):
    request = compressed_request(reading_records(50), partition=0)
    assert fixture.broker.produce_range("in", request).count == 50
    assert [batch.compressed for batch in stored(fixture)] == [request.compressed]


def test_a_batch_of_which_a_part_is_known_is_stored_plain(fixture):
    records = [identified(record, f"key {at}", ()) for at, record in enumerate(reading_records(50))]
    fixture.broker.produce("in", ProduceRequest(records[:10]))
    fixture.broker.produce("in", compressed_request(records))
    assert [(batch.count, batch.compressed) for batch in stored(fixture)] == [(10, b""), (40, b"")]
    assert received(fixture, 100) == readings(50)


def test_a_message_has_the_same_identity_compressed_and_plain(fixture):
    records = [identified(record, f"key {at}", ()) for at, record in enumerate(reading_records(50))]
    first = fixture.broker.produce("in", compressed_request(records))
    assert fixture.broker.produce("in", ProduceRequest(records)) == first
    assert stored(fixture)[0].compressed
    assert len(stored(fixture)) == 1


def test_a_batch_for_several_partitions_is_stored_plain(fixture):
    fixture.broker.create_topic("wide", wire.CreateTopic(partitions=2))
    fixture.broker.produce("wide", compressed_request(reading_records(50), partitions=[0, 1] * 25))
    for number in range(2):
        log = fixture.broker.topics.get("wide").partition(number).log
        (batch,) = [batch for batch in log.read(0) if batch.records]
        assert (batch.count, batch.compressed) == (25, b"")


def test_the_counters_count_the_sizes_of_the_plain_values(fixture):
    fixture.broker.produce("in", compressed_request(reading_records(50)))
    text = fixture.broker.metrics.exposition().decode()
    assert f'portalmq_bytes_published_total{{topic="in"}} {float(sum(map(len, readings(50))))}' in text


def test_delayed_messages_of_a_compressed_batch_are_delivered_when_due(fixture):
    now = fixture.clock.wall_ms()
    records = [Record(value, deliver_at_ms=now + 1_000 * (at % 7 + 1)) for at, value in enumerate(readings(50))]
    fixture.broker.produce("in", compressed_request(records))
    partition_of(fixture).reader.forget()
    assert received(fixture, 100) == []
    fixture.clock.advance(3_500)
    due = received(fixture, 100)
    assert sorted(due) == sorted(value for at, value in enumerate(readings(50)) if at % 7 < 3)


def test_priorities_of_a_compressed_batch_are_kept(fixture):
    records = [Record(value, priority=at % 3) for at, value in enumerate(readings(30))]
    fixture.broker.produce("in", compressed_request(records))
    partition_of(fixture).reader.forget()
    assert received(fixture, 10) == [value for at, value in enumerate(readings(30)) if at % 3 == 2]


def test_dead_letters_are_plain_copies_and_are_redriven(fixture):
    fixture.broker.produce("in", compressed_request(reading_records(50)))
    messages = receive(fixture, 50)
    give_up(fixture, messages)
    settled(fixture)
    partition_of(fixture).reader.forget()
    assert [copy.record.value for copy in stored_in(fixture, "in.dlq")] == readings(50)
    matched, _ = fixture.broker.dead_letters.redrive("g", "in", ids=None, where=None, rate_per_s=None, dry_run=False)
    assert matched == 50
    assert received(fixture, 100) == readings(50)


def test_a_purge_in_the_middle_of_a_batch_leaves_the_rest(fixture):
    fixture.broker.produce("in", compressed_request(reading_records(50)))
    first = stored(fixture)[0].base_offset
    fixture.broker.browser.purge("in", partition=0, before_offset=first + 20)
    partition_of(fixture).reader.forget()
    assert received(fixture, 100) == readings(30, 20)


def test_a_restarted_broker_serves_compressed_messages(tmp_path):
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("in", wire.CreateTopic(partitions=1))
        fixture.broker.produce("in", compressed_request(reading_records(50)))
    with running(tmp_path) as fixture:
        fixture.broker.put_group("g", {"start": "earliest"})
        assert received(fixture, 100) == readings(50)


# --- fetches of stream readers ----------------------------------------------------------------------------------------


def fetched(fixture, *, offset=0, max_bytes=contract.FETCH_BYTES, **more):
    request = contract.FetchRequest([contract.PartitionOffset("in", 0, offset)], max_bytes)
    (answer,) = fixture.broker.reader_fetch.fetch(request, None, **more)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=contract.FetchedPartition)


def test_a_reader_that_knows_compressed_values_gets_them_as_they_came(fixture):
    fixture.broker.produce("in", compressed_request(reading_records(50)))
    (frame,) = fetched(fixture, knows_compressed=True).frames
    assert data_of(reading_records(50)) in frame.body
    head = msgspec.msgpack.decode(frame.header, type=contract.FrameHead)
    assert [record.value for record in contract.records_of_compressed(head, frame.body)] == readings(50)


@pytest.mark.parametrize("where", ["memory", "files"])
def test_a_reader_of_an_earlier_version_gets_plain_values(fixture, where):
    fixture.broker.produce("in", ProduceRequest([Record(b"plain")]))
    fixture.broker.produce("in", compressed_request(reading_records(50)))
    if where == "files":
        partition_of(fixture).reader.forget()
    answer = fetched(fixture)
    found = [msgspec.msgpack.decode(frame.body, type=tuple[contract.FrameRecord, ...]) for frame in answer.frames]
    assert [record.value for records in found for record in records] == [b"plain", *readings(50)]
    assert answer.next_offset == answer.high_watermark


def test_an_answer_with_plain_values_is_as_bounded_as_others(fixture):
    for number in range(20):
        fixture.broker.produce("in", compressed_request(reading_records(50, 100 * number)))
    values, offset, answers = [], 0, 0
    while len(values) < 1_000:
        answer = fetched(fixture, offset=offset, max_bytes=10_000)
        for frame in answer.frames:
            values += [each.value for each in msgspec.msgpack.decode(frame.body, type=list[contract.FrameRecord])]
        assert sum(len(frame.body) for frame in answer.frames) < 10_000 + 50 * 100
        offset, answers = answer.next_offset, answers + 1
    assert values == [value for number in range(20) for value in readings(50, 100 * number)]
    assert answers > 5


# --- calls between brokers --------------------------------------------------------------------------------------------


def test_a_forwarded_batch_stays_compressed(fixture):
    records = reading_records(50)
    topic = fixture.broker.topics.get("in")
    work = fixture.broker.produce_handler._work(topic, {0: records}, _options(), data_of(records))
    call = msgspec.msgpack.decode(msgspec.msgpack.encode(work.request([topic.place(0)])), type=calls.Produce)
    outcomes = fixture.broker.produce_handler.local_produce(call)([topic.place(0)])
    assert outcomes[topic.place(0)].base_offset >= 0
    assert [batch.compressed for batch in stored(fixture)] == [data_of(records)]
    assert received(fixture, 100) == readings(50)


def test_a_leader_of_an_earlier_version_refuses_a_forwarded_compressed_batch(fixture):
    class EarlierShare(msgspec.Struct, array_like=True):
        number: int
        records: list[Record]

    records = reading_records(50)
    topic = fixture.broker.topics.get("in")
    work = fixture.broker.produce_handler._work(topic, {0: records}, _options(), data_of(records))
    (share,) = work.request([topic.place(0)]).shares
    with pytest.raises(msgspec.ValidationError, match="Expected `array`, got `bytes`"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(share), type=EarlierShare)


def _options():
    return _AppendOptions(None, "all")
