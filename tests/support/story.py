"""A data directory with every kind of event in a throughput report: written by the broker's code, in one process, on a
clock that is set by hand."""

from __future__ import annotations

from pathlib import Path
from random import Random

import gevent
from support.data_directory import START_MS, DataDirectory, written
from support.domain import HandClock
from support.outputs import give_up

from portalmq import stream_wire, wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.queues.settle import SettleRequest
from portalmq.broker.storage.batch import Record

WITHIN_S = 60


def busy(path: Path) -> Path:
    """Two topics with messages (one in two partitions and several segments, by three senders; one with delays and
    priorities) and an empty one; queue groups that ack, nack, release, dead-letter and redrive; a stream group that
    seeks back; a group that is deleted and created again; a leader that dies."""
    clock, random = HandClock(START_MS), Random(11)
    with written(path, clock) as data:
        data.topic("orders", partitions=2)
        data.topic("jobs")
        data.topic("empty")
        first, second = (data.fixture.broker.new_producer(None) for _ in range(2))
        for turn in range(6):
            for partition in range(2):
                values = [random.randbytes(random.choice((0, 1, 7, 100, 100, 1023, 5000))) for _ in range(20 + turn)]
                records = [Record(value, key=b"k" if index % 3 else None) for index, value in enumerate(values)]
                who = (first, second, None)[(turn + partition) % 3]
                _put(data, "orders", records, partition, who, turn)
                data.later(random.choice((1, 40, 900, 2_500)))
            if turn in (1, 3):
                data.roll("orders", turn % 2)
        _queue(data)
        _stream(data)
        _deleted(data)
    clock.advance(7_300)
    with written(path, clock) as data:  # the leader is back: an epoch begins, after a gap
        data.put("orders", b"after", b"the fall", partition=0)
        data.later(61_000)
        data.put("orders", b"much later", partition=1)
        _take(data, "shop", "orders", 10)
    return path


def _put(
    data: DataDirectory,
    topic: str,
    records: list[Record],
    partition: int,
    who: wire.ProducerIdentity | None,
    turn: int,
) -> None:
    producer = None
    if who is not None:
        seen = data.__dict__.setdefault("sequences", {})
        sequence = seen.get((who.id, partition), 0)
        seen[who.id, partition] = sequence + len(records)
        producer = wire.ProducerStamp(who.id, who.epoch, sequence)
    data.fixture.broker.produce(topic, ProduceRequest(records, partition=partition, producer=producer))


def _take(data: DataDirectory, group: str, topic: str, count: int, **more: object) -> list:
    request = wire.ReceiveRequest(topics=[topic], max_messages=count, wait_ms=0, **more)  # type: ignore[arg-type]
    found = data.fixture.broker.receive_handler.receive(group, request, None)
    data.later(13)
    return found


def _receipts(messages: list) -> list[str]:
    return [message.receipt for message in messages]


def _queue(data: DataDirectory) -> None:
    broker = data.fixture.broker
    shop = _take(data, "shop", "orders", 60)
    data.later(500)
    broker.settlement.settle("shop", _receipts(shop[:40]))
    broker.settlement.settle("shop", _receipts(shop[40:50]), SettleRequest("nack", 0, "not today"))
    broker.settlement.settle("shop", _receipts(shop[50:]), SettleRequest("release", 0))
    data.later(1_800)
    again = _take(data, "shop", "orders", 25)
    broker.settlement.settle("shop", _receipts(again[:5]))
    give_up(data.fixture, again[5:9], topic="", reason="poison", group="shop")
    data.later(90)
    broker.dead_letters.redrive("shop", "orders", ids=None, where=None, rate_per_s=None, dry_run=False)
    data.later(20)
    _take(data, "shop", "orders", 12)
    now = data.fixture.clock.wall_ms()
    rows = [
        *(Record(b"plain %d" % number) for number in range(8)),
        *(Record(b"urgent", priority=3 + number) for number in range(4)),
        *(Record(b"later", deliver_at_ms=now + 1_000 * number) for number in range(1, 7)),
    ]
    data.fixture.broker.produce("jobs", ProduceRequest(rows, partition=0))
    (scheduled,) = [each for each in range(100) if _is_last_delayed(data, each)][-1:]
    broker.scheduled_messages.cancel("jobs", 0, scheduled)
    broker.settlement.settle("workers", _receipts(_take(data, "workers", "jobs", 6)))
    data.later(3_200)
    broker.settlement.settle("workers", _receipts(_take(data, "workers", "jobs", 5)))
    _take(data, "workers", "jobs", 2)


def _deleted(data: DataDirectory) -> None:
    """Delete a group and create one of its name, in which messages are returned without a delivery."""
    broker = data.fixture.broker
    _take(data, "again", "orders", 9)
    broker.group_admin.delete("again")
    data.later(40)
    given = _take(data, "again", "orders", 9)
    broker.settlement.settle("again", _receipts(given[:3]), SettleRequest("release", 0))
    broker.settlement.settle("again", _receipts(_take(data, "again", "orders", 5)))


def _is_last_delayed(data: DataDirectory, offset: int) -> bool:
    found = data.partition("jobs").log.lanes.message(offset)
    return found is not None and found[2].deliver_at_ms is not None


def _stream(data: DataDirectory) -> None:
    streams, offsets = data.fixture.broker.group_coordinators, data.fixture.broker.offsets
    answer = streams.join("readers", stream_wire.JoinRequest(["orders"], "one"))
    end = {each.partition: each for each in answer.assignment}
    assert set(end) == {0, 1}

    def commit(generation: int, partition: int, offset: int) -> None:
        asked = stream_wire.PartitionOffset("orders", partition, offset)
        offsets.commit("readers", stream_wire.CommitOffsetsRequest("one", generation, [asked]))
        data.later(250)

    commit(answer.generation, 0, 33)
    commit(answer.generation, 0, 61)
    commit(answer.generation, 1, 50)
    streams.seek("readers", "orders", "earliest", partition=0, dry_run=False)
    data.later(400)
    again = streams.heartbeat("readers", "one", answer.generation)
    with gevent.Timeout(WITHIN_S):
        while len(again.assignment) < 2:
            gevent.sleep(0.01)
            again = streams.heartbeat("readers", "one", again.generation)
    commit(again.generation, 0, 20)
    commit(again.generation, 0, 90)
