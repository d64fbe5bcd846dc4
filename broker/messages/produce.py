"""Produce: select the partition of each message, bring it to the partition's leader, append it there.

A message goes to the partition that the request names, else to the one that the CRC-32 of its key selects, else (with
an Idempotency-Key) to the one that the CRC-32 of its id selects, so that a retry meets the first message. The rest of a
batch goes to one partition, round robin by batch. The leader appends the share of its partition all or nothing, and
drops what it has already.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import msgspec

from portalmq.broker.cluster.routing import LeaderRouter, LocalWork, PartitionWork, as_unavailable, place_of
from portalmq.broker.cluster.rpc import Outcomes, TopicPartition, raise_if_all_failed
from portalmq.broker.cluster.rpc.messages import PRODUCE, AppendResult, Produce, Share
from portalmq.broker.cluster.topic import Topic
from portalmq.broker.core.replica.events import Stamp
from portalmq.broker.messages.idempotency import (
    AsSent,
    Keyed,
    RepeatFinder,
    are_many,
    each_once,
    find_known,
    identified,
)
from portalmq.broker.partition.native import decompressed
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.refusals import answer_to
from portalmq.broker.partition.writer import NotCommittedYet, Pending
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.storage.batch import Record, compressed_body, records_of_compressed, with_values
from portalmq.broker.storage.errors import DAMAGE, Shortage, StorageError
from portalmq.errors import InvalidRequest, MessageTooLarge, NotLeader, PortalMQError, Unavailable
from portalmq.wire import INTEGER_MAX, Acks, Produced, ProducedRange, ProducerStamp

# The outbox tries again by itself. Until then others append: a partition without a leader is not waited for.
COPIES_PATIENCE_S = 0.25

_round_robin = count()


class ProduceRequest(msgspec.Struct):
    """Messages to append to one topic, and how. `partitions` has one entry a record, or is None when no message names
    one. `partition` is that of the request, for the messages that name none."""

    records: list[Record]
    partitions: list[int | None] | None = None
    acks: Acks = "all"
    partition: int | None = None
    producer: ProducerStamp | None = None
    # One message rather than a batch. Only such a request has an idempotency key and `as_sent`: the options of the
    # message as the client wrote them. A retry repeats them, while the times that follow from them differ.
    is_single: bool = False
    idempotency_key: str | None = None
    as_sent: AsSent = ()
    # Of a batch: one entry a record, or None when no message has an idempotency_key.
    keys: Sequence[Keyed | None] | None = None
    # The values of all records, if they came compressed: stored in this form where all of them go to one partition.
    compressed: bytes = b""
    # False when the client goes to the leader itself: the call raises NotLeader rather than being forwarded.
    forward: bool = True


class Finder(Protocol):
    """Finds a topic by name and id. Raises Unavailable for a topic that this broker does not know."""

    def __call__(self, name: str, topic_id: str) -> Topic: ...


def size_of(topic: Topic, records: list[Record], names: Sequence[object] | None = None) -> int:
    """Return the bytes of all payloads. `names`, by default the indexes, name the messages in errors. Raises
    MessageTooLarge for a message over the topic's limit, InvalidRequest for one without a key in a compacted topic."""
    names = range(len(records)) if names is None else names
    limit = topic.state.config.max_message_bytes
    lengths = [len(record.value) for record in records]
    if max(lengths) > limit:
        index = next(i for i, length in enumerate(lengths) if length > limit)
        raise MessageTooLarge(
            f"message {names[index]} has {lengths[index]} bytes, topic {topic.name!r} takes {limit} (max_message_bytes)"
        )
    if topic.state.config.cleanup == "compact":
        keyless = next((index for index, record in enumerate(records) if record.key is None), None)
        if keyless is not None:
            raise InvalidRequest(
                f"message {names[keyless]} has no key, and topic {topic.name!r} keeps the last message of each key"
                " (cleanup is compact): give every message a key"
            )
    return sum(lengths)


def expiry(ttl_ms: int, deliver_at_ms: int | None, wall_ms: int) -> int:
    """Return the time at which a message expires: its time to live begins when it can be delivered."""
    return min(max(wall_ms, deliver_at_ms or 0) + ttl_ms, INTEGER_MAX)


def with_default_ttl(topic: Topic, records: list[Record], wall_ms: int) -> list[Record]:
    """Return the records; those without an expiry get one from the topic's default_ttl_ms, if it has one."""
    ttl_ms = topic.state.config.default_ttl_ms
    if ttl_ms is None:
        return records
    return [
        record
        if record.expires_at_ms is not None
        else msgspec.structs.replace(record, expires_at_ms=expiry(ttl_ms, record.deliver_at_ms, wall_ms))
        for record in records
    ]


# --- appending here --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _AppendOptions:
    """The options of an append. Copies are messages from an outbox: the backlog limit does not apply to them, since
    their input counted already, and a repeat waits for the first one."""

    stamp: Stamp | None
    acks: Acks
    is_copies: bool = False


@dataclass(slots=True)
class _PendingShare:
    """The messages of a call for one partition: the new ones, and those that the log has already (`known`)."""

    partition: Partition
    ranks: list[int] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    known: list[tuple[int, int, int]] = field(default_factory=list)  # (rank, offset, timestamp_ms)
    pending: Pending | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """The checks right before offsets are assigned. Neither switches greenlets."""

    # Raises Fenced for the stamp of a named producer with a newer epoch, Unavailable when the epoch is not known.
    check_fence: Callable[[Stamp], None]
    # Raises Backpressure when too many messages wait in the partition already.
    check_room: Callable[[Topic, Partition, int, Stamp | None], None]


def _begin_append(
    topic: Topic,
    partition: Partition,
    records: Sequence[Record],
    options: _AppendOptions,
    admission: Admission,
    *,
    are_many_keyed: bool,
    compressed: bytes = b"",
) -> _PendingShare:
    """Assign offsets to the new records. Raises the partition's refusal; nothing is appended then."""
    entry = _PendingShare(partition)
    # Repeats of copies wait for their firsts later, in _finish_append.
    acks: Acks = "none" if options.is_copies else options.acks
    with find_known(partition, records, acks, are_many=are_many_keyed) as known:
        if options.stamp is not None:
            admission.check_fence(options.stamp)
        if not known:
            entry.ranks, entry.records = list(range(len(records))), list(records)
        for rank, record in enumerate(records if known else ()):
            place = known.get(record.message_id) if record.message_id else None
            if place is None:
                entry.ranks.append(rank)
                entry.records.append(record)
            else:
                entry.known.append((rank, *place))
        if entry.records:
            try:
                if not options.is_copies:
                    admission.check_room(topic, partition, len(entry.records), options.stamp)
                size = sum([len(record.value) for record in entry.records])
                entry.pending = partition.submit(
                    tuple(entry.records),
                    size,
                    stamp=options.stamp,
                    acks=options.acks,
                    compressed=b"" if known else compressed,
                )
            except PortalMQError as error:
                if known:  # the share is stored in part
                    error.outcome = "unknown"
                raise
            partition.uncommitted.remember_ids(entry.pending)
    return entry


def _finish_append(entry: _PendingShare, options: _AppendOptions) -> AppendResult:
    """Wait until the share is as durable as its acks ask. Raises its error."""
    for _, offset, _ in entry.known if options.is_copies else ():
        entry.partition.wait_committed(offset)  # other repeats are refused while their first is not committed
    base_offset, timestamp_ms = entry.partition.outcome(entry.pending) if entry.pending is not None else (-1, 0)
    if not entry.known:
        return AppendResult(base_offset, timestamp_ms)
    if options.acks == "none":
        return AppendResult(-1, 0)
    places = {rank: (base_offset + nth, timestamp_ms) for nth, rank in enumerate(entry.ranks)}
    places |= {rank: (offset, known_ms) for rank, offset, known_ms in entry.known}
    return AppendResult(-1, 0, [places[rank] for rank in sorted(places)])


def _storage_refusal(partition: Partition, fault: StorageError) -> PortalMQError:
    """Report damage. Return the public error for one partition: what was appended to the others is told."""
    if not isinstance(fault, Shortage):
        partition.storage_failed(fault)
    return answer_to(fault)


# --- appending anywhere ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ProduceWork:
    """The work of one produce call: `shares` by partition. `compressed` are the values of the only share."""

    topic: Topic
    shares: dict[int, list[Record]]
    options: _AppendOptions
    admission: Admission
    published: Published
    compressed: bytes = b""

    def request(self, places: Sequence[TopicPartition]) -> Produce:
        stamp = self.options.stamp
        return Produce(
            self.topic.name,
            self.topic.state.topic_id,
            self.options.acks,
            ProducerStamp(stamp.producer_id, stamp.producer_epoch, stamp.sequence) if stamp else None,
            [self._share(place.number) for place in places],
            self.options.is_copies,
        )

    def _share(self, number: int) -> Share:
        records = self.shares[number]
        if not self.compressed:
            return Share(number, records)
        return Share(number, compressed_body(self.compressed, records), len(records))

    def here(self, places: Sequence[TopicPartition]) -> Outcomes[AppendResult]:
        entries: dict[TopicPartition, _PendingShare] = {}
        outcomes: Outcomes[AppendResult] = {}
        published = published_bytes = 0
        shares = [self.shares[place.number] for place in places]
        are_many_keyed = are_many(shares)
        for place, share in in_short_turns(zip(places, shares, strict=True)):
            try:
                partition = self.topic.partition(place.number)
                entries[place] = _begin_append(
                    self.topic,
                    partition,
                    share,
                    self.options,
                    self.admission,
                    are_many_keyed=are_many_keyed,
                    compressed=self.compressed,
                )
            except PortalMQError as error:
                outcomes[place] = error
            except (Shortage, *DAMAGE) as fault:
                outcomes[place] = _storage_refusal(partition, fault)
        for place, entry in in_short_turns(entries.items()):
            try:
                outcomes[place] = _finish_append(entry, self.options)
            except PortalMQError as error:
                outcomes[place] = error
            except (Shortage, *DAMAGE) as fault:
                outcomes[place] = _storage_refusal(entry.partition, fault)
            else:
                published += len(entry.records)
                published_bytes += sum([len(record.value) for record in entry.records])
        if published:
            self.published(self.topic.name, published, published_bytes)
        return outcomes


@dataclass(eq=False, repr=False)
class ProduceHandler:
    """Produce calls of clients, and the shares that other brokers bring."""

    _leaders: LeaderRouter
    _find: Finder
    _published: Published
    _clock: WallClock
    _admission: Admission
    _repeat_finder: RepeatFinder

    def range(self, topic: Topic, request: ProduceRequest) -> ProducedRange:
        """Append a batch to the partition of the request, all or nothing."""
        number, acks, producer, forward = request.partition, request.acks, request.producer, request.forward
        assert number is not None
        size = size_of(topic, request.records)
        records = with_default_ttl(topic, request.records, self._clock.wall_ms())
        place = place_of(topic.state, number)
        is_doubtful = False
        stamp = _stamp(producer)
        if topic.leader_of(number) == self._leaders.broker_id:
            try:
                partition = topic.partition(number)
                if stamp is not None:
                    self._admission.check_fence(stamp)
                self._admission.check_room(topic, partition, len(records), stamp)
                base_offset, timestamp_ms = partition.append(
                    tuple(records), size, stamp=stamp, acks=acks, compressed=request.compressed
                )
            except (NotLeader, Unavailable) as error:
                is_doubtful = error.outcome != "not_applied"
                if is_doubtful and (producer is None or isinstance(error, NotCommittedYet)):
                    raise (as_unavailable(error) if forward else error) from None
            else:
                self._published(topic.name, len(records), size)
                return ProducedRange(number, base_offset, len(records), timestamp_ms, topic.state.topic_id)
        work = self._work(topic, {number: records}, _AppendOptions(stamp, acks), request.compressed)
        try:
            appended = self._leaders.one(place, work, forward=forward, repeatable=producer is not None)
        except PortalMQError as error:
            if is_doubtful:
                error.outcome = "unknown"
            raise
        return ProducedRange(number, appended.base_offset, len(records), appended.timestamp_ms, topic.state.topic_id)

    def batch(self, topic: Topic, request: ProduceRequest) -> list[Produced | PortalMQError]:
        """Append messages to their partitions; return one result each, in order. Raises when all of them are refused.
        Each of the request's `keys` is looked for in the partition of its message only."""
        records, partitions, partition = request.records, request.partitions, request.partition
        producer, keys, forward = request.producer, request.keys, request.forward
        idempotency_key = request.idempotency_key
        size_of(topic, records)
        at_of: Sequence[int] | None = None
        all_are_keyed = False
        if keys is not None:
            if producer is not None:
                raise InvalidRequest(
                    "a batch with a producer's stamp is deduplicated by it: give its messages no idempotency_key"
                )
            named = [partition if number is None else number for number in partitions or [None] * len(records)]
            records, firsts, at_of = each_once(records, keys, named)
            partitions = [partitions[index] for index in firsts] if partitions is not None else None
            all_are_keyed = all(key is not None for key in keys)
        if idempotency_key is not None:
            if len(records) != 1:
                raise InvalidRequest("an Idempotency-Key belongs to a single message")
            sent_options = (partition, *request.as_sent) if request.as_sent or partition is not None else ()
            records = [identified(records[0], idempotency_key, sent_options)]
        records = with_default_ttl(topic, records, self._clock.wall_ms())
        indexes: dict[int, list[int]] = {}
        for index, number in enumerate(_numbers(topic, records, partitions, partition)):
            indexes.setdefault(number, []).append(index)
        places = {number: place_of(topic.state, number) for number in indexes}
        if producer is not None and len(indexes) != 1:
            raise InvalidRequest("a batch with a producer goes to one partition: name it with ?partition=")
        shares = {number: [records[index] for index in own] for number, own in indexes.items()}
        if not forward:
            self._leaders.check_led_here(places.values())
        if idempotency_key is not None and topic.state.partitions > 1:
            first = self._repeat_finder.find(topic, records[0], next(iter(places)), request.acks)
            if first is not None:
                return [first]
        is_whole = len(shares) == 1 and len(records) == len(request.records)
        options = _AppendOptions(_stamp(producer), request.acks)
        work = self._work(topic, shares, options, request.compressed if is_whole else b"")
        repeatable = producer is not None or idempotency_key is not None or all_are_keyed
        outcomes = self._leaders.run(list(places.values()), work, forward=forward, repeatable=repeatable)
        results: list[Produced | PortalMQError | None] = [None] * len(records)
        for number, own in indexes.items():
            for index, result in zip(own, _produced(number, len(own), outcomes[places[number]]), strict=True):
                results[index] = result
        answers = results if at_of is None else [results[at] for at in at_of]
        produced = [result for result in answers if result is not None]
        raise_if_all_failed(produced)
        return produced

    def copies(self, topic: Topic, shares: dict[int, list[Record]]) -> dict[int, PortalMQError]:
        """Append the messages of an outbox, by partition; return the errors of the partitions that failed. The records
        have message ids, so a repeat finds its first, and were checked against the topic's limits when ordered."""
        places = [place_of(topic.state, number) for number in shares]
        work = self._work(topic, shares, _AppendOptions(None, "all", is_copies=True))
        outcomes = self._leaders.run(places, work, repeatable=True, patience_s=COPIES_PATIENCE_S)
        return {place.number: outcome for place, outcome in outcomes.items() if isinstance(outcome, PortalMQError)}

    def local_produce(self, call: Produce) -> LocalWork[AppendResult]:
        """Append shares that another broker forwards to the leader."""
        topic = self._find(call.topic, call.topic_id)
        options = _AppendOptions(_stamp(call.stamp), call.acks, call.is_copies)
        shares: dict[int, list[Record]] = {}
        compressed = b""
        for share in call.shares:
            if isinstance(share.records, bytes):
                compressed, bare = records_of_compressed(share.records, share.count)
                shares[share.number] = list(with_values(decompressed(compressed, share.count), bare))
            else:
                shares[share.number] = share.records
        return _ProduceWork(topic, shares, options, self._admission, self._published, compressed).here

    def _work(
        self, topic: Topic, shares: dict[int, list[Record]], options: _AppendOptions, compressed: bytes = b""
    ) -> PartitionWork[AppendResult]:
        work = _ProduceWork(topic, shares, options, self._admission, self._published, compressed)
        return self._leaders.work(PRODUCE, work.request, work.here)


class WallClock(Protocol):
    def wall_ms(self) -> int: ...


class Published(Protocol):
    """Counts messages appended here, and the bytes of their payloads."""

    def __call__(self, topic: str, messages: int, size_bytes: int) -> None: ...


def _produced(number: int, size: int, outcome: AppendResult | PortalMQError) -> list[Produced | PortalMQError]:
    if isinstance(outcome, PortalMQError):
        return [outcome] * size
    if outcome.places is not None:
        return [Produced(number, offset, timestamp_ms) for offset, timestamp_ms in outcome.places]
    step = 0 if outcome.base_offset < 0 else 1
    return [Produced(number, outcome.base_offset + rank * step, outcome.timestamp_ms) for rank in range(size)]


def _stamp(producer: ProducerStamp | None) -> Stamp | None:
    return Stamp(producer.id, producer.epoch, producer.sequence) if producer is not None else None


def _numbers(
    topic: Topic, records: list[Record], partitions: list[int | None] | None, partition: int | None
) -> list[int]:
    size, first_size = topic.state.partitions, topic.state.first_partitions
    spread = next(_round_robin) % size
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
