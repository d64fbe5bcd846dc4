"""The batches that a stream consumer has read ahead, for each assigned partition.

    fetchers --frames--> PartitionBuffer:
        position .. buffered .. --take--> handed out --finish--> done --> committed

A buffer belongs to one partition and one `since`: if the partition is taken away, or the group moves to another
position, the buffer is `gone` with its content. Batches are kept encoded, and decoded when they are taken.

Fetchers are threads, or tasks of an event loop (network/either.py).
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from portalmq import stream_wire as contract
from portalmq.errors import PortalMQError
from portalmq.message import Message
from portalmq.network.connection import Address
from portalmq.network.either import THREADS, Either, Waits, settled
from portalmq.transport.calls import EitherCalls
from portalmq.transport.request import json_request

_log = logging.getLogger("portalmq.consumer")

PREFETCH_BYTES = 16 * 1024 * 1024
BUFFER_BYTES_MIN = 256 * 1024
FETCH_WAIT_S = 1.0
FETCH_TIMEOUT_S = 10.0
FETCHERS_MAX = 8
AGAIN_S = 0.1
GONE_AGAIN_S = 1.0

TopicPartition = tuple[str, int]

_decode_head = msgspec.msgpack.Decoder(contract.FrameHead).decode
_decode_records = msgspec.msgpack.Decoder(tuple[contract.FrameRecord, ...]).decode
_decode_records_with_holes = msgspec.msgpack.Decoder(tuple[contract.FrameRecord | None, ...]).decode
_decode_answer = msgspec.msgpack.Decoder(contract.FetchAnswer).decode


class PartitionBuffer:
    """One assigned partition. `position` is fetched next; offsets below `handed` were handed out, below `done` are
    finished, below `committed` committed.

    Invariant: committed <= done <= handed <= position.
    """

    def __init__(self, assigned: contract.AssignedPartition) -> None:
        self.place: TopicPartition = (assigned.topic, assigned.partition)
        self.since = assigned.since
        self.position = self.handed = self.done = self.committed = assigned.offset
        self.frames: deque[contract.Frame] = deque()
        self.buffered_bytes = 0
        self.current: DecodedBatch | None = None
        self.in_flight = False
        self.again_at = 0.0
        # Nothing more is handed out; while `revoked`, messages in hand may still be finished and committed.
        self.revoked = False
        self.gone = False


@dataclass(slots=True, eq=False)
class DecodedBatch:
    """The messages of one batch as (offset, record), in order; those from index `next` are still to be handed out.
    `end` is the offset after the batch."""

    buffer: PartitionBuffer
    records: list[tuple[int, contract.FrameRecord]]
    timestamp_ms: int
    end: int
    next: int = 0

    def hand_out_one(self, consumer: Any) -> Message:
        """Return the next message."""
        offset, record = self.records[self.next]
        self.next += 1
        buffer = self.buffer
        buffer.handed = self.end if self.next == len(self.records) else offset + 1
        return Message(
            *buffer.place,
            offset,
            record.key,
            record.value,
            record.headers or {},
            record.content_type,
            self.timestamp_ms,
            0,
            None,
            0,
            record.deliver_at_ms,
            record.expires_at_ms,
            record.priority,
            consumer,
        )

    def hand_out(self, at_most: int, consumer: Any) -> list[Message]:
        """Return the next messages."""
        records = self.records[self.next : self.next + at_most]
        self.next += len(records)
        buffer = self.buffer
        buffer.handed = self.end if self.next == len(self.records) else records[-1][0] + 1
        topic, partition = buffer.place
        timestamp_ms = self.timestamp_ms
        return [
            Message(
                topic,
                partition,
                offset,
                record.key,
                record.value,
                record.headers or {},
                record.content_type,
                timestamp_ms,
                0,
                None,
                0,
                record.deliver_at_ms,
                record.expires_at_ms,
                record.priority,
                consumer,
            )
            for offset, record in records
        ]


def _with_offsets(head: contract.FrameHead, body: bytes, skipped: int) -> list[tuple[int, contract.FrameRecord]]:
    """Return the messages of a batch without the first `skipped`, with their offsets. Compaction leaves nil for a
    removed one."""
    first = head.base_offset + skipped
    records: Sequence[contract.FrameRecord]
    try:
        records = contract.records_of_compressed(head, body) if head.codec else _decode_records(body)
    except msgspec.ValidationError:
        numbered = enumerate(_decode_records_with_holes(body)[skipped:], first)
        return [(offset, record) for offset, record in numbered if record is not None]
    return list(enumerate(records[skipped:] if skipped else records, first))


class FetchCalls(EitherCalls, Protocol):
    """The part of a transport that reading needs."""

    def leader_of(self, place: TopicPartition) -> Address | None: ...
    def leader_reported(self, place: TopicPartition, url: object) -> bool: ...
    def close(self) -> Either[None]: ...


class FetchBuffer:
    """Thread-safe; `lock` guards everything, and `changed` is notified of arrivals and changes."""

    def __init__(
        self,
        transport: FetchCalls,
        wall_ms: Callable[[], int],
        prefetch_bytes: int = PREFETCH_BYTES,
        *,
        waits: Waits = THREADS,
    ) -> None:
        self.lock = threading.RLock()
        self.changed = waits.condition(self.lock)
        self._waits = waits
        self.by_partition: dict[TopicPartition, PartitionBuffer] = {}
        self.paused: set[TopicPartition] = set()
        self.closed = False
        self._transport = transport
        self._wall_ms = wall_ms
        self._prefetch_bytes = prefetch_bytes
        self._rotation: deque[PartitionBuffer] = deque()
        self._fetchers = 0
        self._idle = 0

    # --- the assignment ----------------------------------------------------------------------------------------------

    def add(self, assigned: Iterable[contract.AssignedPartition]) -> None:
        """Read these partitions too. A partition with a new `since` gets a new buffer."""
        with self.lock:
            for each in assigned:
                buffer = PartitionBuffer(each)
                self._drop(buffer.place)
                self.by_partition[buffer.place] = buffer
                self._rotation.append(buffer)
            self._wake()

    def drop(self, places: Iterable[TopicPartition]) -> None:
        with self.lock:
            for place in list(places):
                self._drop(place)
            self.changed.notify_all()

    def _drop(self, place: TopicPartition) -> None:
        buffer = self.by_partition.pop(place, None)
        if buffer is not None:
            buffer.gone = True
            buffer.frames.clear()
            buffer.current = None
            self._rotation.remove(buffer)

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self.changed.notify_all()

    # --- handing out -------------------------------------------------------------------------------------------------

    def take(self) -> DecodedBatch | None:
        """Return the next batch with messages to hand out, the partitions in rotation. The caller holds the lock."""
        for _ in range(len(self._rotation)):
            buffer = self._rotation[0]
            self._rotation.rotate(-1)
            if buffer.revoked or buffer.place in self.paused:
                continue
            if buffer.current is not None and buffer.current.next < len(buffer.current.records):
                return buffer.current
            while buffer.frames:
                buffer.current = self._decoded(buffer)
                if buffer.current is not None:
                    return buffer.current
        return None

    def _decoded(self, buffer: PartitionBuffer) -> DecodedBatch | None:
        """Return the partition's next batch; None if none of its messages is to be delivered."""
        frame = buffer.frames.popleft()
        was_full = buffer.buffered_bytes >= self._partition_bytes_max()
        buffer.buffered_bytes -= len(frame.body)
        if was_full:
            self._wake()
        head = _decode_head(frame.header)
        skipped = max(0, buffer.handed - head.base_offset)
        numbered = _with_offsets(head, frame.body, skipped)
        if any(record.expires_at_ms is not None for _, record in numbered):
            now_ms = self._wall_ms()
            numbered = [
                (offset, record)
                for offset, record in numbered
                if record.expires_at_ms is None or record.expires_at_ms > now_ms
            ]
        end = head.base_offset + head.count
        if numbered:
            return DecodedBatch(buffer, numbered, head.appended_at_ms, end)
        if buffer.done == buffer.handed:
            buffer.done = max(buffer.done, end)
        buffer.handed = max(buffer.handed, end)
        return None

    # --- fetching ----------------------------------------------------------------------------------------------------

    def _partition_bytes_max(self) -> int:
        return max(BUFFER_BYTES_MIN, self._prefetch_bytes // max(1, len(self.by_partition)))

    def _wake(self) -> None:
        """Wake or start a fetcher, as there may be something to fetch."""
        self.changed.notify_all()
        if self.by_partition and not self._idle and self._fetchers < FETCHERS_MAX and not self.closed:
            self._fetchers += 1
            self._waits.spawn("portalmq-fetcher", self._fetch)

    def _wanted(self, now: float) -> list[PartitionBuffer]:
        """Return what to fetch next: partitions with space in their buffers and one leader."""
        full = self._partition_bytes_max()
        found: list[PartitionBuffer] = []
        leader: Address | None = None
        for buffer in self._rotation:
            if buffer.in_flight or buffer.revoked or buffer.buffered_bytes >= full or buffer.again_at > now:
                continue
            if buffer.place in self.paused:
                continue
            of_buffer = self._transport.leader_of(buffer.place)
            if not found:
                leader = of_buffer
            if of_buffer == leader and len(found) < contract.FETCH_PARTITIONS_MAX:
                found.append(buffer)
        return found

    async def _fetch(self) -> None:
        """Run a fetcher, as long as there are partitions to read."""
        while True:
            with self.lock:
                buffers = self._wanted(time.monotonic())
                if not buffers:
                    if self.closed or not self.by_partition:
                        self._fetchers -= 1
                        return
                    self._idle += 1
                    try:
                        await self.changed.wait(AGAIN_S)
                    finally:
                        self._idle -= 1
                    continue
                for buffer in buffers:
                    buffer.in_flight = True
                if self._wanted(time.monotonic()):
                    self._wake()  # others have another leader
                asked = [contract.PartitionOffset(*buffer.place, buffer.position) for buffer in buffers]
                max_bytes = min(contract.FETCH_BYTES, self._partition_bytes_max() * len(buffers))
            await self._send_fetch(buffers, asked, max_bytes)

    async def _send_fetch(
        self, buffers: list[PartitionBuffer], asked: list[contract.PartitionOffset], max_bytes: int
    ) -> None:
        call = json_request(
            "POST",
            contract.FETCH_PATH,
            contract.FetchRequest(asked, max_bytes, round(FETCH_WAIT_S * 1000)),
            accept=contract.FRAMES_ACCEPTED,
            leader_of=buffers[0].place,
            wait_s=FETCH_WAIT_S,
        )
        try:
            answer = _decode_answer((await settled(self._transport.call(call, timeout_s=FETCH_TIMEOUT_S))).body)
        except (PortalMQError, msgspec.DecodeError) as error:
            if not self.closed:
                _log.debug("a fetch is tried again: %s", error)
            self._failed(buffers, AGAIN_S)
            return
        with self.lock:
            by_partition = {(each.topic, each.partition): each for each in answer.partitions}
            for buffer in buffers:
                buffer.in_flight = False
                fetched = by_partition.get(buffer.place)
                if fetched is not None and not buffer.gone:
                    self._arrived(buffer, fetched)
            self.changed.notify_all()

    def _failed(self, buffers: Iterable[PartitionBuffer], seconds: float) -> None:
        with self.lock:
            for buffer in buffers:
                buffer.in_flight = False
                buffer.again_at = time.monotonic() + seconds

    def _arrived(self, buffer: PartitionBuffer, fetched: contract.FetchedPartition) -> None:
        if fetched.error is not None:
            self._refused(buffer, fetched.error)
            return
        for frame in fetched.frames:
            if zlib.crc32(frame.body, zlib.crc32(frame.header)) != frame.crc:
                _log.warning("a batch of %s arrived with a wrong checksum, and is fetched again", buffer.place)
                buffer.again_at = time.monotonic() + AGAIN_S
                return
            buffer.frames.append(frame)
            buffer.buffered_bytes += len(frame.body)
            head = _decode_head(frame.header)
            buffer.position = head.base_offset + head.count
        buffer.position = max(buffer.position, fetched.next_offset)

    def _refused(self, buffer: PartitionBuffer, problem: dict[str, object]) -> None:
        code = problem.get("code")
        start, end = problem.get("log_start_offset"), problem.get("high_watermark")
        pause_s = AGAIN_S
        if code == "not_leader":
            if self._transport.leader_reported(buffer.place, problem.get("leader_url")):
                pause_s = 0.0
        elif code == "offset_out_of_range" and isinstance(start, int) and isinstance(end, int):
            goes_on = start if buffer.position < start else min(buffer.position, end)
            _log.warning(
                "%s-%d: offset %d is not there any more, reading goes on at %d", *buffer.place, buffer.position, goes_on
            )
            buffer.position = goes_on
        elif problem.get("status") != 503:
            pause_s = GONE_AGAIN_S  # the topic was deleted, for instance: a new assignment follows
        buffer.again_at = time.monotonic() + pause_s
