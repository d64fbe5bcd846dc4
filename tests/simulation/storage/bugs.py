"""Bugs of storage, planted one at a time: crash images and failing disks must find each.

python -m simulation.storage.bugs
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import apsw
from simulation.storage.crashes import crash
from simulation.storage.failures import failures
from simulation.storage.subjects import SUBJECTS, Subject

from portalmq.broker.storage import compaction, disk, epochs, files, log, segment, state, wal
from portalmq.broker.storage.epochs import EpochFile
from portalmq.broker.storage.files import unlink_database
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.manifest import Manifest
from portalmq.broker.storage.segment import Segment
from portalmq.broker.storage.state import StateFile
from portalmq.control_plane import standalone
from portalmq.system import sync

Patch = tuple[Any, str, Any]
Hunt = Callable[[Subject, Path, str], Iterator[tuple[str, str | None]]]
# Name -> (what to replace, the stage that shows the bug, how).
BUGS: dict[str, tuple[Callable[[], list[Patch]], str, Hunt]] = {}


def _crash(subject: Subject, root: Path, stage: str) -> Iterator[tuple[str, str | None]]:
    return crash(subject, root, seed=1, each=3, only=[stage])


def _fails(kind: str) -> Hunt:
    return lambda subject, root, stage: failures(subject, root, kinds=[kind], only=[stage])


def bug(stage: str, hunt: Hunt) -> Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]:
    """Register a bug that shows in this stage, at the latest, in crash images or when the disk fails."""

    def register(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        BUGS[make.__name__.replace("_", " ")] = (make, stage, hunt)
        return make

    return register


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug for the block."""
    with ExitStack() as stack:
        for owner, target, replacement in BUGS[name][0]():
            stack.enter_context(patch.object(owner, target, replacement))
        yield


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _sync_directories_only(descriptor: int) -> None:
    if os.path.isdir(f"/dev/fd/{descriptor}") or os.path.isdir(f"/proc/self/fd/{descriptor}"):
        sync(descriptor)


def _after(owner: Any, name: str, then: Callable[..., None]) -> Patch:
    original = getattr(owner, name)

    def changed(self: Any, *arguments: Any, **more: Any) -> Any:
        result = original(self, *arguments, **more)
        then(self, *arguments, **more)
        return result

    return owner, name, changed


def _unsynced(owner: Any, name: str) -> Patch:
    """Let a method of a segment run with its connection not syncing."""
    original = getattr(owner, name)

    def changed(self: Any, *arguments: Any, **more: Any) -> Any:
        self.writer.execute("PRAGMA synchronous = OFF")
        try:
            return original(self, *arguments, **more)
        finally:
            if self.is_live:
                self.writer.execute("PRAGMA synchronous = FULL")

    return owner, name, changed


@bug("begin", _crash)
def an_append_is_acknowledged_before_its_fsync() -> list[Patch]:
    return [_after(Segment, "_set_up", lambda _, writer: writer.execute("PRAGMA synchronous = NORMAL"))]


@bug("seal", _crash)
def the_manifest_is_renamed_before_its_fsync() -> list[Patch]:
    return [(files, "sync", _sync_directories_only)]


@bug("begin", _crash)
def a_segment_is_renamed_before_its_fsync() -> list[Patch]:
    return [(segment, "sync", _sync_directories_only)]


@bug("compact", _crash)
def a_compacted_file_is_renamed_before_its_fsync() -> list[Patch]:
    return [(compaction, "sync", _nothing)]


@bug("seal", _crash)
def the_manifest_lists_a_segment_that_is_not_synced() -> list[Patch]:
    return [_unsynced(Segment, "settle"), _unsynced(Segment, "checkpoint")]


@bug("begin", _crash)
def an_epoch_is_not_fsynced() -> list[Patch]:
    original = EpochFile._open

    def unsynced(self: EpochFile) -> apsw.Connection:
        connection = original(self)
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    return [(EpochFile, "_open", unsynced)]


@bug("begin", _crash)
def a_checkpoint_drops_the_write_ahead_log_early() -> list[Patch]:
    original = wal.make_durable

    def early(connection: apsw.Connection) -> None:
        connection.execute("PRAGMA synchronous = OFF")
        original(connection)
        connection.execute("PRAGMA synchronous = FULL")

    return [(each, "make_durable", early) for each in (segment, state, epochs)]


@bug("write-ahead log", _crash)
def an_open_claims_what_is_not_synced() -> list[Patch]:
    return [(each, "make_durable", _nothing) for each in (segment, state, epochs)]


@bug("begin", _crash)
def a_new_directory_is_not_synced() -> list[Patch]:
    return [
        (files, "sync_directory", _nothing),
        (log, "make_directory", lambda path: path.mkdir(parents=True, exist_ok=True)),
    ]


@bug("truncate what is sealed", _crash)
def a_truncation_removes_the_oldest_segment_first() -> list[Patch]:
    original = Log._remove_last

    def oldest_first(self: Log, count: int) -> None:
        gone = self._segments[len(self._segments) - count :]
        for each in gone[:-1]:
            unlink_database(each.path)
            files.sync_directory(self.directory)
        original(self, count)

    return [(Log, "_remove_last", oldest_first)]


@bug("retention", _crash)
def segments_are_dropped_before_the_log_start_is_on_disk() -> list[Patch]:
    return [_unsynced(Segment, "set_log_start")]


@bug("truncate", _crash)
def a_cut_is_not_synced() -> list[Patch]:
    return [(segment, "sync_wal", _nothing)]


@bug("truncate what is sealed", _crash)
def the_manifest_forgets_a_segment_after_it_is_changed() -> list[Patch]:
    return [(Manifest, "remove", lambda self, bases: None)]


@bug("reset", _crash)
def a_reset_begins_before_its_epochs_are_on_disk() -> list[Patch]:
    original = StateFile.save

    def lazy(self: StateFile, *arguments: Any, durable: bool = False, **more: Any) -> None:
        original(self, *arguments, **more)

    return [(StateFile, "save", lazy)]


@bug("write-ahead log", _fails("no room once"))
def an_append_that_is_committed_is_refused_for_its_checkpoint() -> list[Patch]:
    return [(log, "suppress", lambda *_: nullcontext())]


@bug("write-ahead log", _fails("lost sync"))
def a_checkpoint_reads_a_log_that_is_not_on_disk() -> list[Patch]:
    return [(wal, "_write_again", _nothing)]


@bug("retention", _crash)
def the_manifest_keeps_entries_of_files_that_are_gone() -> list[Patch]:
    def forget(self: Manifest, bases: Any) -> None:
        self._entries = {base: entry for base, entry in self._entries.items() if base in bases}

    return [(Manifest, "forget_all_but", forget)]


@bug("journal", _crash)
def a_commit_of_the_control_plane_is_answered_before_its_fsync() -> list[Patch]:
    return [(standalone, "sync_data", _nothing)]


@bug("journal rewritten", _crash)
def the_journal_is_renamed_before_its_fsync() -> list[Patch]:
    return [(standalone, "sync", _sync_directories_only)]


@bug("journal rewritten", _crash)
def the_name_of_a_rewritten_journal_is_not_synced() -> list[Patch]:
    return [(standalone, "_sync_directory", _nothing)]


@bug("journal", _crash)
def the_identity_is_not_synced() -> list[Patch]:
    return [(disk, "write_atomically", lambda path, content: path.write_bytes(content))]


def killer_of(name: str, root: Path) -> str | None:
    """Return what a crash image or a fault shows of this bug, None if nothing does."""
    _, stage, hunt = BUGS[name]
    subject = next(subject for subject in SUBJECTS if stage in subject.stages)
    with planted(name):
        try:
            return next((failure for _, failure in hunt(subject, root, stage) if failure is not None), None)
        except Exception as error:  # noqa: BLE001 - it shows without any fault
            return f"{subject.name}: {type(error).__name__}: {error}"
