"""A queue group on a partition that this broker leads: receive, and give up exhausted messages.

Everything here runs on the event loop's thread. A grant is applied before its record goes to the disk and before any
payload is read, without a switch of greenlets in between, so no message is delivered to two consumers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from time import monotonic

import gevent

from portalmq import wire
from portalmq.broker.core.fold import SpanFold
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.key_rates import UNLIMITED
from portalmq.broker.core.queue.limits import Allowance, key_limits_of, limits_of
from portalmq.broker.core.queue.receipts import ReceiptSigner, receipt_texts
from portalmq.broker.core.queue.records import (
    Ack,
    Dead,
    Grant,
    GroupStart,
)
from portalmq.broker.core.queue.selection import NEVER_MS, DeliveryRange, Selection, read_keys, select, update_keys
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.partition.answer_size import fitting, sizes_of
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.long_poll import LeasedMessage, ReceiveOptions
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.reader import BatchSlice
from portalmq.broker.partition.writer import Pending
from portalmq.broker.partition.yielding import give_way
from portalmq.broker.queues.delivery_batch import DEAD_A_RECORD, Run, dead_letter_topic, runs_of
from portalmq.broker.queues.ready_messages import ReadyMessages
from portalmq.broker.queues.wakeup import Wakeup
from portalmq.control_plane.state import GroupState
from portalmq.errors import NotLeader, PortalMQError, Unavailable
from portalmq.wire import GroupConfig

# A cursor that has passed this many offsets of other lanes is written to the log.
PASSED_MAX = 10_000
# The most messages of a receive where some have a priority or a delay: each one is found and read separately.
FOUND_MAX = 500
# A start is committed within milliseconds, unless a disk or a follower is slow.
BEGUN_WITHIN_S = 1.0
EXHAUSTED = "max_deliveries: the last lease ended without an ack"


class GroupReceiver:
    """Receives of one group on one partition, while it is led here: leases, waiting receives, dead letters."""

    is_remote = False
    # The record that lets the group begin, until it is known to be committed; and until when a receive waits for it.
    begun: Pending | None = None
    _begun_by_s = 0.0
    _was_limited = False

    def __init__(
        self,
        partition: Partition,
        group: GroupState,
        signer: ReceiptSigner,
        clock: Clock,
        metrics: Metrics,
        now: Callable[[], GroupState],
        partitions: Callable[[], int] = lambda: 1,
    ) -> None:
        """`now` returns the group with its current settings, `partitions` the number of those of the topic."""
        self.partition = partition
        self.group = group.name
        self.group_id = group.group_id
        self._now = now
        self._signer = signer
        self._clock = clock
        self._metrics = metrics
        self._ready_messages = ReadyMessages(partition)
        self._partitions = partitions
        self._allowance = Allowance()
        self._wakeup = wakeup = Wakeup(
            partition,
            group.name,
            self._ready_messages,
            clock,
            self.settings,
            self._on_timer,
            self.is_paused,
            self._allowed,
            self._token_in_ms,
        )
        self.park, self.leave, self.end_waits = wakeup.park, wakeup.leave, wakeup.end_waits
        self.notify, self.has_messages = wakeup.notify, wakeup.has_messages

    @property
    def delivery(self) -> GroupDelivery:
        return self.partition.delivery[self.group]

    def settings(self) -> GroupConfig:
        return self._now().config

    def is_paused(self) -> bool:
        """Return whether nothing may be delivered: the log or the control plane says so, whichever is later."""
        delivery, change = self.partition.delivery.get(self.group), self._now().pause
        return delivery is not None and delivery.is_paused(change.number, change.paused)

    # --- limits ------------------------------------------------------------------------------------------------------

    def _is_limited(self) -> bool:
        """Return whether the group has limits, after telling the core which hold now."""
        config = self.settings()
        is_limited = config.max_in_flight is not None or config.rate_per_s is not None
        if is_limited or self._was_limited:
            of_group = config.max_in_flight, config.rate_per_s, config.rate_burst
            share = limits_of(*of_group, partitions=self._partitions(), number=self.partition.number)
            self._allowance.set(share, self._clock.now_ms())
        self._was_limited = is_limited
        return is_limited

    def _allowed(self) -> int:
        """Return how many messages may be delivered now."""
        delivery = self._wakeup.delivery
        if delivery is None or not self._is_limited():
            return UNLIMITED
        return self._allowance.messages(delivery, self._clock.now_ms())

    def _token_in_ms(self) -> int | None:
        return self._allowance.token_in_ms(self._clock.now_ms()) if self._is_limited() else None

    def leases_ended(self) -> None:
        """Note that a record has ended leases before their time: with a limit, others may be delivered now."""
        if self._was_limited:
            self.notify()

    # --- waiting receives --------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Detach from the partition: it or the group was deleted, or it is led elsewhere. The waiters look again."""
        delivery = self._wakeup.delivery
        if delivery is not None:  # no receive reads the key order here any more, and finished keys would pile up
            delivery.keys = None
        self._wakeup.close()

    # --- receive -----------------------------------------------------------------------------------------------------

    def start_at(self, start: wire.GroupStart) -> None:
        """Begin on this partition, at an offset that the group's first use fixes. See `begun`."""
        offset, end = self.partition.log.log_start_offset, self.partition.high_watermark
        # The log start moves some time after a purge; the group must not begin with purged messages.
        offset = max(offset, self.partition.groups.purged_upto)
        if isinstance(start, dict):
            offset = min(max(offset, self.partition.log.offset_for_time(start["at"])), end)
        elif start == "latest":
            offset = end
        record = GroupStart(offset, self._clock.now_ms())
        begun = self.begun = self.partition.append_group_record(self.group, record)
        begun.done.rawlink(lambda _: gevent.spawn(self._on_begun, begun))
        self._begun_by_s = monotonic() + BEGUN_WITHIN_S

    def _on_begun(self, begun: Pending) -> None:
        if begun.error is None:
            self.notify()
        else:  # the waiters let it begin again: nothing here would wake them
            self._wakeup.move()

    def take(self, options: ReceiveOptions) -> list[LeasedMessage]:
        """Lease available messages: at most `max_messages` and `max_bytes`, or one larger message. With at_most_once
        they are acked before they are returned."""
        while True:
            config = self.settings()
            if config.is_keyed:
                self._read_keys()
            if self._wakeup.delivery is not None:
                self.partition.read_ahead(self._ready_messages.place(self.delivery.next))
            self._wait_vouched(patient=options.patient)
            if not self._give_up_exhausted() or (self.is_paused() and not options.is_move):
                return []
            allowed = UNLIMITED if options.is_move else self._allowed()  # a move hands out nothing
            if allowed <= 0:
                return []
            now_ms = self._clock.now_ms()
            most = min(options.max_messages, FOUND_MAX) if self._ready_messages.lanes() else options.max_messages
            most = min(most, allowed)
            selection = self._select(now_ms, most, options.max_bytes, lifts_rates=options.is_move)
            pieces = self._pieces(selection)
            if self._may_exceed(pieces, options.max_bytes):
                fit = self._fitting(selection, options.max_bytes)
                if fit < selection.messages:  # a selection of fewer messages begins with the same ones
                    selection = self._select(now_ms, fit, lifts_rates=options.is_move)
                    pieces = self._pieces(selection)
            runs = runs_of(pieces)
            if runs:
                break
            if not self._pass_over(selection):
                return []
            give_way()  # much was passed over, and messages may follow
            if not self._wakeup.has_available() or (self.is_paused() and not options.is_move):
                return []
        at_most_once = config.delivery == "at_most_once" and not options.is_move
        deadline_ms = now_ms + options.visibility_timeout_ms
        leases_above = self.partition.groups.leases_above
        if options.is_move:
            # No consumer sees them: the lease is no delivery. Its number is new all the same.
            runs = [[(piece, deliveries - 1, lane) for piece, deliveries, lane in run] for run in runs]
            held = [(run[0][0].start, run[-1][0].end) for run in runs]
            leases_above = max(1, leases_above, self.delivery.last_lease(held))
        ranges = tuple([(run[0][0].start, run[-1][0].end, run[0][1]) for run in runs])
        lanes = tuple([run[0][2] for run in runs]) if self.delivery.cursors or selection.cursors else ()
        grant = Grant(
            ranges,
            self._ready_messages.place(selection.next),
            now_ms,
            deadline_ms,
            options.consumer,
            options.attempt_id,
            lanes,
            selection.lane_positions(),
            tuple(selection.gone),
            tuple(selection.held),
            leases_above,
        )
        try:
            granted = self._append_grant(grant, selection, now_ms)
        except PortalMQError:
            gevent.spawn_later(1, self.notify)  # as in _wait_vouched
            raise
        messages = sum([end - start for start, end, _ in ranges])
        if not options.is_move:
            self._allowance.took(messages, now_ms)
        self._wakeup.arm()
        again = sum([end - start for start, end, deliveries in ranges if deliveries > 1])
        self._metrics.delivered(self.partition.topic, self.group, messages, again)
        delivered = self._delivered(runs, deadline_ms, granted.batch.leader_epoch)
        if at_most_once:
            done = tuple([(start, end) for start, end, _ in ranges])
            self.partition.append_group_record(self.group, Ack(done, now_ms)).wait()
        return delivered

    def wait_begun(self, within_s: float | None = None) -> None:
        """Wait until the group's start here is committed: were it lost, the group would begin elsewhere, and what had
        been delivered would be unknown. Raises its error; Unavailable after `within_s`, or else as any append."""
        begun = self.begun
        if begun is not None:
            if within_s is not None and not begun.done.is_set() and not begun.done.wait(within_s):
                raise Unavailable(f"the start of group {self.group!r} is not committed yet", retry_after_s=0.2)
            begun.wait()
            if self.begun is begun:  # or the group ended, and begins again
                self.begun = None

    @property
    def is_beginning(self) -> bool:
        """Whether the group's start here is not committed yet: nothing is handed out."""
        return self.begun is not None and not self.begun.done.is_set()

    def wait_begun_soon(self) -> None:
        """Do the same for a receive that may go on without this partition: all wait for one short time. Raises what the
        group's limits refuse."""
        with suppress(NotLeader, Unavailable):  # then `take` refuses
            self.wait_begun(max(0.0, self._begun_by_s - monotonic()))

    def _wait_vouched(self, *, patient: bool = True) -> None:
        """Wait until the followers vouch for this leader. Raises Unavailable when that takes too long, when the start
        of the group is not committed, or when the group ends here during the wait."""
        try:
            self.wait_begun(0)
            self.partition.wait_vouched(patient=patient)
        except PortalMQError:
            gevent.spawn_later(1, self.notify)  # a waiter was woken in vain
            raise
        if self._wakeup.delivery is None:
            raise Unavailable(
                f"group {self.group!r} has just ended here, or moved to another leader", retry_after_s=0.1
            )

    def _read_keys(self) -> None:
        """Complete the key order of the group, with a pause after each step, unless the group ends here."""
        self._ready_messages.by_key = True
        while (delivery := self._wakeup.delivery) is not None:
            limits = key_limits_of(self.settings())
            if read_keys(delivery, self._ready_messages, self._clock.now_ms(), limits=limits):
                return
            give_way()

    def _select(
        self, now_ms: int, max_messages: int, max_bytes: int = NEVER_MS, *, lifts_rates: bool = False
    ) -> Selection:
        config, wall_ms = self.settings(), self._clock.wall_ms()
        self._ready_messages.by_key = config.is_keyed
        return select(
            self.delivery,
            self._ready_messages,
            now_ms=now_ms,
            wall_ms=wall_ms,
            due_by_ms=self.partition.readable_by_ms(wall_ms),
            max_messages=max_messages,
            max_deliveries=config.max_deliveries,
            by_key=self._ready_messages.by_key,
            committed=self.partition.high_watermark,
            cancelled=self.partition.groups.cancelled,
            max_bytes=max_bytes,
            lifts_rates=lifts_rates,
        )

    def _pieces(self, selection: Selection) -> list[tuple[BatchSlice, int, int]]:
        return [(piece, each.deliveries, each.lane) for each in selection.delivered for piece in self._pieces_of(each)]

    def _pieces_of(self, handed: DeliveryRange) -> Iterable[BatchSlice]:
        start, end, _, _, piece = handed
        if piece is None:  # from another lane: only its offset is known so far
            return self.partition.reader.pieces(start, end, end - start)
        return (piece if piece.start == start and piece.end == end else BatchSlice(piece.batch, start, end),)

    def _may_exceed(self, pieces: list[tuple[BatchSlice, int, int]], max_bytes: int) -> bool:
        """Return True when the messages may exceed `max_bytes`. Usually their whole batches do not."""
        size, last = 0, None
        for piece, _, _ in pieces:
            if piece.batch is not last:
                last = piece.batch
                size += self._ready_messages.size_of(last)
        return size > max_bytes

    def _fitting(self, selection: Selection, max_bytes: int) -> int:
        """Return how many of the first messages fit into `max_bytes`, at least one."""
        messages = 0
        for handed in selection.delivered:
            for piece in self._pieces_of(handed):
                records = piece.records()
                size = sizes_of(records)
                if size > max_bytes:
                    return max(1, messages + piece.start - handed.start + fitting(records, max_bytes))
                max_bytes -= size
            messages += handed.end - handed.start
        return messages

    def _append_grant(self, grant: Grant, selection: Selection, now_ms: int) -> Pending:
        not_before_ms = selection.not_before_ms
        pending = self.partition.append_group_record(self.group, grant, is_soft=True, not_before_ms=not_before_ms)
        update_keys(self.delivery, selection, now_ms)
        if selection.expired:
            self._metrics.expired(self.partition.topic, self.group, selection.expired)
        return pending

    def _pass_over(self, selection: Selection) -> bool:
        """Pass over messages of a selection that delivers nothing; return False when there were none. The new cursor is
        written to the log when it matters or is far; else it is only remembered."""
        delivery, before = self.delivery, self._ready_messages.place(self.delivery.next)
        # Held messages, and those acked ahead, depend on records that the disk may refuse: keep them.
        has_left_out = bool(selection.held) or delivery.has_ahead
        if not has_left_out:
            self._ready_messages.note_looked(delivery.next, selection.next)
        upto = self._ready_messages.place(max(delivery.next, selection.next))
        passed = upto - delivery.next
        if (
            selection.gone
            or selection.held
            or selection.cursors
            or (passed > 0 and (selection.expired or has_left_out))
            or passed > PASSED_MAX
        ):
            # This is no activity of the group.
            at_ms = delivery.last_active_ms
            gone, held = tuple(selection.gone), tuple(selection.held)
            grant = Grant((), upto, at_ms, at_ms, cursors=selection.lane_positions(), gone=gone, held=held)
            self._append_grant(grant, selection, at_ms)  # it delivers nothing
        self._wakeup.arm()
        return upto > before or bool(selection.gone or selection.held or selection.cursors)

    # --- dead letters ------------------------------------------------------------------------------------------------

    def on_time_passed(self) -> None:
        """Do what the timer does: the clock was moved on."""
        self._on_timer()
        self.notify()

    def _on_timer(self) -> None:
        with suppress(PortalMQError):  # another broker leads it now, or the next timer does it
            self._give_up_exhausted()

    def _give_up_exhausted(self) -> bool:
        """Give up messages that reached max_deliveries, in several records with pauses for other greenlets. Return
        False when the group ended here during that."""
        while True:
            now_ms = self._clock.now_ms()
            ranges = self.delivery.overdue(now_ms, self.settings().max_deliveries, DEAD_A_RECORD)
            if ranges:
                self._give_up(tuple(ranges), now_ms, EXHAUSTED)
            if not self.delivery.may_be_overdue:
                return True
            give_way()
            if self._wakeup.delivery is None:
                return False

    def _give_up(self, ranges: tuple[tuple[int, int, int], ...], now_ms: int, reason: str) -> Pending:
        topic = dead_letter_topic(self.settings(), self.partition.topic)
        pending = self.partition.append_group_record(self.group, Dead(ranges, now_ms, reason, topic))
        messages = sum([end - start for start, end, _ in ranges])
        self.leases_ended()
        self._metrics.dead(self.partition.topic, self.group, messages)
        return pending

    def sweep(self) -> None:
        """Pass over messages that expired unread, so that they no longer count; and write the cursor to the log, so
        that retention does not wait for it."""
        delivery = self.partition.delivery.get(self.group)
        if delivery is None or self._wakeup.closed:
            return
        while self.partition.log.lanes.has_expiring and self._wakeup.has_fresh(delivery):
            if not self._pass_over(self._select(self._clock.now_ms(), 0)):
                break
            give_way()
            if self._wakeup.closed or self.partition.delivery.get(self.group) is not delivery:
                return
        upto = self._ready_messages.place(delivery.next)
        if upto > delivery.next:
            at_ms = delivery.last_active_ms
            self.partition.append_group_record(self.group, Grant((), upto, at_ms, at_ms), is_soft=True)

    def leadership(self) -> Callable[[], bool]:
        return self.partition.leadership()

    def replay(self, attempt_id: str) -> list[LeasedMessage] | None:
        """Return the messages that the first receive with this attempt id still holds; None for an unknown id."""
        if self.is_beginning:
            return None
        self._wait_vouched()
        delivery = self.partition.delivery.get(self.group)
        spans = delivery.replay(attempt_id, self._clock.now_ms()) if delivery is not None else None
        if spans is None:
            return None
        return [message for span in spans for message in self._under_lease(span)]

    def _under_lease(self, span: SpanFold) -> list[LeasedMessage]:
        pieces = self.partition.reader.pieces(span.start, span.end, span.end - span.start)
        runs = runs_of([(piece, span.deliveries, span.lane) for piece in pieces])
        return self._delivered(runs, span.available_at_ms, span.leader_epoch)

    def _delivered(self, runs: list[Run], deadline_ms: int, leader_epoch: int) -> list[LeasedMessage]:
        topic, number = self.partition.topic, self.partition.number
        delivered: list[LeasedMessage] = []
        for run in runs:
            first, deliveries = run[0][0].start, run[0][1]
            lease = self.delivery.earlier(first) + deliveries
            head = self._signer.head(number, first, run[-1][0].end - first, lease, leader_epoch)
            for piece, _, _ in run:
                at_ms = piece.batch.appended_at_ms
                receipts = receipt_texts(head, piece.start - first, piece.end - first)
                delivered += [
                    LeasedMessage(topic, number, offset, at_ms, record, receipt, deliveries, deadline_ms)
                    for offset, record, receipt in zip(count(piece.start), piece.records(), receipts, strict=False)
                ]
        return delivered
