"""Batches whose values are compressed."""

from __future__ import annotations

from typing import Any

import msgspec

from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.storage.batch import Batch, Record, checksum
from portalmq.compression import compressed, zstd


def readings(count: int, start: int = 0) -> list[bytes]:
    return [b'{"sensor": "sensor-%d", "celsius": 21.5}' % number for number in range(start, start + count)]


def reading_records(count: int, start: int = 0, **more: Any) -> list[Record]:
    return [Record(value, "application/json", **more) for value in readings(count, start)]


def data_of(records: list[Record]) -> bytes:
    """Return what a producer sends for the values of these records."""
    data = compressed([record.value for record in records])
    assert data is not None, "too small to be compressed"
    return data


def with_compressed_values(batch: Batch) -> Batch:
    """Return the batch as it is when its values came compressed, however little that saves."""
    plain = msgspec.msgpack.encode([record.value for record in batch.records])
    packed = msgspec.structs.replace(batch, compressed=zstd.compress(plain))
    return msgspec.structs.replace(packed, crc=checksum(packed))


def compressed_request(records: list[Record], **more: Any) -> ProduceRequest:
    return ProduceRequest(records, compressed=data_of(records), **more)
