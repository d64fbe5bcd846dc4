"""A queue group on one partition: leases, finished messages, dead letters.

The state is a fold over the partition's log: it changes only by `apply`, which takes the records of records.py.
Decisions (selection.py, `ackable`) only read; the shell turns a decision into a record, applies it and appends it to
the log. So on the leader the fold runs ahead of the high watermark: two consumers must not get one message while the
first one's grant is being written. That is safe because nothing is *answered* before its record is committed, and
because a leader that steps down discards this object and folds the log again.

    offsets of lane 0     0 ........... next ................ high watermark
                          done | spans        fresh: never delivered

A span is a run of messages that were delivered and are not finished, all in the same state. Messages before their
lane's cursor (`next`, in lane 0) and in no span are finished, so acked messages cost nothing, and neither do a million
waiting ones. Messages that are acked although this log has no grant of them (a fail-over loses the last grants) are
finished `ahead` of the cursor. Messages that are given up are finished too, and remembered as dead.

Offsets are numbers here; payloads, clocks and settings never enter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from sys import intern

import msgspec

from portalmq.broker.core.fold import HELD_MS, DeadFold, GroupFold, PauseFold, SpanFold
from portalmq.broker.core.queue.key_order import KeyQueues
from portalmq.broker.core.queue.records import (
    Ack,
    Commit,
    Dead,
    Drop,
    Extend,
    Grant,
    GroupRecord,
    GroupStart,
    LanePosition,
    Nack,
    Pause,
    Range,
    Redrive,
    remember_commit,
)
from portalmq.broker.core.queue.spans import GroupSpans, start_of

EXPIRIES_BEFORE_ALONE = 2
ATTEMPTS_MAX = 10_000
OUTSTANDING_MAX = 100_000
COMMITS_REMEMBERED = 50_000
# Ranges of dead messages that a group remembers on a partition; beyond it the oldest are dropped (their copies are
# not).
DEAD_MAX = 100_000


class GroupDelivery(GroupSpans):
    """State of one group on one partition. Times are the leader's, in Unix milliseconds. Invariants: no span of lane
    0 reaches past `next`; no message is in a span and in `dead`, or in a span and ahead."""

    def __init__(self, fold: GroupFold) -> None:
        self.group = fold.group
        self._load(fold)

    def _load(self, fold: GroupFold) -> None:
        self.start = fold.start
        self.next = fold.next
        self.attempts: dict[str, tuple[int, list[Range]]] = dict(fold.attempts)
        self.attempt_leases: dict[str, tuple[int, list[int]]] = dict(fold.attempt_leases)
        self.last_active_ms = fold.last_active_ms
        self.cursors: dict[int, tuple[int, int]] = {lane: (due_ms, offset) for lane, due_ms, offset in fold.cursors}
        self.commits: dict[bytes, int] = dict(fold.commits)
        self.dead: list[DeadFold] = list(fold.dead)
        self.pause = fold.pauses[-1] if fold.pauses else PauseFold()
        # In a group ordered by key, the unfinished messages by key; None until they are first read.
        self.keys: KeyQueues | None = None
        # The highest number of the leases granted since this state was folded.
        self.highest_lease = 0
        # The offset of the last record that finished messages.
        self.finished_at = -1
        self._ahead: dict[int, list[tuple[int, int]]] = {}  # lane -> heap of (due_ms, offset)
        self._ahead_offsets: set[int] = set()
        for position in fold.ahead:
            self._put_ahead(position)
        self._load_spans(fold.spans)

    def snapshot(self) -> GroupFold:
        return GroupFold(
            group=self.group,
            start=self.start,
            next=self.next,
            spans=self.spans(),
            attempts=dict(self.attempts),
            last_active_ms=self.last_active_ms,
            cursors=[(lane, *self.cursors[lane]) for lane in sorted(self.cursors)],
            ahead=sorted((lane, *place) for lane, places in self._ahead.items() for place in places),
            dead=list(self.dead),
            commits=list(self.commits.items()),
            attempt_leases=dict(self.attempt_leases),
            pauses=[self.pause] if self.pause.number else [],
        )

    # --- the fold ----------------------------------------------------------------------------------------------------

    def apply(self, record: GroupRecord, offset: int = -1, leader_epoch: int = 0) -> None:
        """Fold the record at `offset`. Records come in the order of the log, each once."""
        match record:
            case Grant():
                self._apply_grant(record, offset, leader_epoch)
            case Ack():
                self._finish(record.ranges, record.ahead, offset)
            case Commit():
                self._finish(record.ranges, record.ahead, offset)
                remember_commit(self.commits, record.commit_id, offset, COMMITS_REMEMBERED)
            case Nack():
                for start, end, available_at_ms in record.ranges:
                    for span in self._parts(start, end):
                        span.leased, span.holder = False, ""
                        span.granted_at_ms, span.available_at_ms = record.at_ms, available_at_ms
                        if record.unseen and span.deliveries > 0:  # the lease's number is not used again
                            span.deliveries, span.earlier = span.deliveries - 1, span.earlier + 1
                        self._put(span)
            case Extend():
                for start, end in record.ranges:
                    for span in self._parts(start, end):
                        span.leased = True
                        span.granted_at_ms, span.available_at_ms = record.at_ms, record.deadline_ms
                        self._put(span)
            case Dead():
                for start, end, deliveries in record.ranges:
                    for span in self._cut(start, end):
                        where, why = (span.start, span.end), (record.at_ms, record.reason)
                        insort(self.dead, DeadFold(*where, deliveries, *why, span.lane, span.earlier), key=start_of)
                self._done([(start, end) for start, end, _ in record.ranges], offset)
                del self.dead[: max(0, len(self.dead) - DEAD_MAX)]
            case Redrive():
                for start, end, available_at_ms in record.ranges:
                    for dead in self._cut_dead(start, end):
                        times, earlier = (record.at_ms, available_at_ms), dead.earlier + dead.deliveries
                        span = SpanFold(dead.start, dead.end, 0, 0, False, *times, dead.lane, earlier)
                        span.leader_epoch = leader_epoch  # receipts of earlier epochs no longer count
                        self._insert(span)
                    if self.keys is not None:  # redriven messages are unfinished again
                        self.keys.read_later(start, end)
            case Drop():
                for start, end in record.ranges:
                    self._cut_dead(start, end)
            case Pause():
                if record.number > self.pause.number:
                    self.pause = PauseFold(record.number, record.paused, record.at_ms, record.reason, record.by)
            case GroupStart():
                self._load(GroupFold(self.group, record.start, record.start, [], {}, record.at_ms))
            case _:
                raise AssertionError(f"{record!r} is no record of a group's fold")
        if not isinstance(record, Grant):
            self.last_active_ms = max(self.last_active_ms, record.at_ms)
        self._check()

    def purge(self, upto: int, record: int = -1) -> None:
        """Drop everything below `upto`: by the record at offset `record`, or for good if there is none."""
        self._cut(0, upto)
        self._cut_dead(0, upto)
        self.start = max(self.start, upto)
        self.next = max(self.next, upto)
        for lane in tuple(self._ahead):
            self._drop_passed(lane)
        self._done([(0, upto)], record)
        self._check()

    def _apply_grant(self, grant: Grant, offset: int, leader_epoch: int) -> None:
        self.last_active_ms = max(self.last_active_ms, grant.granted_at_ms)
        leases: list[int] = []
        lanes = grant.lanes or (0,) * len(grant.ranges)
        holder = intern(grant.holder)  # one string for all spans of a holder
        for (start, end, deliveries), lane in zip(grant.ranges, lanes, strict=True):
            last = self._spans.get(start)
            if last is not None and last.end == end:  # exactly one span: nothing moves
                self._forget((last,))
                before, put = [last], self._put
            else:
                before, put = self._cut(start, end), self._insert
            expiries = max((span.expiries + span.leased for span in before), default=0)
            earlier = max((span.earlier for span in before), default=0)
            earlier = max(earlier, grant.leases_above + 1 - deliveries if grant.leases_above else 0)
            times = (grant.granted_at_ms, grant.deadline_ms)
            put(SpanFold(start, end, deliveries, expiries, True, *times, lane, earlier, holder, leader_epoch))
            leases.append(earlier + deliveries)
        self.highest_lease = max(self.highest_lease, *leases, 0)
        for start, end, lane in grant.held:
            self._insert(SpanFold(start, end, 0, 0, False, 0, HELD_MS, lane))
        self._cut_out(grant.gone)
        self._done(grant.gone, offset)
        self.next = max(self.next, grant.next)
        for lane, due_ms, offset in grant.cursors:
            self.cursors[lane] = max(self.cursors.get(lane, (0, 0)), (due_ms, offset))
        if self._ahead_offsets:
            for lane in tuple(self._ahead):
                self._drop_passed(lane)
        if grant.attempt_id is not None:
            self._forget_attempts(grant.granted_at_ms)
            self.attempts[grant.attempt_id] = (grant.deadline_ms, [(start, end) for start, end, _ in grant.ranges])
            self.attempt_leases[grant.attempt_id] = (leader_epoch, leases)

    def _forget_attempts(self, now_ms: int) -> None:
        """Drop the first attempts that are over or too many; they are nearly in the order of their deadlines."""
        while self.attempts:
            oldest = next(iter(self.attempts))
            if self.attempts[oldest][0] > now_ms and len(self.attempts) < ATTEMPTS_MAX:
                return
            del self.attempts[oldest]
            self.attempt_leases.pop(oldest, None)

    def _finish(self, ranges: Sequence[Range], ahead: Iterable[LanePosition], record: int) -> None:
        self._cut_out(ranges)
        self._done(ranges, record)
        for position in ahead:
            self._put_ahead(position)
            self.finished_at = max(self.finished_at, record)
            if self.keys is not None:
                self.keys.finish_unseen(record)

    def _done(self, ranges: Sequence[Range], record: int) -> None:
        """Note that the record at offset `record` finished messages: those that wait for them continue when it is
        committed."""
        if ranges:
            self.finished_at = max(self.finished_at, record)
        if self.keys is not None:
            for start, end in ranges:
                self.keys.finish(start, end, record)

    # --- finished ahead of the cursor --------------------------------------------------------------------------------

    def has_passed(self, position: LanePosition) -> bool:
        """Return whether the cursor of its lane is past the message, or the group began after it."""
        lane, due_ms, offset = position
        if lane == 0:
            return offset < self.next
        return offset < self.start or (due_ms, offset) < self.cursors.get(lane, (0, 0))

    def is_ahead(self, offset: int) -> bool:
        """Return whether a message that its lane's cursor has not reached is finished."""
        return offset in self._ahead_offsets

    @property
    def ahead_count(self) -> int:
        return len(self._ahead_offsets)

    @property
    def has_ahead(self) -> bool:
        return bool(self._ahead_offsets)

    def _put_ahead(self, position: LanePosition) -> None:
        lane, due_ms, offset = position
        if offset not in self._ahead_offsets and not self.has_passed(position):
            self._ahead_offsets.add(offset)
            heappush(self._ahead.setdefault(lane, []), (due_ms, offset))

    def _drop_passed(self, lane: int) -> None:
        places = self._ahead.get(lane, [])
        while places and self.has_passed((lane, *places[0])):
            self._ahead_offsets.discard(heappop(places)[1])

    # --- dead messages, and a new leader ------------------------------------------------------------------------------

    def _cut_dead(self, start: int, end: int) -> list[DeadFold]:
        """Remove [start, end) from the dead and return the removed parts."""
        first, last = self._dead_within(start, end)
        touched = self.dead[first:last]
        if not touched:
            return []
        kept: list[DeadFold] = []
        if touched[0].start < start:
            kept.append(msgspec.structs.replace(touched[0], end=start))
        if touched[-1].end > end:
            kept.append(msgspec.structs.replace(touched[-1], start=end))
        self.dead[first:last] = kept
        return [msgspec.structs.replace(each, start=max(start, each.start), end=min(end, each.end)) for each in touched]

    def _dead_within(self, start: int, end: int) -> tuple[int, int]:
        """Return the first and the last index, exclusive, of the dead that overlap [start, end)."""
        first = bisect_right(self.dead, start, key=start_of) - 1
        if first < 0 or self.dead[first].end <= start:
            first += 1
        return first, bisect_left(self.dead, end, key=start_of)

    def take_over(self, now_ms: int, paced: Callable[[list[SpanFold]], Iterable[SpanFold]] = iter) -> None:
        """Adjust the state to a new leader's clock, and forget the keys read in an earlier leadership.

        Clocks differ: no lease lasts longer from now than it was granted for, and no back-off longer than it was to be.
        `paced` gets the spans if some may begin after `now_ms`; it may let other greenlets run between two of them.
        """
        self.keys = None
        if not self.may_be_ahead_of(now_ms):
            return
        for span in paced(list(self._spans.values())):
            if span.granted_at_ms > now_ms and self._spans.get(span.start) is span:
                latest_ms = now_ms + max(0, span.available_at_ms - span.granted_at_ms)
                if latest_ms < span.available_at_ms < HELD_MS:
                    sooner = msgspec.structs.replace(span, granted_at_ms=now_ms, available_at_ms=latest_ms)
                    self._spans[span.start] = sooner
                    heappush(self._wakeups, (latest_ms, span.start))

    def may_be_ahead_of(self, now_ms: int) -> bool:
        """Return False if no lease or back-off began after `now_ms`. Each begins with a record that sets
        `last_active_ms`, which old snapshots do not hold."""
        return not 0 < self.last_active_ms <= now_ms

    # --- decisions ---------------------------------------------------------------------------------------------------

    def replay(self, attempt_id: str, now_ms: int) -> list[SpanFold] | None:
        """Return the spans of an attempt's first receive that it still leases, for a repeated receive; None if it is
        unknown."""
        deadline_ms, ranges = self.attempts.get(attempt_id, (0, []))
        if deadline_ms <= now_ms:
            return None
        leader_epoch, leases = self.attempt_leases.get(attempt_id, (0, []))
        if len(leases) != len(ranges):
            return []  # an earlier version did not store them: the messages come again when the lease ends
        found: list[SpanFold] = []
        for (start, end), lease in zip(ranges, leases, strict=True):
            found += [
                msgspec.structs.replace(span, start=max(start, span.start), end=min(end, span.end))
                for span in self._overlapping(start, end)
                if span.leased
                and span.available_at_ms > now_ms
                and (span.leader_epoch, span.lease) == (leader_epoch, lease)
            ]
        return found

    def is_delivered_to(self, offset: int, holder: str, now_ms: int) -> bool:
        """Return whether the message was last delivered to that holder, and its lease runs or it finished the message.

        A finished message is in no span. It is known for as long as the attempt is, so that a repeat gets the same
        answer.
        """
        span = self.at(offset)
        if span is not None:
            return span.leased and span.available_at_ms > now_ms and bool(holder) and span.holder == holder
        for attempt_id, (_, ranges) in reversed(self.attempts.items()):
            if any(start <= offset < end for start, end in ranges):
                return attempt_id.startswith(f"{holder}:")
        return False

    def ackable(self, offsets: Sequence[int], delivery: int, leader_epoch: int = 0) -> tuple[list[bool], Sequence[int]]:
        """Return whether each receipt of lease number `delivery` counts, and the offsets that count and are unfinished.

        A receipt counts if its message is finished already (acking twice is fine), or if it is of the latest lease,
        whether that runs, has run out or was given back. So a refusal is final.
        """
        span = self._span_of_all(offsets)
        if span is not None:
            good = not span.is_later(leader_epoch, delivery - span.is_unleased_since)
            return [good] * len(offsets), offsets if good else []
        verdicts: list[bool] = []
        unfinished: list[int] = []
        good = False
        for offset in offsets:
            if span is None or not span.start <= offset < span.end:
                span = self.at(offset)
                # Without a span it is finished, or its grant is lost: `next` says nothing of other lanes, and their
                # cursors may be lost too. Once a message came back without a lease, only later leases have receipts,
                # and their grants are lost. The same number may be given again in this epoch, so they are not refused.
                if span is None:
                    good = not self.is_dead(offset)
                else:
                    good = not span.is_later(leader_epoch, delivery - span.is_unleased_since)
            verdicts.append(good)
            if good:
                unfinished.append(offset)
        return verdicts, unfinished

    def is_paused(self, number: int = 0, paused: bool = False) -> bool:
        """Return whether the group is paused: by the last record of the log, or by a later change of that `number`, as
        the control plane knows it."""
        return self.pause.paused if self.pause.number >= number else paused

    def is_dead(self, offset: int) -> bool:
        at = bisect_right(self.dead, offset, key=start_of) - 1
        return at >= 0 and offset < self.dead[at].end

    def dead_from(self, start: int) -> list[DeadFold]:
        """Return the dead that hold `start` or follow it."""
        return self.dead[self._dead_within(start, start)[0] :]

    def count_dead(self, start: int, end: int) -> int:
        """Return how many messages of [start, end) are dead."""
        first, last = self._dead_within(start, end)
        return sum([min(end, dead.end) - max(start, dead.start) for dead in self.dead[first:last]])

    def holds(self, offset: int, delivery: int, leader_epoch: int = 0) -> bool:
        """Return whether the lease is the latest, and neither given back nor superseded."""
        span = self.at(offset)
        return span is not None and span.leased and not span.is_later(leader_epoch, delivery)

    def earlier(self, offset: int) -> int:
        """Return how often the message was delivered before its last redrive."""
        span = self.at(offset)
        return 0 if span is None else span.earlier

    def may_extend(self, offset: int, delivery: int, now_ms: int, leader_epoch: int = 0, *, by_key: bool) -> bool:
        """Return whether that lease may be extended. A lease that has ended may be, while no other holds the
        message. With order by key another message may be in turn by then."""
        span = self.at(offset)
        ended = span is not None and span.available_at_ms <= now_ms
        return self.holds(offset, delivery, leader_epoch) and not (ended and by_key)

    def last_lease(self, ranges: Iterable[Range]) -> int:
        """Return the highest number of the last leases of these messages; 0 without one."""
        return max((span.lease for start, end in ranges for span in self._overlapping(start, end)), default=0)

    def floor(self) -> int:
        """Return the offset below which everything is finished, except messages of other lanes."""
        return min(self._starts[0], self.next) if self._starts else self.next

    def _check(self) -> None:
        assert self.outstanding >= 0
