"""Recently appended or read batches, so that caught-up consumers and followers are served from memory.

One cache a broker, bounded in bytes over all partitions; the least recently used batch is dropped first. Everything in
it has been verified: it was built here, or its CRC was checked when it was read.

`frames` are the same batches in the format for followers. They have a budget of their own: a replica that is rebuilt
reads its whole partition, which must not evict what consumers are about to read.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from typing import Generic, TypeVar

from portalmq.broker.storage.batch import Batch, BatchFrame, BatchKind

BATCH_COST_BYTES = 400
RECORD_COST_BYTES = 250
FRAME_COST_BYTES = 500
FRAME_BYTES_MAX = 16 * 1024 * 1024

T = TypeVar("T")


def cost_bytes(batch: Batch, payload_bytes: int) -> int:
    """Return about how much memory the batch occupies."""
    if batch.kind != BatchKind.MESSAGES:
        return BATCH_COST_BYTES + payload_bytes
    return BATCH_COST_BYTES + payload_bytes + batch.count * RECORD_COST_BYTES


def payload_bytes(batch: Batch) -> int:
    return len(batch.body) + sum([len(record.value) for record in batch.records])


class RangeCache(Generic[T]):
    """Values by a partition's number in this process and the offsets [base, end) that they cover.

    Invariant: 0 <= bytes <= bytes_max.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._values: OrderedDict[tuple[int, int], tuple[T, int, int]] = OrderedDict()
        self._bases: dict[int, list[int]] = {}

    def keep(self, partition: int, base_offset: int, end_offset: int, value: T, cost: int) -> None:
        key = (partition, base_offset)
        if key in self._values:
            self._values.move_to_end(key)
            return
        if cost > self.bytes_max:
            return
        self._values[key] = (value, end_offset, cost)
        bases = self._bases.setdefault(partition, [])
        if bases and bases[-1] > base_offset:
            insort(bases, base_offset)
        else:
            bases.append(base_offset)
        self.bytes += cost
        while self.bytes > self.bytes_max:
            (owner, oldest), (_, _, freed) = self._values.popitem(last=False)
            self.bytes -= freed
            self._forget(owner, oldest)

    def find(self, partition: int, offset: int) -> T | None:
        """Return the value that covers `offset`, if it is here."""
        bases = self._bases.get(partition)
        if not bases:
            return None
        at = bisect_right(bases, offset) - 1
        if at < 0:
            return None
        key = (partition, bases[at])
        value, end_offset, _ = self._values[key]
        if offset >= end_offset:
            return None
        self._values.move_to_end(key)
        return value

    def drop(self, partition: int) -> None:
        """Drop all values of a partition."""
        for base_offset in self._bases.pop(partition, []):
            self.bytes -= self._values.pop((partition, base_offset))[2]

    def _forget(self, partition: int, base_offset: int) -> None:
        bases = self._bases[partition]
        if bases[0] == base_offset:
            del bases[0]
        else:
            del bases[bisect_right(bases, base_offset) - 1]
        if not bases:
            del self._bases[partition]


class BatchCache(RangeCache[Batch]):
    """The batches, and beside them the frames."""

    def __init__(self, bytes_max: int, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        super().__init__(bytes_max)
        self.frames: RangeCache[tuple[BatchFrame, int]] = RangeCache(frame_bytes_max)

    def put(self, partition: int, batch: Batch, size_bytes: int) -> None:
        """Keep a batch whose payloads have `size_bytes` in total."""
        self.keep(partition, batch.base_offset, batch.end_offset, batch, cost_bytes(batch, size_bytes))

    def put_frame(self, partition: int, base_offset: int, end_offset: int, frame: BatchFrame) -> None:
        """Keep a batch in the format for followers, together with its end offset."""
        cost = FRAME_COST_BYTES + frame.size_bytes
        self.frames.keep(partition, base_offset, end_offset, (frame, end_offset), cost)

    def drop(self, partition: int) -> None:
        super().drop(partition)
        self.frames.drop(partition)
