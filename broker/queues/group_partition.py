"""A queue group on a partition that this broker leads: ack, nack, reject, release and extend, beside receive.

A verdict is final only when the records that it depends on are committed, so each call returns its verdicts together
with a function that waits for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import NamedTuple

from portalmq.broker.cluster.rpc.queues import LeaseOffsets
from portalmq.broker.core.queue.delivery import OUTSTANDING_MAX
from portalmq.broker.core.queue.records import Ack, Extend, LanePosition, Nack, Range, ranges_of
from portalmq.broker.partition.refusals import leadership_changing
from portalmq.broker.partition.writer import Pending
from portalmq.broker.queues.delivery_batch import backoff_ms, parts_of
from portalmq.broker.queues.group_receiver import GroupReceiver
from portalmq.broker.queues.partition_counts import counted
from portalmq.errors import Backpressure, PortalMQError
from portalmq.wire import GroupConfig

# Messages that were acked ahead of the cursor are kept one by one. The cursor moves on after this many more.
AHEAD_STEP = 1_000


class ReceiptSpan(NamedTuple):
    """Receipts of one lease: its delivery number and leader epoch, their indexes in the request, their offsets. The
    offsets of neighbours, in order, are a range."""

    delivery: int
    leader_epoch: int
    indexes: Sequence[int]
    offsets: Sequence[int]

    def of_lease(self) -> LeaseOffsets:
        """Return the receipts as in calls between brokers."""
        return self.delivery, self.leader_epoch, list(self.offsets)


class GroupPartition(GroupReceiver):
    """One group on one partition, while it is led here: receive and settle."""

    _ahead_max = AHEAD_STEP

    # --- ack ---------------------------------------------------------------------------------------------------------

    def ack(self, shown: list[ReceiptSpan], *, is_soft: bool = False) -> tuple[list[int], Callable[[], None]]:
        """Ack; return the indexes of refused receipts, and a function that waits until all verdicts are committed: both
        the acks, and the records for which receipts were refused. A soft ack may reach the disk a little later."""
        refused, unfinished = self.check_receipts(shown)
        done = self._finish(unfinished, is_soft=is_soft)
        if not refused:
            return refused, done
        wait_for_cause = self._wait_for_appended()

        def wait_for_both() -> None:
            done()
            wait_for_cause()

        return refused, wait_for_both

    def wait_refused(self) -> None:
        """Wait until the records for which receipts were refused are committed, so that the refusal is final."""
        self._wait_for_appended()()

    def finish(self, offsets: Sequence[int], holder: str | None) -> tuple[list[bool], Callable[[], None]]:
        """Ack by offset, without receipts; return True for each offset that is or was an unfinished message of the
        group, and a function that waits for the commit, and until it is certain that no other leader knows better. With
        `holder` only messages count that are leased by an attempt whose id is `<holder>:<anything>`."""
        now_ms = self._clock.now_ms()
        verdicts = [self._may_finish(offset, holder, now_ms) for offset in offsets]
        done = [offset for offset, good in zip(offsets, verdicts, strict=True) if good]
        self._check_ahead(done)
        wait = self._finish(done)

        def wait_for_both() -> None:
            wait()
            if False in verdicts:
                self.partition.wait_led()

        return verdicts, wait_for_both

    def _check_ahead(self, offsets: list[int]) -> None:
        """Raise Backpressure when too many messages would be acked ahead of one that is never received."""
        if len(offsets) + self.delivery.ahead_count <= OUTSTANDING_MAX:
            return
        self._pass_done()
        _, ahead = self.finished(offsets)
        more = sum([not self.delivery.is_ahead(offset) for _, _, offset in ahead])
        if more and more + self.delivery.ahead_count > OUTSTANDING_MAX:
            raise Backpressure(
                f"{self.delivery.ahead_count} messages were acked ahead of others that were not received: receive those"
                " first",
                retry_after_s=1,
            )

    def _may_finish(self, offset: int, holder: str | None, now_ms: int) -> bool:
        if self.delivery.is_dead(offset) or not 0 <= offset < self.partition.high_watermark:
            return False
        if holder is not None and not self.delivery.is_delivered_to(offset, holder, now_ms):
            return False
        return self.delivery.has_span(offset) or any(self.partition.lane_positions(offset, offset + 1))

    def _finish(self, offsets: Sequence[int], *, is_soft: bool = False) -> Callable[[], None]:
        """Append an ack of those messages that are not done; return a function that waits for it."""
        ranges, ahead = self.finished(offsets)
        if not ranges and not ahead:
            return self._wait_for_appended()
        messages = sum([end - start for start, end in ranges])
        messages += sum([not self.delivery.is_ahead(offset) for _, _, offset in ahead])
        ack = Ack(ranges, self._clock.now_ms(), ahead)
        pending = self.partition.append_group_record(self.group, ack, is_soft=is_soft)
        if messages:
            count = partial(self._metrics.acked, self.partition.topic, self.group, messages)
            pending.done.rawlink(lambda _: count() if pending.error is None else None)
        self.leases_ended()
        if ahead:
            self._pass_ahead()
        return self._then_others(pending)

    def _pass_ahead(self) -> None:
        """Move the cursor on after many acks by offset: such a group may never receive."""
        if self.delivery.ahead_count < self._ahead_max:
            return
        self._pass_done()
        self._ahead_max = self.delivery.ahead_count + AHEAD_STEP

    def _pass_done(self) -> None:
        with suppress(PortalMQError):  # the acks hold in any case; the next ones try again
            self._pass_over(self._select(self._clock.now_ms(), 0))

    def _then_others(self, pending: Pending) -> Callable[[], None]:
        """Return a function that waits for the record, then notifies: other messages of the keys may be ready."""
        if self.delivery.keys is None:
            return pending.wait

        def wait() -> None:
            pending.wait()
            self.notify()

        return wait

    def check_receipts(self, shown: list[ReceiptSpan]) -> tuple[list[int], Sequence[int]]:
        """Return the indexes of refused receipts, and the offsets of the others whose message may be unfinished."""
        self._check_epochs(shown)
        refused: list[int] = []
        unfinished: list[Sequence[int]] = []
        for each in shown:
            good, more = self.delivery.ackable(each.offsets, each.delivery, each.leader_epoch)
            refused += _refused(each, good)
            unfinished.append(more)
        return refused, unfinished[0] if len(unfinished) == 1 else list(chain.from_iterable(unfinished))

    def _check_epochs(self, shown: list[ReceiptSpan]) -> None:
        """Raise Unavailable for receipts of a later leader. There is one: what this log lacks tells nothing."""
        if any(each.leader_epoch > self.partition.replica.leader_epoch for each in shown):
            raise leadership_changing()

    def finished(self, offsets: Sequence[int]) -> tuple[tuple[Range, ...], tuple[LanePosition, ...]]:
        """Return the offsets that are in spans, and those without a grant in this log: a kill lost the record."""
        held = self.delivery.with_span(offsets)
        if len(held) == len(offsets):
            return ranges_of(held), ()
        unseen = sorted(set(offsets).difference(held))
        spots = [spot for offset in unseen for spot in self.partition.lane_positions(offset, offset + 1)]
        return ranges_of(held), tuple(spot for spot in spots if not self.delivery.has_passed(spot))

    def _wait_for_appended(self) -> Callable[[], None]:
        """Return a function that waits for all appended records: one of them may be the ack of a finished message."""
        settled = self.partition.settled(self.partition.replica.next_offset - 1)

        def wait() -> None:
            if not settled.done.is_set():
                self.partition.hurry()
            settled.wait()

        return wait

    # --- nack, release, extend ---------------------------------------------------------------------------------------

    def nack(
        self, shown: list[ReceiptSpan], delay_ms: int | None, reason: str | None, config: GroupConfig
    ) -> tuple[list[int], Callable[[], None]]:
        now_ms = self._clock.now_ms()
        refused, held = self._held(shown)
        back: list[tuple[int, int, int]] = []
        dead: list[tuple[int, int, int]] = []
        for delivery, offsets in self._by_deliveries(held):
            free_at_ms = now_ms + (delay_ms if delay_ms is not None else backoff_ms(config, delivery))
            for start, end in ranges_of(offsets):
                if delivery >= config.max_deliveries:
                    dead.append((start, end, delivery))
                else:
                    back.append((start, end, free_at_ms))
        waits = self._give_up_parts(dead, now_ms, reason or "nacked")
        if back:
            pending = self.partition.append_group_record(self.group, Nack(tuple(back), now_ms, reason))
            waits.append(pending.wait)
            self.notify()
        return refused, self._after_all(waits, refused)

    def reject(self, shown: list[ReceiptSpan], reason: str | None) -> tuple[list[int], Callable[[], None]]:
        """Make dead letters of leased messages, however many deliveries they have left."""
        refused, held = self._held(shown)
        dead = [(*each, delivery) for delivery, offsets in self._by_deliveries(held) for each in ranges_of(offsets)]
        waits = self._give_up_parts(dead, self._clock.now_ms(), reason or "rejected")
        return refused, self._after_all(waits, refused)

    def _give_up_parts(self, dead: list[tuple[int, int, int]], now_ms: int, reason: str) -> list[Callable[[], None]]:
        if not dead:
            return []
        return [self._then_others(self._give_up(part, now_ms, reason)) for part in parts_of(dead)]

    def _after_all(self, waits: list[Callable[[], None]], refused: list[int]) -> Callable[[], None]:
        """Return a function that waits for all records, also those for which receipts were refused."""
        if refused:
            waits.append(self._wait_for_appended())

        def wait_for_all() -> None:
            for wait in waits:
                wait()

        return wait_for_all

    def release(
        self, shown: list[ReceiptSpan], delay_ms: int, reason: str | None
    ) -> tuple[list[int], Callable[[], None]]:
        """Release messages that no consumer has seen: this was no delivery."""
        now_ms = self._clock.now_ms()
        refused, held = self._held(shown)
        ranges = ranges_of([offset for _, offsets in held for offset in offsets])
        if not ranges:
            return refused, self._wait_for_appended()
        back = tuple([(start, end, now_ms + delay_ms) for start, end in ranges])
        pending = self.partition.append_group_record(self.group, Nack(back, now_ms, reason, unseen=True))
        self.notify()
        return refused, pending.wait

    def _by_deliveries(self, held: list[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
        """Group leased offsets by the number of deliveries since their last redrive."""
        found: dict[int, list[int]] = {}
        for _, offsets in held:
            for offset in offsets:
                span = self.delivery.at(offset)
                assert span is not None
                found.setdefault(span.deliveries, []).append(offset)
        return list(found.items())

    def extend(self, shown: list[ReceiptSpan], visibility_timeout_ms: int) -> list[int]:
        """Extend leases. The record is logged without a wait, since leases are soft."""
        now_ms = self._clock.now_ms()
        may_extend = partial(self.delivery.may_extend, now_ms=now_ms, by_key=self.settings().is_keyed)
        refused, held = self._held(shown, may_extend)
        offsets = [offset for _, offsets in held for offset in offsets]
        if offsets:
            record = Extend(ranges_of(offsets), now_ms + visibility_timeout_ms, now_ms)
            self.partition.append_group_record(self.group, record, is_soft=True)
            self._wakeup.arm()
        if refused:
            self.wait_refused()
        return refused

    def _held(
        self, shown: list[ReceiptSpan], counts: Callable[..., bool] | None = None
    ) -> tuple[list[int], list[tuple[int, list[int]]]]:
        """Return the indexes of refused receipts (those not of the latest lease of their message), and the offsets of
        the others by delivery number."""
        self._check_epochs(shown)
        counts = counts or self.delivery.holds
        refused: list[int] = []
        held: list[tuple[int, list[int]]] = []
        for each in shown:
            good = [counts(offset, each.delivery, leader_epoch=each.leader_epoch) for offset in each.offsets]
            refused += _refused(each, good)
            held.append((each.delivery, [offset for offset, holds in zip(each.offsets, good, strict=True) if holds]))
        return refused, held

    # --- counts ------------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Return ready, in_flight, scheduled, dead, lag in messages, and oldest_unacked_ms, the age of the oldest."""
        return counted(self.partition, self.group, self._clock)


def _refused(shown: ReceiptSpan, good: list[bool]) -> list[int]:
    return [index for index, holds in zip(shown.indexes, good, strict=True) if not holds] if False in good else []
