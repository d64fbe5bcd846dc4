"""Commits and dead letters at a broker of one process: inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence

from support.domain import Fixture, records
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.core.queue.records import Dead
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition.partition import Partition
from portalmq.broker.queues.commit import OutputMessage
from portalmq.broker.queues.outbox import PARTITIONS_AT_ONCE
from portalmq.broker.storage.batch import Record


def send(fixture: Fixture, *values: str, topic: str = "in", partition: int = 0, **more: object) -> None:
    fixture.broker.produce(topic, ProduceRequest(records(*values, **more), partition=partition))


def receive(fixture: Fixture, count: int = 10, topic: str = "in", group: str = "g"):
    return fixture.broker.receive_handler.receive(group, wire.ReceiveRequest([topic], max_messages=count), None)


def commit(fixture: Fixture, messages, publish: Sequence[OutputMessage] = (), group: str = "g") -> wire.Committed:
    receipts = [message.receipt for message in messages]
    return fixture.broker.group_commits.commit_receipts(group, receipts, list(publish), forward=True)


def outputs(*values: str, topic: str = "out", partition: int | None = None, **more: object) -> list[OutputMessage]:
    return [OutputMessage(topic, record, partition) for record in records(*values, **more)]


def there(fixture: Fixture, topic: str = "out") -> list[str]:
    """The values in a topic, by partition and offset."""
    return [stored.record.value.decode() for stored in stored_in(fixture, topic)]


def stored_in(fixture: Fixture, topic: str):
    known = {summary.name for summary in fixture.broker.list_topics()}
    return list(fixture.broker.browser.read_all(topic, None)) if topic in known else []


def partition_of(fixture: Fixture, topic: str = "in", number: int = 0) -> Partition:
    return fixture.broker.topics.get(topic).local[number]


def settled(fixture: Fixture) -> None:
    """Wait until the broker has carried out every order."""
    eventually(lambda: fixture.broker.outboxes.open == 0)


def give_up(
    fixture: Fixture, messages, *, topic: str = "in.dlq", reason: str = "max_deliveries", group: str = "g"
) -> None:
    """Dead-letter these received messages."""
    for message in messages:
        partition = partition_of(fixture, message.topic, message.partition)
        ranges = ((message.offset, message.offset + 1, message.delivery_count),)
        record = Dead(ranges, fixture.clock.now_ms(), reason, topic)
        partition.append_group_record(group, record).wait()


def json_record(text: str, **more: object) -> Record:
    return Record(text.encode(), wire.JSON, **more)  # type: ignore[arg-type]


def hold_outputs(fixture: Fixture) -> None:
    """Let no outbox carry out its orders until `release_outputs`."""
    for _ in range(PARTITIONS_AT_ONCE):
        fixture.broker.outboxes._slots.acquire()


def release_outputs(fixture: Fixture) -> None:
    for _ in range(PARTITIONS_AT_ONCE):
        fixture.broker.outboxes._slots.release()
