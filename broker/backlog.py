"""How much may wait in a topic: `max_backlog_messages`, after which producing is refused with 429.

A partition has its share of the topic's limit. What counts is what the slowest queue group has not done: unacked and
dead messages, and those that are still to come. Without a queue group nobody is late, and there is no limit.

Counting looks into the files, so it is not done for each batch: the room that was counted last is used up first. Acks
and new groups meanwhile are seen at the next count, a second later at most; when there is no room, a count is made each
50 ms, and seldom enough that counting takes no more than a twentieth of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from weakref import WeakKeyDictionary

from portalmq.broker.clock import Clock
from portalmq.broker.core.stamp import Stamp
from portalmq.broker.partition import Partition
from portalmq.broker.tally import counted
from portalmq.broker.topics import Topic
from portalmq.errors import Backpressure, MessageTooLarge

COUNT_EVERY_MS = 1_000
COUNT_FULL_EVERY_MS = 50
# The pause after a count is so many times as long as the count took.
PAUSE_FACTOR = 20
RETRY_AFTER_S = 0.25


class _Room:
    """What was counted last. `left` may be used before the next count."""

    __slots__ = ("counted_at_ms", "left", "pause_ms", "share")

    def __init__(self) -> None:
        self.share = 0
        self.left = 0
        self.counted_at_ms = -(1 << 62)
        self.pause_ms = 0.0


class Backlog:
    """The room that is left on the partitions which this broker leads. `count(partition)` is what the slowest group
    has not done."""

    def __init__(self, clock: Clock, count: Callable[[Partition], int] | None = None) -> None:
        self._clock = clock
        self._count = count or (lambda partition: slowest(partition, clock))
        self._rooms: WeakKeyDictionary[Partition, _Room] = WeakKeyDictionary()

    def check(self, topic: Topic, partition: Partition, messages: int, stamp: Stamp | None) -> None:
        """Take room for messages that are about to be appended. Raises Backpressure when there is none, and
        MessageTooLarge for more than there could ever be room for. Does not switch greenlets."""
        limit = topic.state.config.max_backlog_messages
        if limit is None or not partition.delivery:
            return
        share = -(-limit // topic.state.partitions)
        room = self._rooms.get(partition)
        if room is None:
            room = self._rooms[partition] = _Room()
        self._recount(room, partition, share, messages)
        if messages <= room.left:
            room.left -= messages
            return
        if stamp is not None and partition.replica.producers.first_place(stamp, messages) is not None:
            return  # it is in the log already, and gets its first answer
        if messages > share:
            raise MessageTooLarge(
                f"the batch has {messages} messages, and at most {share} may wait in a partition of topic"
                f" {topic.name!r} (max_backlog_messages): split it"
            )
        raise Backpressure(
            f"{share - room.left} of {share} messages wait in partition {partition.number} of topic {topic.name!r}"
            f" (max_backlog_messages): consume some, purge it, or repeat later",
            retry_after_s=RETRY_AFTER_S,
        )

    def _recount(self, room: _Room, partition: Partition, share: int, messages: int) -> None:
        now_ms = self._clock.now_ms()
        every_ms = max(room.pause_ms, COUNT_FULL_EVERY_MS if room.left < messages else COUNT_EVERY_MS)
        if room.share == share and now_ms - room.counted_at_ms < every_ms:
            return
        began = perf_counter()
        waiting = self._count(partition)
        room.pause_ms = PAUSE_FACTOR * 1_000 * (perf_counter() - began)
        room.share, room.counted_at_ms = share, now_ms
        room.left = max(0, share - waiting)


def slowest(partition: Partition, clock: Clock) -> int:
    """What the slowest queue group has not done, with what is on its way to the disk; 0 without a group."""
    counts = [counted(partition, group, clock) for group in tuple(partition.delivery)]
    unread = partition.messages_next - partition.log.messages_before(partition.high_watermark)
    return max([unread + each["lag"] + each["dead"] for each in counts], default=0)
