"""The life of a message: who appended it, who got it and when, and what became of it.

The leader of its partition tells it. While no leader answers, a follower does, if the broker that is asked has a
replica: then the answer says up to which offset the log is known there. Copies, of dead letters and of messages that
are delivered at another time, are looked up by their message ids: the log of the source does not say where they are.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from portalmq.broker.cluster.metadata_cache import MetadataCache
from portalmq.broker.cluster.routing import LeaderRouter, LocalWork, one_by_one
from portalmq.broker.cluster.rpc import TopicPartition
from portalmq.broker.cluster.rpc.messages import LOCATE, TRACE, LocateCall, TraceCall, TracedLife
from portalmq.broker.cluster.topics import Topics
from portalmq.broker.core.queue.biography import RecordOrigin
from portalmq.broker.partition.history import TracedMessage, trace
from portalmq.broker.partition.partition import Partition
from portalmq.broker.queues.outbox import output_id
from portalmq.broker.storage.batch import Batch, BatchKind
from portalmq.contract.history import TraceEvent
from portalmq.errors import MessageNotFound, PartitionNotFound, PortalMQError, Unavailable

EVENTS_MAX = 1_000
# How long one call looks for copies: each search asks all leaders of a topic.
LOCATE_WITHIN_S = 2.0


@dataclass(eq=False, repr=False)
class MessageTraces:
    """Tells the lives of messages."""

    _topics: Topics
    _metadata_cache: MetadataCache
    _leaders: LeaderRouter

    def trace(
        self,
        topic_name: str,
        number: int,
        offset: int,
        *,
        after: int = 0,
        limit: int = EVENTS_MAX,
        local: bool = False,
        forward: bool = True,
    ) -> TracedLife:
        """Return a page of events. With `local` this broker's replica tells it, whether it leads or follows. Raises
        TopicNotFound, MessageNotFound, Unavailable; NotLeader without `forward`, or without a replica for `local`."""
        topic = self._topics.known(topic_name)
        try:
            place = topic.place(number)
        except PartitionNotFound:
            raise MessageNotFound(f"topic {topic_name!r} has no partition {number}") from None
        request = TraceCall(*place, offset, after, limit)
        replica = topic.local.get(number)
        if local and replica is not None:
            found = _page(replica, request)
        else:
            try:
                found = self._leaders.call_one(
                    TRACE, request, self.local_trace(request), forward=forward and not local, repeatable=True
                )
            except Unavailable:
                if replica is None or replica.closed or not forward:
                    raise
                found = _page(replica, request)
        until = time.monotonic() + LOCATE_WITHIN_S
        copied: dict[int, bool] = {}
        for index, message_id in found.copies:
            if copied and time.monotonic() >= until:  # the next page begins with this copy
                found.events, found.next = found.events[:index], after + index
                break
            copied[index] = self._locate(topic_name, found.events[index], message_id)
        found.events = [event for index, event in enumerate(found.events) if copied.get(index, True)]
        return found

    def local_trace(self, request: TraceCall) -> LocalWork[TracedLife]:
        return one_by_one(lambda place: _page(self._metadata_cache.partition(place), request))

    # --- copies of dead letters, and of messages that are delivered at another time ----------------------------------

    def _locate(self, topic_name: str, copied: TraceEvent, message_id: bytes) -> bool:
        """Complete the event with the copy's place. Return False where the copy is not found: its topic may be
        deleted, or the copy gone."""
        copied.to_topic = copied.to_topic or topic_name
        try:
            state = self._topics.known(copied.to_topic).state
            request = LocateCall(state.name, state.topic_id, list(range(state.partitions)), message_id)
            outcomes = self._leaders.call(LOCATE, request, self.local_locate(request), repeatable=True)
        except PortalMQError:
            return False
        for place, found in outcomes.items():
            if not isinstance(found, PortalMQError) and found:
                copied.to_id = f"{place.number}-{found[0]}"
                return True
        return False

    def local_locate(self, request: LocateCall) -> LocalWork[list[int]]:
        def locate(place: TopicPartition) -> list[int]:
            partition = self._metadata_cache.partition(place)
            log, pool = partition.log, partition.host.pool
            found = partition.reader.on_native(pool, log.find_message_id, request.message_id, 0)
            return [found[0], found[2]] if found is not None and found[0] < partition.high_watermark else []

        return one_by_one(locate)


def _page(partition: Partition, request: TraceCall) -> TracedLife:
    found = trace(partition, request.offset)
    events, upto = found.biography.events, request.after + request.limit
    is_last = found.is_whole and upto >= len(events)
    return TracedLife(
        found.timestamp_ms,
        found.record,
        events[request.after : upto],
        found.replicas,
        found.as_of,
        None if is_last else min(upto, len(events)),
        found.incomplete_below,
        _copies(partition, found, request.offset, request.after, upto),
    )


def _copies(partition: Partition, found: TracedMessage, offset: int, after: int, upto: int) -> list[tuple[int, bytes]]:
    copies: list[tuple[int, bytes]] = []
    for index, order in found.biography.copies:
        if after <= index < upto:
            message_id = output_id(partition.topic_id, partition.number, _order_at(order), offset)
            copies.append((index - after, message_id))
    return copies


def _order_at(origin: RecordOrigin) -> Batch:
    return Batch(origin.offset, 1, 0, BatchKind.DEAD, origin.leader_epoch, origin.at_ms)
