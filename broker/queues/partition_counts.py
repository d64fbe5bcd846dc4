"""The counts of a group on a partition: exact over all lanes, from the indexes of the files.

lag = ready + in_flight + scheduled      not done
      ready       available, or waiting for an earlier message of its key
      in_flight   leased
      scheduled   not due yet, or in a back-off
dead              given up, and kept for a redrive
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple
from weakref import WeakKeyDictionary

from portalmq.broker.core.fold import HELD_MS, GroupFold, SpanFold
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.lanes import DELAYED
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.folding import GroupsFold
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.past import BothClocks, GroupView
from portalmq.broker.partition.yielding import in_turns
from portalmq.broker.queues.delayed_counts import waiting
from portalmq.broker.storage.lanes import Row

NOTHING = {"ready": 0, "in_flight": 0, "scheduled": 0, "dead": 0, "lag": 0, "oldest_unacked_ms": 0}
# Messages at the head of a lane that are searched for the oldest unfinished one.
HEAD_MAX = 1_000
SKIP_MAX = 100_000
DELAYED_SPANS_MAX = 100
# A group this near to the end is counted by its own messages, not by all messages of the lanes.
NEAR = 20_000
BEGINNING = (0, 0)
# Spans that are added up before other greenlets run.
SPANS_A_TURN = 10_000


def counted(partition: Partition, group: str, clock: Clock) -> dict[str, int]:
    """Return the counts of a group on a partition; zeros for one that has not begun there."""
    delivery = partition.delivery.get(group)
    return dict(NOTHING) if delivery is None else tallied(partition, delivery, clock)


def backlog_of(partition: Partition, group: str, clock: Clock) -> int:
    """Return the number of the group's unfinished and dead messages, without a switch of greenlets."""
    delivery = partition.delivery.get(group)
    if delivery is None:
        return 0
    dead = sum([each.end - each.start for each in delivery.dead])
    return sum(_fresh(partition, delivery, clock.wall_ms())) + delivery.outstanding + dead


def untouched(partition: Partition, group: str) -> GroupDelivery:
    """Return the state of a group that begins at the start of the log."""
    start = partition.log.log_start_offset
    return GroupDelivery(GroupFold(group, start, start, []))


def tallied(partition: GroupView, delivery: GroupDelivery, clock: BothClocks) -> dict[str, int]:
    """Return the counts at one moment: now, or as a past view has it. The summation pauses for other greenlets; later
    changes are not included."""
    now_ms, wall_ms = clock.now_ms(), clock.wall_ms()
    ready, scheduled = _fresh(partition, delivery, wall_ms)
    is_fresh = ready + scheduled > 0
    lag = ready + scheduled + delivery.outstanding
    spans, dead = delivery.spans(), tuple(delivery.dead)
    oldest_unacked_ms = _oldest_age_ms(partition, delivery, spans, wall_ms, is_fresh=is_fresh) if lag else 0
    in_flight = 0
    for span in in_turns(spans, SPANS_A_TURN):
        messages = span.end - span.start
        if span.available_at_ms <= now_ms or span.available_at_ms >= HELD_MS:
            ready += messages
        elif span.leased:
            in_flight += messages
        else:
            scheduled += messages
    return {
        "ready": ready,
        "in_flight": in_flight,
        "scheduled": scheduled,
        "dead": sum(each.end - each.start for each in in_turns(dead, SPANS_A_TURN)),
        "lag": lag,
        "oldest_unacked_ms": oldest_unacked_ms,
    }


def _fresh(partition: GroupView, delivery: GroupDelivery, wall_ms: int) -> tuple[int, int]:
    """Return the number of messages never delivered: (available, not due yet)."""
    log, lanes = partition.log, partition.log.lanes
    end = partition.high_watermark
    first = min(delivery.next, end)
    # The range from lane 0's cursor to the end includes messages of other lanes, which are counted there.
    ready = log.messages_before(end) - _messages_before(partition, delivery, first)
    is_near = end - first <= NEAR
    if is_near and lanes.present:
        ready -= lanes.count_others(first, end)
    scheduled = 0
    for lane in lanes.present:
        due_ms, offset = _place(delivery, lane)
        if lane < DELAYED:
            ready += lanes.count(lane, due_ms, offset, end) - (0 if is_near else lanes.count(lane, 0, first, end))
        else:
            if not is_near:
                ready -= waiting(partition, delivery, "after the cursor", lane, BEGINNING, start=first, end=end)
            left = waiting(partition, delivery, "left", lane, (due_ms, offset), start=delivery.start, end=end)
            due = lanes.count(lane, due_ms, offset, end, start=delivery.start, until_ms=wall_ms)
            ready += due
            scheduled += left - due
    cancelled = _cancelled_before(partition, delivery, wall_ms)
    ahead = delivery.ahead_count
    return max(0, ready - ahead - cancelled[0]), max(0, scheduled - cancelled[1])


def delayed_lanes(partition: GroupView) -> list[int]:
    """Return the lanes with delayed messages, due ones included."""
    return [lane for lane in partition.log.lanes.present if lane >= DELAYED]


def not_due(partition: GroupView, wall_ms: int) -> int:
    """Return the number of delayed messages that are due after `wall_ms` and not cancelled."""
    start, end = partition.log.log_start_offset, partition.high_watermark
    delayed = delayed_lanes(partition)
    owner, after = partition.groups, (wall_ms + 1, 0)
    left = sum([waiting(partition, owner, "not due", lane, after, start=start, end=end) for lane in delayed])
    cancelled = _cancelled_positions(partition) if left else {}
    return max(0, left - sum([due_ms > wall_ms for lane in delayed for due_ms, _ in cancelled.get(lane, ())]))


def _place(delivery: GroupDelivery, lane: int) -> tuple[int, int]:
    due_ms, offset = delivery.cursors.get(lane, (0, 0))
    return (due_ms, offset) if lane >= DELAYED else (0, max(offset, delivery.start))


def _cancelled_before(partition: GroupView, delivery: GroupDelivery, wall_ms: int) -> tuple[int, int]:
    """Return the number of cancelled messages that the cursors have not passed: (due, not due)."""
    due = waiting = 0
    for lane, places in _cancelled_positions(partition).items():
        places = places[bisect_left(places, delivery.cursors.get(lane, (0, 0))) :]
        if delivery.start > partition.log.base_offset:
            places = [place for place in places if place[1] >= delivery.start]
        until = bisect_right(places, wall_ms, key=_due_ms)
        due += until
        waiting += len(places) - until
    return due, waiting


class _CancelledPositions(NamedTuple):
    """The sorted (due_ms, offset) of the offsets in `known`, by lane. `cancelled` is the set that they come from."""

    cancelled: set[int]
    known: set[int]
    places: dict[int, list[tuple[int, int]]]


_cancelled_positions_of: WeakKeyDictionary[GroupsFold, _CancelledPositions] = WeakKeyDictionary()


def _cancelled_positions(partition: GroupView) -> dict[int, list[tuple[int, int]]]:
    """Return (due_ms, offset) of the cancelled messages, by lane. Each is looked up once, as there may be many."""
    groups = partition.groups
    found = _cancelled_positions_of.get(groups)
    if found is None or found.cancelled is not groups.cancelled:
        found = _cancelled_positions_of[groups] = _CancelledPositions(groups.cancelled, set(), {})
    if len(found.known) < len(groups.cancelled):
        for lane, due_ms, offset in partition.log.lanes.lane_positions(groups.cancelled - found.known):
            found.places.setdefault(lane, []).append((due_ms, offset))
        for places in found.places.values():
            places.sort()
        found.known.update(groups.cancelled)
    return found.places


def _due_ms(place: tuple[int, int]) -> int:
    return place[0]


# What was read of a log, and the place where: what is committed does not change but by compaction and purges. So a
# group that stands still is counted without the log's files, which are closed when there are ten thousand topics.
_Place = tuple[int, ...]
_before_of: WeakKeyDictionary[GroupDelivery, tuple[_Place, int]] = WeakKeyDictionary()
_oldest_of: WeakKeyDictionary[GroupDelivery, tuple[_Place, int]] = WeakKeyDictionary()


def _place_of(partition: GroupView, *offsets: int) -> _Place:
    return (*offsets, partition.log.log_start_offset, partition.log.removed)


def _messages_before(partition: GroupView, delivery: GroupDelivery, offset: int) -> int:
    place = _place_of(partition, offset)
    known = _before_of.get(delivery)
    if known is None or known[0] != place:
        known = _before_of[delivery] = (place, partition.log.messages_before(offset))
    return known[1]


def _oldest_age_ms(
    partition: GroupView, delivery: GroupDelivery, spans: list[SpanFold], wall_ms: int, *, is_fresh: bool
) -> int:
    """Return the age of the oldest unfinished message, from when it was first available. Without `is_fresh` the group
    has received every message: after its cursor there are only records of other groups."""
    if partition.log.lanes.present or delivery.has_ahead or delivery.cursors:
        oldest_ms = _oldest_ms(partition, delivery, spans, is_fresh=is_fresh)
    else:
        first = (spans[0].start, spans[0].end) if spans else (0, 0)
        place = _place_of(partition, *first, delivery.next if is_fresh else -1)
        known = _oldest_of.get(delivery)
        if known is not None and known[0] == place:
            oldest_ms = known[1]
        else:
            oldest_ms = _oldest_ms(partition, delivery, spans, is_fresh=is_fresh)
            if oldest_ms is not None:
                _oldest_of[delivery] = (place, oldest_ms)
    return 0 if oldest_ms is None else max(0, wall_ms - oldest_ms)


def _oldest_ms(partition: GroupView, delivery: GroupDelivery, spans: list[SpanFold], *, is_fresh: bool) -> int | None:
    """Return since when the oldest unfinished message is available; None if none was found."""
    found: list[int] = []
    end = partition.high_watermark
    for span in _oldest_spans(delivery, spans):
        found += _since(partition, span.start, span.end)
    if not is_fresh:
        return min(found, default=None)
    first = delivery.next
    if partition.log.lanes.present:
        first = partition.log.lanes.next_plain(first, end, SKIP_MAX)
    for piece in partition.reader.pieces(first, end, HEAD_MAX):
        heads = (
            record
            for offset, record in enumerate(piece.records(), piece.start)
            if not delivery.is_ahead(offset)
            and (record.deliver_at_ms is None or record.deliver_at_ms <= piece.batch.appended_at_ms)
        )
        if next(heads, None) is not None:
            found.append(piece.batch.appended_at_ms)
            break
    for lane in partition.log.lanes.present:
        for row in _head(partition, delivery, lane, end):
            if lane >= DELAYED:
                found.append(row[0])
            else:
                found += _since(partition, row[1], row[1] + 1)
            break
    return min(found, default=None)


def _oldest_spans(delivery: GroupDelivery, spans: list[SpanFold]) -> list[SpanFold]:
    """Return the first span without a delay, and some with one, whose age does not follow from their offset."""
    plain = next((span for span in spans if span.lane < DELAYED), None)
    has_delayed = any(lane >= DELAYED for lane in delivery.cursors)  # else there is nothing to look for
    delayed = islice((span for span in spans if span.lane >= DELAYED), DELAYED_SPANS_MAX) if has_delayed else ()
    return [*([plain] if plain else []), *delayed]


def _since(partition: GroupView, start: int, end: int) -> Iterator[int]:
    for piece in partition.reader.pieces(start, end, 1):
        yield max(piece.batch.appended_at_ms, piece.records()[0].deliver_at_ms or 0)


def _head(partition: GroupView, delivery: GroupDelivery, lane: int, end: int) -> Iterator[Row]:
    return partition.log.lanes.after(lane, *_place(delivery, lane), end)
