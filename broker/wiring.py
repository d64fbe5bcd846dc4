"""The parts of a broker, constructed and connected. Nothing runs yet.

    membership, mirror, peers                       the other brokers, and calls to them
    topics, fetchers, replication                   the replicas on this broker, and their replication
    metadata_cache, leaders                         the leaders of all partitions, and calls to them
    produce_handler, browser, reader_fetch, ...     the calls of producers and readers
    groups, receive_handler, settlement, ...        the calls of consumers in queue groups
    group_coordinators, stream_partitions, offsets  the calls of members of stream groups
    schedule_runner, schedules                      recurring messages

Each part gets what it needs in its constructor. A part that is constructed later is passed as a function. The events of
the cluster and of partitions are connected here as well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from gevent.event import Event

from portalmq.broker.cluster.capacity import Capacity, Limits
from portalmq.broker.cluster.clock_agreement import ClockAgreement
from portalmq.broker.cluster.digests import Digests
from portalmq.broker.cluster.locks import Locks
from portalmq.broker.cluster.maintenance import Maintenance
from portalmq.broker.cluster.membership import Membership
from portalmq.broker.cluster.metadata_cache import MetadataCache
from portalmq.broker.cluster.overview import Overview
from portalmq.broker.cluster.peers import Peers, TLSFiles, trusting
from portalmq.broker.cluster.registry import Registry
from portalmq.broker.cluster.routing import LeaderRouter
from portalmq.broker.cluster.topic import Topic
from portalmq.broker.cluster.topics import Topics
from portalmq.broker.cluster.unclean_election import own_log_end
from portalmq.broker.messages.browse import MessageBrowser
from portalmq.broker.messages.idempotency import RepeatFinder
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.messages.produce import Admission, ProduceHandler
from portalmq.broker.messages.producer_fencing import ProducerFencing
from portalmq.broker.messages.rates import Rates
from portalmq.broker.messages.scheduled import ScheduledMessages
from portalmq.broker.messages.sql_queries import SqlQueries
from portalmq.broker.partition.cache import BatchCache
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.compaction import Compactor
from portalmq.broker.partition.disk_pace import DiskPace
from portalmq.broker.partition.greenlets import KeptGreenlets
from portalmq.broker.partition.native import NativeThreads
from portalmq.broker.partition.partition import Partition
from portalmq.broker.queues.backlog import Backlog
from portalmq.broker.queues.commit import GroupCommits
from portalmq.broker.queues.dead_letters import DeadLetters
from portalmq.broker.queues.group_admin import GroupAdmin
from portalmq.broker.queues.group_past import GroupPast
from portalmq.broker.queues.groups import Groups
from portalmq.broker.queues.message_traces import MessageTraces
from portalmq.broker.queues.moves import GroupMoves
from portalmq.broker.queues.offset_acks import OffsetAcks
from portalmq.broker.queues.outbox import Outboxes, OutputTopics
from portalmq.broker.queues.queue_sizes import QueueSizes
from portalmq.broker.queues.receive import ReceiveHandler
from portalmq.broker.queues.settle import Settlement
from portalmq.broker.queues.unfinished import UnfinishedMessages
from portalmq.broker.replication.fetch_server import FetchServer
from portalmq.broker.replication.fetcher import Fetchers
from portalmq.broker.schedules.runner import ScheduleRunner
from portalmq.broker.schedules.service import ScheduleService
from portalmq.broker.storage.disk import DiskGuard
from portalmq.broker.streams.group_coordinators import GroupCoordinators
from portalmq.broker.streams.offsets import Offsets
from portalmq.broker.streams.reader_fetch import ReaderFetch
from portalmq.broker.streams.shared_offset import SharedOffsets
from portalmq.broker.streams.stream_partitions import StreamPartitions
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.mirror import Changes
from portalmq.control_plane.schedules import ScheduleStore
from portalmq.control_plane.state import BrokerState
from portalmq.control_plane.stream_groups import StreamGroups

CACHE_BYTES = 32 * 1024 * 1024


class BrokerSettings(Limits, TLSFiles, Protocol):
    """The settings that a broker's parts need."""

    @property
    def data_directory(self) -> Path: ...
    @property
    def is_clustered(self) -> bool: ...
    @property
    def auto_create_topics(self) -> bool: ...
    @property
    def default_replication_factor(self) -> int: ...
    @property
    def replica_lag_ms(self) -> int: ...
    @property
    def fetch_wait_ms(self) -> int: ...
    @property
    def fetch_bytes_max(self) -> int: ...
    @property
    def parked_receives_max(self) -> int: ...
    @property
    def storage_threads(self) -> int: ...


class Wiring:
    """The parts of a Broker, and the host of its partitions (partition/host.py). `on_fatal` is called once with a fault
    after which the process must end."""

    membership: Membership
    topics: Topics
    replication: FetchServer

    def __init__(
        self,
        config: BrokerSettings,
        catalog: Catalog,
        *,
        broker_id: int,
        me: BrokerState,
        disk: DiskGuard,
        metrics: Metrics,
        on_fatal: Callable[[BaseException], None],
        clock: Clock | None = None,
        cluster_secret: str | None = None,
    ) -> None:
        self.config = config
        self.broker_id = broker_id
        self.incarnation = me.incarnation
        self.store_uuid = me.store_uuid
        self.cluster_id = catalog.cluster_id()
        self.cluster_secret = cluster_secret or catalog.cluster_secret()
        self._receipt_key = catalog.receipt_key()
        self.me = me
        self.clock = clock or Clock()
        self.pool = NativeThreads(config.storage_threads)
        self.disk_pace = DiskPace()
        self.greenlets = KeptGreenlets()
        self.cache = BatchCache(CACHE_BYTES)
        self.metrics = metrics
        self.ready = False
        self._draining = Event()
        self._in_sync: dict[tuple[str, int], tuple[int, ...]] = {}
        self._catalog = catalog
        self._disk = disk
        self._on_fatal = on_fatal
        self.lag_ms = config.replica_lag_ms

        self._join_cluster()
        self._hold_replicas()
        self._serve_groups()
        self._take_messages()
        self._share_streams()
        self._commit_and_order()
        self._recur()
        self._oversee()
        self._listen()

    def _join_cluster(self) -> None:
        """The other brokers, and calls to them."""
        self.peers = Peers(
            lambda: self.mirror.brokers,
            self.cluster_secret,
            on_trouble=lambda other, incarnation, refused: self.membership.suspect(other, incarnation, refused=refused),
            tls=trusting(self.config),
        )
        self.membership = Membership(
            self._catalog,
            self.broker_id,
            self.me,
            self.clock,
            cluster_id=self.cluster_id,
            on_fatal=self.storage_failed,
            has_files=lambda topic_id: self.topics.files.exist(topic_id),
            peers=self.peers,
            own_log_ends=lambda keys: [own_log_end(self.topics, *key) for key in keys],
            certificate=self.config.shown_to_brokers,
        )
        self.mirror = self.membership.mirror
        self.lease_ms = self.membership.lease_ms
        self.began_ms = self.clock.now_ms()
        self.clock_agreement = ClockAgreement(self.clock, self.broker_id, lambda: self.mirror.brokers, self.peers)

    def _hold_replicas(self) -> None:
        """The replicas on this broker, and their replication."""
        config = self.config
        self.compactor = Compactor(self, self.metrics.compacted)
        self.capacity = Capacity(config, self.mirror)
        self.topics = Topics(
            self,
            self._catalog,
            self.cluster_id,
            config.data_directory,
            capacity=self.capacity,
            polls=lambda broker_id: self.replication.polls(broker_id),
            auto_create=config.auto_create_topics,
            default_replication_factor=config.default_replication_factor if config.is_clustered else 1,
        )
        self.fetchers = Fetchers(self, self.peers, wait_ms=config.fetch_wait_ms, max_bytes=config.fetch_bytes_max)
        self.replication = FetchServer(self, self.topics)
        self.metadata_cache = MetadataCache(self.topics, self.mirror)
        self.leaders = LeaderRouter(self.broker_id, self.metadata_cache, self.peers)

    def _serve_groups(self) -> None:
        """The calls of consumers in queue groups."""
        peers, clock = self.peers, self.clock
        self.groups = groups = Groups(
            self._catalog,
            self.mirror,
            self.topics,
            self.metadata_cache,
            self.leaders,
            clock,
            self.metrics,
            self.capacity,
            receipt_key=self._receipt_key,
            parked_receives_max=self.config.parked_receives_max,
        )
        self.settlement = Settlement(groups)
        self.receive_handler = ReceiveHandler(groups, self.settlement, peers)
        self.offset_acks = OffsetAcks(groups, self._catalog.find_topic)
        self.queue_sizes = QueueSizes(groups, clock)
        self.shared_offsets = SharedOffsets(groups, clock)
        self.unfinished = UnfinishedMessages(groups, clock)
        self.dead_letters = DeadLetters(groups, clock)
        self.group_admin = GroupAdmin(self.broker_id, groups, self.mirror, peers, self.clock)
        self.group_past = GroupPast(self.group_admin, groups, peers, clock)

    def _take_messages(self) -> None:
        """The calls of producers and readers."""
        metadata_cache, leaders, peers = self.metadata_cache, self.leaders, self.peers
        self.producer_fencing = ProducerFencing(self.broker_id, self._catalog, self.membership, peers, self.clock)
        self.repeat_finder = RepeatFinder(metadata_cache, leaders)
        self._backlog = Backlog(self.clock)
        admission = Admission(self.producer_fencing.check, self._backlog.check)
        self.produce_handler = ProduceHandler(
            leaders, metadata_cache.topic, self.metrics.published, self.clock, admission, self.repeat_finder
        )
        self.browser = MessageBrowser(self.topics.known, metadata_cache, leaders, self.groups.long_polls)
        self.message_traces = MessageTraces(self.topics, metadata_cache, leaders)
        self.scheduled_messages = ScheduledMessages(self.topics.known, metadata_cache, leaders, self.clock)
        self.reader_fetch = ReaderFetch(self.groups)

    def _share_streams(self) -> None:
        """The calls of members of stream groups."""
        store = StreamGroups(self._catalog.plane)
        self.stream_partitions = StreamPartitions(self.groups, self.clock)
        self.group_coordinators = GroupCoordinators(
            (self.broker_id, self.incarnation),
            store,
            self.groups,
            self.stream_partitions,
            self.mirror,
            self.peers,
            self.clock,
        )
        self.offsets = Offsets(
            store,
            self.groups,
            self.stream_partitions,
            self.group_coordinators.roster_here,
            self.mirror,
            self.clock,
        )

    def _commit_and_order(self) -> None:
        """Commits of input and outputs, and the outboxes that append the outputs."""
        outputs = OutputTopics(self.topics, self._catalog, self.produce_handler.copies)
        self.outboxes = Outboxes(outputs)
        self.group_commits = GroupCommits(
            self.groups,
            self.settlement,
            outputs,
            self.outboxes,
            self.clock,
            self.metrics,
            self.offsets.check_reached,
        )
        self.group_moves = GroupMoves(
            self.groups, self.receive_handler, self.group_commits, self.settlement, self.queue_sizes, self.clock
        )

    def _recur(self) -> None:
        """Schedules: recurring messages."""
        store = ScheduleStore(self._catalog.plane)
        self.schedule_runner = ScheduleRunner(
            store, self.topics, self.clock, self._backlog.check, self.metrics.published, self.clock_agreement
        )
        self.schedules = ScheduleService(
            self.broker_id,
            store,
            self._catalog,
            self.topics,
            self.metadata_cache,
            self.leaders,
            self.schedule_runner,
            self.clock,
        )

    def _oversee(self) -> None:
        """Descriptions of the cluster, its registry and locks, and periodic work."""
        plane, me = self._catalog.plane, (self.broker_id, self.incarnation)
        self.overview = Overview(self.cluster_id, self.topics, self.metadata_cache, self.leaders, self.mirror)
        self.sql_queries = SqlQueries(self.topics)
        self.rates = Rates(self)
        self.digests = Digests(self.broker_id, self.topics, self.peers)
        self.registry = Registry(plane)
        self.locks = Locks(plane, lambda: self.mirror.brokers, me, self.clock)
        self.maintenance = Maintenance(self.topics, self.compactor, self._draining, self, sweep=self._sweep)

    def _sweep(self) -> None:
        self.receive_handler.sweep()
        self.groups.sweep()

    # --- what partitions need of their host ---------------------------------------------------------------------------

    def disk_is_full(self) -> bool:
        return self._disk.full(self.clock.now_ms())

    def disk_free_bytes(self) -> int:
        return self._disk.free_bytes()

    def partitions_here(self) -> tuple[Partition, ...]:
        return self.topics.partitions()

    def release_disk(self) -> bool:
        return self._disk.release()

    def storage_failed(self, fault: BaseException) -> None:
        """End the broker: its storage has failed."""
        self.ready = False
        self._on_fatal(fault)

    def committed(self, seconds: float) -> None:
        self.metrics.committed(seconds)

    # --- what changes -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Subscribe to the changes of the cluster."""
        self.membership.on_changed += [
            self.producer_fencing.on_cluster_changed,
            self.topics.sync,
            self.groups.sync,
            self._changed,
            self.rates.on_cluster_changed,
            self.group_coordinators.sync,
        ]
        self.membership.on_session_lost += [self.topics.session_lost, self.group_coordinators.session_lost]

    def _changed(self, changes: Changes) -> None:
        if changes.brokers:
            self.locks.brokers_changed()
        for key in changes.partitions:
            self._count_in_sync(key)
        if changes.partitions or changes.topics or changes.brokers:
            self.leaders.changed()
        self.schedule_runner.on_topics_changed(changes.topics)

    def _count_in_sync(self, key: tuple[str, int]) -> None:
        held = self.mirror.partitions.get(key)
        if held is None or held.value.leader != self.broker_id:
            self._in_sync.pop(key, None)
            return
        before, after = self._in_sync.get(key), held.value.isr
        self._in_sync[key] = after
        if before is not None and before != after:
            self.metrics.in_sync_changed(len(set(before) - set(after)), len(set(after) - set(before)))

    def on_leading(self, topic: Topic, partition: Partition) -> None:
        self.metrics.elected()
        self.groups.on_leading(topic, partition)
        self.outboxes.on_leading(topic, partition)
        self.schedule_runner.on_leading(topic, partition)
        self.leaders.changed()

    def on_stepped_down(self, topic: Topic, partition: Partition) -> None:
        self.groups.on_stepped_down(topic, partition)
        self.reader_fetch.moved(partition)
        self.outboxes.on_stepped_down(partition)
        self.schedule_runner.on_stepped_down(partition)

    def on_topic_grown(self, topic: Topic) -> None:
        self.groups.long_polls.move({topic.name})

    def on_topic_closing(self, topic: Topic) -> None:
        self.outboxes.on_closing(topic)

    def on_topic_removed(self, topic: Topic) -> None:
        self.groups.forget_topic(topic)
        self.schedule_runner.on_topic_removed(topic)
        self.overview.forget_topic(topic)
        self.metrics.forget_topic(topic.name)
