"""The spans of a group: messages that were delivered and are not finished, and the times at which they are free again.

A heap of wakeups has the end of each lease and back-off. Spans whose time has come move from it to `_available`, by
priority. Both hold rows that are stale by now, and drop them a few at a time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, merge

from msgspec.structs import replace

from portalmq.broker.core.fold import HELD_MS, DeadFold, SpanFold
from portalmq.broker.core.queue.lanes import priority_of
from portalmq.broker.core.queue.records import Range

STALE_WAKEUPS_MAX = 1_000
# Heap rows that each new wakeup checks while too many may be stale, and those that one query discards.
SWEPT_AT_ONCE = 4
STALE_AT_ONCE = 1_500
# Due heap rows that one query takes, and returned messages that it checks.
RETURNED_AT_ONCE = 1_000
# From this many ranges on, they are cut out of the spans in one pass.
RANGES_IN_A_PASS = 100


class GroupSpans:
    """The spans of one group on one partition, sorted and disjoint. `outstanding` is the number of their messages,
    `held` how many of these wait for an earlier one of their key. Spans are replaced, never modified: snapshots share
    them."""

    def _load_spans(self, spans: Sequence[SpanFold]) -> None:
        self._spans: dict[int, SpanFold] = {span.start: span for span in spans}
        self._starts: list[int] = list(self._spans)
        self.outstanding = length_of(spans)
        self.held = length_of([span for span in spans if span.available_at_ms >= HELD_MS])
        # The messages whose last change was a lease, and how many of these leases are noted to have ended, by start.
        self.leased = length_of([span for span in spans if span.leased])
        self._ended: dict[int, int] = {}
        self._ended_messages = 0
        # heap of (available_at_ms, start); rows may be stale
        self._wakeups = [(span.available_at_ms, span.start) for span in spans if span.available_at_ms < HELD_MS]
        heapify(self._wakeups)
        # A second such heap, of rows not yet checked for being stale, and the starts that were found live in it.
        self._unswept: list[tuple[int, int]] = []
        self._swept: set[int] = set()
        self._available: dict[int, list[int]] = {}  # priority -> sorted starts of available spans; some may be stale
        self._returned: list[int] = []  # those not yet checked for being overdue
        self._overdue_by = 0
        # True if the last search for overdue messages left some out.
        self.may_be_overdue = False

    # --- changes -----------------------------------------------------------------------------------------------------

    def _insert(self, span: SpanFold) -> None:
        insort(self._starts, span.start)
        self._put(span)

    def _put(self, span: SpanFold) -> None:
        """Store a span whose start is in `_starts` already."""
        self._spans[span.start] = span
        self.outstanding += span.end - span.start
        if span.leased:
            self.leased += span.end - span.start
        if span.available_at_ms < HELD_MS:
            heappush(self._wakeups, (span.available_at_ms, span.start))
        else:
            self.held += span.end - span.start
        if self._unswept or len(self._wakeups) > 2 * len(self._spans) + STALE_WAKEUPS_MAX:
            self._sweep_wakeups()

    def _sweep_wakeups(self) -> None:
        """Check some rows for being stale. Rows of acked leases would otherwise stay until the leases had ended,
        perhaps twelve hours; checking all at once would block the event loop."""
        if not self._unswept:
            self._unswept, self._wakeups, self._swept = self._wakeups, [], set()
        for _ in range(min(SWEPT_AT_ONCE, len(self._unswept))):
            row = self._unswept.pop()  # the last one: the rest is still a heap
            if row[1] not in self._swept and self._is_live(row):
                self._swept.add(row[1])
                heappush(self._wakeups, row)

    def _is_live(self, row: tuple[int, int]) -> bool:
        span = self._spans.get(row[1])
        return span is not None and span.available_at_ms == row[0]

    def _parts(self, start: int, end: int) -> list[SpanFold]:
        """Return copies of the spans within [start, end), to be changed and `_put` one by one. Parts outside stay."""
        span = self._spans.get(start)
        if span is not None and span.end == end:  # exactly one span: nothing moves
            self._forget((span,))
            return [replace(span)]
        parts = [replace(part) for part in self._cut(start, end)]
        for part in parts:
            insort(self._starts, part.start)
        return parts

    def _forget(self, spans: Sequence[SpanFold]) -> None:
        self.outstanding -= length_of(spans)
        if self.leased:
            self.leased -= length_of([span for span in spans if span.leased])
        if self._ended:
            for span in spans:
                self._ended_messages -= self._ended.pop(span.start, 0)
        if self.held:
            self.held -= length_of([span for span in spans if span.available_at_ms >= HELD_MS])

    def _cut(self, start: int, end: int) -> list[SpanFold]:
        """Remove [start, end) from the spans and return the removed parts."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._spans[self._starts[first]].end <= start:
            first += 1
        last = bisect_left(self._starts, end)
        taken = [self._spans.pop(at) for at in self._starts[first:last]]
        if not taken:
            return taken
        self._forget(taken)
        del self._starts[first:last]
        head, tail = taken[0], taken[-1]
        if head.start < start:
            self._insert(replace(head, end=start))
            taken[0] = replace(head, start=start)
        if tail.end > end:
            self._insert(replace(tail, start=end))
            taken[-1] = replace(taken[-1], end=end)
        return taken

    def _cut_out(self, ranges: Sequence[Range]) -> None:
        """Remove each range from the spans. Many are removed in one pass, since each change of a long list moves what
        follows."""
        if len(ranges) < RANGES_IN_A_PASS:
            for start, end in ranges:
                self._cut(start, end)
            return
        taken, rests = _take_out(self._spans, self._starts, sorted(ranges))
        if not taken:
            return
        self._forget(taken)
        first = bisect_left(self._starts, taken[0].start)
        last = bisect_right(self._starts, taken[-1].start)
        kept = [start for start in self._starts[first:last] if start in self._spans]
        kept += [rest.start for rest in rests]
        kept.sort()
        self._starts[first:last] = kept
        for rest in rests:
            self._put(rest)

    # --- lookups -----------------------------------------------------------------------------------------------------

    def spans(self) -> list[SpanFold]:
        return [self._spans[start] for start in self._starts]

    def at(self, offset: int) -> SpanFold | None:
        at = bisect_right(self._starts, offset) - 1
        if at < 0:
            return None
        span = self._spans[self._starts[at]]
        return span if offset < span.end else None

    def parts_within(self, start: int, end: int) -> Iterator[tuple[int, int, SpanFold]]:
        """Yield the parts of spans within [start, end), by offset. Do not change the state while iterating."""
        for at in range(max(0, bisect_right(self._starts, start) - 1), len(self._starts)):
            span = self._spans[self._starts[at]]
            if span.start >= end:
                return
            if span.end > start:
                yield max(start, span.start), min(end, span.end), span

    def _overlapping(self, start: int, end: int) -> list[SpanFold]:
        first = max(0, bisect_right(self._starts, start) - 1)
        spans = (self._spans[at] for at in self._starts[first : bisect_left(self._starts, end)])
        return [span for span in spans if span.end > start]

    def has_span(self, offset: int) -> bool:
        """Return whether the message was delivered, as far as this log knows, and is unfinished."""
        return self.at(offset) is not None

    def with_span(self, offsets: Sequence[int]) -> Sequence[int]:
        """Return the messages that were delivered, as far as this log knows, and are unfinished."""
        if self._span_of_all(offsets) is not None:
            return offsets
        found: list[int] = []
        span: SpanFold | None = None
        for offset in offsets:
            if span is None or not span.start <= offset < span.end:
                span = self.at(offset)
            if span is not None:
                found.append(offset)
        return found

    def _span_of_all(self, offsets: Sequence[int]) -> SpanFold | None:
        """Return the span that holds all offsets, if one does: the usual case for messages of one lease."""
        if not offsets:
            return None
        span = self.at(offsets[0])
        ends = (offsets[0], offsets[-1]) if isinstance(offsets, range) else offsets
        return span if span is not None and span.start <= min(ends) and max(ends) < span.end else None

    def spans_of(self, offsets: Iterable[int]) -> list[SpanFold]:
        """Return the spans of the sorted messages, for those that have one."""
        found: list[SpanFold] = []
        end = -1
        for offset in offsets:
            if offset >= end and (span := self.at(offset)) is not None:
                found.append(span)
                end = span.end
        return found

    def are_unchanged(self, spans: Iterable[SpanFold]) -> bool:
        """Return whether these spans are unchanged since they were looked up."""
        return all(self._spans.get(span.start) is span for span in spans)

    # --- messages that are free again --------------------------------------------------------------------------------

    def is_free(self, span: SpanFold, now_ms: int) -> bool:
        """Return whether only the order of keys keeps the messages back, if anything does."""
        return span.available_at_ms <= now_ms or span.available_at_ms >= HELD_MS

    def available(self, now_ms: int, priority: int | None = None) -> Iterator[SpanFold]:
        """Yield the available spans (of one priority) by offset, as far as they are noted. Do not change the state
        while iterating."""
        self._note_returned(now_ms)
        if priority is not None:
            return self._live(self._available.get(priority, []), now_ms)
        return merge(*(self._live(starts, now_ms) for starts in self._available.values()), key=start_of)

    def in_flight(self, now_ms: int) -> int:
        """Return how many messages have a lease that runs. Of very many leases that ended at once, some still count."""
        self._note_returned(now_ms)
        return self.leased - self._ended_messages

    def has_returned(self, now_ms: int) -> bool:
        """Return whether a delivered message is free again, or may be: of very many only some are noted."""
        return next(self.available(now_ms), None) is not None or self.has_unnoted(now_ms)

    def has_unnoted(self, now_ms: int) -> bool:
        """Return whether leases or back-offs have ended that are not noted yet."""
        wakeups, unswept = self._wakeups, self._unswept
        return bool((wakeups and wakeups[0][0] <= now_ms) or (unswept and unswept[0][0] <= now_ms))

    def overdue(self, now_ms: int, max_deliveries: int, limit: int) -> list[tuple[int, int, int]]:
        """Return at most `limit` messages, as (start, end, deliveries), that are free and used up their deliveries:
        they are to be given up.

        One call checks only some of the returned messages; `may_be_overdue` is true if the caller should call again.
        """
        self._note_returned(now_ms)
        if max_deliveries < self._overdue_by or self._overdue_by == 0:
            self._returned = [start for starts in self._available.values() for start in starts]
        self._overdue_by = max_deliveries
        found: list[tuple[int, int, int]] = []
        kept: list[int] = []
        if not self._returned:
            self.may_be_overdue = self.has_unnoted(now_ms)
            return found
        left = self._returned[RETURNED_AT_ONCE:]
        for start in dict.fromkeys(self._returned[:RETURNED_AT_ONCE]):
            span = self._spans.get(start)
            if span is None or span.available_at_ms > now_ms or span.deliveries < max_deliveries:
                continue
            end = min(span.end, start + limit)
            if end > start:
                found.append((start, end, span.deliveries))
                limit -= end - start
            kept.append(start)
        self._returned = kept + left
        self.may_be_overdue = limit <= 0 or bool(left) or self.has_unnoted(now_ms)
        return sorted(found)

    def next_wakeup_ms(self) -> int | None:
        """Return the end of the next lease or back-off, None if none is running. It may be too early after very many
        acks; the caller then asks again."""
        looks = STALE_AT_ONCE
        for rows in (self._wakeups, self._unswept):
            while rows and looks > 0 and not self._is_live(rows[0]):
                heappop(rows)
                looks -= 1
        return min([rows[0][0] for rows in (self._wakeups, self._unswept) if rows], default=None)

    def _note_returned(self, now_ms: int) -> None:
        """Note spans that became available; of very many, the first ones."""
        if not self.has_unnoted(now_ms):
            return
        noted: dict[int, list[int]] = {}
        looks = RETURNED_AT_ONCE
        for rows in (self._wakeups, self._unswept):
            while rows and rows[0][0] <= now_ms and looks > 0:
                looks -= 1
                available_at_ms, start = heappop(rows)
                span = self._spans.get(start)
                if span is not None and span.available_at_ms == available_at_ms:
                    noted.setdefault(priority_of(span.lane), []).append(start)
                    if span.leased and start not in self._ended:
                        self._ended[start] = span.end - start
                        self._ended_messages += span.end - start
        for priority, starts in noted.items():
            self._returned += starts
            available = self._available.setdefault(priority, [])
            if len(starts) < RANGES_IN_A_PASS:
                for start in starts:
                    insort(available, start)
            else:
                available += sorted(starts)
                available.sort()  # a merge

    def _live(self, starts: list[int], now_ms: int) -> Iterator[SpanFold]:
        at = seen = 0  # those from `at` to `seen` are stale
        last = -1
        while seen < len(starts):
            start = starts[seen]
            span = self._spans.get(start)
            if start == last or span is None or span.available_at_ms > now_ms:
                seen += 1
                continue
            del starts[at:seen]
            at = seen = at + 1
            last = start
            yield span
        del starts[at:seen]


def length_of(spans: Sequence[SpanFold]) -> int:
    """Return how many messages the spans hold."""
    return sum([span.end - span.start for span in spans])


def start_of(span: DeadFold | SpanFold) -> int:
    return span.start


def _take_out(
    spans: dict[int, SpanFold], starts: Sequence[int], ranges: Sequence[Range]
) -> tuple[list[SpanFold], list[SpanFold]]:
    """Remove the spans that the sorted ranges touch from `spans`, whose sorted starts are `starts`. Return the
    removed spans, and the parts of them outside the ranges, to be put back; both by offset."""
    taken: list[SpanFold] = []
    rests: list[SpanFold] = []
    cut: SpanFold | None = None  # the span that remains from `upto` on, as far as is known
    upto = 0
    for start, end in ranges:
        if cut is not None:
            rest_end = min(start, cut.end)
            if upto < rest_end:
                rests.append(replace(cut, start=upto, end=rest_end))
            upto = max(upto, end)
            if upto < cut.end:
                continue
            start, cut = max(start, cut.end), None
        span = spans.get(start)
        if span is not None and span.end == end:  # exactly one span
            taken.append(spans.pop(start))
            continue
        for at in range(max(0, bisect_right(starts, start) - 1), len(starts)):
            if starts[at] >= end:
                break
            span = spans.get(starts[at])
            if span is None or span.end <= start:
                continue
            taken.append(spans.pop(span.start))
            if span.start < start:
                rests.append(replace(span, end=start))
            if span.end > end:
                cut, upto = span, end
    if cut is not None:
        rests.append(replace(cut, start=upto))
    return taken, rests
