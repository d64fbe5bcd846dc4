"""A queue group on one partition: who holds which message until when, and what is done.

The state is a fold over the partition's log: `apply` is its only door, and takes the records of records.py. Decisions
(`plan`, `ackable`, ...) only read; the shell turns a decision into a record, applies it and appends it to the log. On
the leader the fold therefore runs over all that was appended, ahead of the high watermark: two consumers must not get
one message while the first one's grant is on its way to the disk. That is safe because nothing is *answered* before
its record is committed, and because a leader that steps down throws this object away and folds the log anew.

    offsets   0 ........... next ................ high watermark
              done | spans        fresh: never handed out

A span is a run of messages that were handed out and are not done, all in the same state. What lies below `next` and
in no span is done, so acked messages cost nothing and a million waiting ones cost nothing.

Offsets are numbers here; payloads, clocks and settings never enter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import msgspec

from portalmq.broker.core.fold import GroupFold, SpanFold
from portalmq.broker.core.records import Ack, Extend, Grant, GroupRecord, GroupStart, Nack, Range

EXPIRIES_BEFORE_ALONE = 2
ATTEMPTS_MAX = 10_000
OUTSTANDING_MAX = 100_000
STALE_WAKEUPS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What a receive may hand out: spans that came back, oldest first, and then fresh messages from `fresh_from`.

    `alone` says that the one message of `returned` is to be delivered without batch-mates.
    """

    returned: tuple[SpanFold, ...]
    fresh_from: int
    fresh_max: int
    alone: bool = False


class GroupDelivery:
    """State of one group on one partition. Times are the leader's, in Unix milliseconds.

    Invariants: spans are disjoint, sorted, and below `next`; `outstanding` is the sum of their lengths.
    """

    def __init__(self, fold: GroupFold) -> None:
        self.group = fold.group
        self._load(fold)

    def _load(self, fold: GroupFold) -> None:
        self.start = fold.start
        self.next = fold.next
        self.attempts: dict[str, tuple[int, list[Range]]] = dict(fold.attempts)
        self.last_active_ms = fold.last_active_ms
        self.outstanding = 0
        self._spans: dict[int, SpanFold] = {}
        self._starts: list[int] = []
        self._wakeups: list[tuple[int, int]] = []  # heap of (available_at_ms, start); rows may be stale
        self._available: list[int] = []  # sorted starts whose time has come; rows may be stale
        for span in fold.spans:
            self._insert(msgspec.structs.replace(span))

    def snapshot(self) -> GroupFold:
        return GroupFold(
            group=self.group,
            start=self.start,
            next=self.next,
            spans=[msgspec.structs.replace(self._spans[start]) for start in self._starts],
            attempts=dict(self.attempts),
            last_active_ms=self.last_active_ms,
        )

    # --- the fold ----------------------------------------------------------------------------------------------------

    def apply(self, record: GroupRecord) -> None:
        """Fold one record. Records come in the order of the log, each once."""
        match record:
            case Grant():
                self._apply_grant(record)
            case Ack():
                self.last_active_ms = max(self.last_active_ms, record.at_ms)
                for start, end in record.ranges:
                    self._finish(start, end)
            case Nack():
                self.last_active_ms = max(self.last_active_ms, record.at_ms)
                for start, end, available_at_ms in record.ranges:
                    for span in self._cut(start, end):
                        self._insert(msgspec.structs.replace(span, leased=False, available_at_ms=available_at_ms))
            case Extend():
                self.last_active_ms = max(self.last_active_ms, record.at_ms)
                for start, end in record.ranges:
                    for span in self._cut(start, end):
                        self._insert(
                            msgspec.structs.replace(
                                span, leased=True, granted_at_ms=record.at_ms, available_at_ms=record.deadline_ms
                            )
                        )
            case GroupStart():
                self._load(GroupFold(self.group, record.start, record.start, [], {}, record.at_ms))
            case _:
                raise AssertionError(f"{record!r} does not belong in a group's fold")
        self._check()

    def purge(self, upto: int) -> None:
        """Everything below `upto` is gone from the log."""
        for start in self._starts[: bisect_left(self._starts, upto)]:
            self._cut(start, min(upto, self._spans[start].end))
        self.next = max(self.next, upto)
        self._check()

    def _apply_grant(self, grant: Grant) -> None:
        self.last_active_ms = max(self.last_active_ms, grant.granted_at_ms)
        for start, end, deliveries in grant.ranges:
            before = self._cut(start, end)
            expiries = max((span.expiries + span.leased for span in before), default=0)
            self._insert(SpanFold(start, end, deliveries, expiries, True, grant.granted_at_ms, grant.deadline_ms))
        self.next = max(self.next, grant.next)
        if grant.attempt_id is not None:
            self._forget_attempts(grant.granted_at_ms)
            self.attempts[grant.attempt_id] = (grant.deadline_ms, [(start, end) for start, end, _ in grant.ranges])

    def _forget_attempts(self, now_ms: int) -> None:
        """Attempts stand nearly in the order of their deadlines: drop the first ones that are over or too many."""
        while self.attempts:
            oldest = next(iter(self.attempts))
            if self.attempts[oldest][0] > now_ms and len(self.attempts) < ATTEMPTS_MAX:
                return
            del self.attempts[oldest]

    def _finish(self, start: int, end: int) -> None:
        self._cut(start, end)
        if end > self.next:  # an ack whose grant did not survive: what lies between stays to be handed out
            if start > self.next:
                self._insert(SpanFold(self.next, start, 0, 0, False, 0, 0))
            self.next = end

    def _insert(self, span: SpanFold) -> None:
        self._spans[span.start] = span
        insort(self._starts, span.start)
        self.outstanding += span.end - span.start
        heappush(self._wakeups, (span.available_at_ms, span.start))
        if len(self._wakeups) > 2 * len(self._spans) + STALE_WAKEUPS_MAX:
            self._drop_stale_wakeups()

    def _drop_stale_wakeups(self) -> None:
        """Acked leases would stay in the heap until they would have ended: twelve hours, perhaps."""
        waiting = set(self._wakeups)
        self._wakeups = [row for row in waiting if (span := self._spans.get(row[1])) and span.available_at_ms == row[0]]
        heapify(self._wakeups)

    def _cut(self, start: int, end: int) -> list[SpanFold]:
        """Take [start, end) out of the spans and return the parts taken; what sticks out stays as it was."""
        taken: list[SpanFold] = []
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._spans[self._starts[first]].end <= start:
            first += 1
        last = bisect_left(self._starts, end)
        for at in self._starts[first:last]:
            span = self._spans.pop(at)
            self.outstanding -= span.end - span.start
            taken.append(msgspec.structs.replace(span, start=max(start, span.start), end=min(end, span.end)))
        if not taken:
            return taken
        head_start, tail_end = self._starts[first], span.end
        del self._starts[first:last]
        if head_start < start:
            self._insert(msgspec.structs.replace(taken[0], start=head_start, end=start))
        if tail_end > end:
            self._insert(msgspec.structs.replace(taken[-1], start=end, end=tail_end))
        return taken

    def take_over(self, now_ms: int) -> None:
        """A new leader's clock may differ from the one that granted: no lease lasts longer from now than it was
        granted for."""
        for start in tuple(self._starts):
            span = self._spans[start]
            latest_ms = now_ms + max(0, span.available_at_ms - span.granted_at_ms)
            if span.leased and span.available_at_ms > latest_ms:
                self._cut(span.start, span.end)
                self._insert(msgspec.structs.replace(span, granted_at_ms=now_ms, available_at_ms=latest_ms))

    # --- decisions ---------------------------------------------------------------------------------------------------

    def plan(self, now_ms: int, max_messages: int) -> Plan:
        """What may be handed out now, at most `max_messages` (>= 1) messages."""
        returned: list[SpanFold] = []
        left = max_messages
        for span in self._available_spans(now_ms):
            if left <= 0:
                break
            if span.expiries >= EXPIRIES_BEFORE_ALONE:
                if returned:
                    continue
                alone = msgspec.structs.replace(span, end=span.start + 1)
                return Plan((alone,), self.next, 0, alone=True)
            part = msgspec.structs.replace(span, end=min(span.end, span.start + left))
            returned.append(part)
            left -= part.end - part.start
        return Plan(tuple(returned), self.next, max(0, min(left, OUTSTANDING_MAX - self.outstanding)))

    def replay(self, attempt_id: str, now_ms: int) -> list[SpanFold] | None:
        """What a repeated receive gets: the spans of its first attempt that are still leased by it, None if unknown."""
        deadline_ms, ranges = self.attempts.get(attempt_id, (0, []))
        if deadline_ms <= now_ms:
            return None
        found: list[SpanFold] = []
        for start, end in ranges:
            found += [
                msgspec.structs.replace(span, start=max(start, span.start), end=min(end, span.end))
                for span in self._overlapping(start, end)
                if span.leased and span.available_at_ms > now_ms
            ]
        return found

    def ackable(self, offsets: Iterable[int], delivery: int, now_ms: int) -> tuple[list[bool], list[int]]:
        """Whether receipts of the `delivery`-th lease still count, and those of the offsets that are not done yet.

        One counts when its message is done already (acking twice is fine), or no later delivery of it is out.
        """
        verdicts: list[bool] = []
        unfinished: list[int] = []
        span: SpanFold | None = None
        for offset in offsets:
            if span is None or not span.start <= offset < span.end:
                span = self._at(offset)
            if span is None:
                verdicts.append(True)
                if offset >= self.next:
                    unfinished.append(offset)
                continue
            good = span.deliveries <= delivery or not (span.leased and span.available_at_ms > now_ms)
            verdicts.append(good)
            if good:
                unfinished.append(offset)
        return verdicts, unfinished

    def holds(self, offset: int, delivery: int) -> bool:
        """Whether the delivery is the latest one and its lease has neither been given back nor passed on."""
        span = self._at(offset)
        return span is not None and span.leased and span.deliveries <= delivery

    def may_take_fresh(self, readable_end: int) -> bool:
        """Whether there are messages that were never handed out, and room to hand them out."""
        return self.next < readable_end and self.outstanding < OUTSTANDING_MAX

    def has_returned(self, now_ms: int) -> bool:
        """Whether a message that was handed out before is free again."""
        return next(self._available_spans(now_ms), None) is not None

    def next_wakeup_ms(self) -> int | None:
        """When the next lease or back-off ends, None when none is running."""
        while self._wakeups:
            available_at_ms, start = self._wakeups[0]
            span = self._spans.get(start)
            if span is not None and span.available_at_ms == available_at_ms:
                return available_at_ms
            heappop(self._wakeups)
        return None

    def spans(self) -> list[SpanFold]:
        return [self._spans[start] for start in self._starts]

    def floor(self) -> int:
        """Everything below is done."""
        return self._starts[0] if self._starts else self.next

    def _available_spans(self, now_ms: int) -> Iterator[SpanFold]:
        """The spans whose time has come, by offset. Do not change the state while iterating."""
        while self._wakeups and self._wakeups[0][0] <= now_ms:
            insort(self._available, heappop(self._wakeups)[1])
        at = 0
        while at < len(self._available):
            start = self._available[at]
            span = self._spans.get(start)
            repeated = at > 0 and self._available[at - 1] == start
            if repeated or span is None or span.available_at_ms > now_ms:
                del self._available[at]
                continue
            at += 1
            yield span

    def _at(self, offset: int) -> SpanFold | None:
        at = bisect_right(self._starts, offset) - 1
        if at < 0:
            return None
        span = self._spans[self._starts[at]]
        return span if offset < span.end else None

    def _overlapping(self, start: int, end: int) -> list[SpanFold]:
        first = max(0, bisect_right(self._starts, start) - 1)
        spans = (self._spans[at] for at in self._starts[first : bisect_left(self._starts, end)])
        return [span for span in spans if span.end > start]

    def _check(self) -> None:
        assert self.outstanding >= 0
        assert not self._starts or self._spans[self._starts[-1]].end <= self.next, "a span reaches past next"
