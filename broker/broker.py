"""The broker as the API sees it: one call a route, in the terms of the field, raising the errors of the contract.

It joins the rooms: the membership of the cluster, topics and their partitions here, what is followed and what is served
to followers, groups, and the way to other brokers.

    Broker -> Producing, Browsing, Receiving, Settling, Census, Overview     one for each kind of call
           -> Leaders -> Atlas, Peers                                        who serves what, here or in one hop
           -> Topics, Groups -> Mirror                                       what there is
           -> Membership, Fetchers, Replication, Pulse                       what runs beside the requests
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import gevent
from gevent.event import Event
from gevent.threadpool import ThreadPool

from portalmq import wire
from portalmq.broker.atlas import Atlas
from portalmq.broker.backlog import Backlog
from portalmq.broker.browsing import Browsing, Page, Stored
from portalmq.broker.cache import BatchCache
from portalmq.broker.census import Census
from portalmq.broker.clock import Clock
from portalmq.broker.committing import Committing
from portalmq.broker.compaction import Compacting
from portalmq.broker.config import BrokerConfig, cluster_secret_in
from portalmq.broker.coordinating import Coordinating
from portalmq.broker.dead_letters import DeadLetters
from portalmq.broker.fences import Fences
from portalmq.broker.fetcher import Fetchers
from portalmq.broker.fetching import Fetching
from portalmq.broker.finishing import Finishing
from portalmq.broker.forwarding import Leaders
from portalmq.broker.groups import Groups
from portalmq.broker.growth import Growth
from portalmq.broker.idempotency import Keyed, Repeats
from portalmq.broker.locks import Locks
from portalmq.broker.membership import Membership
from portalmq.broker.metrics import Metrics
from portalmq.broker.outbox import Outboxes, OutputTopics
from portalmq.broker.overview import Overview
from portalmq.broker.partition import Partition
from portalmq.broker.peers import Peers, trusting
from portalmq.broker.produce import Gate, Producing
from portalmq.broker.receiving import Receiving
from portalmq.broker.registry import Registry
from portalmq.broker.replication import Replication
from portalmq.broker.scheduled import BEGINNING, Due, Scheduled, SchedulePage
from portalmq.broker.settling import Settling, Verdict, Way
from portalmq.broker.sizing import Sizing
from portalmq.broker.storage.batch import Record
from portalmq.broker.storage.disk import DiskGuard
from portalmq.broker.storage.errors import CorruptBatch, DiskFull, StorageFault
from portalmq.broker.streams import StreamPartitions
from portalmq.broker.topics import Topic, Topics
from portalmq.broker.turns import Turns
from portalmq.broker.unclean import serve_standing
from portalmq.broker.unfinished import Unfinished
from portalmq.broker.waiting import Delivered, Peer
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.mirror import Changes
from portalmq.control_plane.state import BrokerState, topic_path
from portalmq.control_plane.stream_groups import StreamGroups
from portalmq.errors import NotFound, PortalMQError, StorageFull, TopicNotFound, Unavailable

log = logging.getLogger(__name__)

CACHE_BYTES = 32 * 1024 * 1024
SAVE_STATE_EVERY_S = 1.0
RETAIN_EVERY_S = 10.0
COMPACT_EVERY_S = 2.0
SWEEP_EVERY_S = 2.0
REST_EVERY_S = 60.0
GROUP_EXPIRY_MS = 7 * wire.DAY_MS
# A replica that cannot be opened (a disk without room) holds up the others no longer than this.
OPEN_WITHIN_S = 30.0
KNOWN_WITHIN_S = 3.0
KNOWN_POLL_S = 0.01
DISK_FULL = "the broker's disk is full: free space or add disk, then repeat"


P = ParamSpec("P")
T = TypeVar("T")


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
    """One broker. `on_fatal` is called once with a fault after which the process must end."""

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
        self.incarnation = me.incarnation
        self.store_uuid = me.store_uuid
        self.cluster_id = catalog.cluster_id()
        self.cluster_secret = cluster_secret_in(config) or catalog.cluster_secret()
        self.me = me
        self.clock = clock or Clock()
        self.pool = ThreadPool(config.storage_threads)
        self.cache = BatchCache(CACHE_BYTES)
        self.metrics = metrics
        self.ready = False
        self._draining = Event()
        self._in_sync: dict[tuple[str, int], frozenset[int]] = {}
        self._catalog = catalog
        self._disk = disk
        self._on_fatal = on_fatal
        self._upkeep: list[gevent.Greenlet] = []

        self.membership = Membership(
            catalog,
            broker_id,
            me,
            self.clock,
            on_fatal=self.storage_failed,
            has_files=self._has_files,
        )
        self.lag_ms = config.replica_lag_ms
        self.lease_ms = self.membership.lease_ms
        self.mirror = self.membership.mirror
        self.peers = Peers(self.mirror, self.cluster_secret, tls=trusting(config))
        self.membership.peers = self.peers
        self.peers.on_trouble = lambda other, incarnation, refused: self.membership.suspect(
            other, incarnation, refused=refused
        )
        self.compacting = Compacting(self, self.metrics.compacted)
        self.topics = Topics(
            self,
            catalog,
            self.cluster_id,
            config.data_directory,
            auto_create=config.auto_create_topics,
            default_replication_factor=config.default_replication_factor,
        )
        self.fetchers = Fetchers(self, self.peers, wait_ms=config.fetch_wait_ms, max_bytes=config.fetch_bytes_max)
        self.replication = Replication(self, self.topics)
        self.topics.pulse.polls = self.replication.polls
        atlas = Atlas(self.topics, self.mirror)
        self.leaders = Leaders(broker_id, atlas)
        self.groups = Groups(
            catalog,
            self.mirror,
            self.topics,
            atlas,
            self.leaders,
            self.peers,
            self.clock,
            parked_receives_max=config.parked_receives_max,
        )
        self._fences = Fences(broker_id, catalog, self.membership, self.peers, self.clock)
        self._repeats = Repeats(atlas, self.leaders, self.peers)
        gate = Gate(self._fences.check, Backlog(self.clock).check)
        self._producing = Producing(
            self.leaders, self.peers, atlas.topic, metrics.published, self.clock, gate, self._repeats
        )
        self._browsing = Browsing(atlas, self.leaders, self.peers, self.groups.lot)
        self._growth = Growth(self.mirror, atlas, self.leaders, self.peers)
        self._scheduled = Scheduled(atlas, self.leaders, self.peers, self.clock)
        self.fetching = Fetching(self._topic, atlas.partition, self.leaders, self.groups.lot)
        self._settling = Settling(self.groups, self.leaders, self.peers)
        self.finishing = Finishing(self.groups, self._topic, catalog.find_topic, self.leaders, self.peers)
        self.sizing = Sizing(self.groups, self._topic, self.leaders, self.peers, self.clock)
        self.turns = Turns(self.groups, self._topic, atlas, self.leaders, self.peers, self.clock)
        self.registry = Registry(catalog.plane)
        self.unfinished = Unfinished(self.groups, self._topic, atlas, self.leaders, self.peers, self.clock)
        self._receiving = Receiving(self.groups, self._settling, self.peers)
        outputs = OutputTopics(self.topics, catalog, self._topic, self._producing.copies)
        self.outboxes = Outboxes(outputs)
        self.committing = Committing(
            self.groups, self._settling, outputs, self.leaders, self.peers, self.outboxes, self.clock
        )
        self.dead_letters = DeadLetters(self.groups, self._topic, self.leaders, self.peers, self.clock)
        self._streaming = StreamPartitions(self.groups, atlas, self.leaders, self.peers, self.clock)
        self.streams = Coordinating(
            (broker_id, me.incarnation),
            StreamGroups(catalog.plane),
            self.groups,
            self._streaming,
            self._topic,
            self.topics.get_or_create,
            self.mirror,
            self.leaders,
            self.peers,
            self.clock,
        )
        self.committing.check_reached = self.streams.check_reached
        self._census = Census(broker_id, self.groups, self.mirror, self.peers)
        self._overview = Overview(self.cluster_id, self.topics, atlas, self.leaders, self.peers, self.mirror)
        self.locks = Locks(catalog.plane, lambda: self.mirror.brokers, (broker_id, me.incarnation), self.clock)
        self.calls = self._calls()
        self._listen()

    def _calls(self) -> dict[str, Callable[[bytes, Peer | None], bytes]]:
        """What other brokers may ask of this one: name -> (body, the asking broker's connection) -> answer."""
        return {
            "fetch": self.replication.serve,
            "produce": lambda body, peer: self._producing.serve(body),
            "first": lambda body, peer: self._repeats.serve(body),
            "fence": lambda body, peer: self._fences.serve(body),
            "browse": self._browsing.serve_browse,
            "purge": lambda body, peer: self._browsing.serve_purge(body),
            "scheduled": lambda body, peer: self._scheduled.serve_list(body),
            "cancel": lambda body, peer: self._scheduled.serve_cancel(body),
            "partitions": lambda body, peer: self._overview.serve_partitions(body),
            "known": lambda body, peer: self.groups.serve_known(body),
            "start": lambda body, peer: self.groups.serve_start(body),
            "receive": self._receiving.serve_receive,
            "replay": lambda body, peer: self._receiving.serve_replay(body),
            "interest": self._receiving.serve_interest,
            "settle": lambda body, peer: self._settling.serve(body),
            "finish": lambda body, peer: self.finishing.serve(body),
            "turn": lambda body, peer: self.turns.serve(body),
            "unfinished": lambda body, peer: self.unfinished.serve(body),
            "sizes": lambda body, peer: self.sizing.serve(body),
            "look": lambda body, peer: self.sizing.serve_look(body),
            "commit": lambda body, peer: self.committing.serve(body),
            "dead_letters": lambda body, peer: self.dead_letters.serve_list(body),
            "match_dead": lambda body, peer: self.dead_letters.serve_match(body),
            "redrive": lambda body, peer: self.dead_letters.serve_redrive(body),
            "drop_dead": lambda body, peer: self.dead_letters.serve_drop(body),
            "groups": lambda body, peer: self._census.serve_groups(body),
            "end_group": lambda body, peer: self._census.serve_end(body),
            "coordinate": lambda body, peer: self.streams.serve(body),
            "claim": lambda body, peer: self._streaming.serve_claim(body),
            "commit_offsets": lambda body, peer: self._streaming.serve_commit(body),
            "seek": lambda body, peer: self._streaming.serve_seek(body),
            "offsets": lambda body, peer: self._streaming.serve_standings(body),
            "standing": lambda body, peer: serve_standing(self.topics, body),
            **self.membership.calls,
        }

    def _listen(self) -> None:
        """Who hears of what."""
        self.topics.on_removed = self._topic_removed
        self.topics.on_grown = lambda topic: self.groups.lot.move({topic.name})
        self.topics.on_leading = self._leading
        self.topics.on_stepped_down = self._stepped_down
        self.groups.on_acked = self.metrics.acked
        self.groups.on_delivered = self.metrics.delivered
        self.groups.on_dead = self.metrics.dead
        self.groups.on_expired = self.metrics.expired
        self.membership.on_changed += [self._fences.hear, self.topics.sync, self.groups.sync, self._changed]
        self.membership.on_changed.append(self.streams.sync)
        self.membership.on_session_lost += [self.topics.session_lost, self.streams.session_lost]

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Become a member of the cluster, open what this broker holds, and begin to serve."""
        wire.prepare()  # from here on native threads decode too
        self.membership.start()
        self.locks.start()
        self.topics.start()
        if not self.topics.wait_settled(OPEN_WITHIN_S):
            log.warning("not all replicas are open after %.0f s: the broker serves without them", OPEN_WITHIN_S)
        self._upkeep = [
            gevent.spawn(self._every, SAVE_STATE_EVERY_S, self._save_state),
            gevent.spawn(self._every, RETAIN_EVERY_S, self._retain),
            gevent.spawn(self._every, SWEEP_EVERY_S, self.groups.sweep),
            gevent.spawn(self._every, COMPACT_EVERY_S, self._compact),
            gevent.spawn(self._every, REST_EVERY_S, self._rest),
        ]
        self.streams.start()
        self.ready = True

    def drain(self) -> None:
        """Take no new waits, end those there are, and hand the leadership over."""
        self.ready = False
        self._draining.set()
        self.groups.lot.close()
        self.locks.drain()
        self.streams.drain()
        self.membership.drain()

    def close(self) -> None:
        """Write what waits, save the folds, close the files, leave the cluster."""
        if not self._draining.is_set():
            self.drain()
        gevent.killall(self._upkeep)
        self.streams.close()
        self._fences.close()
        self.locks.close()
        self.fetchers.close()
        self.replication.close()
        self.membership.close()
        self.topics.close()
        self.peers.close()

    def _every(self, seconds: float, work: Callable[[], None]) -> None:
        while not self._draining.wait(seconds):
            try:
                work()
            except PortalMQError as error:
                log.warning("upkeep will be tried again: %s", error)
            except Exception as fault:  # noqa: BLE001 - upkeep that failed in any other way fails the broker
                self.storage_failed(fault)

    def _save_state(self) -> None:
        for partition in self.topics.partitions():
            partition.save_state()

    def _rest(self) -> None:
        for partition in self.topics.partitions():
            partition.rest_if_idle()

    def _retain(self) -> None:
        if self.disk_is_full():
            self._disk.release()  # sealing and dropping, which make room, need a little room themselves
        for topic in self.topics:
            config = topic.state.config
            for partition in tuple(topic.local.values()):
                try:
                    partition.retain(config.retention_ms, config.retention_bytes, GROUP_EXPIRY_MS)
                except PortalMQError as error:  # the others are not to wait for this one
                    log.warning("%s will be cleaned later: %s", partition, error)

    def _compact(self) -> None:
        for topic in tuple(self.topics):
            for partition in tuple(topic.local.values()):
                try:
                    self.compacting.look_after(partition, keeps_last=topic.state.config.cleanup == "compact")
                except PortalMQError as error:
                    log.warning("%s will be compacted later: %s", partition, error)

    # --- other brokers -----------------------------------------------------------------------------------------------

    @_told
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
        """What this broker stands on has given way: it ends."""
        self.ready = False
        self._on_fatal(fault)

    def committed(self, seconds: float) -> None:
        self.metrics.committed(seconds)

    # --- what changes ------------------------------------------------------------------------------------------------

    def _changed(self, changes: Changes) -> None:
        if changes.brokers:
            self.locks.brokers_changed()
        for key in changes.partitions:
            self._count_in_sync(key)
        if changes.partitions or changes.topics or changes.brokers:
            self.leaders.changed()

    def _count_in_sync(self, key: tuple[str, int]) -> None:
        held = self.mirror.partitions.get(key)
        if held is None or held.value.leader != self.broker_id:
            self._in_sync.pop(key, None)
            return
        after = frozenset(held.value.isr)
        before = self._in_sync.get(key, after)
        self._in_sync[key] = after
        self.metrics.in_sync_changed(len(before - after), len(after - before))

    def _leading(self, topic: Topic, partition: Partition) -> None:
        self.metrics.elected()
        self.groups.on_leading(topic, partition)
        self.outboxes.on_leading(topic, partition)
        self.leaders.changed()

    def _stepped_down(self, topic: Topic, partition: Partition) -> None:
        self.groups.on_stepped_down(topic, partition)
        self.fetching.moved(partition)
        self.outboxes.on_stepped_down(partition)

    def _topic_removed(self, topic: Topic) -> None:
        self.groups.forget_topic(topic)
        self.outboxes.on_removed(topic)
        self._overview.forget_topic(topic)
        self.metrics.forget_topic(topic.name)

    def _has_files(self, topic_id: str) -> bool:
        return self.topics.has_files(topic_id)

    # --- topics ------------------------------------------------------------------------------------------------------

    def create_topic(self, name: str, request: wire.CreateTopic) -> tuple[wire.TopicDescription, bool]:
        topic, created = self.topics.create(name, request)
        return self._overview.describe_topic(topic), created

    def use_topic(self, name: str) -> int:
        """The number of its partitions. A missing topic is made if the cluster makes topics at their first use, else
        raises TopicNotFound."""
        try:
            return self._topic(name).state.partitions
        except TopicNotFound:
            return self.topics.get_or_create(name).state.partitions

    def list_topics(self) -> list[wire.TopicSummary]:
        states = sorted((topic.state for topic in self.topics), key=lambda state: state.name)
        return [wire.TopicSummary(state.name, state.partitions, state.replication_factor) for state in states]

    def describe_topic(self, name: str) -> wire.TopicDescription:
        return self._overview.describe_topic(self._topic(name))

    def alter_topic(self, name: str, request: wire.AlterTopic, *, force: bool = False) -> wire.TopicDescription:
        """Change settings, add partitions. Raises KeyOrder, unless by `force`, where that breaks a group's order."""
        topic = self._topic(name)
        if not force:
            self._growth.check(topic, request.partitions)
        return self._overview.describe_topic(self.topics.alter(name, request))

    def delete_topic(self, name: str) -> None:
        self._topic(name)
        self.topics.delete(name)

    @_told
    def purge(self, name: str, *, partition: int | None, before_offset: int | None, forward: bool = True) -> None:
        """Remove messages below `before_offset`, or all that can be read."""
        self._browsing.purge(self._topic(name), partition=partition, before_offset=before_offset, forward=forward)

    def _topic(self, name: str) -> Topic:
        """The topic. One that another broker made just now may not be known here yet: the control plane is asked, and
        the mirror waited for."""
        try:
            return self.topics.get(name)
        except TopicNotFound:
            if self._catalog.find_topic(name) is None:
                raise
        self.mirror.note(topic_path(name))
        deadline = time.monotonic() + KNOWN_WITHIN_S
        while True:
            try:
                return self.topics.get(name)
            except TopicNotFound:
                if time.monotonic() > deadline:
                    raise Unavailable(f"this broker does not know topic {name!r} yet", retry_after_s=0.1) from None
            gevent.sleep(KNOWN_POLL_S)

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
        as_sent: tuple[int | str | None, ...] = (),
        keys: Sequence[Keyed | None] | None = None,
        forward: bool = True,
    ) -> list[wire.Produced | PortalMQError]:
        """Append messages; one result each, in order. Raises when the whole request was refused: nothing applied."""
        self._check_open()
        return self._producing.batch(
            self.topics.get_or_create(topic),
            records,
            partitions,
            acks=acks,
            partition=partition,
            producer=producer,
            idempotency_key=idempotency_key,
            as_sent=as_sent,
            keys=keys,
            forward=forward,
        )

    @_told
    def produce_range(
        self,
        topic: str,
        records: list[Record],
        *,
        acks: wire.Acks,
        partition: int,
        producer: wire.ProducerStamp | None,
        forward: bool = True,
    ) -> wire.ProducedRange:
        """Append a batch to one partition, all or nothing."""
        self._check_open()
        return self._producing.range(
            self.topics.get_or_create(topic), records, partition, acks=acks, producer=producer, forward=forward
        )

    def new_producer(self, name: str | None, *, instance: str = "", renews: bool = False) -> wire.ProducerIdentity:
        """An identity for an idempotent producer; a named one gets its id again, with the next epoch, and from then on
        no leader takes an older one."""
        if name is None:
            return self._catalog.next_producer(None)
        return self._fences.take_over(name, instance, renews=renews)

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
        forward: bool = True,
    ) -> Page:
        """Read on from a place, consuming nothing; waits up to `wait_ms` for the first message."""
        return self._browsing.browse(
            self._topic(name),
            number,
            offset=offset,
            position=position,
            at_ms=at_ms,
            limit=limit,
            wait_ms=wait_ms,
            peer=peer,
            forward=forward,
        )

    def read_all(self, name: str, limit: int | None, *, forward: bool = True) -> Iterator[Stored]:
        """The whole queue as it stands now, partition by partition."""
        return self._browsing.read_all(self._topic(name), limit, forward=forward)

    @_told
    def scheduled(self, name: str, *, after: Due = BEGINNING, limit: int, forward: bool = True) -> SchedulePage:
        """The messages that are still to come, by the time at which they are due."""
        return self._scheduled.page(self._topic(name), after=after, limit=limit, forward=forward)

    @_told
    def cancel_scheduled(self, name: str, partition: int, offset: int, *, forward: bool = True) -> None:
        """Take back a message whose time is still to come. Raises MessageNotFound."""
        self._scheduled.cancel(self._topic(name), partition, offset, forward=forward)

    # --- groups ------------------------------------------------------------------------------------------------------

    def put_group(self, name: str, patch: dict[str, object]) -> tuple[wire.GroupDescription, bool]:
        created = self.groups.put(name, patch)
        counted = self._census.describe(name, leave_out=True)
        return self.streams.describe_or(counted) if counted.mode == "stream" else counted, created

    @_told
    def describe_group(self, name: str) -> wire.GroupDescription:
        is_stream = self.groups.known(name).config.mode == "stream"
        return self.streams.describe(name) if is_stream else self._census.describe(name)

    @_told
    def list_groups(self) -> list[wire.GroupDescription]:
        return [
            self.streams.describe_or(each) if each.mode == "stream" else each for each in self._census.describe_all()
        ]

    @_told
    def delete_group(self, name: str) -> None:
        self._census.delete(name)

    @_told
    def receive(
        self,
        group: str,
        request: wire.ReceiveRequest,
        peer: Peer | None,
        *,
        forward: bool = True,
        is_first: bool = False,
    ) -> list[Delivered]:
        """Lease messages, waiting for the first one up to the request's `wait_ms`."""
        self._check_open()
        return self._receiving.receive(group, request, peer, forward=forward, is_first=is_first)

    @_told
    def ack_and_receive(
        self,
        group: str,
        request: wire.ReceiveRequest,
        peer: Peer | None,
        *,
        forward: bool = True,
        is_first: bool = False,
    ) -> tuple[list[Delivered], list[Verdict]]:
        """Ack the request's receipts, then receive; also answers which receipts counted."""
        self._check_open()
        return self._receiving.ack_and_receive(group, request, peer, forward=forward, is_first=is_first)

    @_told
    def ack(self, group: str, receipts: list[str], *, forward: bool = True) -> list[Verdict]:
        """Which receipts count (done, durably); False for a stale one, an error for one whose leader cannot be asked.
        Raises InvalidRequest for a foreign one."""
        return self._settling.settle(group, receipts, Way("ack"), forward=forward)

    @_told
    def nack(
        self,
        group: str,
        receipts: list[str],
        delay_ms: int | None,
        reason: str | None,
        *,
        unseen: bool = False,
        forward: bool = True,
    ) -> list[Verdict]:
        way = Way("release" if unseen else "nack", delay_ms, reason)
        return self._settling.settle(group, receipts, way, forward=forward)

    @_told
    def extend(
        self, group: str, receipts: list[str], visibility_timeout_ms: int | None, *, forward: bool = True
    ) -> list[Verdict]:
        return self._settling.settle(group, receipts, Way("extend", visibility_timeout_ms), forward=forward)

    # --- cluster -----------------------------------------------------------------------------------------------------

    def cluster(self) -> wire.ClusterDescription:
        return self._overview.cluster()

    def metadata(self, names: list[str] | None) -> wire.Metadata:
        """Who leads what. Topics that do not exist are left out."""
        for name in names or ():
            with contextlib.suppress(TopicNotFound):
                self._topic(name)
        return self._overview.metadata(names)

    def health(self) -> dict[str, object]:
        """How it stands with this broker, and with what it leads and follows."""
        partitions = self.topics.partitions()
        led = [partition for partition in partitions if partition.replica.leading]
        controller, lot = self.mirror.controller, self.groups.lot
        return {
            "status": "ok" if self.ready else "not_ready",
            "broker_id": self.broker_id,
            "cluster_id": self.cluster_id,
            "incarnation": self.incarnation,
            "control_plane": self._catalog.plane.state.value,
            "registered": self.membership.registered,
            "controller": controller.value.broker_id if controller else None,
            "topics": sum(1 for _ in self.topics),
            "led": len(led),
            "followed": len(partitions) - len(led),
            "under_replicated": sum(is_under_replicated(partition) for partition in led),
            "quarantined": sum(bool(partition.quarantined) for partition in partitions),
            "parked_receives": len(lot.waiters) - lot.interests,
            "parked_interests": lot.interests,
            "disk_full": self.disk_is_full(),
        }

    def offline_partitions(self) -> int:
        return self._overview.offline_partitions()

    def wall_ms(self) -> int:
        return self.clock.wall_ms()

    def _check_open(self) -> None:
        if self._draining.is_set():
            raise Unavailable("this broker is shutting down", retry_after_s=0.5)


def is_under_replicated(partition: Partition) -> bool:
    """Whether a replica of a partition that is led here is not in sync."""
    state = partition.replica.state
    return state is not None and len(state.isr) < len(state.replicas)
