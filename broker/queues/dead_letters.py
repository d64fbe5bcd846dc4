"""Dead letters: list, redrive and drop the messages that a group has given up.

The group's fold at the leader of each partition holds its dead messages (core/queue/delivery.py); outbox.py copies them
to the dead-letter topic. This module handles those of the fold. Redriven ones are ready again for this group alone,
with a delivery count of zero.

A redrive has two steps: first every leader matches its dead letters; when all have answered, the leaders redrive them,
by a record for each partition. So a predicate that is refused or takes too long changes nothing, and a rate can be
divided among the partitions. The records hold the rate, as the time from which each message is available, so neither a
fail-over nor a full disk releases them all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from portalmq import wire
from portalmq.broker.cluster.routing import LocalWork, one_by_one
from portalmq.broker.cluster.rpc import PartitionCall, TopicPartition, first_error, values_of
from portalmq.broker.cluster.rpc.queues import (
    DEAD_LETTERS,
    DROP_DEAD,
    MATCH_DEAD,
    REDRIVE,
    DeadCall,
    DeadPage,
    DeadShare,
)
from portalmq.broker.cluster.topic import Topic
from portalmq.broker.core.fold import DeadFold
from portalmq.broker.core.queue.delivery import OUTSTANDING_MAX, GroupDelivery
from portalmq.broker.core.queue.predicate import Predicate, parse
from portalmq.broker.core.queue.records import Drop, Range, Redrive, ranges_of
from portalmq.broker.messages.browse import StoredMessage
from portalmq.broker.messages.matching import MatchBudget, candidate_of
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.writer import Pending
from portalmq.broker.partition.yielding import give_way, in_short_turns, in_turns
from portalmq.broker.queues.groups import Groups
from portalmq.broker.queues.outbox import provenance
from portalmq.broker.storage.batch import Record
from portalmq.control_plane.state import GroupState
from portalmq.errors import InvalidRequest, PortalMQError, Unavailable

PAGE_MESSAGES_MAX = 1_000
PAGE_BYTES_MAX = 4 * 1024 * 1024
IDS_MAX = 10_000
RATE_MAX = 1_000_000.0
REDRIVE_MS_MAX = 30 * wire.DAY_MS
RANGES_IN_A_RECORD = 1_000
_BY_IDS = "and nothing was redriven: name the dead letters by their ids, as GET …/dead-letters lists them"
# Offsets, ids or ranges that are handled before other greenlets run.
OFFSETS_A_TURN = 1_000
# Redriven messages are outstanding until they are done: this leaves room for new ones.
REDRIVEN_MAX = OUTSTANDING_MAX // 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listed:
    """A page of dead letters. The next page begins after the id `next_after`; None at the end."""

    messages: list[StoredMessage]
    next_after: str | None


class DeadLetters:
    """The dead letters of all groups, over all leaders."""

    def __init__(self, groups: Groups, clock: Clock) -> None:
        self._groups = groups
        self._clock = clock

    # --- the broker that the client calls ----------------------------------------------------------------------------

    def page(self, name: str, topic_name: str, *, limit: int, after: str | None, forward: bool = True) -> Listed:
        """Return dead letters of the group on a topic, by partition and offset, after the one with id `after`."""
        group, topic = self._groups.get_queue(name), self._groups.topics.known(topic_name)
        first, offset = _place_of_id(after, topic) if after is not None else (0, -1)
        shares = [
            DeadShare(number, offset if number == first else -1) for number in range(first, topic.state.partitions)
        ]
        call = DeadCall(name, group.group_id, topic.name, topic.state.topic_id, shares, limit=limit)
        outcomes = self._run(DEAD_LETTERS, call, self.local_list(call), forward=forward)
        messages: list[StoredMessage] = []
        for share in shares:
            page = outcomes[share.number]
            room = limit - len(messages)
            messages += [
                StoredMessage(topic.name, share.number, offset, timestamp_ms, record)
                for offset, timestamp_ms, record in page.messages[:room]
            ]
            is_last = share.number == topic.state.partitions - 1
            if not page.complete or len(page.messages) > room or (len(messages) == limit and not is_last):
                # An empty page that is not the last one continues where it began.
                last = f"{messages[-1].partition}-{messages[-1].offset}" if messages else after
                return Listed(messages, last)
        return Listed(messages, None)

    def redrive(
        self,
        name: str,
        topic_name: str,
        *,
        ids: Sequence[str] | None,
        where: object,
        rate_per_s: float | None,
        dry_run: bool,
        forward: bool = True,
    ) -> tuple[int, int]:
        """Redrive dead letters: those with `ids`, those that match `where`, or all. Return how many matched, and how
        many were redriven: fewer when more would leave the group no room for new messages."""
        if ids is not None and where is not None:
            raise InvalidRequest("give ids or where, not both")
        if where is not None:
            parse(where)
        group, topic, shares = self._matching(name, topic_name, ids, where, forward)
        matched = sum([_count(share.ranges) for share in shares])
        if rate_per_s is not None and matched * 1000 / rate_per_s > REDRIVE_MS_MAX:
            raise InvalidRequest(
                f"{matched} dead letters at {rate_per_s:g} a second would take {matched / rate_per_s / 86400:.0f} days,"
                f" the limit is {REDRIVE_MS_MAX // wire.DAY_MS}: raise rate_per_s, or redrive fewer"
            )
        if dry_run or not shares:
            return matched, 0
        call = DeadCall(name, group.group_id, topic.name, topic.state.topic_id, _staggered(shares, matched, rate_per_s))
        done = self._run(REDRIVE, call, self.local_redrive(call), forward=forward, repeatable=False)
        return matched, sum(done.values())

    def drop(self, name: str, topic_name: str, *, ids: Sequence[str] | None, forward: bool = True) -> int:
        """Drop dead letters, those with `ids` or all; return how many. Copies in the dead-letter topic stay."""
        group, topic, shares = self._matching(name, topic_name, ids, None, forward)
        if not shares:
            return 0
        call = DeadCall(name, group.group_id, topic.name, topic.state.topic_id, shares)
        return sum(self._run(DROP_DEAD, call, self.local_drop(call), forward=forward).values())

    def _matching(
        self, name: str, topic_name: str, ids: Sequence[str] | None, where: object, forward: bool
    ) -> tuple[GroupState, Topic, list[DeadShare]]:
        """Return the matching dead letters, by partition, for the partitions that have any."""
        group, topic = self._groups.get_queue(name), self._groups.topics.known(topic_name)
        named = _named(ids, topic) if ids is not None else dict.fromkeys(range(topic.state.partitions))
        shares = [DeadShare(number, offsets=offsets) for number, offsets in named.items()]
        call = DeadCall(name, group.group_id, topic.name, topic.state.topic_id, shares, where=where)
        found = self._run(MATCH_DEAD, call, self.local_match(call), forward=forward) if shares else {}
        return group, topic, [DeadShare(number, ranges=ranges) for number, ranges in sorted(found.items()) if ranges]

    def _run(
        self,
        call: PartitionCall[DeadCall, T],
        request: DeadCall,
        local: LocalWork[T],
        *,
        forward: bool,
        repeatable: bool = True,
    ) -> dict[int, T]:
        """Return the answer of each partition by number. Raises an error; as unknown when a part is or may be
        done."""
        if not forward:
            self._groups.leaders.check_led_here(request.places)
        outcomes = self._groups.leaders.call(call, request, local, forward=forward, repeatable=repeatable)
        error = first_error(outcomes.values())
        if error is not None:
            is_done_in_part = any(not isinstance(outcome, PortalMQError) for outcome in outcomes.values())
            if is_done_in_part and call in (REDRIVE, DROP_DEAD):
                error.outcome = "unknown"
            raise error
        return {place.number: value for place, value in values_of(outcomes).items()}

    # --- the leaders -------------------------------------------------------------------------------------------------

    def _delivery(self, call: DeadCall, place: TopicPartition) -> tuple[Partition, GroupDelivery | None]:
        """Return the partition, and the group's fold on it if it has begun there; its log is committed on return."""
        self._groups.get_same(call.group, call.group_id)
        partition = self._groups.partition(place)
        partition.wait_committed(partition.replica.next_offset - 1)
        return partition, partition.delivery.get(call.group)

    def local_list(self, call: DeadCall) -> LocalWork[DeadPage]:
        left, size_left, is_empty = call.limit, PAGE_BYTES_MAX, True

        def do(place: TopicPartition, share: DeadShare) -> DeadPage:
            nonlocal left, size_left, is_empty
            partition, delivery = self._delivery(call, place)
            found: list[tuple[int, int, Record]] = []
            for dead, offset, at_ms, record in in_short_turns(_dead_messages(partition, delivery, share.after + 1)):
                if left <= 0 or (size_left <= 0 and not is_empty):
                    return DeadPage(found, complete=False)
                is_empty = False
                headers = provenance(
                    call.topic, place.number, offset, call.group, dead.deliveries, dead.reason, dead.at_ms
                )
                shown = msgspec.structs.replace(record, headers={**(record.headers or {}), **headers})
                found.append((offset, at_ms, shown))
                left -= 1
                size_left -= len(record.value)
            return DeadPage(found, complete=True)

        return _share_by_share(call, do)

    def local_match(self, call: DeadCall) -> LocalWork[tuple[Range, ...]]:
        predicate = parse(call.where) if call.where is not None else None
        budget = MatchBudget(_BY_IDS)

        def do(place: TopicPartition, share: DeadShare) -> tuple[Range, ...]:
            partition, delivery = self._delivery(call, place)
            if delivery is None:
                return ()
            if share.offsets is not None:
                ranges = ranges_of(_still_dead(delivery, share.offsets))
            elif predicate is None:
                ranges = tuple([(dead.start, dead.end) for dead in in_turns(tuple(delivery.dead), OFFSETS_A_TURN)])
            else:
                ranges = ranges_of(list(_matches(partition, delivery, predicate, budget)))
            _check_same(partition, call.group, delivery)
            return ranges

        return _share_by_share(call, do)

    def local_redrive(self, call: DeadCall) -> LocalWork[int]:
        def do(place: TopicPartition, share: DeadShare) -> int:
            partition, delivery = self._delivery(call, place)
            if delivery is None:
                return 0
            now_ms = self._clock.now_ms()
            offsets = _still_dead(delivery, (offset for start, end in share.ranges for offset in range(start, end)))
            offsets = offsets[: max(0, REDRIVEN_MAX - delivery.outstanding)]
            ranges = _timed(offsets, now_ms + share.first_ms, share.step_ms)
            _check_same(partition, call.group, delivery)
            redriven = _append_records(partition, call.group, ranges, lambda part: Redrive(part, now_ms))
            self._groups.attach(self._groups.get(call.group), partition, place.topic_id).notify()
            return redriven

        return _share_by_share(call, do)

    def local_drop(self, call: DeadCall) -> LocalWork[int]:
        def do(place: TopicPartition, share: DeadShare) -> int:
            partition, delivery = self._delivery(call, place)
            if delivery is None or not share.ranges:
                return 0
            now_ms = self._clock.now_ms()
            return _append_records(partition, call.group, share.ranges, lambda part: Drop(part, now_ms))

        return _share_by_share(call, do)


def _share_by_share(call: DeadCall, do: Callable[[TopicPartition, DeadShare], T]) -> LocalWork[T]:
    by_place = call.by_place()
    return one_by_one(lambda place: do(place, by_place[place]))


def _append_records(
    partition: Partition,
    group: str,
    ranges: Sequence[T],
    record_of: Callable[[tuple[T, ...]], Redrive | Drop],
) -> int:
    """Append records about dead letters, with pauses for other greenlets; return how many are dead no more. Raises a
    refusal as unknown when a part may be in the log."""
    written: list[Pending] = []
    delivery = partition.delivery[group]
    done = 0
    try:
        for first in range(0, len(ranges), RANGES_IN_A_RECORD):
            if written:
                give_way()
                _check_same(partition, group, delivery)
            record = record_of(tuple(ranges[first : first + RANGES_IN_A_RECORD]))
            dead = sum([delivery.count_dead(start, end) for start, end, *_ in record.ranges])
            written.append(partition.append_group_record(group, record))
            done += dead
        for pending in written:
            pending.wait()
    except PortalMQError as error:
        error.outcome = error.outcome if len(ranges) <= RANGES_IN_A_RECORD else "unknown"
        raise
    return done


def _dead_messages(
    partition: Partition, delivery: GroupDelivery | None, start: int
) -> Iterator[tuple[DeadFold, int, int, Record]]:
    """Yield the dead messages from `start` on that are still in the log: (dead, offset, timestamp_ms, record)."""
    for dead in delivery.dead_from(start) if delivery is not None else ():
        first = max(start, dead.start)
        for piece in partition.reader.pieces(first, dead.end, dead.end - first):
            for offset, record in enumerate(piece.records(), piece.start):
                yield dead, offset, piece.batch.appended_at_ms, record


def _matches(partition: Partition, delivery: GroupDelivery, predicate: Predicate, budget: MatchBudget) -> Iterator[int]:
    for dead, offset, _, record in _dead_messages(partition, delivery, 0):
        budget.spend()
        if predicate.matches(candidate_of(record, dead.reason, dead.deliveries)):
            yield offset


def _still_dead(delivery: GroupDelivery, offsets: Iterable[int]) -> list[int]:
    return [offset for offset in in_turns(offsets, OFFSETS_A_TURN) if delivery.is_dead(offset)]


def _check_same(partition: Partition, group: str, delivery: GroupDelivery) -> None:
    """Raise Unavailable when the group's fold was replaced during a pause: it was deleted, or is led elsewhere."""
    if partition.delivery.get(group) is not delivery:
        raise Unavailable("the group has changed: repeat", retry_after_s=0.1)


def _count(ranges: Sequence[Range]) -> int:
    return sum([end - start for start, end in ranges])


def _timed(offsets: list[int], first_ms: float, step_ms: float) -> list[tuple[int, int, int]]:
    """Return (start, end, available_at_ms) for one message each `step_ms`; adjacent ones of one time are a range."""
    ranges: list[tuple[int, int, int]] = []
    for rank, offset in enumerate(in_turns(offsets, OFFSETS_A_TURN)):
        at_ms = int(first_ms + rank * step_ms)
        if ranges and ranges[-1][1] == offset and ranges[-1][2] == at_ms:
            ranges[-1] = (ranges[-1][0], offset + 1, at_ms)
        else:
            ranges.append((offset, offset + 1, at_ms))
    return ranges


def _staggered(shares: list[DeadShare], total: int, rate_per_s: float | None) -> list[DeadShare]:
    """Return the shares with their rates: each partition spreads its messages over the whole time, out of step with the
    others."""
    if rate_per_s is None:
        return shares
    whole_ms = total * 1000 / rate_per_s
    paced: list[DeadShare] = []
    for rank, share in enumerate(shares):
        step_ms = whole_ms / _count(share.ranges)
        paced.append(msgspec.structs.replace(share, first_ms=step_ms * rank / len(shares), step_ms=step_ms))
    return paced


# --- ids -------------------------------------------------------------------------------------------------------------


def _place_of_id(text: str, topic: Topic) -> tuple[int, int]:
    """Return (partition, offset) of a message's id. Raises InvalidRequest, PartitionNotFound."""
    number, dash, offset = text.partition("-")
    good = dash and all(part.isascii() and part.isdigit() and len(part) <= 16 for part in (number, offset))
    if not good:
        raise InvalidRequest(f"{text[:100]!r} is not a message id: ids are <partition>-<offset>, as 0-17")
    return topic.place(int(number)).number, int(offset)


def _named(ids: Sequence[str], topic: Topic) -> dict[int, tuple[int, ...]]:
    if len(ids) > IDS_MAX:
        raise InvalidRequest(f"{len(ids)} ids, the limit is {IDS_MAX}: send them in parts")
    named: dict[int, list[int]] = {}
    for text in in_turns(dict.fromkeys(ids), OFFSETS_A_TURN):
        number, offset = _place_of_id(text, topic)
        named.setdefault(number, []).append(offset)
    return {number: tuple(offsets) for number, offsets in named.items()}
