"""A queue group on a partition that this broker leads: receive, ack, nack, extend, and who sleeps here.

Everything here runs on the hub's thread. A grant is applied before its record is on its way to the disk and before any
payload is read, with no switch of greenlets in between, so no message is handed to two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

import gevent

from portalmq.broker.clock import Clock
from portalmq.broker.core.delivery import GroupDelivery, Plan
from portalmq.broker.core.fold import SpanFold
from portalmq.broker.core.receipts import ReceiptBook
from portalmq.broker.core.records import Ack, Extend, Grant, GroupStart, Nack, Range, Spot, ranges_of
from portalmq.broker.partition import Partition
from portalmq.broker.reader import Piece
from portalmq.broker.waiting import Delivered, Peer, ReceiveOptions, Waiter
from portalmq.broker.writer import Pending
from portalmq.wire import GroupConfig

__all__ = ["Delivered", "GroupPartition", "Peer", "Shown"]

HANDED_RANGES_MAX = 1_000


class Shown(NamedTuple):
    """Receipts of one lease: its delivery number and leader epoch, their places in the request, their offsets."""

    delivery: int
    leader_epoch: int
    indexes: list[int]
    offsets: list[int]


# Neighbouring pieces with their delivery number, the same in all of a run: they share a range and a receipt's head.
Run = list[tuple[Piece, int]]

# Whether the receipt at an index of the request counts.
Verdicts = dict[int, bool]


class _Handed:
    """The offsets that were handed out here, in the epoch that goes on. Invariant: sorted, disjoint, not adjacent."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        at = bisect_right(self._starts, start)
        if at and self._ends[at - 1] >= start:
            at -= 1
            start = self._starts[at]
        last = at
        while last < len(self._starts) and self._starts[last] <= end:
            end = max(end, self._ends[last])
            last += 1
        self._starts[at:last] = [start]
        self._ends[at:last] = [end]

    def __contains__(self, offset: int) -> bool:
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset < self._ends[at]

    def __len__(self) -> int:
        return len(self._starts)

    def forget_below(self, offset: int) -> None:
        gone = bisect_right(self._ends, offset)
        del self._starts[:gone], self._ends[:gone]


class GroupPartition:
    """One group on one partition, as long as that is led here: its fold, and who sleeps here."""

    is_remote = False

    def __init__(
        self, partition: Partition, group: str, book: ReceiptBook, clock: Clock, *, group_id: str = ""
    ) -> None:
        self.partition = partition
        self.group = group
        self.group_id = group_id
        self._book = book
        self._clock = clock
        self._sleepers: dict[Waiter, None] = {}
        self._timer: gevent.Greenlet | None = None
        self._timer_at_ms = 0
        self._detached = False
        self._handed = _Handed()
        # How many messages were handed out just now, and how many of them not for the first time.
        self.on_delivered: Callable[[int, int], None] = lambda messages, again: None
        partition.on_readable.append(self.notify)

    @property
    def delivery(self) -> GroupDelivery:
        return self.partition.delivery[self.group]

    def detach(self) -> None:
        """The group was deleted, or the partition, or it is led elsewhere: who sleeps here is to look anew."""
        self._detached = True
        self.partition.on_readable.remove(self.notify)
        self._disarm()
        for waiter in tuple(self._sleepers):
            waiter.move()

    def end_waits(self) -> None:
        for waiter in tuple(self._sleepers):
            waiter.cancel()

    # --- sleeping and waking -----------------------------------------------------------------------------------------

    def park(self, waiter: Waiter) -> None:
        if self._detached:  # on the way here: nobody would wake it
            waiter.move()
            return
        self._sleepers[waiter] = None
        self._arm()

    def leave(self, waiter: Waiter) -> None:
        self._sleepers.pop(waiter, None)
        if not self._sleepers:
            self._disarm()

    def notify(self) -> None:
        """Something may be there to take: wake one sleeper that is not awake already."""
        if not self._sleepers or not self.has_messages():
            self._arm()
            return
        first = next(iter(self._sleepers))
        if not first.woken:
            first.wake()

    def has_messages(self) -> bool:
        delivery = self.partition.delivery.get(self.group)
        if delivery is None or self._detached:
            return False
        return delivery.may_take_fresh(self.partition.readable_end) or delivery.has_returned(self._clock.now_ms())

    def _arm(self) -> None:
        """While someone sleeps, ring when the next lease or back-off ends."""
        if not self._sleepers or self.group not in self.partition.delivery:
            return
        at_ms = self.delivery.next_wakeup_ms()
        if at_ms is None or (self._timer is not None and self._timer_at_ms <= at_ms):
            return
        self._disarm()
        self._timer_at_ms = at_ms
        self._timer = gevent.spawn_later(max(0, at_ms - self._clock.now_ms()) / 1000, self._ring)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.kill(block=False)
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self.notify()

    # --- receive -----------------------------------------------------------------------------------------------------

    def start_at(self, start: str) -> Pending:
        """Begin on this partition: the place is fixed by the group's first use. What to wait on until it is durable."""
        earliest = self.partition.log.log_start_offset
        offset = earliest if start == "earliest" else self.partition.high_watermark
        record = GroupStart(offset, self._clock.now_ms())
        return self.partition.append_group_record(self.group, record)

    def take(self, options: ReceiveOptions) -> list[Delivered]:
        """Lease what is there, at most `max_messages`."""
        now_ms = self._clock.now_ms()
        pieces, next_offset = self._chosen(self.delivery.plan(now_ms, options.max_messages))
        if not pieces:
            return []
        runs = _runs(pieces)
        deadline_ms = now_ms + options.visibility_timeout_ms
        ranges = tuple([(run[0][0].start, run[-1][0].end, run[0][1]) for run in runs])
        grant = Grant(ranges, next_offset, now_ms, deadline_ms, options.consumer, options.attempt_id)
        self.partition.append_group_record(self.group, grant, is_soft=True)
        for start, end, _ in ranges:
            self._handed.add(start, end)
        if len(self._handed) > HANDED_RANGES_MAX:
            self._handed.forget_below(self.delivery.floor())
        self._arm()
        again = sum([end - start for start, end, deliveries in ranges if deliveries > 1])
        self.on_delivered(sum([end - start for start, end, _ in ranges]), again)
        return self._delivered(runs, deadline_ms)

    def _chosen(self, plan: Plan) -> tuple[list[tuple[Piece, int]], int]:
        pieces = [
            (piece, span.deliveries + 1)
            for span in plan.returned
            for piece in self.partition.pieces(span.start, span.end, span.end - span.start)
        ]
        next_offset = plan.fresh_from
        if plan.fresh_max and plan.fresh_from < self.partition.readable_end:
            for piece in self.partition.pieces(plan.fresh_from, self.partition.readable_end, plan.fresh_max):
                pieces.append((piece, 1))
                next_offset = piece.end
        return pieces, next_offset

    def replay(self, attempt_id: str) -> list[Delivered] | None:
        """What the first receive with this attempt id got and still holds; None for an unknown one."""
        delivery = self.partition.delivery.get(self.group)
        spans = delivery.replay(attempt_id, self._clock.now_ms()) if delivery is not None else None
        if spans is None:
            return None
        return [message for span in spans for message in self._under_lease(span)]

    def _under_lease(self, span: SpanFold) -> list[Delivered]:
        pieces = self.partition.pieces(span.start, span.end, span.end - span.start)
        return self._delivered(_runs([(piece, span.deliveries) for piece in pieces]), span.available_at_ms)

    def _delivered(self, runs: list[Run], deadline_ms: int) -> list[Delivered]:
        topic, number = self.partition.topic, self.partition.number
        leader_epoch = self.partition.replica.leader_epoch
        delivered: list[Delivered] = []
        for run in runs:
            first, deliveries = run[0][0].start, run[0][1]
            receipt = self._book.writer(number, first, run[-1][0].end - first, deliveries, leader_epoch)
            delivered += [
                Delivered(topic, number, offset, timestamp_ms, record, receipt(offset), deliveries, deadline_ms)
                for piece, _ in run
                for timestamp_ms in (piece.batch.appended_at_ms,)
                for offset, record in enumerate(piece.records(), piece.start)
            ]
        return delivered

    # --- settle ------------------------------------------------------------------------------------------------------

    def _weighed(self, shown: list[Shown]) -> list[Shown]:
        """The receipts, those of an earlier epoch apart whose message was handed out anew in this one.

        After a fail-over the numbers of deliveries may begin again, as grants are not waited for. So for a message that
        was handed out since, an older receipt counts like one of no delivery: as long as nobody else has it.
        """
        leader_epoch = self.partition.replica.leader_epoch
        if all(each.leader_epoch >= leader_epoch for each in shown):
            return shown
        weighed: list[Shown] = []
        for each in shown:
            anew = Shown(0, each.leader_epoch, [], [])
            as_it_was = Shown(each.delivery, each.leader_epoch, [], [])
            for index, offset in zip(each.indexes, each.offsets, strict=True):
                part = anew if each.leader_epoch < leader_epoch and offset in self._handed else as_it_was
                part.indexes.append(index)
                part.offsets.append(offset)
            weighed += [part for part in (as_it_was, anew) if part.offsets]
        return weighed

    def ack(self, shown: list[Shown]) -> tuple[Verdicts, Callable[[], None]]:
        """Which receipts count, and what to call to wait until their record is committed."""
        verdicts, unfinished = self.weigh(shown)
        ranges, ahead = self.finished(unfinished)
        if not ranges and not ahead:
            return verdicts, self._wait_for_appended()
        pending = self.partition.append_group_record(self.group, Ack(ranges, self._clock.now_ms(), ahead))
        return verdicts, pending.wait

    def weigh(self, shown: list[Shown]) -> tuple[Verdicts, list[int]]:
        """Which receipts count, and the offsets of those whose message may still be unfinished."""
        now_ms = self._clock.now_ms()
        verdicts: Verdicts = {}
        unfinished: list[int] = []
        for each in self._weighed(shown):
            good, more = self.delivery.ackable(each.offsets, each.delivery, now_ms)
            verdicts.update(zip(each.indexes, good, strict=True))
            unfinished += more
        return verdicts, unfinished

    def finished(self, offsets: list[int]) -> tuple[tuple[Range, ...], tuple[Spot, ...]]:
        """The offsets that are in spans, and those that this log never saw granted: a kill took the record."""
        held = [offset for offset in offsets if self.delivery.has_span(offset)]
        if len(held) == len(offsets):
            return ranges_of(held), ()
        unseen = sorted(set(offsets).difference(held))
        spots = [spot for offset in unseen for spot in self.partition.spots(offset, offset + 1)]
        return ranges_of(held), tuple(spot for spot in spots if not self.delivery.has_passed(spot))

    def _wait_for_appended(self) -> Callable[[], None]:
        """What is done already may be so by a record that is still on its way to the disk."""
        last = self.partition.replica.next_offset - 1
        return lambda: self.partition.wait_committed(last)

    def nack(
        self, shown: list[Shown], delay_ms: int | None, reason: str | None, config: GroupConfig
    ) -> tuple[Verdicts, Callable[[], None]]:
        now_ms = self._clock.now_ms()
        verdicts, held = self._held(shown)
        ranges = [
            (start, end, now_ms + (delay_ms if delay_ms is not None else _backoff_ms(config, delivery)))
            for delivery, offsets in held
            for start, end in ranges_of(offsets)
        ]
        if not ranges:
            return verdicts, _no_wait
        pending = self.partition.append_group_record(self.group, Nack(tuple(ranges), now_ms, reason))
        self.notify()
        return verdicts, pending.wait

    def extend(self, shown: list[Shown], visibility_timeout_ms: int) -> Verdicts:
        """Leases are soft, so is their extension: it is logged, and not waited for."""
        now_ms = self._clock.now_ms()
        verdicts, held = self._held(shown)
        offsets = [offset for _, offsets in held for offset in offsets]
        if offsets:
            record = Extend(ranges_of(offsets), now_ms + visibility_timeout_ms, now_ms)
            self.partition.append_group_record(self.group, record, is_soft=True)
            self._arm()
        return verdicts

    def _held(self, shown: list[Shown]) -> tuple[Verdicts, list[tuple[int, list[int]]]]:
        """Which receipts are of the latest lease of their message, and those offsets, by delivery number."""
        verdicts: Verdicts = {}
        held: list[tuple[int, list[int]]] = []
        for each in self._weighed(shown):
            good = [self.delivery.holds(offset, each.delivery) for offset in each.offsets]
            verdicts.update(zip(each.indexes, good, strict=True))
            held.append((each.delivery, [offset for offset, holds in zip(each.offsets, good, strict=True) if holds]))
        return verdicts, held

    # --- counting ----------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """ready, in_flight, scheduled (in a back-off), lag: messages; oldest_unacked_ms: the age of the oldest."""
        now_ms = self._clock.now_ms()
        log, delivery = self.partition.log, self.partition.delivery.get(self.group)
        high_watermark = self.partition.high_watermark
        if delivery is None:
            return {"ready": 0, "in_flight": 0, "scheduled": 0, "lag": 0, "oldest_unacked_ms": 0}
        fresh = max(0, log.messages_before(high_watermark) - log.messages_before(min(delivery.next, high_watermark)))
        counted = {"ready": fresh, "in_flight": 0, "scheduled": 0}
        for span in delivery.spans():
            waiting = span.available_at_ms > now_ms
            counted["ready" if not waiting else "in_flight" if span.leased else "scheduled"] += span.end - span.start
        lag = sum(counted.values())
        return {**counted, "lag": lag, "oldest_unacked_ms": self._oldest_age_ms() if lag else 0}

    def _oldest_age_ms(self) -> int:
        for piece in self.partition.pieces(self.delivery.floor(), self.partition.high_watermark, 1):
            return max(0, self._clock.wall_ms() - piece.batch.appended_at_ms)
        return 0


def _runs(pieces: list[tuple[Piece, int]]) -> list[Run]:
    runs: list[Run] = []
    end, last = -1, 0
    for piece, deliveries in pieces:
        if piece.start == end and deliveries == last:
            runs[-1].append((piece, deliveries))
        else:
            runs.append([(piece, deliveries)])
        end, last = piece.end, deliveries
    return runs


def _no_wait() -> None:
    """Nothing was written, so there is nothing to wait for."""


def _backoff_ms(config: GroupConfig, delivery: int) -> int:
    return config.retry_backoff_ms[min(delivery, len(config.retry_backoff_ms)) - 1]
