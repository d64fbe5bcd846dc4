"""The way of new messages into partitions: which partition each goes to, and whether it is in the log already.

A message goes where it was sent by name, else where its key's CRC-32 points, else (with an Idempotency-Key) where its
id's does, so that a retry meets its first; the rest of a batch goes to one partition, another for each batch.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count

import msgspec

from portalmq.broker.core.events import Stamp
from portalmq.broker.partition import Partition
from portalmq.broker.storage.batch import Record
from portalmq.broker.topics import Topic
from portalmq.broker.writer import Pending
from portalmq.errors import IdempotencyKeyReused, InvalidRequest, MessageTooLarge, PortalMQError
from portalmq.wire import Acks, Produced, ProducedRange, ProducerStamp

_turns = count()


@dataclass(slots=True)
class _Share:
    """What one partition gets of a request: new records, and those that are in the log already."""

    partition: Partition
    indexes: list[int] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    known: list[tuple[int, int, int]] = field(default_factory=list)  # (index, offset, timestamp_ms)
    pending: Pending | None = None


def size_of(topic: Topic, records: list[Record]) -> int:
    """Bytes of all payloads together. Raises MessageTooLarge for one over the topic's limit."""
    limit = topic.state.config.max_message_bytes
    lengths = [len(record.value) for record in records]
    if max(lengths) > limit:
        index = next(i for i, length in enumerate(lengths) if length > limit)
        raise MessageTooLarge(
            f"message {index} has {lengths[index]} bytes, topic {topic.name!r} takes {limit} (max_message_bytes)"
        )
    return sum(lengths)


def produce_range(
    topic: Topic, records: list[Record], number: int, *, acks: Acks, producer: ProducerStamp | None
) -> tuple[ProducedRange, int]:
    """Append a batch to one partition, all or nothing; also answers the bytes of its payloads."""
    size = size_of(topic, records)
    stamp = Stamp(producer.id, producer.epoch, producer.sequence) if producer else None
    base_offset, timestamp_ms = topic.partition(number).append(tuple(records), size, stamp=stamp, acks=acks)
    return ProducedRange(number, base_offset, len(records), timestamp_ms), size


def produce(
    topic: Topic,
    records: list[Record],
    partitions: list[int | None] | None,
    *,
    acks: Acks,
    partition: int | None,
    producer: ProducerStamp | None,
    idempotency_key: str | None,
) -> list[Produced | PortalMQError]:
    """Append messages to their partitions; one result each, in order. Raises when the whole request is refused."""
    size_of(topic, records)
    if idempotency_key is not None:
        records = [_identified(record, idempotency_key, index) for index, record in enumerate(records)]
    shares = _shares(topic, records, partitions, partition)
    if producer is not None and len(shares) != 1:
        raise InvalidRequest("a batch with a producer goes to one partition: name it with ?partition=")
    results: list[Produced | PortalMQError | None] = [None] * len(records)
    _submit_all(shares, results, acks, Stamp(producer.id, producer.epoch, producer.sequence) if producer else None)
    for share in shares.values():
        _collect(share, results, acks)
    return _unless_all_failed([result for result in results if result is not None])


def _unless_all_failed(results: list[Produced | PortalMQError]) -> list[Produced | PortalMQError]:
    """The results; raised instead, when nothing of the request went in: unknown when that holds for any of it."""
    errors = [result for result in results if isinstance(result, PortalMQError)]
    if errors and len(errors) == len(results):
        raise next((error for error in errors if error.outcome == "unknown"), errors[0])
    return results


def _identified(record: Record, key: str, index: int) -> Record:
    """The record with the identity that an Idempotency-Key gives it: 128 bits of id, 64 of its body."""
    message_id = blake2b(f"{index}\n{key}".encode(), digest_size=16).digest()
    body = msgspec.msgpack.encode((record.value, record.key, record.content_type, record.headers))
    return msgspec.structs.replace(record, message_id=message_id, body_hash=blake2b(body, digest_size=8).digest())


def _shares(
    topic: Topic, records: list[Record], partitions: list[int | None] | None, partition: int | None
) -> dict[int, _Share]:
    shares: dict[int, _Share] = {}
    numbers = _numbers(topic, records, partitions, partition)
    for number in dict.fromkeys(numbers):
        shares[number] = _Share(topic.partition(number))
    for index, (number, record) in enumerate(zip(numbers, records, strict=True)):
        share = shares[number]
        place = share.partition.place_of_id(record.message_id) if record.message_id else None
        if place is None:
            share.indexes.append(index)
            share.records.append(record)
            continue
        offset, body_hash, timestamp_ms = place
        if body_hash != record.body_hash:
            raise IdempotencyKeyReused(
                f"this Idempotency-Key was used for another message (partition {number}, offset {offset}):"
                " use a new key for a new message"
            )
        share.known.append((index, offset, timestamp_ms))
    return shares


def _numbers(
    topic: Topic, records: list[Record], partitions: list[int | None] | None, partition: int | None
) -> list[int]:
    size, first_size = topic.state.partitions, topic.state.first_partitions
    spread = next(_turns) % size
    if partition is not None or size == 1:
        named = [p for p in partitions or () if p is not None]
        if partition is not None and any(p != partition for p in named):
            raise InvalidRequest("the request names one partition and a message in it another")
        fixed = 0 if partition is None else partition
        if not named:
            return [fixed] * len(records)
    numbers: list[int] = []
    for index, record in enumerate(records):
        wanted = partitions[index] if partitions else None
        if wanted is None and partition is not None:
            wanted = partition
        if wanted is not None:
            numbers.append(wanted)
        elif record.key is not None:
            numbers.append(zlib.crc32(record.key) % size)
        elif record.message_id is not None:
            numbers.append(zlib.crc32(record.message_id) % first_size)
        else:
            numbers.append(spread)
    return numbers


def _submit_all(
    shares: dict[int, _Share], results: list[Produced | PortalMQError | None], acks: Acks, stamp: Stamp | None
) -> None:
    """Allot offsets in every partition. The first refusal, with nothing applied yet, refuses the whole request."""
    applied = False
    for share in shares.values():
        if not share.records:
            continue
        records = tuple(share.records)
        size = sum([len(record.value) for record in records])
        try:
            share.pending = share.partition.submit(records, size, stamp=stamp, acks=acks)
        except PortalMQError as error:
            if not applied:
                raise
            for index in share.indexes:
                results[index] = error
            continue
        share.partition.remember_ids(share.pending)
        applied = True


def _collect(share: _Share, results: list[Produced | PortalMQError | None], acks: Acks) -> None:
    number = share.partition.number
    for index, offset, timestamp_ms in share.known:
        if acks == "none":
            results[index] = Produced(number, -1, 0)
            continue
        try:
            share.partition.wait_committed(offset)
        except PortalMQError as error:
            results[index] = error
        else:
            results[index] = Produced(number, offset, timestamp_ms)
    if share.pending is None:
        return
    try:
        base_offset, timestamp_ms = share.partition.outcome(share.pending)
    except PortalMQError as error:
        for index in share.indexes:
            results[index] = error
        return
    step = 0 if base_offset < 0 else 1
    for rank, index in enumerate(share.indexes):
        results[index] = Produced(number, base_offset + rank * step, timestamp_ms)
