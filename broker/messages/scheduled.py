"""Delayed messages that are not due yet: list them by due time, cancel them, and move them to another time.

    list      every leader returns the first delayed messages of its partitions; the broker that serves the request
              merges them
    cancel    one CANCEL record in the message's partition: from then on no group receives the message. It stays in the
              log, where browsing finds it
    move      one RESCHEDULE record cancels messages of a partition, and orders copies that are due at another time, or
              now (queues/outbox.py). A copy has a new id

A message is due by the leader's wall clock or by the time of the log, whichever is later. Delivery of a delayed message
moves the log's time to its due time, so a delivered message is never cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import NamedTuple

import msgspec

from portalmq.broker.cluster.metadata_cache import MetadataCache
from portalmq.broker.cluster.routing import LeaderRouter, LocalWork, one_by_one
from portalmq.broker.cluster.rpc import Outcomes, TopicPartition, first_error, values_of
from portalmq.broker.cluster.rpc.messages import (
    CANCEL,
    MATCH_SCHEDULED,
    MOVE_SCHEDULED,
    SCHEDULED,
    CancelScheduled,
    ListScheduled,
    Rows,
    ScheduledCall,
    ScheduledMatch,
    ScheduledShare,
    SchedulePosition,
)
from portalmq.broker.cluster.topic import Topic
from portalmq.broker.core.queue.lanes import DELAYED
from portalmq.broker.core.queue.predicate import parse
from portalmq.broker.core.queue.records import Cancel, Reschedule, ranges_of
from portalmq.broker.messages.browse import StoredMessage
from portalmq.broker.messages.matching import MatchBudget, candidate_of
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.writer import Pending
from portalmq.broker.partition.yielding import TimeSlice
from portalmq.broker.storage.batch import BatchKind, Record
from portalmq.errors import InvalidRequest, MessageNotFound, PartitionNotFound, PortalMQError

# The payloads of a page: it ends above this.
PAGE_BYTES = 8 * 1024 * 1024
# The most messages that a page passes: it ends there.
PASSED_MAX = 50_000

_encode = msgspec.msgpack.Encoder().encode


BEGINNING = SchedulePosition(0, 0, -1)


class SchedulePage(NamedTuple):
    """Messages in the order of their due times; the next page begins after `after`, None at the end. A page of large
    messages, or one that has passed many cancelled ones, may have fewer than its limit, or none."""

    messages: list[StoredMessage]
    after: SchedulePosition | None


class ScheduleChange(NamedTuple):
    """What to do with scheduled messages: deliver them at `deliver_at_ms` (0: now), or with `cancels` not at all.
    `ids` are (partition, offset); without `ids` and `where` all are meant."""

    deliver_at_ms: int = 0
    cancels: bool = False
    ids: Sequence[tuple[int, int]] | None = None
    where: object = None
    limit: int = 0
    dry_run: bool = False


@dataclass(eq=False, repr=False)
class ScheduledMessages:
    """Lists and cancels. `_known` finds a topic by name, and waits for one that was just created."""

    _known: Callable[[str], Topic]
    _metadata_cache: MetadataCache
    _leaders: LeaderRouter
    _clock: Clock

    def _due_by_ms(self, partition: Partition) -> int:
        """Return the time up to which messages are due, and may be delivered already."""
        return max(self._clock.wall_ms(), partition.replica.last_timestamp_ms)

    # --- listing -----------------------------------------------------------------------------------------------------

    def page(
        self, topic: str, *, after: SchedulePosition = BEGINNING, limit: int, forward: bool = True
    ) -> SchedulePage:
        """Return at most `limit` scheduled messages after `after`. Raises the error of a leader."""
        state = self._known(topic).state
        request = ListScheduled(topic, state.topic_id, list(range(state.partitions)), after, limit + 1)
        if not forward:
            self._leaders.check_led_here(request.places)
        local = self.local_list(request)
        outcomes = self._leaders.call(SCHEDULED, request, local, forward=forward, repeatable=True)
        found: list[tuple[SchedulePosition, StoredMessage]] = []
        cuts: list[SchedulePosition] = []
        for place, each in values_of(outcomes).items():
            cuts += [each.cut_at] if each.cut_at is not None else []
            for due_ms, offset, timestamp_ms, record in each.rows:
                stored = StoredMessage(place.topic, place.number, offset, timestamp_ms, record)
                found.append((SchedulePosition(due_ms, place.number, offset), stored))
        found.sort(key=lambda row: row[0])
        page = [row for row in found[:limit] if not cuts or row[0] <= min(cuts)]
        is_full = len(page) == limit and len(found) > limit
        next_after = page[-1][0] if is_full else min(cuts, default=None)
        return SchedulePage([stored for _, stored in page], next_after)

    def local_list(self, request: ListScheduled) -> LocalWork[Rows]:
        """The first messages of all these partitions together."""

        def local(places: Sequence[TopicPartition]) -> Outcomes[Rows]:
            found = one_by_one(self._metadata_cache.partition)(places)
            partitions = {place: each for place, each in found.items() if not isinstance(each, PortalMQError)}
            pages = {place: Rows([]) for place in partitions}
            streams = [self._to_come(place, partition, request.after) for place, partition in partitions.items()]
            turn, room, passed, left = TimeSlice(), PAGE_BYTES, 0, request.limit
            for due, place in merge(*streams):
                if _is_left(partitions[place], due.offset):
                    for timestamp_ms, record in _read(partitions[place], due.offset):
                        pages[place].rows.append((due.due_ms, due.offset, timestamp_ms, record))
                        room -= len(record.value)
                    left -= 1
                else:
                    passed += 1
                if room <= 0 or passed >= PASSED_MAX:
                    for page in pages.values():
                        page.cut_at = due
                    break
                if not left:
                    break
                turn.pause_if_over()  # each message may cost a read
            errors = {place: error for place, error in found.items() if isinstance(error, PortalMQError)}
            return errors | pages

        return local

    def _to_come(
        self, place: TopicPartition, partition: Partition, after: SchedulePosition
    ) -> Iterator[tuple[SchedulePosition, TopicPartition]]:
        """Yield the scheduled messages of the partition behind `after`, in the order of the list, and those that are
        not left any more."""
        number = place.number
        since_ms = self._due_by_ms(partition) + 1
        due_ms, offset = since_ms, 0
        if after.due_ms >= since_ms:  # the order is by time, then by partition, then by offset
            due_ms = after.due_ms + (number < after.number)
            offset = after.offset + 1 if number == after.number else 0
        end, lanes = partition.high_watermark, partition.log.lanes
        for row in merge(*(lanes.after(lane, due_ms, offset, end) for lane in lanes.present if lane >= DELAYED)):
            yield SchedulePosition(row[0], number, row[1]), place

    # --- many at once ------------------------------------------------------------------------------------------------

    def change(self, topic: str, how: ScheduleChange, *, forward: bool = True) -> tuple[int, int]:
        """Move or cancel scheduled messages: those with `ids`, those that match `where`, or all; the first `limit` by
        due time. Return how many matched, and how many were changed. Raises the error of a leader; with an unknown
        outcome when a part was changed."""
        if how.ids is not None and how.where is not None:
            raise InvalidRequest("give ids or where, not both")
        if how.where is not None:
            parse(how.where)
        state = self._known(topic).state
        shares = [ScheduledShare(number) for number in range(state.partitions)]
        if how.ids is not None:
            named: dict[int, list[int]] = {}
            for number, offset in how.ids:
                named.setdefault(self._known(topic).place(number).number, []).append(offset)
            shares = [ScheduledShare(number, tuple(offsets)) for number, offsets in sorted(named.items())]
        search = ScheduledCall(topic, state.topic_id, shares, how.where, how.limit)
        if not forward:
            self._leaders.check_led_here(search.places)
        found = self._leaders.call(MATCH_SCHEDULED, search, self.local_match(search), forward=forward, repeatable=True)
        matches = {place.number: match for place, match in values_of(found).items()}
        matched = sum([match.count for match in matches.values()])
        rows = sorted([(*row, number) for number, match in matches.items() for row in match.first])[: how.limit]
        if how.dry_run or not rows:
            return matched, 0
        chosen: dict[int, list[int]] = {}
        for _, offset, number in rows:
            chosen.setdefault(number, []).append(offset)
        wanted = [ScheduledShare(number, tuple(offsets)) for number, offsets in sorted(chosen.items())]
        return matched, self._move(topic, state.topic_id, wanted, how, forward=forward)

    def _move(
        self, topic: str, topic_id: str, shares: list[ScheduledShare], how: ScheduleChange, *, forward: bool
    ) -> int:
        call = ScheduledCall(topic, topic_id, shares, deliver_at_ms=how.deliver_at_ms, cancels=how.cancels)
        if not forward:
            self._leaders.check_led_here(call.places)
        outcomes = self._leaders.call(MOVE_SCHEDULED, call, self.local_move(call), forward=forward)
        error = first_error(outcomes.values())
        if error is not None:
            if any(not isinstance(outcome, PortalMQError) for outcome in outcomes.values()):
                error.outcome = "unknown"
            raise error
        return sum(values_of(outcomes).values())

    def move(self, topic: str, number: int, offset: int, deliver_at_ms: int = 0, *, forward: bool = True) -> None:
        """Move one message to another time, 0 for now, durably on return. Raises MessageNotFound for one that is due,
        was never delayed, or was cancelled or moved already."""
        missing = MessageNotFound(
            f"message {number}-{offset} of topic {topic!r} is not scheduled: it is not there, is due already, or was"
            " moved or cancelled",
            outcome="unknown",  # an earlier copy of this call may have moved it
        )
        state = self._known(topic).state
        if number >= state.partitions:
            raise missing
        shares = [ScheduledShare(number, (offset,))]
        if not self._move(topic, state.topic_id, shares, ScheduleChange(deliver_at_ms), forward=forward):
            raise missing

    def local_match(self, call: ScheduledCall) -> LocalWork[ScheduledMatch]:
        predicate = parse(call.where) if call.where is not None else None
        budget = MatchBudget("and nothing was changed: name the messages by their ids, as GET …/scheduled lists them")
        by_place = call.by_place()

        def match(place: TopicPartition) -> ScheduledMatch:
            partition, offsets = self._metadata_cache.partition(place), by_place[place].offsets
            found = ScheduledMatch(0, [])
            for due_ms, offset in self._candidates(place, partition, offsets):
                budget.spend()
                if not _is_left(partition, offset):
                    continue
                if predicate is not None and not any(
                    predicate.matches(candidate_of(record)) for _, record in _read(partition, offset)
                ):
                    continue
                found.count += 1
                if len(found.first) < call.limit:
                    found.first.append((due_ms, offset))
            return found

        return one_by_one(match)

    def _candidates(
        self, place: TopicPartition, partition: Partition, offsets: tuple[int, ...] | None
    ) -> Iterator[tuple[int, int]]:
        if offsets is not None:
            yield from self._still_scheduled(partition, offsets)
            return
        for position, _ in self._to_come(place, partition, BEGINNING):
            yield position.due_ms, position.offset

    def _still_scheduled(self, partition: Partition, offsets: Sequence[int]) -> list[tuple[int, int]]:
        """Return (due_ms, offset) of those that are readable, not due and not cancelled, by due time."""
        start, end, cancelled = _start_of(partition), partition.high_watermark, partition.groups.cancelled
        wanted = {offset for offset in offsets if start <= offset < end and offset not in cancelled}
        due_by_ms = self._due_by_ms(partition)
        positions = partition.log.lanes.lane_positions(wanted)
        return sorted([(due_ms, at) for lane, due_ms, at in positions if lane >= DELAYED and due_ms > due_by_ms])

    def local_move(self, call: ScheduledCall) -> LocalWork[int]:
        by_place = call.by_place()

        def move(place: TopicPartition) -> int:
            partition = self._metadata_cache.partition(place)
            asked = by_place[place].offsets or ()
            partition.wait_allotted(asked)
            offsets = [offset for _, offset in self._still_scheduled(partition, asked)]
            if not offsets:
                _wait_settled(partition)
                offsets = [offset for _, offset in self._still_scheduled(partition, asked)]
            if not offsets:
                return 0
            if call.cancels:
                _append_cancel(partition, offsets).wait()
                return len(offsets)
            record = Reschedule(ranges_of(offsets), self._clock.wall_ms(), call.deliver_at_ms)
            pending = partition.append_control(BatchKind.RESCHEDULE, _encode(record))
            partition.groups.reschedule(pending.base_offset, record)
            pending.wait()
            return len(offsets)

        return one_by_one(move)

    # --- cancelling --------------------------------------------------------------------------------------------------

    def cancel(self, topic: str, number: int, offset: int, *, forward: bool = True) -> None:
        """Cancel a message, durably on return. Raises MessageNotFound, also for one that is due or was never
        delayed."""
        try:
            request = CancelScheduled(*self._known(topic).place(number), offset)
        except PartitionNotFound:
            raise MessageNotFound(f"topic {topic!r} has no partition {number}") from None
        self._leaders.call_one(CANCEL, request, self.local_cancel(request), forward=forward)

    def local_cancel(self, request: CancelScheduled) -> LocalWork[bool]:
        def cancel(place: TopicPartition) -> bool:
            self._cancel_here(self._metadata_cache.partition(place), request.offset)
            return True

        return one_by_one(cancel)

    def _cancel_here(self, partition: Partition, offset: int) -> None:
        partition.wait_allotted([offset])
        try:
            self._check_scheduled(partition, offset)
        except MessageNotFound:
            _wait_settled(partition)
            self._check_scheduled(partition, offset)
        _append_cancel(partition, [offset]).wait()

    def _check_scheduled(self, partition: Partition, offset: int) -> None:
        """Raise MessageNotFound unless the message can be cancelled now. Does not switch greenlets."""
        if offset in partition.groups.cancelled:
            raise MessageNotFound(
                f"message {partition.number}-{offset} was cancelled already",
                outcome="unknown",  # perhaps by an earlier copy of this call
            )
        found = None
        if _start_of(partition) <= offset < partition.high_watermark:
            found = next(_read(partition, offset), None)
        if found is None:
            raise MessageNotFound(f"there is no message {partition.number}-{offset} in topic {partition.topic!r}")
        timestamp_ms, record = found
        due_ms = record.deliver_at_ms
        if due_ms is None or due_ms <= max(timestamp_ms, self._due_by_ms(partition)):
            raise MessageNotFound(f"message {partition.number}-{offset} is due already, or was never delayed")


def _wait_settled(partition: Partition) -> None:
    """Return when what refuses a call at this moment is committed, and no other leader can have carried out an earlier
    copy of the call. The caller looks again: an offset beyond the end may have been allotted meanwhile."""
    partition.wait_settled(partition.replica.next_offset - 1)
    partition.wait_led()


def _append_cancel(partition: Partition, offsets: Sequence[int]) -> Pending:
    cancel = Cancel(ranges_of(offsets))
    pending = partition.append_control(BatchKind.CANCEL, _encode(cancel))
    partition.groups.cancel(cancel)
    return pending


def _start_of(partition: Partition) -> int:
    """Return the first offset that is not purged. The log start moves later, and the fold no longer knows which
    messages below were cancelled."""
    return max(partition.log.log_start_offset, partition.groups.purged_upto)


def _is_left(partition: Partition, offset: int) -> bool:
    """Return whether the message is neither purged nor cancelled."""
    return offset >= _start_of(partition) and offset not in partition.groups.cancelled


def _read(partition: Partition, offset: int) -> Iterator[tuple[int, Record]]:
    for piece in partition.reader.pieces(offset, offset + 1, 1):
        for record in piece.records():
            yield piece.batch.appended_at_ms, record
