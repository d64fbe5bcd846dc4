"""What a receive hands out: the choice among all that a group may be given now.

    a greater priority first; within a priority
        what came back (lease or back-off over), by offset
        what is due now                          by (deliver_at_ms, offset)
        what is fresh                            by offset

Left out is what is done ahead of the cursor, what was taken back before it was due, and what has expired: the cursor
passes over it, or a span of it is `gone`. A message whose lease ended twice is handed out alone, so that one that kills
its consumer takes no batch-mates with it, and so is one on its last delivery whose lease has ended before.

In a group ordered by key (key_order.py) priority is not looked at: lane 0 holds all messages that were not delayed. One
of a key that is busy is held; its turn comes when the earlier ones are done.

`select` reads and decides. The shell makes a Grant of the choice, applies and appends it, and calls `update_keys`, all
without a pause. In a group ordered by key it first calls `read_keys` until all is read, with a pause after each call.
Messages are numbers here; `MessageSource` is where the shell keeps them.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator
from heapq import merge
from typing import Any, NamedTuple, Protocol

import msgspec

from portalmq.broker.core.fold import SpanFold
from portalmq.broker.core.queue.delivery import EXPIRIES_BEFORE_ALONE, HELD_MS, OUTSTANDING_MAX, GroupDelivery
from portalmq.broker.core.queue.key_order import HELD_MAX, KeyQueues
from portalmq.broker.core.queue.lanes import DELAYED, PRIORITY_MAX
from portalmq.broker.core.queue.records import LanePosition, Range

# `expires_at_ms` of a message that does not.
NEVER_MS = 1 << 62
# The keys of so many messages are read at a time; or of fewer, as large ones and those that stand far from the one
# before take longer to read.
KEYS_PER_STEP = 500
BYTES_AS_A_MESSAGE = 2_048
FAR_APART = 1_000
FAR_AS_MESSAGES = 100
# Of so many spans that came back a choice hands out: the next one goes on.
SPANS_PER_SELECTION = 500


class Run(msgspec.Struct, frozen=True, gc=False):
    """Messages [start, end) that stand side by side in a lane and are alike. `token` is the shell's.

    One with start == end says that its lane holds nothing more below that place: the shell has looked. `size` is in
    bytes, 0 where it is not known yet.
    """

    start: int
    end: int
    token: Any = None
    due_ms: int = 0
    expires_at_ms: int = NEVER_MS
    key: int = 0
    size: int = 0


class MessageSource(Protocol):
    """The messages of a partition that are readable."""

    def lanes(self) -> Collection[int]:
        """The lanes besides lane 0 that may hold messages."""
        ...

    def fresh(self, lane: int, due_ms: int, offset: int) -> Iterator[Run]:
        """The messages of the lane from that place on, in its order; as many as one turn may look at. For a group
        ordered by key lane 0 is all that was not delayed, and no other lane below 32 is asked for."""
        ...

    def returned(self, start: int, end: int) -> Iterator[Run]:
        """The messages of any lane in [start, end), by offset, all that are still there."""
        ...


class DeliveryRange(NamedTuple):
    """Messages [start, end) of `token` that are handed out, for the `deliveries`-th time."""

    start: int
    end: int
    deliveries: int
    lane: int
    token: Any


class Selection(msgspec.Struct):
    """`next` and `cursors` are where the lanes go on, those that moved. `expired` counts what was left out for its age,
    `keys` are those of what is handed out or held, where the group is ordered by key."""

    delivered: list[DeliveryRange]
    next: int
    cursors: dict[int, tuple[int, int]]
    gone: list[Range]
    held: list[tuple[int, int, int]]
    keys: list[tuple[int, int]]
    expired: int = 0
    alone: bool = False

    @property
    def messages(self) -> int:
        return sum([end - start for start, end, _, _, _ in self.delivered])

    @property
    def not_before_ms(self) -> int:
        """The log's time must be this at the least, so that nothing can be appended behind a cursor."""
        return max([due_ms for due_ms, _ in self.cursors.values()], default=0)

    def lane_positions(self) -> tuple[LanePosition, ...]:
        """The cursors that moved, as a Grant has them."""
        return tuple([(lane, *place) for lane, place in sorted(self.cursors.items())])


def select(
    delivery: GroupDelivery,
    source: MessageSource,
    *,
    now_ms: int,
    wall_ms: int,
    due_by_ms: int,
    max_messages: int,
    max_deliveries: int,
    by_key: bool = False,
    committed: int = 0,
    cancelled: Container[int] = (),
    max_bytes: int = NEVER_MS,
) -> Selection:
    """At most `max_messages`; with 0 of them, only what the cursors may pass over. No more are looked for once those
    that are handed out have `max_bytes`.

    Leases end by `now_ms`, messages expire by `wall_ms`. `due_by_ms` is at most that, and such that all messages which
    are due by then are readable: a cursor that passes a time passes everything that was to come at it. `committed` is
    the high watermark: a message whose end is not committed keeps the others of its key back. Of a group ordered by key
    nothing is handed out before `read_keys` has read all.
    """
    kind = _KeyOrderSelector if by_key else _Selector
    selector = kind(delivery, source, now_ms, wall_ms, due_by_ms, max_messages, max_deliveries, cancelled, max_bytes)
    if not by_key or max_messages == 0 or _knows_turns(delivery, committed):
        selector.run()
    return selector.selection


def update_keys(delivery: GroupDelivery, selection: Selection) -> None:
    """The Grant of a choice was applied: whose turn it is has changed."""
    if delivery.keys is not None:
        for offset, key in selection.keys:
            delivery.keys.add(offset, key)
        for start, end, _, _, _ in selection.delivered:
            for offset in range(start, end):
                delivery.keys.handed_out(offset)


def read_keys(delivery: GroupDelivery, source: MessageSource, now_ms: int, at_most: int = KEYS_PER_STEP) -> bool:
    """Of a group ordered by key: read the keys of some messages that are unfinished and not in its book; whether all
    are in it now. What changes between two calls finds its way into it."""
    if delivery.keys is None:
        delivery.keys = KeyQueues([(0, NEVER_MS)], delivery.finished_at)
    book = delivery.keys
    while not book.is_whole and at_most > 0:
        first, end = book.unread
        upto, last = end, first
        for start, part_end, span in delivery.parts_within(first, end):
            if at_most <= 0:
                upto = start
                break
            at_most -= FAR_AS_MESSAGES if start - last > FAR_APART else 0
            last, worth = _read(book, source, span, start, part_end, now_ms, max(1, at_most))
            at_most -= worth
            if last < part_end:
                upto = last
                break
        book.read_to(upto)
    return book.is_whole


def _read(
    book: KeyQueues, source: MessageSource, span: SpanFold, start: int, end: int, now_ms: int, at_most: int
) -> tuple[int, int]:
    """Put what a span has in [start, end) into the book; up to where that was done, and how many messages it was worth:
    at least one, and no more than `at_most` but for the last one's size."""
    end = min(end, start + at_most)
    worth = 0
    for run in source.returned(start, end):
        worth += run.end - run.start + run.size // BYTES_AS_A_MESSAGE
        for offset in range(run.start, run.end) if run.key else ():
            book.add(offset, run.key)
            if span.leased and span.available_at_ms > now_ms:
                book.handed_out(offset)
            elif span.available_at_ms >= HELD_MS and book.is_first(offset):
                book.free(offset)
        if worth >= at_most:
            return run.end, worth
    return end, max(1, worth)


def has_turn(delivery: GroupDelivery, now_ms: int, committed: int) -> bool:
    """Of a group ordered by key: whether a message that came back or was held may be handed out, or its book is still
    to be built, by whoever asks for messages."""
    book = delivery.keys
    if book is None or not book.is_whole:
        return delivery.held > 0 or delivery.has_returned(now_ms)
    if not _knows_turns(delivery, committed):
        return False
    return next(_spans_in_turn(delivery, book, now_ms), None) is not None or delivery.has_unnoted(now_ms)


def _knows_turns(delivery: GroupDelivery, committed: int) -> bool:
    if delivery.keys is None:
        return False
    delivery.keys.settle(committed)
    return delivery.keys.knows_turns


def _spans_in_turn(delivery: GroupDelivery, book: KeyQueues, now_ms: int) -> Iterator[SpanFold]:
    """The messages, one by one and by offset, that came back or were held and whose turn it is."""
    available = (
        msgspec.structs.replace(span, start=offset, end=offset + 1)
        for span in delivery.available(now_ms)
        for offset in range(span.start, span.end)
    )
    last = -1
    for span in merge(available, _freed(delivery, book, now_ms), key=_start_of):
        if span.start > last and _is_in_turn(delivery, book, span.start, now_ms):
            yield span
        last = span.start


def _freed(delivery: GroupDelivery, book: KeyQueues, now_ms: int) -> Iterator[SpanFold]:
    for offset in tuple(book.freed):
        span = delivery.at(offset)
        if span is not None and delivery.is_free(span, now_ms):
            yield msgspec.structs.replace(span, start=offset, end=offset + 1)
        else:  # its turn will come when its lease or back-off is over
            book.forget_freed(offset)


def _is_in_turn(delivery: GroupDelivery, book: KeyQueues, offset: int, now_ms: int) -> bool:
    key = book.key_of(offset)
    if key == 0:
        return True
    if not book.is_first(offset):
        return False
    out = book.out(key)
    span = delivery.at(out) if out is not None and out != offset else None
    return span is None or not (span.leased and span.available_at_ms > now_ms)


class _Selector:
    """One choice under way. `left` is how many messages may still be handed out, `room` how many fresh ones, and
    `bytes_left` how large they may be."""

    def __init__(
        self,
        delivery: GroupDelivery,
        source: MessageSource,
        now_ms: int,
        wall_ms: int,
        due_by_ms: int,
        max_messages: int,
        max_deliveries: int,
        cancelled: Container[int],
        max_bytes: int,
    ) -> None:
        self.delivery = delivery
        self.source = source
        self.now_ms = now_ms
        self.wall_ms = wall_ms
        self.due_by_ms = due_by_ms
        self.left = max_messages
        self.looks_only = max_messages == 0
        self.max_deliveries = max_deliveries
        self.cancelled = cancelled
        self.bytes_left = max_bytes
        self.spans_left = SPANS_PER_SELECTION
        self.room = OUTSTANDING_MAX - delivery.outstanding
        self.selection = Selection([], delivery.next, {}, [], [], [])

    def run(self) -> None:
        lanes = self.source.lanes()
        for priority in self._priorities(lanes):
            if not self.looks_only:
                self._take_returned(self.delivery.available(self.now_ms, priority))
            if DELAYED + priority in lanes:
                self._take_fresh(DELAYED + priority)
            if priority == 0 or priority in lanes:
                self._take_fresh(priority)
            if self.left <= 0 and not self.looks_only:
                return

    def _priorities(self, lanes: Collection[int]) -> list[int]:
        if not lanes and not self.delivery.cursors:
            return [0]
        present = {lane % DELAYED for lane in lanes} | {lane % DELAYED for lane in self.delivery.cursors} | {0}
        return [priority for priority in range(PRIORITY_MAX, -1, -1) if priority in present]

    # --- what came back ----------------------------------------------------------------------------------------------

    def _take_returned(self, spans: Iterable[SpanFold]) -> None:
        for span in spans:
            if self.spans_left <= 0 and self.selection.delivered:
                self.left = 0
            if self.left <= 0:
                return
            self.spans_left -= 1
            if span.deliveries >= self.max_deliveries:
                continue  # its turn is to be given up
            if self._is_suspect(span):
                if self.selection.delivered:
                    continue
                self._deliver_again(span, span.start, span.start + 1)
                if self.selection.delivered:
                    self.left, self.selection.alone = 0, True
                    return
                continue  # it has expired: one a turn
            self._deliver_again(span, span.start, min(span.end, span.start + self.left))

    def _is_suspect(self, span: SpanFold) -> bool:
        """Whether it may be what ended the leases that it was in."""
        expiries = span.expiries + span.leased
        return expiries >= EXPIRIES_BEFORE_ALONE or (expiries > 0 and span.deliveries + 1 >= self.max_deliveries)

    def _deliver_again(self, span: SpanFold, start: int, end: int) -> None:
        at = start
        for run in self.source.returned(start, end):
            if self.left <= 0:  # of what the answer has no room for nothing is known
                return
            if run.start > at:
                self._add_gone(at, run.start)
            at = run.end
            if run.expires_at_ms <= self.wall_ms:
                self.selection.expired += run.end - run.start
                self._add_gone(run.start, run.end)
            else:
                self._deliver(run, run.start, run.end, span.deliveries + 1, span.lane)
        if at < end:
            self._add_gone(at, end)

    def _add_gone(self, start: int, end: int) -> None:
        if self.selection.gone and self.selection.gone[-1][1] == start:
            self.selection.gone[-1] = (self.selection.gone[-1][0], end)
        else:
            self.selection.gone.append((start, end))

    # --- what was never handed out -----------------------------------------------------------------------------------

    def _take_fresh(self, lane: int) -> None:
        limit = min(self.left, self.room)
        if limit <= 0 and not self.looks_only:
            return
        due_ms, offset = self._cursor(lane)
        for run in self.source.fresh(lane, due_ms, offset):
            if run.due_ms > self.due_by_ms:
                return
            if run.start == run.end:
                self._move_cursor(lane, run.due_ms, run.end)
                continue
            for start, end, is_done in self._parts(run):
                if is_done:
                    self._move_cursor(lane, run.due_ms, end)
                    continue
                if not self._take(run, start, end, lane):
                    return

    def _cursor(self, lane: int) -> tuple[int, int]:
        if lane == 0:
            return 0, self.delivery.next
        place = self.delivery.cursors.get(lane, (0, 0))
        return place if lane >= DELAYED else (0, max(place[1], self.delivery.start))

    def _parts(self, run: Run) -> Iterator[tuple[int, int, bool]]:
        """The run in parts, and whether they are to be passed over."""
        if run.expires_at_ms <= self.wall_ms:
            self.selection.expired += run.end - run.start
            yield run.start, run.end, True
            return
        if not self.delivery.has_ahead and run.due_ms == 0:
            yield run.start, run.end, False
            return
        start, was_done = run.start, False
        for offset in range(run.start, run.end):
            is_done = self.delivery.is_ahead(offset) or (
                run.due_ms > 0 and (offset < self.delivery.start or offset in self.cancelled)
            )
            if is_done != was_done:
                if offset > start:
                    yield start, offset, was_done
                start, was_done = offset, is_done
        yield start, run.end, was_done

    def _take(self, run: Run, start: int, end: int, lane: int) -> bool:
        """Hand out what fits; whether more does."""
        end = min(end, start + min(self.left, self.room))
        if end <= start:
            return False
        self._deliver(run, start, end, 1, lane)
        self.room -= end - start
        self._move_cursor(lane, run.due_ms, end)
        return self.left > 0 and self.room > 0

    def _deliver(self, run: Run, start: int, end: int, deliveries: int, lane: int) -> None:
        self.selection.delivered.append(DeliveryRange(start, end, deliveries, lane, run.token))
        self.left -= end - start
        self.bytes_left -= run.size * (end - start) // (run.end - run.start)
        if self.bytes_left <= 0:
            self.left = 0

    def _move_cursor(self, lane: int, due_ms: int, offset: int) -> None:
        if lane == 0:
            self.selection.next = max(self.selection.next, offset)
        else:
            self.selection.cursors[lane] = max(
                self._cursor(lane), self.selection.cursors.get(lane, (0, 0)), (due_ms, offset)
            )


class _KeyOrderSelector(_Selector):
    """As above, but of a key one message at a time. Runs of messages with keys are of one message each."""

    def run(self) -> None:
        lanes = self.source.lanes()
        # Where nothing is handed out nobody asks it.
        self.book = KeyQueues() if self.delivery.keys is None else self.delivery.keys
        self.chosen: set[int] = set()  # keys that this choice hands out a message of
        self.held = 0
        if not self.looks_only:
            self._take_turns()
        delayed = sorted((lane for lane in lanes if lane >= DELAYED), reverse=True)
        for lane in (*delayed, 0):
            if self.left > 0 or self.looks_only:
                self._take_fresh(lane)
        if self.selection.next > self.delivery.next:
            # What has a priority is read in lane 0 here, and so passed with it.
            for lane in lanes:
                if lane < DELAYED:
                    self._move_cursor(lane, 0, self.selection.next)

    def _take_turns(self) -> None:
        for span in _spans_in_turn(self.delivery, self.book, self.now_ms):
            if self.left <= 0:
                return
            before = len(self.selection.delivered)
            self._take_returned([span])
            if len(self.selection.delivered) > before:
                self.chosen.add(self.book.key_of(span.start))

    def _take(self, run: Run, start: int, end: int, lane: int) -> bool:
        if run.key == 0:
            return super()._take(run, start, end, lane)
        if self.looks_only or self.room <= 0:
            return False
        if run.key in self.chosen or self.book.is_busy(run.key):
            if self.delivery.held + self.held >= HELD_MAX:
                return False
            held = self.selection.held
            if held and held[-1][1] == start and held[-1][2] == lane:
                held[-1] = (held[-1][0], end, lane)
            else:
                held.append((start, end, lane))
            self.selection.keys.append((start, run.key))
            self.held += 1
            self.room -= 1
            self._move_cursor(lane, run.due_ms, end)
            return True
        self.chosen.add(run.key)
        self.selection.keys.append((start, run.key))
        return super()._take(run, start, end, lane)


def _start_of(span: SpanFold) -> int:
    return span.start
