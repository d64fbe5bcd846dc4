"""The broker as the API uses it: a method for each route, which raises the errors of the contract.

Broker -> wiring.py                its parts, and the events between them
       -> cluster/maintenance.py   periodic work
       -> peer_dispatch.py         the calls of other brokers
       -> ProduceHandler, MessageBrowser, ReceiveHandler, Settlement, GroupAdmin, ...   one for each kind of call
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import cached_property

from portalmq import wire
from portalmq.broker.cluster.retry_budget import AT_ONCE, RetryBudget
from portalmq.broker.cluster.routing import NoSuchPartition
from portalmq.broker.cluster.rpc.messages import SchedulePosition
from portalmq.broker.messages.browse import StoredMessage, StoredPage
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.messages.scheduled import BEGINNING, SchedulePage
from portalmq.broker.partition.long_poll import LeasedMessage, Peer, Portion
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.refusals import refusal_of
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.peer_dispatch import PeerCall, peer_calls
from portalmq.broker.queues.settle import SettleRequest, Verdict
from portalmq.broker.storage.errors import CorruptBatch, OffsetPurged, Shortage, StorageFault, WrongLog
from portalmq.broker.wiring import Wiring
from portalmq.errors import MessageNotFound, NotFound, OffsetOutOfRange, PortalMQError, TopicNotFound, Unavailable

log = logging.getLogger(__name__)

# A replica that cannot be opened, as on a full disk, delays the start no longer than this.
OPEN_WITHIN_S = 30.0


class Broker(Wiring):
    """One broker."""

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self, patience: RetryBudget = AT_ONCE) -> None:
        """Join the cluster, open the replicas of this broker, and begin to serve."""
        wire.prepare()  # from here on native threads decode too
        self.membership.start(patience)
        self.clock_agreement.start()
        self.locks.start()
        self.topics.start()
        if not self.topics.wait_settled(OPEN_WITHIN_S):
            log.warning("not all replicas are open after %.0f s: the broker serves without them", OPEN_WITHIN_S)
        self.maintenance.start()
        self.group_coordinators.start()
        self.ready = True

    def drain(self) -> None:
        """Refuse new waits, end the present ones, and hand the leadership over."""
        self.ready = False
        self._draining.set()
        self.groups.long_polls.close()
        self.locks.drain()
        self.group_coordinators.drain()
        self.membership.drain()

    def close(self) -> None:
        """Write pending records, save the folds, close the files, leave the cluster."""
        if not self._draining.is_set():
            self.drain()
        self.maintenance.close()
        self.clock_agreement.close()
        self.group_coordinators.close()
        self.producer_fencing.close()
        self.locks.close()
        self.fetchers.close()
        self.replication.close()
        self.membership.close()
        self.topics.close()
        self.peers.close()

    def explain(self, fault: Exception) -> PortalMQError | None:
        """Return the contract's error for an exception of any room; None for a bug. Its outcome is unknown where a part
        of the call may be applied. A storage fault ends the broker."""
        match fault:
            case NoSuchPartition():
                try:
                    self.topics.confirm_missing(fault)
                except PortalMQError as unsure:
                    return unsure
            case Shortage():
                return refusal_of(fault, "unknown")
            case OffsetPurged():
                return OffsetOutOfRange(str(fault), outcome="unknown", log_start_offset=fault.log_start_offset)
            case CorruptBatch() | WrongLog():
                return Unavailable(f"a file is damaged on this broker: {fault}", outcome="unknown")
            case StorageFault():
                self.storage_failed(fault)
                return Unavailable("the storage failed", outcome="unknown")
        return fault if isinstance(fault, PortalMQError) else None

    # --- other brokers -----------------------------------------------------------------------------------------------

    @cached_property
    def calls(self) -> dict[str, PeerCall]:
        """The answers to other brokers, by the name of the call."""
        return peer_calls(self)

    def serve_peer(self, name: str, body: bytes, peer: Peer | None) -> bytes:
        """Answer another broker, or refuse: nothing is forwarded a second time."""
        call = self.calls.get(name)
        if call is None:
            raise NotFound(f"brokers do not ask each other for {name[:100]!r}: is one of another version?")
        return call(body, peer)

    # --- topics ------------------------------------------------------------------------------------------------------

    def create_topic(self, name: str, request: wire.CreateTopic) -> tuple[wire.TopicDescription, bool]:
        topic, created = self.topics.create(name, request)
        return self.overview.describe_topic(topic), created

    def use_topic(self, name: str) -> int:
        """Return the number of its partitions. Create a missing topic if the cluster creates topics at their first use;
        raise TopicNotFound otherwise."""
        try:
            return self.topics.known(name).state.partitions
        except TopicNotFound:
            return self.topics.get_or_create(name).state.partitions

    def list_topics(self) -> list[wire.TopicSummary]:
        states = sorted((topic.state for topic in self.topics), key=lambda state: state.name)
        return [
            wire.TopicSummary(state.name, state.partitions, state.replication_factor)
            for state in in_short_turns(states)
        ]

    def describe_topic(self, name: str) -> wire.TopicDescription:
        return self.overview.describe_topic(self.topics.known(name))

    def alter_topic(self, name: str, request: wire.AlterTopic, *, force: bool = False) -> wire.TopicDescription:
        """Change settings, add partitions. Raises KeyOrder where that breaks a group's order, unless `force`."""
        topic = self.topics.known(name)
        if not force:
            self.partition_growth.check(topic, request.partitions)
        return self.overview.describe_topic(self.topics.alter(name, request))

    def delete_topic(self, name: str) -> None:
        self.topics.known(name)
        self.topics.delete(name)

    def purge(self, name: str, *, partition: int | None, before_offset: int | None, forward: bool = True) -> None:
        """Remove messages below `before_offset`, or all that can be read now."""
        self.browser.purge(self.topics.known(name), partition=partition, before_offset=before_offset, forward=forward)

    # --- messages ----------------------------------------------------------------------------------------------------

    def produce(self, topic: str, request: ProduceRequest) -> list[wire.Produced | PortalMQError]:
        """Append messages; return a result for each, in order. Raises when the whole request is refused."""
        self._check_producer(request.producer)
        return self.produce_handler.batch(self.topics.get_or_create(topic), request)

    def produce_range(self, topic: str, request: ProduceRequest) -> wire.ProducedRange:
        """Append a batch to the partition of the request, all or nothing."""
        self._check_producer(request.producer)
        return self.produce_handler.range(self.topics.get_or_create(topic), request)

    def new_producer(self, name: str | None, *, instance: str = "", renews: bool = False) -> wire.ProducerIdentity:
        """Return an identity for an idempotent producer. A named one gets its id again with the next epoch; from then
        on leaders refuse older ones."""
        if name is None:
            return self._catalog.next_producer(None)
        return self.producer_fencing.take_over(name, instance, renews=renews)

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
    ) -> StoredPage:
        """Read from an offset, position or time on, consuming nothing; wait up to `wait_ms` for the first message."""
        return self.browser.browse(
            self.topics.known(name),
            number,
            offset=offset,
            position=position,
            at_ms=at_ms,
            limit=limit,
            wait_ms=wait_ms,
            peer=peer,
            forward=forward,
        )

    def read_all(self, name: str, limit: int | None, *, forward: bool = True) -> Iterator[StoredMessage]:
        """Yield all messages that are in the queue now, partition by partition."""
        return self.browser.read_all(self.topics.known(name), limit, forward=forward)

    def scheduled(
        self, name: str, *, after: SchedulePosition = BEGINNING, limit: int, forward: bool = True
    ) -> SchedulePage:
        """Return scheduled messages in the order of their due times."""
        return self.scheduled_messages.page(self.topics.known(name), after=after, limit=limit, forward=forward)

    def cancel_scheduled(self, name: str, partition: int, offset: int, *, forward: bool = True) -> None:
        """Cancel a scheduled message. Raises MessageNotFound."""
        try:
            self.scheduled_messages.cancel(self.topics.known(name), partition, offset, forward=forward)
        except NoSuchPartition as missing:
            self.topics.confirm_missing(missing)
            raise MessageNotFound(f"topic {name!r} has no partition {partition}") from None

    # --- groups ------------------------------------------------------------------------------------------------------

    def put_group(
        self, name: str, patch: dict[str, object], initial: dict[str, object] | None = None
    ) -> tuple[wire.GroupDescription, bool]:
        created = self.groups.put(name, patch, initial)
        counted = self.group_admin.describe(name, leave_out=True)
        return self.offsets.describe_or(counted) if counted.mode == "stream" else counted, created

    def describe_group(self, name: str) -> wire.GroupDescription:
        is_stream = self.groups.get(name).config.mode == "stream"
        return self.offsets.describe(name) if is_stream else self.group_admin.describe(name)

    def list_groups(self) -> list[wire.GroupDescription]:
        return [
            self.offsets.describe_or(each) if each.mode == "stream" else each
            for each in in_short_turns(self.group_admin.describe_all())
        ]

    def delete_group(self, name: str) -> None:
        self.group_admin.delete(name)

    def receive(
        self,
        group: str,
        request: wire.ReceiveRequest,
        peer: Peer | None,
        *,
        forward: bool = True,
        is_first: bool = False,
        portion: Portion | None = None,
    ) -> list[LeasedMessage]:
        """Lease messages; wait for the first one up to the request's `wait_ms`."""
        self._check_open()
        return self.receive_handler.receive(group, request, peer, forward=forward, is_first=is_first, portion=portion)

    def ack_and_receive(
        self,
        group: str,
        request: wire.ReceiveRequest,
        peer: Peer | None,
        *,
        forward: bool = True,
        is_first: bool = False,
        portion: Portion | None = None,
    ) -> tuple[list[LeasedMessage], list[Verdict]]:
        """Ack the request's receipts, then receive; return the verdicts of the receipts too."""
        self._check_open()
        return self.receive_handler.ack_and_receive(
            group, request, peer, forward=forward, is_first=is_first, portion=portion
        )

    def ack(self, group: str, receipts: list[str], *, forward: bool = True) -> list[Verdict]:
        """Ack, durably: True for each valid receipt, False for a stale one, an error where the leader cannot be asked.
        Raises InvalidRequest for a receipt of another group."""
        return self.settlement.settle(group, receipts, SettleRequest("ack"), forward=forward)

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
        settle_request = SettleRequest("release" if unseen else "nack", delay_ms, reason)
        return self.settlement.settle(group, receipts, settle_request, forward=forward)

    def extend(
        self, group: str, receipts: list[str], visibility_timeout_ms: int | None, *, forward: bool = True
    ) -> list[Verdict]:
        return self.settlement.settle(group, receipts, SettleRequest("extend", visibility_timeout_ms), forward=forward)

    # --- cluster -----------------------------------------------------------------------------------------------------

    def cluster(self) -> wire.ClusterDescription:
        return self.overview.cluster()

    def metadata(self, names: list[str] | None) -> wire.Metadata:
        """Return the leaders. Topics that do not exist are left out."""
        for name in names or ():
            with contextlib.suppress(TopicNotFound):
                self.topics.known(name)
        return self.overview.metadata(names)

    def health(self) -> dict[str, object]:
        """Return the state of this broker and of its replicas."""
        led = followed = under_replicated = quarantined = 0
        for partition in in_short_turns(self.topics.partitions()):
            led += partition.replica.leading
            followed += not partition.replica.leading
            under_replicated += partition.replica.leading and is_under_replicated(partition)
            quarantined += bool(partition.quarantined)
        controller, long_polls = self.mirror.controller, self.groups.long_polls
        return {
            "status": "ok" if self.ready else "not_ready",
            "broker_id": self.broker_id,
            "cluster_id": self.cluster_id,
            "incarnation": self.incarnation,
            "control_plane": self._catalog.plane.state.value,
            "registered": self.membership.registered,
            "controller": controller.value.broker_id if controller else None,
            "topics": sum(1 for _ in self.topics),
            "led": led,
            "followed": followed,
            "under_replicated": under_replicated,
            "quarantined": quarantined,
            "parked_receives": len(long_polls.waiters) - long_polls.interests,
            "parked_interests": long_polls.interests,
            "disk_full": self.disk_is_full(),
            "clocks_differ": self.clock_agreement.differs,
        }

    def wall_ms(self) -> int:
        return self.clock.wall_ms()

    def _check_producer(self, producer: wire.ProducerStamp | None) -> None:
        self._check_open()
        if producer is not None:
            self.producer_fencing.check_given(producer.id)

    def _check_open(self) -> None:
        if self._draining.is_set():
            raise Unavailable("this broker is shutting down", retry_after_s=0.5)


def is_under_replicated(partition: Partition) -> bool:
    """Return True when a replica of this partition, which is led here, is not in sync."""
    state = partition.replica.state
    return state is not None and len(state.isr) < len(state.replicas)
