"""Batches that were appended or read lately, so that caught-up consumers are served from memory.

One cache a broker, bounded in bytes over all partitions; the least recently used batch goes first. Whatever it holds
has been checked: it was built here, or its CRC was verified when it was read.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict

from portalmq.broker.storage.batch import Batch, Kind

BATCH_COST_BYTES = 400
RECORD_COST_BYTES = 250


def cost_bytes(batch: Batch, payload_bytes: int) -> int:
    """About what the batch holds in memory."""
    if batch.kind != Kind.MESSAGES:
        return BATCH_COST_BYTES + payload_bytes
    return BATCH_COST_BYTES + payload_bytes + batch.count * RECORD_COST_BYTES


def payload_bytes(batch: Batch) -> int:
    return len(batch.body) + sum([len(record.value) for record in batch.records])


class BatchCache:
    """Keys are a partition's number in this process and a base offset. Invariant: 0 <= bytes <= bytes_max."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._batches: OrderedDict[tuple[int, int], tuple[Batch, int]] = OrderedDict()
        self._bases: dict[int, list[int]] = {}

    def put(self, partition: int, batch: Batch, size_bytes: int) -> None:
        """Keep a batch whose payloads have `size_bytes` together."""
        key = (partition, batch.base_offset)
        if key in self._batches:
            self._batches.move_to_end(key)
            return
        cost = cost_bytes(batch, size_bytes)
        if cost > self.bytes_max:
            return
        self._batches[key] = (batch, cost)
        bases = self._bases.setdefault(partition, [])
        if bases and bases[-1] > batch.base_offset:
            insort(bases, batch.base_offset)
        else:
            bases.append(batch.base_offset)
        self.bytes += cost
        while self.bytes > self.bytes_max:
            (owner, base_offset), (_, freed) = self._batches.popitem(last=False)
            self.bytes -= freed
            self._forget(owner, base_offset)

    def find(self, partition: int, offset: int) -> Batch | None:
        """The batch that holds `offset`, if it is here."""
        bases = self._bases.get(partition)
        if not bases:
            return None
        at = bisect_right(bases, offset) - 1
        if at < 0:
            return None
        key = (partition, bases[at])
        batch = self._batches[key][0]
        if offset >= batch.end_offset:
            return None
        self._batches.move_to_end(key)
        return batch

    def drop(self, partition: int) -> None:
        """Forget all batches of a partition."""
        for base_offset in self._bases.pop(partition, []):
            self.bytes -= self._batches.pop((partition, base_offset))[1]

    def _forget(self, partition: int, base_offset: int) -> None:
        bases = self._bases[partition]
        if bases[0] == base_offset:
            del bases[0]
        else:
            del bases[bisect_right(bases, base_offset) - 1]
        if not bases:
            del self._bases[partition]
