"""Converts fetched batches from the wire format to Arrow, with the same columns as the files.

    frames --decode--> records, a list --column by column--> Arrow batches of bounded size

It creates one Python object a message (MessagePack has no columns); a column is one list of one field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from portalmq.spark.columns import MESSAGES_TABLE
from portalmq.spark.origin import PartitionLog
from portalmq.stream_wire import Frame, FrameHead, FrameRecord, records_of_compressed

BATCH_ROWS = 65_536
BATCH_BYTES = 16 * 1024 * 1024
MESSAGES = 0  # the kind of a batch of messages

_decode_head = msgspec.msgpack.Decoder(FrameHead).decode
_decode_records = msgspec.msgpack.Decoder(list[FrameRecord]).decode
_decode_records_with_holes = msgspec.msgpack.Decoder(list[FrameRecord | None]).decode


def batches_of(
    frames: Iterable[Frame], log: PartitionLog, start: int, end: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of the frames at offsets [start, end), in order. Callers verify the checksums first. Raises
    msgspec.MsgspecError for malformed frames."""
    rows = _Rows(log, columns)
    for frame in frames:
        rows.add(frame, start, end)
        if len(rows.records) >= BATCH_ROWS or rows.bytes >= BATCH_BYTES:
            yield rows.taken()
    if rows.records:
        yield rows.taken()


class _Rows:
    """The content of the next Arrow batch. `heads` and `counts` belong to the frames of the records."""

    def __init__(self, log: PartitionLog, columns: Sequence[str]) -> None:
        self._log = log
        self._schema = MESSAGES_TABLE.arrow_schema(columns)
        self._empty()

    def _empty(self) -> None:
        self.records: list[FrameRecord] = []
        self.bytes = 0
        self._heads: list[FrameHead] = []
        self._counts: list[int] = []
        self._offsets: list[Any] = []

    def add(self, frame: Frame, start: int, end: int) -> None:
        head = _decode_head(frame.header)
        low, high = max(start, head.base_offset), min(end, head.base_offset + head.count)
        if head.kind != MESSAGES or low >= high:
            return
        offsets = np.arange(low, high)
        try:
            found = records_of_compressed(head, frame.body) if head.codec else _decode_records(frame.body)
            records = found[low - head.base_offset : high - head.base_offset]
        except msgspec.ValidationError:
            # nil marks a message that compaction has removed.
            holed = _decode_records_with_holes(frame.body)[low - head.base_offset : high - head.base_offset]
            offsets = offsets[[record is not None for record in holed]]
            records = [record for record in holed if record is not None]
        self.records += records
        self.bytes += sum([len(record.value) for record in records]) if head.codec else len(frame.body)
        self._heads.append(head)
        self._counts.append(len(records))
        self._offsets.append(offsets)

    def taken(self) -> pa.RecordBatch:
        offsets = np.concatenate(self._offsets)
        arrays = [self._column(field, offsets) for field in self._schema]
        self._empty()
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _column(self, field: pa.Field, offsets: Any) -> pa.Array:
        name, kind, records = field.name, field.type, self.records
        if name in {"topic", "partition"}:
            return _constant(getattr(self._log, name), len(records), kind)
        if name == "offset":
            return pa.array(offsets, kind)
        if name in {"value", "key", "priority"}:
            return pa.array(list(map(attrgetter(name), records)), kind)
        if name == "content_type":
            first = records[0].content_type if records else ""
            names = [record.content_type for record in records]
            same = names.count(first) == len(names)
            return _constant(first, len(names), kind) if same else pa.array(names, kind)
        if name == "headers":
            return _headers([record.headers for record in records], kind)
        if name in {"deliver_at", "expires_at"}:
            return _times(list(map(attrgetter(f"{name}_ms"), records)), kind)
        return self._of_batch(name, kind, offsets)

    def _of_batch(self, name: str, kind: pa.DataType, offsets: Any) -> pa.Array:
        """Return a column that has one value a batch."""
        if name in {"timestamp", "appended_at"}:
            return pa.array(self._repeated([head.appended_at_ms * 1000 for head in self._heads]), kind)
        if name == "leader_epoch":
            return pa.array(self._repeated([head.leader_epoch for head in self._heads]), kind)
        producers = self._repeated([head.producer_id for head in self._heads])
        nothing = producers < 0
        if name == "producer_id":
            return pa.array(producers, kind, mask=nothing)
        assert name == "sequence", name
        # The head has the sequence of the first message; those after it count on, removed ones included.
        first = self._repeated([head.sequence - head.base_offset for head in self._heads])
        return pa.array(first + offsets, kind, mask=nothing)

    def _repeated(self, of_batches: Sequence[int]) -> Any:
        return np.repeat(np.array(of_batches, np.int64), self._counts)


def _constant(value: Any, size: int, kind: pa.DataType) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), size)


def _headers(headers: list[dict[str, str] | None], kind: pa.DataType) -> pa.Array:
    if headers.count(None) == len(headers):
        return pa.nulls(len(headers), kind)
    return pa.array([None if each is None else list(each.items()) for each in headers], kind)


def _times(times_ms: list[int | None], kind: pa.DataType) -> pa.Array:
    if times_ms.count(None) == len(times_ms):
        return pa.nulls(len(times_ms), kind)
    return pc.multiply(pa.array(times_ms, pa.int64()), 1000).cast(kind)
