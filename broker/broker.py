"""The broker as the API uses it: a method for each route, which raises the errors of the contract.

Broker -> wiring.py                its parts, and the events between them
       -> cluster/maintenance.py   periodic work
       -> peer_dispatch.py         the calls of other brokers
       -> ProduceHandler, MessageBrowser, ReceiveHandler, Settlement, GroupAdmin, ...   one for each kind of call
"""

from __future__ import annotations

import logging
from functools import cached_property

from portalmq import wire
from portalmq.broker.cluster.retry_budget import AT_ONCE, RetryBudget
from portalmq.broker.cluster.routing import NoSuchPartition
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition.long_poll import Peer
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.refusals import answer_to
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.peer_dispatch import PeerCall, peer_calls
from portalmq.broker.storage.errors import CorruptBatch, CorruptFile, OffsetPurged, Shortage, StorageFault, WrongLog
from portalmq.broker.wiring import Wiring
from portalmq.errors import NotFound, OffsetOutOfRange, PortalMQError, TopicNotFound, Unavailable

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
        self.schedule_runner.start()
        self.ready = True

    def drain(self) -> None:
        """Refuse new waits, end the present ones, and hand the leadership over."""
        self.ready = False
        self._draining.set()
        self.groups.long_polls.close()
        self.locks.drain()
        self.schedule_runner.close()
        self.group_coordinators.drain()
        self.membership.drain()

    def close(self) -> None:
        """Write pending records, save the folds, close the files, leave the cluster."""
        if not self._draining.is_set():
            self.drain()
        self.schedule_runner.close()
        self.maintenance.close()
        self.rates.close()
        self.clock_agreement.close()
        self.group_coordinators.close()
        self.producer_fencing.close()
        self.locks.close()
        self.fetchers.close()
        self.replication.close()
        self.membership.close()
        self.topics.close()
        self.greenlets.close()
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
                return answer_to(fault)
            case OffsetPurged():
                return OffsetOutOfRange(str(fault), outcome="unknown", log_start_offset=fault.log_start_offset)
            case CorruptBatch() | CorruptFile() | WrongLog():
                self.topics.report_damage(fault)
                return answer_to(fault)
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
            self.groups.check_growth(topic, request.partitions)
        return self.overview.describe_topic(self.topics.alter(name, request))

    def delete_topic(self, name: str, *, force: bool = False) -> None:
        """Delete the topic. Raises Unavailable while outputs that its commits have ordered are open, unless `force`."""
        self.topics.known(name)
        if not force:
            self.browser.check_outputs(name)
        self.topics.delete(name)

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

    # --- groups ------------------------------------------------------------------------------------------------------

    def put_group(
        self, name: str, patch: dict[str, object], initial: dict[str, object] | None = None
    ) -> tuple[wire.GroupDescription, bool]:
        created = self.groups.put(name, patch, initial)
        try:
            counted = self.group_admin.describe(name, leave_out=True)
            return self.offsets.describe_or(counted) if counted.mode == "stream" else counted, created
        except PortalMQError as error:
            error.outcome = "unknown"  # the group is put already
            raise

    def describe_group(self, name: str) -> wire.GroupDescription:
        is_stream = self.groups.get(name).config.mode == "stream"
        return self.offsets.describe(name) if is_stream else self.group_admin.describe(name)

    def list_groups(self) -> list[wire.GroupDescription]:
        return [
            self.offsets.describe_or(each) if each.mode == "stream" else each
            for each in in_short_turns(self.group_admin.describe_all())
        ]

    def health(self) -> dict[str, object]:
        """Return the state of this broker and of its replicas."""
        led = followed = under_replicated = quarantined = 0
        for partition in in_short_turns(self.topics.partitions()):
            led += partition.replica.leading
            followed += not partition.replica.leading
            under_replicated += partition.replica.leading and is_under_replicated(partition)
            quarantined += bool(partition.replica.quarantined)
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
        if self._draining.is_set():
            raise Unavailable("this broker is shutting down", retry_after_s=0.5)
        if producer is not None:
            self.producer_fencing.check_given(producer.id)


def is_under_replicated(partition: Partition) -> bool:
    """Return True when a replica of this partition, which is led here, is not in sync."""
    state = partition.replica.state
    return state is not None and len(state.isr) < len(state.replicas)
