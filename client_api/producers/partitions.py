"""The partitions of topics, and the next one for messages without a key."""

from __future__ import annotations

import logging
import time
import zlib

from portalmq import wire
from portalmq.errors import PartitionNotFound, PortalMQError, TopicExists, TopicNotFound
from portalmq.network.either import Waits, settled
from portalmq.producers.batching import Lane
from portalmq.transport import system_random
from portalmq.transport.calls import EitherCalls
from portalmq.transport.request import json_request
from portalmq.transport.retries import Backoff, DeadlinePassed, may_repeat

_log = logging.getLogger("portalmq.producer")

METADATA_AGE_S_MAX = 60.0
REFRESH_TIMEOUT_S = 5.0


class ProducerTopic:
    """The lanes of a topic.

    `sticky` is the lane that messages without a key go to until its batch is full; then it moves to the next one.
    """

    def __init__(self, lanes: list[Lane], known_at: float) -> None:
        self.lanes = lanes
        # At random: otherwise many short-lived producers would all begin with partition 0.
        self.sticky = system_random.below(len(lanes))
        self.known_at = known_at

    def has(self, partition: int | None) -> bool:
        """Return whether it is known to have this partition; True for None."""
        return partition is None or 0 <= partition < len(self.lanes)

    def lane_of(self, partition: int | None, key: str | bytes | None) -> Lane:
        """Return the lane of a message. Without a partition, a key chooses it."""
        if partition is not None:
            return self.lanes[partition]
        if key is not None:
            return self.lanes[zlib.crc32(key.encode() if isinstance(key, str) else key) % len(self.lanes)]
        return self.lanes[self.sticky]

    def move_on_from(self, lane: Lane) -> None:
        if self.lanes[self.sticky] is lane:
            self.sticky = (self.sticky + 1) % len(self.lanes)


class ProducerTopics(dict[str, ProducerTopic]):
    """The topics that a producer has used. Reading is a plain look-up; calls to the broker hold one lock."""

    def __init__(self, transport: EitherCalls, acks: wire.Acks, max_block_s: float, waits: Waits) -> None:
        super().__init__()
        self._transport = transport
        self._acks = acks
        self._max_block_s = max_block_s
        self._lock = waits.mutex()

    async def look_up(self, name: str) -> ProducerTopic:
        """Return the topic. Creates it if it is missing and the cluster creates topics at their first use. Waits up to
        `max_block_s` for a broker to answer."""
        wire.check_name(name, "topic")
        async with self._lock:
            topic = self.get(name)
            if topic is None:
                count = await self._partition_count(name)
                lanes = [Lane(name, partition, self._acks) for partition in range(count)]
                topic = self[name] = ProducerTopic(lanes, time.monotonic())
        return topic

    async def lane(self, name: str, partition: int) -> Lane:
        """Return the lane of a partition that the caller names. Raises PartitionNotFound if it does not exist."""
        topic = self[name]
        if partition >= len(topic.lanes):
            await self.refresh(name)
        if not 0 <= partition < len(topic.lanes):
            raise PartitionNotFound(f"topic {name} has the partitions 0 to {len(topic.lanes) - 1}, not {partition}")
        return topic.lanes[partition]

    async def refresh_if_old(self, name: str) -> None:
        if time.monotonic() - self[name].known_at > METADATA_AGE_S_MAX:
            await self.refresh(name)

    async def refresh(self, name: str) -> None:
        """Add lanes for new partitions. Their number never falls."""
        async with self._lock:
            topic = self[name]
            topic.known_at = time.monotonic()
            try:
                count = await self._count_in_metadata(
                    name, time.monotonic() + min(self._max_block_s, REFRESH_TIMEOUT_S)
                )
            except PortalMQError as error:
                _log.debug("could not look up the partitions of %s: %s", name, error)
                return
            topic.lanes += [Lane(name, partition, self._acks) for partition in range(len(topic.lanes), count)]

    async def _partition_count(self, name: str) -> int:
        began = time.monotonic()
        deadline = began + self._max_block_s
        backoff = Backoff()
        failure: PortalMQError | None = None
        while True:
            try:
                count = await self._count_in_metadata(name, deadline)
                if count:
                    return count
                await self._create(name, deadline)
                return await self._count_in_metadata(name, deadline) or 1
            except PortalMQError as error:
                if isinstance(error, DeadlinePassed) and failure is not None:
                    raise failure from None
                failure = error
                pause_s = backoff.next_s(error.retry_after_s)
                give_up_at = self._transport.reachability.limit(deadline, began)
                if not may_repeat(error, True) or time.monotonic() + pause_s >= give_up_at:
                    raise
                await settled(self._transport.pause(pause_s))

    async def _count_in_metadata(self, name: str, deadline: float) -> int:
        try:
            metadata = await settled(self._transport.metadata([name], deadline=deadline))
        except TopicNotFound:
            return 0
        return next((len(topic.partitions) for topic in metadata.topics if topic.name == name), 0)

    async def _create(self, name: str, deadline: float) -> None:
        """Create the topic. Raises TopicNotFound if the cluster does not create topics at their first use."""
        path = f"{wire.topic_path(name)}?first_use=true"
        try:
            await settled(self._transport.attempt(json_request("PUT", path, {}), deadline))
        except TopicExists:
            # Another client was first, with settings of its own: those are the topic's.
            return
