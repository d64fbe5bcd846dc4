"""The backlog limit of a topic, `max_backlog_messages`: above it producing is refused with 429.

Each partition has its share of the topic's limit. The backlog is that of the slowest queue group: unacked, dead and
delayed messages. Without a queue group there is no limit.

Counting reads the files, so it is not done for each batch. A count determines the message number at which the partition
is full; until then a comparison of numbers is enough. It is repeated after a group has progressed, which adds a record
to the log: at most once a second while there is room, every 50 ms while there is none, and so rarely that it takes
at most a twentieth of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from weakref import WeakKeyDictionary

from portalmq.broker.cluster.topic import Topic
from portalmq.broker.core.replica.producers import Stamp
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.partition import Partition
from portalmq.broker.queues.partition_counts import backlog_of
from portalmq.errors import Backpressure, Fenced, MessageTooLarge, OutOfOrderSequence

COUNT_EVERY_MS = 1_000
COUNT_FULL_EVERY_MS = 50
# The pause after a count, as a multiple of the time that the count took.
PAUSE_FACTOR = 20
RETRY_AFTER_S = 0.25


@dataclass(slots=True, eq=False)
class _Count:
    """The last count of a partition: it is full at message number `full_at`. `records` is the number of control records
    at that time."""

    share: int = 0
    full_at: int = 0
    records: int = -1
    at_ms: int = -(1 << 62)
    pause_ms: float = 0.0


class Backlog:
    """The room left on the partitions that this broker leads. `count(partition)` returns the backlog of the slowest
    group."""

    def __init__(self, clock: Clock, count: Callable[[Partition], int] | None = None) -> None:
        self._clock = clock
        self._count = count or (lambda partition: slowest(partition, clock))
        self._counts: WeakKeyDictionary[Partition, _Count] = WeakKeyDictionary()

    def check(self, topic: Topic, partition: Partition, messages: int, stamp: Stamp | None) -> None:
        """Raise Backpressure when there is no room for `messages` more messages, MessageTooLarge for more than the
        limit. Does not switch greenlets."""
        limit = topic.state.config.max_backlog_messages
        if limit is None or not partition.delivery:
            return
        share = -(-limit // topic.state.partitions)
        count = self._counts.get(partition)
        if count is None:
            count = self._counts[partition] = _Count()
        self._recount(count, partition, share, messages)
        room = count.full_at - partition.messages_next
        if messages <= room:
            return
        if stamp is not None:
            try:
                if partition.replica.producers.find_duplicate(stamp, messages) is not None:
                    return  # a repeat of a batch that is in the log: it gets the first answer
            except (Fenced, OutOfOrderSequence):
                return  # the append refuses it, once that is final
        if messages > share:
            raise MessageTooLarge(
                f"the batch has {messages} messages, and at most {share} may wait in a partition of topic"
                f" {topic.name!r} (max_backlog_messages): split it"
            )
        raise Backpressure(
            f"{share - room} messages wait in partition {partition.number} of topic {topic.name!r}, and {share} may"
            " (max_backlog_messages): consume some, purge it, or repeat later",
            retry_after_s=RETRY_AFTER_S,
        )

    def _recount(self, count: _Count, partition: Partition, share: int, messages: int) -> None:
        records = partition.replica.next_offset - partition.messages_next
        if count.share == share:
            is_full = partition.messages_next + messages > count.full_at
            every_ms = max(count.pause_ms, COUNT_FULL_EVERY_MS if is_full else COUNT_EVERY_MS)
            if count.records == records or self._clock.now_ms() - count.at_ms < every_ms:
                return
        began = perf_counter()
        waiting = self._count(partition)
        count.pause_ms = PAUSE_FACTOR * 1_000 * (perf_counter() - began)
        count.share, count.records, count.at_ms = share, records, self._clock.now_ms()
        count.full_at = partition.messages_next + share - waiting


def slowest(partition: Partition, clock: Clock) -> int:
    """Return the backlog of the slowest queue group, including messages not yet written; 0 without a group."""
    kept = [backlog_of(partition, group, clock) for group in partition.delivery]
    unread = partition.messages_next - partition.log.messages_before(partition.high_watermark)
    return max([unread + messages for messages in kept], default=0)
