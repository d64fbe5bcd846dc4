"""The unfinished messages of a queue group, each with its state.

    ready       available now, or waiting for an earlier message of its key
    in_flight   leased by a consumer
    scheduled   not due yet, or in a back-off after a nack

Listing consumes nothing. Each page comes from one leader. With priorities or delays the leader may have to scan the
whole log, with pauses for other greenlets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from portalmq.broker.cluster.routing import LocalWork, one_by_one, place_of
from portalmq.broker.cluster.rpc import TopicPartition
from portalmq.broker.cluster.rpc.queues import UNFINISHED, ListUnfinished, MessageState, UnfinishedRow, UnfinishedRows
from portalmq.broker.core.fold import HELD_MS
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.lanes import lane_position
from portalmq.broker.messages.browse import StoredMessage
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.past import BothClocks, GroupView
from portalmq.broker.partition.yielding import TimeSlice, in_short_turns
from portalmq.broker.queues.groups import Groups
from portalmq.broker.storage.batch import Record

PAGE_BYTES = 4 * 1024 * 1024
# A page ends after this many examined messages.
LOOK_MAX = 100_000


class PendingMessage(NamedTuple):
    """A message that is not done. `available_at_ms` is the time of its next possible delivery; None for now, and for a
    message that waits for an earlier one of its key."""

    stored: StoredMessage
    state: MessageState
    deliveries: int
    available_at_ms: int | None


class UnfinishedMessages:
    """Lists unfinished messages."""

    def __init__(self, groups: Groups, clock: Clock) -> None:
        self._groups = groups
        self._clock = clock

    def messages(
        self, name: str, topic_name: str, *, after: tuple[int, int] | None = None, forward: bool = True
    ) -> Iterator[PendingMessage]:
        """Yield the group's unfinished messages in the topic after `after` (partition, offset), partition by partition,
        each page read when it is needed. A group that was never used has finished nothing. Raises TopicNotFound,
        GroupModeMismatch, and the error of a leader."""
        topic = self._groups.topics.known(topic_name)
        self._groups.find_queue(name)
        first, behind = after or (0, -1)
        topic.place(first)
        for number in in_short_turns(range(first, topic.state.partitions)):
            place = place_of(topic.state, number)
            offset: int | None = behind + 1 if number == first else 0
            while offset is not None:
                request = ListUnfinished(name, *place, offset, 1_000)
                local = self.local_list(request)
                found = self._groups.leaders.call_one(UNFINISHED, request, local, forward=forward, repeatable=True)
                for at, timestamp_ms, record, state, deliveries, available_at_ms in found.rows:
                    stored = StoredMessage(topic_name, number, at, timestamp_ms, record)
                    yield PendingMessage(stored, state, deliveries, available_at_ms or None)
                offset = found.next_offset

    def local_list(self, request: ListUnfinished) -> LocalWork[UnfinishedRows]:
        return one_by_one(lambda place: self._list(place, request))

    def _list(self, place: TopicPartition, call: ListUnfinished) -> UnfinishedRows:
        partition = self._groups.partition(place)
        partition.wait_vouched()

        def view() -> GroupView:
            return self._groups.partition(place)

        return list_unfinished(view, call.group, call.offset, call.limit, self._clock)


def list_unfinished(
    view: Callable[[], GroupView], group: str, offset: int, limit: int, clock: BothClocks
) -> UnfinishedRows:
    """Return a page of the group's unfinished messages from `offset` on. `view` is looked up again after each pause."""
    partition = view()
    delivery = partition.groups.delivery.get(group)
    offset = max(offset, partition.log.log_start_offset)
    if delivery is not None and not partition.log.lanes.present:
        offset = max(offset, delivery.floor())
    end = partition.high_watermark
    rows: list[UnfinishedRow] = []
    turn, room, looks = TimeSlice(), PAGE_BYTES, LOOK_MAX
    while offset < end:
        piece = next(partition.reader.pieces(offset, end, 1_000), None)
        if piece is None:
            return UnfinishedRows(rows, None)
        for offset, record in enumerate(piece.records(), piece.start):
            row = _row(partition, delivery, offset, piece.batch.appended_at_ms, record, clock)
            if row is not None:
                rows.append(row)
                room -= len(record.value)
            if len(rows) >= limit or room <= 0:
                return UnfinishedRows(rows, offset + 1)
        offset = piece.end
        looks -= piece.end - piece.start
        if looks <= 0:
            return UnfinishedRows(rows, offset)
        if turn.pause_if_over():
            delivery = view().groups.delivery.get(group)
    return UnfinishedRows(rows, None)


def _row(
    partition: GroupView,
    delivery: GroupDelivery | None,
    offset: int,
    timestamp_ms: int,
    record: Record,
    clock: BothClocks,
) -> UnfinishedRow | None:
    """Return the message with its state; None when it is done."""
    if offset in partition.groups.cancelled:
        return None
    due_ms = record.deliver_at_ms or 0
    fresh: tuple[MessageState, int] = ("scheduled", due_ms) if due_ms > clock.wall_ms() else ("ready", 0)
    if delivery is None:
        return offset, timestamp_ms, record, fresh[0], 0, fresh[1]
    span = delivery.at(offset)
    if span is not None:
        if span.available_at_ms <= clock.now_ms() or span.available_at_ms >= HELD_MS:
            return offset, timestamp_ms, record, "ready", span.deliveries, 0
        state: MessageState = "in_flight" if span.leased else "scheduled"
        return offset, timestamp_ms, record, state, span.deliveries, span.available_at_ms
    spot = lane_position(offset, record.priority, record.deliver_at_ms, timestamp_ms)
    if delivery.is_dead(offset) or delivery.is_ahead(offset) or delivery.has_passed(spot):
        return None
    if record.expires_at_ms is not None and record.expires_at_ms <= clock.wall_ms():
        return None
    return offset, timestamp_ms, record, fresh[0], 0, fresh[1]
