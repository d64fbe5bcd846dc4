"""The life of one message, told by the control records of its partition's log.

A record states outcomes, so each event is a record that names the message, except two: no record says that a lease or
a time to live ran out. These follow from their deadlines, and are told when a later record, or the time up to which
the log is known, is past them. What no record says is not told: a fail-over may lose the record of a delivery, and a
lease may end early without a record.

A log has many more records than a message has events. `BlockSummary` sums up a block of records, so that the blocks
that say nothing about the message need not be read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from portalmq.broker.core.queue.records import (
    Ack,
    Cancel,
    Claim,
    Commit,
    CommitOffset,
    Dead,
    Done,
    Drop,
    Extend,
    Grant,
    GroupEnd,
    GroupRecord,
    GroupStart,
    LanePosition,
    Nack,
    Purge,
    Redrive,
    Reschedule,
    Seek,
    StreamRecord,
)
from portalmq.contract.history import TraceEvent

# Every record that may be about a message.
MessageRecord = GroupRecord | StreamRecord | Purge | Cancel | Reschedule


class RecordOrigin(NamedTuple):
    """Where and when a record was written. `group` is empty for a record about all groups."""

    offset: int
    leader_epoch: int
    at_ms: int
    group: str


class BlockSummary(msgspec.Struct, gc=False, frozen=True):
    """What a block of records is about: messages from `low` to below `high`, the orders of the outbox from `done_low`
    to `done_high`, and for each stream group the highest offset that it reached. A `wide` block may be about any
    message."""

    low: int = 1 << 62
    high: int = 0
    done_low: int = 1 << 62
    done_high: int = -1
    reached: dict[str, int] = {}
    wide: bool = False


def summary_of(records: Iterable[tuple[str, MessageRecord]]) -> BlockSummary:
    """Return the summary of a block of records, given with their groups."""
    low, high, done_low, done_high, wide = 1 << 62, 0, 1 << 62, -1, False
    reached: dict[str, int] = {}
    for group, record in records:
        match record:
            case Done():
                done_low, done_high = min(done_low, record.record), max(done_high, record.record)
            case CommitOffset() | Claim():
                offset = record.start if isinstance(record, Claim) else record.offset
                reached[group] = max(reached.get(group, 0), offset)
            case Commit() if record.offset >= 0:
                reached[group] = max(reached.get(group, 0), record.offset)
            case GroupStart() | GroupEnd() | Seek():
                wide = True
            case Purge():
                low, high = 0, max(high, record.upto)
            case _:
                for start, end in _named(record):
                    low, high = min(low, start), max(high, end)
    return BlockSummary(low, high, done_low, done_high, reached, wide)


def _named(record: MessageRecord) -> Iterable[tuple[int, int]]:
    """Yield the ranges of messages that a record names, if it names any."""
    for named in _ranges_of(record):
        yield named[0], named[1]
    ahead: Sequence[LanePosition] = getattr(record, "ahead", ())
    for _, _, offset in ahead:
        yield offset, offset + 1


def _ranges_of(record: MessageRecord) -> Sequence[tuple[int, ...]]:
    return getattr(record, "ranges", ())


class Biography:
    """The events of the message at `offset`, in the order of the log. Invariant: what follows only adds events at the
    end, so a part of the list can be told now and the rest later."""

    def __init__(self, offset: int, origin: RecordOrigin, deliver_at_ms: int | None, expires_at_ms: int | None) -> None:
        self.offset = offset
        self.events = [_event("appended", origin)]
        if deliver_at_ms is not None and deliver_at_ms > origin.at_ms:
            self.events.append(_event("scheduled", origin, until_ms=deliver_at_ms))
        # The copies: the index of the event, and the record that ordered the copy.
        self.copies: list[tuple[int, RecordOrigin]] = []
        self._expires_at_ms = expires_at_ms
        self._deadlines: dict[str, int] = {}  # of the running leases, by group
        self._passed: dict[str, bool] = {}  # stream groups, whether their offset is past the message
        # Of copies that are not appended yet: the record that orders them, and to which topic, None for its own.
        self._orders: dict[int, tuple[RecordOrigin, str | None]] = {}
        self._is_purged = False

    def concerns(self, block: BlockSummary) -> bool:
        """Return whether the next block of records may be about the message."""
        if block.wide or block.low <= self.offset < block.high:
            return True
        if any(block.done_low <= order <= block.done_high for order in self._orders):
            return True
        passed = self._passed
        return any(
            group not in passed or (end > self.offset and not passed[group]) for group, end in block.reached.items()
        )

    def take(self, record: MessageRecord, origin: RecordOrigin) -> None:
        """Take the next record of the log; one about other messages changes nothing."""
        group = origin.group
        match record:
            case Claim():
                # Where the group began before, it began in front of the message; else it begins at `start`. The
                # records after the message do not say which, so a later start is taken for its beginning.
                self._passed.setdefault(group, record.start > self.offset)
            case Seek():
                self._passed[group] = record.offset > self.offset
            case CommitOffset():
                self._read_to(record.offset, record.member, origin)
            case Commit() if record.offset >= 0:
                self._read_to(record.offset, record.member, origin, len(record.outputs))
            case Done():
                self._done(record.record, origin)
            case GroupStart() | GroupEnd():
                if group in self._deadlines:
                    self._run_out(origin.at_ms)
                self._deadlines.pop(group, None)
                self._passed.pop(group, None)
            case Purge():
                if record.upto > self.offset and not self._is_purged:
                    self._run_out(origin.at_ms)
                    self._deadlines.clear()
                    self._is_purged = True
                    self.events.append(_event("purged", origin))
            case Cancel():
                if self._is_named(record):
                    self._run_out(origin.at_ms)
                    self.events.append(_event("cancelled", origin))
            case Reschedule():
                if self._is_named(record):
                    self._run_out(origin.at_ms)
                    self._orders[origin.offset] = (origin, None)
                    self.events.append(_event("rescheduled", origin, until_ms=record.deliver_at_ms or None))
            case _:
                self._take_settlement(record, origin)

    def _is_named(self, record: MessageRecord) -> bool:
        return any(start <= self.offset < end for start, end in _named(record))

    def _take_settlement(self, record: MessageRecord, origin: RecordOrigin) -> None:
        """Take a record of a queue group about deliveries."""
        named = [each for each in _ranges_of(record) if each[0] <= self.offset < each[1]]
        if not named and not self._is_named(record):
            return
        group = origin.group
        at_ms = record.granted_at_ms if isinstance(record, Grant) else record.at_ms  # type: ignore[union-attr]
        self._run_out(at_ms)
        self._deadlines.pop(group, None)
        match record:
            case Grant():
                self._deadlines[group] = record.deadline_ms
                self.events.append(
                    _event(
                        "delivered",
                        origin,
                        consumer=record.consumer or record.holder or None,
                        delivery_count=named[0][2],
                        until_ms=record.deadline_ms,
                    )
                )
            case Extend():
                self._deadlines[group] = record.deadline_ms
                self.events.append(_event("extended", origin, until_ms=record.deadline_ms))
            case Nack():
                until_ms = _later(named[0][2], at_ms)
                nacked = _event("nacked", origin, until_ms=until_ms, reason=record.reason, unseen=record.unseen)
                self.events.append(nacked)
            case Ack():
                self.events.append(_event("acked", origin))
            case Commit():
                self.events.append(_event("acked", origin, outputs=len(record.outputs)))
            case Dead():
                if record.topic:
                    self._orders[origin.offset] = (origin, record.topic)
                self.events.append(
                    _event(
                        "dead",
                        origin,
                        delivery_count=named[0][2],
                        reason=record.reason or None,
                        to_topic=record.topic or None,
                    )
                )
            case Redrive():
                until_ms = _later(named[0][2], at_ms)
                self.events.append(_event("redriven", origin, until_ms=until_ms))
            case Drop():
                self.events.append(_event("dropped", origin))

    def _read_to(self, end: int, member: str, origin: RecordOrigin, outputs: int = 0) -> None:
        """Take the commit of a stream group, which has read everything below `end`."""
        if end > self.offset and not self._passed.get(origin.group):
            self._passed[origin.group] = True
            self._run_out(origin.at_ms)
            self.events.append(_event("acked", origin, consumer=member or None, outputs=outputs))
        else:
            self._passed.setdefault(origin.group, False)

    def _done(self, order: int, origin: RecordOrigin) -> None:
        ordered = self._orders.pop(order, None)
        if ordered is not None:
            self._run_out(origin.at_ms)
            ordered_by, to_topic = ordered
            self.copies.append((len(self.events), ordered_by))
            self.events.append(_event("copied", origin, to_topic=to_topic))

    def finish(self, known_upto_ms: int) -> None:
        """Tell what ran out by then. Every record up to that time was taken."""
        self._run_out(known_upto_ms)

    def _run_out(self, now_ms: int) -> None:
        """Tell leases and the time to live that ran out by `now_ms`."""
        ended = sorted((deadline_ms, group) for group, deadline_ms in self._deadlines.items() if deadline_ms <= now_ms)
        events = []
        for deadline_ms, group in ended:
            del self._deadlines[group]
            events.append(TraceEvent(at_ms=deadline_ms, event="expired", group=group))
        if self._expires_at_ms is not None and self._expires_at_ms <= now_ms and not self._is_purged:
            events.append(TraceEvent(at_ms=self._expires_at_ms, event="ttl_expired"))
            self._expires_at_ms = None
        self.events += sorted(events, key=lambda event: event.at_ms)


def _event(name: str, origin: RecordOrigin, **more: object) -> TraceEvent:
    return TraceEvent(
        at_ms=origin.at_ms,
        event=name,
        group=origin.group or None,
        leader_epoch=origin.leader_epoch,
        offset=origin.offset,
        **more,  # type: ignore[arg-type]
    )


def _later(until_ms: int, at_ms: int) -> int | None:
    return until_ms if until_ms > at_ms else None
