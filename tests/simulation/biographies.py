"""The lives of messages as the committed log tells them (core/queue/biography.py), compared with the models' states.

A life that is read block by block, without the blocks whose summaries say that they are not about the message, is the
same as one that takes every record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import TYPE_CHECKING, Any

from portalmq.broker.core.queue.biography import Biography, RecordOrigin, summary_of
from portalmq.broker.core.queue.records import Dead, Done, Purge, Reschedule

if TYPE_CHECKING:
    from simulation.disk import Batch
    from simulation.group_checker import GroupChecker

MESSAGES = 8  # of a run: each takes all records
BLOCK_MAX = 12
# The last event of a message in a group, by its state there; lapses of leases and times to live are no records.
LAST = {
    "fresh": {None},
    "out": {None, "delivered", "extended", "nacked", "redriven"},
    "acked": {"acked"},
    "dead": {"dead"},
    "dropped": {"dropped"},
    "expired": {None, "delivered", "extended", "nacked", "redriven"},
}
UNWRITTEN = {"expired", "ttl_expired", "copied"}


class Biographies:
    def __init__(self, groups: GroupChecker) -> None:
        self._groups = groups
        self._records: list[tuple[RecordOrigin, Any]] = []
        self._origins: dict[int, RecordOrigin] = {}

    def committed(self, batch: Batch) -> None:
        group = "" if batch.control is None else batch.control.group
        origin = RecordOrigin(batch.base, batch.head.leader_epoch, batch.head.appended_at_ms, group)
        self._origins.update((base, origin._replace(offset=base)) for base, _ in enumerate(batch.mail, batch.base))
        if batch.control is not None:
            self._records.append((origin, batch.control.record))

    def check(self, random: Random, now_ms: int) -> None:
        letters = sorted(self._groups.letters)
        for offset in random.sample(letters, min(MESSAGES, len(letters))):
            self._check(offset, random, now_ms)

    def _check(self, offset: int, random: Random, now_ms: int) -> None:
        records = [(origin, record) for origin, record in self._records if origin.offset > offset]
        whole, read = self._begun(offset), self._begun(offset)
        for origin, record in records:
            whole.take(record, origin)
        while records:
            block = records[: random.randint(1, BLOCK_MAX)]
            del records[: len(block)]
            if read.concerns(summary_of((origin.group, record) for origin, record in block)):
                for origin, record in block:
                    read.take(record, origin)
        whole.finish(now_ms)
        read.finish(now_ms)
        if whole.events != read.events:
            self._groups.fail("I12", "message {} lives {}, read in blocks {}", offset, whole.events, read.events)
        self._compare(offset, whole)

    def _begun(self, offset: int) -> Biography:
        mail = self._groups.letters[offset].mail
        return Biography(offset, self._origins[offset], mail.deliver_at_ms, mail.expires_at_ms)

    def _compare(self, offset: int, life: Biography) -> None:
        """Compare the events with the records that the models have taken."""
        groups = self._groups
        events: Counter[tuple[str | None, str]] = Counter((each.group, each.event) for each in life.events)
        for name, queue in groups.queues.items():
            state = queue.state.get(offset, "fresh")
            told = [each.event for each in life.events if each.group == name and each.event not in UNWRITTEN]
            last = told[-1] if told else None
            # Two acks of a message whose GRANT is lost may both be written.
            if last not in LAST[state] or bool(events[name, "acked"]) != (state == "acked"):
                groups.fail("I12", "{}: message {} is {}, and lives {}", name, offset, state, life.events)
        for name, stream in groups.streams.items():
            if bool(events[name, "acked"]) != (offset in stream.passed):
                groups.fail("I11", "{}: message {} lives {}", name, offset, life.events)
        moved = events[None, "cancelled"] + events[None, "rescheduled"]
        if bool(moved) != (offset in groups.cancelled):
            groups.fail("I12", "message {} lives {}", offset, life.events)
        after = [(origin.offset, record) for origin, record in self._records if origin.offset > offset]
        purges = any(isinstance(record, Purge) and record.upto > offset for _, record in after)
        if events[None, "purged"] != purges:
            groups.fail("I12", "message {} lives {}, and is purged: {}", offset, life.events, purges)
        orders = {at for at, record in after if _orders(record, offset)}
        copies = sum(isinstance(record, Done) and record.record in orders for _, record in after)
        if len(life.copies) != copies:
            groups.fail("I13", "message {} lives {}, and is copied {} times", offset, life.events, copies)


def _orders(record: Any, offset: int) -> bool:
    """Return whether a record orders a copy of a message."""
    if not isinstance(record, Reschedule | Dead) or (isinstance(record, Dead) and not record.topic):
        return False
    ranges: Iterable[Any] = record.ranges
    return any(start <= offset < end for start, end, *_ in ranges)
