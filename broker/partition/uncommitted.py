"""What was appended and is not committed yet: the calls that wait for it, what becomes readable, which ids it has.

high watermark ....[batch]....[batch]....[batch].... next offset
                   each with a waiter, answered in the order of the log
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterable

from portalmq.broker.partition.writer import Pending
from portalmq.broker.storage.batch import Batch, BatchKind
from portalmq.errors import PortalMQError

# Records that take messages from consumers: not answered while an earlier leader may still hand those messages out.
SETTLEMENT_KINDS = frozenset(
    {
        BatchKind.ACK,
        BatchKind.NACK,
        BatchKind.DEAD,
        BatchKind.COMMIT,
        BatchKind.DROP,
        BatchKind.CANCEL,
        BatchKind.RESCHEDULE,
        BatchKind.PURGE,
        BatchKind.GROUP_END,
        BatchKind.PAUSE,
    }
)

StoredAt = tuple[int, bytes | None, int]


# Of all that wait for nothing: an empty deque of its own takes 0.7 KB, in each of thousands of idle replicas twice.
_NO_ENDS: deque[tuple[int, int]] = deque(maxlen=0)
_NO_PENDING: deque[Pending] = deque(maxlen=0)


class Uncommitted:
    """`ends` are the ends of the message batches above the high watermark, rising, with their append times (0: not
    known), waited for or not. `bytes` is what the batches that are waited for occupy in memory. `unsettled` are
    committed, and their answers wait for the lease of an earlier leader to end (rule 14)."""

    def __init__(self) -> None:
        self.bytes = 0
        self.ends = _NO_ENDS
        self.unsettled: list[Pending] = []
        self._pending = _NO_PENDING
        self._repeats: list[tuple[int, Pending]] = []
        self._ids: dict[bytes, StoredAt] = {}
        self._sought: set[bytes] = set()

    @property
    def records(self) -> int:
        """Return how many batches and control records are waited for."""
        return len(self._pending)

    def add(self, pending: Pending) -> None:
        """Add a batch that has its offsets."""
        if self._pending is _NO_PENDING:
            self._pending = deque()
        self._pending.append(pending)
        self.bytes += pending.size_bytes
        if pending.batch.kind == BatchKind.MESSAGES:
            self.add_end(pending.batch.end_offset, pending.appended_at_ms)

    def add_end(self, end_offset: int, appended_at_ms: int) -> None:
        """Add the end of a batch of messages, which no call may wait for."""
        if self.ends is _NO_ENDS:
            self.ends = deque()
        self.ends.append((end_offset, appended_at_ms))

    def add_repeat(self, end: int, pending: Pending) -> None:
        """Let a call wait for what another call has appended, up to `end`."""
        self._repeats.append((end, pending))

    def below(self, end: int, kind: BatchKind = BatchKind.MESSAGES) -> Pending:
        """Return what is answered when everything below `end` is committed, as a record of this kind would be."""
        pending = Pending(Batch(end - 1, 1, 0, kind, 0, 0))
        self.add_repeat(end, pending)
        return pending

    def settle(self) -> None:
        """Answer what waits for earlier leaders: none of them hands anything out any more."""
        unsettled, self.unsettled = self.unsettled, []
        for pending in unsettled:
            pending.finish()

    def advance(self, high_watermark: int, readable_end: int, *, settles: bool = True) -> int:
        """Answer all calls below the high watermark. Return where the readable messages end now."""
        while self.ends and self.ends[0][0] <= high_watermark:
            readable_end = self.ends.popleft()[0]
        while self._pending and self._pending[0].batch.end_offset <= high_watermark:
            pending = self._pending.popleft()
            self.bytes -= pending.size_bytes
            self._committed(pending, settles=settles)
        if self._repeats:
            repeats, self._repeats = self._repeats, []
            for end, repeat in repeats:
                if end <= high_watermark:
                    self._committed(repeat, settles=settles)
                else:
                    self._repeats.append((end, repeat))
        return readable_end

    def _committed(self, pending: Pending, *, settles: bool) -> None:
        if settles or pending.batch.kind not in SETTLEMENT_KINDS:
            pending.finish()
        else:
            self.unsettled.append(pending)

    def first_message_ms(self) -> int | None:
        """Return when the oldest uncommitted messages were appended; None when all are committed."""
        return self.ends[0][1] if self.ends else None

    def fail(self, error: PortalMQError) -> None:
        """Raise `error` in all waiting calls. Their records may be in the log and stay there. So the ids of those on
        their way to the disk are kept, in case this replica leads again before they are written."""
        pending, self._pending = self._pending, _NO_PENDING
        repeats, self._repeats = self._repeats, []
        unsettled, self.unsettled = self.unsettled, []
        self.bytes = 0
        for each in (*unsettled, *pending, *(repeat for _, repeat in repeats)):
            each.finish(error)

    def refuse(self, refused: Container[Pending], error: PortalMQError) -> None:
        """Remove batches that did not reach the log. Calls that repeated one of them, or wait for what is in the log,
        get `error`, whose outcome is unknown, and may ask again."""
        self._pending = deque(pending for pending in self._pending if pending not in refused)
        self.bytes = sum([pending.size_bytes for pending in self._pending])
        repeats, self._repeats = self._repeats, []
        self._ids.clear()
        for _, pending in repeats:
            pending.finish(error)

    # --- message ids -------------------------------------------------------------------------------------------------

    def remember_ids(self, pending: Pending) -> None:
        for offset, record in enumerate(pending.batch.records, pending.base_offset):
            if record.message_id is not None:
                self._ids[record.message_id] = (offset, record.body_hash, pending.appended_at_ms)

    def place_of(self, message_id: bytes) -> StoredAt | None:
        return self._ids.get(message_id)

    def places_of(self, message_ids: Iterable[bytes]) -> dict[bytes, StoredAt]:
        """Return the places of those ids that are here, in their order."""
        if not self._ids:
            return {}
        return {message_id: self._ids[message_id] for message_id in message_ids if message_id in self._ids}

    def seek(self, message_ids: Collection[bytes]) -> None:
        """Reserve ids for a call that looks for them in the log and appends the missing ones. Until `sought` no other
        call does so."""
        self._sought.update(message_ids)

    def sought(self, message_ids: Collection[bytes]) -> None:
        self._sought.difference_update(message_ids)

    def is_sought(self, message_id: bytes) -> bool:
        """Whether a call is looking for this id in the log, and appends its message if it is not there."""
        return message_id in self._sought

    def is_any_sought(self, message_ids: Iterable[bytes]) -> bool:
        return not self._sought.isdisjoint(message_ids)

    def written(self, end_offset: int) -> None:
        """Note that the log itself has everything below this offset now."""
        if self._ids:
            self._ids = {key: place for key, place in self._ids.items() if place[0] >= end_offset}
