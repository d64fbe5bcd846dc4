"""A leader's queue groups, as thin as the broker's own: a request goes to the core, its decision becomes a record,
which is appended and answered when it is committed (except a grant, which is not waited for)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from simulation.content import Mail
from simulation.outbox import DEAD_LETTERS

from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.lanes import DELAYED
from portalmq.broker.core.queue.records import (
    Ack,
    Cancel,
    Commit,
    Dead,
    Drop,
    Extend,
    Grant,
    GroupStart,
    LanePosition,
    Nack,
    Output,
    Pause,
    Range,
    Redrive,
    Reschedule,
    ranges_of,
)
from portalmq.broker.core.queue.selection import NEVER_MS, Run, Selection, read_keys, select, update_keys
from portalmq.errors import InvalidRequest, PortalMQError, StaleReceipt, Unavailable

if TYPE_CHECKING:
    from simulation.group_host import Answer, GroupHost

GIVEN_UP_MAX = 3
# A book is built of this number of messages at a time, with other events between.
KEYS_PER_STEP = 2


class Receipt(NamedTuple):
    """A consumer's receipt: the message, the number of its delivery, the epoch of the leader that delivered it, and the
    number of its lease, which continues where a redrive resets deliveries."""

    offset: int
    delivery: int
    leader_epoch: int
    lease: int

    def __repr__(self) -> str:
        return f"{self.offset}.{self.delivery}e{self.leader_epoch}"


def commit_id_of(group: str, receipts: list[Receipt]) -> bytes:
    """Return what identifies a commit: its receipts with the numbers of their leases, which their text leaves out."""
    return blake2b(repr((group, sorted(map(tuple, receipts)))).encode(), digest_size=16).digest()


class Shelf:
    """The readable messages of a log, in the form that the core's selection reads."""

    def __init__(self, host: GroupHost, *, by_key: bool) -> None:
        self._host = host
        self._lanes = host.lanes
        self._by_key = by_key
        self._end = host.high_watermark

    def lanes(self) -> Collection[int]:
        return [lane for lane in self._lanes.places if lane > 0]

    def fresh(self, lane: int, due_ms: int, offset: int) -> Iterator[Run]:
        if lane >= DELAYED:
            for due, at in self._lanes.after(lane, (due_ms, offset)):
                if at < self._end:
                    yield self._run(at, at + 1, due)
            return
        places = self._lanes.after(lane, (0, offset))
        if self._by_key and lane == 0:
            lanes = [lane for lane in self._lanes.places if 0 < lane < DELAYED]
            places = sorted([*places, *(place for lane in lanes for place in self._lanes.after(lane, (0, offset)))])
        yield from self._runs([at for _, at in places if at < self._end])
        if self._host.world.chance(0.5):
            yield Run(self._end, self._end)  # nothing more below the high watermark

    def returned(self, start: int, end: int) -> Iterator[Run]:
        yield from self._runs([offset for offset in range(start, end) if offset in self._lanes.mail])

    def _runs(self, offsets: list[int]) -> Iterator[Run]:
        """Join adjacent equal messages into runs."""
        start = 0
        for end in range(1, len(offsets) + 1):
            first, last = offsets[start], offsets[end - 1]
            if end < len(offsets) and offsets[end] == last + 1 and self._are_alike(first, offsets[end]):
                continue
            yield self._run(first, last + 1, 0)
            start = end

    def _are_alike(self, offset: int, other: int) -> bool:
        mail, its = self._lanes.mail[offset][0], self._lanes.mail[other][0]
        return mail.expires_at_ms == its.expires_at_ms and not (self._by_key and (mail.key or its.key))

    def _run(self, start: int, end: int, due_ms: int) -> Run:
        mail: Mail = self._lanes.mail[start][0]
        expires_at_ms = NEVER_MS if mail.expires_at_ms is None else mail.expires_at_ms
        return Run(start, end, None, due_ms, expires_at_ms, mail.key if self._by_key else 0)


class QueueGroups:
    def __init__(self, host: GroupHost) -> None:
        self.host = host
        self.world = host.world
        self.node = host.node
        # The receives that wait for the start of a group, as Groups.begin_here has them.
        self._beginning: dict[str, list[Callable[[PortalMQError | None], None]]] = {}

    def _delivery(self, group: str) -> GroupDelivery:
        delivery = self.host.groups.delivery.get(group)
        if delivery is None:
            raise Unavailable("the group has not begun here")
        return delivery

    def _when_committed(self, back: Answer, result: object) -> Callable[[PortalMQError | None], None]:
        return lambda error: back(error or result)

    def _begun(self, group: str, error: PortalMQError | None) -> None:
        for answer in self._beginning.pop(group):
            answer(error)

    # --- receive -----------------------------------------------------------------------------------------------------

    def receive(self, group: str, max_messages: int, visibility_ms: int, attempt: str | None, back: Answer) -> None:
        config = self.world.queue_groups[group]
        delivery = self.host.groups.delivery.get(group)
        if delivery is None:
            first = max(self.host.shell.disk.start, self.host.groups.purged_upto)
            start = self.host.high_watermark if config.latest else first
            self.host.append(group, GroupStart(start, self.node.now_ms), partial(self._begun, group))
            self._beginning[group] = []
        if group in self._beginning:
            self._beginning[group].append(self._when_committed(back, []))
            return
        assert delivery is not None
        now_ms = self.node.now_ms
        if not self.host.shell.replica.may_deliver(self.world.now):
            raise Unavailable("this leader may not deliver")
        if attempt is not None and (spans := delivery.replay(attempt, now_ms)) is not None:
            again = [
                Receipt(offset, span.deliveries, span.leader_epoch, span.lease)
                for span in spans
                for offset in range(span.start, span.end)
                if offset in self.host.lanes.mail
            ]
            self.world.checker.groups.repeated(self.host, group, attempt, again)
            back(again)
            return
        if delivery.is_paused():
            back([])
            return
        choice = self._chosen(group, max_messages)
        if not choice.delivered:
            if choice.gone or choice.held:
                self._grant(group, choice, now_ms)  # as GroupReceiver: others may be in turn behind them
            back([])
            return
        deadline_ms = now_ms + visibility_ms
        self._grant(group, choice, deadline_ms, attempt)
        receipts = [
            Receipt(offset, handed.deliveries, self.host.epoch, delivery.earlier(offset) + handed.deliveries)
            for handed in choice.delivered
            for offset in range(handed.start, handed.end)
        ]
        self.world.note(self.node.id, "{}: delivers {} until {}", group, receipts, deadline_ms)
        self.world.checker.groups.handed(self.host, group, receipts, deadline_ms, attempt, alone=choice.alone)
        if config.at_most_once:
            ranges = ranges_of([receipt.offset for receipt in receipts])
            self.host.append(group, Ack(ranges, now_ms), self._when_committed(back, receipts))
        else:
            back(receipts)

    def _chosen(self, group: str, max_messages: int) -> Selection:
        config = self.world.queue_groups[group]
        wall_ms = self.node.wall_ms
        shelf = Shelf(self.host, by_key=config.by_key)
        if config.by_key:
            limits = config.limits_at(self.world.now)
            read_keys(self._delivery(group), shelf, self.node.now_ms, KEYS_PER_STEP, limits)
        return select(
            self._delivery(group),
            shelf,
            now_ms=self.node.now_ms,
            wall_ms=wall_ms,
            due_by_ms=min(wall_ms, self.host.readable_by_ms()),
            max_messages=max_messages,
            max_deliveries=config.max_deliveries,
            by_key=config.by_key,
            committed=self.host.high_watermark,
            cancelled=self.host.groups.cancelled,
        )

    def _grant(self, group: str, choice: Selection, deadline_ms: int, attempt: str | None = None) -> None:
        ranges = tuple((handed.start, handed.end, handed.deliveries) for handed in choice.delivered)
        lanes = tuple(handed.lane for handed in choice.delivered)
        record = Grant(
            ranges,
            choice.next,
            self.node.now_ms,
            deadline_ms,
            "",
            attempt,
            lanes if any(lanes) else (),
            choice.lane_positions(),
            tuple(choice.gone),
            tuple(choice.held),
            self.host.groups.leases_above,
        )
        self.host.append(group, record, not_before_ms=choice.not_before_ms, delivers=bool(ranges))
        update_keys(self._delivery(group), choice, self.node.now_ms)

    def pause(self, group: str, number: int, paused: bool, back: Answer) -> None:
        """Pause the group, or resume it. A call that a later one has overtaken changes nothing."""
        done = self._when_committed(back, number)
        if number > self._delivery(group).pause.number:
            self.host.append(group, Pause(number, self.node.now_ms, paused), done)
        else:
            self.host.wait_appended(done)

    # --- settle ------------------------------------------------------------------------------------------------------

    def _weigh(self, group: str, receipts: list[Receipt]) -> tuple[list[bool], list[int]]:
        """Return which receipts count, and the messages of those that may be unfinished."""
        delivery = self._delivery(group)
        self._check_epochs(receipts)
        verdicts: list[bool] = []
        unfinished: list[int] = []
        for receipt in receipts:
            good, more = delivery.ackable([receipt.offset], receipt.lease, receipt.leader_epoch)
            verdicts += good
            unfinished += more
        self.world.checker.groups.accepted(self.host, group, receipts, verdicts)
        return verdicts, sorted(set(unfinished))

    def _check_epochs(self, receipts: list[Receipt]) -> None:
        """As GroupPartition: what the log of an earlier leader lacks tells nothing."""
        if any(receipt.leader_epoch > self.host.epoch for receipt in receipts):
            raise Unavailable("there is a later leader")

    def _finished(self, group: str, offsets: list[int]) -> tuple[tuple[Range, ...], tuple[LanePosition, ...]]:
        delivery = self._delivery(group)
        held = delivery.with_span(offsets)
        spots = [self._spot(offset) for offset in offsets if offset not in held and self._is_there(offset)]
        return ranges_of(held), tuple(spot for spot in spots if not delivery.has_passed(spot))

    def _is_there(self, offset: int) -> bool:
        return offset in self.host.lanes.mail

    def _spot(self, offset: int) -> LanePosition:
        mail, appended_at_ms, _ = self.host.lanes.mail[offset]
        return mail.spot(offset, appended_at_ms)

    def ack(self, group: str, receipts: list[Receipt], back: Answer) -> None:
        verdicts, unfinished = self._weigh(group, receipts)
        ranges, ahead = self._finished(group, unfinished)
        done = self._when_committed(back, verdicts)
        if not all(verdicts):  # a refusal is final
            then, done = done, lambda error: back(error) if error else self.host.wait_appended(then)
        if ranges or ahead:
            self.host.append(group, Ack(ranges, self.node.now_ms, ahead), done)
        else:
            self.host.wait_appended(done)

    def _held(self, group: str, receipts: list[Receipt], *, extends: bool = False) -> list[bool]:
        delivery, now_ms = self._delivery(group), self.node.now_ms
        self._check_epochs(receipts)
        by_key = self.world.queue_groups[group].by_key
        verdicts = [
            delivery.may_extend(receipt.offset, receipt.lease, now_ms, receipt.leader_epoch, by_key=by_key)
            if extends
            else delivery.holds(receipt.offset, receipt.lease, receipt.leader_epoch)
            for receipt in receipts
        ]
        self.world.checker.groups.accepted(self.host, group, receipts, verdicts)
        return verdicts

    def nack(self, group: str, receipts: list[Receipt], delay_ms: int, back: Answer) -> None:
        """Return them to the queue; those with enough deliveries are dead-lettered at once."""
        verdicts = self._held(group, receipts)
        delivery, now_ms = self._delivery(group), self.node.now_ms
        held = {receipt.offset for receipt, holds in zip(receipts, verdicts, strict=True) if holds}
        last = self.world.queue_groups[group].max_deliveries
        spans = {offset: span for span in delivery.spans() for offset in held if span.start <= offset < span.end}
        up = sorted(offset for offset, span in spans.items() if span.deliveries >= last)
        returned = ranges_of(sorted(held.difference(up)))
        done = self._when_committed(back, verdicts)
        if returned:
            nack = Nack(tuple((start, end, now_ms + delay_ms) for start, end in returned), now_ms)
            self.host.append(group, nack, None if up else done)
        if up:
            self._give_up(group, [(offset, offset + 1, spans[offset].deliveries) for offset in up], done)
        if not held:
            back(verdicts)

    def extend(self, group: str, receipts: list[Receipt], visibility_ms: int, back: Answer) -> None:
        verdicts = self._held(group, receipts, extends=True)
        held = [receipt.offset for receipt, holds in zip(receipts, verdicts, strict=True) if holds]
        if held:
            now_ms = self.node.now_ms
            self.host.append(group, Extend(ranges_of(held), now_ms + visibility_ms, now_ms))
            self.world.checker.groups.extended(self.host, group, held, now_ms + visibility_ms)
        back(verdicts)

    def commit(self, group: str, receipts: list[Receipt], call: str, outputs: int, back: Answer) -> None:
        """Finish the input and order the output, or neither. `call` names the outputs."""
        delivery = self._delivery(group)
        commit_id = commit_id_of(group, receipts)
        if commit_id in delivery.commits:
            self.host.wait_appended(self._when_committed(back, delivery.commits[commit_id]))
            return
        verdicts, unfinished = self._weigh(group, receipts)
        ranges, ahead = self._finished(group, unfinished)
        found = {offset for start, end in ranges for offset in range(start, end)}
        found |= {offset for _, _, offset in ahead if not delivery.is_ahead(offset)}
        if not all(verdicts) or found != {receipt.offset for receipt in receipts}:
            self.host.refuse(StaleReceipt("somebody else has it, or it is done"), back)
            return
        ordered = tuple(Output("output", f"{call}/{number}") for number in range(outputs))
        record = Commit(commit_id, self.node.now_ms, ordered, ranges, ahead)
        offset = self.host.append(group, record, lambda error: back(error or offset))

    # --- dead letters ------------------------------------------------------------------------------------------------

    def _give_up(
        self,
        group: str,
        ranges: Iterable[tuple[int, int, int]],
        then: Callable[[PortalMQError | None], None] | None = None,
    ) -> None:
        topic = DEAD_LETTERS if self.world.queue_groups[group].has_dead_letters else ""
        self.host.append(group, Dead(tuple(ranges), self.node.now_ms, "often enough", topic), then)

    def redrive(self, group: str, back: Answer) -> None:
        dead = self._some_dead(group)
        now_ms = self.node.now_ms
        if dead:
            ranges = tuple((start, end, now_ms + self.world.random.randint(0, 500)) for start, end in dead)
            self.host.append(group, Redrive(ranges, now_ms), self._when_committed(back, len(dead)))
        else:
            back(0)

    def drop(self, group: str, back: Answer) -> None:
        dead = self._some_dead(group)
        if dead:
            self.host.append(group, Drop(tuple(dead), self.node.now_ms), self._when_committed(back, len(dead)))
        else:
            back(0)

    def _some_dead(self, group: str) -> list[Range]:
        found = [(dead.start, dead.end) for dead in self._delivery(group).dead]
        return [found[number] for number in range(len(found)) if self.world.chance(0.5)]

    def reschedule(self, back: Answer) -> None:
        """Cancel some scheduled messages, and order copies of them."""
        cancelled = self.host.groups.cancelled
        scheduled = [offset for offset in self._scheduled() if offset not in cancelled and self.world.chance(0.5)]
        if not scheduled:
            raise InvalidRequest("nothing is scheduled")
        record = Reschedule(ranges_of(scheduled), self.node.wall_ms)
        self.host.append("", record, self._when_committed(back, len(scheduled)))

    def _scheduled(self) -> list[int]:
        wall_ms, purged_upto = self.node.wall_ms, self.host.groups.purged_upto
        return [
            offset
            for lane, places in self.host.lanes.places.items()
            for due_ms, offset in places
            if lane >= DELAYED and due_ms > wall_ms and purged_upto <= offset < self.host.high_watermark
        ]

    def cancel(self, back: Answer) -> None:
        """Cancel a scheduled message, for all groups."""
        scheduled = self._scheduled()
        if not scheduled:
            raise InvalidRequest("nothing is scheduled")
        offset = self.world.random.choice(scheduled)
        self.host.append("", Cancel(((offset, offset + 1),)), self._when_committed(back, offset))

    def sweep(self) -> None:
        """Dead-letter messages without deliveries left, and pass over expired ones."""
        for group, delivery in self.host.groups.delivery.items():
            config = self.world.queue_groups[group]
            overdue = delivery.overdue(self.node.now_ms, config.max_deliveries, GIVEN_UP_MAX)
            if overdue:
                self._give_up(group, overdue)
            choice = self._chosen(group, 0) if self.world.chance(0.1) else None
            if choice is not None and (choice.cursors or choice.gone or choice.next > delivery.next):
                self._grant(group, choice, self.node.now_ms)

    def first_unpassed(self) -> list[int]:
        """For each group, the first message that its cursors have not reached."""
        found = []
        for delivery in self.host.groups.delivery.values():
            fresh = (offset for offset in self.host.lanes.mail if not delivery.has_passed(self._spot(offset)))
            found += [first for first in (min(fresh, default=None),) if first is not None]
        return found
