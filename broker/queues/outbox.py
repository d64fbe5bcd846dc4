"""The outbox: messages that a record in one partition orders to be appended to others.

    partition p of topic t     ... [Commit: acks, outputs] ....................... [Done]
    topics of the outputs           `--- committed ---> [outputs, with ids] --->---'

A COMMIT record holds its outputs, a DEAD record the offsets of dead messages, a RESCHEDULE record those of scheduled
messages that move to another time: it cancels them and orders copies. It is one record, so acks and outputs are atomic.
After its commit, the partition's leader appends what it orders, in the order of the log, and writes DONE. If it dies
before that, the next leader finds the open order in its fold and repeats it. The message ids are hashes of the order's
position in the log, so a repeat appends each message once, within the dedup window of its topic.

Messages that cannot be appended now (no leader, too few in sync, no room) are tried again without a limit, and later
orders of the same partition wait for them. Only the deletion of the target topic ends an order.
"""

from __future__ import annotations

import logging
import random
import re
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice

import gevent
import msgspec
from gevent.lock import BoundedSemaphore

from portalmq.broker.cluster.topic import Topic
from portalmq.broker.cluster.topics import Topics
from portalmq.broker.core.queue.records import Commit, Dead, Done, Reschedule
from portalmq.broker.partition.partition import Partition
from portalmq.broker.storage.batch import Batch, BatchKind, Record
from portalmq.broker.storage.errors import DAMAGE, StorageError, StorageFault
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.plane import PlaneError
from portalmq.errors import (
    Backpressure,
    InvalidRequest,
    PartitionNotFound,
    PortalMQError,
    TopicExists,
    TopicNotFound,
    Unavailable,
)
from portalmq.wire import HEADER_COPY_OF, CreateTopic

log = logging.getLogger(__name__)

# Orders that are processed together, and the bounds of one append call.
ORDERS_AT_ONCE = 200
OUTPUT_BATCH_MESSAGES_MAX = 1_000
OUTPUT_BATCH_BYTES_MAX = 1024 * 1024
# For so long a deleted topic carries out the orders of commits that came during its deletion.
CLOSING_S = 5.0
# Partitions whose orders are processed concurrently.
PARTITIONS_AT_ONCE = 16
PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 5.0
# Before an order whose DONE the disk has refused is finished again.
REFUSED_PAUSE_S = 1.0
LOGGED_EVERY_S = 60.0
# The most open commits of a partition, and the bytes of their outputs; above this new ones are refused.
OPEN_COMMITS_MAX = 1_000
OPEN_BYTES_MAX = 64 * 1024 * 1024
# The most open orders of a partition, with those from before this broker led it: the sizes of these are not known.
OPEN_ORDERS_MAX = 10 * OPEN_COMMITS_MAX

HEADER_SOURCE_TOPIC = "portalmq-source-topic"
HEADER_SOURCE_PARTITION = "portalmq-source-partition"
HEADER_SOURCE_OFFSET = "portalmq-source-offset"
HEADER_GROUP = "portalmq-group"
HEADER_DELIVERY_COUNT = "portalmq-delivery-count"
HEADER_DEAD_REASON = "portalmq-dead-reason"
HEADER_DEAD_AT_MS = "portalmq-dead-at-ms"

_decode_commit = msgspec.msgpack.Decoder(Commit).decode
_decode_dead = msgspec.msgpack.Decoder(Dead).decode
_decode_reschedule = msgspec.msgpack.Decoder(Reschedule).decode


_control_characters = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]+")


def output_id(topic_id: str, number: int, order: Batch, index: int) -> bytes:
    """Return the message id of the `index`-th message that a record orders. It contains the leader epoch: after an
    unclean election the same offset may hold another record."""
    text = f"{topic_id}\n{number}\n{order.leader_epoch}\n{order.base_offset}\n{index}"
    return blake2b(text.encode(), digest_size=16).digest()


def provenance(
    topic: str, number: int, offset: int, group: str, deliveries: int, reason: str, at_ms: int
) -> dict[str, str]:
    """Return the headers that describe the origin of a dead letter. A reason of several lines, such as a stack trace,
    becomes one line: the letter must be valid when a client produces it again unchanged."""
    return {
        HEADER_SOURCE_TOPIC: topic,
        HEADER_SOURCE_PARTITION: str(number),
        HEADER_SOURCE_OFFSET: str(offset),
        HEADER_GROUP: group,
        HEADER_DELIVERY_COUNT: str(deliveries),
        HEADER_DEAD_REASON: _control_characters.sub(" ", reason),
        HEADER_DEAD_AT_MS: str(at_ms),
    }


def stable_partition(topic: Topic, record: Record, wanted: int | None, missing: set[int]) -> int:
    """Return the partition of a message that names none, or one that does not exist. It depends on the topic's first
    number of partitions, so a repeat after growth goes to the same one. `missing` are partitions that do not exist, and
    is added to. Raises Unavailable where the topic has grown and this broker does not know it yet."""
    if wanted is not None and wanted not in missing:
        try:
            topic.place(wanted)
        except PartitionNotFound:
            missing.add(wanted)
        else:
            return wanted
    return zlib.crc32(record.key or record.message_id or b"") % topic.state.first_partitions


@dataclass(slots=True)
class _OutputBatch:
    """Messages for one append call to each topic: (wanted partition, record, offset of the order)."""

    by_topic: dict[str, list[tuple[int | None, Record, int]]] = field(default_factory=dict)
    made: dict[str, Topic] = field(default_factory=dict)
    messages: int = 0
    size_bytes: int = 0

    def add(self, topic: str, wanted: int | None, record: Record, order: int) -> None:
        self.by_topic.setdefault(topic, []).append((wanted, record, order))
        self.messages += 1
        self.size_bytes += len(record.value)

    @property
    def is_full(self) -> bool:
        return self.messages >= OUTPUT_BATCH_MESSAGES_MAX or self.size_bytes >= OUTPUT_BATCH_BYTES_MAX


class Outbox:
    """The orders of one partition, while it is led here.

    Invariant: at most one greenlet processes them. `_sizes` are the bytes of open commits by offset. `_appended` are
    the ids of messages already appended for unfinished orders: an order that waits for one partition longer than the
    dedup window of another appends nothing twice. `_done_at` has the offset of the DONE of each order that was finished
    last: the disk may refuse it.
    """

    def __init__(self, topic: Topic, partition: Partition, destinations: OutputTopics, slots: BoundedSemaphore) -> None:
        self._topic = topic
        self._partition = partition
        self._destinations = destinations
        self._slots = slots
        self._sizes: dict[int, int] = {}
        self._appended: dict[int, set[bytes]] = {}
        self._done_at: dict[int, int] = {}
        self._worker: gevent.Greenlet | None = None
        self._ended = False
        self._logged_at = -LOGGED_EVERY_S
        partition.on_ordered = self.wake
        self.wake()

    def end(self) -> None:
        """Stop: the partition is led elsewhere, or deleted. The next leader continues from its fold."""
        self._ended = True
        self._partition.on_ordered = lambda: None
        if self._worker is not None:
            self._worker.kill(block=False)

    def wake(self) -> None:
        """Start the worker if an order is committed."""
        if self._worker is None and not self._ended and self._orders(1):
            self._worker = gevent.spawn(self._work)

    @property
    def open(self) -> int:
        """Return the number of unfinished orders, including uncommitted ones."""
        return len(self._partition.groups.outbox)

    # --- taking orders -----------------------------------------------------------------------------------------------

    def check_room(self, size_bytes: int) -> None:
        """Raise Backpressure when too many orders are open."""
        if self.open >= OPEN_ORDERS_MAX:
            raise Backpressure(
                f"{self.open} orders of outputs and dead letters are not carried out yet: repeat later",
                retry_after_s=0.5,
            )
        if len(self._sizes) < OPEN_COMMITS_MAX and sum(self._sizes.values()) + size_bytes <= OPEN_BYTES_MAX:
            return
        ordered = self._partition.groups.outbox
        self._sizes = {offset: size for offset, size in self._sizes.items() if offset in ordered}
        waiting = sum(self._sizes.values())
        if len(self._sizes) >= OPEN_COMMITS_MAX or (self._sizes and waiting + size_bytes > OPEN_BYTES_MAX):
            raise Backpressure(
                f"the outputs of {len(self._sizes)} commits ({waiting} bytes) are not appended yet: repeat later",
                retry_after_s=0.5,
            )

    def ordered(self, offset: int, size_bytes: int) -> None:
        """Count the outputs of the commit at `offset`."""
        self._sizes[offset] = size_bytes

    # --- processing orders -------------------------------------------------------------------------------------------

    def _orders(self, at_most: int) -> list[tuple[int, str]]:
        """Return the first committed orders, (offset, group)."""
        partition = self._partition
        if not partition.serves:
            return []
        high_watermark = partition.high_watermark
        first = islice(partition.groups.outbox.items(), at_most)
        return [(offset, group) for offset, group in first if offset < high_watermark]

    def _work(self) -> None:
        pause_s = PAUSE_FIRST_S
        try:
            while orders := self._orders(ORDERS_AT_ONCE):
                if self._forget_finished():
                    gevent.sleep(REFUSED_PAUSE_S)
                failed = self._try(orders)
                if failed is None:
                    pause_s = PAUSE_FIRST_S
                    continue
                if isinstance(failed, (StorageFault, *DAMAGE)):
                    self._partition.storage_failed(failed)
                    return
                self._log_failure(failed)
                asked_s = failed.retry_after_s if isinstance(failed, PortalMQError) else None
                gevent.sleep(max(pause_s * random.uniform(0.5, 1.0), min(asked_s or 0.0, PAUSE_MAX_S)))
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
        finally:
            self._worker = None

    def _try(self, orders: list[tuple[int, str]]) -> PortalMQError | StorageError | None:
        try:
            with self._slots:
                self._process(orders)
        except (PortalMQError, StorageError) as error:
            return error
        return None

    def _log_failure(self, failed: Exception) -> None:
        """Log a failure, at most once per LOGGED_EVERY_S."""
        if time.monotonic() - self._logged_at >= LOGGED_EVERY_S:
            self._logged_at = time.monotonic()
            log.warning("%s: %d outbox orders wait: %s", self._partition, self.open, failed)

    def _process(self, orders: list[tuple[int, str]]) -> None:
        batch = _OutputBatch()
        finished: list[tuple[int, str]] = []
        for offset, group in orders:
            for topic, wanted, record in self._messages_of(offset, group, batch):
                batch.add(topic, wanted, record, offset)
                if batch.is_full:
                    self._append(batch)
                    batch = _OutputBatch(made=batch.made)
                    self._done(finished)
            finished.append((offset, group))
        self._append(batch)
        self._done(finished)

    def _done(self, finished: list[tuple[int, str]]) -> None:
        """Write DONE for orders whose messages are all appended."""
        for offset, group in finished:
            at = -1
            if offset in self._partition.groups.outbox:
                at = self._partition.append_group_record(group, Done(offset), is_soft=True).base_offset
            self._done_at[offset] = at
            self._sizes.pop(offset, None)
        finished.clear()

    def _forget_finished(self) -> bool:
        """Forget what was appended for orders whose DONE is committed. Return whether the disk has refused one: its
        order is open again, and its messages are there."""
        refused = self._done_at.keys() & self._partition.groups.outbox.keys()
        committed = [at for at, done in self._done_at.items() if done < self._partition.high_watermark]
        for offset in refused.union(committed):
            del self._done_at[offset]
            if offset not in refused:
                self._appended.pop(offset, None)
        return bool(refused)

    def _messages_of(self, offset: int, group: str, batch: _OutputBatch) -> Iterator[tuple[str, int | None, Record]]:
        """Yield what the record at `offset` orders: topic, wanted partition, record with its id."""
        order = self._partition.reader.control_at(offset)
        if order is not None and order.kind == BatchKind.COMMIT:
            yield from self._outputs(order)
        elif order is not None and order.kind == BatchKind.DEAD:
            yield from self._copies(order, group, batch)
        elif order is not None and order.kind == BatchKind.RESCHEDULE:
            yield from self._rescheduled(order)
        else:
            log.error("%s: the order at offset %d is gone and cannot be processed", self._partition, offset)

    def _outputs(self, order: Batch) -> Iterator[tuple[str, int | None, Record]]:
        commit = _decode_commit(order.body)
        for index, output in enumerate(commit.outputs):
            record = msgspec.convert(output.record, Record)
            yield output.topic, output.partition, self._identified(record, order, index)

    def _copies(self, order: Batch, group: str, batch: _OutputBatch) -> Iterator[tuple[str, int | None, Record]]:
        dead = _decode_dead(order.body)
        topic = self._topic
        if dead.topic not in batch.made:
            try:
                batch.made[dead.topic] = self._destinations.make(dead.topic, topic)
            except InvalidRequest as error:
                log.error("%s: dead letters of group %r cannot be copied: %s", self._partition, group, error)
                return
        for start, end, deliveries in dead.ranges:
            for piece in self._partition.reader.pieces(start, end, end - start):
                for offset, record in enumerate(piece.records(), piece.start):
                    headers = provenance(
                        topic.name, self._partition.number, offset, group, deliveries, dead.reason, dead.at_ms
                    )
                    copy = Record(record.value, record.content_type, record.key, {**(record.headers or {}), **headers})
                    # The id uses the message's offset, not its index: compaction may remove others in between.
                    yield dead.topic, None, self._identified(copy, order, offset)

    def _rescheduled(self, order: Batch) -> Iterator[tuple[str, int | None, Record]]:
        """Yield copies that are delivered at another time, and live as long from then on."""
        move = _decode_reschedule(order.body)
        topic, number = self._topic.name, self._partition.number
        there = self._destinations.find(topic)
        if there is None or there.state.topic_id != self._topic.state.topic_id:
            return  # it was deleted: one that has its name now is another topic
        for start, end in move.ranges:
            for piece in self._partition.reader.pieces(start, end, end - start):
                for offset, record in enumerate(piece.records(), piece.start):
                    expires_at_ms = record.expires_at_ms
                    if expires_at_ms is not None:
                        expires_at_ms += (move.deliver_at_ms or move.at_ms) - (record.deliver_at_ms or 0)
                    copy = Record(
                        record.value,
                        record.content_type,
                        record.key,
                        {**(record.headers or {}), HEADER_COPY_OF: f"{topic}/{number}-{offset}"},
                        move.deliver_at_ms or None,
                        expires_at_ms,
                        record.priority,
                    )
                    yield topic, number, self._identified(copy, order, offset)

    def _identified(self, record: Record, order: Batch, index: int) -> Record:
        message_id = output_id(self._topic.state.topic_id, self._partition.number, order, index)
        return msgspec.structs.replace(record, message_id=message_id)

    def _append(self, batch: _OutputBatch) -> None:
        for name, messages in batch.by_topic.items():
            topic = self._destinations.find(name)
            if topic is None:
                log.warning(
                    "%s: %d messages for topic %r are dropped: it was deleted", self._partition, len(messages), name
                )
                continue
            shares: dict[int, list[Record]] = {}
            orders: dict[int, list[tuple[int, bytes]]] = {}
            missing: set[int] = set()
            for wanted, record, order in messages:
                message_id = record.message_id or b""
                if message_id not in self._appended.get(order, ()):
                    number = stable_partition(topic, record, wanted, missing)
                    shares.setdefault(number, []).append(record)
                    orders.setdefault(number, []).append((order, message_id))
            errors = self._destinations.copies(topic, shares) if shares else {}
            for number in shares.keys() - errors.keys():
                for order, message_id in orders[number]:
                    self._appended.setdefault(order, set()).add(message_id)
            for error in errors.values():
                raise error


class Outboxes:
    """The outboxes of all partitions that are led here."""

    def __init__(self, destinations: OutputTopics) -> None:
        self._destinations = destinations
        self._slots = BoundedSemaphore(PARTITIONS_AT_ONCE)
        self._by_partition: dict[Partition, Outbox] = {}

    def on_leading(self, topic: Topic, partition: Partition) -> None:
        self.on_stepped_down(partition)
        self._by_partition[partition] = Outbox(topic, partition, self._destinations, self._slots)

    def on_stepped_down(self, partition: Partition) -> None:
        outbox = self._by_partition.pop(partition, None)
        if outbox is not None:
            outbox.end()

    def on_closing(self, topic: Topic) -> None:
        """End the outboxes of a deleted topic, once they have carried out what was committed before, for some seconds
        at most."""
        of_it = [each for each in self._by_partition if each.topic_id == topic.state.topic_id]
        ends = [(partition, partition.high_watermark) for partition in of_it]
        deadline = time.monotonic() + CLOSING_S
        for partition, end in ends:
            partition.retention.has_order_below(end, deadline - time.monotonic())
        for partition in of_it:
            self.on_stepped_down(partition)

    def of(self, partition: Partition) -> Outbox | None:
        """Return the outbox of a partition that is led here; None before on_leading."""
        return self._by_partition.get(partition)

    @property
    def open(self) -> int:
        return sum(outbox.open for outbox in self._by_partition.values())


@dataclass(eq=False, repr=False)
class OutputTopics:
    """The topics that commits publish to and that dead letters are copied to."""

    _topics: Topics
    _catalog: Catalog
    # Appends records with message ids, by partition; returns the errors of the partitions that failed.
    copies: Callable[[Topic, dict[int, list[Record]]], dict[int, PortalMQError]]

    def get_or_create(self, name: str) -> Topic:
        """Return the topic; create a missing one if topics are created by use. Raises TopicNotFound."""
        try:
            return self._topics.known(name)
        except TopicNotFound:
            return self._topics.get_or_create(name)

    def find(self, name: str) -> Topic | None:
        """Return the topic; None when it certainly does not exist. Raises Unavailable while that is not known."""
        try:
            return self._topics.known(name)
        except TopicNotFound:
            return None if self._is_gone(name) else self._topics.known(name)

    def _is_gone(self, name: str) -> bool:
        """Return True when the topic does not exist. Syncs first: the topic may have been created just now, through
        another server of the control plane."""
        try:
            self._catalog.plane.sync()
            return self._catalog.find_topic(name) is None
        except PlaneError as error:
            raise Unavailable(f"the control plane does not answer: {error}", retry_after_s=1) from error

    def make(self, name: str, like: Topic) -> Topic:
        """Return the dead-letter topic of this name; create a missing one with one partition and the message size limit
        of `like`. Raises InvalidRequest for an invalid name."""
        found = self.find(name)
        if found is not None:
            return found
        config = {"max_message_bytes": like.state.config.max_message_bytes}
        try:
            return self._topics.create(name, CreateTopic(partitions=1, config=config))[0]
        except TopicExists:
            return self._topics.known(name)
