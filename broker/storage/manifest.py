"""`manifest.json`, the list of the sealed segments with their SHA-256, replaced atomically.

Its files are final: they may be copied, queried and read with immutable=1. A file that is missing from it is not
sealed, whatever its mode. So an entry is written last when a segment is sealed, and removed first when it is opened
again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from portalmq.broker.storage.errors import CorruptFile, WrongLog
from portalmq.broker.storage.files import sha256_of, write_atomically
from portalmq.broker.storage.schema import LogIdentity
from portalmq.broker.storage.segment import Segment

MANIFEST_NAME = "manifest.json"


class SealedSegment(msgspec.Struct, frozen=True):
    """One sealed file with offsets [base_offset, end_offset). `newest_ms` is the latest append or delivery time in it.

    Compaction has removed `removed` of its messages. The last compaction was ordered at `compacted_at_ms`, reached
    `compacted_upto`, and removed tombstones older than `tombstones_before_ms`.
    """

    file: str
    base_offset: int
    end_offset: int
    messages_before: int
    messages_end: int
    last_timestamp_ms: int
    newest_ms: int
    bytes: int
    sha256: str
    removed: int = 0
    compacted_upto: int = 0
    tombstones_before_ms: int = 0
    compacted_at_ms: int = 0

    def is_compacted(self, upto: int, tombstones_before_ms: int) -> bool:
        return self.compacted_upto >= upto and self.tombstones_before_ms >= tombstones_before_ms


class _Manifest(msgspec.Struct, frozen=True):
    cluster_id: str
    topic: str
    topic_id: str
    partition: int
    segments: list[SealedSegment]
    version: int = 1


def read_manifest(directory: Path, identity: LogIdentity) -> dict[int, SealedSegment]:
    """Return the sealed segments by base offset; none without a manifest. Raise WrongLog or StorageFault."""
    path = directory / MANIFEST_NAME
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=_Manifest)
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise CorruptFile(f"{path} is damaged: {error}; delete it and the segments will be sealed again") from error
    found = LogIdentity(manifest.cluster_id, manifest.topic, manifest.topic_id, manifest.partition)
    if found != identity:
        raise WrongLog(f"{path} belongs to {found}, expected {identity}")
    return {sealed.base_offset: sealed for sealed in manifest.segments}


def write_manifest(directory: Path, identity: LogIdentity, segments: Iterable[SealedSegment]) -> None:
    manifest = _Manifest(
        cluster_id=identity.cluster_id,
        topic=identity.topic,
        topic_id=identity.topic_id,
        partition=identity.partition,
        segments=sorted(segments, key=lambda sealed: sealed.base_offset),
    )
    write_atomically(directory / MANIFEST_NAME, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def entry_of(segment: Segment) -> SealedSegment:
    """Return the entry of a settled segment. Reads the whole file."""
    return SealedSegment(
        file=segment.path.name,
        base_offset=segment.base_offset,
        end_offset=segment.end_offset,
        messages_before=segment.messages_before,
        messages_end=segment.messages_end,
        last_timestamp_ms=segment.last_timestamp_ms,
        newest_ms=segment.newest_ms(),
        bytes=segment.bytes,
        sha256=sha256_of(segment.path),
        removed=segment.removed,
    )
