"""Fetches of stream readers: stored batches of many partitions in one long poll.

A reader asks the leader of each partition. Batches in memory are sent as they were encoded for their checksum; others
are read and encoded once. Control records are left out, and so is everything above the high watermark. A partition that
this broker does not lead gets the error `not_leader`; the others are answered. A reader that does not say that it knows
compressed values gets plain ones.

    fetch --> any frames? --yes--> answer
                  | no
                  `--> wait for a message in any of them (or a change of leader), at most wait_ms

Native threads encode rows into frames in Python, which runs one thread at a time: each such thread takes as much time
from writers as the event loop gets. So only one piece is read from disk at a time, in turn for all readers; and an
answer is sent with what it has after GATHER_S.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple

import gevent
import msgspec
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from portalmq import stream_wire as contract
from portalmq.broker.cluster.rpc import TopicPartition
from portalmq.broker.cluster.topic import Topic
from portalmq.broker.partition.long_poll import Peer
from portalmq.broker.partition.native import attempt
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.queues.groups import Groups
from portalmq.broker.storage.batch import BatchFrame, BatchKind, FrameHeader, is_all_holes, plain_frame
from portalmq.errors import PortalMQError

SHARE_BYTES_MIN = 64 * 1024
# An answer is sent after this time, with at least one piece: its client waits for ten seconds.
GATHER_S = 1.0

_decode_head = msgspec.msgpack.Decoder(FrameHeader).decode


class PartitionFrames(msgspec.Struct, omit_defaults=True):
    """A stream_wire.FetchedPartition with the storage's frames."""

    topic: str
    partition: int
    next_offset: int = 0
    high_watermark: int = 0
    log_start_offset: int = 0
    frames: list[BatchFrame] = []
    error: dict[str, object] | None = None
    topic_id: str = ""


class _Read(NamedTuple):
    """A partition that is led here, and the offset of the read."""

    place: TopicPartition
    partition: Partition
    offset: int


class ReaderFetch:
    """Serves fetches."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._parked: dict[Partition, set[Event]] = {}
        self._turn = BoundedSemaphore()

    def fetch(
        self, request: contract.FetchRequest, peer: Peer | None, *, knows_compressed: bool = False
    ) -> list[PartitionFrames]:
        """Return one answer for each partition, in order."""
        event = Event()
        answers = self._answers(request, knows_compressed=knows_compressed)
        if request.wait_ms and not any(answer.frames or answer.error for answer in answers):
            self._wait(request, event, peer)
            answers = self._answers(request, knows_compressed=knows_compressed)
        return answers

    def moved(self, partition: Partition) -> None:
        """End the waits for a partition that is led elsewhere now."""
        for event in self._parked.get(partition, ()):
            event.set()

    def _answers(self, request: contract.FetchRequest, *, knows_compressed: bool) -> list[PartitionFrames]:
        left = request.max_bytes
        until_s = monotonic() + GATHER_S
        share = max(SHARE_BYTES_MIN, left // len(request.partitions))
        answers: list[PartitionFrames] = []
        for asked in in_short_turns(request.partitions):
            topic_id = ""
            try:
                topic = self._groups.topics.known(asked.topic)
                topic_id = topic.state.topic_id
                read = self._read(topic, asked, until_s)
                is_over = left <= 0 or (left < request.max_bytes and monotonic() >= until_s)
                bytes_max = 0 if is_over else min(left, share)
                frames, next_offset = self._frames(read, bytes_max, until_s, knows_compressed=knows_compressed)
            except PortalMQError as error:
                problem = msgspec.to_builtins(error.problem())
                answers.append(PartitionFrames(asked.topic, asked.partition, error=problem, topic_id=topic_id))
                continue
            left -= sum([frame.size_bytes for frame in frames])
            answers.append(
                PartitionFrames(
                    asked.topic,
                    asked.partition,
                    next_offset,
                    read.partition.high_watermark,
                    read.partition.log.log_start_offset,
                    frames,
                    topic_id=topic_id,
                )
            )
        return answers

    def _read(self, topic: Topic, asked: contract.PartitionOffset, until_s: float) -> _Read:
        place = topic.place(asked.partition)
        self._groups.leaders.check_led_here([place])
        partition = self._groups.partition(place)
        partition.check_offset(asked.offset, max(0, round(1_000 * (until_s - monotonic()))))
        partition.keep_frames()
        return _Read(place, partition, asked.offset)

    def _frames(
        self, read: _Read, bytes_max: int, until_s: float, *, knows_compressed: bool
    ) -> tuple[list[BatchFrame], int]:
        """Return batches of messages from the offset on, and the offset after them; after `until_s` at most one
        piece."""
        partition, offset = read.partition, read.offset
        found: list[BatchFrame] = []
        size = 0
        while offset < partition.high_watermark and size < bytes_max:
            if found and monotonic() >= until_s:
                break
            frames = partition.serving.frames(
                offset, bytes_max - size, end=partition.high_watermark, turn=self._turn_to_read()
            )
            if not frames:
                partition.check_offset(offset)  # the read may have seen it purged or led elsewhere
                break
            for frame in frames:
                if size >= bytes_max:  # plain frames are larger than those that were read
                    break
                head = _decode_head(frame.header)
                offset = head.end_offset
                if head.kind == BatchKind.MESSAGES and not is_all_holes(frame, head):
                    found.append(self._plain(partition, frame) if head.codec and not knows_compressed else frame)
                    size += found[-1].size_bytes
        return found, offset

    def _plain(self, partition: Partition, frame: BatchFrame) -> BatchFrame:
        plain = attempt(partition.host.pool, plain_frame, frame)
        if isinstance(plain, Exception):
            raise plain
        return plain

    @contextmanager
    def _turn_to_read(self) -> Iterator[None]:
        with self._turn:
            yield
        gevent.sleep(0)  # else this greenlet takes the lock again before the next one wakes

    def _wait(self, request: contract.FetchRequest, event: Event, peer: Peer | None) -> None:
        reads: list[_Read] = []
        for asked in in_short_turns(request.partitions):
            try:
                reads.append(self._read(self._groups.topics.known(asked.topic), asked, monotonic()))
            except PortalMQError:
                return
        unwatch = peer.watch(event.set) if peer is not None else None
        let_go = self._groups.long_polls.hold(event)
        self._park(reads, event)
        try:
            if not any(read.partition.readable_end > read.offset for read in reads):
                event.wait(request.wait_ms / 1000)
        finally:
            self._unpark(reads, event)
            let_go()
            if unwatch is not None:
                unwatch()

    def _park(self, reads: Sequence[_Read], event: Event) -> None:
        for read in reads:
            read.partition.on_readable.append(event.set)
            self._parked.setdefault(read.partition, set()).add(event)

    def _unpark(self, reads: Sequence[_Read], event: Event) -> None:
        for read in reads:
            read.partition.on_readable.remove(event.set)
            parked = self._parked[read.partition]
            parked.discard(event)
            if not parked:
                del self._parked[read.partition]
