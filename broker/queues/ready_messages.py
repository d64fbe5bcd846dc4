"""The readable messages of a partition, lane by lane, from which a group selects.

Lane 0 is read in whole pieces of batches, from the cache when consumers keep up. The other lanes are read as offsets
from the indexes of the segment files; payloads are read after the selection. A partition with plain messages only has
no other lanes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from hashlib import blake2b
from itertools import groupby, islice
from typing import NamedTuple

from portalmq.broker.core.queue.selection import NEVER_MS, Run
from portalmq.broker.partition.answer_size import size_of, sizes_of
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.reader import BatchSlice
from portalmq.broker.storage.batch import Batch, Record

# The most messages of lane 0 that one selection examines.
LOOK_MAX = 20_000
# Rows of a lane that one selection looks at: each costs more than a message of a batch.
LANE_ROWS_MAX = 4_000
# The cost of a message that is examined for its key, as a multiple of another one's.
BY_KEY = 20
# The most messages of other lanes that are skipped at a time, within a file.
SKIP_MAX = 100_000
SKIP_COST = 5_000
KNOWN_MAX = 10_000


class BatchSummary(NamedTuple):
    """A summary of a batch: True for `is_plain` when its messages have no priority, delay or expiry (nor key, for order
    by key); and its bytes."""

    is_plain: bool
    size: int


class ReadyMessages:
    """Iterates over readable messages.

    Invariant: from `_looked_from` to `_looked` lane 0 holds nothing to deliver. A new leader examines it again.
    Earlier offsets are not covered: a cursor goes back there when the disk refuses its record.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self.by_key = False
        self._looked_from = self._looked = 0
        # Summaries of batches by base offset and epoch.
        self._known: dict[tuple[int, int], BatchSummary] = {}

    def place(self, offset: int) -> int:
        """Return the offset from which lane 0 is examined, for a cursor at `offset`."""
        return self._looked if self._looked_from <= offset < self._looked else offset

    def note_looked(self, start: int, end: int) -> None:
        """Remember that lane 0 holds nothing to deliver from `start` to `end`."""
        if not self._looked_from <= start <= self._looked:
            self._looked_from = start
            self._looked = end
        self._looked = max(self._looked, end)

    def lanes(self) -> Collection[int]:
        return self._partition.log.lanes.present

    def fresh(self, lane: int, due_ms: int, offset: int) -> Iterator[Run]:
        if lane == 0:
            return self._lane_0(self.place(offset))
        rows = self._partition.log.lanes.after(lane, due_ms, offset, self._partition.readable_end)
        return (
            Run(each, each + 1, None, due_ms, NEVER_MS if expires_at_ms is None else expires_at_ms, self._key(key))
            for due_ms, each, expires_at_ms, key in islice(rows, LANE_ROWS_MAX)
        )

    def _lane_0(self, offset: int) -> Iterator[Run]:
        end, lanes = self._partition.readable_end, self._partition.log.lanes
        left, lane = LOOK_MAX, 0 if lanes.present else None
        while offset < end and left > 0:
            is_other = False
            for piece in self._partition.reader.pieces(offset, end, LOOK_MAX):
                part, cost = self._within(piece, left) if self.by_key else (piece, piece.end - piece.start)
                is_other = True
                for run in self._runs(part, lane):
                    is_other = False
                    yield run
                offset, left = part.end, left - cost
                if lane is not None:
                    yield Run(offset, offset)
                if is_other or left <= 0:
                    break
            if not is_other:
                return
            # After a batch of other lanes there are usually more of them, which the index skips faster.
            offset = lanes.next_plain(offset, end, SKIP_MAX, any_priority=self.by_key)
            left -= SKIP_COST
            yield Run(offset, offset)

    def _within(self, piece: BatchSlice, left: int) -> tuple[BatchSlice, int]:
        """Return the part of a piece whose keys may be examined within the budget `left`, and its cost."""
        size = piece.end - piece.start
        if self._known_of(piece.batch).is_plain:
            return piece, size
        if size * BY_KEY <= left:
            return piece, size * BY_KEY
        return BatchSlice(piece.batch, piece.start, min(piece.end, piece.start + max(1, left // BY_KEY))), left

    def returned(self, start: int, end: int) -> Iterator[Run]:
        for piece in self._partition.reader.pieces(start, end, end - start):
            yield from self._runs(piece, None)

    def _runs(self, piece: BatchSlice, lane: int | None) -> Iterator[Run]:
        """Yield runs of similar messages of a piece; with a `lane`, only those of lane 0."""
        known = self._known_of(piece.batch)
        if known.is_plain:
            # The size is a share of the batch's bytes: the exact one would cost each receive a walk over the batch.
            size = known.size * (piece.end - piece.start) // max(1, len(piece.batch.records))
            yield Run(piece.start, piece.end, piece, size=size)
            return
        appended_at_ms = piece.batch.appended_at_ms
        for (is_wanted, expires_at_ms, key), run in groupby(
            enumerate(piece.records(), piece.start),
            key=lambda each: (
                lane is None or self._is_of_lane_0(each[1], appended_at_ms),
                NEVER_MS if each[1].expires_at_ms is None else each[1].expires_at_ms,
                self._key(each[1].key),
            ),
        ):
            rows = list(run)
            if not is_wanted:
                continue
            if key:
                for offset, record in rows:
                    yield Run(offset, offset + 1, piece, 0, expires_at_ms, key, size_of(record))
            else:
                size = sizes_of([record for _, record in rows])
                yield Run(rows[0][0], rows[-1][0] + 1, piece, 0, expires_at_ms, 0, size)

    def _is_of_lane_0(self, record: Record, appended_at_ms: int) -> bool:
        if record.deliver_at_ms is not None and record.deliver_at_ms > appended_at_ms:
            return False
        return self.by_key or record.priority == 0

    def _key(self, key: bytes | None) -> int:
        return key_hash(key) if self.by_key else 0

    def size_of(self, batch: Batch) -> int:
        """Return the bytes of all messages of a batch."""
        return self._known_of(batch).size

    def _known_of(self, batch: Batch) -> BatchSummary:
        mark = (batch.base_offset, batch.leader_epoch)
        known = self._known.get(mark)
        if known is None:
            plain = self._partition.log.lanes.are_plain or all(
                record.priority == 0 and record.deliver_at_ms is None and record.expires_at_ms is None
                for record in batch.records
            )
            if self.by_key:
                plain = plain and all(record.key is None for record in batch.records)
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            known = self._known[mark] = BatchSummary(plain, sizes_of(batch.records))
        return known


def key_hash(key: bytes | None) -> int:
    """Return a 64-bit hash of a key, never 0; 0 for no key."""
    if key is None:
        return 0
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") or 1
