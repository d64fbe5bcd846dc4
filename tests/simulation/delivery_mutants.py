"""Bugs of delivery, planted one at a time, as in mutants.py: in the folds of groups, the selection of messages, the
leader's shell and the coordinator. They are hunted in the seeds that have groups."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
from simulation import queue_groups
from simulation.coordinator import GroupCoordinator
from simulation.group_host import GroupHost
from simulation.mutants import mutant as any_mutant
from simulation.outbox import Outbox
from simulation.queue_groups import QueueGroups
from simulation.stream_groups import StreamGroups

from portalmq.broker.core.fold import SpanFold
from portalmq.broker.core.queue import biography, delivery
from portalmq.broker.core.queue.biography import Biography
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.key_order import KeyQueues
from portalmq.broker.core.queue.key_rates import KeyLimits, KeyRates
from portalmq.broker.core.queue.records import Cancel, Claim, CommitOffset, Grant, Redrive, Reschedule, Seek
from portalmq.broker.core.queue.selection import NEVER_MS
from portalmq.broker.core.queue.spans import GroupSpans
from portalmq.broker.core.stream import offsets as streams
from portalmq.broker.core.stream.offsets import StreamOffsets
from portalmq.broker.core.stream.rebalance import Draft
from portalmq.broker.partition.folding import GroupsFold

mutant = partial(any_mutant, has_groups=True)


# --- the lives of messages -------------------------------------------------------------------------------------------


@mutant("reads no block of records for what was acked ahead", 7, (biography, "_named"))
def _(original: Any, record: Any) -> Any:
    return [(start, end) for start, end, *_ in biography._ranges_of(record)]


@mutant("forgets seeks in the life of a message", 107, (Biography, "take"))
def _(original: Any, self: Any, record: Any, origin: Any) -> None:
    if not isinstance(record, Seek):
        original(self, record, origin)


@mutant("tells a redriven message as dead", 19, (Biography, "take"))
def _(original: Any, self: Any, record: Any, origin: Any) -> None:
    if not isinstance(record, Redrive):
        original(self, record, origin)


# --- receipts and leases ---------------------------------------------------------------------------------------------


@mutant("accepts stale receipts", 7, (GroupDelivery, "ackable"))
def _(original: Any, self: Any, offsets: Any, *more: Any) -> Any:
    return [True] * len(offsets), list(offsets)


@mutant("takes a receipt by its number alone", 123, (SpanFold, "is_later"))
def _(original: Any, self: Any, leader_epoch: int, lease: int) -> bool:
    return self.lease > lease


@mutant("takes an older receipt while nobody has the message", 15, (GroupDelivery, "ackable"))
def _(original: Any, self: Any, offsets: Any, *more: Any) -> Any:
    offsets = list(offsets)
    verdicts, _ = original(self, offsets, *more)
    spans = [self.at(offset) for offset in offsets]
    free = [span is not None and not span.leased for span in spans]
    verdicts = [good or is_free for good, is_free in zip(verdicts, free, strict=True)]
    return verdicts, [offset for offset, good in zip(offsets, verdicts, strict=True) if good]


@mutant("acks what is dead", 7, (GroupDelivery, "is_dead"))
def _(original: Any, self: Any, offset: int) -> bool:
    return False


@mutant("hands out before the grant is folded", 3, (GroupHost, "fold"))
def _(original: Any, self: Any, batch: Any) -> None:
    if batch.control is None or not isinstance(batch.control.record, Grant):
        original(self, batch)


@mutant("looks at no lease", 19, (GroupSpans, "_live"))
def _(original: Any, self: Any, starts: list[int], now_ms: int) -> Any:
    return original(self, starts, now_ms + 200)


@mutant("forgets what was acked ahead of the cursor", 7, (GroupDelivery, "_put_ahead"))
def _(original: Any, self: Any, spot: Any) -> None:
    pass


@mutant("keeps no holder's name in its snapshots", 91, (GroupDelivery, "snapshot"))
def _(original: Any, self: Any) -> Any:
    fold = original(self)
    return msgspec.structs.replace(fold, spans=[msgspec.structs.replace(span, holder="") for span in fold.spans])


@mutant("gives what was handed out no holder's name", 11, (Grant, "holder"))
def _(original: Any, self: Any) -> str:
    return ""


@mutant("takes an ack for done whose grant is lost", 2059, (GroupDelivery, "ackable"))
def _(original: Any, self: Any, offsets: Any, *more: Any, **named: Any) -> Any:
    verdicts, unfinished = original(self, offsets, *more, **named)
    return verdicts, [offset for offset in unfinished if offset >= self.next or self.cursors or self.has_span(offset)]


@mutant("answers an ack before it is committed", 3, (QueueGroups, "_when_committed"))
def _(original: Any, self: Any, back: Any, result: object) -> Any:
    if isinstance(result, list) and result:
        back(result)
        return lambda error: None
    return original(self, back, result)


@mutant("keeps back-offs that another clock began", 2223, (GroupDelivery, "take_over"))
def _(original: Any, self: Any, now_ms: int) -> None:
    backing_off = [span for span in self.spans() if not span.leased]
    original(self, now_ms)
    for span in backing_off:
        self._cut(span.start, span.end)
        self._insert(span)


@mutant("delivers once too often", 11, (queue_groups, "select"))
def _(original: Any, *arguments: Any, max_deliveries: int, **named: Any) -> Any:
    return original(*arguments, max_deliveries=max_deliveries + 1, **named)


@mutant("keeps no pause in its snapshots", 15, (GroupDelivery, "snapshot"))
def _(original: Any, self: Any) -> Any:
    return msgspec.structs.replace(original(self), pauses=[])


@mutant("answers a pause before it is committed", 575, (QueueGroups, "pause"))
def _(original: Any, self: Any, group: str, number: int, paused: bool, back: Any) -> None:
    original(self, group, number, paused, lambda result: None)
    back(number)


@mutant("lets an earlier resume end a pause", 527, (QueueGroups, "pause"))
def _(original: Any, self: Any, group: str, number: int, paused: bool, back: Any) -> None:
    last = self._delivery(group).pause.number
    original(self, group, max(number, last + 1), paused, back)


@mutant("orders no copy of what is moved to another time", 95, (GroupsFold, "reschedule"))
def _(original: Any, self: Any, offset: int, record: Reschedule) -> None:
    self.cancel(Cancel(record.ranges))


@mutant("delivers what is moved to another time", 95, (GroupsFold, "reschedule"))
def _(original: Any, self: Any, offset: int, record: Reschedule) -> None:
    self.outbox[offset] = ""


# --- lanes -----------------------------------------------------------------------------------------------------------


@mutant("hands out a little early", 51, (queue_groups, "select"))
def _(original: Any, *arguments: Any, due_by_ms: int, **named: Any) -> Any:
    return original(*arguments, due_by_ms=due_by_ms + 100, **named)


@mutant("passes a time of which not all is readable", 307, (GroupHost, "readable_by_ms"))
def _(original: Any, self: Any) -> int:
    return NEVER_MS


@mutant("hands out what has expired", 11, (queue_groups, "select"))
def _(original: Any, *arguments: Any, wall_ms: int, **named: Any) -> Any:
    return original(*arguments, wall_ms=wall_ms - 300, **named)


@mutant("hands out what was taken back", 51, (queue_groups, "select"))
def _(original: Any, *arguments: Any, cancelled: Any, **named: Any) -> Any:
    return original(*arguments, cancelled=(), **named)


@mutant("snapshots without what is ahead", 3531, (GroupDelivery, "snapshot"))
def _(original: Any, self: Any) -> Any:
    return msgspec.structs.replace(original(self), ahead=[])


@mutant("snapshots without the cursors of its lanes", 11, (GroupDelivery, "snapshot"))
def _(original: Any, self: Any) -> Any:
    return msgspec.structs.replace(original(self), cursors=[])


@mutant("snapshots without the dead", 27, (GroupDelivery, "snapshot"))
def _(original: Any, self: Any) -> Any:
    return msgspec.structs.replace(original(self), dead=[])


# --- order by key ----------------------------------------------------------------------------------------------------


@mutant("loses the order of a key at redelivery", 27, (KeyQueues, "is_among_first"))
def _(original: Any, self: Any, offset: int) -> bool:
    return True


@mutant("hands out two of a key", 27, (KeyQueues, "unfinished"))
def _(original: Any, self: Any, key: int) -> int:
    return 0


@mutant("goes on with a key before the ack is committed", 11, (KeyQueues, "finish"))
def _(original: Any, self: Any, start: int, end: int, record: int) -> None:
    self.done(start, end)


@mutant("goes on with a key before the purge is committed", 3491, (GroupDelivery, "purge"))
def _(original: Any, self: Any, upto: int, record: int = -1) -> None:
    if self.keys is not None:
        self.keys.done(0, upto)
    original(self, upto, record)


@mutant("does not look again at one that comes first", 311, (KeyQueues, "add"))
def _(original: Any, self: Any, offset: int, key: int) -> None:
    freed = list(self._freed)
    original(self, offset, key)
    self._freed = freed


@mutant("tells whose turn it is before all keys are read", 3, (KeyQueues, "is_whole"))
def _(original: Any, self: Any) -> bool:
    return True


@mutant("forgets what is finished while keys are read", 27, (KeyQueues, "finish_unseen"))
def _(original: Any, self: Any, record: int) -> None:
    pass


@mutant("does not read the keys of what was redriven", 95, (KeyQueues, "read_later"))
def _(original: Any, self: Any, start: int, end: int) -> None:
    pass


@mutant("takes what was redriven out of the book again", 151, (KeyQueues, "read_later"))
def _(original: Any, self: Any, start: int, end: int) -> None:
    self._unread.append((start, end))


@mutant("keeps its book of keys from an earlier time", 5343, (GroupDelivery, "take_over"))
def _(original: Any, self: Any, now_ms: int) -> None:
    keys = self.keys
    original(self, now_ms)
    self.keys = keys


@mutant("prolongs a lease when it is another's turn", 4103, (GroupDelivery, "may_extend"))
def _(
    original: Any, self: Any, offset: int, delivery: int, now_ms: int, leader_epoch: int = 0, *, by_key: bool
) -> bool:
    return self.holds(offset, delivery, leader_epoch)


@mutant("lets one more of a key out than its limit", 135, (KeyQueues, "set_limits"))
def _(original: Any, self: Any, limits: KeyLimits, now_ms: int) -> None:
    original(self, limits._replace(width=limits.width + (limits.width > 1)), now_ms)


@mutant("takes no token for a delivery", 135, (KeyRates, "took"))
def _(original: Any, self: Any, key: int, now_ms: int) -> None:
    pass


@mutant("fills the buckets of keys at each receive", 135, (KeyRates, "tokens"))
def _(original: Any, self: Any, key: int, now_ms: int) -> int:
    self._full_at_ms.clear()
    return int(original(self, key, now_ms))


@mutant("never looks again at a key that waits for a token", 103, (KeyRates, "due"))
def _(original: Any, self: Any, now_ms: int) -> Iterator[int]:
    return iter(())


# --- the outbox ------------------------------------------------------------------------------------------------------


@mutant("gives outputs an id of its own epoch", 19, (Outbox, "id_of"))
def _(original: Any, self: Any, offset: int, number: int) -> Any:
    return (*original(self, offset, number), self.host.epoch)


@mutant("sends what is not committed", 7, (Outbox, "is_committed"))
def _(original: Any, self: Any, offset: int) -> bool:
    return True


@mutant("logs Done before the output has arrived", 47, (Outbox, "_send"))
def _(original: Any, self: Any, id: Any, topic: str, content: str) -> None:
    original(self, id, topic, content)
    self.world.after(1, self.arrived, id)


@mutant("forgets which calls it has committed", 87, (delivery, "remember_commit"))
def _(original: Any, *arguments: Any) -> None:
    pass


@mutant("acks the input and forgets the output", 11, (QueueGroups, "commit"))
def _(original: Any, self: Any, group: str, receipts: Any, call: str, outputs: int, back: Any) -> None:
    original(self, group, receipts, call, 0, back)


# --- streams ---------------------------------------------------------------------------------------------------------


@mutant("commits below what is committed", 47, (StreamOffsets, "check_commit"), (StreamOffsets, "apply"))
def _(original: Any, self: Any, first: Any, *more: Any) -> Any:
    if isinstance(first, CommitOffset):
        self.committed = first.offset
        return None
    if isinstance(first, str) and first == self.member and more[0] >= self.generation and more[1] < self.committed:
        return True
    return original(self, first, *more)


@mutant("lets any generation commit", 35, (StreamOffsets, "check_commit"))
def _(original: Any, self: Any, member: str, generation: int, *more: Any) -> bool:
    return original(self, self.member, self.generation, *more)


@mutant("names a partition before its claim stands", 7, (StreamGroups, "claim"))
def _(original: Any, self: Any, name: str, member: str, generation: int, back: Any) -> None:
    def at_once(result: Any) -> None:
        pass

    original(self, name, member, generation, at_once)
    back(self.host.groups.streams[name].committed)


@mutant("claims for an older generation", 103, (StreamOffsets, "check_claim"), (StreamOffsets, "apply"))
def _(original: Any, self: Any, first: Any, *more: Any) -> None:
    if isinstance(first, Claim):
        self.member, self.generation = first.member, first.generation
    elif not isinstance(first, int):
        original(self, first, *more)


@mutant("keeps its generation", 3, (Draft, "__init__"))
def _(original: Any, self: Any, known: Any, generation: int, *more: Any) -> None:
    original(self, known, max(1, known.generation), *more)


@mutant("seeks without a fence", 19, (StreamOffsets, "apply"))
def _(original: Any, self: Any, record: Any, offset: int) -> None:
    generation = self.generation
    original(self, record, offset)
    if isinstance(record, streams.Seek):
        self.generation = generation


@mutant("takes a commit from wherever it begins", 575, (StreamOffsets, "check_begin"))
def _(original: Any, self: Any, *more: Any) -> None:
    pass


@mutant("seeks in the generation of the claims after it", 463, (GroupCoordinator, "_seek"))
def _(original: Any, self: Any, of: Any, seeking: Any, generation: int) -> None:
    original(self, of, seeking, generation + 1)
