"""`manifest.json`, the list of the sealed segments with their SHA-256, replaced atomically.

Its files are final: they may be copied, queried and read with immutable=1. A file that is missing from it is not
sealed, whatever its mode. So an entry is written last when a segment is sealed, and removed first when it is opened
again.

The file ends with the CRC-32 of what is before it: a changed digit in a time would let retention drop a segment early.
Earlier versions wrote none.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import astuple

from portalmq.broker.storage.errors import CorruptFile, WrongLog
from portalmq.broker.storage.files import sha256_of, write_atomically
from portalmq.broker.storage.schema import LogIdentity
from portalmq.broker.storage.segment import Segment

MANIFEST_NAME = "manifest.json"
_CRC = b'"crc":'


class SealedSegment(msgspec.Struct, frozen=True):
    """One sealed file with offsets [base_offset, end_offset). `newest_ms` is the latest append or delivery time in it.

    Compaction has removed `removed` of its messages. The last compaction was ordered at `compacted_at_ms`, reached
    `compacted_upto`, and removed tombstones older than `tombstones_before_ms`. `checked`: after it was sealed, all its
    batches matched their checksums, so its SHA-256 is not that of a file that was damaged before.
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
    checked: bool = False

    def is_compacted(self, upto: int, tombstones_before_ms: int) -> bool:
        return self.compacted_upto >= upto and self.tombstones_before_ms >= tombstones_before_ms


class _ManifestFile(LogIdentity, frozen=True):
    segments: list[SealedSegment]
    version: int = 1
    crc: int | msgspec.UnsetType = msgspec.UNSET


class Manifest:
    """The sealed segments of one log. Changes are durable on return; the entries are replaced as a whole."""

    def __init__(self, directory: Path, identity: LogIdentity, *, exists: bool = True) -> None:
        """Read the manifest, unless it is known not to exist; it is empty without a file. Raise WrongLog or
        StorageFault."""
        self._identity = identity
        self._directory = directory
        content = _content(self._path) if exists else None
        self._entries = {entry.base_offset: entry for entry in _decoded(content, self._path, identity)}
        # The checksum of the file as it was read or written last.
        self._crc = zlib.crc32(content or b"")
        self._file_has_more = False

    @property
    def _path(self) -> Path:
        return self._directory / MANIFEST_NAME

    @property
    def entries(self) -> list[SealedSegment]:
        """All entries, oldest first."""
        return sorted(self._entries.values(), key=lambda entry: entry.base_offset)

    def get(self, base_offset: int) -> SealedSegment | None:
        return self._entries.get(base_offset)

    def __contains__(self, base_offset: int) -> bool:
        return base_offset in self._entries

    def has(self, entry: SealedSegment) -> bool:
        """Return whether this very entry is in the manifest."""
        return self._entries.get(entry.base_offset) is entry

    def put(self, entries: Sequence[SealedSegment]) -> None:
        if entries:
            self._write({**self._entries, **{entry.base_offset: entry for entry in entries}})

    def remove(self, base_offsets: Iterable[int]) -> None:
        gone = set(base_offsets) & self._entries.keys()
        if gone or self._file_has_more:
            self._write({base: entry for base, entry in self._entries.items() if base not in gone})

    def forget_all_but(self, base_offsets: Collection[int]) -> None:
        """Drop entries without a file, left by an interrupted removal. The file of the manifest stays as it is until
        the next change, or the next `remove`: a new segment could begin where such an entry does."""
        kept = {base: entry for base, entry in self._entries.items() if base in base_offsets}
        self._file_has_more = self._file_has_more or len(kept) < len(self._entries)
        self._entries = kept

    def repair(self) -> bool:
        """Write the file again if it is not what was written or read last. Return whether it was not."""
        if zlib.crc32(_content(self._path) or b"") == self._crc:
            return False
        self._write(self._entries)
        return True

    def _write(self, entries: dict[int, SealedSegment]) -> None:
        segments = sorted(entries.values(), key=lambda entry: entry.base_offset)
        manifest = _ManifestFile(**self._identity.as_meta(), segments=segments)
        body = msgspec.json.format(msgspec.json.encode(manifest), indent=2).removesuffix(b"\n}") + b",\n  "
        content = b"%b%b %d\n}\n" % (body, _CRC, zlib.crc32(body))
        write_atomically(self._path, content)
        self._entries, self._crc = entries, zlib.crc32(content)
        self._file_has_more = False


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _decoded(content: bytes | None, path: Path, identity: LogIdentity) -> list[SealedSegment]:
    if content is None:
        return []
    try:
        manifest = msgspec.json.decode(content, type=_ManifestFile)
        if manifest.crc is not msgspec.UNSET and manifest.crc != zlib.crc32(content.rpartition(_CRC)[0]):
            raise msgspec.DecodeError("its checksum does not match")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{path} is damaged: {error}; delete it and the segments will be sealed again") from error
    found = LogIdentity(*astuple(manifest)[:4])
    if found != identity:
        raise WrongLog(f"{path} belongs to {found}, expected {identity}")
    return manifest.segments


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
