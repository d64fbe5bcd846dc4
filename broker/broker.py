"""The broker as the API sees it: one call a route, in the terms of the field, raising the errors of the contract.

It joins the rooms: topics and their partitions, groups, the control plane's catalog, the pool of native threads that
write, the cache, and the upkeep that runs beside the requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import gevent
import msgspec
from gevent.event import Event
from gevent.threadpool import ThreadPool

from portalmq import wire
from portalmq.broker import produce as producing
from portalmq.broker.cache import BatchCache
from portalmq.broker.clock import Clock
from portalmq.broker.config import BrokerConfig
from portalmq.broker.delivery import Delivered, Peer
from portalmq.broker.groups import Groups
from portalmq.broker.metrics import Metrics
from portalmq.broker.partition import Partition
from portalmq.broker.storage.batch import Record
from portalmq.broker.storage.disk import DiskGuard
from portalmq.broker.storage.errors import CorruptBatch, DiskFull, StorageFault
from portalmq.broker.topics import Topic, Topics
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.controller import take_over
from portalmq.control_plane.state import BrokerState
from portalmq.errors import InvalidRequest, NotFound, PortalMQError, StorageFull, Unavailable

log = logging.getLogger(__name__)

CACHE_BYTES = 32 * 1024 * 1024
SAVE_STATE_EVERY_S = 1.0
RETAIN_EVERY_S = 10.0
REST_EVERY_S = 60.0
GROUP_EXPIRY_MS = 7 * wire.DAY_MS
DISK_FULL = "the broker's disk is full: free space or add disk, then repeat"


P = ParamSpec("P")
T = TypeVar("T")


class Stored(msgspec.Struct, gc=False, frozen=True):
    """A message in the log."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    record: Record


class Page(NamedTuple):
    """A page of a partition; `next_offset` is where to go on."""

    messages: list[Stored]
    next_offset: int
    log_start_offset: int
    high_watermark: int


def _told(
    call: Callable[Concatenate[Broker, P], T],
) -> Callable[Concatenate[Broker, P], T]:
    """What the storage raises in the middle of a call, told in the terms of the contract; a fault ends the broker."""

    @wraps(call)
    def telling(broker: Broker, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(broker, *args, **kwargs)
        except DiskFull as full:
            raise StorageFull(DISK_FULL, outcome="unknown") from full
        except CorruptBatch as damage:
            raise Unavailable(f"a batch is damaged on this broker: {damage}", outcome="unknown") from damage
        except StorageFault as fault:
            broker.storage_failed(fault)
            raise Unavailable("the storage failed", outcome="unknown") from fault

    return telling


class Broker:
    """One broker. `on_fatal` is called once with a storage fault after which the process must end."""

    def __init__(
        self,
        config: BrokerConfig,
        catalog: Catalog,
        *,
        broker_id: int,
        me: BrokerState,
        disk: DiskGuard,
        metrics: Metrics,
        on_fatal: Callable[[BaseException], None],
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.broker_id = broker_id
        self.cluster_id = catalog.cluster_id()
        self.me = me
        self.clock = clock or Clock()
        self.pool = ThreadPool(config.storage_threads)
        self.cache = BatchCache(CACHE_BYTES)
        self.metrics = metrics
        self.ready = False
        self.cluster_secret = catalog.cluster_secret()
        # What other brokers may ask of this one: name -> (body, the asking broker's connection) -> answer.
        self.calls: dict[str, Callable[[bytes, Peer | None], bytes]] = {}
        self._draining = Event()
        self._catalog = catalog
        self._disk = disk
        self._on_fatal = on_fatal
        self._upkeep: list[gevent.Greenlet] = []
        self.topics = Topics(
            self,
            catalog,
            self.cluster_id,
            config.data_directory,
            auto_create=config.auto_create_topics,
            default_replication_factor=config.default_replication_factor,
        )
        self.groups = Groups(catalog, self.topics, self.clock, catalog.receipt_key(), config.parked_receives_max)
        self.topics.on_removed = self._topic_removed
        self.topics.on_grown = self.groups.end_waits
        self.groups.on_acked = metrics.acked

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take the leadership of what this broker holds, open it, and begin to serve."""
        self._catalog.register_broker(self.broker_id, self.me)
        take_over(self._catalog, self.broker_id, self.me)
        self.topics.open_all()
        self.groups.open_all()
        self._upkeep = [
            gevent.spawn(self._every, SAVE_STATE_EVERY_S, self._save_state),
            gevent.spawn(self._every, RETAIN_EVERY_S, self._retain),
            gevent.spawn(self._every, REST_EVERY_S, self._rest),
        ]
        self.ready = True

    def drain(self) -> None:
        """Take no new waits, and end those there are."""
        self.ready = False
        self._draining.set()
        self.groups.lot.close()

    def close(self) -> None:
        """Write what waits, save the folds, close the files."""
        self.drain()
        gevent.killall(self._upkeep)
        self.topics.close()

    def _every(self, seconds: float, work: Callable[[], None]) -> None:
        while not self._draining.wait(seconds):
            try:
                work()
            except PortalMQError as error:
                log.warning("upkeep will be tried again: %s", error)
            except Exception as fault:  # noqa: BLE001 - upkeep that failed in any other way fails the broker
                self.storage_failed(fault)

    def _save_state(self) -> None:
        for topic in self.topics:
            for partition in topic.partitions:
                partition.save_state()

    def _rest(self) -> None:
        for topic in self.topics:
            for partition in topic.partitions:
                partition.rest_if_idle()

    def _retain(self) -> None:
        if self.disk_is_full():
            self._disk.release()  # sealing and dropping, which make room, need a little room themselves
        for topic in self.topics:
            config = topic.state.config
            for partition in topic.partitions:
                partition.retain(config.retention_ms, config.retention_bytes, GROUP_EXPIRY_MS)

    # --- other brokers -----------------------------------------------------------------------------------------------

    def serve_peer(self, name: str, body: bytes, peer: Peer | None) -> bytes:
        """Answer another broker. What it asks for is done here or refused: nothing is forwarded a second time."""
        call = self.calls.get(name)
        if call is None:
            raise NotFound(f"brokers do not ask each other for {name[:100]!r}: is one of another version?")
        return call(body, peer)

    # --- what partitions need of their host --------------------------------------------------------------------------

    def disk_is_full(self) -> bool:
        return self._disk.full(self.clock.now_ms())

    def storage_failed(self, fault: BaseException) -> None:
        self.ready = False
        self._on_fatal(fault)

    def committed(self, seconds: float) -> None:
        self.metrics.committed(seconds)

    def _topic_removed(self, topic: Topic) -> None:
        self.groups.forget_topic(topic)
        self.metrics.forget_topic(topic.name)

    # --- topics ------------------------------------------------------------------------------------------------------

    def create_topic(self, name: str, request: wire.CreateTopic) -> tuple[wire.TopicDescription, bool]:
        topic, created = self.topics.create(name, request)
        return _described(topic), created

    def list_topics(self) -> list[wire.TopicSummary]:
        states = sorted((topic.state for topic in self.topics), key=lambda state: state.name)
        return [wire.TopicSummary(state.name, state.partitions, state.replication_factor) for state in states]

    def describe_topic(self, name: str) -> wire.TopicDescription:
        return _described(self.topics.get(name))

    def alter_topic(self, name: str, request: wire.AlterTopic) -> wire.TopicDescription:
        return _described(self.topics.alter(name, request))

    def delete_topic(self, name: str) -> None:
        self.topics.delete(name)

    @_told
    def purge(self, name: str, *, partition: int | None, before_offset: int | None) -> None:
        """Remove messages below `before_offset`, or all that can be read."""
        topic = self.topics.get(name)
        if before_offset is not None and partition is None and len(topic.partitions) > 1:
            raise InvalidRequest("before_offset is an offset of one partition: name it with partition=")
        for chosen in topic.partitions if partition is None else [topic.partition(partition)]:
            chosen.purge(before_offset)

    # --- messages ----------------------------------------------------------------------------------------------------

    @_told
    def produce(
        self,
        topic: str,
        records: list[Record],
        partitions: list[int | None] | None,
        *,
        acks: wire.Acks,
        partition: int | None = None,
        producer: wire.ProducerStamp | None = None,
        idempotency_key: str | None = None,
    ) -> list[wire.Produced | PortalMQError]:
        """Append messages; one result each, in order. Raises when the whole request was refused: nothing applied."""
        self._check_open()
        results = producing.produce(
            self.topics.get_or_create(topic),
            records,
            partitions,
            acks=acks,
            partition=partition,
            producer=producer,
            idempotency_key=idempotency_key,
        )
        self.metrics.published(topic, len(records), sum([len(record.value) for record in records]))
        return results

    @_told
    def produce_range(
        self,
        topic: str,
        records: list[Record],
        *,
        acks: wire.Acks,
        partition: int,
        producer: wire.ProducerStamp | None,
    ) -> wire.ProducedRange:
        """Append a batch to one partition, all or nothing."""
        self._check_open()
        result, size_bytes = producing.produce_range(
            self.topics.get_or_create(topic), records, partition, acks=acks, producer=producer
        )
        self.metrics.published(topic, len(records), size_bytes)
        return result

    def new_producer(self, name: str | None) -> wire.ProducerIdentity:
        """An identity for an idempotent producer; a named one gets its id again, with the next epoch."""
        return self._catalog.next_producer(name)

    @_told
    def browse(
        self,
        name: str,
        number: int,
        *,
        offset: int | None,
        position: str | None,
        at_ms: int | None,
        limit: int,
        wait_ms: int,
        peer: Peer | None,
    ) -> Page:
        """Read on from a place, consuming nothing; waits up to `wait_ms` for the first message."""
        partition = self.topics.get(name).partition(number)
        start = self._place(partition, offset, position, at_ms)
        if wait_ms:
            self._wait_readable(partition, start, wait_ms, peer)
            self.topics.get(name)  # it may have been deleted meanwhile
        messages = [
            Stored(name, number, at, piece.batch.appended_at_ms, record)
            for piece in partition.pieces(start, partition.high_watermark, limit)
            for at, record in enumerate(piece.records(), piece.start)
        ]
        high_watermark = partition.high_watermark
        next_offset = messages[-1].offset + 1 if messages else start
        if next_offset >= partition.readable_end:
            next_offset = high_watermark
        return Page(messages, next_offset, partition.log.log_start_offset, high_watermark)

    def _place(self, partition: Partition, offset: int | None, position: str | None, at_ms: int | None) -> int:
        if at_ms is not None:
            return min(partition.log.offset_for_time(at_ms), partition.high_watermark)
        if position == "latest":
            return partition.high_watermark
        if offset is None:
            return partition.log.log_start_offset
        partition.check_offset(offset)
        return offset

    def _wait_readable(self, partition: Partition, offset: int, wait_ms: int, peer: Peer | None) -> None:
        event = Event()
        unwatch = peer.watch(event.set) if peer is not None else None
        waits = self.groups.lot.hold(event)
        try:
            partition.wait_readable(offset, event, wait_ms / 1000)
        finally:
            waits()
            if unwatch is not None:
                unwatch()

    def read_all(self, name: str, limit: int | None) -> Iterator[Stored]:
        """The whole queue as it stands now, partition by partition."""
        topic = self.topics.get(name)
        ends = [(partition, partition.high_watermark) for partition in topic.partitions]
        return self._read_all(name, ends, limit)

    def _read_all(self, name: str, ends: list[tuple[Partition, int]], limit: int | None) -> Iterator[Stored]:
        left = limit if limit is not None else 1 << 62
        for partition, end in ends:
            for piece in partition.pieces(partition.log.log_start_offset, end, left):
                left -= piece.end - piece.start
                for at, record in enumerate(piece.records(), piece.start):
                    yield Stored(name, partition.number, at, piece.batch.appended_at_ms, record)

    # --- groups ------------------------------------------------------------------------------------------------------

    def put_group(self, name: str, patch: dict[str, object]) -> tuple[wire.GroupDescription, bool]:
        created = self.groups.put(name, patch)
        return self.describe_group(name), created

    @_told
    def describe_group(self, name: str) -> wire.GroupDescription:
        config = self.groups.config(name)
        counts = [group.counts() for group in self.groups.on_partitions(name)]
        total = {key: sum(count[key] for count in counts) for key in ("ready", "in_flight", "scheduled", "lag")}
        oldest = max((count["oldest_unacked_ms"] for count in counts), default=0)
        return wire.GroupDescription(
            group=name, mode=config.mode, members=[], dead=0, oldest_unacked_ms=oldest, config=config, **total
        )

    def list_groups(self) -> list[wire.GroupDescription]:
        return [self.describe_group(name) for name in self.groups.names()]

    def delete_group(self, name: str) -> None:
        self.groups.delete(name)

    @_told
    def receive(self, group: str, request: wire.ReceiveRequest, peer: Peer | None) -> list[Delivered]:
        """Lease messages, waiting for the first one up to the request's `wait_ms`."""
        self._check_open()
        messages = self.groups.receive(group, request, peer)
        if messages:
            self._count_delivered(group, messages)
        return messages

    @_told
    def ack_and_receive(
        self, group: str, request: wire.ReceiveRequest, peer: Peer | None
    ) -> tuple[list[Delivered], list[bool]]:
        """Ack the request's receipts, then receive; also answers which receipts counted."""
        self._check_open()
        messages, verdicts = self.groups.ack_and_receive(group, request, peer)
        if messages:
            self._count_delivered(group, messages)
        return messages, verdicts

    def _count_delivered(self, group: str, messages: list[Delivered]) -> None:
        by_topic: dict[str, tuple[int, int]] = {}
        if messages[0].topic == messages[-1].topic:
            by_topic[messages[0].topic] = (len(messages), sum([message.delivery_count > 1 for message in messages]))
        else:
            for message in messages:
                n, again = by_topic.get(message.topic, (0, 0))
                by_topic[message.topic] = (n + 1, again + (message.delivery_count > 1))
        for topic, (n, again) in by_topic.items():
            self.metrics.delivered(topic, group, n, again)

    @_told
    def ack(self, group: str, receipts: list[str]) -> list[bool]:
        """Which receipts count (done, durably); False for a stale one. Raises InvalidRequest for a foreign one."""
        verdicts = self.groups.ack(group, receipts)
        return verdicts

    @_told
    def nack(self, group: str, receipts: list[str], delay_ms: int | None, reason: str | None) -> list[bool]:
        return self.groups.nack(group, receipts, delay_ms, reason)

    @_told
    def extend(self, group: str, receipts: list[str], visibility_timeout_ms: int | None) -> list[bool]:
        return self.groups.extend(group, receipts, visibility_timeout_ms)

    # --- cluster -----------------------------------------------------------------------------------------------------

    def cluster(self) -> wire.ClusterDescription:
        return wire.ClusterDescription(self.cluster_id, self.broker_id, self._brokers())

    def _brokers(self) -> list[wire.BrokerDescription]:
        return [wire.BrokerDescription(self.broker_id, self.me.url, True)]

    def metadata(self, names: list[str] | None) -> wire.Metadata:
        """Who leads what. Topics that do not exist are left out."""
        wanted = None if names is None else set(names)
        topics = [
            wire.TopicMetadata(
                topic.name,
                [
                    wire.PartitionLeader(p.number, self.broker_id, p.replica.leader_epoch, self.me.url)
                    for p in topic.partitions
                ],
            )
            for topic in self.topics
            if wanted is None or topic.name in wanted
        ]
        return wire.Metadata(self._brokers(), topics)

    def health(self) -> dict[str, object]:
        return {
            "status": "ok" if self.ready else "not_ready",
            "broker_id": self.broker_id,
            "cluster_id": self.cluster_id,
            "topics": sum(1 for _ in self.topics),
            "parked_receives": len(self.groups.lot.waiters),
            "disk_full": self.disk_is_full(),
        }

    def _check_open(self) -> None:
        if self._draining.is_set():
            raise Unavailable("this broker is shutting down", retry_after_s=0.5)


def _described(topic: Topic) -> wire.TopicDescription:
    partitions = [
        wire.PartitionDescription(
            partition.number,
            partition.replica.state.leader if partition.replica.state else None,
            partition.replica.leader_epoch,
            list(partition.replica.state.replicas) if partition.replica.state else [],
            sorted(partition.replica.state.isr) if partition.replica.state else [],
            partition.log.log_start_offset,
            partition.high_watermark,
            partition.log.size_bytes,
        )
        for partition in topic.partitions
    ]
    state = topic.state
    return wire.TopicDescription(
        state.name, partitions, state.config, topic_id=state.topic_id, replication_factor=state.replication_factor
    )
