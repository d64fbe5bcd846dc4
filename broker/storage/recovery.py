"""Recovery, the first part of `Log.open`: remove leftovers, open every segment, check that they join without a hole.

A kill can come between any two steps of creating, sealing, truncating or dropping. Each step (log.py) states what it
leaves behind; here it is finished or undone. Anything that no interrupted step explains is a fault, not to be repaired
by guessing: a missing segment holds acknowledged messages.
"""

from __future__ import annotations

import os
from pathlib import Path

from portalmq.broker.storage.errors import CorruptFile
from portalmq.broker.storage.files import BESIDE, sync_directory
from portalmq.broker.storage.manifest import MANIFEST_NAME, Manifest
from portalmq.broker.storage.schema import LogIdentity
from portalmq.broker.storage.segment import COMPACTING, CREATING, KEYS_NAME, SEGMENT_NAME, Segment


def remove_leftovers(directory: Path, manifest: Manifest) -> None:
    """Remove what an interrupted creation, removal, sealing or manifest left behind; what is gone stays so."""
    names = {entry.name for entry in os.scandir(directory)}
    # A sealed segment stands alone: SQLite would undo the end of its sealing with a journal that is still there.
    with_others = names - {entry.file for entry in manifest.entries}
    for name in names:
        main, _, suffix = name.partition(".sqlite")
        orphan = suffix in BESIDE and f"{main}.sqlite" not in with_others
        draft = name.startswith(MANIFEST_NAME) and name.endswith(".new")
        unfinished = suffix.partition("-")[0] in (CREATING, COMPACTING) or name.startswith(KEYS_NAME)
        if unfinished or draft or (orphan and SEGMENT_NAME.match(f"{main}.sqlite")):
            os.unlink(directory / name)
    # A write-ahead log that a close removed must not come back: after a failed fsync it is older than the database.
    sync_directory(directory)


def open_log_files(directory: Path, identity: LogIdentity) -> tuple[list[Segment], Manifest]:
    """Return the segments of the log in `directory`, oldest first, and the manifest. Create the log if there is
    none."""
    manifest = Manifest(directory, identity)
    remove_leftovers(directory, manifest)
    return open_segments(directory, identity, manifest), manifest


def open_segments(directory: Path, identity: LogIdentity, manifest: Manifest) -> list[Segment]:
    """Return all segments of the log, oldest first. Entries of the manifest without a file are forgotten."""
    sealed = manifest.entries
    names = sorted(entry.name for entry in os.scandir(directory) if SEGMENT_NAME.match(entry.name))
    if not names:
        if sealed:
            raise CorruptFile(f"{directory} has a manifest and no segment: its files were removed; put them back")
        return [Segment.create(directory, identity, 0, 0, 0)]
    last_base_offset = int(names[-1][:20])
    if sealed and sealed[-1].base_offset >= last_base_offset:  # the active segment is never sealed
        raise CorruptFile(
            f"{directory} has no segment after {names[-1]}, but the manifest lists more: put the files back"
        )
    segments: list[Segment] = []
    try:
        for name in names:
            segments.append(_open_segment(directory / name, identity, manifest, last_base_offset))
        if _is_stray(segments):
            segments.pop().remove()
            sync_directory(directory)
        contiguous = _contiguous_end(directory, segments)
    except BaseException:
        for segment in segments:
            segment.close()
        raise
    manifest.forget_all_but({segment.base_offset for segment in contiguous})
    return contiguous


def _open_segment(path: Path, identity: LogIdentity, manifest: Manifest, last_base_offset: int) -> Segment:
    segment = Segment(path, identity)
    entry = manifest.get(segment.base_offset)
    if entry is None:
        if segment.base_offset == last_base_offset and segment.open_closed():
            return segment
        segment.open_live()
        if segment.base_offset != last_base_offset:
            segment.close()
        return segment
    if path.stat().st_size != entry.bytes:
        raise CorruptFile(f"{path} has {path.stat().st_size} bytes, the manifest says {entry.bytes}: restore the file")
    segment.settled = True
    segment.end_offset = entry.end_offset
    segment.messages_before, segment.messages_end = entry.messages_before, entry.messages_end
    segment.last_timestamp_ms = entry.last_timestamp_ms
    segment.bytes = entry.bytes
    segment.removed = entry.removed
    return segment


def _is_stray(segments: list[Segment]) -> bool:
    """Return whether the last segment is empty and the one before reaches beyond its start: a roll that an earlier
    release could not finish. No missing file looks like this, and a reset leaves a segment that begins at its own log
    start."""
    if len(segments) < 2:
        return False
    before, last = segments[-2:]
    return last.log_start_offset < last.base_offset == last.end_offset < before.end_offset


def _contiguous_end(directory: Path, segments: list[Segment]) -> list[Segment]:
    """Return the segments that join without a hole up to the last. Only segments that were being dropped may be before
    a hole."""
    for position in range(len(segments) - 1, 0, -1):
        before, after = segments[position - 1], segments[position]
        if before.end_offset == after.base_offset and before.messages_end == after.messages_before:
            continue
        if after.base_offset > segments[-1].log_start_offset:
            raise CorruptFile(
                f"{directory}: {before.path.name} ends at offset {before.end_offset} and {after.path.name} follows;"
                " a segment is missing: put it back"
            )
        for segment in segments[:position]:
            segment.remove()
        sync_directory(directory)
        return segments[position:]
    return segments
