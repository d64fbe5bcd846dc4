"""Digests of parts of a log, to compare replicas: equal digests, equal batches.

A digest covers the bytes that the batches' checksums cover, after these were verified. Only what is below the high
watermark of a replica is the same on all of them.
"""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

from portalmq import wire
from portalmq.broker.storage.batch import frame_of
from portalmq.broker.storage.reading import ReadableLog

PART_BYTES = 1024 * 1024
PART_OFFSETS = 20_000
# So much is read at once: other reads wait meanwhile.
READ_BYTES = 128 * 1024
READ_OFFSETS = 1_000


class PartDigest(NamedTuple):
    """The batches from an offset up to `next_offset`, as a SHA-256 and, where asked for, one by one."""

    next_offset: int
    sha256: str
    batches: list[wire.BatchDigest]


def digest_of(log: ReadableLog, offset: int, below: int, *, lists: bool = False) -> PartDigest:
    """Return the digest of the next part from the batch on that contains `offset`. Raises CorruptBatch, OffsetPurged.
    Slow: not on the event loop."""
    total = sha256()
    listed: list[wire.BatchDigest] = []
    at, size, below = offset, 0, min(below, offset + PART_OFFSETS)
    while at < below and size < PART_BYTES:
        found = log.read_to_copy(at, max_bytes=READ_BYTES, below=min(below, at + READ_OFFSETS))
        if not found:
            break
        for batch in found:
            frame = frame_of(batch)
            own = sha256(frame.header)
            own.update(frame.body)
            total.update(own.digest())
            at, size = batch.end_offset, size + frame.size_bytes
            if lists:
                listed.append(
                    wire.BatchDigest(batch.base_offset, batch.count, batch.kind, batch.holes, own.hexdigest())
                )
    return PartDigest(at, total.hexdigest(), listed)
