"""How much may wait in a topic: `max_backlog_messages`, after which producing is refused with 429.

A partition has its share of the topic's limit. What counts is what the slowest queue group has not done: unacked and
dead messages, and those that are still to come. Without a queue group nobody is late, and there is no limit.

Counting looks into the files, so it is not done for each batch. A count says with which message the partition is full;
until then messages only have to be numbered. It is made again when a group has moved since, which stands in the log as
a record: at most once a second while there is room, each 50 ms when there is none, and seldom enough that counting
takes no more than a twentieth of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from weakref import WeakKeyDictionary

from portalmq.broker.cluster.topics import Topic
from portalmq.broker.core.replica.stamp import Stamp
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.partition import Partition
from portalmq.broker.queues.partition_counts import kept_for
from portalmq.errors import Backpressure, MessageTooLarge

COUNT_EVERY_MS = 1_000
COUNT_FULL_EVERY_MS = 50
# The pause after a count is so many times as long as the count took.
PAUSE_FACTOR = 20
RETRY_AFTER_S = 0.25


class _Count:
    """What was counted last: with the partition's message of number `full_at` it is full. `records` is how many control
    records it had then."""

    __slots__ = ("at_ms", "full_at", "pause_ms", "records", "share")

    def __init__(self) -> None:
        self.share = 0
        self.full_at = 0
        self.records = -1
        self.at_ms = -(1 << 62)
        self.pause_ms = 0.0


class Backlog:
    """The room that is left on the partitions which this broker leads. `count(partition)` is what the slowest group
    has not done."""

    def __init__(self, clock: Clock, count: Callable[[Partition], int] | None = None) -> None:
        self._clock = clock
        self._count = count or (lambda partition: slowest(partition, clock))
        self._counts: WeakKeyDictionary[Partition, _Count] = WeakKeyDictionary()

    def check(self, topic: Topic, partition: Partition, messages: int, stamp: Stamp | None) -> None:
        """Whether there is room for messages that are about to be appended. Raises Backpressure when there is none, and
        MessageTooLarge for more than there could ever be room for. Does not switch greenlets."""
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
        if stamp is not None and partition.replica.producers.first_place(stamp, messages) is not None:
            return  # it is in the log already, and gets its first answer
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
    """What the slowest queue group has not done, with what is on its way to the disk; 0 without a group."""
    kept = [kept_for(partition, group, clock) for group in partition.delivery]
    unread = partition.messages_next - partition.log.messages_before(partition.high_watermark)
    return max([unread + messages for messages in kept], default=0)
