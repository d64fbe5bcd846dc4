"""Deduplication by Idempotency-Key: the identity of a message, and the search for the first message of a key.

    id      128-bit hash of the key: messages with the same id are one message, within the topic's dedup window
    hash     64-bit hash of the request: a different hash under the same key is refused (422)

A message without a partition or a message key goes to the partition that its id selects, so a repeat meets the first
message there. A first message that was sent to a named partition, or before the topic grew, is in another partition.
So in a topic with several partitions all leaders are asked first. The index of ids is in the log's files, not in
memory.

In a batch each message may have a key of its own. Each key is searched only in the partition of its message: asking
all leaders for each of a thousand keys would cost more than the messages. A few keys are searched on the event loop.
Many are searched on native threads, and marked as in progress, so that no other request appends them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import msgspec

from portalmq.broker.cluster.metadata_cache import MetadataCache
from portalmq.broker.cluster.routing import LeaderRouter, LocalWork, one_by_one
from portalmq.broker.cluster.rpc import TopicPartition
from portalmq.broker.cluster.rpc.messages import FIRST, FindFirst
from portalmq.broker.cluster.topic import Topic
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.yielding import give_way
from portalmq.broker.storage.batch import Record
from portalmq.errors import IdempotencyKeyReused, PortalMQError, RequestInProgress
from portalmq.wire import Acks, Produced, message_id_of, message_ids_of

IN_PROGRESS_RETRY_S = 0.2

# Headers of the request, not of the message: tracing sends other values with each repeat.
_REQUEST_HEADERS = frozenset({"traceparent", "tracestate"})

_encode = msgspec.msgpack.Encoder().encode
# The options of a message as the client sent them.
AsSent = tuple[int | str | None, ...]
# The key of a message in a batch, and its options.
Keyed = tuple[str, AsSent]
# (offset, body hash, timestamp_ms) of the first message of an id.
First = tuple[int, bytes | None, int]
# An index finds this many ids in less time than a switch to another thread takes.
SEARCHED_HERE_MAX = 8
# About 3 ms of hashing.
HASHED_AT_ONCE = 1_000


def identified(record: Record, key: str, as_sent: AsSent) -> Record:
    """Return the record with the id and the hash that an Idempotency-Key gives it. The hash covers the body and the
    options as the client sent them: a delay in ms is the same in each repeat, the due time is not. Headers are sorted,
    since a proxy may reorder them."""
    return _identified(record, message_id_of(key), as_sent)


def _identified(record: Record, message_id: bytes, as_sent: AsSent) -> Record:
    headers = record.headers and sorted(item for item in record.headers.items() if item[0] not in _REQUEST_HEADERS)
    body = _encode((record.value, record.key, record.content_type, headers or (), *as_sent))
    return msgspec.structs.replace(record, message_id=message_id, body_hash=blake2b(body, digest_size=8).digest())


def each_once(
    records: Sequence[Record], keys: Sequence[Keyed | None], numbers: Sequence[int | None]
) -> tuple[list[Record], list[int], list[int]]:
    """Deduplicate a batch whose messages have keys of their own. Return the distinct records with their identities,
    their indexes in the batch, and for each message of the batch the index of its record. `numbers` are the partitions
    that the request names. Raises IdempotencyKeyReused for two different messages under one key."""
    identities: list[Record] = []
    for start in range(0, len(records), HASHED_AT_ONCE):
        if start:
            give_way()
        part = slice(start, start + HASHED_AT_ONCE)
        identities += _all_identified(records[part], keys[part], numbers[part])
    every = range(len(identities))
    if len({record.message_id or index for index, record in enumerate(identities)}) == len(identities):
        return identities, list(every), list(every)
    once: list[Record] = []
    places: list[int] = []
    own: list[int] = []
    seen: dict[bytes, int] = {}
    for index, record in enumerate(identities):
        at = len(once) if record.message_id is None else seen.setdefault(record.message_id, len(once))
        if at < len(once) and once[at].body_hash != record.body_hash:
            raise IdempotencyKeyReused(
                f"messages {places[at]} and {index} of the batch differ, and have one idempotency_key: use a key"
                " for one message"
            )
        own.append(at)
        if at == len(once):
            once.append(record)
            places.append(index)
    return once, places, own


def _all_identified(
    records: Sequence[Record], keys: Sequence[Keyed | None], numbers: Sequence[int | None]
) -> list[Record]:
    ids = iter(message_ids_of([keyed[0] for keyed in keys if keyed is not None]))
    return [
        record
        if keyed is None
        else _identified(record, next(ids), (number, *keyed[1]) if keyed[1] or number is not None else ())
        for record, keyed, number in zip(records, keys, numbers, strict=True)
    ]


def find_first(partition: Partition, message_id: bytes, body_hash: bytes | None) -> tuple[int, int] | None:
    """Return (offset, timestamp_ms) of the message of this id, None if the partition does not have it. Raises
    IdempotencyKeyReused for a different message, RequestInProgress while another request searches for the id."""
    if partition.uncommitted.is_sought(message_id):
        raise _in_progress(partition, "")
    place = partition.place_of_id(message_id)
    return None if place is None else _checked(partition, place, body_hash)


def _checked(partition: Partition, first: First, body_hash: bytes | None) -> tuple[int, int]:
    """Return (offset, timestamp_ms) of the first message, if it is the same one. Otherwise raises, after the commit of
    the first message: until then it may be refused by the disk, and a repeat would be appended."""
    offset, first_hash, timestamp_ms = first
    if first_hash != body_hash:
        try:
            partition.wait_committed(offset)
        except PortalMQError as error:
            error.outcome = "not_applied"  # the outcome of the first message is unknown, this one is not appended
            raise
        raise IdempotencyKeyReused(
            f"this Idempotency-Key was used for another message (partition {partition.number}, offset {offset}):"
            " use a new key for a new message"
        )
    return offset, timestamp_ms


def _in_progress(partition: Partition, where: str) -> RequestInProgress:
    return RequestInProgress(
        f"the first request of this Idempotency-Key is still being appended (partition {partition.number}{where}):"
        " repeat in a moment",
        outcome="unknown",  # that of the first request, which may be this one
        retry_after_s=IN_PROGRESS_RETRY_S,
    )


def are_many(shares: Iterable[Sequence[Record]]) -> bool:
    """Return True for a request with more ids, over all its partitions, than may be searched on the event loop."""
    return sum([1 for records in shares for record in records if record.message_id is not None]) > SEARCHED_HERE_MAX


@contextmanager
def find_known(
    partition: Partition, records: Sequence[Record], acks: Acks, *, are_many: bool
) -> Iterator[dict[bytes, tuple[int, int]]]:
    """Yield the records that the partition has already: id -> (offset, timestamp_ms). The caller appends the others
    within the block. The ids are distinct. Raises IdempotencyKeyReused, RequestInProgress, Unavailable."""
    keyed = [record for record in records if record.message_id is not None]
    known: dict[bytes, tuple[int, int]] = {}
    sought: dict[bytes, Record] = {}
    if are_many:
        sought = {record.message_id or b"": record for record in keyed}
        if partition.uncommitted.is_any_sought(sought):
            raise _in_progress(partition, "")
        for message_id, first in partition.uncommitted.places_of(sought).items():
            place = _checked(partition, first, sought.pop(message_id).body_hash)
            check_done(partition, place[0], acks)
            known[message_id] = place
    else:
        for record in keyed:
            message_id = record.message_id or b""
            found_here = find_first(partition, message_id, record.body_hash)
            if found_here is not None:
                check_done(partition, found_here[0], acks)
                known[message_id] = found_here
    if not sought:
        yield known
        return
    with partition.seeking(list(sought)) as found:
        for message_id, first in found.items():
            place = _checked(partition, first, sought[message_id].body_hash)
            check_done(partition, place[0], acks)
            known[message_id] = place
        yield known


def check_done(partition: Partition, offset: int, acks: Acks) -> None:
    """Raise RequestInProgress while the first message, at `offset`, is less durable than the `acks` of its repeat."""
    safe_end = {"all": partition.high_watermark, "leader": partition.log.end_offset, "none": offset + 1}[acks]
    if offset >= safe_end:
        raise _in_progress(partition, f", offset {offset}")


class RepeatFinder:
    """Finds the first message of a key on all partitions of its topic."""

    def __init__(self, metadata_cache: MetadataCache, leaders: LeaderRouter) -> None:
        self._metadata_cache = metadata_cache
        self._leaders = leaders

    def find(self, topic: Topic, record: Record, besides: int, acks: Acks) -> Produced | None:
        """Return the first message of the record's id on any partition besides `besides`, which the append itself
        searches; None if there is none. Raises IdempotencyKeyReused, RequestInProgress, and the error of a leader that
        cannot be asked."""
        numbers = [number for number in range(topic.state.partitions) if number != besides]
        if not numbers:
            return None
        request = FindFirst(
            topic.name, topic.state.topic_id, numbers, record.message_id or b"", record.body_hash or b"", acks
        )
        outcomes = self._leaders.call(FIRST, request, self.local_find(request), repeatable=True)
        for place, found in outcomes.items():
            if not isinstance(found, PortalMQError) and found:
                offset, timestamp_ms = found
                return Produced(place.number, offset if acks != "none" else -1, timestamp_ms)
        errors = [error for error in outcomes.values() if isinstance(error, PortalMQError)]
        decided = [error for error in errors if isinstance(error, IdempotencyKeyReused | RequestInProgress)]
        for error in decided or errors:
            if not isinstance(error, RequestInProgress):
                error.outcome = "not_applied"  # the append comes after this search
            raise error
        return None

    def local_find(self, request: FindFirst) -> LocalWork[list[int]]:
        def find(place: TopicPartition) -> list[int]:
            partition = self._metadata_cache.partition(place)
            found = find_first(partition, request.message_id, request.body_hash)
            if found is not None:
                check_done(partition, found[0], request.acks)
            return list(found or ())

        return one_by_one(find)
