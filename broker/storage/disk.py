"""The data directory: its identity, its lock for one broker, and its free space.

A full disk stops more than writes: SQLite can then neither delete nor checkpoint, so retention cannot free the missing
space. Hence two measures. Below a low-water mark the broker refuses new messages (507) while its own work still has
space. And it can delete a ballast file if even that was not enough.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from portalmq.broker.storage.errors import CorruptFile, StorageError, StorageFault, faults_of
from portalmq.broker.storage.files import make_directory, sync_directory, write_atomically
from portalmq.system import allocate, open_locked

BROKERS_FILE = "brokers.json"
LOW_WATER_BYTES = 512 * 1024 * 1024
BALLAST_BYTES = 16 * 1024 * 1024
CHECK_INTERVAL_MS = 100


class DirectoryInUse(StorageError):
    """Another broker process uses this data directory."""


class WrongCluster(StorageError):
    """The data directory belongs to another cluster or another broker."""


class DiskGuard:
    """A monitor of the free space under `data_dir`, with a reserve there."""

    def __init__(
        self, data_dir: Path, *, low_water_bytes: int = LOW_WATER_BYTES, ballast_bytes: int = BALLAST_BYTES
    ) -> None:
        self.data_dir = data_dir
        self.low_water_bytes = low_water_bytes
        self.ballast_path = data_dir / "ballast"
        self._checked_at_ms: int | None = None
        self._full = False
        if ballast_bytes > 0:
            self._take_ballast(ballast_bytes)

    def _take_ballast(self, size: int) -> None:
        """Reserve `size` bytes. Without room there is no reserve: `full` reports it soon enough."""
        try:
            descriptor = os.open(self.ballast_path, os.O_RDWR | os.O_CREAT, 0o640)
            try:
                allocate(descriptor, size)
                os.ftruncate(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.ballast_path.unlink()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFault(f"{self.ballast_path}: {error}") from error

    def free_bytes(self) -> int:
        """Return the bytes that an ordinary user may still write there."""
        with faults_of(self.data_dir):
            status = os.statvfs(self.data_dir)
            return status.f_bavail * status.f_frsize

    def full(self, now_ms: int) -> bool:
        """Return whether new messages must be refused. Asks the file system at most every 100 ms of `now_ms`."""
        checked_at_ms = self._checked_at_ms
        if checked_at_ms is None or not 0 <= now_ms - checked_at_ms < CHECK_INTERVAL_MS:
            self._full = self.free_bytes() < self.low_water_bytes
            self._checked_at_ms = now_ms
        return self._full

    def release(self) -> bool:
        """Delete the ballast, to make room for deletions. Return False if there is none."""
        with faults_of(self.ballast_path):
            try:
                self.ballast_path.unlink()
            except FileNotFoundError:
                return False
            sync_directory(self.data_dir)
        self._checked_at_ms = None
        return True


class StoreIdentity(msgspec.Struct, frozen=True):
    """The owner of the data. `store_uuid` distinguishes this disk from an emptied one in its place."""

    cluster_id: str
    broker_id: int
    store_uuid: str


Join = Callable[[StoreIdentity | None, str], tuple[str, int]]


@dataclass(frozen=True, slots=True)
class DataDirectory:
    """A broker's data directory, locked for this process and, if it forks, its children."""

    path: Path
    identity: StoreIdentity
    _lock: int

    @classmethod
    def open(
        cls, path: Path, *, cluster_id: str | None = None, broker_id: int | None = None, join: Join | None = None
    ) -> DataDirectory:
        """Lock `path`, created if missing. Arguments of None are taken from the directory; a new one gets an id of its
        own.

        `join`, called once the directory is locked, returns the cluster and broker that it must belong to. It gets
        the identity that is there, if any, and the store uuid. Raise DirectoryInUse, WrongCluster or StorageFault.
        """
        with faults_of(path):
            make_directory(path)
            lock = _lock(path / "lock")
            try:
                identity = _identity(path / "identity.json", cluster_id, broker_id, join)
            except BaseException:
                os.close(lock)
                raise
        return cls(path, identity, lock)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)


def _lock(path: Path) -> int:
    try:
        descriptor = open_locked(path, 0o640)
    except BlockingIOError:
        holder = holder_of(path.parent) or "unknown"
        raise DirectoryInUse(
            f"{path.parent} is used by the process {holder}: stop it, or choose another --data-dir"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def holder_of(path: Path) -> str | None:
    """Return the pid of the process that has locked the data directory `path`; None if no process has."""
    try:
        descriptor = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
    finally:
        os.close(descriptor)
    return None


def read_identity(path: Path) -> StoreIdentity | None:
    """Return the identity of the data directory `path`; None for a new one. Raise StorageFault if it cannot be read."""
    file = path / "identity.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=StoreIdentity)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{file} is damaged: {error}; restore it from a copy") from error


def read_brokers(path: Path) -> dict[int, str]:
    """Return the URLs of the cluster's brokers, as the data directory `path` lists them; empty without a list. Raise
    CorruptFile."""
    file = path / BROKERS_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[int, str], strict=False)
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{file} is damaged: {error}") from error


def _identity(path: Path, cluster_id: str | None, broker_id: int | None, join: Join | None) -> StoreIdentity:
    identity = read_identity(path.parent)
    store_uuid = uuid.uuid4().hex if identity is None else identity.store_uuid
    if join is not None:
        cluster_id, broker_id = join(identity, store_uuid)
    if identity is None:
        identity = StoreIdentity(
            cluster_id=uuid.uuid4().hex if cluster_id is None else cluster_id,
            broker_id=1 if broker_id is None else broker_id,
            store_uuid=store_uuid,
        )
        write_atomically(path, msgspec.json.encode(identity) + b"\n")
        return identity
    sync_directory(path.parent)  # the sync of its name may have failed, and it was read from memory
    if cluster_id is not None and cluster_id != identity.cluster_id:
        raise WrongCluster(
            f"{path.parent} holds data of the cluster {identity.cluster_id}, this is the cluster {cluster_id}:"
            " choose another --data-dir, or adopt the data on purpose"
        )
    if broker_id is not None and broker_id != identity.broker_id:
        raise WrongCluster(
            f"{path.parent} holds data of the broker {identity.broker_id}, this is the broker {broker_id}:"
            " choose another --data-dir or --broker-id"
        )
    return identity
