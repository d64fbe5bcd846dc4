"""The highest leader epoch that each replica of a broker has seen: `<data>/epochs.sqlite`.

A replica acts in no epoch that it could forget. An election begins epochs of hundreds of replicas at once, and a start
those of all, so they are in one file, where they share an fsync. Earlier versions have them in each state.sqlite alone;
every save of a fold copies the epoch there, and the higher one counts.

A damaged file is replaced by one with what can be read of it. A replica then knows the epochs of its log and of its
last save, as after the loss of its state.sqlite.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path

import apsw

from portalmq.broker.storage.errors import StorageFault, faults_of, opening_errors
from portalmq.broker.storage.fair_lock import FairLock
from portalmq.broker.storage.files import complete_replacement, make_directory, replace_database
from portalmq.broker.storage.wal import BUSY_TIMEOUT_MS, connect_beside, keep_log, make_durable, set_full_sync

EPOCHS_NAME = "epochs.sqlite"
DDL = """CREATE TABLE epochs (
    topic_id TEXT, partition INTEGER, highest_leader_epoch INTEGER, PRIMARY KEY (topic_id, partition)
) WITHOUT ROWID"""
GET = "SELECT highest_leader_epoch FROM epochs WHERE topic_id = ? AND partition = ?"
PUT = "INSERT OR REPLACE INTO epochs VALUES (?, ?, ?)"

# ReadOnlyError: the header names a newer format.
UNREADABLE = (apsw.CorruptError, apsw.NotADBError, apsw.SQLError, apsw.ReadOnlyError, TypeError, ValueError)

log = logging.getLogger(__name__)

Key = tuple[str, int]


class EpochFile:
    """The epochs by (topic id, partition). It is opened when it is used first. Callers on several threads wait for each
    other. Methods raise StorageError.

    Invariant: `_highest`, once read, is on disk."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / EPOCHS_NAME
        self._highest: dict[Key, int] | None = None
        self._connection: apsw.Connection | None = None
        self._turn = FairLock()

    def highest(self, key: Key) -> int:
        """Return the highest epoch that was saved, -1 if there is none."""
        with self._turn, faults_of(self.path):
            return self._known().get(key, -1)

    def save(self, epochs: Mapping[Key, int]) -> None:
        """Save that these were seen, all or none; durable on return. None falls."""
        with self._turn, faults_of(self.path):
            known = self._known()
            higher = {key: epoch for key, epoch in epochs.items() if epoch > known.get(key, -1)}
            if higher:
                try:
                    with self._open() as connection:  # a transaction
                        connection.executemany(PUT, [(*key, epoch) for key, epoch in higher.items()])
                except UNREADABLE as fault:
                    self._mend(known | higher, fault)
                known |= higher

    def forget(self, topic_id: str) -> None:
        """Forget a topic that is gone for good."""
        with self._turn, faults_of(self.path):
            known = self._known()
            gone = [key for key in known if key[0] == topic_id]
            if gone:
                try:
                    with self._open() as connection:
                        connection.execute("DELETE FROM epochs WHERE topic_id = ?", (topic_id,))
                except UNREADABLE as fault:
                    self._mend({key: epoch for key, epoch in known.items() if key not in gone}, fault)
                for key in gone:
                    del known[key]

    def repair(self, key: Key) -> bool:
        """Write the file again if it does not have this epoch, which this process has read or saved; return whether it
        was written. Reads the disk, and no page in memory."""
        with self._turn, faults_of(self.path):
            known = self._known()
            if key not in known or self._has(key, known[key]):
                return False
            self._replace(known)
            return True

    def _has(self, key: Key, epoch: int) -> bool:
        if not self.path.exists():
            return False
        try:
            with contextlib.closing(connect_beside(self.path)) as connection:
                return bool(connection.execute(GET, key).get == epoch)
        except UNREADABLE:
            return False

    def close(self) -> None:
        """Close the file until it is used again."""
        with self._turn:
            connection, self._connection = self._connection, None
            if connection is not None:
                with contextlib.suppress(apsw.Error):  # all of it is on disk, in the write-ahead log
                    connection.close(True)

    # --- the file -----------------------------------------------------------------------------------------------

    def _known(self) -> dict[Key, int]:
        if self._highest is None:
            self._highest = self._read() if complete_replacement(self.path) else {}
        return self._highest

    def _read(self) -> dict[Key, int]:
        found: dict[Key, int] = {}
        try:
            for topic_id, number, epoch in self._open().execute("SELECT * FROM epochs"):
                found[str(topic_id), int(number)] = int(epoch)
        except UNREADABLE as fault:
            self._mend(found, fault)
        return found

    def _mend(self, epochs: dict[Key, int], fault: Exception) -> None:
        log.critical("%s is damaged, and is written again with %d epochs: %s", self.path, len(epochs), fault)
        self._replace(epochs)

    def _replace(self, epochs: dict[Key, int]) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(True)
        with contextlib.closing(apsw.Connection(":memory:")) as draft:
            draft.execute(DDL)
            draft.executemany(PUT, [(*key, epoch) for key, epoch in epochs.items()])
            image = draft.serialize("main")
        replace_database(self.path, image)

    def _open(self) -> apsw.Connection:
        if self._connection is not None:
            return self._connection
        if not complete_replacement(self.path):
            make_directory(self.path.parent)
            self._replace(self._highest or {})
        connection = apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READWRITE)
        keep_log(connection)
        try:
            connection.set_busy_timeout(BUSY_TIMEOUT_MS)
            with opening_errors():
                mode = connection.execute("PRAGMA journal_mode = WAL").get
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA trusted_schema = OFF")
            set_full_sync(connection)
            if mode != "wal":
                raise StorageFault(f"{self.path}: SQLite refused WAL (a network file system?)")
            make_durable(connection)
        except BaseException:
            connection.close(True)
            raise
        self._connection = connection
        return connection
