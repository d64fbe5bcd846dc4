"""The selection of the messages that a receive delivers, among all that a group may be given now.

    a greater priority first; within a priority
        what was returned (lease or back-off over), by offset
        what is due now                             by (deliver_at_ms, offset)
        what is fresh                               by offset

Messages that are finished ahead of the cursor, cancelled before they were due, or expired are left out: the cursor
passes them, or their part of a span is `gone`. A message whose lease ran out twice is delivered alone, so that one that
kills its consumer takes no others with it. So is a message on its last delivery if a lease of it ran out.

A group ordered by key, or with a limit for each key (key_order.py), ignores priorities: its lane 0 holds all messages
that were not delayed. A message of a busy key is held; its turn comes when the earlier ones are finished, or when the
rate of its key allows it.

A group's limits (limits.py) bound how many messages one selection may deliver.

`select` reads and decides. The shell makes a Grant of the selection, applies and appends it, and calls `update_keys`,
all without a pause. In a group ordered by key it first calls `read_keys` until all is read, with a pause after each
call. Messages are numbers here; the shell provides them through `MessageSource`.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator
from heapq import merge
from typing import Any, NamedTuple, Protocol

import msgspec

from portalmq.broker.core.fold import HELD_MS, SpanFold
from portalmq.broker.core.queue.delivery import EXPIRIES_BEFORE_ALONE, OUTSTANDING_MAX, GroupDelivery
from portalmq.broker.core.queue.key_order import HELD_MAX, KeyQueues
from portalmq.broker.core.queue.key_rates import KeyLimits
from portalmq.broker.core.queue.lanes import DELAYED, PRIORITY_MAX
from portalmq.broker.core.queue.records import LanePosition, Range
from portalmq.broker.core.queue.spans import start_of

# `expires_at_ms` of a message that does not expire.
NEVER_MS = 1 << 62
# The number of messages whose keys are read at a time. Large messages, and those far from the one before, count as
# several, since they take longer to read.
KEYS_PER_STEP = 500
BYTES_AS_A_MESSAGE = 2_048
FAR_APART = 1_000
FAR_AS_MESSAGES = 100
ONE = KeyLimits()
# The most returned spans that one selection delivers from; the next one continues.
SPANS_PER_SELECTION = 500


class Run(msgspec.Struct, frozen=True, gc=False):
    """Consecutive messages [start, end) of a lane with the same properties. `token` is the shell's.

    A run with start == end says that the shell looked, and the lane holds nothing more below that position. `size` is
    in bytes, 0 if unknown.
    """

    start: int
    end: int
    token: Any = None
    due_ms: int = 0
    expires_at_ms: int = NEVER_MS
    key: int = 0
    size: int = 0


class MessageSource(Protocol):
    """The readable messages of a partition."""

    def lanes(self) -> Collection[int]:
        """Return the lanes besides lane 0 that may hold messages."""
        ...

    def fresh(self, lane: int, due_ms: int, offset: int) -> Iterator[Run]:
        """Yield the messages of the lane from that position on, in its order, as many as one turn may read. In a group
        ordered by key, lane 0 holds all messages that were not delayed, and no other lane below 32 is requested."""
        ...

    def returned(self, start: int, end: int) -> Iterator[Run]:
        """Yield the messages of all lanes in [start, end) that still exist, by offset."""
        ...


class DeliveryRange(NamedTuple):
    """Messages [start, end) of `token`, delivered for the `deliveries`-th time."""

    start: int
    end: int
    deliveries: int
    lane: int
    token: Any


class Selection(msgspec.Struct):
    """The result of a selection.

    `next` and `cursors` are the new positions of the lanes that moved. `expired` counts messages left out as expired.
    `keys` are the (offset, key) of delivered and held messages if the group is ordered by key.
    """

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
        """The least timestamp of the grant, so that nothing can be appended behind a cursor."""
        return max([due_ms for due_ms, _ in self.cursors.values()], default=0)

    def lane_positions(self) -> tuple[LanePosition, ...]:
        """Return the cursors that moved, as in a Grant."""
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
    lifts_rates: bool = False,
) -> Selection:
    """Select at most `max_messages`; with 0, only move cursors over what they may pass. Stop once `max_bytes` are
    selected.

    Leases end by `now_ms`, messages expire by `wall_ms`. `due_by_ms` is at most `wall_ms`, and all messages due by then
    are readable: a cursor that passes a time passes everything due at it. `committed` is the high watermark: a message
    whose end is not committed keeps the others of its key back. In a group ordered by key nothing is delivered before
    `read_keys` has read all. `lifts_rates`: the rates of keys do not count.
    """
    kind = _KeyOrderSelector if by_key else _Selector
    selector = kind(delivery, source, now_ms, wall_ms, due_by_ms, max_messages, max_deliveries, cancelled, max_bytes)
    if delivery.keys is not None:
        delivery.keys.lift_rates(lifts_rates, now_ms)
    if not by_key or max_messages == 0 or _knows_turns(delivery, committed):
        selector.run()
    return selector.selection


def update_keys(delivery: GroupDelivery, selection: Selection, now_ms: int) -> None:
    """Update the key queues after the Grant of a selection was applied; `now_ms` is that of the selection."""
    if delivery.keys is not None:
        for offset, key in selection.keys:
            delivery.keys.add(offset, key)
        for start, end, _, _, _ in selection.delivered:
            for offset in range(start, end):
                delivery.keys.mark_delivered(offset)
                delivery.keys.took(offset, now_ms)


def read_keys(
    delivery: GroupDelivery, source: MessageSource, now_ms: int, at_most: int = KEYS_PER_STEP, limits: KeyLimits = ONE
) -> bool:
    """Read the keys of some unfinished messages of a group ordered by key; return whether all are read now. Changes
    between two calls reach the queues on their own. `limits` are those of a key."""
    if delivery.keys is None:
        delivery.keys = KeyQueues([(0, NEVER_MS)], delivery.finished_at, limits.width)
    queues = delivery.keys
    queues.set_limits(limits, now_ms)
    while not queues.is_whole and at_most > 0:
        first, end = queues.unread
        upto, last = end, first
        for start, part_end, span in delivery.parts_within(first, end):
            if at_most <= 0:
                upto = start
                break
            at_most -= FAR_AS_MESSAGES if start - last > FAR_APART else 0
            last, worth = _read(queues, source, span, start, part_end, now_ms, max(1, at_most))
            at_most -= worth
            if last < part_end:
                upto = last
                break
        queues.read_to(upto)
    return queues.is_whole


def _read(
    queues: KeyQueues, source: MessageSource, span: SpanFold, start: int, end: int, now_ms: int, at_most: int
) -> tuple[int, int]:
    """Add the messages of a span in [start, end) to the queues. Return the end of what was read, and its weight in
    messages: at least one, and at most `at_most` except for the last one's size."""
    end = min(end, start + at_most)
    worth = 0
    for run in source.returned(start, end):
        worth += run.end - run.start + run.size // BYTES_AS_A_MESSAGE
        for offset in range(run.start, run.end) if run.key else ():
            queues.add(offset, run.key)
            if span.leased and span.available_at_ms > now_ms:
                queues.mark_delivered(offset)
            elif span.available_at_ms >= HELD_MS and queues.is_among_first(offset):
                queues.free(offset)
        if worth >= at_most:
            return run.end, worth
    return end, max(1, worth)


def has_turn(delivery: GroupDelivery, now_ms: int, committed: int, limits: KeyLimits = ONE) -> bool:
    """Return whether a returned or held message of a group ordered by key may be delivered, or its keys are still to be
    read by the next receive."""
    queues = delivery.keys
    if queues is not None:
        queues.set_limits(limits, now_ms)
    if queues is None or not queues.is_whole:
        return delivery.held > 0 or delivery.has_returned(now_ms)
    if not _knows_turns(delivery, committed):
        return False
    return next(_spans_in_turn(delivery, queues, now_ms), None) is not None or delivery.has_unnoted(now_ms)


def _knows_turns(delivery: GroupDelivery, committed: int) -> bool:
    if delivery.keys is None:
        return False
    delivery.keys.settle(committed)
    return delivery.keys.knows_turns


def _spans_in_turn(delivery: GroupDelivery, queues: KeyQueues, now_ms: int) -> Iterator[SpanFold]:
    """Yield the returned or held messages that are in turn, one by one and by offset."""
    available = (
        msgspec.structs.replace(span, start=offset, end=offset + 1)
        for span in delivery.available(now_ms)
        for offset in range(span.start, span.end)
        if queues.has_token(queues.key_of(offset), now_ms)
    )
    last = -1
    for span in merge(available, _freed(delivery, queues, now_ms), key=start_of):
        if span.start > last and _is_in_turn(delivery, queues, span.start, now_ms):
            yield span
        last = span.start


def _freed(delivery: GroupDelivery, queues: KeyQueues, now_ms: int) -> Iterator[SpanFold]:
    for offset in tuple(queues.freed):
        span = delivery.at(offset)
        if span is not None and delivery.is_free(span, now_ms) and queues.has_token(queues.key_of(offset), now_ms):
            yield msgspec.structs.replace(span, start=offset, end=offset + 1)
        else:  # it comes into turn when its lease or back-off is over, or its key has a token
            queues.forget_freed(offset)


def _is_in_turn(delivery: GroupDelivery, queues: KeyQueues, offset: int, now_ms: int) -> bool:
    key = queues.key_of(offset)
    if key == 0:
        return True
    return queues.is_among_first(offset) and _running(delivery, queues, key, offset, now_ms) < queues.width


def _running(delivery: GroupDelivery, queues: KeyQueues, key: int, offset: int, now_ms: int) -> int:
    """Return how many other messages of the key have a lease that runs, if their number is limited."""
    if queues.width >= OUTSTANDING_MAX:
        return 0
    spans = [delivery.at(other) for other in queues.delivered(key) if other != offset]
    return sum([span is not None and span.leased and span.available_at_ms > now_ms for span in spans])


class _Selector(msgspec.Struct, dict=True):
    """One selection in progress. `left` is how many more messages may be delivered, `room` how many fresh ones, and
    `bytes_left` their size."""

    delivery: GroupDelivery
    source: MessageSource
    now_ms: int
    wall_ms: int
    due_by_ms: int
    left: int
    max_deliveries: int
    cancelled: Container[int]
    bytes_left: int

    def __post_init__(self) -> None:
        self.looks_only = self.left == 0
        self.spans_left = SPANS_PER_SELECTION
        self.room = OUTSTANDING_MAX - self.delivery.outstanding
        self.selection = Selection([], self.delivery.next, {}, [], [], [])

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

    # --- returned messages -------------------------------------------------------------------------------------------

    def _take_returned(self, spans: Iterable[SpanFold]) -> None:
        for span in spans:
            if self.spans_left <= 0 and self.selection.delivered:
                self.left = 0
            if self.left <= 0:
                return
            self.spans_left -= 1
            if span.deliveries >= self.max_deliveries:
                continue  # it is given up instead
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
        """Return whether the message may have killed its earlier consumers."""
        expiries = span.expiries + span.leased
        return expiries >= EXPIRIES_BEFORE_ALONE or (expiries > 0 and span.deliveries + 1 >= self.max_deliveries)

    def _deliver_again(self, span: SpanFold, start: int, end: int) -> None:
        at = start
        for run in self.source.returned(start, end):
            if self.left <= 0:  # nothing is known of what the answer has no room for
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

    # --- fresh messages ----------------------------------------------------------------------------------------------

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
        """Yield the run in parts, (start, end, whether to pass over it)."""
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
        """Deliver the messages that fit; return whether more would."""
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
    """A selection with limits for each key. Runs of messages with keys hold one message each."""

    def run(self) -> None:
        lanes = self.source.lanes()
        # Not read if nothing is delivered.
        self.queues = KeyQueues() if self.delivery.keys is None else self.delivery.keys
        # How many messages of a key this selection delivers: returned or held ones, and fresh ones.
        self.again: dict[int, int] = {}
        self.chosen: dict[int, int] = {}
        self.held = 0
        if not self.looks_only:
            self._take_turns()
        delayed = sorted((lane for lane in lanes if lane >= DELAYED), reverse=True)
        for lane in (*delayed, 0):
            if self.left > 0 or self.looks_only:
                self._take_fresh(lane)
        if self.selection.next > self.delivery.next:
            # Messages with a priority are read in lane 0 here, so their lanes move with it.
            for lane in lanes:
                if lane < DELAYED:
                    self._move_cursor(lane, 0, self.selection.next)

    def _take_turns(self) -> None:
        for span in _spans_in_turn(self.delivery, self.queues, self.now_ms):
            if self.left <= 0:
                return
            key = self.queues.key_of(span.start)
            again = self.again.get(key, 0)
            if key and again:
                running = _running(self.delivery, self.queues, key, span.start, self.now_ms)
                if again + running >= self.queues.width or again >= self.queues.rates.tokens(key, self.now_ms):
                    continue
            before = len(self.selection.delivered)
            self._take_returned([span])
            if len(self.selection.delivered) > before:
                self.again[key] = again + 1

    def _take(self, run: Run, start: int, end: int, lane: int) -> bool:
        if run.key == 0:
            return super()._take(run, start, end, lane)
        if self.looks_only or self.room <= 0:
            return False
        chosen = self.chosen.get(run.key, 0)
        if chosen + self.queues.unfinished(run.key) >= self.queues.width or not self._has_token(run.key, chosen):
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
        self.chosen[run.key] = chosen + 1
        self.selection.keys.append((start, run.key))
        return super()._take(run, start, end, lane)

    def _has_token(self, key: int, chosen: int) -> bool:
        """Return whether the rate allows one more message of the key. Those that are held come before it."""
        chosen += self.again.get(key, 0)
        return (
            self.queues.rates.tokens(key, self.now_ms) > chosen if chosen else self.queues.has_token(key, self.now_ms)
        )
